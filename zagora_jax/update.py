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

from models.stream import DEVICE, HOST
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
        moments_on_host: whether the optimizer's moments wait in host memory.
    """

    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    max_grad_norm: float
    group: DeviceGroup = ALONE
    moments_on_host: bool = False

    def apply(self, state: TrainState, gradients: Any, sound: jax.Array) -> tuple[TrainState, jax.Array, Metrics]:
        """Change adapter and optimizer by gradients that are summed over all devices.

        Returns:
            The state; whether it changed, which takes gradients that are finite and `sound`; metrics.
        """
        norm = jnp.sqrt(self.group.squared_norm(gradients))
        applied = jnp.isfinite(norm) & sound
        metrics = {"grad_norm": norm, "learning_rate": jnp.asarray(self.schedule(state.updates), jnp.float32)}
        new = changed(
            self.optimizer,
            state,
            gradients,
            norm,
            applied,
            self.max_grad_norm,
            moments_on_host=self.moments_on_host,
        )
        return new, applied, metrics

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
    *,
    moments_on_host: bool = False,
) -> TrainState:
    """Clip `bare` gradients of the global norm `norm` and apply them to adapters and moments, if `applied` holds."""
    if max_grad_norm:
        clip = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))  # torch.nn.utils.clip_grad_norm_
        gradients = jax.tree.map(lambda g: g * clip, gradients)
    whole = (nnx.to_pure_dict(state.adapters), state.optimizer)
    apply = _applied_by_layer if moments_on_host else _applied
    old, old_optimizer = bare(whole)
    values, moments = clothed(apply(optimizer, gradients, old, old_optimizer, applied), whole)
    adapters = jax.tree.map(lambda x: x, state.adapters)
    nnx.replace_by_pure_dict(adapters, values)
    return state._replace(updates=state.updates + applied, adapters=adapters, optimizer=moments)


def _applied(
    optimizer: optax.GradientTransformation, gradients: Any, adapters: Any, moments: Any, condition: jax.Array
) -> tuple[Any, Any]:
    """Return adapters and moments, changed where the condition holds."""
    updates, new_moments = optimizer.update(gradients, moments, adapters)
    return chosen(condition, (optax.apply_updates(adapters, updates), new_moments), (adapters, moments))


def _applied_by_layer(
    optimizer: optax.GradientTransformation, gradients: Any, adapters: Any, moments: Any, condition: jax.Array
) -> tuple[Any, Any]:
    """Do what `_applied` does with moments [L, ...] in host memory, of which one layer's at a time is on the device.

    The optimizer works elementwise, or in blocks of one layer. Its numbers [] are on the device.
    """
    leaves, structure = jax.tree.flatten(moments)
    stacks = [jax.device_put(leaf, HOST) if leaf.ndim else leaf for leaf in leaves]  # where they are: see shard_map

    def of_layer(layer: jax.Array, carry: tuple[Any, list[jax.Array]]) -> tuple[Any, list[jax.Array]]:
        adapters, stacks = carry

        def cut(stack: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(stack, layer, 1, allow_negative_indices=False)

        def put(stack: jax.Array, own: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(stack, own, layer, 0, allow_negative_indices=False)

        own = [
            jax.device_put(cut(stack), DEVICE) if stack.ndim else leaf  # each layer counts from the same number
            for stack, leaf in zip(stacks, leaves, strict=True)
        ]
        own_gradients, own_adapters = jax.tree.map(cut, (gradients, adapters))
        own_moments = jax.tree.unflatten(structure, own)
        changed_adapters, changed_own = _applied(optimizer, own_gradients, own_adapters, own_moments, condition)
        new = [
            put(stack, jax.device_put(leaf, HOST)) if stack.ndim else leaf
            for stack, leaf in zip(stacks, jax.tree.leaves(changed_own), strict=True)
        ]
        return jax.tree.map(put, adapters, changed_adapters), new

    layers = len(jax.tree.leaves(adapters)[0])
    adapters, stacks = jax.lax.fori_loop(0, layers, of_layer, (adapters, stacks))
    return adapters, jax.tree.unflatten(structure, stacks)


def as_rows(tree: Any) -> Any:
    """Make what a device has of its own its row of arrays [devices, ...]."""
    return jax.tree.map(lambda own: own[None], tree)


def chosen(condition: jax.Array, new: Any, old: Any) -> Any:
    """Return the tree `new` where a condition [] holds, else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
