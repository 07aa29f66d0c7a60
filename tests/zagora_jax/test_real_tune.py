"""SmolLM2-135M against transformers, and its fine-tuning against PEFT over bitsandbytes' NF4."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import safetensors.numpy
from conftest import REPOSITORY
from flax import nnx

from models.lora import initial_adapter
from models.parameters import split
from zagora_jax.adapter import save_adapter
from zagora_jax.base import open_base
from zagora_jax.data.batches import Batches
from zagora_jax.data.tokenize import Preparation, tokenize_rows
from zagora_jax.optimizer import make_optimizer, make_schedule
from zagora_jax.option_groups import LoraConfig
from zagora_jax.step import ForwardOptions, make_evaluation_step, make_train_step
from zagora_jax.train_state import initial_state

pytest.importorskip("torch")

STEPS = 30
LORA = LoraConfig(rank=8, alpha=16)
OPTIONS = ForwardOptions(kernel="chunked", remat="none", segmented=True)
WEIGHT_DECAY, MAX_GRAD_NORM = 0.01, 1.0

# Both sides compute in float32 and differ in the order of sums: some 10^-6 of a loss at first, to which every step
# adds. A wrong scale, mask, decay, clipping or rate shows as several per cent.
CURVE_TOLERANCE = 1e-3
NORM_TOLERANCE = 1e-2
LOGIT_TOLERANCE = 2e-4  # of the largest logit, as in test_parity.py


@pytest.fixture(autouse=True)
def one_thread_of_torch():
    """Two threads on two busy cores wait for each other most of the time."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(smollm2, tmp_path_factory):
    """The model as a Hugging Face directory, of the tensors that our reader finds in the GGUF file."""
    checkpoint = open_base(str(smollm2), quantization="none", dtype="float32", lora=None).checkpoint
    directory = tmp_path_factory.mktemp("smollm2")
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(checkpoint.config))
    return directory


def test_logits_equal_those_of_transformers(smollm2, folder):
    base = open_base(str(smollm2), quantization="none", dtype="float32", lora=None)
    graph, _, adapters = split(base.model)
    text = (REPOSITORY / "examples" / "zagora" / "train.jsonl").read_text("utf-8")
    tokens = np.asarray(base.tokenizer()(text).input_ids[:160], np.int32)[None]

    @jax.jit
    def logits(frozen):
        model = nnx.merge(graph, frozen, adapters)
        positions = jnp.arange(tokens.shape[1])[None]
        return model.logits(model.hidden_states(tokens, positions, None, kernel="chunked"))

    ours, theirs = np.asarray(logits(base.load())), oracles.transformers_logits(folder, tokens)
    for position in (0, 1, 7, 100, tokens.shape[1] - 1):
        scale = np.abs(theirs[:, position]).max()
        assert np.abs(ours[:, position] - theirs[:, position]).max() <= LOGIT_TOLERANCE * scale, position


def test_the_training_curve_is_that_of_peft_over_bitsandbytes(smollm2, folder, tmp_path):
    base = open_base(str(smollm2), quantization="nf4", dtype="float32", lora=LORA)
    graph, _, declared = split(base.model)
    frozen, adapters = base.load(), initial_adapter(declared, seed=0)
    save_adapter(tmp_path / "initial", base.model, adapters, LORA, base.name, trained=False)

    training, heldout = batches(base, "train", 1), batches(base, "heldout", 4)
    schedule = make_schedule("cosine", 1e-3, warmup_steps=3, total_steps=STEPS)
    optimizer = make_optimizer("adamw", schedule, WEIGHT_DECAY)
    state = initial_state(adapters, optimizer, "float32")
    step = jax.jit(make_train_step(graph, optimizer, schedule, OPTIONS, max_grad_norm=MAX_GRAD_NORM, dropout_seed=None))
    evaluate = jax.jit(make_evaluation_step(graph, OPTIONS))

    def heldout_loss(adapters):
        total, count = evaluate(adapters, frozen, heldout.at(0))
        return float(total / count)

    steps = [training.at(number) for number in range(STEPS)]
    before, metrics = heldout_loss(state.adapters), []
    for batch in steps:
        state, numbers = step(state, frozen, batch)
        metrics.append(jax.device_get(numbers))
    after = heldout_loss(state.adapters)

    rates = [float(schedule(number)) for number in range(STEPS)]
    theirs = oracles.peft_training_run(
        folder, tmp_path / "initial", steps, rates, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM
    )
    np.testing.assert_allclose([m["learning_rate"] for m in metrics], rates, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose([m["loss"] for m in metrics], theirs.losses, rtol=CURVE_TOLERANCE)
    np.testing.assert_allclose([m["grad_norm"] for m in metrics], theirs.gradient_norms, rtol=NORM_TOLERANCE)

    oracles.write_adapter(tmp_path / "final", theirs.adapter, alpha=LORA.alpha)
    theirs_before, theirs_after = (peft_loss(folder, tmp_path / name, heldout.at(0)) for name in ("initial", "final"))
    assert before == pytest.approx(theirs_before, rel=CURVE_TOLERANCE)
    assert after == pytest.approx(theirs_after, rel=CURVE_TOLERANCE)
    assert after < 0.7 * before


def batches(base, name, sequences):
    rows = tokenize_rows([REPOSITORY / "examples" / "zagora" / f"{name}.jsonl"], base.tokenizer(), Preparation(64))
    return Batches(rows.examples, sequence_length=64, packing=True, micro_batch_size=sequences)


def peft_loss(folder, adapter, batch):
    """The loss of one micro-batch under PEFT, from its logits."""
    logits = oracles.transformers_logits(
        folder,
        batch.tokens[0],
        positions=batch.positions[0],
        segment_ids=batch.segment_ids[0],
        adapter=adapter,
        quantization="nf4",
    ).astype(np.float64)
    chosen = np.take_along_axis(logits, batch.targets[0][..., None], axis=-1)[..., 0]
    losses = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1) - chosen
    return (losses * batch.weights[0]).sum() / batch.weights.sum()
