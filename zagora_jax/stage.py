"""One stage of a pipeline: consecutive layers on devices of their own, and what they compute."""

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
from sharding.residuals import from_layers, to_layers
from sharding.rules import named_sharding, partition_spec, pinned
from zagora_jax.data.batches import Batch
from zagora_jax.distribution import Distribution
from zagora_jax.step import (
    ForwardOptions,
    hidden_states,
    loss_sum,
    row_keys,
    streamed_hidden_states,
    streamed_loss_sum,
)
from zagora_jax.streaming import StreamedFrozen
from zagora_jax.train_state import TrainState

EVERYWHERE = PartitionSpec()
ACTIVATION_AXES = ("rows", "tokens", None)
ACTIVATION_SPEC = partition_spec(ACTIVATION_AXES)


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

        out_spec = EVERYWHERE if self.is_last else ACTIVATION_SPEC
        return distribution.compile(forward, self.arguments(batch), out_spec)

    def compile_next_tokens(self, options: ForwardOptions, batch: Batch) -> jax.stages.Compiled:
        """Compile `compile_forward`'s program, in the last stage with the next tokens in the loss's place."""
        if not self.is_last:
            return self.compile_forward(options, None, batch)

        def forward(adapters: nnx.State, frozen: Any, batch: Batch, place: Place, inputs: Any) -> jax.Array:
            return self.distribution.next_tokens(options, adapters, frozen, batch, inputs, place.first_layer)

        return self.distribution.compile(forward, self.arguments(batch), partition_spec(("rows",)))

    def compile_keeping_forward(
        self, options: ForwardOptions, dropout_seed: int | None, batch: Batch
    ) -> jax.stages.Compiled:
        """Compile (adapters, frozen, batch, place, inputs) -> (activations, the streamed layers' inputs)."""

        def forward(adapters: nnx.State, frozen: Any, batch: Batch, place: Place, inputs: Any) -> Any:
            return self._run_streamed(adapters, frozen, batch, place, inputs, options, dropout_seed, keeping=True)

        kept = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_layer_inputs(batch))
        out_spec = (ACTIVATION_SPEC, kept)
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
