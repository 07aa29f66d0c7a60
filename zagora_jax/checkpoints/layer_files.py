"""A layer's file in the cache of quantised models, read again and again into memory that is there already.

Plain reads, not a memory map: its pages would count as the process's memory, and a file that becomes shorter would end
the process. The kernel is told after each read that it need not keep what was read, so that its cache of files does not
push out what others need. The file stays open: removed, it is there until the end.
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import xxhash

from zagora_jax.checkpoints.quantized_cache import CachedLayer
from zagora_jax.checkpoints.reading import DamagedCacheError
from zagora_jax.layer_ring import Job


class Share(NamedTuple):
    """Bytes [start, stop) of an array, which the devices of one share hold from the byte `place` of a row on."""

    share: int
    start: int
    stop: int
    place: int


def shares(size: int, share_bytes: int, place: int) -> list[Share]:
    """Cut an array of `size` bytes into shares."""
    starts = range(0, size, share_bytes)
    return [Share(share, start, min(start + share_bytes, size), place) for share, start in enumerate(starts)]


class LayerFile:
    """The file of one layer, and where the bytes of its streamed arrays go."""

    def __init__(self, layer: CachedLayer, arrays: Mapping[str, Sequence[Share]]):
        """Open the file.

        Args:
            layer: what is in it.
            arrays: the shares of each streamed array, by its name in the file.

        Raises:
            OSError: it cannot be opened.
        """
        self._layer, self._arrays = layer, arrays
        self._file = os.open(layer.path, os.O_RDONLY)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def jobs(self, rows: Mapping[int, Sequence[np.ndarray]]) -> list[Job]:
        """Return what reads the pieces into the rows uint8 [bytes] of each share's devices."""
        jobs: list[Job] = []
        for name, parts in self._arrays.items():
            for start, stop, checksum in self._layer.byte_pieces(name):
                cuts = [(part, max(part.start, start), min(part.stop, stop)) for part in parts]
                targets = [
                    [row[part.place + low - part.start : part.place + high - part.start] for row in rows[part.share]]
                    for part, low, high in cuts
                    if low < high
                ]
                jobs.append(partial(self._read, name, self._layer.arrays[name].offset + start, checksum, targets))
        return jobs

    def _read(self, name: str, offset: int, checksum: str, targets: Sequence[Sequence[np.ndarray]]) -> None:
        """Read consecutive bytes: into the first of each list of arrays, and from there into the others.

        Raises:
            DamagedCacheError: the file has become shorter, or its bytes others, or the disk fails.
        """
        hashed, firsts = xxhash.xxh3_128(), [same[0].data for same in targets]
        size = sum(map(len, firsts))
        self._fill(firsts, offset)
        for first in firsts:
            hashed.update(first)
        if hashed.hexdigest() != checksum:
            raise DamagedCacheError(self._layer.path, f"the checksum of {name} is not that of what was written")
        for array, *others in targets:
            for other in others:
                np.copyto(other, array)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, offset, size, os.POSIX_FADV_DONTNEED)

    def _fill(self, views: list[memoryview], offset: int) -> None:
        while views:
            try:
                count = os.preadv(self._file, views, offset)
            except OSError as error:
                raise DamagedCacheError(self._layer.path, f"cannot be read: {error.strerror}") from error
            if not count:
                raise DamagedCacheError(self._layer.path, f"expected more than its {offset:,} bytes")
            offset += count
            while views and count >= len(views[0]):
                count -= len(views[0])
                views = views[1:]
            if count:
                views = [views[0][count:], *views[1:]]
