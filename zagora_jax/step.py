"""The compiled train step: gradients of one optimizer step's micro-batches, and the update."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models.cross_entropy import cross_entropy_sum
from models.llama import Llama
from models.placement import LOCAL, Placement
from sharding.exchange import ExchangeErrors
from sharding.flat import bare
from sharding.group import ALONE, DeviceGroup
from sharding.layer_exchange import Exchanged
from zagora_jax.data.batches import Batch
from zagora_jax.streaming import StreamedFrozen
from zagora_jax.train_state import Pending, TrainState, is_spike, next_guard, next_scale, verdict
from zagora_jax.update import Metrics, Update, as_rows, chosen


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


def hidden_states(
    model: Llama,
    batch: Batch,
    options: ForwardOptions,
    dropout_keys: jax.Array | None,
    placement: Placement = LOCAL,
    exchanged: Exchanged | None = None,
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
        exchanged=exchanged,
        **of_part,
    )


def loss_sum(
    model: Llama,
    batch: Batch,
    options: ForwardOptions,
    dropout_keys: jax.Array | None,
    placement: Placement = LOCAL,
    exchanged: Exchanged | None = None,
    **of_part: Any,
) -> jax.Array:
    """Sum the loss over the supervised tokens of one micro-batch (arrays [M, S]; dropout keys [M]).

    `of_part` is what `Llama.hidden_states` takes beside for a part of the layers.
    """
    hidden = hidden_states(model, batch, options, dropout_keys, placement, exchanged, **of_part)
    return head_loss(model, hidden, batch.targets, batch.weights, dropout_keys, placement)


def head_loss(
    model: Llama,
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    dropout_keys: jax.Array | None,
    placement: Placement,
) -> jax.Array:
    """Sum the loss of hidden [M, S, hidden] with targets and weights [M, S]."""
    terms = model.head_terms(hidden, placement, dropout_keys)
    return cross_entropy_sum(
        [term.hidden.reshape(-1, term.hidden.shape[-1]) for term in terms],  # [M*S, hidden]
        [term.table for term in terms],
        targets.reshape(-1),
        weights.reshape(-1),
        vocabulary=placement.vocabulary,
        trained=tuple(term.trained for term in terms),
        softcap=model.config.logit_softcap,
    )


def streamed_hidden_states(
    model: Llama,
    waiting: jax.Array,
    batch: Batch,
    options: ForwardOptions,
    dropout_keys: jax.Array | None,
    placement: Placement,
    exchanged: Exchanged | None = None,
    **of_part: Any,
) -> jax.Array:
    """Do what `hidden_states` does for all micro-batches (arrays [A, M, S]; dropout keys [A, M]) of a streamed model.

    `waiting`: see `models.stream.stream_layers`.
    """
    return model.streamed_hidden_states(
        batch.tokens,
        batch.positions,
        batch.segment_ids if options.segmented else None,
        waiting,
        kernel=options.kernel,
        offload_inputs=options.offload_activations,
        dropout_keys=dropout_keys,
        placement=placement,
        exchanged=exchanged,
        **of_part,
    )


def streamed_loss_sum(
    model: Llama,
    waiting: jax.Array,
    batch: Batch,
    options: ForwardOptions,
    dropout_keys: jax.Array | None,
    placement: Placement,
    exchanged: Exchanged | None = None,
    **of_part: Any,
) -> jax.Array:
    """Do what `loss_sum` does for all micro-batches of a streamed model; see `streamed_hidden_states`."""
    hidden = streamed_hidden_states(model, waiting, batch, options, dropout_keys, placement, exchanged, **of_part)
    if model.head_is_trained:  # a loop would keep a gradient of the head for each micro-batch, this keeps one
        rows = (hidden, batch.targets, batch.weights, dropout_keys)
        hidden, targets, weights, keys = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows)
        return head_loss(model, hidden, targets, weights, keys, placement)

    def add(total: jax.Array, micro_batch: tuple) -> tuple[jax.Array, None]:
        hidden, targets, weights, keys = micro_batch
        return total + head_loss(model, hidden, targets, weights, keys, placement), None

    return jax.lax.scan(add, jnp.float32(0), (hidden, batch.targets, batch.weights, dropout_keys))[0]


class Objective(Protocol):
    """What an optimizer step lowers, of which the gradients are computed a micro-batch at a time."""

    def prepare(
        self,
        model: Llama,
        batch: Batch,
        options: ForwardOptions,
        dropout_keys: jax.Array | None,
        placement: Placement,
        group: DeviceGroup,
    ) -> Any:
        """Compute, without gradients, what the loss of a micro-batch takes of all of them: arrays [A, ...], or None."""

    def loss(
        self,
        model: Llama,
        batch: Batch,
        prepared: Any,
        options: ForwardOptions,
        dropout_keys: jax.Array | None,
        placement: Placement,
        exchanged: Exchanged,
    ) -> tuple[jax.Array, jax.Array]:
        """Return what is differentiated, and the loss summed over a micro-batch."""


class NextToken:
    """The loss of a language model: an `Objective` whose micro-batches have nothing to do with each other."""

    def prepare(self, *_: Any) -> None:
        """Nothing is needed."""

    def loss(
        self,
        model: Llama,
        batch: Batch,
        prepared: None,
        options: ForwardOptions,
        dropout_keys: jax.Array | None,
        placement: Placement,
        exchanged: Exchanged,
    ) -> tuple[jax.Array, jax.Array]:
        """Sum it over the supervised tokens."""
        total = loss_sum(model, batch, options, dropout_keys, placement, exchanged)
        return total, total


NEXT_TOKEN = NextToken()

# (state, frozen, batch, scale) -> the step's gradients times `scale`, the loss, the residuals, and the loss as it is
# halfway: ahead of the last backward pass. Gradients and loss are those of this device's rows.
Accumulate = Callable[[TrainState, Any, Batch, jax.Array], tuple[nnx.State, jax.Array, ExchangeErrors, jax.Array]]


def make_train_step(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    options: ForwardOptions,
    *,
    max_grad_norm: float,
    dropout_seed: int | None,
    placement: Placement = LOCAL,
    last_placement: Placement | None = None,
    group: DeviceGroup = ALONE,
    moments_on_host: bool = False,
    objective: Objective = NEXT_TOKEN,
    forward_placement: Placement | None = None,
) -> Callable[[TrainState, nnx.State, Batch], tuple[TrainState, Metrics]]:
    """Build the function (state, frozen, batch [A, M, S]) -> (state, metrics) that is to be jitted.

    The loss is the sum over supervised tokens divided by their number (by the sum of their weights, where rows have
    some), both over the whole optimizer step, so that it is the same for every split into micro-batches. A step whose
    loss or gradients are not finite, or whose loss is a spike, leaves parameters and optimizer as they were. With
    gradients pending in the state, those are applied, and the step's own take their place.

    Args:
        graph: the model's structure.
        optimizer: applied to the clipped gradient.
        schedule: the optimizer's learning rate by the number of updates, for the metrics.
        options: how the forward pass is computed.
        max_grad_norm: the global norm that gradients are clipped to; 0 does not clip.
        dropout_seed: seeds the adapters' dropout, None switches it off.
        placement: reaches parameters that are spread over devices.
        last_placement: the same for the last micro-batch, where that sums the gradients of all over the replicas.
        group: reaches the devices that share the rows; with it, the function is for use under shard_map.
        moments_on_host: whether the optimizer's moments wait in host memory between the steps.
        objective: gives the loss; another one than the next token's is not for streamed models.
        forward_placement: reaches parameters where no gradients are computed; by default as `placement`.
    """

    def micro_batch_loss(
        adapters: nnx.State,
        errors: ExchangeErrors,
        earlier: nnx.State | None,
        placement: Placement,
        frozen: nnx.State,
        batch: Batch,
        keys: Any,
        scale: Any,
        prepared: Any,
    ) -> Any:
        model = nnx.merge(graph, frozen, adapters)
        exchanged = Exchanged(errors, earlier)
        lowered, total = objective.loss(model, batch, prepared, options, keys, placement, exchanged)
        return lowered * scale, total

    def streamed_loss(
        adapters: nnx.State, errors: ExchangeErrors, frozen: StreamedFrozen, batch: Batch, keys: Any, scale: Any
    ) -> Any:
        model = nnx.merge(graph, frozen.parameters, adapters)
        total = streamed_loss_sum(model, frozen.waiting, batch, options, keys, placement, Exchanged(errors))
        return total * scale, total

    # The "gradient" of the residuals is the new residuals: see sharding.overlap.
    differentiated = jax.grad(micro_batch_loss, argnums=(0, 1), has_aux=True)

    def accumulated(
        state: TrainState, frozen: nnx.State, batch: Batch, scale: jax.Array
    ) -> tuple[nnx.State, jax.Array, ExchangeErrors, jax.Array]:
        """Sum gradients and losses over this device's part of the micro-batches; see `Accumulate`."""
        rows, indices = batch.tokens.shape[1], jnp.arange(len(batch.tokens))
        own = jax.tree.map(lambda row: row[0], state.residuals)
        keys_of = partial(row_keys, dropout_seed, state.step, first=group.first_row(rows), rows=rows)
        if placement.stream is not None:
            keys = jax.vmap(keys_of)(indices)
            scattered = own._replace(reduced=None)
            (gradients, errors), total = jax.grad(streamed_loss, argnums=(0, 1), has_aux=True)(
                state.adapters, scattered, frozen, batch, keys, scale
            )
            return gradients, total, errors._replace(reduced=own.reduced), total

        prepared = objective.prepare(
            nnx.merge(graph, frozen, state.adapters),
            batch,
            options,
            jax.vmap(keys_of)(indices),
            forward_placement or placement,
            group,
        )
        inputs = (indices, batch, prepared)

        def of_micro_batch(inputs: tuple, errors: ExchangeErrors, earlier: Any, placement: Placement) -> Any:
            index, micro_batch, prepared = inputs
            arguments = (frozen, micro_batch, keys_of(index), scale, prepared)
            return differentiated(state.adapters, errors, earlier, placement, *arguments)

        def accumulate(carry: tuple, inputs: tuple) -> tuple[tuple, None]:
            gradients, total, errors = carry
            (gradient, errors), loss = of_micro_batch(inputs, errors, None, placement)
            return (jax.tree.map(jnp.add, gradients, gradient), total + loss, errors), None

        # The last micro-batch is computed apart from the others where it exchanges more, or something halfway.
        is_last_apart = last_placement is not None or (state.pending is not None and own.reduced is not None)
        in_loop = len(indices) - is_last_apart
        carry = (jax.tree.map(jnp.zeros_like, state.adapters), jnp.float32(0), own._replace(reduced=None))
        if in_loop:
            carry, _ = jax.lax.scan(accumulate, carry, jax.tree.map(lambda x: x[:in_loop], inputs))
        halfway = carry[1]
        if is_last_apart and last_placement is None:
            carry, _ = accumulate(carry, jax.tree.map(lambda x: x[-1], inputs))
        gradients, total, errors = carry
        errors = errors._replace(reduced=own.reduced)
        if last_placement is not None:
            last = jax.tree.map(lambda x: x[-1], inputs)
            earlier = gradients if in_loop else None
            (gradients, errors), loss = of_micro_batch(last, errors, earlier, last_placement)
            total += loss
        return gradients, total, errors, halfway if in_loop else total

    update = Update(optimizer, schedule, max_grad_norm, group, moments_on_host)
    return step_of(accumulated, update, exchanges=last_placement is None)


