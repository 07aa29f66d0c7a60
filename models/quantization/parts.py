"""Parts of matrices, cut along their rows or their columns; of 4-bit ones such as dequantise to the very same numbers.

In NF4 and FP4 the blocks of 64 that share a scale, and the groups of 256 blocks, are counted along the whole matrix,
row by row. A part keeps its codes in its own order and one index of a scale for each sub-block: the longest run of 1 to
64 weights that never leaves a block, whatever the part. The factors of the groups stay whole; which of them a sub-block
takes follows from its place in the whole matrix.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models.quantization import fp4, nf4
from models.quantization.fp4 import FP4Tensor
from models.quantization.nf4 import BLOCK, GROUP, NF4Tensor

Segments = tuple[tuple[int, int], ...]
"""For each matrix that is joined along the axis (mostly one): its whole size, and the size of a part's share of it."""

_TABLES: dict[type, np.ndarray] = {NF4Tensor: nf4.TABLE, FP4Tensor: fp4.TABLE}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "absmax", "nested_absmax", "offset", "start"],
    meta_fields=["format", "shape", "block", "runs", "pitch"],
)
@dataclasses.dataclass(frozen=True)
class QuantizedPart:
    """One part of a 4-bit matrix, or of a stack of matrices along leading axes.

    Attributes:
        codes: uint8[..., ceil(n / 2)], n weights of the part row by row, zeros beyond the matrix; packed as in
            NF4Tensor.
        absmax: uint8[..., n / block], index of each sub-block's scale; without double quantisation float32.
        nested_absmax: as in NF4Tensor, of the whole matrix.
        offset: as in NF4Tensor.
        start: int32[..., 1, len(runs)], how many sub-blocks of the whole matrix come before each run.
        format: the class of the whole matrix.
        shape: (rows, columns) of the part.
        block: weights of a sub-block.
        runs: sub-blocks that follow one another in the whole matrix as in the part.
        pitch: of columns, whose run is one of each row: sub-blocks of a row of the whole matrix. 0 of rows.
    """

    codes: jax.Array
    absmax: jax.Array
    nested_absmax: jax.Array | None
    offset: jax.Array | None
    start: jax.Array
    format: type
    shape: tuple[int, int]
    block: int
    runs: tuple[int, ...]
    pitch: int


def cut(matrix: jax.Array | NF4Tensor, axis: int, segments: Segments, count: int) -> Any:
    """Cut one stored matrix into `count` parts along its rows (axis 0) or its columns (axis 1), padded with zeros.

    Args:
        matrix: without stack axes.
        axis: the axis to cut.
        segments: what the axis is joined of, and how much of each a part has. Columns are one segment.
        count: how many parts.

    Returns:
        The parts of a plain matrix as [count, rows, columns]; or else a QuantizedPart whose codes, absmax and start
        have a leading axis of `count`, nested_absmax and offset none.
    """
    if isinstance(matrix, jax.Array):
        return _cut_plain(matrix, axis, segments, count)
    return _cut_quantized(matrix, axis, segments, count)


def _cut_plain(matrix: jax.Array, axis: int, segments: Segments, count: int) -> jax.Array:
    pieces, start = [], 0
    for whole, size in segments:
        padding = [(0, 0), (0, 0)]
        padding[axis] = (0, size * count - whole)
        piece = jnp.pad(lax.slice_in_dim(matrix, start, start + whole, axis=axis), padding)
        dealt = piece.reshape(*piece.shape[:axis], count, size, *piece.shape[axis + 1 :])
        pieces.append(jnp.moveaxis(dealt, axis, 0))
        start += whole
    return jnp.concatenate(pieces, axis=1 + axis)


