"""The compiled train step: gradients of one optimizer step's micro-batches, and the update."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models.cross_entropy import cross_entropy_sum
from models.llama import Llama
from models.placement import LOCAL, Placement
from sharding.flat import bare, clothed
from sharding.group import ALONE, DeviceGroup, Residuals
from zagora_jax.data.batches import Batch


class TrainState(NamedTuple):
    """What training changes. Everything here, and nothing else, is saved to resume.

    Attributes:
        step: int32, finished optimizer steps.
        updates: int32, those of them whose gradients were finite, so that they changed the adapter.
        adapters: the float32 LoRA parameters.
        optimizer: optax's state.
        loss_scale: the present scale of float16 gradients, None in other dtypes.
        residuals: what compressed exchanges of gradients have rounded off so far.
    """

    step: jax.Array
    updates: jax.Array
    adapters: nnx.State
    optimizer: optax.OptState
    loss_scale: "LossScale | None"
    residuals: Residuals = Residuals()


class LossScale(NamedTuple):
    """Dynamic loss scaling (arXiv:1710.03740): halved on overflow, doubled after GROWTH_INTERVAL clean steps."""

    scale: jax.Array  # float32
    clean_steps: jax.Array  # int32


INITIAL_SCALE, GROWTH_INTERVAL = 2.0**15, 200


@dataclass(frozen=True)
class ForwardOptions:
    """How the forward pass is computed.

    Attributes:
        kernel: the attention kernel.
        remat: what the backward pass computes again.
        segmented: whether sequences are packed from several rows.
        offload_activations: whether layer inputs wait for the backward pass in pinned host memory.
    """

    kernel: str
    remat: str
    segmented: bool
    offload_activations: bool = False


def initial_state(adapters: nnx.State, optimizer: optax.GradientTransformation, compute_dtype: str) -> TrainState:
    """Return the state before the first step."""
    loss_scale = None
    if compute_dtype == "float16":
        loss_scale = LossScale(jnp.float32(INITIAL_SCALE), jnp.int32(0))
    return TrainState(jnp.int32(0), jnp.int32(0), adapters, optimizer.init(nnx.to_pure_dict(adapters)), loss_scale)


def hidden_states(
    model: Llama,
    batch: Batch,
    options: ForwardOptions,
    dropout_keys: jax.Array | None,
    placement: Placement = LOCAL,
    residuals: jax.Array | None = None,
    **of_part: Any,
) -> jax.Array:
    """Run `model` over one micro-batch, see `Llama.hidden_states`: [M, S, hidden]."""
    return model.hidden_states(
        batch.tokens,
        batch.positions,
        batch.segment_ids if options.segmented else None,
        kernel=options.kernel,
        remat=options.remat,
        offload=options.offload_activations,
        dropout_keys=dropout_keys,
        placement=placement,
        residuals=residuals,
        **of_part,
    )


def loss_sum(
    model: Llama,
    batch: Batch,
    options: ForwardOptions,
    dropout_keys: jax.Array | None,
    placement: Placement = LOCAL,
    residuals: jax.Array | None = None,
    **of_part: Any,
) -> jax.Array:
    """Sum the loss over the supervised tokens of one micro-batch (arrays [M, S]; dropout keys [M]).

    `of_part` is what `Llama.hidden_states` takes beside for a part of the layers.
    """
    hidden = hidden_states(model, batch, options, dropout_keys, placement, residuals, **of_part)
    flat = hidden.reshape(-1, hidden.shape[-1])  # [M*S, hidden]
    targets, weights = batch.targets.reshape(-1), batch.weights.reshape(-1)
    return cross_entropy_sum(flat, model.head, targets, weights, vocabulary=placement.vocabulary)


def make_train_step(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    options: ForwardOptions,
    *,
    max_grad_norm: float,
    dropout_seed: int | None,
    placement: Placement = LOCAL,
    group: DeviceGroup = ALONE,
) -> Callable[[TrainState, nnx.State, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Build the function (state, frozen, batch [A, M, S]) -> (state, metrics) that is to be jitted.

    The loss is the sum over supervised tokens divided by their number (by the sum of their weights, where rows have
    some), both over the whole optimizer step, so that it is the same for every split into micro-batches. A step whose
    gradients are not finite leaves parameters and optimizer as they were.

    Args:
        graph: the model's structure.
        optimizer: applied to the clipped gradient.
        schedule: the optimizer's learning rate by the number of updates, for the metrics.
        options: how the forward pass is computed.
        max_grad_norm: the global norm that gradients are clipped to; 0 does not clip.
        dropout_seed: seeds the adapters' dropout, None switches it off.
        placement: reaches parameters that are spread over devices.
        group: reaches the devices that share the rows; with it, the function is for use under shard_map.
    """

    def micro_batch_loss(
        adapters: nnx.State, residuals: Any, frozen: nnx.State, batch: Batch, keys: Any, scale: Any
    ) -> Any:
        total = loss_sum(nnx.merge(graph, frozen, adapters), batch, options, keys, placement, residuals)
        return total * scale, total

    def accumulated(state: TrainState, frozen: nnx.State, batch: Batch, scale: jax.Array) -> tuple[nnx.State, Any, Any]:
        """Sum gradients, times `scale`, and losses over this device's part of the micro-batches."""
        rows = batch.tokens.shape[1]
        differentiated = jax.grad(micro_batch_loss, argnums=(0, 1), has_aux=True)

        def accumulate(carry: tuple, inputs: tuple) -> tuple[tuple, None]:
            gradients, total, residuals = carry
            index, micro_batch = inputs
            keys = row_keys(dropout_seed, state.step, index, group.first_row(rows), rows)
            # The "gradient" of the residuals is the new residuals: see sharding.overlap.
            (gradient, residuals), loss = differentiated(state.adapters, residuals, frozen, micro_batch, keys, scale)
            return (jax.tree.map(jnp.add, gradients, gradient), total + loss, residuals), None

        zeros = jax.tree.map(jnp.zeros_like, state.adapters)
        own_residuals = jax.tree.map(lambda rows: rows[0], state.residuals.scattered)
        start = (zeros, jnp.float32(0), own_residuals)
        (gradients, total, own_residuals), _ = jax.lax.scan(accumulate, start, (jnp.arange(len(batch.tokens)), batch))
        return gradients, total, jax.tree.map(lambda own: own[None], own_residuals)

    def step(state: TrainState, frozen: nnx.State, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        weights = batch.weights
        weight, supervised = group.total(jnp.stack([weights.sum(), (weights > 0).sum(dtype=weights.dtype)]))
        count = jnp.where(weight > 0, weight, 1)
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        gradients, total, scattered = accumulated(state, frozen, batch, scale / count)
        residuals = state.residuals._replace(scattered=scattered)
        gradients, residuals = group.exchange(jax.tree.map(lambda g: g / scale, gradients), residuals)
        loss = group.total(total) / count
        norm = jnp.sqrt(group.squared_norm(gradients))
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        new = updated(optimizer, state, gradients, residuals, norm, finite, max_grad_norm)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": jnp.asarray(schedule(state.updates), jnp.float32),
            "supervised_tokens": supervised,
            "finite": finite,
        }
        if state.loss_scale is not None:
            metrics["loss_scale"] = scale
        return new, metrics

    return step


