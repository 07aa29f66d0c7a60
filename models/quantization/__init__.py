"""Formats of frozen weights behind one small interface; a format is one file with these functions.

- `abstract(shape, stack, dtype)`: the stored arrays of weights [*stack, out, in] as ShapeDtypeStructs;
- `axes(stack_axes)`: the logical axis names of those arrays, in the same structure;
- `quantize(weight, dtype)`: one matrix [out, in] into its stored arrays;
- `dequantize(stored, dtype)`: back to one matrix [out, in] of `dtype`.

`dtype` is the dtype of computation; formats that store codes ignore it when they store.
"""

from types import ModuleType

import jax
import jax.numpy as jnp

from models.quantization import dense, nf4
from models.quantization.nf4 import NF4Tensor

FORMATS: dict[str, ModuleType] = {"none": dense, "nf4": nf4}

StoredWeight = jax.Array | NF4Tensor


def dequantize(stored: StoredWeight, dtype: jnp.dtype) -> jax.Array:
    """Turn the stored form of one matrix into an array [out, in] of `dtype`."""
    return (nf4 if isinstance(stored, NF4Tensor) else dense).dequantize(stored, dtype)
