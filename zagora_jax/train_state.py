"""What training changes from step to step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sharding.exchange import ExchangeErrors

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


class SpikeGuard(NamedTuple):
    """A loss of more than `factor` times the running mean of the losses before is a spike, and no update is made."""

    factor: jax.Array  # float32
    mean: jax.Array  # float32
    seen: jax.Array  # int32, losses in the mean


# Losses that the running mean looks back over, and that must be in it before a loss is judged by it.
USUAL_STEPS, FIRST_STEPS = 50, 20


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
        spike_guard: what a loss is compared with to tell a spike; None where that is not asked for.
    """

    step: jax.Array
    updates: jax.Array
    adapters: nnx.State
    optimizer: optax.OptState
    loss_scale: LossScale | None
    residuals: ExchangeErrors = ExchangeErrors()
    pending: Pending | None = None
    spike_guard: SpikeGuard | None = None


def initial_state(
    adapters: nnx.State,
    optimizer: optax.GradientTransformation,
    compute_dtype: str,
    spike_factor: float | None = None,
) -> TrainState:
    """Return the state before the first step; `spike_factor` is that of a SpikeGuard, None for no guard."""
    loss_scale = None
    if compute_dtype == "float16":
        loss_scale = LossScale(jnp.float32(INITIAL_SCALE), jnp.int32(0))
    guard = None if spike_factor is None else SpikeGuard(jnp.float32(spike_factor), jnp.float32(0), jnp.int32(0))
    state = optimizer.init(nnx.to_pure_dict(adapters))
    return TrainState(jnp.int32(0), jnp.int32(0), adapters, state, loss_scale, spike_guard=guard)


def next_scale(loss_scale: LossScale | None, finite: jax.Array) -> LossScale | None:
    """Return the loss scale after a step whose gradients were finite or not."""
    if loss_scale is None:
        return None
    clean = jnp.where(finite, loss_scale.clean_steps + 1, 0)
    grow = clean >= GROWTH_INTERVAL
    scale = jnp.where(finite, jnp.where(grow, loss_scale.scale * 2, loss_scale.scale), loss_scale.scale / 2)
    return LossScale(jnp.maximum(scale, 1.0), jnp.where(grow, 0, clean))


def is_spike(guard: SpikeGuard | None, loss: jax.Array) -> jax.Array:
    """Tell whether `loss` is finite, and a spike."""
    if guard is None:
        return jnp.bool_(False)
    return jnp.isfinite(loss) & (guard.seen >= FIRST_STEPS) & (loss > guard.factor * guard.mean)


def next_guard(guard: SpikeGuard | None, loss: jax.Array, accepted: jax.Array) -> SpikeGuard | None:
    """Return the guard after a step whose update was made (or is pending) or not."""
    if guard is None:
        return None
    seen = jnp.where(accepted, guard.seen + 1, guard.seen)
    mean = guard.mean + (loss - guard.mean) / jnp.clip(seen, 1, USUAL_STEPS)
    return SpikeGuard(guard.factor, jnp.where(accepted, mean, guard.mean), seen)


def verdict(state: TrainState, finite: jax.Array, spike: jax.Array) -> dict[str, jax.Array]:
    """Return what the metrics of a step from `state` say of whether its gradients are good for an update."""
    metrics = {"finite": finite}
    if state.loss_scale is not None:
        metrics["loss_scale"] = state.loss_scale.scale
    if state.spike_guard is not None:
        metrics |= {"spike": spike, "usual_loss": state.spike_guard.mean}
    return metrics
