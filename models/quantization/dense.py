"""Weights that are not quantised: a plain array behind the interface that every format has."""

import jax
import jax.numpy as jnp

Shape = tuple[int, ...]


def abstract(shape: Shape, stack: Shape, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """Describe weights [*stack, out, in] of `dtype`."""
    return jax.ShapeDtypeStruct((*stack, *shape), dtype)


def axes(stack_axes: tuple[str, ...]) -> tuple[str, ...]:
    """Name the logical axes of `abstract`'s array."""
    return (*stack_axes, "out", "in")


def quantize(weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Store weight [out, in] as `dtype`."""
    return weight.astype(dtype)


def dequantize(weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Read weight [out, in] as `dtype`."""
    return weight.astype(dtype)
