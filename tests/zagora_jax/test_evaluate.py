"""The loss over held-out rows against transformers, and what it does not depend on."""

import numpy as np
import pytest
from oracles import tiny_llama, transformers_logits
from runs import finished_run, recorder, tiny_config, write_rows

from zagora_jax import evaluate as command
from zagora_jax.base import open_base
from zagora_jax.commands import EvaluateConfig
from zagora_jax.data.batches import Batch
from zagora_jax.data.prepare import evaluation_batches
from zagora_jax.errors import UserError
from zagora_jax.evaluate_run import evaluate_run
from zagora_jax.evaluation import Evaluation, evaluate
from zagora_jax.option_groups import MeshConfig


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    tiny_llama(folder / "model")
    write_rows(folder / "held_out.jsonl", 7)
    write_rows(folder / "other.jsonl", 2, first=50)
    config = tiny_config(
        folder / "model",
        folder / "run",
        folder / "rows.jsonl",
        quantization="none",
        eval_data=[folder / "held_out.jsonl"],
    )
    return finished_run(folder / "run", config)


@pytest.fixture(scope="module")
def measured(run):
    return evaluate_run(EvaluateConfig(run=run.path), recorder()[0])


def test_the_loss_is_that_of_transformers_and_peft(run, measured):
    pytest.importorskip("torch")
    config = run.read_config()
    base = open_base(config.model, quantization="none", dtype="float32", lora=config.lora)
    total = count = 0.0
    for batch in evaluation_batches(config, base, 1, recorder()[0]).epoch(0):
        logits = transformers_logits(run.path.parent / "model", batch.tokens[0], adapter=run.adapter).astype(float)
        logits -= logits.max(axis=-1, keepdims=True)
        losses = (
            np.log(np.exp(logits).sum(axis=-1)) - np.take_along_axis(logits, batch.targets[0][..., None], -1)[..., 0]
        )
        total += (losses * batch.weights[0]).sum()
        count += batch.weights.sum()
    assert measured.supervised_tokens == count > 0
    # float32 logits are off by some 1e-5 of their scale (see test_parity), and so is each token's loss at most.
    assert measured.loss == pytest.approx(total / count, rel=1e-4)


def test_a_run_on_more_devices_than_here_is_evaluated_too(run, measured, tmp_path):
    far = {"mesh": MeshConfig(data=16, fsdp=16), "devices": [0, 999], "gradient_compression": "int8"}
    spread = run.read_config().model_copy(update=far | {"gradient_exchange": "delayed"})
    there = finished_run(tmp_path / "run", spread)
    assert evaluate_run(EvaluateConfig(run=there.path), recorder()[0]) == measured
    stages = {"strategy": "layerwise", "mesh": MeshConfig(stage=2), "stage_layers": [1, 1], "stage_form": "one-jit"}
    there = finished_run(tmp_path / "stages", run.read_config().model_copy(update=stages))
    found = evaluate_run(EvaluateConfig(run=there.path), recorder()[0])
    assert found.loss == pytest.approx(measured.loss, rel=1e-6)  # the same float32 numbers in another program


def test_the_loss_does_not_depend_on_how_rows_are_batched(run, measured, tmp_path):
    packed = finished_run(tmp_path / "run", run.read_config().model_copy(update={"packing": True}))
    for config in (
        EvaluateConfig(run=packed.path, sequence_length=80),
        EvaluateConfig(run=run.path, micro_batch_size=5),
    ):
        found = evaluate_run(config, recorder()[0])
        assert found.supervised_tokens == measured.supervised_tokens
        assert found.loss == pytest.approx(measured.loss, rel=1e-6)  # the same float32 numbers in another order


def test_other_rows_can_be_given(run, measured):
    found = evaluate_run(EvaluateConfig(run=run.path, data=[run.path.parent / "other.jsonl"]), recorder()[0])
    assert 0 < found.supervised_tokens < measured.supervised_tokens


def test_a_run_without_held_out_rows_needs_data(run, tmp_path):
    other = finished_run(tmp_path / "run", run.read_config().model_copy(update={"eval_data": None}))
    with pytest.raises(UserError, match="the run has no eval_data, no eval_fraction and no eval_sets; give --data"):
        evaluate_run(EvaluateConfig(run=other.path), recorder()[0])


def test_rows_without_a_supervised_token_are_refused(run, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    with pytest.raises(UserError, match="no row is left"):
        evaluate_run(EvaluateConfig(run=run.path, data=[tmp_path / "rows.jsonl"]), recorder()[0])


def test_the_command_prints_the_loss(run, measured, capsys):
    command.main(EvaluateConfig(run=run.path))
    printed = capsys.readouterr().out
    assert f"loss {measured.loss:.4f} over {measured.supervised_tokens} supervised tokens" in printed


def sums(totals_and_counts):
    """Batches, and a step that gives each its loss sum and its number of targets."""
    batches = [
        Batch(tokens=(total, count), targets=0, weights=np.ones(count), segment_ids=0, positions=0)
        for total, count in totals_and_counts
    ]
    return (lambda _adapters, batch: batch.tokens), batches


def test_the_loss_is_sum_over_count_and_no_mean_of_means():
    """A batch without targets counts for nothing."""
    step, batches = sums([(5.0, 1), (9.0, 9), (0.0, 0)])
    assert evaluate(step, None, batches) == Evaluation(loss=1.4, supervised_tokens=10)


def test_no_targets_at_all_are_an_error():
    step, batches = sums([(0.0, 0), (0.0, 0)])
    with pytest.raises(ValueError, match="no supervised token"):
        evaluate(step, None, batches)
