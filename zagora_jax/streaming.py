"""Frozen parameters whose layers wait in pinned host memory: how they are laid out, filled and handed to the step."""

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.llama import Llama
from models.parameters import Path
from models.stream import StreamedStack
from models.stream_order import StreamOrder, stream_order
from sharding.rules import PINNED, named_sharding, pinned
from sharding.spread import Spread
from zagora_jax.checkpoints.load import is_stacked, set_layer
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.layer_ring import LEAST_SLOTS

ALIGNMENT = 256  # bytes: what a GPU's vector loads and copies like best

# Of the allocator's limit, what is left for what fragments.
HEADROOM = 0.02
# A few layers more in host memory than needed may lie better between the resident ones.
LEEWAY = 3

# A waiting layer is laid out as the flat parameters are: a part for each device of "fsdp".
AXES = ("layers", "flat")


def stream_of(config: TrainConfig, model: Llama) -> StreamOrder | None:
    """Return which layers `offload.weights` streams; "auto", which depends on the devices, as "all".

    Raises:
        UserError: more layers than the model has.
    """
    asked, layers = config.streamed_weights, model.config.num_layers
    if asked == "none":
        return None
    try:
        return stream_order(layers, asked if isinstance(asked, int) else layers)
    except ValueError as error:
        raise UserError(f"--offload.weights {asked}: the model has {layers} layers") from error


def slots_of(config: TrainConfig, streamed: int) -> int | None:
    """Return for how many of the streamed layers host memory has room, where they come from disk; None: for all."""
    source = config.offload.weights_from
    if config.streamed_weights == "none" or source in ("auto", "host"):
        return None
    return min(LEAST_SLOTS if source == "disk" else int(source), streamed)


