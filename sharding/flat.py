"""A layer's parameters, cut evenly over devices whatever their shape: flattened, padded, and gathered before use.

A stack of L matrices [L, *shape] is held as [L, padded], where `padded` is the number of elements rounded up to a
multiple that the device count divides. Each device keeps its range of the second axis; a layer is brought together by
an all-gather of its slice and a reshape. Gathering along the first axis of the slice matters: gathering along another,
XLA copies the whole stack, transposed (9 GiB for 70B).
"""

import dataclasses
import functools
import math
from dataclasses import replace
from typing import Any

import jax
from jax import lax


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["shape", "axes"])
@dataclasses.dataclass(frozen=True)
class FlatShard:
    """An array in flat form; `shape` is that of one layer's array, before flattening.

    Attributes:
        array: [*stack, padded], of which a device under shard_map sees [*stack, padded / devices].
        shape: the shape to come back to.
        axes: the mesh axes whose devices hold the pieces.
    """

    array: jax.Array
    shape: tuple[int, ...]
    axes: tuple[str, ...] = ("fsdp",)


def padded_size(shape: tuple[int, ...], multiple: int) -> int:
    """Return the elements of `shape`, rounded up to a multiple of `multiple`."""
    return -(-math.prod(shape) // multiple) * multiple


def unflatten(flat: FlatShard) -> jax.Array:
    """Bring whole arrays back to their shape."""
    stack = flat.array.shape[:-1]
    return flat.array[..., : math.prod(flat.shape)].reshape(*stack, *flat.shape)


def gather(parameters: Any) -> Any:
    """Bring the FlatShards in a pytree of one layer's parameters together; other leaves stay as they are.

    Under shard_map. Its transpose scatters the sum of the devices' gradients back to the shards.
    """

    def whole(leaf: Any) -> Any:
        if not _is_flat(leaf):
            return leaf
        return unflatten(replace(leaf, array=lax.all_gather(leaf.array, leaf.axes, tiled=True)))

    return jax.tree.map(whole, parameters, is_leaf=_is_flat)


def bare(tree: Any) -> Any:
    """Replace the FlatShards in a pytree by their arrays: for what works elementwise, whatever the shape."""
    return jax.tree.map(lambda leaf: leaf.array if _is_flat(leaf) else leaf, tree, is_leaf=_is_flat)


def clothed(tree: Any, like: Any) -> Any:
    """Undo `bare`: wrap the arrays that stand where `like` has FlatShards."""

    def wrap(leaf: Any, array: jax.Array) -> Any:
        return replace(leaf, array=array) if _is_flat(leaf) else array

    return jax.tree.map(wrap, like, tree, is_leaf=_is_flat)


def _is_flat(leaf: Any) -> bool:
    return isinstance(leaf, FlatShard)
