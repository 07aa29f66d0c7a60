"""Weights that bitsandbytes has quantised to 4 bits, as transformers saves them.

A weight P is stored as P (two codes a byte) with P.absmax (the blocks' scales), P.quant_map (the codes' values),
P.quant_state.bitsandbytes__nf4 or __fp4 (JSON in bytes), and, where the scales are quantised too, P.nested_absmax and
P.nested_quant_map.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from models.quantization import dynamic, fp4, nf4
from models.quantization.fp4 import FP4Tensor
from models.quantization.nf4 import BLOCK, GROUP, NF4Tensor
from zagora_jax.checkpoints.checkpoint import TensorInfo
from zagora_jax.checkpoints.json_files import parse_json_object
from zagora_jax.checkpoints.packed import PackedTensor, Quantization
from zagora_jax.checkpoints.safetensors_file import read_rows, read_tensor
from zagora_jax.errors import UserError

TABLES = {"nf4": nf4.TABLE, "fp4": fp4.TABLE}
TENSORS: dict[str, type[NF4Tensor]] = {"nf4": NF4Tensor, "fp4": FP4Tensor}

_STATE = re.compile(r"(?P<weight>.+)\.quant_state\.bitsandbytes__(?P<type>\w+)")
_DTYPES = {name: np.dtype(getattr(ml_dtypes, name, None) or name) for name in ("bfloat16", "float16", "float32")}


@dataclass(frozen=True)
class BitsAndBytesTensor(PackedTensor):
    """A weight in NF4 or FP4.

    Attributes:
        type: "nf4" or "fp4".
        codes: the stored tensor of ceil(n / 2) bytes, n = out * in.
        absmax: that of the scales: uint8 where they are quantised too, else float32.
        nested_absmax: that of the scales' own scales, None where they are not quantised.
        offset: what was subtracted from the scales before they were quantised.
    """

    type: str
    codes: TensorInfo
    absmax: TensorInfo
    nested_absmax: TensorInfo | None
    offset: np.float32

    def read_packed(self) -> NF4Tensor:
        """Return codes and scales as they are stored."""
        out, width = self.info.shape
        nested = None if self.nested_absmax is None else read_tensor(self.nested_absmax)
        arrays: dict[str, Any] = {
            "codes": _read_bytes(self.codes, 0, self.codes.nbytes),
            "absmax": read_tensor(self.absmax),
            "nested_absmax": nested,
            "offset": None if nested is None else np.asarray(self.offset),
        }
        return TENSORS[self.type](**arrays, shape=(out, width))

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Return dequantised rows, as bitsandbytes computes them."""
        width = self.info.shape[1]
        first, last = start * width, stop * width
        first_block, last_block = first // BLOCK, -(-last // BLOCK)
        begin, end = first_block * BLOCK // 2, min(last_block * BLOCK // 2, self.codes.nbytes)
        packed = _read_bytes(self.codes, begin, end)
        codes = np.stack([packed >> 4, packed & 0xF], axis=-1).reshape(-1)
        scales = np.repeat(self._scales(first_block, last_block), BLOCK)[: len(codes)]
        values = TABLES[self.type][codes] * scales
        offset = first - first_block * BLOCK
        return values[offset : offset + last - first].reshape(stop - start, width).astype(self.info.dtype)

    def _scales(self, start: int, stop: int) -> np.ndarray:
        """Return the scales of the blocks [start, stop), float32."""
        absmax = read_rows(self.absmax, start, stop)
        if self.nested_absmax is None:
            return absmax
        nested = np.repeat(read_tensor(self.nested_absmax), GROUP)[start:stop]
        return dynamic.dynamic_map(signed=True)[absmax] * nested + self.offset


def _read_bytes(info: TensorInfo, start: int, stop: int) -> np.ndarray:
    """Read bytes of a tensor, whatever its shape and dtype (codes may be stored as wider numbers)."""
    as_bytes = TensorInfo((info.nbytes,), np.dtype(np.uint8), info.file, info.offset)
    return read_rows(as_bytes, start, stop)


