"""Parts of matrices, cut along their rows or columns; those of quantised ones dequantise to the very same numbers.

Blocks of weights that share a scale are counted along the whole matrix, row by row; so are NF4's groups of blocks. A
part keeps its codes in its own order, and the scale of each sub-block: the longest run of weights, a block at most,
that never leaves a block, whatever the part. The factors of the groups stay whole; which of them a sub-block takes
follows from its place in the whole matrix.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models.quantization import fp4, hqq, int8, nf4
from models.quantization.fp4 import FP4Tensor
from models.quantization.hqq import HQQTensor
from models.quantization.int8 import Int8Tensor
from models.quantization.nf4 import NF4Tensor

Quantized = NF4Tensor | HQQTensor | Int8Tensor

Segments = tuple[tuple[int, int], ...]
"""For each matrix that is joined along the axis (mostly one): its whole size, and the size of a part's share of it."""


class _Layout(NamedTuple):
    """What `cut` must know of a format; the array of codes is called `codes` in all.

    Attributes:
        block: weights that share a scale.
        codes_a_byte: 1 or 2.
        of_blocks: the arrays of a number a block. A block of zeros has code 0 or `zero_code`, and zeros there.
        zero_code: the code of a zero whatever its scale, or 0 where only the scale makes it one.
    """

    block: int
    codes_a_byte: int
    of_blocks: tuple[str, ...]
    zero_code: int = 0


def _code_of_zero(table: np.ndarray) -> int:
    return int(np.flatnonzero(table == 0)[0])


_LAYOUTS: dict[type, _Layout] = {
    NF4Tensor: _Layout(nf4.BLOCK, 2, ("absmax",), _code_of_zero(nf4.TABLE)),
    FP4Tensor: _Layout(nf4.BLOCK, 2, ("absmax",), _code_of_zero(fp4.TABLE)),
    HQQTensor: _Layout(hqq.BLOCK, 2, ("scales", "zeros")),
    Int8Tensor: _Layout(int8.BLOCK, 1, ("scales",)),
}


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tensor", "start"], meta_fields=["block", "runs", "pitch"]
)
@dataclasses.dataclass(frozen=True)
class QuantizedPart:
    """One part of a quantised matrix, or of a stack of matrices along leading axes.

    Attributes:
        tensor: the part as if it were a matrix of its format with blocks of `block` weights, zeros beyond the whole
            matrix; but of NF4's and FP4's arrays, nested_absmax is that of the whole matrix.
        start: int32[..., 1, len(runs)], how many sub-blocks of the whole matrix come before each run.
        block: weights of a sub-block.
        runs: sub-blocks that follow one another in the whole matrix as in the part.
        pitch: of columns, whose run is one of each row: sub-blocks of a row of the whole matrix. 0 of rows.
    """

    tensor: Any
    start: jax.Array
    block: int
    runs: tuple[int, ...]
    pitch: int


