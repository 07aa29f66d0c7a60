"""One GGUF file: metadata and tensor table, checked to the byte, and reads of single rows.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Types, block sizes and dequantisation are the
gguf library's. Its `GGUFReader` is not used: it maps the whole file, makes an array object of every token and merge
(hundreds of MB for a Llama 3 vocabulary), and loops for ever on some damaged files.
"""

import os
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from zagora_jax.checkpoints.safetensors_file import open_regular_file, read_into
from zagora_jax.errors import UserError
from zagora_jax.git_lfs import STUB

_SCALARS: dict[GGUFValueType, np.dtype] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("?"),
}
_UNQUANTISED = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
# Elements dequantised at once: bounds the float32 temporaries to some tens of MB.
_CHUNK_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class GGUFTensor:
    """One stored tensor: shape [out, in] or [n] (the reverse of the file's own order), type and place."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int

    @property
    def dtype(self) -> np.dtype:
        """The dtype that it is read as: its own, or bfloat16 for a quantised type."""
        return _UNQUANTISED.get(self.type, np.dtype(ml_dtypes.bfloat16))

    @property
    def row_bytes(self) -> int:
        """Stored bytes of one row (of one element where there is one dimension)."""
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return block_bytes if len(self.shape) == 1 else self.shape[1] // block * block_bytes

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.shape[0] * self.row_bytes


@dataclass(frozen=True)
class GGUFFile:
    """Metadata and tensors of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return the rows [start, stop) of a tensor, dequantised to bfloat16 where it is quantised."""
        tensor = self.tensors[name]
        result = np.empty((stop - start, *tensor.shape[1:]), tensor.dtype)
        with open_regular_file(self.path) as file:
            if tensor.type in _UNQUANTISED:
                read_into(file, tensor.offset + start * tensor.row_bytes, result, self.path)
                return result
            chunk = max(1, _CHUNK_ELEMENTS // tensor.shape[1])
            for first in range(start, stop, chunk):
                last = min(first + chunk, stop)
                packed = np.empty((last - first, tensor.row_bytes), np.uint8)
                read_into(file, tensor.offset + first * tensor.row_bytes, packed, self.path)
                result[first - start : last - start] = dequantize(packed, tensor.type)
        return result


def read_gguf(path: Path) -> GGUFFile:
    """Read and validate metadata and tensor table of the GGUF file at `path`.

    Raises:
        UserError: It is damaged, of another version or byte order, one part of several, or quantised in a way that
            the gguf library cannot undo.
    """
    with open_regular_file(path) as raw, open(raw.fileno(), "rb", closefd=False) as file:
        cursor = _Cursor(file, os.fstat(raw.fileno()).st_size, path)
        _check_preamble(cursor)
        tensor_count, entry_count = cursor.unpack("<QQ", "the counts of tensors and entries")
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = cursor.string("a metadata key")
            if key in metadata:
                raise UserError(f"{path}: the metadata key {key!r} stands twice.")
            metadata[key] = cursor.value(key)
        if metadata.get("split.count", 1) != 1:
            raise UserError(
                f"{path} is one of {metadata['split.count']} parts. Join them with llama.cpp's "
                "`llama-gguf-split --merge FIRST_PART WHOLE.gguf`, and name the whole."
            )
        table: dict[str, GGUFTensor] = {}
        for _ in range(tensor_count):
            name = cursor.string("a tensor name")
            if name in table:
                raise UserError(f"{path}: tensor {name!r} stands twice.")
            table[name] = _tensor_entry(cursor, name)
        return GGUFFile(path, metadata, _place(cursor, metadata, table))


class _Cursor:
    """A read position that never passes the end of the file."""

    def __init__(self, file: BinaryIO, size: int, path: Path):
        self.file, self.size, self.path = file, size, path

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.file.tell():
            raise UserError(
                f"{self.path} is cut off or damaged: {what} at byte {self.file.tell():,} takes {count:,} bytes, "
                f"the file has {self.size:,}. Download it again."
            )
        return self.file.read(count)

    def unpack(self, layout: str, what: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))

    def string(self, what: str) -> str:
        (length,) = self.unpack("<Q", what)
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: {what} before byte {self.file.tell():,} is not UTF-8: {error}.") from error

    def value(self, key: str) -> Any:
        kind = self._value_type(key)
        if kind is GGUFValueType.STRING:
            return self.string(key)
        if kind is not GGUFValueType.ARRAY:
            return np.frombuffer(self.take(_SCALARS[kind].itemsize, key), _SCALARS[kind])[0].item()
        kind = self._value_type(key)
        (count,) = self.unpack("<Q", key)
        if kind is GGUFValueType.STRING:
            if count * 8 > self.size:
                raise UserError(f"{self.path}: {key} claims {count:,} strings, more than the file can hold.")
            return [self.string(key) for _ in range(count)]
        if kind is GGUFValueType.ARRAY:
            raise UserError(f"{self.path}: {key} is an array of arrays, which is not supported.")
        return np.frombuffer(self.take(count * _SCALARS[kind].itemsize, key), _SCALARS[kind]).tolist()

    def _value_type(self, key: str) -> GGUFValueType:
        (number,) = self.unpack("<I", key)
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise UserError(f"{self.path}: {key} has the unknown value type {number}.") from error


def _check_preamble(cursor: _Cursor) -> None:
    path = cursor.path
    magic = cursor.file.read(4)
    if magic + cursor.file.peek(len(STUB))[: len(STUB) - 4] == STUB:  # type: ignore[attr-defined]
        raise UserError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository.")
    if magic != b"GGUF":
        raise UserError(f"{path} is no GGUF file: it begins with {magic!r}, not b'GGUF'.")
    (version,) = cursor.unpack("<I", "the version")
    if version not in (2, 3):
        other_order = version & 0xFFFF == 0
        found = "is in big-endian byte order" if other_order else f"has version {version}"
        raise UserError(f"{path} {found}: GGUF versions 2 and 3, little-endian, can be read.")


def _tensor_entry(cursor: _Cursor, name: str) -> GGUFTensor:
    where = f"{cursor.path}: tensor {name!r}"
    (dimensions,) = cursor.unpack("<I", where)
    if not 1 <= dimensions <= 4:
        raise UserError(f"{where} has {dimensions} dimensions.")
    shape = tuple(reversed(cursor.unpack(f"<{dimensions}Q", where)))
    number, offset = cursor.unpack("<IQ", where)
    if len(shape) > 2 or 0 in shape:
        raise UserError(f"{where} has the shape {list(shape)}: a Llama model has vectors and matrices only.")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise UserError(f"{where} has type {number}, which the installed gguf library does not know.") from error
    if not _can_dequantize(kind):
        raise UserError(f"{where} is stored as {kind.name}, which the gguf library cannot dequantise.")
    block = GGML_QUANT_SIZES[kind][0]
    if block > 1 and (len(shape) == 1 or shape[1] % block):
        raise UserError(f"{where}: shape {list(shape)} does not consist of {kind.name} blocks of {block}.")
    return GGUFTensor(shape, kind, offset)


@cache
def _can_dequantize(kind: GGMLQuantizationType) -> bool:
    if kind in _UNQUANTISED:
        return True
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return True


def _place(cursor: _Cursor, metadata: dict[str, Any], table: dict[str, GGUFTensor]) -> dict[str, GGUFTensor]:
    """Turn offsets into positions in the file and check that the tensors lie in it one after another."""
    path, alignment = cursor.path, metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise UserError(f"{path}: general.alignment is {alignment!r}, not a power of two.")
    if not table:
        raise UserError(f"{path} holds no tensors.")
    start = -(-cursor.file.tell() // alignment) * alignment
    end, previous = start, "the tensor table"
    placed = {}
    for name, tensor in sorted(table.items(), key=lambda item: item[1].offset):
        tensor = GGUFTensor(tensor.shape, tensor.type, start + tensor.offset)
        if tensor.offset < end or tensor.offset % alignment:
            raise UserError(f"{path}: tensor {name!r} at byte {tensor.offset:,} overlaps {previous} or is misaligned.")
        end, previous = tensor.offset + tensor.nbytes, f"tensor {name!r}"
        placed[name] = tensor
    if end > cursor.size:
        raise UserError(
            f"{path} is cut off: expected at least {end:,} bytes, found {cursor.size:,}. Download it again."
        )
    return placed
