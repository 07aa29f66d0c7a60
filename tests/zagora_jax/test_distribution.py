"""A step spread over a mesh against the same step on one device: losses, gradient norms and adapters."""

from collections import Counter
from functools import cache, partial
from typing import NamedTuple

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

from models.lora import initial_adapter
from models.parameters import split
from sharding.compression import wire_bytes
from sharding.mesh import make_mesh
from sharding.program import collectives
from zagora_jax.arrangement import Recipe
from zagora_jax.base import BaseModel, open_base
from zagora_jax.data.batches import Batch
from zagora_jax.distribution import Distribution, SpreadStep
from zagora_jax.optimizer import make_optimizer, make_schedule
from zagora_jax.option_groups import LoraConfig
from zagora_jax.step import ForwardOptions, make_train_step
from zagora_jax.train_state import TrainState, initial_state

STEPS = 4
MAX_GRAD_NORM = 0.1  # the norm that gradients are clipped to, which those of every step exceed
OPTIONS = ForwardOptions(kernel="chunked", remat="full", segmented=True)
# Both sides compute in float32, and differ in the order of sums over rows and devices alone.
TOLERANCE = 2e-4

pytestmark = pytest.mark.eight_devices


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


class Subject(NamedTuple):
    base: BaseModel
    graph: nnx.GraphDef
    frozen: nnx.State
    adapters: nnx.State
    batches: list[Batch]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Odd sizes: a vocabulary that no device count divides, layers that none does."""
    return oracles.tiny_llama(tmp_path_factory.mktemp("model") / "m", num_hidden_layers=3, vocab_size=323)


def subject_of(folder, quantization, **options):
    """A model in a format, with dropout and packed rows."""
    lora = LoraConfig(rank=4, alpha=8, dropout=0.1, **options)
    base = open_base(str(folder), quantization=quantization, dtype="float32", lora=lora)
    graph, _, declared = split(base.model)
    drawn = [oracles.random_batch(seed, (2, 24, 40), packed=True) for seed in range(STEPS)]
    batches = [Batch(*(np.array(getattr(batch, name)) for name in Batch._fields)) for batch in drawn]
    batches[-1].weights[1] = 0  # a short last window: nothing in its second micro-batch, nor in many rows
    batches[-1].weights[0, 5:] = 0
    return Subject(base, graph, base.load(), initial_adapter(declared, seed=0), batches)


@pytest.fixture(scope="module")
def subject(folder):
    return subject_of(folder, "nf4", targets=["q_proj", "down_proj"])  # which compile in half the time of all


@pytest.fixture(scope="module")
def alone_of(subject):
    """`alone` by optimizer, each once."""
    return cache(partial(alone, subject))


@pytest.fixture(scope="module")
def synchronous_of(subject):
    """`spread` by mesh and compression, with AdamW, each once."""
    return cache(lambda sizes, compression: spread(subject, "adamw", dict(sizes), compression))


# Hands gradients on, and keeps them in its state.
RECORDER = optax.GradientTransformation(
    init=lambda parameters: jax.tree.map(jnp.zeros_like, parameters),
    update=lambda gradients, _state, _parameters=None: (gradients, gradients),
)


class Trained(NamedTuple):
    """What came of all steps.

    Attributes:
        numbers: loss and gradient norm of each step, [steps, 2].
        state: the whole training state behind the last.
        gradients: of each step, clipped, as one vector; where they were to be recorded.
        step: the compiled step.
    """

    numbers: np.ndarray
    state: TrainState
    gradients: list[np.ndarray]
    step: SpreadStep | None = None


def parts(subject, optimizer, record=False):
    schedule = make_schedule("cosine", 1e-3, 0, len(subject.batches) + 2)
    made = make_optimizer(optimizer, schedule, 0.01)
    made = optax.chain(RECORDER, made) if record else made
    return made, schedule, initial_state(subject.adapters, made, "float32")


def recorded(state):
    return np.asarray(ravel_pytree(state.optimizer[0])[0])


def alone(subject, optimizer, record=False):
    made, schedule, state = parts(subject, optimizer, record)
    step = jax.jit(make_train_step(subject.graph, made, schedule, OPTIONS, max_grad_norm=MAX_GRAD_NORM, dropout_seed=0))
    numbers, gradients = [], []
    for batch in subject.batches:
        state, metrics = step(state, subject.frozen, batch)
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        gradients += [recorded(state)] if record else []
    assert min(norm for _, norm in numbers) > MAX_GRAD_NORM
    return Trained(np.array(numbers), state, gradients)


def spread(subject, optimizer, sizes, compression="none", exchange="synchronous", record=False):
    """Train on a mesh; what is pending at the end is applied."""
    made, schedule, whole = parts(subject, optimizer, record)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    distribution = Distribution(make_mesh(sizes, devices), subject.base.model, compression, exchange)
    whole = distribution.begin(whole)
    recipe = Recipe(made, schedule, OPTIONS, MAX_GRAD_NORM, dropout_seed=0, total_steps=len(subject.batches) + 2)
    step = distribution.compile_training(recipe, whole, subject.batches[0])
    state, frozen = distribution.put_state(whole), distribution.put_frozen(subject.frozen)
    numbers, gradients = [], []
    for batch in subject.batches:
        state, metrics = step(state, frozen, batch)
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        gradients += [recorded(distribution.whole_state(state, whole))] if record else []
    state, left = step.finish(state)
    assert bool(left) == (exchange == "delayed")
    return Trained(np.array(numbers), distribution.whole_state(state, whole), gradients, step)


def furthest(state, other):
    return max(
        np.abs(np.asarray(a) - np.asarray(b)).max()
        for a, b in zip(jax.tree.leaves(state.adapters), jax.tree.leaves(other.adapters), strict=True)
    )


MESHES = [
    ("adamw_8bit", {"fsdp": 4}),
    ("adamw", {"data": 2, "fsdp": 4}),
]


@pytest.mark.parametrize(("optimizer", "sizes"), MESHES, ids=str)
def test_a_mesh_trains_as_one_device_does(subject, alone_of, optimizer, sizes):
    expected, found = alone_of(optimizer), spread(subject, optimizer, sizes)
    np.testing.assert_allclose(found.numbers, expected.numbers, rtol=TOLERANCE)
    # Adam divides by the gradient's own size, so an element whose gradient is near zero can move by up to the learning
    # rate, 1e-3 a step, whatever rounding makes of its sign; the others agree far better.
    assert furthest(found.state, expected.state) < 1e-4


# Some ranks are larger than others, some layers have none, and magnitudes are trained.
UNEVEN = {"use_dora": True, "rank_pattern": ["down_proj=3"], "targets": ["1.self_attn.q_proj", "mlp.down_proj"]}


@pytest.mark.parametrize(
    ("quantization", "sizes", "optimizer", "lora"),
    [
        pytest.param("hqq", {"fsdp": 3}, "adamw", {"targets": ["q_proj", "down_proj"]}, marks=pytest.mark.slow),
        ("int8", {"data": 2, "fsdp": 2}, "adamw_8bit", UNEVEN),
    ],
    ids=["hqq", "int8, uneven adapters"],
)
def test_so_it_does_in_every_format_and_with_uneven_adapters(folder, quantization, sizes, optimizer, lora):
    subject = subject_of(folder, quantization, **lora)
    expected, found = alone(subject, optimizer), spread(subject, optimizer, sizes)
    np.testing.assert_allclose(found.numbers, expected.numbers, rtol=TOLERANCE)
    assert furthest(found.state, expected.state) < 1e-4


MORE_MESHES = [
    *({"fsdp": devices} for devices in (2, 3, 4, 8)),
    *({"data": devices} for devices in (2, 3)),
    {"data": 2, "fsdp": 2},
    {"data": 2, "fsdp": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
]


@pytest.fixture(scope="module")
def for_long(folder):
    """Twenty steps, adapters everywhere; every fifth a short window, and in all rows with few supervised tokens."""
    rng = np.random.default_rng(0)
    drawn = [oracles.random_batch(seed, (2, 24, 40), packed=True) for seed in range(20)]
    batches = [Batch(*(np.array(getattr(batch, name)) for name in Batch._fields)) for batch in drawn]
    for number, batch in enumerate(batches):
        batch.weights[rng.random(batch.weights.shape) < rng.random((2, 24, 1)) ** 0.3] = 0
        if number % 5 == 4:
            batch.weights[1, 3:] = 0
    made = subject_of(folder, "nf4")._replace(batches=batches)
    return made, alone(made, "adamw", record=True)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MORE_MESHES, ids=str)
def test_twenty_steps_on_any_mesh_are_those_of_one_device(for_long, sizes):
    subject, expected = for_long
    found = spread(subject, "adamw", sizes, record=True)
    np.testing.assert_allclose(found.numbers, expected.numbers, rtol=TOLERANCE)
    for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
        assert np.linalg.norm(ours - theirs) <= TOLERANCE * np.linalg.norm(theirs)
    # As above: single elements may move by a learning rate of 1e-3 another way, their root mean square far less.
    values, expected_values = (np.asarray(ravel_pytree(one.state.adapters)[0]) for one in (found, expected))
    assert np.sqrt(np.square(values - expected_values, dtype=np.float64).mean()) < 20 * 1e-3 * TOLERANCE


# Gradients rounded to 8 bits (a part in 254 of a block's largest) or 4 bits (a part in 14) change an update of Adam by
# about as much, and so the loss of 9 by that share of what three updates have moved, about 0.3.
@pytest.mark.parametrize(
    ("compression", "sizes", "tolerance"),
    [
        pytest.param("int8", {"fsdp": 2}, 5e-3, marks=pytest.mark.slow),
        ("int4", {"data": 2, "fsdp": 2}, 5e-2),
    ],
)
def test_compressed_gradients_train_nearly_alike(alone_of, synchronous_of, compression, sizes, tolerance):
    expected, found = alone_of("adamw"), synchronous_of(tuple(sizes.items()), compression)
    np.testing.assert_allclose(found.numbers[:, 0], expected.numbers[:, 0], rtol=tolerance)
    assert found.numbers[1, 0] != expected.numbers[1, 0]  # something was rounded
    residuals = found.state.residuals
    assert any(np.asarray(residual, np.float32).any() for residual in jax.tree.leaves(residuals))
    rows = np.asarray(residuals.scattered, np.float32)
    assert (rows[0] != rows[1]).any()  # each device has its own
    # Over fsdp, gradients cross in each micro-batch; over data once an optimizer step, whatever their number.
    sent = Counter()
    for c in collectives(found.step.compiled, found.step.distribution.mesh.shape):
        if c.dtype == "u8" and (c.kind == "all-to-all" or c.axes == ("data",)):
            sent["+".join(c.axes)] += c.wire_bytes
    layers, micro_batches = 3, 2
    own = rows.shape[-1] // 2  # elements of a layer that a device has
    of_layer = {"fsdp": micro_batches * wire_bytes(2 * own, 2, compression, "reduce_scatter")}
    of_layer |= {"data": wire_bytes(own, 2, compression)} if "data" in sizes else {}
    assert sent == {axis: layers * size for axis, size in of_layer.items()}


# Every layer's vectors are the same in both programs but for the last bits of a gradient, of which a few then round to
# the neighbouring integer: a change of one value in thousands by a quantisation step, so of a loss by far less.
@pytest.mark.parametrize(
    ("compression", "sizes"),
    [
        pytest.param("none", {"data": 2, "fsdp": 2}, marks=pytest.mark.slow),
        ("int4", {"data": 2, "fsdp": 2}),
    ],
)
def test_overlapped_gradients_are_the_synchronous_ones(subject, synchronous_of, compression, sizes):
    expected = synchronous_of(tuple(sizes.items()), compression)
    found = spread(subject, "adamw", sizes, compression, "overlapped")
    np.testing.assert_allclose(found.numbers, expected.numbers, rtol=1e-5 if compression == "none" else 1e-3)
    assert furthest(found.state, expected.state) < 1e-4
    for one, other in zip(*(jax.tree.leaves(run.state.residuals) for run in (found, expected)), strict=True):
        differing = np.asarray(one, np.float32) != np.asarray(other, np.float32)
        assert differing.mean() < 0.05


def delayed_alone(subject):
    """Losses and adapters where each step applies the gradients of the one before, by hand."""
    made, schedule, state = parts(subject, "adamw")
    step = jax.jit(
        make_train_step(subject.graph, RECORDER, schedule, OPTIONS, max_grad_norm=MAX_GRAD_NORM, dropout_seed=0)
    )
    adapters, moments, clipped, losses = nnx.to_pure_dict(state.adapters), state.optimizer, None, []

    def apply(adapters, moments):
        updates, moments = made.update(clipped, moments, adapters)
        return optax.apply_updates(adapters, updates), moments

    for number, batch in enumerate(subject.batches):
        present = jax.tree.map(lambda leaf: leaf, state.adapters)
        nnx.replace_by_pure_dict(present, adapters)
        recording = initial_state(present, RECORDER, "float32")._replace(step=jnp.int32(number))
        recorded, metrics = step(recording, subject.frozen, batch)
        losses.append(float(metrics["loss"]))
        if clipped is not None:
            adapters, moments = apply(adapters, moments)
        clipped = recorded.optimizer
    return losses, apply(adapters, moments)[0]


def test_delayed_gradients_are_applied_one_step_late_and_none_is_lost(subject):
    losses, adapters = delayed_alone(subject)
    found = spread(subject, "adamw", {"data": 2}, exchange="delayed")
    np.testing.assert_allclose(found.numbers[:, 0], losses, rtol=TOLERANCE)
    assert found.numbers[0, 1] == 0  # nothing to apply
    assert int(found.state.updates) == STEPS
    for one, other in zip(jax.tree.leaves(found.state.adapters), jax.tree.leaves(adapters), strict=True):
        assert np.abs(np.asarray(one) - np.asarray(other)).max() < 1e-4


def test_a_delayed_step_that_is_not_finite_is_skipped(subject):
    """With compression, whose residuals must not be spoilt."""
    broken = [batch._replace(weights=batch.weights.copy()) for batch in subject.batches]
    broken[1].weights[0, 3] = np.inf
    losses, state, *_ = spread(subject._replace(batches=broken), "adamw", {"data": 2}, "int8", "delayed")
    assert not np.isfinite(losses[1, 0])
    assert np.isfinite(losses[[2, 3], 0]).all()
    assert int(state.updates) == STEPS - 1
    for leaf in jax.tree.leaves((state.adapters, state.optimizer, state.residuals)):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()