def streamed_of_stages(weights: str | int, layers: Sequence[int]) -> list[int]:
    """Return how many layers of each stage `offload.weights` streams; "auto", which depends on the devices, as "all".

    A number is shared out by the stages' sizes.
    """
    if weights == "none":
        return [0] * len(layers)
    if not isinstance(weights, int):
        return list(layers)
    ends = [weights * end // sum(layers) for end in accumulate(layers)]
    return [end - start for start, end in pairwise([0, *ends])]


def fitting_order(layers: int, layer_bytes: int, planned: int, limit: int) -> StreamOrder | None:
    """Return which layers to stream so that the rest fill what a step with all layers streamed leaves of the memory.

    Args:
        layers: of the model, or of a stage.
        layer_bytes: what a device holds of a layer that waits in host memory otherwise.
        planned: bytes that the step needs of a device with all layers streamed.
        limit: bytes that a device has for it.

    Returns:
        None where all layers fit.
    """
    resident = max(0, int((limit * (1 - HEADROOM) - planned) // layer_bytes))
    if resident >= layers - 2:  # the two layers that a streaming step holds anyway make room for the last two
        return None
    needed = layers - resident
    orders = [stream_order(layers, streamed) for streamed in range(needed, min(needed + LEEWAY, layers) + 1)]

    def cost(order: StreamOrder) -> tuple[bool, int, int]:
        # A group of one streamed layer copies it on the device: see models.stream.
        return order.streamed == 1, order.lead + (order.streamed_layers - needed), order.streamed_layers

    return min(orders, key=cost)


class StreamedFrozen(NamedTuple):
    """The frozen parameters of a model with streamed layers, as the step takes them.

    Attributes:
        parameters: the model's state; parameters of layers that are worth it are `StreamedStack`s.
        waiting: uint8 [K, devices * bytes] in pinned host memory, the streamed layers' part of those; where they are
            read from the disk, a ring [slots, devices * bytes]. Of a pipeline one for each stage, or None.
    """

    parameters: nnx.State
    waiting: Any


class StreamedSpread:
    """How the stack of layers of one flat array is spread: as a `Spread`, but for the streamed layers.

    Attributes:
        whole: shape and dtype of the whole array [L, ...].
        start: the first byte of a device's part in a waiting layer.
        one: the Spread of the array if all of it were resident.
    """

    def __init__(self, spread: Spread, order: StreamOrder, start: int):
        """Describe the streamed form of `spread`."""
        self.whole, self.order, self.start = spread.whole, order, start
        self.one = spread
        self.resident = spread.of_layers(len(order.layer_kinds) - order.streamed_layers)

    @property
    def device_bytes(self) -> int:
        """Bytes that a device holds of the resident layers."""
        return self.resident.device_bytes if self.resident else 0

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape of a device's part of one layer."""
        return self.one.sharding.shard_shape(self.one.stored)[1:]

    def wrap(self, resident: Any) -> Any:
        """Put the array of resident layers, None where there are none, into the step's form."""
        stack = StreamedStack(resident, self.layer_shape, self.whole.dtype, self.start)
        return self.one.wrap(stack)

    @property
    def end(self) -> int:
        """The byte behind a device's part in a waiting layer."""
        return StreamedStack(None, self.layer_shape, self.whole.dtype, self.start).end

    def abstract(self) -> Any:
        """Return the step's form, with a ShapeDtypeStruct for the array."""
        return self.wrap(self.resident and self.resident.abstract().array)

    def zeros(self) -> Any:
        """Return the step's form, filled with zeros in place."""
        return self.wrap(self.resident and self.resident.zeros().array)

    def put_layer(self, array: jax.Array | np.ndarray) -> jax.Array:
        """Spread the array of one layer."""
        return self.one.put_layer(array).array

    def of_layer(self, stored: Any, layer: int, waiting: jax.Array | None) -> jax.Array:
        """Return a layer's flat array from the step's form; `waiting` is its row in host memory, on the devices now."""
        is_streamed, place = self.order.place(layer)
        if not is_streamed:
            return stored.array.resident[place]
        assert waiting is not None
        stack, parts = stored.array, waiting.reshape(self.one.mesh.shape["fsdp"], -1)  # uint8 [devices, bytes]
        return jnp.concatenate([stack.of_waiting(part) for part in parts])


def streamed_spreads(spreads: Any, order: StreamOrder) -> Any:
    """Replace those Spreads in a pytree that are worth it by StreamedSpreads, their parts one behind the other.

    Codes, first-level scales and unquantised matrices are. Second-level scales are some thousandth of the whole.
    """
    end = 0

    def of_leaf(spread: Spread) -> Spread | StreamedSpread:
        nonlocal end
        if not spread.flat or spread.axes[-1] == "groups":
            return spread
        streamed = StreamedSpread(spread, order, start=-(-end // ALIGNMENT) * ALIGNMENT)
        end = streamed.end
        return streamed

    return jax.tree.map(of_leaf, spreads)


class WaitingLayers:
    """The streamed layers in pinned host memory."""

    def __init__(self, mesh: Mesh, order: StreamOrder, spreads: Any, slots: int | None = None):
        """Describe the waiting layers of a pytree of spreads: all, or, with `slots`, so many of them at a time."""
        self.mesh, self.order, self.slots = mesh, order, slots
        ends = [spread.end for spread in jax.tree.leaves(spreads) if isinstance(spread, StreamedSpread)]
        self.device_bytes = -(-max(ends) // ALIGNMENT) * ALIGNMENT

    @property
    def shape(self) -> tuple[int, int]:
        """[K or slots, devices * bytes]."""
        return self.slots or self.order.streamed_layers, self.device_bytes * self.mesh.shape["fsdp"]

    def bring(self, waiting: jax.Array, place: int) -> jax.Array:
        """Copy a waiting layer to the devices, uint8 [devices * bytes]."""
        return _bring(waiting.sharding)(waiting, place)

    def abstract(self) -> jax.ShapeDtypeStruct:
        """Describe the array to the compiler; the devices may be absent."""
        sharding = pinned(self.mesh, named_sharding(self.mesh, AXES).spec)
        return jax.ShapeDtypeStruct(self.shape, jnp.uint8, sharding=sharding)

    def zeros(self) -> jax.Array:
        """Return an array of zeros, made in host memory."""
        sharding = named_sharding(self.mesh, AXES).with_memory_kind(PINNED)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return np.zeros(
                [len(range(*cut.indices(size))) for cut, size in zip(index, self.shape, strict=True)], np.uint8
            )

        return jax.make_array_from_callback(self.shape, sharding, part)


class StreamedDestination:
    """Where a checkpoint's parameters go: the streamed layers' to `waiting`, the others to the devices."""

    def __init__(self, spreads: dict[Path, Any], waiting: WaitingLayers, whole: Callable[[Path, Any], Any]):
        """Make room. `whole` brings a parameter that is not stacked into its form."""
        self._spreads, self._whole = spreads, whole
        self.waiting = waiting.zeros()
        self._keeps_layers = waiting.slots is None  # else they are read when they are needed

    def whole(self, path: Path, value: Any) -> Any:
        """Bring a parameter that is not stacked, or a whole stack, into its form."""
        if not is_stacked(path):
            return self._whole(path, value)
        stack = self.empty(path, value)
        for layer in range(len(jax.tree.leaves(value)[0])):
            stack = self.set_layer(path, stack, jax.tree.map(lambda array, at=layer: array[at], value), layer)
        return stack

    def empty(self, path: Path, declared: Any) -> Any:
        """Return the stack of a parameter, without values yet."""
        return jax.tree.map(lambda spread: spread.zeros(), self._spreads[path])

    def set_layer(self, path: Path, stack: Any, value: Any, layer: int) -> Any:
        """Return the stack with one layer's value in its place, be it here or among the waiting layers."""

        def set_array(spread: Spread | StreamedSpread, stored: Any, array: jax.Array) -> Any:
            if not isinstance(spread, StreamedSpread):
                return set_layer(stored, spread.put_layer(array), layer)
            is_streamed, place = spread.order.place(layer)
            if is_streamed and not self._keeps_layers:
                return stored
            part = spread.put_layer(array)
            if is_streamed:
                self.waiting = _set_waiting(self.waiting.sharding)(self.waiting, part, place, spread.start)
                return stored
            return spread.wrap(set_layer(stored.array.resident, part, place))

        return jax.tree.map(set_array, self._spreads[path], stack, value)


@functools.cache
def _set_waiting(sharding: NamedSharding) -> Callable[..., jax.Array]:
    """Return the function that puts a layer's part of an array among the waiting layers, which are donated."""
    host = jax.memory.Space.Host
    rows, flat = sharding.spec, PartitionSpec(sharding.spec[1])

    def of_device(waiting: jax.Array, part: jax.Array, place: jax.Array, start: jax.Array) -> jax.Array:
        if part.dtype != jnp.uint8:
            part = jax.lax.bitcast_convert_type(part, jnp.uint8).reshape(-1)
        waiting, part = jax.device_put(waiting, host), jax.device_put(part[None], host)
        return jax.lax.dynamic_update_slice(waiting, part, (place, start))

    everywhere = PartitionSpec()
    mapped = jax.shard_map(
        of_device, mesh=sharding.mesh, in_specs=(rows, flat, everywhere, everywhere), out_specs=rows, check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0, out_shardings=sharding)


@functools.cache
def _bring(sharding: NamedSharding) -> Callable[..., jax.Array]:
    """Return the function that copies one of the waiting layers to the devices."""

    def of_device(waiting: jax.Array, place: jax.Array) -> jax.Array:
        layer = jax.lax.dynamic_slice_in_dim(jax.device_put(waiting, jax.memory.Space.Host), place, 1)
        return jax.device_put(layer, jax.memory.Space.Device)[0]

    flat = PartitionSpec(sharding.spec[1])
    mapped = jax.shard_map(
        of_device, mesh=sharding.mesh, in_specs=(sharding.spec, PartitionSpec()), out_specs=flat, check_vma=False
    )
    return jax.jit(mapped)
