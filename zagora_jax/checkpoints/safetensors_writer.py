"""Write one safetensors file tensor by tensor, so that no more than one of them need be in memory."""

import json
import struct
from collections.abc import Callable, Mapping
from typing import BinaryIO

import numpy as np

from zagora_jax.checkpoints.safetensors_file import DTYPES

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(
    file: BinaryIO,
    specs: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    read: Callable[[str], np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Write the tensors that `specs` lists, asking `read` for one after another.

    Args:
        file: Opened for writing, empty.
        specs: Shape and dtype by name.
        read: Returns a tensor by name.
        metadata: Goes into the header; transformers wants {"format": "pt"}.

    Raises:
        ValueError: `read` returned another shape or dtype than `specs` says.
    """
    # Wider types first, as the safetensors library does: every tensor is then aligned to its own width.
    ordered = sorted(specs, key=lambda name: -specs[name][1].itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name in ordered:
        shape, dtype = specs[name]
        end = position + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(struct.pack("<Q", len(encoded)))
    file.write(encoded)
    for name in ordered:
        tensor = read(name)
        if (tensor.shape, tensor.dtype) != specs[name]:
            raise ValueError(f"tensor {name!r}: expected {specs[name]}, found {(tensor.shape, tensor.dtype)}")
        file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
