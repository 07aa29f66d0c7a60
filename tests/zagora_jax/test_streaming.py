"""Steps whose frozen layers wait in host memory, against the resident step: losses, norms and adapters."""

import functools

import eight_devices
import jax
import numpy as np
import oracles
import pytest

from models.lora import initial_adapter
from models.parameters import split
from models.stream_order import stream_order
from sharding.mesh import make_mesh
from zagora_jax.arrangement import Recipe
from zagora_jax.base import open_base
from zagora_jax.data.batches import Batch
from zagora_jax.distribution import Distribution
from zagora_jax.frozen_weights import load_weights
from zagora_jax.optimizer import make_optimizer, make_schedule
from zagora_jax.option_groups import LoraConfig
from zagora_jax.step import ForwardOptions
from zagora_jax.train_state import initial_state

LAYERS, STEPS = 5, 2


pytestmark = pytest.mark.eight_devices


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return oracles.tiny_llama(tmp_path_factory.mktemp("model") / "m", num_hidden_layers=LAYERS, vocab_size=323)


def train(
    folder,
    sizes,
    streamed,
    *,
    quantization="nf4",
    offload=False,
    compression="none",
    optimizer="adamw",
    on_host=False,
    slots=None,
):
    """Return losses and gradient norms of some steps with dropout over packed rows, and the adapters after them."""
    lora = LoraConfig(rank=4, alpha=8, dropout=0.1)
    cache = None if slots is None else folder.parent / "cache"
    base = open_base(str(folder), quantization=quantization, dtype="float32", lora=lora, quantized_cache=cache)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    order = stream_order(LAYERS, streamed) if streamed else None
    mesh = make_mesh(sizes, devices)
    distribution = Distribution(mesh, base.model, compression, stream=order, moments_on_host=on_host, slots=slots)
    schedule = make_schedule("cosine", 1e-3, 0, STEPS + 2)
    optimizer = make_optimizer(optimizer, schedule, 0.01)
    whole = distribution.begin(initial_state(initial_adapter(split(base.model)[2], 0), optimizer, "float32"))
    drawn = [oracles.random_batch(seed, (2, 12, 16), packed=True) for seed in range(STEPS)]
    batches = [Batch(*(np.array(getattr(batch, name)) for name in Batch._fields)) for batch in drawn]
    batches[-1].weights[1] = 0  # a short last window
    options = ForwardOptions("chunked", "full", segmented=True, offload_activations=offload)
    recipe = Recipe(optimizer, schedule, options, max_grad_norm=1.0, dropout_seed=0, total_steps=STEPS)
    step = distribution.compile_training(recipe, whole, batches[0])
    frozen = load_weights(base, distribution, lambda _: None, lambda _: None)
    state, numbers = distribution.put_state(whole), []
    for batch in batches:
        state, metrics = step(state, frozen, batch)
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    if distribution.feed is not None:
        distribution.feed.close()
    return np.array(numbers), distribution.whole_state(state, whole)


@pytest.fixture(scope="module")
def resident(model_folder):
    """Trains with all layers on one device, by format; each once."""
    return functools.cache(functools.partial(train, model_folder, {"fsdp": 1}, 0))


@pytest.mark.parametrize(
    ("streamed", "offload", "quantization"),
    [
        (5, True, "nf4"),
        *(pytest.param(4, False, name, marks=pytest.mark.slow) for name in ("none", "hqq", "int8")),
    ],
)
def test_one_device_computes_the_same_bits(model_folder, resident, streamed, offload, quantization):
    expected, whole = resident(quantization=quantization)
    found, state = train(model_folder, {"fsdp": 1}, streamed, quantization=quantization, offload=offload)
    np.testing.assert_array_equal(found, expected)
    jax.tree.map(np.testing.assert_array_equal, state.adapters, whole.adapters)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adamw_8bit", marks=pytest.mark.slow)])
def test_moments_wait_in_host_memory(model_folder, resident, optimizer):
    """The same bits, since what these tests compile is not optimised: no product and sum become one operation."""
    expected, whole = resident(quantization="nf4") if optimizer == "adamw" else resident(optimizer=optimizer)
    found, state = train(model_folder, {"fsdp": 1}, 0, optimizer=optimizer, on_host=True)
    np.testing.assert_array_equal(found, expected)
    jax.tree.map(np.testing.assert_array_equal, (state.adapters, state.optimizer), (whole.adapters, whole.optimizer))


@pytest.mark.parametrize(
    ("sizes", "streamed"), [({"data": 2, "fsdp": 2}, 4), pytest.param({"fsdp": 3}, 5, marks=pytest.mark.slow)], ids=str
)
def test_devices_stream_their_parts(model_folder, resident, sizes, streamed):
    expected, _ = resident(quantization="nf4")
    found, state = train(model_folder, sizes, streamed)
    # In float32 both differ in the order of sums over rows and devices alone.
    np.testing.assert_allclose(found, expected, rtol=2e-4)
    from_disk, same_state = train(model_folder, sizes, streamed, slots=3)
    np.testing.assert_array_equal(from_disk, found)
    jax.tree.map(np.testing.assert_array_equal, same_state.adapters, state.adapters)


@pytest.mark.slow
def test_a_layers_gradients_are_exchanged_once_for_all_micro_batches(model_folder):
    resident, _ = train(model_folder, {"fsdp": 2}, 0, compression="int8")
    streamed, state = train(model_folder, {"fsdp": 2}, 5, compression="int8")
    # Both round gradients to a part in 254 of a block's largest, the resident step once more a micro-batch.
    np.testing.assert_allclose(streamed[:, 0], resident[:, 0], rtol=5e-3)
    assert np.any(state.residuals.scattered)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["int8", "int4"])
def test_streaming_replicas_compress_as_resident_ones_do(model_folder, compression):
    """Each streams all layers by itself; what is exchanged, once a step, are the same bits."""
    resident, _ = train(model_folder, {"data": 2}, 0, compression=compression)
    streamed, state = train(model_folder, {"data": 2}, 5, compression=compression, offload=True)
    np.testing.assert_array_equal(streamed, resident)
    assert any(np.asarray(residual, np.float32).any() for residual in jax.tree.leaves(state.residuals))


@pytest.mark.slow
def test_groups_that_share_streamed_layers_compress_their_gradients(model_folder):
    """Over fsdp within each layer's backward pass, over data behind it."""
    expected, _ = train(model_folder, {"fsdp": 1}, 0)
    found, state = train(model_folder, {"data": 2, "fsdp": 2}, 4, compression="int8", offload=True)
    # Gradients are rounded to a part in 254 of a block's largest: see test_distribution.
    np.testing.assert_allclose(found[:, 0], expected[:, 0], rtol=5e-3)
    for residuals in state.residuals:
        assert any(np.asarray(residual, np.float32).any() for residual in jax.tree.leaves(residuals))
