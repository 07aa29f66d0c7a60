"""Float32 arithmetic that rounds as PyTorch's CPU kernels do, whatever XLA makes of it.

bitsandbytes' numbers are PyTorch's, so equality bit for bit needs four things that XLA does not give by itself: the
order of a sum, a product rounded before it is added to (XLA:CPU fuses the two), correctly rounded quotients (XLA:GPU's
are off by one unit in the last place one time in four), and subnormal numbers (XLA:CPU flushes them to zero).
"""

import jax
import jax.numpy as jnp
from jax import lax

LIFT = 2.0**64
"""Factor that brings every subnormal float32 into the normal range."""

_SMALLEST_NORMAL = 2.0**-126
_SUBNORMAL_UNIT = 2.0**-149
_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127

# Constants of PyTorch's cascade_sum (aten/src/ATen/native/cpu/SumKernel.cpp), which is compiled for AVX2 at most.
_LANES = 8
_INTERLEAVED = 4
_LEVELS = 4


def rounded(product: jax.Array) -> jax.Array:
    """Return `product` unchanged, but rounded to float32 before whatever is added to it.

    XLA:CPU lets LLVM contract `a * b + c` into one fused multiply-add. A maximum with the lowest finite
    float between the two operations cannot be simplified away, as an optimisation barrier or a `reduce_precision` is.
    """
    return jnp.maximum(product, jnp.finfo(jnp.float32).min)


def sum_in_torch_order(values: jax.Array) -> jax.Array:
    """Sum `values` (float32[n]) with the additions in the order of `torch.sum` on an x86 CPU with one thread.

    With several threads PyTorch splits a sum of more than 32,768 elements by the number of threads, so its last bit
    depends on the machine; one thread is the order that all machines can share.
    """
    n = values.shape[0]
    lanes = _LANES if n >= _LANES else 1
    vectors = values[: n // lanes * lanes].reshape(-1, lanes)
    interleaved = len(vectors) // _INTERLEAVED * _INTERLEAVED
    rows = vectors[:interleaved].reshape(-1, _INTERLEAVED, lanes)
    partial = _cascade(rows)  # [_INTERLEAVED, lanes]
    first = _running_sum(vectors[interleaved:], partial[0])
    lane_sums = _running_sum(partial[1:], first)  # [lanes]
    if lanes == 1:
        return lane_sums[0]
    remainder = _running_sum(values[n // lanes * lanes :], jnp.float32(0))
    return _running_sum(lane_sums, remainder)


def mean_in_torch_order(values: jax.Array) -> jax.Array:
    """Return the mean of `values` (float32[n], none negative) as `torch.mean` on a CPU with one thread does."""
    return divide(sum_in_torch_order(values), jnp.float32(values.shape[0]))


def _cascade(rows: jax.Array) -> jax.Array:
    """Sum over the first axis, level by level: each level sums runs of `step` results of the level below."""
    count = len(rows)
    step = 2 ** max(4, (count - 1).bit_length() // _LEVELS if count > 1 else 0)
    total = jnp.zeros(rows.shape[1:], jnp.float32)
    for _ in range(_LEVELS - 1):
        runs = len(rows) // step
        total = total + _running_sum(rows[runs * step :], jnp.zeros_like(total))
        by_position = jnp.moveaxis(rows[: runs * step].reshape(runs, step, *rows.shape[1:]), 1, 0)
        rows = _running_sum(by_position, jnp.zeros((runs, *rows.shape[1:]), jnp.float32))
    return total + _running_sum(rows, jnp.zeros_like(total))


def _running_sum(rows: jax.Array, start: jax.Array) -> jax.Array:
    """Add the rows (first axis) to `start`, one after the other."""
    return lax.scan(lambda total, row: (total + row, None), start, rows)[0]


def divide(dividend: jax.typing.ArrayLike, divisor: jax.typing.ArrayLike) -> jax.Array:
    """Return the float32 quotient rounded to nearest, ties to even: a long division of the mantissas as integers.

    Args:
        dividend: float32, zero or normal.
        divisor: float32, normal and positive.

    Returns:
        The quotient, or zero where it is below 2**-126. It must not exceed the largest float32.
    """
    dividend, divisor = jnp.broadcast_arrays(jnp.float32(dividend), jnp.float32(divisor))
    sign, exponent, mantissa = _split(dividend)
    _, divisor_exponent, divisor_mantissa = _split(divisor)
    is_less = mantissa < divisor_mantissa
    exponent = exponent - divisor_exponent - is_less  # of a quotient in [1, 2)
    remainder = (mantissa << is_less.astype(jnp.uint32)) - divisor_mantissa
    quotient = jnp.ones_like(remainder)
    for _ in range(_MANTISSA_BITS + 1):  # one bit more than is kept, to round by
        remainder <<= 1
        fits = remainder >= divisor_mantissa
        quotient = quotient << 1 | fits
        remainder = jnp.where(fits, remainder - divisor_mantissa, remainder)
    last_bit, half_bit = quotient >> 1 & 1, quotient & 1
    rounded_up = half_bit & ((remainder > 0) | (last_bit == 1))
    # Added as integers, a mantissa that rounds up to 2 carries into the exponent, and so does its leading 1.
    bits = ((exponent + _EXPONENT_BIAS - 1).astype(jnp.uint32) << _MANTISSA_BITS) + (quotient >> 1) + rounded_up
    bits = jnp.where((dividend == 0) | (exponent <= -_EXPONENT_BIAS), jnp.uint32(0), bits)
    return lax.bitcast_convert_type(sign | bits, jnp.float32)


def _split(values: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split normal float32 values into sign bit (uint32), biased exponent (int32) and 24-bit mantissa (uint32)."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    exponent = (bits >> _MANTISSA_BITS & jnp.uint32(0xFF)).astype(jnp.int32)
    mantissa = bits & jnp.uint32(0x7FFFFF) | jnp.uint32(1 << _MANTISSA_BITS)
    return bits & jnp.uint32(0x80000000), exponent, mantissa


def lift(values: jax.Array, lifted: jax.Array) -> jax.Array:
    """Return float32 `values`, subnormal ones included, times LIFT where the scalar `lifted` is true, else as is."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    mantissa = (bits & jnp.uint32(0x7FFFFF)).astype(jnp.float32)
    from_subnormal = mantissa * jnp.float32(_SUBNORMAL_UNIT * LIFT)
    from_subnormal = jnp.where(bits >> 31 == 0, from_subnormal, -from_subnormal)
    is_subnormal = bits & jnp.uint32(0x7F800000) == 0
    return jnp.where(lifted, jnp.where(is_subnormal, from_subnormal, values * jnp.float32(LIFT)), values)


def lower(values: jax.Array, lifted: jax.Array) -> jax.Array:
    """Undo `lift` for `values` that are not negative, rounding to the nearest float32, subnormal or not."""
    mantissa = jnp.round(values * jnp.float32(1 / (_SUBNORMAL_UNIT * LIFT))).astype(jnp.uint32)
    subnormal = lax.bitcast_convert_type(mantissa, jnp.float32)
    is_subnormal = values < jnp.float32(_SMALLEST_NORMAL * LIFT)
    return jnp.where(lifted, jnp.where(is_subnormal, subnormal, values * jnp.float32(1 / LIFT)), values)