def row_keys(
    seed: int | None, step: jax.Array, micro_batch: jax.Array, first: jax.Array | int, rows: int
) -> jax.Array | None:
    """Return the dropout key of each row, which depends on its place in the step, not on the device that has it."""
    if seed is None:
        return None
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), micro_batch)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, first + jnp.arange(rows))


def updated(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    gradients: nnx.State,
    residuals: Residuals,
    norm: jax.Array,
    finite: jax.Array,
    max_grad_norm: float,
) -> TrainState:
    """Return the state after a step whose gradients have the global norm `norm`; all stands still if not `finite`."""
    if max_grad_norm:
        clip = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))  # torch.nn.utils.clip_grad_norm_
        gradients = jax.tree.map(lambda g: g * clip, gradients)
    whole = (nnx.to_pure_dict(state.adapters), state.optimizer)
    old, old_optimizer = bare(whole)
    updates, new_optimizer = optimizer.update(bare(nnx.to_pure_dict(gradients)), old_optimizer, old)
    candidate = (optax.apply_updates(old, updates), new_optimizer, residuals)
    *kept, residuals = jax.tree.map(
        lambda new, before: jnp.where(finite, new, before), candidate, (old, old_optimizer, state.residuals)
    )
    values, optimizer_state = clothed(tuple(kept), whole)
    adapters = jax.tree.map(lambda x: x, state.adapters)
    nnx.replace_by_pure_dict(adapters, values)
    loss_scale = _next_scale(state.loss_scale, finite)
    return TrainState(state.step + 1, state.updates + finite, adapters, optimizer_state, loss_scale, residuals)


def _next_scale(loss_scale: LossScale | None, finite: jax.Array) -> LossScale | None:
    if loss_scale is None:
        return None
    clean = jnp.where(finite, loss_scale.clean_steps + 1, 0)
    grow = clean >= GROWTH_INTERVAL
    scale = jnp.where(finite, jnp.where(grow, loss_scale.scale * 2, loss_scale.scale), loss_scale.scale / 2)
    return LossScale(jnp.maximum(scale, 1.0), jnp.where(grow, 0, clean))


def make_evaluation_step(
    graph: nnx.GraphDef, options: ForwardOptions, placement: Placement = LOCAL, group: DeviceGroup = ALONE
) -> Callable[[nnx.State, nnx.State, Batch], tuple[jax.Array, jax.Array]]:
    """Build the function (adapters, frozen, batch [A, M, S]) -> (loss sum, sum of weights), without dropout."""

    def evaluate(adapters: nnx.State, frozen: nnx.State, batch: Batch) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graph, frozen, adapters)

        def add(total: jax.Array, micro_batch: Batch) -> tuple[jax.Array, None]:
            return total + loss_sum(model, micro_batch, options, None, placement), None

        total, _ = jax.lax.scan(add, jnp.float32(0), batch)
        return group.total(total), group.total(batch.weights.sum())

    return evaluate
