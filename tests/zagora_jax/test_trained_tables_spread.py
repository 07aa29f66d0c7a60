"""Tables and norms that are trained, on several devices and streamed, against one device."""

import math
from functools import cache

import eight_devices
import jax
import numpy as np
import oracles
import pytest

from models.lora import initial_adapter
from models.parameters import split
from models.stream_order import stream_order
from sharding.mesh import make_mesh
from sharding.program import memory
from zagora_jax.arrange import arrange
from zagora_jax.arrangement import Recipe
from zagora_jax.base import open_base
from zagora_jax.config import TrainConfig
from zagora_jax.data.batches import Batch
from zagora_jax.distribution import Distribution, wire_bytes
from zagora_jax.errors import UserError
from zagora_jax.optimizer import make_optimizer, make_schedule
from zagora_jax.option_groups import LoraConfig, MeshConfig, OffloadConfig
from zagora_jax.planning.compiled import compile_planned_step
from zagora_jax.planning.micro_batch import Work
from zagora_jax.planning.shapes import Shapes, mesh_shape
from zagora_jax.planning.time_model import exchanged_bytes
from zagora_jax.step import ForwardOptions
from zagora_jax.train_state import initial_state

pytestmark = pytest.mark.eight_devices

STEPS, LAYERS = 3, 2
OPTIONS = ForwardOptions("chunked", "full", segmented=True)
# Both sides compute in float32, and differ in the order of sums over rows and devices alone.
TOLERANCE = 2e-4

