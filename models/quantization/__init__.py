"""How frozen weights are stored: as plain arrays, or in a quantised format.

A format is one file here with a pytree class of one matrix's arrays (or of a stack of matrices) and these functions:

- `abstract(shape, stack)`: the arrays of matrices [*stack, out, in] as ShapeDtypeStructs;
- `axes(stack_axes, shape)`: the logical axis names of those arrays, in the same structure;
- `quantize(weight)`: one matrix [out, in] into its arrays; some formats are only read from checkpoints;
- `dequantize(quantized, dtype)`: back to one matrix [out, in] of `dtype`.

`models.quantization.parts` cuts matrices into parts, in whatever format they are.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from models.quantization import fp4, hqq, int8, merged, nf4, parts
from models.quantization.fp4 import FP4Tensor
from models.quantization.hqq import HQQTensor
from models.quantization.int8 import Int8Tensor
from models.quantization.nf4 import NF4Tensor
from models.quantization.parts import QuantizedPart

StoredWeight = jax.Array | NF4Tensor | HQQTensor | Int8Tensor | QuantizedPart


@dataclass(frozen=True)
class Format:
    """The functions of a format, see above; `quantize` is None for one that is only read.

    `settings` are what else the numbers depend on. With them stands a revision, to be raised whenever `quantize` gives
    other numbers than it gave before: what was quantised earlier is then not taken for the same any more.
    """

    abstract: Callable[..., Any]
    axes: Callable[..., Any]
    quantize: Callable[[jax.Array], Any] | None
    settings: Mapping[str, int]


_OF_NF4 = {"revision": 1, "block": nf4.BLOCK}
_DOUBLE = {"group": nf4.GROUP}


FORMATS: dict[str, Format] = {
    "nf4": Format(nf4.abstract, nf4.axes, nf4.quantize, _OF_NF4 | _DOUBLE),
    "hqq": Format(hqq.abstract, hqq.axes, hqq.quantize, {"revision": 1, "block": hqq.BLOCK}),
    "int8": Format(int8.abstract, int8.axes, int8.quantize, {"revision": 1, "block": int8.BLOCK}),
    "nf4-single": Format(
        functools.partial(nf4.abstract, double=False), functools.partial(nf4.axes, double=False), None, _OF_NF4
    ),
    "fp4": Format(fp4.abstract, fp4.axes, None, _OF_NF4 | _DOUBLE),
    "fp4-single": Format(
        functools.partial(fp4.abstract, double=False), functools.partial(fp4.axes, double=False), None, _OF_NF4
    ),
}
_DEQUANTIZE: dict[type, Callable[..., jax.Array]] = {
    NF4Tensor: nf4.dequantize,
    FP4Tensor: fp4.dequantize,
    HQQTensor: hqq.dequantize,
    Int8Tensor: int8.dequantize,
    QuantizedPart: parts.dequantize,
}
_MERGE: dict[type, Callable[..., jax.Array]] = {
    NF4Tensor: merged.merge,
    FP4Tensor: functools.partial(merged.merge, table=fp4.TABLE),
}


def abstract(quantization: str, shape: tuple[int, int], stack: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Describe stored matrices [*stack, out, in]; `dtype` is that of plain arrays (quantization "none")."""
    if quantization == "none":
        return jax.ShapeDtypeStruct((*stack, *shape), dtype)
    return FORMATS[quantization].abstract(shape, stack)


def axes(quantization: str, shape: tuple[int, int], stack_axes: tuple[str, ...], matrix_axes: tuple[str, str]) -> Any:
    """Name the logical axes of what `abstract` describes; `matrix_axes` are those of the matrix (out, in)."""
    if quantization == "none":
        return (*stack_axes, *matrix_axes)
    return FORMATS[quantization].axes(stack_axes, shape)


def quantize(quantization: str, weight: jax.Array) -> Any:
    """Quantise one matrix [out, in].

    Raises:
        ValueError: a format that is only read from checkpoints.
    """
    function = FORMATS[quantization].quantize
    if function is None:
        raise ValueError(f"{quantization} is read from checkpoints alone; nothing is quantised to it")
    return function(weight)


def is_quantized(stored: Any) -> bool:
    """Whether a parameter is stored in a quantised format."""
    return type(stored) in _DEQUANTIZE


def dequantize(stored: StoredWeight, dtype: jnp.dtype) -> jax.Array:
    """Turn the stored form of one matrix into an array [out, in] of `dtype`."""
    if isinstance(stored, jax.Array):
        return stored.astype(dtype)
    return _DEQUANTIZE[type(stored)](stored, dtype)


def can_merge(stored: StoredWeight) -> bool:
    """Whether `merge` takes weights of this format."""
    return type(stored) in _MERGE


def merge(stored: Any, b: jax.Array, a: jax.Array) -> jax.Array:
    """Return one stored matrix plus b [out, r] times a [r, in], as [out, in] of a's dtype; rounded once."""
    return _MERGE[type(stored)](stored, b, a)


def bits_per_parameter(quantization: str, shape: tuple[int, int], dtype: jnp.dtype) -> float:
    """Return the bits that each weight of a matrix of `shape` takes, scales included; `dtype` is for "none"."""
    leaves = jax.tree.leaves(abstract(quantization, shape, (), dtype))
    return 8 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / (shape[0] * shape[1])
