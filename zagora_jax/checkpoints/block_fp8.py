"""Weights in 8-bit floating point with a scale for each block of a matrix, as DeepSeek and Qwen publish them.

A weight P [out, in] is stored as P (float8_e4m3fn) with P_scale_inv (a factor for each block of `weight_block_size`
rows and columns, the last ones smaller). "inv" is a name: the weight is the product.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from zagora_jax.checkpoints.checkpoint import TensorInfo
from zagora_jax.checkpoints.packed import PackedTensor, Quantization
from zagora_jax.checkpoints.safetensors_file import read_rows
from zagora_jax.errors import UserError

_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_SCALE_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class BlockFp8Tensor(PackedTensor):
    """A weight in float8 with its scales; `block` is (rows, columns)."""

    values: TensorInfo
    scales: TensorInfo
    block: tuple[int, int]

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Return rows: each number times its block's scale."""
        rows, columns = self.block
        first, last = start // rows, -(-stop // rows)
        scales = read_rows(self.scales, first, last).astype(np.float32)
        of_rows = np.repeat(scales, rows, axis=0)[start - first * rows :][: stop - start]
        factors = np.repeat(of_rows, columns, axis=1)[:, : self.info.shape[1]]
        return (read_rows(self.values, start, stop).astype(np.float32) * factors).astype(self.info.dtype)


def unpack_block_fp8(
    quantization: Quantization, tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, TensorInfo], dict[str, PackedTensor]]:
    """Tell the plain tensors of a checkpoint from its weights in float8 and their scales.

    Raises:
        UserError: there is no block size, or a weight has no scales or wrong ones.
    """
    block = quantization.fields.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise UserError(
            f"{quantization.source}.weight_block_size is {block!r}: fp8 weights are read with scales for blocks of "
            "[rows, columns]. Use the 16-bit checkpoint of the model."
        )
    plain, packed = dict(tensors), dict[str, PackedTensor]()
    for name, info in tensors.items():
        if info.dtype != _FLOAT8:
            continue
        del plain[name]
        scales = plain.pop(f"{name}{_SUFFIX}", None)
        if len(info.shape) != 2:
            raise UserError(f"{info.file}: {name} is float8 of shape {list(info.shape)}, expected a matrix.")
        shape = (-(-info.shape[0] // block[0]), -(-info.shape[1] // block[1]))
        if scales is None or scales.shape != shape or scales.dtype not in _SCALE_DTYPES:
            found = "nothing" if scales is None else f"{scales.dtype.name}{list(scales.shape)}"
            raise UserError(
                f"{info.file}: {name} is float8{list(info.shape)} and needs its scales {name}{_SUFFIX}, "
                f"float32{list(shape)}, found {found}."
            )
        logical = TensorInfo(info.shape, np.dtype(ml_dtypes.bfloat16), info.file, info.offset)
        packed[name] = BlockFp8Tensor(logical, None, info, scales, (block[0], block[1]))
    return plain, packed
