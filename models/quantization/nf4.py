"""4-bit NormalFloat (NF4) with double quantisation, bit for bit as in bitsandbytes on a CPU.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv:2305.14314. A matrix is taken row by row as one
vector and cut into blocks of 64. A block keeps 4-bit codes and the index of its largest magnitude, itself quantised
to 8 bits in groups of 256 blocks after the mean over all blocks (the offset) was subtracted.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models.quantization import dynamic, exact

BLOCK = 64
GROUP = dynamic.BLOCK

# Table of QLoRA's appendix E, as float32.
TABLE = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
_MIDPOINTS = (TABLE[:-1] + TABLE[1:]) / np.float32(2)

# bitsandbytes' lower bound of a divisor; as the scale of an all-zero last block that is not full it is even stored.
_LEAST_ABSMAX = float(np.float32(1e-38))
# Tensors with larger weights than this are quantised without the lift that keeps subnormal numbers exact.
_LIFTED_BELOW = 2.0**60


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "absmax", "nested_absmax", "offset"],
    meta_fields=["shape"],
)
@dataclasses.dataclass(frozen=True)
class NF4Tensor:
    """One matrix, or a stack of matrices of one shape along leading axes, in NF4.

    Attributes:
        codes: uint8[..., ceil(n / 2)], n = out * in; two codes a byte, the earlier weight in the high half.
        absmax: uint8[..., ceil(n / 64)], index of each block's scale in the signed dynamic map; without double
            quantisation float32, the scales themselves.
        nested_absmax: float32[..., ceil(blocks / 256)], factor of each group of blocks; None without double
            quantisation.
        offset: float32[...], mean of the scales; None without double quantisation.
        shape: (out, in) of one matrix.
    """

    codes: jax.Array
    absmax: jax.Array
    nested_absmax: jax.Array | None
    offset: jax.Array | None
    shape: tuple[int, int]


@jax.jit
def quantize(weight: jax.Array) -> NF4Tensor:
    """Quantise one matrix, bit for bit as `bitsandbytes.functional.quantize_4bit(..., compress_statistics=True)`.

    Two limits: where the largest weight is 2**60 or more, numbers below 2**-126 count as zero (and 2**126 is the
    largest scale); above 32,768 blocks bitsandbytes' offset depends on the number of threads (see
    `exact.sum_in_torch_order`), and this is the offset of one thread.

    Args:
        weight: float32, bfloat16 or float16 [out, in], finite.

    Raises:
        ValueError: It is not a matrix of floating-point numbers, or it is empty.
    """
    if weight.ndim != 2 or weight.size == 0 or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(f"NF4 quantises a non-empty floating-point matrix [out, in], not {weight.dtype}{weight.shape}")
    flat = weight.reshape(-1).astype(jnp.float32)
    whole = flat.size // BLOCK * BLOCK
    blocks, rest = flat[:whole].reshape(-1, BLOCK), flat[whole:]

    lifted = jnp.max(jnp.abs(weight)).astype(jnp.float32) < _LIFTED_BELOW
    least = jnp.where(lifted, jnp.float32(_LEAST_ABSMAX * exact.LIFT), jnp.finfo(jnp.float32).tiny)

    absmax = _row_maximum(exact.lift(jnp.abs(blocks), lifted))
    # bitsandbytes multiplies whole blocks by the reciprocal, but divides the rest.
    codes = _nearest_codes(exact.lift(blocks, lifted) * exact.divide(1.0, jnp.maximum(absmax, least))[:, None])
    if rest.size:
        rest = exact.lift(rest, lifted)
        rest_absmax = jnp.maximum(jnp.max(jnp.abs(rest)), least)
        rest = exact.divide(rest, rest_absmax)
        codes = jnp.concatenate([codes, _nearest_codes(jnp.pad(rest, (0, rest.size % 2)))])
        absmax = jnp.concatenate([absmax, rest_absmax[None]])
    out_features, in_features = weight.shape
    return NF4Tensor(codes, *_quantize_scales(absmax, lifted), shape=(out_features, in_features))


def _row_maximum(blocks: jax.Array) -> jax.Array:
    """Return the largest number of each row of 64; by halves, since XLA:CPU is ten times slower in a reduction."""
    while (half := blocks.shape[1] // 2) > 0:
        blocks = jnp.maximum(blocks[:, :half], blocks[:, half:])
    return blocks[:, 0]


def _nearest_codes(values: jax.Array) -> jax.Array:
    """Return the codes nearest to 2k values in [-1, 1] as k bytes; a midpoint goes to the lower code."""
    codes = sum((values > midpoint).astype(jnp.uint8) for midpoint in _MIDPOINTS)
    return jnp.sum(codes.reshape(-1, 2) * np.array([16, 1], np.uint8), axis=1, dtype=jnp.uint8)


def _quantize_scales(absmax: jax.Array, lifted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantise lifted block scales float32[blocks] to indices, group factors and offset."""
    offset = exact.lower(exact.mean_in_torch_order(absmax), lifted)
    centred = absmax - exact.lift(offset, lifted)
    indices, nested_absmax = dynamic.quantize(dynamic.pad_to_blocks(centred), signed=True)
    return indices[: absmax.size], exact.lower(nested_absmax, lifted), offset