def unpack_bitsandbytes(
    quantization: Quantization, tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, TensorInfo], dict[str, PackedTensor]]:
    """Tell the plain tensors of a checkpoint from those that make up its packed weights.

    Raises:
        UserError: the weights are not in 4 bits, or one lacks a part or has one that cannot be.
    """
    fields = quantization.fields
    if fields.get("load_in_8bit") or fields.get("_load_in_8bit"):
        raise UserError(
            f"{quantization.source}: load_in_8bit: bitsandbytes' 8-bit weights (LLM.int8) cannot be read. Use the "
            "16-bit checkpoint of the model, or one in 4 bits."
        )
    plain, packed = dict(tensors), dict[str, PackedTensor]()
    for name in tensors:
        if match := _STATE.fullmatch(name):
            weight = match["weight"]
            packed[weight] = _Parts(weight, match["type"], plain).join()
    if not packed:
        raise UserError(
            f"{quantization.source}: quant_method is 'bitsandbytes', but no tensor is named like "
            "P.quant_state.bitsandbytes__nf4: the files are not those of a model saved in 4 bits."
        )
    return plain, packed


class _Parts:
    """The stored tensors of one weight, which are taken out of `tensors` and checked."""

    def __init__(self, weight: str, kind: str, tensors: dict[str, TensorInfo]):
        self.weight, self.kind, self.tensors = weight, kind, tensors
        self.source = f"{tensors[f'{weight}.quant_state.bitsandbytes__{kind}'].file}: {weight}"

    def join(self) -> BitsAndBytesTensor:
        """Return the weight."""
        state_info = self._take(f"quant_state.bitsandbytes__{self.kind}")
        state = self._state(state_info)
        shape, dtype = tuple(state["shape"]), _DTYPES[state["dtype"]]
        count = shape[0] * shape[1]
        blocks = -(-count // BLOCK)
        double = "nested_blocksize" in state
        codes = self.tensors.pop(self.weight, None)
        if codes is None or codes.nbytes != -(-count // 2):
            found = "nothing" if codes is None else f"{codes.nbytes:,} bytes"
            raise UserError(
                f"{self.source}: expected {-(-count // 2):,} bytes of codes for {list(shape)}, found {found}."
            )
        self._require_values("quant_map", TABLES[self.kind])
        absmax = self._take("absmax", (blocks,), np.uint8 if double else np.float32)
        nested = None
        if double:
            self._require_values("nested_quant_map", dynamic.dynamic_map(signed=True))
            nested = self._take("nested_absmax", (-(-blocks // GROUP),), np.float32)
        return BitsAndBytesTensor(
            info=TensorInfo(shape, dtype, codes.file, codes.offset),
            format=self.kind if double else f"{self.kind}-single",
            type=self.kind,
            codes=codes,
            absmax=absmax,
            nested_absmax=nested,
            offset=np.float32(state.get("nested_offset", 0.0)),
        )

    def _state(self, info: TensorInfo) -> dict[str, Any]:
        state = parse_json_object(read_tensor(info).tobytes(), f"{self.source}.quant_state")
        kinds = {"quant_type": (self.kind,), "blocksize": (BLOCK,), "dtype": tuple(_DTYPES)}
        if "nested_blocksize" in state:
            kinds |= {"nested_blocksize": (GROUP,), "nested_dtype": ("float32",)}
            if not isinstance(state.get("nested_offset"), float) or not np.isfinite(state["nested_offset"]):
                raise UserError(f"{self.source}.quant_state: nested_offset must be a number.")
        if self.kind not in TABLES:
            raise UserError(f"{self.source}: quant_type {self.kind!r} cannot be read; known: {', '.join(TABLES)}.")
        for key, accepted in kinds.items():
            if state.get(key) not in accepted:
                raise UserError(
                    f"{self.source}.quant_state: {key} is {state.get(key)!r}, expected "
                    f"{' or '.join(map(repr, accepted))}."
                )
        shape = state.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape):
            raise UserError(f"{self.source}.quant_state: shape must be [out, in], found {shape!r}.")
        return state

    def _take(self, part: str, shape: tuple[int, ...] | None = None, dtype: Any = np.uint8) -> TensorInfo:
        """Take a part out of the tensors, of the given shape if there is one."""
        info = self.tensors.pop(f"{self.weight}.{part}", None)
        expected = f"{np.dtype(dtype).name}{list(shape) if shape else ''}"
        if info is None:
            raise UserError(f"{self.source}: its part {self.weight}.{part} ({expected}) is missing.")
        if info.dtype != dtype or (shape is not None and info.shape != shape):
            raise UserError(
                f"{self.source}: its part {self.weight}.{part} is {info.dtype.name}{list(info.shape)}, expected "
                f"{expected}."
            )
        return info

    def _require_values(self, part: str, values: np.ndarray) -> None:
        """Refuse a table that is not the one that the codes are dequantised with here."""
        if not np.array_equal(read_tensor(self._take(part, values.shape, np.float32)), values):
            raise UserError(f"{self.source}: {self.weight}.{part} is not the table that bitsandbytes uses for it.")
