"""What a run does between its steps if it is asked to: early ends, the best checkpoint, samples, several sets."""

import json
import shutil

import eight_devices
import numpy as np
import pytest
from oracles import tiny_llama
from runs import Listener, compiled_once, numbers, recorder, tiny_config, write_rows
from safetensors.numpy import load_file

from zagora_jax import trainer
from zagora_jax.callbacks import Callback, Sample, Sampled
from zagora_jax.checkpoints.run_state import SavedStates
from zagora_jax.commands import EvaluateConfig
from zagora_jax.config import TrainConfig
from zagora_jax.distribution import Distribution, SpreadStep
from zagora_jax.evaluate_run import evaluate_run
from zagora_jax.evaluation import Evaluation
from zagora_jax.generation import Sampling, open_generator
from zagora_jax.option_groups import MeshConfig
from zagora_jax.run_directory import read_metrics
from zagora_jax.trainer import train

PROMPTS = ["What is 3?", "What is 19?", "Who?"]


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("amid")
    tiny_llama(folder / "model")
    write_rows(folder / "rows.jsonl", 12)
    write_rows(folder / "held_out.jsonl", 4, first=20)
    with compiled_once(folder / "programs"):
        yield folder


def configure(folder, output, **options):
    return tiny_config(folder / "model", output, folder / "rows.jsonl", **{"max_steps": 12, "eval_every": 2} | options)


class Breaking(Callback):
    """Breaks a run off behind a step."""

    def __init__(self, step):
        self.step = step

    def on_step(self, event):
        if event.step == self.step:
            raise ZeroDivisionError


def test_a_run_ends_early_with_its_best_adapter(folder, tmp_path, monkeypatch):
    """Also where it was broken off on the way."""
    losses = {"before": 9.0, 2: 5.0, 4: 4.0, 6: 4.5, 8: 4.6, "last": 4.6, "best": 4.0}
    left = []
    monkeypatch.setattr(trainer, "compile_sets", lambda *_: lambda _: Evaluation(losses[left.pop(0)], 10))
    options = {
        "eval_data": [folder / "held_out.jsonl"],
        "early_stopping": {"patience": 2},
        "keep_best": True,
        "keep_checkpoints": 1,
        "save_every": 100,
    }
    left += ["before", 2, 4, 6, 8, "last", "best"]
    config = configure(folder, tmp_path / "unbroken", **options)
    reporter, printed = recorder()
    result = train(config, reporter)
    assert (result.steps, result.loss_before, result.loss_after) == (8, 9.0, 4.0)
    assert "the run ends behind step 8 of 12: the eval loss was not below 4.0000 in 2 evaluations" in printed()
    report = json.loads((tmp_path / "unbroken/report.json").read_text())
    assert (report["best_step"], report["loss_last"], report["stopped"]["step"]) == (4, 4.6, 8)
    states = SavedStates(tmp_path / "unbroken/checkpoints")
    assert states.steps() == [4, 8]
    adapter = load_file(tmp_path / "unbroken/adapter/adapter_model.safetensors")
    at_best = np.concatenate([np.ravel(x) for x in adapter.values()])

    left += ["before", 2, 4, 6]
    broken = configure(folder, tmp_path / "broken", **options)
    with pytest.raises(ZeroDivisionError):
        train(broken, recorder()[0], [Breaking(7)])
    left += [8, "last", "best"]
    assert train(broken.model_copy(update={"resume": True}), recorder()[0]).loss_after == 4.0
    assert numbers(tmp_path / "broken") == numbers(tmp_path / "unbroken")
    again = load_file(tmp_path / "broken/adapter/adapter_model.safetensors")
    assert np.array_equal(at_best, np.concatenate([np.ravel(again[name]) for name in adapter]))

    reporter, printed = recorder()
    assert train(config.model_copy(update={"resume": True}), reporter) == result
    assert "finished already, at step 8 of 12: the eval loss" in printed()
    assert not left


def test_more_patience_goes_on(folder, tmp_path, monkeypatch):
    left = [9.0, 5.0, 5.0, 5.0, 5.0]  # before, steps 2 and 4, last
    monkeypatch.setattr(trainer, "compile_sets", lambda *_: lambda _: Evaluation(left.pop(0), 10))
    options = {"eval_data": [folder / "held_out.jsonl"], "max_steps": 6}
    config = configure(folder, tmp_path / "run", early_stopping={"patience": 1}, **options)
    assert train(config, recorder()[0]).steps == 4
    patient = configure(folder, tmp_path / "run", early_stopping={"patience": 3}, resume=True, **options)
    assert train(patient, recorder()[0]).steps == 6


def test_samples_are_what_the_tuned_model_says(folder, tmp_path):
    samples = {"prompts": PROMPTS, "every": 2, "max_new_tokens": 4}
    config = configure(folder, tmp_path / "run", max_steps=4, eval_every=0, samples=samples, save_every=2)
    listener = Listener()
    train(config, recorder()[0], [listener])
    told = [event for event in listener.events if isinstance(event, Sampled)]
    assert [event.step for event in told] == [0, 2, 4]
    written = read_metrics(tmp_path / "run/samples.jsonl")
    assert written == [
        {"step": event.step, "prompt": sample.prompt, "text": sample.text} for event in told for sample in event.samples
    ]
    texts = open_generator(str(tmp_path / "run")).answer(PROMPTS, Sampling(max_new_tokens=4))
    assert told[2].samples == [Sample(prompt, text) for prompt, text in zip(PROMPTS, texts, strict=True)]
    assert told[2].samples != told[0].samples

    shutil.copytree(tmp_path / "run", tmp_path / "again")
    resumed = config.model_copy(update={"output": tmp_path / "again", "resume": tmp_path / "again/checkpoints/2"})
    train(resumed, recorder()[0])
    assert read_metrics(tmp_path / "again/samples.jsonl") == written


