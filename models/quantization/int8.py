"""8-bit integers with a scale for each block of 128: W = code * scale, symmetric around zero."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from models.quantization import exact

BLOCK = 128
LARGEST_CODE = 127


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["shape"])
@dataclasses.dataclass(frozen=True)
class Int8Tensor:
    """One matrix, or a stack of matrices of one shape along leading axes.

    Attributes:
        codes: int8[..., n], n = out * in.
        scales: float32[..., ceil(n / 128)].
        shape: (out, in) of one matrix.
    """

    codes: jax.Array
    scales: jax.Array
    shape: tuple[int, int]


@jax.jit
def quantize(weight: jax.Array) -> Int8Tensor:
    """Quantise one matrix: each number to the nearest of 255 multiples of its block's largest magnitude / 127.

    Args:
        weight: float32, bfloat16 or float16 [out, in], finite.

    Raises:
        ValueError: It is not a matrix of floating-point numbers, or it is empty.
    """
    if weight.ndim != 2 or weight.size == 0 or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(
            f"int8 quantises a non-empty floating-point matrix [out, in], not {weight.dtype}{weight.shape}"
        )
    flat = weight.reshape(-1).astype(jnp.float32)
    blocks = jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    scales = jnp.abs(blocks).max(axis=1) / LARGEST_CODE
    codes = jnp.round(blocks / jnp.where(scales > 0, scales, 1.0)[:, None]).astype(jnp.int8)
    out_features, in_features = weight.shape
    return Int8Tensor(codes.reshape(-1)[: flat.size], scales, (out_features, in_features))


def dequantize(quantized: Int8Tensor, dtype: jax.typing.DTypeLike, block: int = BLOCK) -> jax.Array:
    """Return the matrix [out, in], computed in float32 and rounded once to `dtype`.

    Args:
        quantized: One matrix, without stack axes.
        dtype: Floating-point type of the result.
        block: How many weights share a scale.
    """
    if quantized.codes.ndim != 1:
        raise ValueError(f"dequantize takes one matrix, but the codes have stack axes: {quantized.codes.shape}")
    codes = jnp.pad(quantized.codes, (0, -quantized.codes.size % block)).reshape(-1, block)
    weights = exact.rounded(codes.astype(jnp.float32) * quantized.scales[:, None])
    return weights.reshape(-1)[: quantized.codes.size].reshape(quantized.shape).astype(dtype)


def abstract(shape: tuple[int, int], stack: tuple[int, ...] = ()) -> Int8Tensor:
    """Return the `jax.ShapeDtypeStruct`s of a matrix of `shape`, stacked along leading axes of sizes `stack`."""
    n = shape[0] * shape[1]
    arrays: dict[str, Any] = {
        "codes": jax.ShapeDtypeStruct((*stack, n), jnp.int8),
        "scales": jax.ShapeDtypeStruct((*stack, -(-n // BLOCK)), jnp.float32),
    }
    return Int8Tensor(**arrays, shape=shape)


def axes(stack_axes: tuple[str, ...], shape: tuple[int, int]) -> Int8Tensor:
    """Return the logical axis names of each array, as tuples in the place of the arrays."""
    names: dict[str, Any] = {"codes": (*stack_axes, "codes"), "scales": (*stack_axes, "blocks")}
    return Int8Tensor(**names, shape=shape)
