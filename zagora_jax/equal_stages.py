"""A run's arrays cut into equal stages that one program runs: the layers lie over the mesh axis "stage".

Embedding and head are shared out over the stages by words. See `sharding.lockstep` for the order in which the stages
compute.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from models.llama import Ends, Llama
from models.parameters import Path, by_path, split
from sharding.compression import Compression, ErrorFeedback
from sharding.exchange import ExchangeErrors
from sharding.lockstep import AXIS, StageFunctions, pipeline_gradients, pipeline_loss, pipeline_outputs
from sharding.mesh import rows_divisor, stage_mesh
from sharding.residuals import from_layers, to_layers
from sharding.rules import partition_spec
from sharding.spread import Spread
from zagora_jax.arrangement import CompiledEvaluation, CompiledNextTokens, Recipe, Say, silent
from zagora_jax.checkpoints.load import Destination, is_stacked
from zagora_jax.data.batches import Batch
from zagora_jax.decoding import next_tokens
from zagora_jax.distribution import Distribution, SpreadStep, describe_devices
from zagora_jax.stage_residuals import exchange_state, first_residuals
from zagora_jax.step import ForwardOptions, head_loss, hidden_states, row_keys, step_of
from zagora_jax.train_state import TrainState
from zagora_jax.update import Update


class EqualStages:
    """An `Arrangement` in equal stages."""

    def __init__(self, mesh: Mesh, model: Llama, compression: Compression = "none", moments_on_host: bool = False):
        """Cut `model` into as many stages as the mesh has.

        Args:
            mesh: the devices; those of a stage hold its layers as `Distribution` lays them out.
            model: the declared model.
            compression: how gradients travel between the replicas of a stage.
            moments_on_host: whether the optimizer's moments wait in host memory between the steps.

        Raises:
            ValueError: the stages would not be equal.
        """
        stages, layers = mesh.shape[AXIS], model.config.num_layers
        if layers % stages:
            raise ValueError(f"{layers} layers do not go into {stages} equal stages")
        self.mesh, self.model = mesh, model
        self.layers_of_each = layers // stages
        self.distribution = Distribution(mesh, model, compression, moments_on_host=moments_on_host)

    @property
    def layers(self) -> list[int]:
        """How many layers each stage has."""
        return [self.layers_of_each] * self.mesh.shape[AXIS]

    @property
    def rows_divisor(self) -> int:
        """How many devices share the rows of a micro-batch."""
        return rows_divisor(self.mesh)

    @property
    def feed(self) -> None:
        """No layer is read from the disk while programs run."""
        return None

    def facts(self) -> dict[str, str]:
        """Name the devices and the cut."""
        cut = f"{', '.join(map(str, self.layers))}, in one program; none moves"
        return {"devices": describe_devices(self.mesh), "layers of each stage": cut}

    def load(self, read: Callable[[Destination], nnx.State]) -> Any:
        """Bring frozen parameters onto the devices, each layer to those of its stage alone."""
        destination = EqualDestination(self.distribution, self._stages())
        return destination.joined(read(destination))

    def _stages(self) -> list[Distribution]:
        """Describe each stage by itself."""
        return [Distribution(stage_mesh(self.mesh, index), self._part) for index in range(self.mesh.shape[AXIS])]

    @cached_property
    def _part(self) -> Llama:
        """The layers of any stage."""
        return self.model.part(self.layers_of_each, Ends(first=False, last=False))

    @cached_property
    def _ends(self) -> Llama:
        """The same with embedding, norm and head, as all stages have a part of those."""
        return self.model.part(self.layers_of_each, Ends())

    @property
    def exchange_state(self) -> dict[str, Any]:
        """Say what the residuals of a whole state belong to."""
        return exchange_state(self.mesh, self.distribution.compression)

    def begin(self, state: TrainState) -> TrainState:
        """Add the residuals before the first step to a whole state."""
        return first_residuals(state, self.distribution, self.model.config.num_layers)

    def put_state(self, whole: TrainState) -> TrainState:
        """Lay a training state out."""
        reduced = whole.residuals.reduced
        residuals = ExchangeErrors(reduced=None if reduced is None else from_layers(reduced))
        return self.distribution.put_state(whole._replace(residuals=residuals))

    def whole_state(self, state: TrainState, like: TrainState) -> TrainState:
        """Undo `put_state`, on the host."""
        reduced = state.residuals.reduced
        by_layer: ErrorFeedback | None = None if reduced is None else to_layers(reduced)
        bare, like = (own._replace(residuals=ExchangeErrors()) for own in (state, like))
        whole = jax.tree.map(
            lambda spread, stored: spread.whole_array(stored),
            self.distribution.state(like)._replace(residuals=ExchangeErrors()),
            bare,
        )
        return whole._replace(residuals=ExchangeErrors(reduced=by_layer))

    def put_adapters(self, whole: nnx.State) -> nnx.State:
        """Lay whole adapters out."""
        return self.distribution.put_adapters(whole)

    def layout(self, like: TrainState) -> dict[str, Any]:
        """Return the bytes that each device holds, by kind; `like` gives the shapes of the training state."""
        return {**self.distribution.layout(like), "layers_of_stages": self.layers}

    def compile_training(self, recipe: Recipe, whole: TrainState, batch: Batch, say: Say = silent) -> SpreadStep:
        """Compile the train step of `recipe`."""

        def accumulated(state: TrainState, frozen: nnx.State, batch: Batch, scale: jax.Array) -> tuple:
            functions = self._functions(state.adapters, frozen, batch, recipe.options, state.step, recipe.dropout_seed)
            gradients, total = pipeline_gradients(functions, state.adapters, len(batch.tokens), scale)
            return gradients, total, jax.tree.map(lambda row: row[0], state.residuals), total

        spread = self.distribution
        update = Update(recipe.optimizer, recipe.schedule, recipe.max_grad_norm, spread.group, spread.moments_on_host)
        return SpreadStep(spread, spread.compile_step(step_of(accumulated, update), whole, batch))

    def compile_evaluation(self, options: ForwardOptions, batch: Batch) -> CompiledEvaluation:
        """Compile an evaluation for this mesh; `batch` gives shapes."""
        spread = self.distribution

        def evaluate(adapters: nnx.State, frozen: nnx.State, batch: Batch) -> tuple[jax.Array, jax.Array]:
            functions = self._functions(adapters, frozen, batch, options)
            total = pipeline_loss(functions, adapters, len(batch.tokens))
            return spread.group.total(total), spread.group.total(batch.weights.sum())

        return spread.compile_forward(evaluate, batch, PartitionSpec())

    def compile_next_tokens(self, options: ForwardOptions, batch: Batch) -> CompiledNextTokens:
        """Compile what continues rows by a token each, for this mesh; `batch` gives shapes."""
        placement = self.distribution.placement

        def continued(adapters: nnx.State, frozen: nnx.State, batch: Batch) -> jax.Array:
            ends = nnx.merge(split(self._ends)[0], frozen, adapters)

            def end(y: jax.Array, _: jax.Array) -> jax.Array:
                return next_tokens(ends, ends.model.norm(y, placement), batch.weights[0], placement)

            return pipeline_outputs(self._functions(adapters, frozen, batch, options), adapters, 1, end)[0]

        return self.distribution.compile_forward(continued, batch, partition_spec(("rows",)))

    def _functions(
        self,
        adapters: nnx.State,
        frozen: nnx.State,
        batch: Batch,
        options: ForwardOptions,
        step: Any = 0,
        dropout_seed: int | None = None,
    ) -> StageFunctions:
        """Return what the stages compute of batch [A, M, S] under shard_map, all arrays being this device's part."""
        placement, rows = self.distribution.placement, batch.tokens.shape[1]
        ends = nnx.merge(split(self._ends)[0], frozen, adapters)
        graph, layers = split(self._part)[0], _of_layers(frozen)
        first_layer = lax.axis_index(AXIS) * self.layers_of_each

        def of_batch(micro_batch: jax.Array) -> Batch:
            return Batch(*(lax.dynamic_index_in_dim(array, micro_batch, keepdims=False) for array in batch))

        def enter(micro_batch: jax.Array) -> jax.Array:
            return ends.embed(of_batch(micro_batch).tokens, placement)

        def run(adapters: nnx.State, x: jax.Array, micro_batch: jax.Array) -> jax.Array:
            keys = row_keys(dropout_seed, step, micro_batch, self.distribution.group.first_row(rows), rows)
            model = nnx.merge(graph, layers, adapters)
            of_part = {"inputs": x, "first_layer": first_layer}
            return hidden_states(model, of_batch(micro_batch), options, keys, placement, **of_part)

        def loss(y: jax.Array, micro_batch: jax.Array) -> jax.Array:
            own = of_batch(micro_batch)
            return head_loss(ends, ends.model.norm(y, placement), own.targets, own.weights, None, placement)

        return StageFunctions(enter, run, loss, held=layers, keeps_input=options.remat == "stage")


