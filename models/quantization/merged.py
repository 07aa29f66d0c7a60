"""A frozen matrix with its adapter's update, W + B A, as one matrix: made in one pass over the 4-bit codes.

A product with the sum takes the place of three: with W, with A and with B. On NVIDIA GPUs a Triton kernel reads the
codes once and writes the sum once; elsewhere XLA computes the same from the dequantised matrix.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from models.quantization import nf4
from models.quantization.nf4 import NF4Tensor

# What a program of the kernel writes: rows x columns. A matrix whose sides these do not divide is left to XLA.
_ROWS = (32, 16)
_COLUMNS = (128, 64)
# Triton's products need at least so much of the axis that is summed over.
_LEAST_RANK = 16


def merge(quantized: NF4Tensor, b: jax.Array, a: jax.Array, table: np.ndarray = nf4.TABLE) -> jax.Array:
    """Return W + b a, [out, in] in a's dtype, computed in float32 and rounded once.

    Args:
        quantized: W, one matrix.
        b: [out, r], the scale of the adapter in it.
        a: [r, in].
        table: float32[16], the values of the codes.
    """
    by_xla = functools.partial(merge_by_xla, table=table)
    rows, columns = (_tile(size, tiles) for size, tiles in zip(quantized.shape, (_ROWS, _COLUMNS), strict=True))
    # Triton's products round float32 operands to TF32.
    if rows is None or columns is None or a.dtype == jnp.float32:
        return by_xla(quantized, b, a)
    kernel = functools.partial(merge_by_kernel, table=table, tile=(rows, columns))
    return lax.platform_dependent(quantized, b, a, cuda=kernel, default=by_xla)


def _tile(size: int, tiles: tuple[int, ...]) -> int | None:
    return next((tile for tile in tiles if size % tile == 0), None)


def merge_by_xla(quantized: NF4Tensor, b: jax.Array, a: jax.Array, *, table: np.ndarray = nf4.TABLE) -> jax.Array:
    """Do what `merge` does, on any platform."""
    update = jnp.einsum("or,ri->oi", b, a, preferred_element_type=jnp.float32)
    return (nf4.dequantize_by(table, quantized, jnp.float32) + update).astype(a.dtype)


def merge_by_kernel(
    quantized: NF4Tensor,
    b: jax.Array,
    a: jax.Array,
    *,
    table: np.ndarray = nf4.TABLE,
    tile: tuple[int, int],
    interpret: bool = False,
) -> jax.Array:
    """Do what `merge` does on an NVIDIA GPU, in tiles of `tile` rows and columns, which divide the matrix.

    With `interpret`, on any platform, step by step.
    """
    (out_features, in_features), (rows, columns) = quantized.shape, tile
    codes = quantized.codes.reshape(out_features, in_features // 2)
    scales = nf4.block_scales(quantized).reshape(out_features, in_features // nf4.BLOCK)
    missing = max(0, _LEAST_RANK - len(a))
    b, a = jnp.pad(b, ((0, 0), (0, missing))), jnp.pad(a, ((0, missing), (0, 0)))
    # The two codes of a byte belong to neighbouring columns: those of even and of odd number are summed apart.
    a_even, a_odd = a[:, 0::2], a[:, 1::2]
    rank = len(a)
    whole_rows, whole_columns = (lambda i, j: (i, 0)), (lambda i, j: (0, j))
    return pl.pallas_call(
        _kernel,
        grid=(out_features // rows, in_features // columns),
        in_specs=[
            pl.BlockSpec((rows, columns // 2), lambda i, j: (i, j)),
            pl.BlockSpec((rows, columns // nf4.BLOCK), lambda i, j: (i, j)),
            pl.BlockSpec((rows, rank), whole_rows),
            pl.BlockSpec((rank, columns // 2), whole_columns),
            pl.BlockSpec((rank, columns // 2), whole_columns),
            pl.BlockSpec((len(table),), lambda i, j: (0,)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct(quantized.shape, a.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="merge",
    )(codes, scales, b, a_even, a_odd, jnp.asarray(table))


def _kernel(codes: Any, scales: Any, b: Any, a_even: Any, a_odd: Any, table: Any, out: Any) -> None:
    packed = codes[...].astype(jnp.int32)  # [rows, columns / 2]
    rows, half = packed.shape
    b_tile = b[...]
    blocks = scales[...]  # [rows, columns / 64]
    spread = jnp.broadcast_to(blocks[:, :, None], (*blocks.shape, nf4.BLOCK // 2)).reshape(rows, half)

    def summed(indices: jax.Array, a_half: jax.Array) -> jax.Array:
        update = jnp.dot(b_tile, a_half, preferred_element_type=jnp.float32)
        return (table[indices] * spread + update).astype(out.dtype)

    even = summed(packed >> 4, a_even[...])
    odd = summed(packed & 0xF, a_odd[...])
    out[...] = jnp.stack([even, odd], axis=-1).reshape(rows, 2 * half)
