"""Dynamic 8-bit quantisation in blocks of 256 (Dettmers, arXiv:1511.04561), with the numbers of bitsandbytes.

It holds the block scales of double-quantised NF4 and the moments of the 8-bit optimizer.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from models.quantization import exact

BLOCK = 256

_GRID = 65536
_EXPONENTS = 7


@functools.cache
def dynamic_map(*, signed: bool) -> np.ndarray:
    """Return the 256 sorted values that the codes stand for, float32[256].

    For each of seven decades the interval [0.1, 1] is cut into equal parts (twice as many in each larger decade),
    whose middles are the values; 0 and 1 are added. The formula is `bitsandbytes.functional.create_dynamic_map`.
    """
    values = [np.array([0.0, 1.0], np.float32)]
    for exponent in range(_EXPONENTS):
        parts = 2**exponent if signed else 2 ** (exponent + 1)
        edges = _torch_linspace(np.float32(0.1), np.float32(1.0), parts + 1)
        middles = (edges[:-1] + edges[1:]) / np.float32(2)
        positive = np.float32(10.0 ** (exponent - _EXPONENTS + 1)) * middles
        values += [positive, -positive] if signed else [positive]
    return np.sort(np.concatenate(values))


def _torch_linspace(start: np.float32, stop: np.float32, count: int) -> np.ndarray:
    """Return `torch.linspace` in float32: counted from the nearer end, with one rounding a value."""
    step = np.float64((stop - start) / np.float32(count - 1))
    index = np.arange(count)
    return np.where(index < count // 2, start + step * index, stop - step * (count - 1 - index)).astype(np.float32)


@functools.cache
def _code_of_grid_point(*, signed: bool) -> np.ndarray:
    """Return the code nearest to each of 65,536 equidistant points on [-1, 1], uint8[65536]; ties go down."""
    values = dynamic_map(signed=signed)
    midpoints = np.float32(0.5) * (values[:-1] + values[1:])
    points = np.float32(-1) + np.float32(2) * np.arange(_GRID, dtype=np.float32) / np.float32(_GRID - 1)
    return np.searchsorted(midpoints, points, side="left").astype(np.uint8)


def quantize(values: jax.Array, *, signed: bool) -> tuple[jax.Array, jax.Array]:
    """Quantise blocks of 256 consecutive values of the last axis to 8 bits.

    This is the rule of bitsandbytes' CPU kernel, which its CPU optimizer uses too: a value divided by its block's
    largest magnitude is first rounded to a grid of 65,536 points on [-1, 1] and then to the nearest value of the map.
    So nothing in a block that is not all zero becomes exactly zero (the least magnitude is about 1.5e-5 of the
    block's largest), and the sign of a value survives unless its magnitude is below 2**-24 of the largest.

    Args:
        values: float32[..., n], n a multiple of 256; a magnitude must be 0 or lie within [2**-126, 2**126].
        signed: Whether to use the signed map; without it the values must not be negative.

    Returns:
        Codes uint8[..., n] and the largest magnitudes float32[..., n / 256]. An all-zero block has code 0 throughout.
    """
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK)
    absmax = jnp.max(jnp.abs(blocks), axis=-1)  # [..., n / 256]
    is_zero = absmax < jnp.finfo(jnp.float32).tiny
    scaled = blocks * exact.divide(1.0, jnp.where(is_zero, 1, absmax))[..., None]
    # Over all 2**25 values that `scaled + 1` can take, a fused multiply-add gives the same integer as two roundings.
    point = ((jnp.clip(scaled, -1, 1) + 1) * 0.5 * (_GRID - 1) + 0.5).astype(jnp.int32)
    codes = jnp.take(jnp.asarray(_code_of_grid_point(signed=signed)), point, mode="clip")
    codes = jnp.where(is_zero[..., None], jnp.uint8(0), codes)
    return codes.reshape(values.shape), jnp.where(is_zero, 0, absmax)


def dequantize(codes: jax.Array, absmax: jax.Array, *, signed: bool) -> jax.Array:
    """Return the values float32[..., n] of codes uint8[..., n] and absmax float32[..., n / 256]."""
    values = jnp.take(jnp.asarray(dynamic_map(signed=signed)), codes, mode="clip")
    blocks = values.reshape(*absmax.shape, BLOCK) * absmax[..., None]
    return blocks.reshape(codes.shape)


def pad_to_blocks(values: jax.Array) -> jax.Array:
    """Pad the last axis with zeros to a multiple of 256."""
    missing = -values.shape[-1] % BLOCK
    return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
