"""bitsandbytes' 4-bit floating point (FP4), for checkpoints that hold it: NF4's layout with another table.

Weights are never quantised to it here, since NF4 loses less of them.
"""

import dataclasses
import functools

import jax
import numpy as np

from models.quantization import nf4
from models.quantization.nf4 import NF4Tensor

# A sign, two bits of exponent and one of mantissa, over 12 (`quantize_4bit` of bitsandbytes.functional).
_MAGNITUDES = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
TABLE = np.concatenate([_MAGNITUDES, np.float32(0) - _MAGNITUDES])


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "absmax", "nested_absmax", "offset"],
    meta_fields=["shape"],
)
@dataclasses.dataclass(frozen=True)
class FP4Tensor(NF4Tensor):
    """A matrix, or a stack of matrices, in FP4; the fields are NF4Tensor's."""


def dequantize(quantized: FP4Tensor, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return the matrix [out, in], computed in float32 and rounded once to `dtype`, as bitsandbytes does."""
    return nf4.dequantize_by(TABLE, quantized, dtype)


def abstract(shape: tuple[int, int], stack: tuple[int, ...] = (), *, double: bool = True) -> FP4Tensor:
    """Return the `jax.ShapeDtypeStruct`s of a matrix, see `nf4.abstract`."""
    return _like(nf4.abstract(shape, stack, double=double))


def axes(stack_axes: tuple[str, ...], shape: tuple[int, int], *, double: bool = True) -> FP4Tensor:
    """Return the logical axis names of each array, see `nf4.axes`."""
    return _like(nf4.axes(stack_axes, shape, double=double))


def _like(tensor: NF4Tensor) -> FP4Tensor:
    return FP4Tensor(tensor.codes, tensor.absmax, tensor.nested_absmax, tensor.offset, tensor.shape)
