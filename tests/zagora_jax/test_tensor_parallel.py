"""Steps of which every device computes a part of each layer, against the same steps on one device."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import eight_devices
import jax
import numpy as np
import oracles
import pytest
from flax import nnx

from models.config import ModelConfig
from models.llama import Llama
from models.lora import initial_adapter
from models.parameters import split
from sharding.mesh import make_mesh
from zagora_jax.arrange import arrange
from zagora_jax.arrangement import Arrangement, Recipe
from zagora_jax.base import BaseModel, open_base
from zagora_jax.checkpoints.known_models import KNOWN_MODELS
from zagora_jax.config import TrainConfig
from zagora_jax.data.batches import Batch
from zagora_jax.distribution import Distribution
from zagora_jax.errors import UserError
from zagora_jax.optimizer import make_optimizer, make_schedule
from zagora_jax.option_groups import LoraConfig
from zagora_jax.pipeline import Pipeline
from zagora_jax.step import ForwardOptions, make_train_step
from zagora_jax.tensor_parts import tensor_segments
from zagora_jax.train_state import initial_state

# Both sides compute in float32, and differ in the order of sums over devices alone.
TOLERANCE = 2e-4

PLAIN = ForwardOptions(kernel="reference", remat="none", segmented=True)  # compiles fast

# No size here is a multiple of the devices along tensor, but for 2: 4 key/value heads, 100 feed-forward columns, 323
# words; rows of 72 weights break the blocks of 64, and a head has 10 of them.
ODD = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 10,
    "vocab_size": 323,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
}


class Case(NamedTuple):
    """A mesh, and what trains on it."""

    mesh: dict[str, int]
    quantization: str = "nf4"
    steps: int = 3
    optimizer: str = "adamw"
    compression: str = "none"
    exchange: str = "synchronous"
    options: ForwardOptions = ForwardOptions(kernel="chunked", remat="full", segmented=True)
    model: str = "llama"
    config: dict[str, Any] = ODD

    def __str__(self) -> str:
        return "-".join([self.model, self.quantization, *(f"{axis}{size}" for axis, size in self.mesh.items())])


class Subject(NamedTuple):
    base: BaseModel
    graph: nnx.GraphDef
    batches: list[Batch]


def subject_of(case: Case, folder) -> Subject:
    if not folder.exists():
        oracles.tiny_model(folder, case.model, **case.config)
    lora = LoraConfig(rank=4, alpha=8, dropout=0.1)
    base = open_base(str(folder), quantization=case.quantization, dtype="float32", lora=lora)
    graph, _, _ = split(base.model)
    drawn = [oracles.random_batch(seed, (2, 4, 24), packed=True) for seed in range(case.steps)]
    batches = [Batch(*(np.array(getattr(batch, name)) for name in Batch._fields)) for batch in drawn]
    batches[-1].weights[1] = 0  # a short last window: nothing in its second micro-batch, nor in the last rows
    batches[-1].weights[0, 1:] = 0
    return Subject(base, graph, batches)


def train(case: Case, subject: Subject, arrangement: Arrangement | None):
    """Losses and gradient norms of all steps, and the adapters in the end."""
    schedule = make_schedule("cosine", 1e-3, 0, case.steps + 2)
    optimizer = make_optimizer(case.optimizer, schedule, 0.01)
    whole = initial_state(initial_adapter(split(subject.base.model)[2], seed=0), optimizer, "float32")
    if arrangement is None:
        step = make_train_step(subject.graph, optimizer, schedule, PLAIN, max_grad_norm=1.0, dropout_seed=0)
        step, state, frozen = jax.jit(step), whole, subject.base.load()
    else:
        whole = arrangement.begin(whole)
        recipe = Recipe(
            optimizer, schedule, case.options, max_grad_norm=1.0, dropout_seed=0, total_steps=case.steps + 2
        )
        step = arrangement.compile_training(recipe, whole, subject.batches[0])
        state, frozen = arrangement.put_state(whole), arrangement.load(partial(subject.base.load, lambda _: None))
    numbers = []
    for batch in subject.batches:
        state, metrics = step(state, frozen, batch)
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    if arrangement is not None:
        state, _ = step.finish(state)
        state = arrangement.whole_state(state, whole)
    return np.array(numbers), [np.asarray(leaf) for leaf in jax.tree.leaves(state.adapters)]


def arrangement_of(case: Case, subject: Subject) -> Arrangement:
    mesh = make_mesh(case.mesh, jax.devices()[: int(np.prod(list(case.mesh.values())))])
    if "stage" in case.mesh:
        return Pipeline(mesh, subject.base.model, [1] * case.mesh["stage"])
    return Distribution(mesh, subject.base.model, case.compression, case.exchange)  # type: ignore[arg-type]


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


slow = pytest.mark.slow
CASES = [
    Case({"tensor": 3, "data": 2}),
    Case({"data": 2, "fsdp": 2, "tensor": 2}, "none", options=PLAIN, config=ODD | {"tie_word_embeddings": False}),
    *(
        pytest.param(case, marks=slow)
        for case in (
            Case({"tensor": 2}, steps=20),
            Case({"tensor": 3}, "none", steps=20),
            Case({"tensor": 4}, steps=20, optimizer="adamw_8bit"),
            Case({"tensor": 2, "fsdp": 2}, steps=20),
            Case({"tensor": 2, "data": 2}, "none", steps=20),
            Case({"tensor": 3, "fsdp": 2}, steps=20),
            Case({"data": 2, "fsdp": 2, "tensor": 2}, steps=20),
            Case({"data": 2, "tensor": 3}, exchange="overlapped"),
            Case({"stage": 2, "tensor": 2}),
            Case({"tensor": 3}, "hqq"),
            Case({"tensor": 2, "fsdp": 2}, "int8"),
            Case({"tensor": 2, "fsdp": 2}, model="phi3", config={}),
            Case({"tensor": 2}, model="qwen3", config={"head_dim": 24}),
            Case({"tensor": 2, "fsdp": 2}, model="gemma2", config={"head_dim": 16, "sliding_window": 9}),
        )
    ),
]


@pytest.mark.eight_devices
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_of_layers_train_as_whole_ones_do(case: Case, tmp_path) -> None:
    subject = subject_of(case, tmp_path / "model")
    expected, one = train(case, subject, None)
    found, adapters = train(case, subject, arrangement_of(case, subject))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    # Adam divides by the gradient's own size, so an element whose gradient is near zero can move by up to the learning
    # rate, 1e-3 a step, whatever rounding makes of its sign; the others agree far better.
    assert max(np.abs(a - b).max() for a, b in zip(adapters, one, strict=True)) < 1e-4


@pytest.mark.eight_devices
def test_compressed_gradients_over_both_axes_train_nearly_alike(tmp_path) -> None:
    case = Case({"fsdp": 2, "tensor": 2}, "none", compression="int8", options=PLAIN)
    subject = subject_of(case, tmp_path / "model")
    plain, _ = train(case, subject, None)
    found, _ = train(case, subject, arrangement_of(case, subject))
    # A gradient rounded to 8 bits is off by a part in 254 of its block's largest number, an update of Adam by about as
    # much, and a loss by that share of what the updates have moved: less than a tenth of it.
    np.testing.assert_allclose(found[:, 0], plain[:, 0], rtol=5e-3)
    assert np.abs(found[1:] / plain[1:] - 1).max() > 1e-6  # something was rounded


def config_of(name: str) -> ModelConfig:
    return ModelConfig.from_hf(KNOWN_MODELS[name])


def test_more_devices_than_key_value_heads_are_refused() -> None:
    with pytest.raises(UserError, match=r"--mesh.tensor 4: .* the model has 2; give --mesh.tensor 2 at most"):
        tensor_segments(ModelConfig.from_hf({**KNOWN_MODELS["llama-3-8b"], "num_key_value_heads": 2}), 4)


@pytest.mark.eight_devices
def test_they_are_refused_before_any_weight_is_read() -> None:
    config = TrainConfig(model="m", strategy="tensor")
    model = Llama(config_of("tinyllama-1.1b"), quantization="nf4", dtype=jax.numpy.dtype("bfloat16"))
    with pytest.raises(UserError, match=r"--mesh.tensor 8: .* the model has 4; give --mesh.tensor 4 at most"):
        arrange(config, model)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        (name, devices)
        for name in sorted(KNOWN_MODELS)
        for devices in (2, 3, 4)
        if devices <= config_of(name).num_kv_heads  # more are refused: see the test above
    ],
)
def test_parts_hold_all_and_break_no_block(name: str, devices: int) -> None:
    config = config_of(name)
    segments = tensor_segments(config, devices)
    for (whole, size), *_ in segments.values():
        assert size * devices >= whole
    ((heads, own_heads),), ((keys, own_keys),) = segments["heads"], segments["kv_heads"]
    assert own_heads * keys == own_keys * heads  # the query heads of each key/value head stay with it
    ((ffn, own),) = segments["ffn"]
    assert own % 64 == 0
    assert own * devices <= 1.05 * ffn


@pytest.mark.eight_devices
@pytest.mark.parametrize("mesh", [{"tensor": 3}, {"tensor": 4}, {"tensor": 3, "fsdp": 2}], ids=str)
@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_a_device_holds_its_share_of_llama_3_8b(mesh: dict[str, int], quantization: str) -> None:
    model = Llama(config_of("llama-3-8b"), quantization=quantization, dtype=jax.numpy.dtype("bfloat16"))
    devices = int(np.prod(list(mesh.values())))
    distribution = Distribution(make_mesh(mesh, jax.devices()[:devices]), model)
    held = sum(spread.device_bytes for spread in jax.tree.leaves(distribution.frozen))
    _, frozen, _ = split(model)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(frozen))
    assert whole / devices <= held <= 1.1 * whole / devices
