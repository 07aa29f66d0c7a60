"""AdamW in 8 bits against bitsandbytes' CPU optimizer, AdamW against PyTorch's, schedules against transformers'."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import AbstractMesh, AxisType

from sharding.mesh import AXES
from sharding.spread import Spread
from zagora_jax.errors import UserError
from zagora_jax.optimizer import QuantizedMoment, adamw_8bit, make_optimizer, make_schedule

# One stacked parameter each: [layers, ...].
SHAPES = {
    "whole_blocks": (2, 64, 80),
    "float32_moments": (2, 16, 100),
    "partial_block": (2, 50, 83),
    "smallest_quantized": (2, 4096),
    "largest_float32": (2, 4095),
    "one_layer": (1, 65, 64),
}
QUANTIZED = {name for name, shape in SHAPES.items() if np.prod(shape[1:]) >= 4096}
STEPS = 100
LEARNING_RATE, WEIGHT_DECAY = 1e-2, 0.1


def parameters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: (0.1 * rng.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, np.ndarray]:
    """Random gradients of widely differing sizes, one row of them zero."""
    rng = np.random.default_rng(1000 + step)
    made = {
        name: (0.01 * rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    made["whole_blocks"][:, 3] = 0
    return made


def train(optimizer: optax.GradientTransformation, steps: int):
    @jax.jit
    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, parameters())
    state = optimizer.init(params)
    for step in range(steps):
        params, state = update(params, state, gradients(step))
    return params, state


def train_torch(make, steps: int):
    """Train each layer's slice as a tensor of its own; return the tensors by parameter, and the optimizer."""
    import torch

    tensors = {
        name: [torch.nn.Parameter(torch.tensor(layer)) for layer in stack] for name, stack in parameters().items()
    }
    optimizer = make([tensor for stack in tensors.values() for tensor in stack])
    for step in range(steps):
        for name, stack in gradients(step).items():
            for tensor, gradient in zip(tensors[name], stack, strict=True):
                tensor.grad = torch.tensor(gradient)
        optimizer.step()
    return tensors, optimizer


def assert_parameters_agree(found, tensors) -> None:
    # Both round parameter and update a few times a step: at most 4 half units in the last place of the largest
    # parameter and 16 of the largest update (at most about 5 learning rates), summed over the steps.
    for name, stack in tensors.items():
        expected = np.stack([tensor.detach().numpy() for tensor in stack])
        tolerance = STEPS * 2.0**-24 * (4 * np.abs(expected).max() + 16 * 5 * LEARNING_RATE)
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=tolerance, err_msg=name)
        assert np.abs(expected - parameters()[name]).max() > 1000 * tolerance


def test_adamw_8bit_equals_bitsandbytes():
    pytest.importorskip("torch")
    bitsandbytes = pytest.importorskip("bitsandbytes")
    tensors, reference = train_torch(
        lambda tensors: bitsandbytes.optim.AdamW8bit(tensors, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY), STEPS
    )
    params, (adam, *_) = train(adamw_8bit(LEARNING_RATE, weight_decay=WEIGHT_DECAY), STEPS)
    assert adam.steps == STEPS
    assert_parameters_agree(params, tensors)
    for name, stack in tensors.items():
        for moment, key in ((adam.mu[name], "1"), (adam.nu[name], "2")):
            expected = np.stack([reference.state[tensor]["state" + key].numpy().reshape(-1) for tensor in stack])
            assert isinstance(moment, QuantizedMoment) == (name in QUANTIZED) == (expected.dtype == np.uint8)
            if name not in QUANTIZED:
                # Two roundings a step, each forgotten with the moment's own decay: 10 steps of mu, all 100 of nu.
                tolerance = STEPS * 2.0**-23 * np.abs(expected).max()
                np.testing.assert_allclose(moment.reshape(expected.shape), expected, rtol=0, atol=tolerance)
                continue
            # After 100 steps still equal: both compute b * moment + (1 - b) * gradient with one fused multiply-add.
            absmax = np.stack([reference.state[tensor]["absmax" + key].numpy() for tensor in stack])
            np.testing.assert_array_equal(np.asarray(moment.codes)[:, : expected.shape[1]], expected, err_msg=name)
            np.testing.assert_array_equal(moment.absmax, absmax, err_msg=name)


def test_bias_correction_is_accurate():
    """The first steps of a constant gradient 1 are 1: in float32, 1 - 0.999**step alone would put them off by 6e-6."""
    optimizer = adamw_8bit(1.0, weight_decay=0.0)
    params = jnp.zeros((1, 8))
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = optimizer.update(jnp.ones_like(params), state, params)
        # eps is 1e-8, and ten roundings of at most 2**-24 lie on the way.
        np.testing.assert_allclose(updates, -1, rtol=0, atol=10 * 2.0**-24)


def test_adamw_equals_torch():
    torch = pytest.importorskip("torch")
    tensors, _ = train_torch(
        lambda tensors: torch.optim.AdamW(tensors, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY), STEPS
    )
    params, _ = train(make_optimizer("adamw", LEARNING_RATE, WEIGHT_DECAY), STEPS)
    assert_parameters_agree(params, tensors)


def test_8bit_state_is_small_and_stacked():
    state = jax.eval_shape(adamw_8bit(1e-3, weight_decay=0.0).init, {"a": jnp.zeros((3, 50, 83))})[0]
    assert state.mu["a"].codes == jax.ShapeDtypeStruct((3, 17 * 256), jnp.uint8)  # 4,150 elements in 17 blocks
    assert state.nu["a"].absmax == jax.ShapeDtypeStruct((3, 17), jnp.float32)


