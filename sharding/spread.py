"""From whole arrays to arrays spread over a mesh, and back: the form that a train step works on.

Parameters of layers lie flat (`sharding.flat`), cut into equal pieces whatever their shape; tables of words are cut
into equal ranges of rows; of what differs between devices each has its row; what is small (norms, biases, offsets,
counters) is everywhere. A piece is padded to a multiple of UNIT elements, so that the 8-bit optimizer's blocks of 256
are the same for every number of devices. Layers are cut into equal blocks over "stage".
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sharding.flat import FlatShard, padded_size
from sharding.mesh import parameter_parts
from sharding.rules import PINNED, RULES, named_sharding, pinned
from sharding.spanning import place

UNIT = 256

# Logical axes of what is one vector a layer, and yet too large to be everywhere.
_LONG = ("codes", "blocks", "groups", "flat")


class Spread:
    """How one array is spread. `axes` are the logical axes of the whole array; see RULES."""

    def __init__(
        self,
        mesh: Mesh,
        whole: jax.ShapeDtypeStruct,
        axes: tuple[str | None, ...],
        unit: int = UNIT,
        flat: str = "flat",
        on_host: bool = False,
    ):
        """Describe the spread form of an array that `whole` describes.

        Args:
            mesh: the devices.
            whole: shape and dtype of the whole array.
            axes: its logical axes; the parameters of layers begin with "layers", and if there is a part of them for
                each device along tensor, with "layers", "part".
            unit: a device's piece of a flat parameter is a multiple of this many elements.
            flat: the logical axis that a flat parameter without parts lies along.
            on_host: whether each device's piece waits in pinned host memory.
        """
        self.on_host = on_host
        self.mesh, self.whole, self.axes, self.unit, self.flat_axis = mesh, whole, axes, unit, flat
        self.parts = whole.shape[1] if axes[:2] == ("layers", "part") else 1
        self.shape = whole.shape[2:] if axes[:2] == ("layers", "part") else whole.shape[1:]
        self.stored, self.stored_axes = whole.shape, axes
        self.flat = axes[:1] == ("layers",) and (len(self.shape) > 1 or axes[-1] in _LONG)
        if self.flat:
            self.stored_axes = ("layers", flat if axes[1] != "part" else "flat_parts")
            self.padded = padded_size(self.shape, math.prod(mesh.shape[axis] for axis in self.gathered) * unit)
            self.stored = (whole.shape[0], self.parts * self.padded)
        elif axes[:1] == ("vocab",):
            devices = parameter_parts(mesh)
            self.stored = (-(-whole.shape[0] // devices) * devices, *whole.shape[1:])
        elif axes[:1] == ("layers",) and axes[1:2] != ("part",):
            self.stored_axes = ("layers", *(None,) * (len(axes) - 1))

    def of_layers(self, layers: int) -> "Spread | None":
        """Return the Spread of a stack of so many layers; None for 0."""
        if not layers:
            return None
        whole = jax.ShapeDtypeStruct((layers, *self.whole.shape[1:]), self.whole.dtype)
        return Spread(self.mesh, whole, self.axes, self.unit, self.flat_axis, self.on_host)

    @property
    def gathered(self) -> tuple[str, ...]:
        """The mesh axes whose devices hold the pieces of a flat parameter, or of one part of it."""
        axes = RULES[str(self.stored_axes[-1])] or ()
        axes = (axes,) if isinstance(axes, str) else axes
        return tuple(axis for axis in axes if axis != "tensor" or self.stored_axes[-1] != "flat_parts")

    @property
    def sharding(self) -> NamedSharding:
        """Where the stored array lies."""
        return self._sharding(self.stored_axes)

    def _sharding(self, axes: tuple[str | None, ...]) -> NamedSharding:
        sharding = named_sharding(self.mesh, axes)
        return sharding.with_memory_kind(PINNED) if self.on_host else sharding

    @property
    def device_bytes(self) -> int:
        """Bytes that a device holds of the stored array."""
        return 0 if self.on_host else self._piece_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that wait in host memory for a device."""
        return self._piece_bytes if self.on_host else 0

    @property
    def _piece_bytes(self) -> int:
        piece = named_sharding(self.mesh, self.stored_axes).shard_shape(self.stored)
        return math.prod(piece) * self.whole.dtype.itemsize

    def wrap(self, stored: Any) -> Any:
        """Put a stored array into the form that the step takes."""
        return FlatShard(stored, self.shape, self.gathered) if self.flat else stored

    def abstract(self) -> Any:
        """Return the step's form, with a ShapeDtypeStruct for the array."""
        sharding = named_sharding(self.mesh, self.stored_axes)
        sharding = pinned(self.mesh, sharding.spec) if self.on_host else sharding
        return self.wrap(jax.ShapeDtypeStruct(self.stored, self.whole.dtype, sharding=sharding))

    def put(self, array: jax.Array | np.ndarray) -> Any:
        """Spread a whole array; each device receives its part alone."""
        stack = array.shape[:1] if self.flat else ()
        return self._put(array, stack, self.stored, self.stored_axes)

    def put_layer(self, array: jax.Array | np.ndarray) -> Any:
        """Spread the array of one layer, for a place in the stack."""
        return self._put(array, (), self.stored[1:], self.stored_axes[1:])

    def _put(
        self,
        array: jax.Array | np.ndarray,
        stack: tuple[int, ...],
        stored: tuple[int, ...],
        axes: tuple[str | None, ...],
    ) -> Any:
        numpy = np if isinstance(array, np.ndarray) else jnp
        if self.flat:
            array = array.reshape(*stack, self.parts, math.prod(self.shape))
            padding = [(0, 0)] * (array.ndim - 1) + [(0, self.padded - array.shape[-1])]
        else:
            padding = [(0, size - have) for size, have in zip(stored, array.shape, strict=True)]
        if any(after for _, after in padding):
            array = numpy.pad(array, padding)
        return self.wrap(place(array.reshape(stored), self._sharding(axes)))

    def zeros(self) -> Any:
        """Return the step's form, filled with zeros in place."""
        make = jax.jit(lambda: jnp.zeros(self.stored, self.whole.dtype), out_shardings=self.sharding)
        return self.wrap(make())

    def whole_layer(self, flat: Any) -> Any:
        """Return one layer's array in its own shape, of the row that `stored` has of it."""
        return flat[: math.prod(self.shape)].reshape(self.shape) if self.flat else flat

    def whole_array(self, spread: Any) -> np.ndarray:
        """Undo `put`, on the host."""
        if self.flat:
            parts = np.asarray(spread.array).reshape(-1, self.parts, self.padded)
            return parts[..., : math.prod(self.shape)].reshape(self.whole.shape)
        return np.asarray(spread)[: self.whole.shape[0]] if self.axes else np.asarray(spread)
