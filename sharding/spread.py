"""From whole arrays to arrays spread over a mesh, and back: the form that a train step works on.

Parameters of layers lie flat (`sharding.flat`), cut over "fsdp" into equal parts whatever their shape; tables of words
are cut into equal ranges of rows; what is small (norms, biases, offsets, counters) is everywhere. A part is padded to a
multiple of UNIT elements, so that the 8-bit optimizer's blocks of 256 are the same for every number of devices.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sharding.flat import FlatShard, padded_size, unflatten
from sharding.rules import named_sharding

UNIT = 256


class Spread:
    """How one array is spread. `axes` are the logical axes of the whole array; see RULES."""

    def __init__(self, mesh: Mesh, whole: jax.ShapeDtypeStruct, axes: tuple[str | None, ...], unit: int = UNIT):
        """Describe the spread form of an array that `whole` describes.

        Args:
            mesh: the devices.
            whole: shape and dtype of the whole array.
            axes: its logical axes; the parameters of layers begin with "layers".
            unit: a device's part of a flat parameter is a multiple of this many elements.
        """
        self.mesh, self.whole, self.axes = mesh, whole, axes
        devices = mesh.shape["fsdp"]
        self.flat = axes[:1] == ("layers",) and len(axes) > 1 and axes[1:] != ("hidden",) and axes[1:] != ("out",)
        if self.flat:
            self.stored: tuple[int, ...] = (whole.shape[0], padded_size(whole.shape[1:], devices * unit))
            self.stored_axes: tuple[str | None, ...] = ("layers", "flat")
        elif axes[:1] == ("vocab",):
            self.stored = (-(-whole.shape[0] // devices) * devices, *whole.shape[1:])
            self.stored_axes = axes
        else:
            self.stored, self.stored_axes = whole.shape, (None,) * len(axes)

    @property
    def sharding(self) -> NamedSharding:
        """Where the stored array lies."""
        return named_sharding(self.mesh, self.stored_axes)

    @property
    def device_bytes(self) -> int:
        """Bytes that a device holds of the stored array."""
        return math.prod(self.sharding.shard_shape(self.stored)) * self.whole.dtype.itemsize

    def wrap(self, stored: Any) -> Any:
        """Put a stored array into the form that the step takes."""
        return FlatShard(stored, self.whole.shape[1:]) if self.flat else stored

    def abstract(self) -> Any:
        """Return the step's form, with a ShapeDtypeStruct for the array."""
        return self.wrap(jax.ShapeDtypeStruct(self.stored, self.whole.dtype, sharding=self.sharding))

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
            array = array.reshape(*stack, -1)
        if array.shape != stored:
            array = numpy.pad(array, [(0, size - have) for size, have in zip(stored, array.shape, strict=True)])
        return self.wrap(jax.device_put(array, named_sharding(self.mesh, axes)))

    def zeros(self) -> Any:
        """Return the step's form, filled with zeros in place."""
        make = jax.jit(lambda: jnp.zeros(self.stored, self.whole.dtype), out_shardings=self.sharding)
        return self.wrap(make())

    def whole_array(self, spread: Any) -> np.ndarray:
        """Undo `put`, on the host."""
        if self.flat:
            return np.asarray(unflatten(jax.tree.map(np.asarray, spread)))
        return np.asarray(spread)[: self.whole.shape[0]] if self.axes else np.asarray(spread)
