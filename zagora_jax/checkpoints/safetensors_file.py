"""One safetensors file: a header that is checked to the byte, and reads that touch only what is asked for.

The format is https://huggingface.co/docs/safetensors: 8 bytes of header length (little endian), a JSON header, then
the tensors' bytes without gaps. Tensors are read with plain reads into the array that is returned, never through a
memory map: mapped pages count as the process's own memory and would break the bound on peak memory.
"""

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from zagora_jax.checkpoints.checkpoint import TensorInfo
from zagora_jax.checkpoints.json_files import parse_json_object
from zagora_jax.errors import UserError
from zagora_jax.git_lfs import STUB

# The format's own limit.
MAX_HEADER_BYTES = 100_000_000

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "C64": np.complex64,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}


def open_regular_file(path: Path) -> BinaryIO:
    """Open the regular file at `path` for reading, unbuffered."""
    try:
        if not path.exists():
            raise UserError(f"{path} does not exist.")
        if not path.is_file():  # opening a pipe would wait for ever
            raise UserError(f"{path} is not a file.")
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error


def read_into(file: BinaryIO, offset: int, array: np.ndarray, path: Path) -> None:
    """Fill the contiguous `array` with the bytes at `offset`."""
    view = array.reshape(-1).view(np.uint8).data
    file.seek(offset)
    filled = 0
    while filled < len(view):
        count = file.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            raise UserError(
                f"{path} ended while it was read: expected {len(view):,} bytes at {offset:,}, found {filled:,}. "
                "Did another program change it?"
            )
        filled += count


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read and validate the header of the safetensors file at `path`.

    Returns:
        The tensors by name, in the order of their bytes.

    Raises:
        UserError: The file is not exactly what its header says.
    """
    return _read_header(path)[0]


def read_metadata(path: Path) -> dict[str, str]:
    """Read what the header of the safetensors file at `path` says beside its tensors."""
    return _read_header(path)[1]


def _read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(len(STUB))
        if head == STUB:
            raise UserError(
                f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository, "
                "or download the file."
            )
        if len(head) < 8:
            raise UserError(f"{path}: {size:,} bytes are no safetensors file. Download it again.")
        (length,) = struct.unpack("<Q", head[:8])
        if length > MAX_HEADER_BYTES:
            raise UserError(
                f"{path}: its first 8 bytes give a header of {length:,} bytes, more than the format's limit of "
                f"{MAX_HEADER_BYTES:,}. This is no safetensors file."
            )
        if 8 + length > size:
            raise UserError(
                f"{path} is cut off: its header needs {8 + length:,} bytes, found {size:,}. Download it again."
            )
        file.seek(8)
        raw = file.read(length)
    header = parse_json_object(raw, f"{path}: header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(f"{path}: __metadata__ must map names to strings.")
    if not header:
        raise UserError(f"{path} holds no tensors. Download or save it again.")
    tensors = {name: _tensor_info(path, name, entry, 8 + length) for name, entry in header.items()}
    return _check_extent(path, tensors, 8 + length, size), metadata


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    """Validate one entry of the header on its own."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{where}: expected the fields dtype, shape and data_offsets, found {_brief(entry)}.")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise UserError(f"{where}: dtype {_brief(entry['dtype'])} is not one of {', '.join(DTYPES)}.")
    for key in ("shape", "data_offsets"):
        values = entry[key]
        if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
            raise UserError(f"{where}: {key} must be a list of non-negative integers, found {_brief(values)}.")
    if len(entry["data_offsets"]) != 2:
        raise UserError(f"{where}: data_offsets must be [begin, end], found {_brief(entry['data_offsets'])}.")
    begin, end = entry["data_offsets"]
    if 0 in entry["shape"]:
        raise UserError(f"{where}: shape {entry['shape']} has no elements: the file was saved incompletely.")
    info = TensorInfo(tuple(entry["shape"]), DTYPES[entry["dtype"]], path, data_start + begin)
    if info.nbytes != end - begin:
        raise UserError(
            f"{where}: shape {list(info.shape)} of {entry['dtype']} takes {info.nbytes:,} bytes, "
            f"but data_offsets [{begin}, {end}] hold {end - begin:,}."
        )
    return info


def _check_extent(path: Path, tensors: dict[str, TensorInfo], data_start: int, size: int) -> dict[str, TensorInfo]:
    """Check that the tensors follow one another without gap or overlap up to the end of the file."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    position, previous = data_start, "the header"
    for name, info in ordered.items():
        if info.offset != position:
            kind = "overlaps" if info.offset < position else "leaves a gap after"
            raise UserError(
                f"{path}: tensor {name!r} {kind} {previous}: "
                f"expected it at byte {position - data_start:,} of the data, found {info.offset - data_start:,}."
            )
        position, previous = info.offset + info.nbytes, f"tensor {name!r}"
    if position != size:
        problem = "is cut off" if size < position else "has bytes after its last tensor"
        raise UserError(f"{path} {problem}: expected {position:,} bytes, found {size:,}. Download it again.")
    return ordered


def read_tensor(info: TensorInfo) -> np.ndarray:
    """Read a whole tensor into an array of its own."""
    array = np.empty(info.shape, info.dtype)
    with open_regular_file(info.file) as file:
        read_into(file, info.offset, array, info.file)
    return array


def read_rows(info: TensorInfo, start: int, stop: int) -> np.ndarray:
    """Read the rows [start, stop) of a tensor: `array[start:stop]` of what `read_tensor` returns."""
    array = np.empty((stop - start, *info.shape[1:]), info.dtype)
    row_bytes = info.nbytes // info.shape[0] if info.shape[0] else 0
    with open_regular_file(info.file) as file:
        read_into(file, info.offset + start * row_bytes, array, info.file)
    return array


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
