"""Half-quadratic quantisation to 4 bits (Badri and Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning
Models"): blocks of 64 with a scale and a zero point of their own, W = (code - zero) * scale.

The zero points are those that best fit the weights when their large errors count little: the norm of the error is an
l_p one with p = 0.7, minimised by half-quadratic splitting. Then, beyond the paper, the scale and the zero point that
fit the codes best by least squares, and the codes for them, are found in turn. Of all pairs on the way a block keeps
that of the least squared error, so that no block is worse off than by plain rounding.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models.quantization import exact

Arrays = tuple[jax.Array, ...]

BLOCK = 64
LARGEST_CODE = 15

# The authors' settings.
_NORM = 0.7
_FIRST_BETA, _KAPPA = 10.0, 1.01
_ITERATIONS = 20

_REFITS = 6

_BLOCKS_TOGETHER = 2**16

# A block whose numbers lie closer together than this part of the largest is scaled as if they did not: else its zero
# point would be a number so large that float16 holds no fraction of it.
_LEAST_RANGE = 1 / 8


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales", "zeros"], meta_fields=["shape"])
@dataclasses.dataclass(frozen=True)
class HQQTensor:
    """One matrix, or a stack of matrices of one shape along leading axes.

    Attributes:
        codes: uint8[..., ceil(n / 2)], n = out * in; two codes a byte, the earlier weight in the high half.
        scales: bfloat16[..., ceil(n / 64)].
        zeros: float16[..., ceil(n / 64)], in units of codes.
        shape: (out, in) of one matrix.
    """

    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array
    shape: tuple[int, int]


@jax.jit
def quantize(weight: jax.Array) -> HQQTensor:
    """Quantise one matrix.

    Args:
        weight: float32, bfloat16 or float16 [out, in], finite.

    Raises:
        ValueError: It is not a matrix of floating-point numbers, or it is empty.
    """
    if weight.ndim != 2 or weight.size == 0 or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(f"HQQ quantises a non-empty floating-point matrix [out, in], not {weight.dtype}{weight.shape}")
    flat = weight.reshape(-1)
    # Repeated, the last number changes neither the least nor the largest of its block.
    blocks = jnp.pad(flat, (0, -flat.size % BLOCK), mode="edge").reshape(-1, BLOCK)
    # Some at a time, so that float32 copies stay small.
    parts = math.gcd(len(blocks), -(-len(blocks) // _BLOCKS_TOGETHER))
    packed, scales, zeros = lax.map(_quantize_blocks, blocks.reshape(parts, -1, BLOCK))
    out_features, in_features = weight.shape
    return HQQTensor(
        packed.reshape(-1)[: -(-flat.size // 2)], scales.reshape(-1), zeros.reshape(-1), (out_features, in_features)
    )


def _quantize_blocks(blocks: jax.Array) -> Arrays:
    """Return codes uint8[blocks, 32], scales bfloat16[blocks] and zero points float16[blocks]."""
    blocks = blocks.astype(jnp.float32)
    scales, zeros = _refitted(blocks, *_split_half_quadratically(blocks, *_first_scales(blocks)))
    codes = _codes(blocks, scales, zeros).astype(jnp.uint8).reshape(len(blocks), -1, 2)
    packed = jnp.sum(codes * np.array([16, 1], np.uint8), axis=2, dtype=jnp.uint8)
    return packed, scales[:, 0].astype(jnp.bfloat16), zeros[:, 0].astype(jnp.float16)


def _first_scales(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return scales and zero points [blocks, 1] that spread the codes from each block's least number to its largest."""
    least, largest = blocks.min(axis=1, keepdims=True), blocks.max(axis=1, keepdims=True)
    magnitude = jnp.maximum(-least, largest)
    width = jnp.maximum(largest - least, magnitude * _LEAST_RANGE)
    scales = _held(width / LARGEST_CODE, jnp.bfloat16)
    scales = jnp.where(scales > 0, scales, 1.0)
    return scales, _held(-least / scales, jnp.float16)