PROGRAMS = {"strategy": "layerwise", "stage_form": "programs", "stage_layers": [1, 1]}
WAYS_TO_SAMPLE = {
    "fsdp and replicas": {"mesh": {"data": 2, "fsdp": 2}},
    "tensor": {"mesh": {"data": 2, "tensor": 2}},
    "streaming": {"strategy": "streaming", "mesh": {"data": 2}, "offload": {"weights": "all"}},
    "from the disk": {
        "strategy": "streaming",
        "mesh": {"fsdp": 2},
        "offload": {"weights_from": "disk", "weights": "all"},
    },
    "stages in one program": {"strategy": "layerwise", "stage_form": "one-jit", "mesh": {"stage": 2, "data": 2}},
    "a program for each stage": PROGRAMS | {"mesh": {"stage": 2, "fsdp": 2}},
    "stages that stream": PROGRAMS | {"mesh": {"stage": 2}, "offload": {"weights": "all", "embedding": True}},
}


QUICK = ("stages in one program",)


def sampled(folder, output, way):
    """Train in a way of WAYS_TO_SAMPLE, and return what was sampled on it."""
    mesh = MeshConfig(**way["mesh"])
    rows = (mesh.data or 1) * (mesh.fsdp or 1)
    count = rows * (mesh.tensor or 1) * (mesh.stage or 1)
    options = {**way, "mesh": mesh, "devices": list(range(count)), "micro_batch_size": 4 // rows}
    options |= {"remat": "full", "quantized_cache": str(folder), "eval_every": 0, "max_steps": 2}
    samples = {"prompts": PROMPTS, "every": 1, "max_new_tokens": 4}
    train(configure(folder, output, samples=samples, **options), recorder()[0])
    return read_metrics(output / "samples.jsonl")


@pytest.fixture(scope="module")
def sampled_by_one(folder):
    return sampled(folder, folder / "one", {"mesh": {}})


@pytest.mark.eight_devices
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WAYS_TO_SAMPLE]
)
def test_samples_do_not_depend_on_how_the_model_is_spread(name, folder, tmp_path, sampled_by_one):
    """Three prompts, of which devices, stages and host memory hold parts of the weights and of the words."""
    assert len({line["text"] for line in sampled_by_one}) > len(PROMPTS)  # they change with the training
    assert sampled(folder, tmp_path / "run", WAYS_TO_SAMPLE[name]) == sampled_by_one


def test_the_layout_is_written_again_when_layers_have_moved(folder, tmp_path, monkeypatch):
    take_step, layout = SpreadStep.__call__, Distribution.layout
    cuts = [[1, 1], [2, 0]]

    def moving(self, state, frozen, batch):
        state, metrics = take_step(self, state, frozen, batch)
        cuts.pop(0)
        return state, metrics if cuts else {**metrics, "moved_layers": np.int32(1)}

    monkeypatch.setattr(SpreadStep, "__call__", moving)
    monkeypatch.setattr(Distribution, "layout", lambda *given: {**layout(*given), "layers_of_stages": cuts[:1]})
    monkeypatch.setattr(Distribution, "facts", lambda _: {"layers of each stage": str(cuts[:1])})
    train(configure(folder, tmp_path / "run", max_steps=2, eval_every=0), recorder()[0])
    assert json.loads((tmp_path / "run/layout.json").read_text())["layers_of_stages"] == []
    assert json.loads((tmp_path / "run/report.json").read_text())["facts"]["layers of each stage"] == "[]"
    assert [line.get("moved_layers") for line in read_metrics(tmp_path / "run/metrics.jsonl")] == [None, 1]


def test_each_set_has_a_loss_of_its_own(folder, tmp_path):
    held_out = folder / "held_out.jsonl"
    sets = {"eval_sets": [f"known={folder / 'rows.jsonl'}", f"new={held_out}"], "max_steps": 4}
    config = configure(folder, tmp_path / "run", **sets)
    result = train(config, recorder()[0])
    (line,) = (line for line in read_metrics(tmp_path / "run/metrics.jsonl") if line["step"] == 2)
    assert line.keys() >= {"eval_loss", "eval_loss.known", "eval_loss.new"}
    whole = evaluate_run(EvaluateConfig(run=tmp_path / "run"), recorder()[0])
    assert whole.loss == pytest.approx(result.loss_after)
    parts = {
        name: evaluate_run(EvaluateConfig(run=tmp_path / "run", data=[source]), recorder()[0])
        for name, source in (("known", folder / "rows.jsonl"), ("new", held_out))
    }
    assert whole.numbers == pytest.approx({f"loss.{name}": part.loss for name, part in parts.items()})
    tokens = {name: part.supervised_tokens for name, part in parts.items()}
    mean = sum(part.loss * tokens[name] for name, part in parts.items()) / sum(tokens.values())
    assert whole.loss == pytest.approx(mean)  # without a main set, all of them together


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_best": True}, "keep_best goes by the losses of evaluations amid the training: give eval_every too"),
        ({"early_stopping": {"patience": 2}}, "early_stopping.patience goes by the losses"),
        ({"eval_sets": ["rows.jsonl"]}, "expected NAME=SOURCE, such as medical=medical.jsonl"),
        ({"samples": {"every": 2}}, "there are no samples.prompts"),
        (
            {"samples": {"prompts": ["a"]}, "retrieval": {"pooling": "mean"}},
            "samples.prompts does not go with retrieval.pooling",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(model="m", data=["d"], **options)
