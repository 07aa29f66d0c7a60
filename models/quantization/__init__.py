"""How frozen weights are stored: as plain arrays, or in a quantised format.

A format is one file here with a pytree class of one matrix's arrays (or of a stack of matrices) and these functions:

- `abstract(shape, stack)`: the arrays of matrices [*stack, out, in] as ShapeDtypeStructs;
- `axes(stack_axes, shape)`: the logical axis names of those arrays, in the same structure;
- `quantize(weight)`: one matrix [out, in] into its arrays;
- `dequantize(quantized, dtype)`: back to one matrix [out, in] of `dtype`.
"""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from models.quantization import nf4
from models.quantization.nf4 import NF4Tensor

FORMATS: dict[str, ModuleType] = {"nf4": nf4}
_FORMAT_OF_TYPE: dict[type, ModuleType] = {NF4Tensor: nf4}

StoredWeight = jax.Array | NF4Tensor


def abstract(quantization: str, shape: tuple[int, int], stack: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Describe stored matrices [*stack, out, in]; `dtype` is that of plain arrays (quantization "none")."""
    if quantization == "none":
        return jax.ShapeDtypeStruct((*stack, *shape), dtype)
    return FORMATS[quantization].abstract(shape, stack)


def axes(quantization: str, shape: tuple[int, int], stack_axes: tuple[str, ...]) -> Any:
    """Name the logical axes of what `abstract` describes."""
    if quantization == "none":
        return (*stack_axes, "out", "in")
    return FORMATS[quantization].axes(stack_axes, shape)


def is_quantized(stored: Any) -> bool:
    """Whether a parameter is stored in a quantised format."""
    return type(stored) in _FORMAT_OF_TYPE


def dequantize(stored: StoredWeight, dtype: jnp.dtype) -> jax.Array:
    """Turn the stored form of one matrix into an array [out, in] of `dtype`."""
    if isinstance(stored, jax.Array):
        return stored.astype(dtype)
    return _FORMAT_OF_TYPE[type(stored)].dequantize(stored, dtype)