KINDS = {
    "untied": {"targets": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens", "norm"]},
    "tied": {"targets": ["down_proj"], "modules_to_save": ["embed_tokens", "q_norm"]},
    "adapters": {"targets": ["q_proj", "embed_tokens", "lm_head"], "use_rslora": True},
    "norms of layers": {"targets": ["q_proj"], "modules_to_save": ["input_layernorm"]},
}


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """The model and what its training begins with, by kind; a vocabulary that no number of devices divides."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def open_kind(kind):
        tied = kind == "tied"
        directory = folder / str(tied)
        if not directory.exists():
            sizes = {"num_hidden_layers": LAYERS, "vocab_size": 323, "head_dim": 16}
            oracles.tiny_model(directory, "qwen3" if tied else "llama", tie_word_embeddings=tied, **sizes)
        lora = LoraConfig(rank=4, alpha=8, dropout=0.1, **KINDS[kind])
        base = open_base(str(directory), quantization="nf4", dtype="float32", lora=lora)
        adapters = initial_adapter(split(base.model)[2], 0, originals=base.originals())
        return base, jax.tree.map(np.asarray, adapters)  # which no step can use up

    return open_kind


@pytest.fixture(scope="module")
def alone(opened):
    """What one device makes of a kind, with an optimizer; each once."""
    return cache(lambda kind, optimizer: train(*opened(kind), {"fsdp": 1}, optimizer))


def train(base, adapters, sizes, optimizer, streamed=0, compression="none"):
    """Losses and gradient norms of some steps with dropout over packed rows, and the adapters after them."""
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    order = stream_order(LAYERS, streamed) if streamed else None
    distribution = Distribution(make_mesh(sizes, devices), base.model, compression, stream=order)
    schedule = make_schedule("constant", 1e-3, 0, STEPS)
    optimizer = make_optimizer(optimizer, schedule, 0.01)
    whole = distribution.begin(initial_state(jax.tree.map(np.array, adapters), optimizer, "float32"))
    drawn = [oracles.random_batch(seed, (2, 8, 24), packed=True, vocab_size=323) for seed in range(STEPS)]
    batches = [Batch(*(np.array(getattr(batch, name)) for name in Batch._fields)) for batch in drawn]
    recipe = Recipe(optimizer, schedule, OPTIONS, max_grad_norm=1.0, dropout_seed=0, total_steps=STEPS)
    step = distribution.compile_training(recipe, whole, batches[0])
    frozen = distribution.load(lambda destination: base.load(destination=destination))
    state, numbers = distribution.put_state(whole), []
    for batch in batches:
        state, metrics = step(state, frozen, batch)
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(numbers), distribution.whole_state(state, whole).adapters


@pytest.mark.parametrize(
    ("kind", "optimizer", "sizes", "streamed"),
    [
        ("untied", "adamw", {"data": 2, "fsdp": 2, "tensor": 2}, 0),
        pytest.param("untied", "adamw_8bit", {"fsdp": 4}, 0, marks=pytest.mark.slow),
        pytest.param("tied", "adamw", {"fsdp": 2, "tensor": 2}, 0, marks=pytest.mark.slow),
        pytest.param("tied", "adamw_8bit", {"data": 2, "fsdp": 4}, 0, marks=pytest.mark.slow),
        pytest.param("adapters", "adamw", {"fsdp": 4, "tensor": 2}, 0, marks=pytest.mark.slow),
        ("adapters", "adamw", {"data": 2, "fsdp": 2}, LAYERS),
        ("tied", "adamw", {"data": 2}, LAYERS),
        pytest.param("norms of layers", "adamw", {"fsdp": 2, "tensor": 2}, 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_several_devices_train_as_one_does(monkeypatch, opened, alone, kind, optimizer, sizes, streamed):
    monkeypatch.setattr("zagora_jax.optimizer.SMALLEST_QUANTIZED", 64)  # so that tables have 8-bit moments too
    base, adapters = opened(kind)
    numbers, expected = alone(kind, optimizer)
    found, tuned = train(base, adapters, sizes, optimizer, streamed)
    np.testing.assert_allclose(found, numbers, rtol=TOLERANCE)
    leaves = zip(jax.tree.leaves(tuned), jax.tree.leaves(expected), jax.tree.leaves(adapters), strict=True)
    for one, other, before in leaves:
        # Adam divides by the gradient's own size, so an element whose gradient is near zero can move by up to the
        # learning rate, 1e-3 a step, whatever rounding makes of its sign; the others agree far better.
        assert np.quantile(np.abs(one - other), 0.99) < 1e-5
        assert np.abs(one - other).max() <= 2 * STEPS * 1e-3
        assert (np.asarray(one) != np.asarray(before)).any()


def test_gradients_of_layers_norms_travel_compressed(opened, alone):
    base, adapters = opened("norms of layers")
    numbers, _ = alone("norms of layers", "adamw")
    found, _ = train(base, adapters, {"data": 2, "fsdp": 2}, "adamw", compression="int8")
    np.testing.assert_allclose(found[:, 0], numbers[:, 0], rtol=1e-3)  # of int8 with error feedback


def planned(base, **options):
    given = {"sequence_length": 16, "compute_dtype": "float32", "attention": "reference", "remat": "full"} | options
    config = TrainConfig(model="m", data=["rows.jsonl"], **given)
    mesh = make_mesh(mesh_shape(config), jax.devices()[: math.prod(mesh_shape(config).values())])
    return config, mesh, compile_planned_step(config, mesh, base)


@pytest.mark.parametrize(("kind", "fsdp"), [("untied", 1), ("tied", 2)])
def test_the_planner_counts_what_a_step_with_tables_holds_and_sends(opened, kind, fsdp):
    lora = LoraConfig(rank=4, targets=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    base = open_base(opened(kind)[0].name, quantization="nf4", dtype="float32", lora=lora)
    shape = {"mesh": MeshConfig(data=2, fsdp=fsdp), "micro_batch_size": 2, "gradient_accumulation_steps": 1}
    config, mesh, step = planned(base, **shape)
    own, sizes = Shapes(base), mesh_shape(config)
    (arguments,) = own.arguments(config)
    table = 4 * 323 * base.model.config.hidden_size
    assert arguments.lora > table / fsdp
    assert arguments.optimizer > 2 * table / fsdp
    rows_and_counters = 5 * 4 * 2 * 16 + 64
    assert 0 <= memory(step).arguments - arguments.total <= rows_and_counters
    # Gradients that replicas exchange; what devices share the words of crosses between replicas alone.
    work = Work.of(own)
    over_data = exchanged_bytes(config, work, sizes) - exchanged_bytes(config, work, {**sizes, "data": 1})
    assert over_data > table / fsdp
    padding_and_scalars = 4 * base.model.config.hidden_size + 64
    adapters = 4 * LAYERS * own.layer_adapter_elements  # which cross before they are cut
    assert wire_bytes(step, mesh)["all-reduce over data"] == pytest.approx(
        over_data, abs=padding_and_scalars + adapters * (fsdp - 1) / fsdp
    )


def test_streaming_keeps_one_gradient_of_the_head_for_all_micro_batches(opened):
    base, _ = opened("tied")
    same = [{"micro_batch_size": 6 // times, "gradient_accumulation_steps": times} for times in (2, 6)]  # rows in all
    peaks = [memory(planned(base, strategy="streaming", **shape)[2]).peak for shape in same]
    assert peaks[1] - peaks[0] < 4 * 323 * base.model.config.hidden_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "layerwise"}, "--strategy layerwise does not go with training model.embed_tokens"),
        ({"gradient_compression": "int8"}, "--gradient-compression int8 does not go with training"),
        ({"gradient_exchange": "overlapped"}, "--gradient-exchange overlapped does not go with training"),
        ({"offload": OffloadConfig(optimizer=True)}, "--offload.optimizer does not go with training"),
    ],
)
def test_what_knows_layers_alone_is_refused(opened, options, message):
    config = TrainConfig(model="m", data=["rows.jsonl"], **options)
    with pytest.raises(UserError, match=message):
        arrange(config, opened("tied")[0].model)
