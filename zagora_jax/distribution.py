"""A run's arrays and its step, spread over a mesh of devices."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.llama import Llama
from models.parameters import Adapter, Frozen, Path, by_path, split
from models.placement import Placement
from models.quantization import parts
from models.quantization.parts import Segments
from models.stream_order import StreamOrder
from sharding.compiler import compiler_options, uses_host_memory
from sharding.compression import Compression
from sharding.exchange import Exchange, ExchangeErrors
from sharding.flat import gather
from sharding.group import Group
from sharding.layer_exchange import LayerExchange
from sharding.mesh import SHARD_AXES, rows_divisor, shard_count
from sharding.program import collectives, memory, traffic
from sharding.rules import named_sharding, partition_spec
from sharding.spanning import place
from sharding.spread import Spread
from sharding.targets import lower_for
from sharding.tensor import Parts, alike, enter, leave
from sharding.vocabulary import ShardedVocabulary
from zagora_jax.arrangement import CompiledEvaluation, CompiledNextTokens, Recipe, Say, silent
from zagora_jax.checkpoints.load import Destination, set_layer
from zagora_jax.data.batches import Batch
from zagora_jax.decoding import next_tokens
from zagora_jax.layer_feed import LayerFeed
from zagora_jax.optimizer import QuantizedMoment
from zagora_jax.step import (
    ForwardOptions,
    hidden_states,
    make_evaluation_step,
    make_train_step,
    streamed_hidden_states,
)
from zagora_jax.streaming import StreamedDestination, StreamedFrozen, WaitingLayers, streamed_spreads
from zagora_jax.tensor_parts import tensor_segments
from zagora_jax.train_state import Pending, TrainState
from zagora_jax.update import Metrics, Update

GradientExchange = Literal["synchronous", "overlapped", "delayed"]

BATCH_AXES = ("accumulation", "rows", "tokens")


@dataclass(frozen=True)
class Distribution:
    """How a model and its training state lie on a mesh.

    Attributes:
        mesh: the devices, see `sharding.mesh`.
        model: the declared model.
        compression: how gradients travel.
        exchange: when they do: at once, under the backward pass of other layers, or between replicas a step later.
        stream: which layers' frozen parameters wait in host memory; None: none do.
        moments_on_host: whether the optimizer's moments wait in host memory between the steps.
        slots: for how many streamed layers there is room in host memory, where they are read from the disk when they
            are needed; None: for all of them.
    """

    mesh: Mesh
    model: Llama
    compression: Compression = "none"
    exchange: GradientExchange = "synchronous"
    stream: StreamOrder | None = None
    moments_on_host: bool = False
    slots: int | None = None

    @property
    def rows_divisor(self) -> int:
        """How many devices share the rows of a micro-batch."""
        return rows_divisor(self.mesh)

    @property
    def exchange_state(self) -> dict[str, Any]:
        """Say what the residuals and pending gradients of a training state belong to."""
        return {"compression": self.compression, "exchange": self.exchange, "mesh": dict(self.mesh.shape)}

    @cached_property
    def segments(self) -> dict[str, Segments]:
        """How each logical axis is cut over "tensor", if it is.

        Raises:
            UserError: more devices along "tensor" than key/value heads.
        """
        return tensor_segments(self.model.config, self.mesh.shape["tensor"])

    @cached_property
    def placement(self) -> Placement:
        """How the model reaches parameters on this mesh, without gradients."""
        vocabulary = ShardedVocabulary(self.model.config.vocab_size)
        ring = None if self.feed is None else self.feed.ring
        placement = Placement(fetch=gather, vocabulary=vocabulary, stream=self.stream, ring=ring)
        if self.segments:
            placement = replace(placement, part=Parts(self.segments).own, enter=enter, leave=leave, alike=alike)
        return placement

    @cached_property
    def training_placement(self) -> Placement:
        """The same with gradients, which each micro-batch sums over the shards in the backward pass of each layer."""
        if self._layer_exchange.shards is None:
            return self.placement  # whose fetching sums them
        exchange = replace(self._layer_exchange, replicas=None)
        return replace(self.placement, adapters=LayerExchange(exchange, deferred=self.exchange != "synchronous"))

    @cached_property
    def last_placement(self) -> Placement | None:
        """The same for the last micro-batch, where that also sums over "data" in the backward pass."""
        if self.exchange != "overlapped" or self._layer_exchange.replicas is None:
            return None
        return replace(self.placement, adapters=LayerExchange(self._layer_exchange, deferred=True))

    @cached_property
    def _layer_exchange(self) -> Exchange:
        """The exchange of one layer's gradients, over axes that have several devices.

        Uncompressed, the sum over the shards is the transpose of the adapters' gathers, one a matrix, which the
        compiler puts under the layer's other computations by itself. With streamed layers, adapters are gathered, and
        their gradients summed, once for all micro-batches.
        """
        replicas = "data" if self.mesh.shape["data"] > 1 else None
        in_backward = self.compression != "none" or self.stream is not None
        shards = SHARD_AXES if shard_count(self.mesh) > 1 and in_backward else None
        return Exchange(self.compression, replicas, shards, self.model.dtype)

    @cached_property
    def group(self) -> Group:
        """How the step reaches the other devices."""
        return Group(self.compression)

    @cached_property
    def frozen(self) -> nnx.State:
        """The Spread of every array of the frozen parameters; a matrix that is cut has a part a device along tensor."""

        def of_variable(variable: nnx.Variable, cut: Callable[[Any], Any] | None) -> nnx.Variable:
            value, axes = variable.get_value(), variable.get_metadata("axes")
            if cut is not None:
                value = jax.eval_shape(jax.vmap(cut), value)
                axes = parts.axes(value, ("layers",))
            return variable.replace(jax.tree.map(partial(Spread, self.mesh, unit=1, flat="flat_frozen"), value, axes))

        declared = by_path(nnx.state(self.model, Frozen))
        spreads = nnx.from_flat_state([(path, of_variable(v, self._cuts[path])) for path, v in declared.items()])
        return spreads if self.stream is None else streamed_spreads(spreads, self.stream)

    @cached_property
    def waiting(self) -> WaitingLayers | None:
        """The layers that wait in host memory."""
        return None if self.stream is None else WaitingLayers(self.mesh, self.stream, self.frozen, self.slots)

    @cached_property
    def feed(self) -> LayerFeed | None:
        """What reads streamed layers from the disk; to be opened before programs run."""
        if self.stream is None or self.slots is None:
            return None
        return LayerFeed(self.mesh, self.model, self.stream, self.slots, self._frozen_by_path)

    @cached_property
    def adapters(self) -> nnx.State:
        """The Spread of every array of the adapters."""
        declared = by_path(nnx.state(self.model, Adapter))

        def of_variable(variable: nnx.Variable) -> nnx.Variable:
            return variable.replace(Spread(self.mesh, variable.get_value(), variable.get_metadata("axes")))

        return nnx.from_flat_state([(path, of_variable(variable)) for path, variable in declared.items()])

    @cached_property
    def _cuts(self) -> dict[Path, Callable[[Any], Any] | None]:
        """For each frozen parameter what cuts one layer of it over "tensor", None where it stays whole."""

        def of_variable(variable: nnx.Variable) -> Callable[[Any], Any] | None:
            for axis, name in enumerate(variable.get_metadata().get("matrix_axes", ())):
                if name in self.segments:
                    return partial(_cut, axis=axis, segments=self.segments[name], count=self.mesh.shape["tensor"])
            return None

        return {path: of_variable(variable) for path, variable in by_path(nnx.state(self.model, Frozen)).items()}

    def state(self, whole: TrainState) -> TrainState:
        """Return the Spread of every array of a training state; `whole` gives shapes and dtypes."""
        everywhere = partial(jax.tree.map, lambda leaf: Spread(self.mesh, _shape_of(leaf), (None,) * leaf.ndim))

        tables = {path for path, spread in by_path(self.adapters).items() if spread.get_value().axes[0] == "vocab"}

        def of_moment(path: tuple, moment: Any) -> Any:
            spread = partial(Spread, self.mesh, on_host=self.moments_on_host)
            # Tables lie in ranges of rows, all other parameters in layers.
            stack = "vocab" if any(_is_of(path, table) for table in tables) else "layers"
            if isinstance(moment, QuantizedMoment):
                codes, absmax = _shape_of(moment.codes), _shape_of(moment.absmax)
                axes = ("vocab", None) if stack == "vocab" else ("layers", "flat")
                return QuantizedMoment(spread(codes, axes), spread(absmax, axes, unit=1))  # type: ignore[arg-type]
            if not moment.ndim:
                return everywhere(moment)
            axes = ("vocab", None) if stack == "vocab" else ("layers", *("flat",) * (moment.ndim - 1))
            return spread(_shape_of(moment), axes)

        optimizer = jax.tree_util.tree_map_with_path(
            of_moment, whole.optimizer, is_leaf=lambda leaf: isinstance(leaf, QuantizedMoment)
        )
        return TrainState(
            everywhere(whole.step),
            everywhere(whole.updates),
            self.adapters,
            optimizer,
            everywhere(whole.loss_scale),
            self.residuals(),
            self._pending() if self.exchange == "delayed" else None,
            everywhere(whole.spike_guard),
        )

    def residuals(self) -> ExchangeErrors:
        """The Spread of the residuals of compressed exchanges."""
        replicas, shards = self.mesh.shape["data"], shard_count(self.mesh)
        of_layer = jax.eval_shape(lambda: self._layer_exchange.no_errors(self._chunks(), replicas, shards))
        return jax.tree.map(self._of_row, of_layer)

    def _pending(self) -> Pending:
        """Gradients that wait for their exchange."""
        gradients = jax.tree.map(self._of_row, nnx.to_pure_dict(self._chunks()))
        return Pending(gradients, Spread(self.mesh, jax.ShapeDtypeStruct((), jnp.bool_), ()))  # type: ignore[arg-type]

    def _chunks(self) -> nnx.State:
        """Shape and dtype of what a device has of the gradients of one layer's adapters."""
        shards = shard_count(self.mesh)
        return jax.tree.map(
            lambda spread: jax.ShapeDtypeStruct((spread.stored[1] // shards,), spread.whole.dtype), self.adapters
        )

    def _of_row(self, of_layer: jax.ShapeDtypeStruct) -> Spread:
        """Return the Spread of arrays [devices, L, ...] of which each device has a row of its own."""
        devices = self.mesh.size // self.mesh.shape["stage"]
        shape = (devices, self.model.config.num_layers, *of_layer.shape)
        axes = ("devices", "layers", *(None,) * (len(shape) - 2))
        return Spread(self.mesh, jax.ShapeDtypeStruct(shape, of_layer.dtype), axes)

    def load(self, read: Callable[[Destination], nnx.State]) -> Any:
        """Bring frozen parameters onto the devices, and streamed layers into host memory."""
        destination = self.destination()
        parameters = read(destination)
        return StreamedFrozen(parameters, destination.waiting) if destination is not self else parameters

    def destination(self) -> "Distribution | StreamedDestination":
        """Return where frozen parameters go: here, or with room for streamed layers."""
        if self.waiting is None:
            return self
        return StreamedDestination(self._frozen_by_path, self.waiting, self.whole)

    def empty(self, path: Path, declared: Any) -> Any:
        """Return the stack of layers of a frozen parameter, spread, without values yet; a `Destination`'s method."""
        return jax.tree.map(lambda spread: spread.zeros(), self._frozen_by_path[path])

    def set_layer(self, path: Path, stack: Any, value: Any, layer: int) -> Any:
        """Spread one layer's value of a frozen parameter, and put it into its stack."""
        if (cut := self._cuts[path]) is not None:
            value = cut(value)
        spread = jax.tree.map(lambda spread, array: spread.put_layer(array), self._frozen_by_path[path], value)
        return set_layer(stack, spread, layer)

    def whole(self, path: Path, value: Any) -> Any:
        """Spread a frozen parameter that is not stacked, or a whole stack."""
        if (cut := self._cuts[path]) is not None:
            value = jax.vmap(cut)(value)
        return jax.tree.map(lambda spread, array: spread.put(array), self._frozen_by_path[path], value)

    @cached_property
    def _frozen_by_path(self) -> dict[Path, Any]:
        return {path: variable.get_value() for path, variable in by_path(self.frozen).items()}

    def put_frozen(self, whole: nnx.State) -> nnx.State:
        """Spread all frozen parameters, whole stacks."""
        values = by_path(whole)
        return nnx.from_flat_state([(path, v.replace(self.whole(path, v.get_value()))) for path, v in values.items()])

    def put(self, spreads: Any, whole: Any) -> Any:
        """Spread a tree of whole arrays; each device receives its part alone."""
        return jax.tree.map(lambda spread, array: spread.put(array), spreads, whole)

    def begin(self, state: TrainState) -> TrainState:
        """Add to a whole state before the first step what the exchange of gradients keeps from step to step."""
        pending = self._pending() if self.exchange == "delayed" else None
        # On the host, since all devices' rows may be too much for one of them.
        residuals, pending = jax.tree.map(
            lambda spread: np.zeros(spread.whole.shape, spread.whole.dtype), (self.residuals(), pending)
        )
        return state._replace(residuals=residuals, pending=pending)

    def put_state(self, whole: TrainState) -> TrainState:
        """Spread a training state."""
        return self.put(self.state(whole), whole)

    def whole_state(self, state: TrainState, like: TrainState) -> TrainState:
        """Undo `put_state`, on the host: what is saved does not depend on the devices, but for the residuals."""
        return jax.tree.map(lambda spread, stored: spread.whole_array(stored), self.state(like), state)

    def put_batch(self, batch: Batch) -> Batch:
        """Spread a batch's rows."""
        return Batch(*(place(np.asarray(array), named_sharding(self.mesh, BATCH_AXES)) for array in batch))

    def device_bytes(self, like: TrainState) -> dict[str, int]:
        """Return the bytes that a device holds, by kind; `like` gives the shapes of the training state."""
        state = self.state(like)
        kinds: dict[str, int] = {"codes": 0, "scales": 0, "embeddings": 0, "other weights": 0}
        for path, spreads in self._frozen_by_path.items():
            for leaf_path, spread in jax.tree_util.tree_leaves_with_path(spreads):
                kinds[_kind(path, leaf_path)] += spread.device_bytes
        kinds["LoRA"] = sum(spread.device_bytes for spread in jax.tree.leaves(state.adapters))
        kinds["optimizer"] = sum(spread.device_bytes for spread in jax.tree.leaves(state.optimizer))
        kinds["residuals"] = sum(spread.device_bytes for spread in jax.tree.leaves(state.residuals))
        kinds["pending gradients"] = sum(spread.device_bytes for spread in jax.tree.leaves(state.pending))
        return kinds

    def host_bytes(self, like: TrainState) -> dict[str, int]:
        """Return the bytes that wait in pinned host memory for a device, by kind, in and between steps."""
        waiting = 0 if self.waiting is None else self.waiting.device_bytes * self.waiting.shape[0]
        optimizer = sum(spread.host_bytes for spread in jax.tree.leaves(self.state(like).optimizer))
        return {"layers": waiting, "optimizer": optimizer}

    def layout(self, like: TrainState) -> dict[str, Any]:
        """Return what lies where: the mesh, and the bytes of each device, and of the host for it, by kind."""
        names = [f"{device.platform}:{device.id}" for device in self.mesh.devices.flat]
        return {
            "mesh": dict(self.mesh.shape),
            "bytes_a_device": dict.fromkeys(names, self.device_bytes(like)),
            "host_bytes_a_device": dict.fromkeys(names, self.host_bytes(like)),
        }

    def put_adapters(self, whole: nnx.State) -> nnx.State:
        """Spread whole adapters."""
        return self.put(self.adapters, whole)

    def facts(self) -> dict[str, str]:
        """Name the devices."""
        return {"devices": describe_devices(self.mesh)}

    def compile_training(self, recipe: Recipe, whole: TrainState, batch: Batch, say: Say = silent) -> "SpreadStep":
        """Compile the train step of `recipe`."""
        step = make_train_step(
            split(self.model)[0],
            recipe.optimizer,
            recipe.schedule,
            recipe.options,
            max_grad_norm=recipe.max_grad_norm,
            dropout_seed=recipe.dropout_seed,
            placement=self.training_placement,
            last_placement=self.last_placement,
            group=self.group,
            moments_on_host=self.moments_on_host,
            objective=recipe.objective,
            forward_placement=self.placement,
        )
        return SpreadStep(self, self.compile_step(step, whole, batch), self._compile_flush(recipe, whole))

    def _compile_flush(self, recipe: Recipe, whole: TrainState) -> jax.stages.Compiled | None:
        """Compile what applies the gradients that the last step leaves pending."""
        if self.exchange != "delayed":
            return None
        update = Update(recipe.optimizer, recipe.schedule, recipe.max_grad_norm, self.group, self.moments_on_host)
        state = jax.tree.map(lambda spread: spread.abstract(), self.state(whole))
        return self.compile(update.flush, (state,), (shardings_of(state), PartitionSpec()), donated=(0,))

    def compile_step(
        self, step: Callable[[TrainState, nnx.State, Batch], Any], whole: TrainState, batch: Batch
    ) -> jax.stages.Compiled:
        """Compile a train step for this mesh; `whole` and `batch` give shapes. The state is donated."""
        state = jax.tree.map(lambda spread: spread.abstract(), self.state(whole))
        arguments = (state, self.abstract_frozen(), self.abstract_batch(batch))
        return self.compile(step, arguments, (shardings_of(state), PartitionSpec()), donated=(0,))

    def compile_evaluation(self, options: ForwardOptions, batch: Batch) -> CompiledEvaluation:
        """Compile an evaluation for this mesh; `batch` gives shapes."""
        step = make_evaluation_step(split(self.model)[0], options, self.placement, self.group)
        return self.compile_forward(step, batch, PartitionSpec())

    def compile_next_tokens(self, options: ForwardOptions, batch: Batch) -> CompiledNextTokens:
        """Compile what continues rows by a token each, for this mesh; `batch` gives shapes."""
        return self.compile_forward(partial(self.next_tokens, options), batch, partition_spec(("rows",)))

    def next_tokens(
        self,
        options: ForwardOptions,
        adapters: nnx.State,
        frozen: Any,
        batch: Batch,
        inputs: jax.Array | None = None,
        first_layer: Any = 0,
    ) -> jax.Array:
        """Continue this device's rows of batch [1, M, S] by a token each, int32 [M]; for use under shard_map.

        `inputs` [M, S, hidden] and `first_layer` are those of a part of the layers, see `Llama.hidden_states`.
        """
        graph, placement = split(self.model)[0], self.placement
        if self.stream is not None:
            model = nnx.merge(graph, frozen.parameters, adapters)
            of_part = {"inputs": None if inputs is None else inputs[None], "first_layer": first_layer}
            hidden = streamed_hidden_states(model, frozen.waiting, batch, options, None, placement, **of_part)[0]
        else:
            model = nnx.merge(graph, frozen, adapters)
            micro_batch = Batch(*(array[0] for array in batch))
            of_part = {"inputs": inputs, "first_layer": first_layer}
            hidden = hidden_states(model, micro_batch, options, None, placement, **of_part)
        return next_tokens(model, hidden, batch.weights[0], placement)

    def compile_forward(self, function: Callable[..., Any], batch: Batch, out_specs: Any) -> Callable[..., Any]:
        """Compile a function (adapters, frozen, batch) that goes through the layers once; the batch is on the host."""
        arguments = (self.abstract_adapters(), self.abstract_frozen(), self.abstract_batch(batch))
        compiled = self.compile(function, arguments, out_specs)

        def run(adapters: nnx.State, frozen: Any, batch: Batch) -> Any:
            return self.run(compiled, adapters, frozen, self.put_batch(batch), backward=False)

        return run

    def run(self, compiled: jax.stages.Compiled, *arguments: Any, backward: bool) -> Any:
        """Run a program that goes through the layers once, or, with `backward`, a second time for gradients."""
        if self.feed is None:
            return compiled(*arguments)
        with self.feed.running(backward=backward):
            return jax.block_until_ready(compiled(*arguments))

    def abstract_adapters(self) -> nnx.State:
        """Describe the adapters as the step takes them."""
        return jax.tree.map(lambda spread: spread.abstract(), self.adapters)

    def abstract_frozen(self) -> Any:
        """Describe the frozen parameters as the step takes them."""
        parameters = jax.tree.map(lambda spread: spread.abstract(), self.frozen)
        return parameters if self.waiting is None else StreamedFrozen(parameters, self.waiting.abstract())

    def abstract_batch(self, batch: Batch) -> Batch:
        """Describe a batch as the step takes it."""
        sharding = named_sharding(self.mesh, BATCH_AXES)
        return Batch(*(jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for array in batch))

    def compile(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], out_specs: Any, donated: tuple[int, ...] = ()
    ) -> jax.stages.Compiled:
        """Compile a function under shard_map; the abstract `arguments` have shardings.

        `out_specs` are PartitionSpecs, or shardings where results go to host memory.
        """
        mesh = self.mesh.abstract_mesh  # the devices may be absent: see compile_for

        def spec(place: PartitionSpec | NamedSharding) -> PartitionSpec:
            return place.spec if isinstance(place, NamedSharding) else place

        def in_place(place: PartitionSpec | NamedSharding) -> NamedSharding:
            kind = place.memory_kind if isinstance(place, NamedSharding) else None
            return NamedSharding(mesh, spec(place), memory_kind=kind)

        in_specs, specs = specs_of(arguments), jax.tree.map(spec, out_specs)
        mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False)
        jitted = jax.jit(
            mapped,
            in_shardings=jax.tree.map(lambda leaf: in_place(leaf.sharding), arguments),
            out_shardings=jax.tree.map(in_place, out_specs),
            donate_argnums=donated,
        )
        arguments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
        program = lower_for(self.mesh, jitted, *arguments)
        hides = {"beside_loops": self.exchange == "delayed", "beside_copies": uses_host_memory(program)}
        return program.compile(compiler_options=compiler_options(self.mesh, **hides))