def step_of(
    accumulated: Accumulate, update: Update, *, exchanges: bool = True
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, Metrics]]:
    """Build the function (state, frozen, batch) -> (state, metrics) from what gives the gradients; see above.

    `exchanges` says whether the gradients are still to be summed over the replicas.
    """
    group = update.group

    def step(state: TrainState, frozen: nnx.State, batch: Batch) -> tuple[TrainState, Metrics]:
        weights = batch.weights
        weight, supervised = group.total(jnp.stack([weights.sum(), (weights > 0).sum(dtype=weights.dtype)]))
        count = jnp.where(weight > 0, weight, 1)
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        summed, total, errors, halfway = accumulated(state, frozen, batch, scale / count)
        gradients = jax.tree.map(lambda g: g / scale, bare(nnx.to_pure_dict(summed)))
        loss = group.total(total) / count
        spike = is_spike(state.spike_guard, loss)
        if state.pending is None:
            if exchanges:
                gradients, errors = group.exchange(gradients, errors)
            new, accepted, metrics = update.apply(state, gradients, jnp.isfinite(loss) & ~spike)
            residuals = chosen(accepted, as_rows(errors), state.residuals)
        else:
            new, metrics = update.flush(state, halfway)
            accepted = jnp.isfinite(loss) & jnp.isfinite(group.total(group.squared_norm(gradients))) & ~spike
            new = new._replace(pending=Pending(as_rows(gradients), accepted))
            scattered = chosen(accepted, as_rows(errors.scattered), state.residuals.scattered)
            residuals = new.residuals._replace(scattered=scattered)
        finite = accepted | spike
        new = new._replace(
            step=state.step + 1,
            loss_scale=next_scale(state.loss_scale, finite),
            residuals=residuals,
            spike_guard=next_guard(state.spike_guard, loss, accepted),
        )
        metrics |= {"loss": loss, "supervised_tokens": supervised, **verdict(state, finite, spike)}
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


def make_evaluation_step(
    graph: nnx.GraphDef, options: ForwardOptions, placement: Placement = LOCAL, group: DeviceGroup = ALONE
) -> Callable[[nnx.State, nnx.State, Batch], tuple[jax.Array, jax.Array]]:
    """Build the function (adapters, frozen, batch [A, M, S]) -> (loss sum, sum of weights), without dropout."""

    def evaluate(adapters: nnx.State, frozen: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        if placement.stream is not None:
            model = nnx.merge(graph, frozen.parameters, adapters)
            total = streamed_loss_sum(model, frozen.waiting, batch, options, None, placement)
            return group.total(total), group.total(batch.weights.sum())
        model = nnx.merge(graph, frozen, adapters)

        def add(total: jax.Array, micro_batch: Batch) -> tuple[jax.Array, None]:
            return total + loss_sum(model, micro_batch, options, None, placement), None

        total, _ = jax.lax.scan(add, jnp.float32(0), batch)
        return group.total(total), group.total(batch.weights.sum())

    return evaluate
