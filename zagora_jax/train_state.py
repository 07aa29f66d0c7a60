"""What training changes from step to step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sharding.overlap import ExchangeErrors

INITIAL_SCALE, GROWTH_INTERVAL = 2.0**15, 200


class LossScale(NamedTuple):
    """Dynamic loss scaling (arXiv:1710.03740): halved on overflow, doubled after GROWTH_INTERVAL clean steps."""

    scale: jax.Array  # float32
    clean_steps: jax.Array  # int32


class Pending(NamedTuple):
    """Gradients of an optimizer step that are not summed over the replicas yet.

    Attributes:
        gradients: float32 [devices, L, n], a row a device; nested as the adapters.
        usable: whether there are any, all of them finite.
    """

    gradients: dict[str, Any]
    usable: jax.Array


class TrainState(NamedTuple):
    """What training changes. Everything here, and nothing else, is saved to resume.

    Attributes:
        step: int32, finished optimizer steps.
        updates: int32, how often finite gradients changed the adapter.
        adapters: the float32 LoRA parameters.
        optimizer: optax's state.
        loss_scale: the present scale of float16 gradients, None in other dtypes.
        residuals: what compressed exchanges of gradients have rounded off so far: [devices, L, ...], a row a device.
        pending: the gradients that the next step applies, with delayed exchange; else None.
    """

    step: jax.Array
    updates: jax.Array
    adapters: nnx.State
    optimizer: optax.OptState
    loss_scale: LossScale | None
    residuals: ExchangeErrors = ExchangeErrors()
    pending: Pending | None = None


def initial_state(adapters: nnx.State, optimizer: optax.GradientTransformation, compute_dtype: str) -> TrainState:
    """Return the state before the first step."""
    loss_scale = None
    if compute_dtype == "float16":
        loss_scale = LossScale(jnp.float32(INITIAL_SCALE), jnp.int32(0))
    return TrainState(jnp.int32(0), jnp.int32(0), adapters, optimizer.init(nnx.to_pure_dict(adapters)), loss_scale)


def next_scale(loss_scale: LossScale | None, finite: jax.Array) -> LossScale | None:
    """Return the loss scale after a step whose gradients were finite or not."""
    if loss_scale is None:
        return None
    clean = jnp.where(finite, loss_scale.clean_steps + 1, 0)
    grow = clean >= GROWTH_INTERVAL
    scale = jnp.where(finite, jnp.where(grow, loss_scale.scale * 2, loss_scale.scale), loss_scale.scale / 2)
    return LossScale(jnp.maximum(scale, 1.0), jnp.where(grow, 0, clean))