def dequantize(quantized: NF4Tensor, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return the matrix [out, in], computed in float32 and rounded once to `dtype`.

    In float32 it equals `bitsandbytes.functional.dequantize_4bit` bit for bit, but for numbers below 2**-126, which
    XLA:CPU flushes to zero.

    Args:
        quantized: One matrix, without stack axes.
        dtype: Floating-point type of the result.
    """
    return dequantize_by(TABLE, quantized, dtype)


def dequantize_by(table: np.ndarray, quantized: NF4Tensor, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Dequantise as `dequantize` does, with the values float32[16] of `table` for the codes."""
    if quantized.codes.ndim != 1:
        raise ValueError(f"dequantize takes one matrix, but the codes have stack axes: {quantized.codes.shape}")
    return scaled_codes(quantized.codes, block_scales(quantized), BLOCK, quantized.shape, dtype, table)


def block_scales(quantized: NF4Tensor) -> jax.Array:
    """Return the scales float32[blocks] of one matrix."""
    if quantized.nested_absmax is None or quantized.offset is None:
        return quantized.absmax
    # Not jnp.repeat, whose general form takes XLA tens of seconds of constant folding at real sizes.
    groups = quantized.nested_absmax.size
    nested = jnp.broadcast_to(quantized.nested_absmax[:, None], (groups, GROUP)).reshape(-1)[: quantized.absmax.size]
    return double_scales(quantized.absmax, nested, quantized.offset)


def double_scales(absmax: jax.Array, nested_absmax: jax.Array, offset: jax.Array) -> jax.Array:
    """Return the scales float32[blocks] of double quantisation; `nested_absmax` is each block's own here."""
    # Tied to the data, nothing that is computed from the table can be hoisted out of a scan over layers.
    absmax, scale_map = lax.optimization_barrier((absmax, jnp.asarray(dynamic.dynamic_map(signed=True))))
    return exact.rounded(jnp.take(scale_map, absmax, mode="clip") * nested_absmax) + offset


def scaled_codes(
    codes: jax.Array,
    scales: jax.Array,
    block: int,
    shape: tuple[int, int],
    dtype: jax.typing.DTypeLike,
    table: np.ndarray = TABLE,
) -> jax.Array:
    """Return the matrix of packed codes, `block` of which share one of the scales float32[blocks]."""
    codes, values = lax.optimization_barrier((codes, jnp.asarray(table)))  # tied, as in `double_scales`
    count = scales.size * block
    codes = jnp.pad(codes, (0, -(-count // 2) - codes.size))
    indices = jnp.stack([codes >> 4, codes & 0xF], axis=-1).reshape(-1)[:count].reshape(-1, block)
    weights = jnp.take(values, indices, mode="clip") * scales[:, None]  # [blocks, block]
    if jnp.dtype(dtype) == jnp.float32:  # Any other type separates this product from a sum by itself.
        weights = exact.rounded(weights)
    return weights.reshape(-1)[: shape[0] * shape[1]].reshape(shape).astype(dtype)


def abstract(shape: tuple[int, int], stack: tuple[int, ...] = (), *, double: bool = True) -> NF4Tensor:
    """Return the `jax.ShapeDtypeStruct`s of a matrix of `shape`, stacked along leading axes of sizes `stack`.

    `double` says whether the scales are quantised too.
    """
    n = shape[0] * shape[1]
    blocks = -(-n // BLOCK)
    groups = (*stack, -(-blocks // GROUP))
    arrays: dict[str, Any] = {
        "codes": jax.ShapeDtypeStruct((*stack, -(-n // 2)), jnp.uint8),
        "absmax": jax.ShapeDtypeStruct((*stack, blocks), jnp.uint8 if double else jnp.float32),
        "nested_absmax": jax.ShapeDtypeStruct(groups, jnp.float32) if double else None,
        "offset": jax.ShapeDtypeStruct(stack, jnp.float32) if double else None,
    }
    return NF4Tensor(**arrays, shape=shape)


def axes(stack_axes: tuple[str, ...], shape: tuple[int, int], *, double: bool = True) -> NF4Tensor:
    """Return the logical axis names of each array, as tuples in the place of the arrays.

    Args:
        stack_axes: Names of the leading stack axes.
        shape: The matrix's (out, in), so that the result has the tensor's tree structure.
        double: Whether the scales are quantised too.
    """
    names: dict[str, Any] = {
        "codes": (*stack_axes, "codes"),
        "absmax": (*stack_axes, "blocks"),
        "nested_absmax": (*stack_axes, "groups") if double else None,
        "offset": stack_axes if double else None,
    }
    return NF4Tensor(**names, shape=shape)


def bits_per_parameter(shape: tuple[int, int]) -> float:
    """Return the bits that each weight of a matrix of `shape` takes, scales included (4.127 for large matrices)."""
    leaves = jax.tree.leaves(abstract(shape))
    return 8 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / (shape[0] * shape[1])
