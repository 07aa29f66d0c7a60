"""A step through the stages of a pipeline against the same step on one device, and what each stage holds."""

from functools import cache
from typing import NamedTuple

import eight_devices
import jax
import numpy as np
import oracles
import pytest
from flax import nnx

from models.lora import initial_adapter
from models.parameters import split
from sharding.mesh import make_mesh
from zagora_jax.arrangement import Recipe
from zagora_jax.base import BaseModel, open_base
from zagora_jax.config import LoraConfig
from zagora_jax.data.batches import Batch
from zagora_jax.distribution import Distribution
from zagora_jax.optimizer import make_optimizer, make_schedule
from zagora_jax.pipeline import Pipeline
from zagora_jax.step import ForwardOptions
from zagora_jax.train_state import initial_state

# Both sides compute in float32, and differ in the order of sums over rows and devices alone.
TOLERANCE = 2e-4


@pytest.fixture(autouse=True)
def _devices(request: pytest.FixtureRequest) -> None:
    if not eight_devices.available() and request.function is not test_on_eight_devices:
        pytest.skip("run by test_on_eight_devices")


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


class Subject(NamedTuple):
    base: BaseModel
    frozen: nnx.State
    adapters: nnx.State


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """Five layers, which no number of stages but one and five divides; dropout."""
    return make_subject(tmp_path_factory.mktemp("model"), num_hidden_layers=5)


def make_subject(folder, **config):
    lora = LoraConfig(rank=4, alpha=8, dropout=0.1)
    directory = oracles.tiny_llama(folder / "m", vocab_size=323, **config)
    base = open_base(str(directory), quantization="nf4", dtype="float32", lora=lora)
    return Subject(base, base.load(), initial_adapter(split(base.model)[2], seed=0))


@cache
def batches(count, accumulation, packed=True):
    drawn = [oracles.random_batch(seed, (accumulation, 4, 40), packed=packed) for seed in range(count)]
    made = [Batch(*(np.array(getattr(batch, name)) for name in Batch._fields)) for batch in drawn]
    made[-1].weights[-1] = 0  # a short last window: nothing in its last micro-batch, nor in many rows
    made[-1].weights[0, 2:] = 0
    return made


def trained(arrangement, subject, batches, optimizer="adamw", packed=True, dtype="float32", observe=lambda step: None):
    """Losses and gradient norms [steps, 2], and the whole state at the end."""
    schedule = make_schedule("cosine", 1e-3, 0, 22)
    made = make_optimizer(optimizer, schedule, 0.01)
    options = ForwardOptions(kernel="chunked", remat="full", segmented=packed)
    whole = arrangement.begin(initial_state(subject.adapters, made, dtype))
    step = arrangement.compile_training(Recipe(made, schedule, options, 1.0, dropout_seed=0), whole, batches[0])
    state, frozen = arrangement.put_state(whole), laid_out(arrangement, subject.frozen)
    numbers = []
    for batch in batches:
        state, metrics = step(state, frozen, batch)
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        observe(step)
    return np.array(numbers), arrangement.whole_state(state, whole)


def laid_out(arrangement, frozen):
    flat = nnx.to_flat_state(frozen)
    return nnx.from_flat_state([(path, v.replace(arrangement.whole(path, v.get_value()))) for path, v in flat])


_alone: dict = {}


def alone(subject, steps, accumulation, optimizer="adamw", packed=True):
    key = (id(subject), steps, accumulation, optimizer, packed)
    if key not in _alone:
        one = Distribution(make_mesh({}, jax.devices()[:1]), subject.base.model)
        _alone[key] = trained(one, subject, batches(steps, accumulation, packed), optimizer, packed)
    return _alone[key]


def pipeline(subject, layers, data=1, compression="none"):
    mesh = make_mesh({"stage": len(layers), "data": data}, jax.devices()[: len(layers) * data])
    return Pipeline(mesh, subject.base.model, layers, compression)


def furthest(state, other):
    leaves = zip(jax.tree.leaves(state.adapters), jax.tree.leaves(other.adapters), strict=True)
    return max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in leaves)


CUTS = [
    ((2, 3), 1, 3, "adamw_8bit"),
    ((1, 3, 1), 2, 3, "adamw"),
]


@pytest.mark.parametrize(("layers", "data", "accumulation", "optimizer"), CUTS, ids=str)
def test_stages_train_as_one_device_does(subject, layers, data, accumulation, optimizer):
    expected, one = alone(subject, 3, accumulation, optimizer)
    found, state = trained(pipeline(subject, layers, data), subject, batches(3, accumulation), optimizer)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    # Adam divides by the gradient's own size: see test_distribution.
    assert furthest(state, one) < 1e-4
