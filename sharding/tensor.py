"""Tensor parallelism: devices along the mesh axis "tensor" each compute with a part of every matrix of a layer.

The matrices that a layer's input meets first (queries, keys, values; gate and up) are cut along their output, the ones
that its result comes from (attention's output; down) along their input, by heads and by feed-forward columns. So a
block needs no other exchange than one sum of its result, and backwards one of its input's gradient (Shoeybi et al.,
"Megatron-LM", arXiv:1909.08053). For use under shard_map.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

AXIS = "tensor"


@jax.custom_vjp
def enter(x: jax.Array) -> jax.Array:
    """Return x, which is the same on all devices; the gradients that they have for it are summed."""
    return x


enter.defvjp(lambda x: (x, None), lambda _, gradient: (lax.psum(gradient, AXIS),))


@jax.custom_vjp
def leave(x: jax.Array) -> jax.Array:
    """Sum the devices' terms x; the gradient of each term is that of the sum, which all of them have."""
    return lax.psum(x, AXIS)


leave.defvjp(lambda x: (lax.psum(x, AXIS), None), lambda _, gradient: (gradient,))


@jax.custom_vjp
def alike(x: jax.Array) -> jax.Array:
    """Return x, for which all devices have the same gradient: each keeps an equal part, so that their sum is it."""
    return x


alike.defvjp(lambda x: (x, None), lambda _, gradient: (gradient / lax.axis_size(AXIS),))


@dataclass(frozen=True)
class Parts:
    """How axes are cut: device i has the elements i * size to (i + 1) * size, the last ones padding.

    Attributes:
        segments: by the logical axis, for each matrix that is joined along it (mostly one) its whole size and the size
            of a device's part of it. Other axes are not cut.
    """

    segments: Mapping[str, tuple[tuple[int, int], ...]]

    def own(self, array: jax.Array, name: str, axis: int) -> jax.Array:
        """Return this device's part of a whole array along `axis`, whose logical name is `name`; zeros for padding.

        Its transpose puts a gradient in its place among zeros, so that the devices' sum is the whole one.
        """
        if name not in self.segments:
            return array
        own, start, axis = [], 0, axis % array.ndim
        for whole, size in self.segments[name]:
            padding = [(0, 0)] * array.ndim
            padding[axis] = (0, size * lax.axis_size(AXIS) - whole)
            padded = jnp.pad(lax.slice_in_dim(array, start, start + whole, axis=axis), padding)
            own.append(lax.dynamic_slice_in_dim(padded, lax.axis_index(AXIS) * size, size, axis))
            start += whole
        return jnp.concatenate(own, axis)