_cut = jax.jit(parts.cut, static_argnames=("axis", "segments", "count"))


@dataclass(frozen=True)
class SpreadStep:
    """A compiled train step, one program over all devices of a mesh."""

    distribution: Distribution
    compiled: jax.stages.Compiled
    flush: jax.stages.Compiled | None = None

    def __call__(self, state: TrainState, frozen: nnx.State, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take the step; `batch` is on the host."""
        batch, feed = self.distribution.put_batch(batch), self.distribution.feed
        state, metrics = self.distribution.run(self.compiled, state, frozen, batch, backward=True)
        return state, metrics if feed is None else metrics | {"disk_wait_seconds": np.float64(feed.seconds_waited)}

    def finish(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Apply the gradients that the last step leaves pending, if any."""
        return (state, {}) if self.flush is None else self.flush(state)

    def planned_memory(self) -> dict[jax.Device, int]:
        """Return the bytes that the program needs, the same of every device."""
        return dict.fromkeys(self.distribution.mesh.devices.flat, memory(self.compiled).peak)

    def planned_host_memory(self) -> dict[jax.Device, int]:
        """Return the bytes of pinned host memory that the program needs, the same for every device."""
        return dict.fromkeys(self.distribution.mesh.devices.flat, memory(self.compiled).host_peak)

    def wire_bytes(self) -> dict[str, int]:
        """Return the bytes that a device sends in a step, by kind of collective and mesh axes."""
        return wire_bytes(self.compiled, self.distribution.mesh)


def specs_of(arguments: Any) -> Any:
    """Return the PartitionSpec of every array that a tree describes."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, arguments)


def shardings_of(arguments: Any) -> Any:
    """Return the sharding of every array that a tree describes, which says in which memory it is too."""
    return jax.tree.map(lambda leaf: leaf.sharding, arguments)


def describe_devices(mesh: Mesh) -> str:
    """Say how many devices of which kind there are, and along which axes."""
    kinds = Counter(f"{device.device_kind} ({device.platform})" for device in mesh.devices.flat)
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    return " and ".join(f"{count} x {kind}" for kind, count in kinds.items()) + (f", {axes}" if axes else "")


def _kind(path: Path, leaf_path: tuple) -> str:
    """Name the kind of a frozen array: what it is of its parameter."""
    if path[-2] in ("embed_tokens", "lm_head"):
        return "embeddings"
    field = leaf_path[-1].name if leaf_path else ""
    if field == "codes":
        return "codes"
    return "scales" if field else "other weights"


def _is_of(path: tuple, parameter: Path) -> bool:
    """Whether what lies at `path` of an optimizer's state belongs to a parameter."""
    names = tuple(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))
    return names == parameter


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype)


def wire_bytes(compiled: jax.stages.Compiled, mesh: Mesh) -> dict[str, int]:
    """Return the bytes that a device sends in a step, by kind of collective and mesh axes, read from the program."""
    moved = traffic(collectives(compiled, mesh.shape))
    return {f"{kind} over {axes}": round(size) for (kind, axes), size in sorted(moved.items()) if size}
