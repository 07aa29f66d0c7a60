"""From a step's gradients to the next state: clipping, the optimizer, and gradients that wait for the next step.

With delayed exchange, an optimizer step leaves its gradients waiting, not yet summed over the replicas. The next step
sums them while it computes its own, and applies them at its end: parameters then are one step older than those that a
gradient was computed with (Zinkevich et al. 2009, "Slow learners are fast"). What the last step leaves is applied by
`Update.flush`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sharding.flat import bare, clothed
from sharding.group import ALONE, DeviceGroup
from zagora_jax.train_state import TrainState

Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class Update:
    """How gradients change a state. Gradients are `bare`, nested as the adapters.

    Attributes:
        optimizer: applied to the clipped gradients.
        schedule: the optimizer's learning rate by the number of updates, for the metrics.
        max_grad_norm: the global norm that gradients are clipped to; 0 does not clip.
        group: reaches the devices that hold the other shards and replicas.
    """

    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    max_grad_norm: float
    group: DeviceGroup = ALONE

    def apply(self, state: TrainState, gradients: Any, sound: jax.Array) -> tuple[TrainState, jax.Array, Metrics]:
        """Change adapter and optimizer by gradients that are summed over all devices.

        Returns:
            The state; whether it changed, which takes gradients that are finite and `sound`; metrics.
        """
        norm = jnp.sqrt(self.group.squared_norm(gradients))
        applied = jnp.isfinite(norm) & sound
        metrics = {"grad_norm": norm, "learning_rate": jnp.asarray(self.schedule(state.updates), jnp.float32)}
        return changed(self.optimizer, state, gradients, norm, applied, self.max_grad_norm), applied, metrics

    def flush(self, state: TrainState, halfway: jax.Array | None = None) -> tuple[TrainState, Metrics]:
        """Sum the pending gradients over the replicas and apply them; nothing is pending then.

        `halfway` is a number of computations beside which this runs: see `DeviceGroup.exchange`.
        """
        assert state.pending is not None
        own, errors = jax.tree.map(lambda row: row[0], (state.pending.gradients, state.residuals))
        gradients, errors = self.group.exchange(own, errors, halfway)
        new, applied, metrics = self.apply(state, gradients, state.pending.usable)
        return new._replace(
            residuals=chosen(applied, as_rows(errors), state.residuals),
            pending=state.pending._replace(usable=jnp.bool_(False)),
        ), metrics | {"applied": applied}


def changed(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    gradients: Any,
    norm: jax.Array,
    applied: jax.Array,
    max_grad_norm: float,
) -> TrainState:
    """Clip `bare` gradients of the global norm `norm` and apply them to adapters and moments, if `applied` holds."""
    if max_grad_norm:
        clip = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))  # torch.nn.utils.clip_grad_norm_
        gradients = jax.tree.map(lambda g: g * clip, gradients)
    whole = (nnx.to_pure_dict(state.adapters), state.optimizer)
    old, old_optimizer = bare(whole)
    updates, new_optimizer = optimizer.update(gradients, old_optimizer, old)
    kept = chosen(applied, (optax.apply_updates(old, updates), new_optimizer), (old, old_optimizer))
    values, moments = clothed(kept, whole)
    adapters = jax.tree.map(lambda x: x, state.adapters)
    nnx.replace_by_pure_dict(adapters, values)
    return state._replace(updates=state.updates + applied, adapters=adapters, optimizer=moments)


def as_rows(tree: Any) -> Any:
    """Make what a device has of its own its row of arrays [devices, ...]."""
    return jax.tree.map(lambda own: own[None], tree)


def chosen(condition: jax.Array, new: Any, old: Any) -> Any:
    """Return the tree `new` where a condition [] holds, else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