def cut(matrix: jax.Array | Quantized, axis: int, segments: Segments, count: int) -> Any:
    """Cut one stored matrix into `count` parts along its rows (axis 0) or its columns (axis 1), padded with zeros.

    Args:
        matrix: without stack axes.
        axis: the axis to cut.
        segments: what the axis is joined of, and how much of each a part has. Columns are one segment.
        count: how many parts.

    Returns:
        The parts of a plain matrix as [count, rows, columns]; or else a QuantizedPart whose arrays have a leading axis
        of `count`, but for nested_absmax and offset.
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


def _cut_quantized(matrix: Quantized, axis: int, segments: Segments, count: int) -> QuantizedPart:
    layout = _LAYOUTS[type(matrix)]
    out, width = matrix.shape
    along, rows = (width, 1) if axis == 0 else (1, out)  # weights of one element of the axis; rows of runs
    sizes = [along * size for _, size in segments]
    ends = np.cumsum([along * whole for whole, _ in segments])
    block = math.gcd(layout.block, *sizes, *ends.tolist())

    def dealt(values: jax.Array, per: int, padding: int) -> jax.Array:
        """Deal an array of one number for each `per` weights out to the parts."""
        return _deal(values.reshape(rows, -1), ends // per, [size // per for size in sizes], count, padding)

    def of_sub_blocks(values: jax.Array) -> jax.Array:
        repeated = jnp.broadcast_to(values[:, None], (values.size, layout.block // block))
        return dealt(repeated.reshape(-1)[: out * width // block], block, padding=0)

    codes = dealt(_unpacked(matrix.codes, layout)[: out * width], 1, layout.zero_code)
    arrays: dict[str, Any] = {name: of_sub_blocks(getattr(matrix, name)) for name in layout.of_blocks}
    runs = tuple(size // block for size in sizes)
    starts = [0, *(ends // block).tolist()[:-1]]
    return QuantizedPart(
        tensor=dataclasses.replace(
            matrix,
            codes=_packed(codes, layout),
            **arrays,
            shape=(sum(sizes) // width, width) if axis == 0 else (out, sizes[0]),
        ),
        start=jnp.arange(count, dtype=jnp.int32)[:, None] * jnp.array(runs) + jnp.array(starts),
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


def _unpacked(codes: jax.Array, layout: _Layout) -> jax.Array:
    """Return one code an element."""
    return codes if layout.codes_a_byte == 1 else jnp.stack([codes >> 4, codes & 0xF], axis=-1).reshape(-1)


def _packed(codes: jax.Array, layout: _Layout) -> jax.Array:
    """Undo `_unpacked` for codes [count, n]."""
    if layout.codes_a_byte == 1:
        return codes
    codes = jnp.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return codes[:, ::2] << 4 | codes[:, 1::2]


def axes(parts: Any, stack_axes: tuple[str, ...]) -> Any:
    """Return the logical axis names of each array of parts in a stack, as tuples in the place of the arrays."""
    if not isinstance(parts, QuantizedPart):
        return (*stack_axes, "part", "out", "in")
    names: dict[str, Any] = dict.fromkeys(_LAYOUTS[type(parts.tensor)].of_blocks, (*stack_axes, "part", "blocks"))
    if getattr(parts.tensor, "nested_absmax", None) is not None:
        names |= {"nested_absmax": (*stack_axes, "groups"), "offset": stack_axes}
    tensor = dataclasses.replace(parts.tensor, codes=(*stack_axes, "part", "codes"), **names)
    start: Any = (*stack_axes, "part", "runs")
    return dataclasses.replace(parts, tensor=tensor, start=start)


def dequantize(part: QuantizedPart, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return the part [rows, columns], the same numbers as the whole matrix has there.

    Args:
        part: one part, without stack axes.
        dtype: floating-point type of the result.
    """
    tensor = part.tensor
    if tensor.codes.ndim != 1:
        raise ValueError(f"dequantize takes one part, but the codes have leading axes: {tensor.codes.shape}")
    if isinstance(tensor, HQQTensor):
        return hqq.dequantize(tensor, dtype, part.block)
    if isinstance(tensor, Int8Tensor):
        return int8.dequantize(tensor, dtype, part.block)
    scales = tensor.absmax
    if tensor.nested_absmax is not None:
        nested = jnp.take(tensor.nested_absmax, _groups(part), mode="clip")  # beyond the matrix any will do
        scales = nf4.double_scales(tensor.absmax, nested, tensor.offset)
    table = fp4.TABLE if isinstance(tensor, FP4Tensor) else nf4.TABLE
    return nf4.scaled_codes(tensor.codes, scales, part.block, tensor.shape, dtype, table)


def _groups(part: QuantizedPart) -> jax.Array:
    """Return the group of each sub-block in the whole matrix, int32[n / block]."""
    # Tied to the data, so that the indices are not computed ahead of a loop over layers and kept.
    starts, _ = lax.optimization_barrier((part.start.reshape(-1), part.tensor.absmax))
    place = jnp.concatenate([jnp.arange(run) + start for run, start in zip(part.runs, starts, strict=True)])
    if part.pitch:
        place = (jnp.arange(part.tensor.shape[0])[:, None] * part.pitch + place).reshape(-1)
    return place // (nf4.BLOCK // part.block * nf4.GROUP)
