"""One stage of a pipeline: consecutive layers on devices of their own, and the programs that it runs."""

import copy
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from models.parameters import Path, by_path, split
from models.stream import LayerInputs, layer_inputs
from sharding.compression import ErrorFeedback
from sharding.exchange import ExchangeErrors
from sharding.flat import bare
from sharding.program import MemoryPlan, memory
from sharding.residuals import from_layers, to_layers
from sharding.rules import PINNED, named_sharding, partition_spec, pinned
from zagora_jax.arrangement import Recipe
from zagora_jax.data.batches import Batch
from zagora_jax.distribution import Distribution, shardings_of, specs_of
from zagora_jax.step import (
    ForwardOptions,
    hidden_states,
    loss_sum,
    row_keys,
    streamed_hidden_states,
    streamed_loss_sum,
)
from zagora_jax.streaming import StreamedFrozen
from zagora_jax.train_state import TrainState, is_spike, next_guard, next_scale, verdict
from zagora_jax.update import as_rows, changed, chosen

EVERYWHERE = PartitionSpec()
ACTIVATION_AXES = ("rows", "tokens", None)

# Tasks that a stage may have in its queue, the running one among them.
MOST_QUEUED = 3


class Place(NamedTuple):
    """Where in training a task is, int32 each: the optimizer step, the micro-batch, and the layers before the stage."""

    step: Any
    micro_batch: Any
    first_layer: Any


