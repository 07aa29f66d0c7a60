"""How one tensor comes from files into the form that it is kept in."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from models import tables
from models.quantization import quantize
from models.tables import QuantizedTable
from zagora_jax.checkpoints.checkpoint import Checkpoint
from zagora_jax.checkpoints.read_ahead import row_pieces

# Takes the name and the weight.
Prepare = Callable[[str, np.ndarray | jax.Array], np.ndarray | jax.Array]


class DamagedCacheError(Exception):
    """A file of a cache is not what was written.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path, problem: str):
        super().__init__(f"{path}: {problem}")
        self.path = path


class Reading(Protocol):
    """How a tensor is read: jobs for threads, in whatever order they run, and what is made of their results.

    Attributes:
        name: the tensor's.
    """

    name: str

    @property
    def jobs(self) -> Sequence[Callable[[], Any]]:
        """What reads the tensor's pieces."""

    def finish(self, results: Iterator[Any]) -> tuple[Any, jax.Array | None]:
        """Take the jobs' results in their order, and return the tensor's stored form and whether all of it is finite.

        The second is None where that is known already.
        """


class SourceReading:
    """A tensor of a checkpoint that is brought into a quantised format or a dtype; see `Reading`.

    Attributes:
        digests: a hash of each piece as it was read, for a cache; empty without `hashes`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        form: str | np.dtype,
        *,
        hashes: bool,
        prepare: "Prepare | None" = None,
    ):
        """Prepare to read the tensor `name` of `checkpoint` in a key of FORMATS or a dtype.

        `prepare` makes what is held of what is read, before it is quantised.
        """
        self.name, self.form, self.hashes, self.prepare = name, form, hashes, prepare
        self.info = checkpoint.tensors[name]
        self.digests: list[str] = []
        self.is_packed = isinstance(form, str) and checkpoint.format_of(name) == form
        self.jobs: list[Callable[[], Any]] = [
            partial(self._read_rows, checkpoint, start, stop)
            for start, stop in row_pieces(self.info.shape, self.info.dtype.itemsize)
        ]
        if self.is_packed:
            self.jobs = [partial(self._read_packed, checkpoint)]

    def _read_rows(self, checkpoint: Checkpoint, start: int, stop: int) -> tuple[np.ndarray, list[str]]:
        rows = checkpoint.read_rows(self.name, start, stop)
        return rows, [digest(rows)] if self.hashes else []

    def _read_packed(self, checkpoint: Checkpoint) -> tuple[Any, list[str]]:
        packed = checkpoint.read_packed(self.name)
        return packed, [digest(leaf) for leaf in jax.tree.leaves(packed)] if self.hashes else []

    def finish(self, results: Iterator[Any]) -> tuple[Any, jax.Array | None]:
        """See `Reading`."""

        def pieces() -> Iterator[Any]:
            for piece, digests in results:
                self.digests += digests
                yield piece

        if not self.is_packed:
            weight = assembled(pieces(), self.info.shape, self.info.dtype)
            return store(weight if self.prepare is None else self.prepare(self.name, weight), self.form)
        (packed,) = pieces()
        value = jax.tree.map(jnp.asarray, packed)
        return value, _all_finite([leaf for leaf in jax.tree.leaves(value) if leaf.dtype == jnp.float32])


class TableReading:
    """A table of words whose rows are quantised as they come, so that it is never whole in 16 bits; see `Reading`."""

    def __init__(self, checkpoint: Checkpoint, name: str, form: str):
        """Prepare to read the tensor `name` of `checkpoint` in a key of FORMATS."""
        self.name, self.form = name, form
        self.info = checkpoint.tensors[name]
        pieces = row_pieces(self.info.shape, self.info.dtype.itemsize)
        self.jobs = [partial(checkpoint.read_rows, name, start, stop) for start, stop in pieces]

    def finish(self, results: Iterator[Any]) -> tuple[QuantizedTable, jax.Array]:
        """See `Reading`."""
        are_finite = []

        def parts() -> Iterator[QuantizedTable]:
            for rows in results:
                part, is_finite = store_rows(rows, self.form)
                are_finite.append(is_finite)
                yield part

        return tables.joined(parts(), self.info.shape[0]), jnp.stack(are_finite).all()


def assembled(pieces: Iterator[np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | jax.Array:
    """Put pieces along the first axis together: on the device, as they come, where there are several."""
    first = next(pieces)
    if first.shape == shape:
        assert next(pieces, None) is None
        return first
    whole, start = _put_rows(jnp.zeros(shape, jax.dtypes.canonicalize_dtype(dtype)), first, 0), len(first)
    for piece in pieces:
        whole, start = _put_rows(whole, piece, start), start + len(piece)
    return whole


@partial(jax.jit, donate_argnums=0)
def _put_rows(whole: jax.Array, rows: jax.Array, start: int | jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, rows, start, 0)


def digest(array: np.ndarray) -> str:
    """Return a checksum of an array's bytes: XXH3, 128 bits, which runs at the rate of the memory."""
    # Not the function of one call, which would hold up all other threads meanwhile.
    return xxhash.xxh3_128(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


@jax.jit
def _all_finite(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(array).all() for array in arrays]).all()


@partial(jax.jit, static_argnums=1)
def store_rows(rows: jax.Array, form: str) -> tuple[QuantizedTable, jax.Array]:
    """Quantise rows of a table; also tell whether all of them are finite."""
    return tables.quantize(form, rows), jnp.isfinite(rows).all()


@partial(jax.jit, static_argnums=1)
def store(weight: jax.Array, form: str | np.dtype) -> tuple[Any, jax.Array]:
    """Bring a tensor into a quantised format or a dtype; also tell whether all of it is finite."""
    if isinstance(form, str):
        return quantize(form, weight), jnp.isfinite(weight).all()
    stored = weight.astype(form)
    return stored, jnp.isfinite(stored).all()