def _of_layers(frozen: nnx.State) -> nnx.State:
    return nnx.from_flat_state([(path, variable) for path, variable in by_path(frozen).items() if is_stacked(path)])


class EqualDestination:
    """Where parameters go: each layer to the devices of its stage, the rest to all.

    In place of the layers of stages that no device of this process belongs to there is None.
    """

    def __init__(self, whole: Distribution, stages: Sequence[Distribution]):
        """Make room; `stages` describe the equal parts of `whole`."""
        self._whole, self._stages = whole, stages
        self._layers_of_each = stages[0].model.config.num_layers
        own = jax.process_index()
        self._is_own = [any(d.process_index == own for d in stage.mesh.devices.flat) for stage in stages]

    def empty(self, path: Path, declared: Any) -> Any:
        """Return every stage's stack of layers of a frozen parameter, without values yet."""
        empty = zip(self._stages, self._is_own, strict=True)
        return tuple(stage.empty(path, declared) if is_own else None for stage, is_own in empty)

    def set_layer(self, path: Path, stack: Any, value: Any, layer: int) -> Any:
        """Put one layer's value into the stack of its stage."""
        index, own = divmod(layer, self._layers_of_each)
        if not self._is_own[index]:
            return stack
        return (*stack[:index], self._stages[index].set_layer(path, stack[index], value, own), *stack[index + 1 :])

    def whole(self, path: Path, value: Any) -> Any:
        """Lay out a frozen parameter that is not stacked, or a whole stack."""
        return self._whole.whole(path, value)

    def joined(self, parameters: nnx.State) -> nnx.State:
        """Make one array over all stages of every stack that came a layer at a time; nothing is copied."""
        spreads = by_path(self._whole.frozen)

        def of_variable(path: Path, variable: nnx.Variable) -> nnx.Variable:
            value = variable.get_value()
            if type(value) is not tuple:
                return variable
            own = [stage for stage in value if stage is not None]
            return variable.replace(jax.tree.map(_joined, spreads[path].get_value(), *own))

        return nnx.from_flat_state([(path, of_variable(path, v)) for path, v in by_path(parameters).items()])


def _joined(spread: Spread, *stages: Any) -> Any:
    """Make one spread array of the stages' arrays, whose pieces on the devices it takes over."""
    pieces = [shard.data for stage in stages for shard in jax.tree.leaves(stage)[0].addressable_shards]
    return spread.wrap(jax.make_array_from_single_device_arrays(spread.stored, spread.sharding, pieces))