@dataclass(frozen=True)
class Stage:
    """Layers `first_layer` to `first_layer + num_layers` of the model, on the devices of `distribution`."""

    first_layer: int
    distribution: Distribution

    @property
    def num_layers(self) -> int:
        """How many layers the stage has."""
        return self.distribution.model.config.num_layers

    @property
    def layers(self) -> slice:
        """Where its layers are in a stack of all layers."""
        return slice(self.first_layer, self.first_layer + self.num_layers)

    @property
    def is_first(self) -> bool:
        """Whether the stage begins with the embedding."""
        return self.distribution.model.ends.first

    @property
    def is_last(self) -> bool:
        """Whether the stage ends with the loss."""
        return self.distribution.model.ends.last

    @cached_property
    def paths(self) -> frozenset[Path]:
        """The frozen parameters of which the stage holds something."""
        return frozenset(by_path(self.distribution.frozen))

    @property
    def adapter_widths(self) -> list[int]:
        """Elements that a layer has of each adapter array, as they are stored."""
        return [spread.stored[1] for spread in jax.tree.leaves(self.distribution.adapters)]

    def part_of(self, whole: TrainState) -> TrainState:
        """Cut the stage's layers out of a whole state (of arrays or of shapes); residuals are left out."""
        adapters, optimizer = (jax.tree.map(self._part, tree) for tree in (whole.adapters, whole.optimizer))
        return self.distribution.begin(whole._replace(adapters=adapters, optimizer=optimizer))

    def put_state(self, whole: TrainState) -> TrainState:
        """Lay the stage's part of a whole state out."""
        state = self.distribution.put_state(self.part_of(whole))
        if whole.residuals.reduced is None:
            return state
        return state._replace(residuals=self.put_residuals(whole.residuals.reduced))

    def put_residuals(self, by_layer: ErrorFeedback) -> ExchangeErrors:
        """Lay the stage's part of the residuals of all layers out."""
        own = ErrorFeedback(by_layer.sent[:, self.layers], by_layer.owned[self.layers])
        residuals = ExchangeErrors(reduced=from_layers(own))
        return self.distribution.put(self.distribution.residuals(), residuals)

    def residuals_by_layer(self, state: TrainState) -> ErrorFeedback | None:
        """Return the residuals of the stage's layers, on the host."""
        reduced = state.residuals.reduced
        return None if reduced is None else to_layers(reduced)

    def whole_state(self, state: TrainState, like: TrainState) -> TrainState:
        """Undo `put_state`, for the stage's layers alone and without the residuals."""
        whole = self.distribution.whole_state(state, self.part_of(like))
        return whole._replace(residuals=ExchangeErrors())

    def _part(self, leaf: Any) -> Any:
        if not leaf.ndim:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((self.num_layers, *leaf.shape[1:]), leaf.dtype)
        return leaf[self.layers]

    def send(self, activation: jax.Array) -> jax.Array:
        """Bring activations [M, S, hidden], or their gradient, from a neighbour's devices to this stage's."""
        return jax.device_put(activation, named_sharding(self.distribution.mesh, ACTIVATION_AXES))

    def abstract_activation(self, batch: Batch) -> jax.ShapeDtypeStruct:
        """Describe the activations between stages."""
        model = self.distribution.model
        shape = (*batch.tokens.shape[1:], model.config.hidden_size)
        sharding = named_sharding(self.distribution.mesh, ACTIVATION_AXES)
        return jax.ShapeDtypeStruct(shape, model.dtype, sharding=sharding)

    def abstract_layer_inputs(self, batch: Batch) -> LayerInputs:
        """Describe what waits in host memory for the backward task of a micro-batch, with streamed layers."""
        order, activation = self.distribution.stream, self.abstract_activation(batch)
        assert order is not None
        spec = partition_spec((None, None, *ACTIVATION_AXES))

        def of_stack(stack: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(stack.shape, stack.dtype, sharding=pinned(self.distribution.mesh, spec))

        x = jax.ShapeDtypeStruct((1, *activation.shape), activation.dtype)
        return jax.tree.map(of_stack, layer_inputs(order, x))

    def abstract_place(self) -> Place:
        """Describe a Place."""
        return Place(*[self.everywhere(jnp.int32)] * 3)

    def everywhere(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """Describe a number that all devices of the stage have."""
        sharding = NamedSharding(self.distribution.mesh, EVERYWHERE)
        return jax.ShapeDtypeStruct((), dtype, sharding=sharding)

    def run(
        self,
        adapters: nnx.State,
        frozen: Any,
        batch: Batch,
        place: Place,
        inputs: jax.Array | None,
        options: ForwardOptions,
        dropout_seed: int | None,
    ) -> jax.Array:
        """Compute one micro-batch of batch [A, M, S]: what the layers return, or in the last stage the loss."""
        if self.distribution.stream is not None:
            out, _ = self._run_streamed(adapters, frozen, batch, place, inputs, options, dropout_seed)
            return out
        micro_batch = Batch(*(lax.dynamic_index_in_dim(array, place.micro_batch, keepdims=False) for array in batch))
        keys = self._dropout_keys(batch, place, dropout_seed)
        model = nnx.merge(self._graph, frozen, adapters)
        compute = loss_sum if self.is_last else hidden_states
        return compute(
            model,
            micro_batch,
            options,
            keys,
            self.distribution.placement,
            inputs=inputs,
            first_layer=place.first_layer,
        )

    def _run_streamed(
        self,
        adapters: nnx.State,
        frozen: StreamedFrozen,
        batch: Batch,
        place: Place,
        inputs: jax.Array | None,
        options: ForwardOptions,
        dropout_seed: int | None,
        **between_tasks: Any,
    ) -> tuple[jax.Array, LayerInputs | None]:
        """Do what `run` does with streamed layers; for `between_tasks` see `Llama.streamed_hidden_states`.

        Returns:
            What `run` does; and the layers' inputs, where they are to be kept.
        """
        micro_batch = Batch(*(lax.dynamic_index_in_dim(array, place.micro_batch) for array in batch))  # [1, M, S]
        keys = self._dropout_keys(batch, place, dropout_seed)
        model = nnx.merge(self._graph, frozen.parameters, adapters)
        compute = streamed_loss_sum if self.is_last else streamed_hidden_states
        out = compute(
            model,
            frozen.waiting,
            micro_batch,
            options,
            None if keys is None else keys[None],
            self.distribution.placement,
            inputs=None if inputs is None else inputs[None],
            first_layer=place.first_layer,
            **between_tasks,
        )
        out, kept = out if between_tasks.get("keeping") else (out, None)
        return out if self.is_last else out[0], kept

    def gradients(
        self,
        adapters: nnx.State,
        frozen: Any,
        batch: Batch,
        place: Place,
        inputs: Any,
        cotangent: jax.Array,
        options: ForwardOptions,
        dropout_seed: int | None,
    ) -> tuple[jax.Array, nnx.State, jax.Array | None]:
        """Return what `run` returns, and its gradients with regard to adapters and inputs.

        Where the forward task kept its layers' inputs, they take the place of `inputs`, and what `run` returns is not
        computed again.
        """
        kept = inputs if isinstance(inputs, LayerInputs) else None
        if kept is not None:
            inputs = None if self.is_first else jnp.zeros_like(cotangent)  # whose values nothing depends on

        def run(adapters: nnx.State, inputs: Any) -> jax.Array:
            arguments = (adapters, frozen, batch, place, inputs, options, dropout_seed)
            return self.run(*arguments) if kept is None else self._run_streamed(*arguments, kept=kept)[0]

        out, pull_back = jax.vjp(run, adapters, inputs)
        return out, *pull_back(cotangent)

    def _dropout_keys(self, batch: Batch, place: Place, seed: int | None) -> jax.Array | None:
        rows = batch.tokens.shape[1]
        return row_keys(seed, place.step, place.micro_batch, self.distribution.group.first_row(rows), rows)

    @cached_property
    def _graph(self) -> nnx.GraphDef:
        return split(self.distribution.model)[0]

    def compile_forward(self, options: ForwardOptions, dropout_seed: int | None, batch: Batch) -> jax.stages.Compiled:
        """Compile (adapters, frozen, batch, place, inputs) -> activations, or in the last stage the summed loss."""
        distribution = self.distribution

        def forward(adapters: nnx.State, frozen: Any, batch: Batch, place: Place, inputs: Any) -> jax.Array:
            out = self.run(adapters, frozen, batch, place, inputs, options, dropout_seed)
            return distribution.group.total(out) if self.is_last else out

        out_spec = EVERYWHERE if self.is_last else partition_spec(ACTIVATION_AXES)
        return distribution.compile(forward, self.arguments(batch), out_spec)

    def compile_keeping_forward(
        self, options: ForwardOptions, dropout_seed: int | None, batch: Batch
    ) -> jax.stages.Compiled:
        """Compile (adapters, frozen, batch, place, inputs) -> (activations, the streamed layers' inputs)."""

        def forward(adapters: nnx.State, frozen: Any, batch: Batch, place: Place, inputs: Any) -> Any:
            return self._run_streamed(adapters, frozen, batch, place, inputs, options, dropout_seed, keeping=True)

        kept = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_layer_inputs(batch))
        out_spec = (partition_spec(ACTIVATION_AXES), kept)
        return self.distribution.compile(forward, self.arguments(batch), out_spec)

    def arguments(self, batch: Batch) -> tuple[Any, ...]:
        """Describe what the forward program takes."""
        distribution = self.distribution
        return (
            distribution.abstract_adapters(),
            distribution.abstract_frozen(),
            distribution.abstract_batch(batch),
            self.abstract_place(),
            None if self.is_first else self.abstract_activation(batch),
        )

    def abstract_gradients(self) -> nnx.State:
        """Describe the sums of gradients, float32 [replicas, ...]: each replica's own, until they are exchanged."""
        mesh = self.distribution.mesh

        def of_array(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(mesh, PartitionSpec("data", *leaf.sharding.spec))
            return jax.ShapeDtypeStruct((mesh.shape["data"], *leaf.shape), leaf.dtype, sharding=sharding)

        return jax.tree.map(of_array, self.distribution.abstract_adapters())


class PipelineState(NamedTuple):
    """The training state of every stage: its own adapters and their optimizer state, and the same counters."""

    stages: tuple[TrainState, ...]

    @property
    def adapters(self) -> tuple[nnx.State, ...]:
        """The adapters of every stage."""
        return tuple(state.adapters for state in self.stages)


class StagePrograms:
    """What a stage runs in training, compiled. The first argument of each is used up, but for `forward`.

    Attributes:
        keeps: whether the forward task leaves its layers' inputs in host memory for the backward task.
        forward: see `Stage.compile_forward` and, where it keeps something, `compile_keeping_forward`; the last stage
            has none.
        backward: (gradients, adapters, frozen, batch, place, inputs, cotangent) -> (gradients, gradient of the inputs,
            loss). It computes the forward pass again, unless the forward task has kept its layers' inputs: then it
            takes those as inputs. The cotangent is that of the activations; in the last stage, what the loss is
            multiplied by. Before the last stage the loss is 0.
        exchange: (gradients, residuals, scale) -> (gradients, new residuals, squared norm), gradients over `scale`.
        update: (state, gradients, residuals, norm, loss) -> (state, learning rate, verdict); see `train_state.verdict`.
    """

    def __init__(self, stage: Stage, recipe: Recipe, whole: TrainState, batch: Batch):
        """Compile the programs; `whole`, the stage's part, and `batch` give shapes."""
        self.stage, self._recipe = stage, recipe
        distribution = stage.distribution
        self._state = jax.tree.map(lambda spread: spread.abstract(), distribution.state(whole))
        self._gradients = stage.abstract_gradients()
        options = recipe.options
        self.keeps = distribution.stream is not None and options.offload_activations and not stage.is_last
        compile_forward = stage.compile_keeping_forward if self.keeps else stage.compile_forward
        self.forward = None if stage.is_last else compile_forward(options, recipe.dropout_seed, batch)
        self.backward = self._compile_backward(batch)
        self.activation_bytes = _device_bytes(stage.abstract_activation(batch))
        self.kept_bytes = _bytes_of(stage.abstract_layer_inputs(batch), on_host=True) if self.keeps else 0
        self.exchange = self._compile_exchange()
        self.update = self._compile_update()
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._gradients)
        self.zeros = jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._gradients),
            out_shardings=shardings,
        )

    def at(self, stage: Stage) -> "StagePrograms":
        """Return the same programs for a stage with as many layers, but other ones."""
        programs = copy.copy(self)
        programs.stage = stage
        return programs

    def _compile_backward(self, batch: Batch) -> jax.stages.Compiled:
        stage, recipe = self.stage, self._recipe

        def backward(
            gradients: nnx.State,
            adapters: nnx.State,
            frozen: Any,
            batch: Batch,
            place: Place,
            inputs: Any,
            cotangent: jax.Array,
        ) -> tuple[nnx.State, Any, jax.Array]:
            arguments = (adapters, frozen, batch, place, inputs, cotangent)
            out, gradient, d_inputs = stage.gradients(*arguments, recipe.options, recipe.dropout_seed)
            gradients = jax.tree.map(lambda total, term: total + term[None], gradients, gradient)
            loss = stage.distribution.group.total(out) if stage.is_last else jnp.float32(0)
            return gradients, d_inputs, loss

        *others, inputs = self.stage.arguments(batch)
        cotangent = stage.everywhere(jnp.float32) if stage.is_last else stage.abstract_activation(batch)
        out_specs = (specs_of(self._gradients), specs_of(inputs), EVERYWHERE)
        if self.keeps:
            inputs = self.stage.abstract_layer_inputs(batch)
        arguments = (self._gradients, *others, inputs, cotangent)
        return stage.distribution.compile(backward, arguments, out_specs, donated=(0,))

    def _compile_exchange(self) -> jax.stages.Compiled:
        group = self.stage.distribution.group

        def exchange(gradients: nnx.State, residuals: Any, scale: jax.Array) -> tuple[nnx.State, Any, jax.Array]:
            own, errors = jax.tree.map(lambda row: row[0], (gradients, residuals))
            total, errors = group.exchange(jax.tree.map(lambda g: g / scale, own), errors)
            return total, as_rows(errors), group.squared_norm(total)

        arguments = (self._gradients, self._state.residuals, self.stage.everywhere(jnp.float32))
        out_specs = (specs_of(self._state.adapters), specs_of(self._state.residuals), EVERYWHERE)
        return self.stage.distribution.compile(exchange, arguments, out_specs, donated=(0,))

    def _compile_update(self) -> jax.stages.Compiled:
        recipe = self._recipe

        def update(
            state: TrainState, gradients: nnx.State, residuals: Any, norm: jax.Array, loss: jax.Array
        ) -> tuple[TrainState, jax.Array, dict[str, jax.Array]]:
            rate = jnp.asarray(recipe.schedule(state.updates), jnp.float32)
            finite, spike = jnp.isfinite(norm) & jnp.isfinite(loss), is_spike(state.spike_guard, loss)
            accepted = finite & ~spike
            of_adapters = bare(nnx.to_pure_dict(gradients))
            new = changed(
                recipe.optimizer,
                state,
                of_adapters,
                norm,
                accepted,
                recipe.max_grad_norm,
                moments_on_host=self.stage.distribution.moments_on_host,
            )
            new = new._replace(
                step=state.step + 1,
                loss_scale=next_scale(state.loss_scale, finite),
                residuals=chosen(accepted, residuals, state.residuals),
                spike_guard=next_guard(state.spike_guard, loss, accepted),
            )
            return new, rate, verdict(state, finite, spike)

        stage = self.stage
        numbers = (stage.everywhere(jnp.float32), stage.everywhere(jnp.float32))
        arguments = (self._state, self._state.adapters, self._state.residuals, *numbers)
        out_specs = (shardings_of(self._state), EVERYWHERE, EVERYWHERE)
        return stage.distribution.compile(update, arguments, out_specs, donated=(0,))

    def planned_memory(self, inputs: int, travelling: int) -> int:
        """Return the bytes that training needs of each of the stage's devices.

        What the stage holds all the time, and of its programs the most that one needs beside its arguments.

        Args:
            inputs: of how many micro-batches the stage has the inputs at most.
            travelling: how many activations are on their way at most.
        """
        waiting = min(inputs, MOST_QUEUED) if self.keeps else inputs
        rest = max(_beside_arguments(memory(program)) for program in self._programs)
        return _bytes_of(self._held, on_host=False) + (waiting + travelling) * self.activation_bytes + rest

    def planned_host_memory(self, inputs: int) -> int:
        """Return the bytes of pinned host memory that training needs for each of the stage's devices."""
        kept = (inputs + 1) * self.kept_bytes  # one more is made room for while the oldest is used
        rest = max(plan.host_temporaries for plan in map(memory, self._programs))
        return _bytes_of(self._held, on_host=True) + kept + rest

    @property
    def _held(self) -> tuple[Any, ...]:
        return self.stage.distribution.abstract_frozen(), self._state, self._gradients

    @property
    def _programs(self) -> list[jax.stages.Compiled]:
        programs = (self.forward, self.backward, self.exchange, self.update)
        return [program for program in programs if program is not None]


def _bytes_of(tree: Any, *, on_host: bool) -> int:
    """Sum the bytes that a device holds of the arrays in a tree, or that the host does for it."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if (leaf.sharding.memory_kind == PINNED) == on_host]
    return sum(map(_device_bytes, leaves))


def _device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _beside_arguments(plan: MemoryPlan) -> int:
    return plan.temporaries + plan.outputs - plan.aliased
