"""Reading a model by several processes, each a part of its files.

Layers are read in rounds of as many as there are processes, one each. A tensor is quantised where it was read, so that
packed codes are what the processes exchange; each then puts its own devices' parts of every layer in place. Of tables
of words each process reads a range of rows. The few numbers of a norm outside of the layers are read by all.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import tables
from models.tables import QuantizedTable
from zagora_jax import processes
from zagora_jax.checkpoints.checkpoint import Checkpoint
from zagora_jax.checkpoints.load import Loading, require_finite
from zagora_jax.checkpoints.read_ahead import read_ahead, row_pieces
from zagora_jax.checkpoints.reading import DamagedCacheError, Reading, SourceReading, assembled, store, store_rows

if TYPE_CHECKING:
    from zagora_jax.checkpoints.cache_writer import CacheWriter


@dataclass
class Round:
    """What the processes read at the same time.

    Attributes:
        names: the tensors, one a process, of the same shape; fewer at the end. One alone is shared out by its rows, or,
            if it has none, read by all.
        reading: how this process reads its part; None where there is none for it.
        stacked: whether the tensors are layers.
    """

    names: Sequence[str]
    reading: Reading | None
    stacked: bool


class SharedLoading(Loading):
    """`Loading` by several processes."""

    def run(self, writer: "CacheWriter | None") -> nnx.State:
        """Read everything."""
        self.processes = processes.present()
        left = deque(self._rounds())
        while left:
            try:
                self._read_rounds(left, writer)
            except DamagedCacheError as damage:  # at a reading, so that no round is half exchanged
                assert self.cache is not None
                lost = self.cache.discard(damage)
                for each in left:
                    if each.reading is not None and each.reading.name in lost:
                        each.reading = self._from_source(each.reading.name)
        return self.loaded()

    def _rounds(self) -> list[Round]:
        """Share the tensors out: the same rounds in every process."""
        order, count, index = self._order(), self.processes.count, self.processes.index
        of_layers: dict[int, dict[tuple, str]] = {}  # layers as the files have them: their tensors by path
        for name in order:
            if (layer := self.expected[name].layer) is not None:
                of_layers.setdefault(layer, {})[self.expected[name].path] = name
        rounds = [self._rows(name) for name in order if self.expected[name].layer is None]
        layers = list(of_layers.values())
        for start in range(0, len(layers), count):
            together = layers[start : start + count]
            for path in together[0]:
                names = [layer[path] for layer in together]
                own = names[index] if index < len(names) else None
                reading = own and ((self.cache and self.cache.reading(own)) or self._from_source(own))
                rounds.append(Round(names, reading or None, stacked=True))
        return rounds

    def _rows(self, name: str) -> Round:
        """Share out a tensor that is no layer's."""
        shape = self.expected[name].shape
        if len(shape) < 2:
            return Round([name], self._from_source(name), stacked=False)
        each = -(-shape[0] // self.processes.count)
        start = min(self.processes.index * each, shape[0])
        stored = self.declared[self.expected[name].path].get_value()
        form = self.embeddings if isinstance(stored, QuantizedTable) else stored.dtype
        rows = range(start, min(start + each, shape[0]))
        return Round([name], RowsReading(self.checkpoint, name, form, rows) if rows else None, stacked=False)

    def _read_rounds(self, left: deque[Round], writer: "CacheWriter | None") -> None:
        """Read, exchange and put in place, and take each round that is done out of `left`."""
        with read_ahead([job for each in left if each.reading for job in each.reading.jobs]) as results:
            while left:
                each = left[0]
                value, is_finite = self._own(each, results)
                if each.stacked or len(self.expected[each.names[0]].shape) > 1:
                    whole, are_finite = self._exchanged(each, value, is_finite)
                else:
                    whole, are_finite = [value], is_finite
                for name, one in zip(each.names, whole, strict=True):
                    self._put(name, one)
                self._settle_round(each, value, are_finite, writer)
                left.popleft()

    def _own(self, each: Round, results: Iterator[Any]) -> tuple[Any, Any]:
        """Return this process's part of a round and whether it is finite; zeros where there is none for it."""
        is_finite: Any = True
        if each.reading is not None:
            value, is_finite = each.reading.finish(self._in_time(each.reading, results))
        else:
            value = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._form(each))
        if not each.stacked:
            value = jax.tree.map(lambda leaf, form: _padded(leaf, form.shape[0]), value, self._form(each))
        return value, jnp.asarray(True if is_finite is None else is_finite)

    def _form(self, each: Round) -> Any:
        """Shapes and dtypes of a process's part."""
        tensor = self.expected[each.names[0]]
        declared, shape = self.declared[tensor.path].get_value(), tensor.shape
        if each.stacked:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), declared)
        rows = shape[0] if len(shape) < 2 else -(-shape[0] // self.processes.count)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), declared)

    def _exchanged(self, each: Round, value: Any, is_finite: Any) -> tuple[list[Any], Any]:
        """Return the tensors of a round, whole, and whether each is finite."""
        found = self.processes.arrays_of_each((value, is_finite))
        parts, are_finite = [part for part, _ in found], np.array([flag for _, flag in found])
        if each.stacked:
            return parts[: len(each.names)], are_finite
        rows = self.expected[each.names[0]].shape[0]
        return [jax.tree.map(lambda *leaves: np.concatenate(leaves)[:rows], *parts)], are_finite

    def _settle_round(self, each: Round, value: Any, are_finite: Any, writer: "CacheWriter | None") -> None:
        """Check a round, and give what is new of it to the cache."""
        flags = np.atleast_1d(np.asarray(are_finite))
        for number, name in enumerate(each.names):
            require_finite(self.checkpoint, name, flags[number] if each.stacked else flags.all())
            self.on_tensor(math.prod(self.expected[name].shape))
        if writer is not None and isinstance(each.reading, SourceReading):
            writer.add(each.reading.name, value, each.reading.digests)


class RowsReading:
    """Some rows of a tensor, in a dtype, or of a table, quantised as they come; see `Reading`."""

    def __init__(self, checkpoint: Checkpoint, name: str, form: str | np.dtype, rows: range):
        """Prepare to read `rows` of the tensor `name` of `checkpoint` in a key of FORMATS or a dtype."""
        self.name, self.form = name, form
        info = checkpoint.tensors[name]
        self.shape, self.dtype = (len(rows), *info.shape[1:]), info.dtype
        pieces = row_pieces(self.shape, info.dtype.itemsize)
        self.jobs = [partial(checkpoint.read_rows, name, rows.start + a, rows.start + b) for a, b in pieces]

    def finish(self, results: Iterator[Any]) -> tuple[Any, jax.Array]:
        """See `Reading`."""
        if not isinstance(self.form, str):
            return store(assembled(results, self.shape, self.dtype), self.form)
        stored = [store_rows(rows, self.form) for rows in results]
        joined = tables.joined((part for part, _ in stored), self.shape[0])
        return joined, jnp.stack([is_finite for _, is_finite in stored]).all()


def _padded(array: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(array, [(0, rows - len(array)), *[(0, 0)] * (array.ndim - 1)]) if len(array) < rows else array
