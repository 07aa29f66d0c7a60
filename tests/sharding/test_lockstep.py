"""All stages in one loop, against the same layers one after the other."""

from __future__ import annotations

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from sharding.lockstep import AXIS, StageFunctions, idle_share, most_kept, pipeline_gradients, pipeline_loss

WIDTH, SCALE = 3, 0.5
pytestmark = pytest.mark.eight_devices

CASES = [(1, 1), (1, 3), (2, 1), (2, 5), (3, 2), (4, 3), (4, 9)]


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


def on_stages(function, weights: jax.Array):
    """Map `function` over devices, each of which has a row of the weights and gives one of each result."""
    mesh, of_stage = Mesh(jax.devices()[: len(weights)], (AXIS,)), PartitionSpec(AXIS)

    def rows(weight: jax.Array):
        return jax.tree.map(lambda x: x[None], function(weight[0]))

    return jax.jit(jax.shard_map(rows, mesh=mesh, in_specs=of_stage, out_specs=of_stage, check_vma=False))(weights)


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def layer(weight: jax.Array, x: jax.Array, micro_batch: jax.Array) -> jax.Array:
    return jnp.tanh(weight * x + 0.1 * micro_batch)


def loss(y: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.sum((y - target) ** 2)


def functions(inputs: jax.Array, targets: jax.Array, *, keeps_input: bool) -> StageFunctions:
    """Numbers that are not due are infinite or no numbers at all: nothing of them may be left."""

    def enter(micro_batch: jax.Array) -> jax.Array:
        return jnp.where(jax.lax.axis_index(AXIS) == 0, inputs[micro_batch], jnp.nan)

    return StageFunctions(enter, layer, lambda y, micro_batch: loss(y, targets[micro_batch]), keeps_input=keeps_input)


def one_after_the_other(weights: jax.Array, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    total = jnp.float32(0)
    for micro_batch, (x, target) in enumerate(zip(inputs, targets, strict=True)):
        for weight in weights:
            x = layer(weight, x, jnp.float32(micro_batch))
        total += loss(x, target)
    return total


@pytest.mark.parametrize("keeps_input", [True, False], ids=["input", "all that its gradients need"])
@pytest.mark.parametrize(("stages", "micro_batches"), CASES)
def test_gradients_are_those_of_layers_one_after_the_other(stages: int, micro_batches: int, keeps_input: bool) -> None:
    weights, inputs, targets = draw(stages, WIDTH), draw(micro_batches, WIDTH), draw(micro_batches, WIDTH + 1)[:, 1:]
    made = functions(inputs, targets, keeps_input=keeps_input)

    def of_stage(weight: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        gradient, total = pipeline_gradients(made, weight, micro_batches, jnp.float32(SCALE))
        return gradient, total, pipeline_loss(made, weight, micro_batches)

    gradients, totals, alone = on_stages(of_stage, weights)
    want, of_weights = jax.value_and_grad(one_after_the_other)(weights, inputs, targets)
    # Float32, in the same order of sums but for the compiler's.
    np.testing.assert_allclose(gradients, SCALE * of_weights, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(totals, np.full(stages, want), rtol=1e-6)
    np.testing.assert_allclose(alone, np.full(stages, want), rtol=1e-6)


def test_a_stage_keeps_few_inputs_however_many_micro_batches_there_are() -> None:
    made = StageFunctions(lambda micro_batch: jnp.full(WIDTH, 1.0 * micro_batch), layer, lambda y, _: jnp.sum(y))

    def of_stage(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pipeline_gradients(made, weight, 50, jnp.float32(1))

    program = str(jax.make_jaxpr(lambda weights: on_stages(of_stage, weights))(draw(4, WIDTH)))
    assert most_kept(4, 50) == 7
    assert f"f32[7,{WIDTH}]" in program
    assert "f32[50" not in program
    assert most_kept(4, 3) == 3


def test_the_bubble_is_that_of_gpipe() -> None:
    assert idle_share(4, 9) == 3 / 12
    assert idle_share(1, 5) == 0