def test_8bit_layers_do_not_influence_each_other():
    optimizer = adamw_8bit(1e-2, weight_decay=0.0)
    params = jnp.zeros((2, 4100))
    gradient = np.random.default_rng(0).standard_normal((2, 4100)).astype(np.float32)
    scaled = gradient * np.array([[1.0], [1000.0]], np.float32)
    _, state = optimizer.update(gradient, optimizer.init(params), params)
    _, other = optimizer.update(scaled, optimizer.init(params), params)
    np.testing.assert_array_equal(state[0].mu.codes[0], other[0].mu.codes[0])
    np.testing.assert_array_equal(state[0].mu.absmax[0], other[0].mu.absmax[0])


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_8bit_parts_on_devices_make_the_whole_bit_for_bit(devices):
    """Whatever the number of devices: 50 x 83 elements a layer, flat, in equal parts of whole blocks."""
    optimizer = adamw_8bit(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    update = jax.jit(lambda g, state, params: optimizer.update(g, state, params))
    mesh = AbstractMesh((1, 1, devices, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    spread = Spread(mesh, jax.ShapeDtypeStruct(SHAPES["partial_block"], jnp.float32), ("layers", "out", "in"))
    size = spread.padded // devices

    def flat(stack):
        return np.pad(stack.reshape(len(stack), -1), ((0, 0), (0, spread.padded - 50 * 83)))

    def part(tree, device):  # the codes, moments and parameters of a device; each block's absmax
        return jax.tree.map(lambda x: jnp.split(x, devices, axis=1)[device] if x.ndim else x, tree)

    params = flat(parameters()["partial_block"])
    whole = optimizer.init(params)
    parts = [part(whole, device) for device in range(devices)]
    assert parts[0][0].mu.codes.shape == (2, size)
    for step in range(5):
        gradient = flat(gradients(step)["partial_block"])
        moved, whole = update(gradient, whole, params)
        for device in range(devices):
            own, parts[device] = update(part(gradient, device), parts[device], part(params, device))
            np.testing.assert_array_equal(own, part(moved, device))
            jax.tree.map(np.testing.assert_array_equal, parts[device], part(whole, device))
        params = params + np.asarray(moved)


def test_8bit_follows_float32_on_a_quadratic():
    """It goes where AdamW goes: both get within 1 % of the minimum of |x - target|^2."""
    target = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4096)), jnp.float32)

    def distance(name: str) -> float:
        optimizer = make_optimizer(name, optax.cosine_decay_schedule(0.1, 200), 0.0)

        @jax.jit
        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(2 * (params - target), state, params)
            return (optax.apply_updates(params, updates), state), None

        start = jnp.zeros_like(target)
        (params, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), length=200)
        return float(jnp.linalg.norm(params - target) / jnp.linalg.norm(target))

    assert distance("adamw") < 0.01
    assert distance("adamw_8bit") < 0.01


def test_8bit_state_can_be_saved_and_donated(tmp_path):
    optimizer = adamw_8bit(make_schedule("cosine", 1e-2, 2, 10), weight_decay=0.1)
    params = jax.tree.map(jnp.asarray, parameters())
    fresh = optimizer.init(params)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(fresh)]
    assert len(set(buffers)) == len(buffers)

    _, state = optimizer.update(gradients(0), fresh, params)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", jax.tree.map(jnp.zeros_like, state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_schedules_equal_those_of_transformers(name, warmup):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    total, rate = 12, 3e-4
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
    names = {"constant": "constant_with_warmup"}
    scheduler = transformers.get_scheduler(names.get(name, name), optimizer, warmup, total)
    expected = []
    for _ in range(total + 1):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    schedule = make_schedule(name, rate, warmup, total)
    # A few roundings in float32, relative to the full rate.
    np.testing.assert_allclose([schedule(step) for step in range(total + 1)], expected, rtol=0, atol=rate * 2.0**-21)


def test_schedule_by_hand():
    linear = make_schedule("linear", 1.0, 2, 4)
    np.testing.assert_allclose([linear(step) for step in range(6)], [0, 0.5, 1, 0.5, 0, 0])
    assert float(make_schedule("constant", 0.25, 0, 4)(3)) == 0.25
    np.testing.assert_allclose(make_schedule("cosine", 1.0, 0, 4)(2), 0.5, rtol=1e-6)
    assert float(make_schedule("linear", 1.0, 4, 4)(4)) == 1.0


def test_learning_rate_follows_the_schedule():
    optimizer = make_optimizer("adamw_8bit", make_schedule("linear", 1.0, 1, 3), 0.0)
    params = jnp.zeros((1, 4096))
    state = optimizer.init(params)
    sizes = []
    for _ in range(3):
        updates, state = optimizer.update(jnp.ones_like(params), state, params)
        sizes.append(float(jnp.abs(updates).max()))
    # A constant gradient gives directions of size 1, up to the last unit of the dynamic map's 1 % steps.
    np.testing.assert_allclose(sizes, [0, 1, 0.5], atol=0.01)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_optimizer("adam", 1e-3, 0.0), "optimizer: expected one of adamw, adamw_8bit, found 'adam'"),
        (
            lambda: make_schedule("step", 1e-3, 0, 10),
            "schedule: expected one of constant, linear, cosine, found 'step'",
        ),
        (lambda: make_schedule("linear", 1e-3, 11, 10), "warmup-steps: expected 0 to the run's 10 .*, found 11"),
        (lambda: make_schedule("linear", 1e-3, -1, 10), "warmup-steps: expected 0 to the run's 10 .*, found -1"),
    ],
    ids=["optimizer", "schedule", "long warm-up", "negative warm-up"],
)
def test_refusals(make, message):
    with pytest.raises(UserError, match=message):
        make()