def _held(values: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Round to what is kept, before anything else is chosen by it: so rounding costs nothing."""
    return values.astype(dtype).astype(jnp.float32)


def _codes(blocks: jax.Array, scales: jax.Array, zeros: jax.Array) -> jax.Array:
    return jnp.clip(jnp.round(blocks / scales + zeros), 0, LARGEST_CODE)


def _squared_error(blocks: jax.Array, scales: jax.Array, zeros: jax.Array) -> jax.Array:
    difference = blocks - (_codes(blocks, scales, zeros) - zeros) * scales
    return jnp.sum(difference * difference, axis=1, keepdims=True)


def _split_half_quadratically(blocks: jax.Array, scales: jax.Array, zeros: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Improve the zero points [blocks, 1]."""

    def improve(carry: Arrays, beta: jax.Array) -> tuple[Arrays, None]:
        zeros, best, least = carry
        codes = _codes(blocks, scales, zeros)
        difference = blocks - (codes - zeros) * scales
        # The proximal operator of the l_p norm, in the generalised form of soft thresholding.
        magnitude = jnp.abs(difference)
        threshold = jnp.where(magnitude > 0, magnitude, 1.0) ** (_NORM - 1) / beta
        outliers = jnp.sign(difference) * jnp.maximum(magnitude - threshold, 0)
        zeros = _held(jnp.mean(codes - (blocks - outliers) / scales, axis=1, keepdims=True), jnp.float16)
        error = _squared_error(blocks, scales, zeros)
        better = error < least
        return (zeros, jnp.where(better, zeros, best), jnp.where(better, error, least)), None

    betas = _FIRST_BETA * _KAPPA ** np.arange(_ITERATIONS, dtype=np.float32)
    start: Arrays = (zeros, zeros, _squared_error(blocks, scales, zeros))
    final, _ = lax.scan(improve, start, jnp.asarray(betas))
    return scales, final[1]


def _refitted(blocks: jax.Array, scales: jax.Array, zeros: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Improve scales and zero points [blocks, 1] by least squares over the codes that they lead to."""

    def improve(carry: Arrays, _: None) -> tuple[Arrays, None]:
        scales, zeros, best_scales, best_zeros, least = carry
        codes = _codes(blocks, scales, zeros)
        mean_code, mean = codes.mean(axis=1, keepdims=True), blocks.mean(axis=1, keepdims=True)
        centred = codes - mean_code
        slope = jnp.sum(centred * (blocks - mean), axis=1, keepdims=True)
        slope = slope / jnp.maximum(jnp.sum(centred * centred, axis=1, keepdims=True), 1e-6)
        slope = _held(slope, jnp.bfloat16)
        scales = jnp.where(slope > 0, slope, scales)
        zeros = _held(mean_code - mean / scales, jnp.float16)
        error = _squared_error(blocks, scales, zeros)
        better = error < least  # false where a zero point is beyond float16
        kept = (
            jnp.where(better, new, old) for new, old in ((scales, best_scales), (zeros, best_zeros), (error, least))
        )
        return (scales, zeros, *kept), None

    start: Arrays = (scales, zeros, scales, zeros, _squared_error(blocks, scales, zeros))
    final, _ = lax.scan(improve, start, length=_REFITS)
    return final[2], final[3]


def dequantize(quantized: HQQTensor, dtype: jax.typing.DTypeLike, block: int = BLOCK) -> jax.Array:
    """Return the matrix [out, in], computed in float32 and rounded once to `dtype`.

    Args:
        quantized: One matrix, without stack axes.
        dtype: Floating-point type of the result.
        block: How many weights share a scale.
    """
    if quantized.codes.ndim != 1:
        raise ValueError(f"dequantize takes one matrix, but the codes have stack axes: {quantized.codes.shape}")
    count = quantized.scales.size * block
    codes = jnp.pad(quantized.codes, (0, -(-count // 2) - quantized.codes.size))
    codes = jnp.stack([codes >> 4, codes & 0xF], axis=-1).reshape(-1)[:count].reshape(-1, block).astype(jnp.float32)
    scales, zeros = (x.astype(jnp.float32)[:, None] for x in (quantized.scales, quantized.zeros))
    weights = exact.rounded((codes - zeros) * scales)
    out, width = quantized.shape
    return weights.reshape(-1)[: out * width].reshape(out, width).astype(dtype)


def abstract(shape: tuple[int, int], stack: tuple[int, ...] = ()) -> HQQTensor:
    """Return the `jax.ShapeDtypeStruct`s of a matrix of `shape`, stacked along leading axes of sizes `stack`."""
    n = shape[0] * shape[1]
    blocks = (*stack, -(-n // BLOCK))
    arrays: dict[str, Any] = {
        "codes": jax.ShapeDtypeStruct((*stack, -(-n // 2)), jnp.uint8),
        "scales": jax.ShapeDtypeStruct(blocks, jnp.bfloat16),
        "zeros": jax.ShapeDtypeStruct(blocks, jnp.float16),
    }
    return HQQTensor(**arrays, shape=shape)


def axes(stack_axes: tuple[str, ...], shape: tuple[int, int]) -> HQQTensor:
    """Return the logical axis names of each array, as tuples in the place of the arrays."""
    blocks = (*stack_axes, "blocks")
    names: dict[str, Any] = {"codes": (*stack_axes, "codes"), "scales": blocks, "zeros": blocks}
    return HQQTensor(**names, shape=shape)