def _cut_quantized(matrix: NF4Tensor, axis: int, segments: Segments, count: int) -> QuantizedPart:
    out, width = matrix.shape
    along = width if axis == 0 else 1  # weights of one element of the axis
    edges = [along * edge for segment in segments for edge in segment]
    block = math.gcd(BLOCK, *edges[:-2], edges[-1]) if axis == 0 else math.gcd(BLOCK, *edges)
    codes = jnp.stack([matrix.codes >> 4, matrix.codes & 0xF], axis=-1).reshape(-1)[: out * width]
    absmax = jnp.broadcast_to(matrix.absmax[:, None], (matrix.absmax.size, BLOCK // block)).reshape(-1)
    absmax = absmax[: -(-out * width // block)]
    zero = int(np.flatnonzero(_TABLES[type(matrix)] == 0)[0])  # the code of 0, whatever the scale
    rows = 1 if axis == 0 else out
    sizes = [along * size for _, size in segments]
    ends = np.cumsum([along * whole for whole, _ in segments])
    codes = _deal(codes.reshape(rows, -1), ends, sizes, count, padding=zero)
    absmax = _deal(absmax.reshape(rows, -1), ends // block, [size // block for size in sizes], count, padding=0)
    codes = jnp.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    runs = tuple(size // block for size in sizes)
    starts = [0, *(ends // block).tolist()[:-1]]
    return QuantizedPart(
        codes=codes[:, ::2] << 4 | codes[:, 1::2],
        absmax=absmax,
        nested_absmax=matrix.nested_absmax,
        offset=matrix.offset,
        start=jnp.arange(count, dtype=jnp.int32)[:, None] * jnp.array(runs) + jnp.array(starts),
        format=type(matrix),
        shape=(sum(sizes) // width, width) if axis == 0 else (out, sizes[0]),
        block=block,
        runs=runs,
        pitch=0 if axis == 0 else width // block,
    )


def _deal(rows: jax.Array, ends: np.ndarray, sizes: list[int], count: int, padding: int) -> jax.Array:
    """Cut each row at `ends`, and deal each piece out to `count` parts, `sizes` of a piece each: [count, n]."""
    pieces = []
    for piece, size in zip(jnp.split(rows, ends[:-1], axis=1), sizes, strict=True):
        missing = count * size - piece.shape[1]
        padded = jnp.pad(piece, ((0, 0), (0, missing)), constant_values=padding)
        pieces.append(jnp.moveaxis(padded.reshape(len(rows), count, size), 1, 0))
    return jnp.concatenate(pieces, axis=-1).reshape(count, -1)


def axes(parts: Any, stack_axes: tuple[str, ...]) -> Any:
    """Return the logical axis names of each array of parts in a stack, as tuples in the place of the arrays."""
    if not isinstance(parts, QuantizedPart):
        return (*stack_axes, "part", "out", "in")
    names: dict[str, Any] = {
        "codes": (*stack_axes, "part", "codes"),
        "absmax": (*stack_axes, "part", "blocks"),
        "nested_absmax": None if parts.nested_absmax is None else (*stack_axes, "groups"),
        "offset": None if parts.offset is None else stack_axes,
        "start": (*stack_axes, "part", "runs"),
    }
    return dataclasses.replace(parts, **names)


def dequantize(part: QuantizedPart, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return the part [rows, columns], the same numbers as the whole matrix has there.

    Args:
        part: one part, without stack axes.
        dtype: floating-point type of the result.
    """
    if part.codes.ndim != 1:
        raise ValueError(f"dequantize takes one part, but the codes have leading axes: {part.codes.shape}")
    scales = part.absmax
    if part.nested_absmax is not None and part.offset is not None:
        nested = jnp.take(part.nested_absmax, _groups(part), mode="clip")  # beyond the matrix any will do
        scales = nf4.double_scales(part.absmax, nested, part.offset)
    return nf4.scaled_codes(part.codes, scales, part.block, part.shape, dtype, _TABLES[part.format])


def _groups(part: QuantizedPart) -> jax.Array:
    """Return the group of each sub-block in the whole matrix, int32[n / block]."""
    # Tied to the data, so that the indices are not computed ahead of a loop over layers and kept.
    starts, _ = lax.optimization_barrier((part.start.reshape(-1), part.absmax))
    place = jnp.concatenate([jnp.arange(run) + start for run, start in zip(part.runs, starts, strict=True)])
    if part.pitch:
        place = (jnp.arange(part.shape[0])[:, None] * part.pitch + place).reshape(-1)
    return place // (BLOCK // part.block * GROUP)
