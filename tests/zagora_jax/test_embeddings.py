"""Quantised embeddings and heads, in every strategy, against files that hold the dequantised numbers."""

import functools

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import safetensors.numpy

from models import tables
from models.lora import initial_adapter
from models.parameters import by_path, split
from models.stream_order import stream_order
from sharding.mesh import make_mesh
from zagora_jax.arrangement import Recipe
from zagora_jax.base import open_base
from zagora_jax.data.batches import Batch
from zagora_jax.distribution import Distribution
from zagora_jax.equal_stages import EqualStages
from zagora_jax.optimizer import make_optimizer, make_schedule
from zagora_jax.option_groups import LoraConfig
from zagora_jax.pipeline import Pipeline
from zagora_jax.step import ForwardOptions
from zagora_jax.train_state import initial_state

STEPS, LAYERS = 1, 2
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
# Both sides compute in float32, and differ in the order of sums alone.
TOLERANCE = 2e-4

pytestmark = pytest.mark.eight_devices


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model's folder, and that of the same with dequantised tables, by format and whether the head is tied."""

    @functools.cache
    def made(embeddings, tied):
        folder = tmp_path_factory.mktemp("models")
        model = oracles.tiny_llama(
            folder / "m", num_hidden_layers=LAYERS, vocab_size=323, tie_word_embeddings=tied, hidden_size=72
        )
        copy = folder / "dequantized"
        copy.mkdir()
        tensors = safetensors.numpy.load_file(model / "model.safetensors")
        for name in tensors.keys() & TABLES:
            tensors[name] = np.asarray(tables.dequantize(tables.quantize(embeddings, tensors[name]), jnp.float32))
        safetensors.numpy.save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        (copy / "config.json").write_bytes((model / "config.json").read_bytes())
        return model, copy

    return made


def train(folder, embeddings, arrangement_of, offload=False):
    """Return losses and gradient norms of some steps over packed rows, and what the embedding takes of a device."""
    lora = LoraConfig(rank=4, alpha=8, targets=["q_proj"])
    base = open_base(str(folder), quantization="none", dtype="float32", lora=lora, embeddings=embeddings)
    arrangement = arrangement_of(base.model)
    schedule = make_schedule("cosine", 1e-3, 0, STEPS + 2)
    optimizer = make_optimizer("adamw", schedule, 0.01)
    whole = arrangement.begin(initial_state(initial_adapter(split(base.model)[2], 0), optimizer, "float32"))
    drawn = [oracles.random_batch(seed, (2, 12, 16), packed=True) for seed in range(STEPS)]
    batches = [Batch(*(np.array(getattr(batch, name)) for name in Batch._fields)) for batch in drawn]
    options = ForwardOptions("chunked", "full", segmented=True, offload_activations=offload)
    recipe = Recipe(optimizer, schedule, options, max_grad_norm=1.0, dropout_seed=None, total_steps=STEPS + 2)
    step = arrangement.compile_training(recipe, whole, batches[0])
    frozen = arrangement.load(lambda destination: base.load(destination=destination))
    state, numbers = arrangement.put_state(whole), []
    for batch in batches:
        state, metrics = step(state, frozen, batch)
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(numbers), arrangement.layout(whole)


def on_mesh(streamed=0, **sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    stream = stream_order(LAYERS, streamed) if streamed else None
    return lambda model: Distribution(make_mesh(sizes, devices), model, stream=stream)


def in_stages(**options):
    return lambda model: Pipeline(make_mesh({"stage": 2}, jax.devices()[:2]), model, [1, 1], **options)


def in_equal_stages(model):
    return EqualStages(make_mesh({"stage": 2}, jax.devices()[:2]), model)


@pytest.fixture(scope="module")
def expected(folders):
    """Trains on one device with plain tables that hold the dequantised numbers, by format; each once."""
    return functools.cache(lambda embeddings, tied: train(folders(embeddings, tied)[1], "none", on_mesh(fsdp=1))[0])


@pytest.mark.parametrize(
    ("embeddings", "tied", "arrangement", "offload"),
    [
        pytest.param("int8", False, on_mesh(fsdp=1), False, marks=pytest.mark.slow),
        ("nf4", True, on_mesh(fsdp=3), False),
        ("nf4", True, on_mesh(streamed=2, fsdp=1), True),
        pytest.param("int8", False, on_mesh(data=2, fsdp=2, tensor=2), False, marks=pytest.mark.slow),
        pytest.param("int8", False, on_mesh(streamed=2, fsdp=2), False, marks=pytest.mark.slow),
        ("int8", False, in_stages(host_embedding=True), False),
        pytest.param("nf4", True, in_stages(), False, marks=pytest.mark.slow),
        pytest.param("int8", False, in_stages(weights="all"), True, marks=pytest.mark.slow),
        pytest.param("nf4", False, in_equal_stages, False, marks=pytest.mark.slow),
    ],
    ids=[
        "one device",
        "tied, fsdp 3",
        "tied, streaming",
        "data 2, fsdp 2, tensor 2",
        "streaming fsdp",
        "stages, on the host",
        "tied, stages",
        "streaming stages",
        "equal stages",
    ],
)
def test_training_is_that_over_the_dequantised_numbers(folders, expected, embeddings, tied, arrangement, offload):
    found, _ = train(folders(embeddings, tied)[0], embeddings, arrangement, offload)
    np.testing.assert_allclose(found, expected(embeddings, tied), rtol=TOLERANCE)


@pytest.mark.slow
def test_the_numbers_are_other_than_those_of_the_plain_tables(folders, expected):
    """Else the test above could not fail."""
    found, _ = train(folders("nf4", True)[0], "none", on_mesh(fsdp=1))
    assert np.abs(found / expected("nf4", True) - 1).max() > 10 * TOLERANCE


def test_devices_share_the_rows(folders):
    model, _ = folders("int8", False)
    base = open_base(str(model), quantization="nf4", dtype="float32", lora=None, embeddings="int8")
    spreads = by_path(Distribution(make_mesh({"fsdp": 3}, jax.devices()[:3]), base.model).frozen)
    (codes, scales) = (spread for spread in jax.tree.leaves(spreads["lm_head", "weight"].get_value()))
    rows = -(-323 // 3)
    assert (codes.device_bytes, scales.device_bytes) == (rows * 72, rows * 4)
