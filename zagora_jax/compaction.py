"""Closing the gaps that loading leaves in a GPU's memory, so that a step finds what it needs in one piece.

XLA takes all temporary memory of a program as one block. Arrays that were put on the device between the temporary ones
of loading lie scattered: the memory may be free, but in two pieces. Arrays that lie above a gap go to the host and come
back, one behind the other.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np

from sharding.rules import PINNED

# The allocator rounds sizes up, and small arrays fill small gaps: only larger ones are worth a move.
SMALLEST_GAP = 1 << 20


class Block(NamedTuple):
    """Device memory that an array holds, in bytes."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.start + self.size


def compact(arrays: Any, planned: Mapping[jax.Device, int]) -> Any:
    """Move some of a pytree's arrays, which are used up, until a program that takes them finds its memory in one piece.

    Where that cannot be, all that lies above the lowest gap is moved. Devices without an allocator's limit, such as
    CPUs, are left alone, and so are arrays in host memory.

    Args:
        arrays: what the program takes.
        planned: the bytes that it needs of each device, `arrays` included.
    """
    leaves, tree = jax.tree.flatten(arrays)
    blocks: dict[jax.Device, dict[int, Block]] = {}
    for number, leaf in enumerate(leaves):
        if leaf.sharding.memory_kind != PINNED:
            for shard in leaf.addressable_shards:
                block = Block(shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
                blocks.setdefault(shard.device, {})[number] = block
    moved: set[int] = set()
    for device, of_leaves in blocks.items():
        if "bytes_limit" in (stats := _stats(device)):
            free = stats["bytes_limit"] - stats["bytes_in_use"]
            needed = planned[device] - sum(block.size for block in of_leaves.values())
            border = first_moved(of_leaves.values(), free, needed)
            moved |= {number for number, block in of_leaves.items() if border is not None and block.start >= border}
    order = sorted(moved, key=lambda number: -leaves[number].nbytes)
    on_host = {number: (leaves[number].sharding, _on_host(leaves[number])) for number in order}
    for number in order:
        leaves[number].delete()
    for number, (sharding, array) in on_host.items():
        leaves[number] = _put(array, sharding)
    return jax.tree.unflatten(tree, leaves)


def _on_host(array: jax.Array) -> Any:
    """Copy an array to the host; of one that processes share, the pieces that are here."""
    if array.sharding.is_fully_addressable:
        return jax.device_get(array)
    return array.shape, [(shard.device, np.asarray(shard.data)) for shard in array.addressable_shards]


def _put(on_host: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Undo `_on_host`."""
    if sharding.is_fully_addressable:
        return jax.device_put(on_host, sharding)
    shape, pieces = on_host
    arrays = [jax.device_put(piece, device) for device, piece in pieces]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _stats(device: jax.Device) -> Mapping[str, int]:
    return device.memory_stats() or {}


def first_moved(blocks: Iterable[Block], free: int, needed: int) -> int | None:
    """Return the address from which on blocks are to be moved together; None where that gains nothing.

    Args:
        blocks: what is in use.
        free: bytes of the device's memory that are free, gaps between the blocks included.
        needed: bytes wanted in one piece.
    """
    in_order = sorted(blocks)
    gaps = [
        (above.start, above.start - below.end)
        for below, above in pairwise(in_order)
        if above.start - below.end >= SMALLEST_GAP
    ]
    in_one_piece = free - sum(size for _, size in gaps)
    border = None
    for start, size in reversed(gaps):  # the fewest arrays first
        if in_one_piece >= needed:
            break
        border, in_one_piece = start, in_one_piece + size
    return border
