"""What every source of a model offers: a config, tensors read one at a time, and the files that go with them."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# Bytes of each tensor that go into a checkpoint's fingerprint.
_SAMPLE_BYTES = 256


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor.

    Attributes:
        shape: Shape as `Checkpoint.read` returns it.
        dtype: Element type as `Checkpoint.read` returns it.
        file: The file that holds it.
        offset: Position of its first byte in `file`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array that `Checkpoint.read` returns."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(kw_only=True)
class Checkpoint(ABC):
    """A model on disk, under Hugging Face's tensor names.

    Everything but the tensors' values is in memory: opening a checkpoint has validated its files already.

    Attributes:
        name: The model as the user named it.
        path: The directory or file that was opened.
        config: Content of config.json.
        tensors: Every tensor of the model by name, without `ignored`.
        assets: Content of the files that accompany an export (config.json, generation_config.json, tokenizer files,
            chat templates) by file name.
        ignored: Names of stored tensors that no model needs, such as `rotary_emb.inv_freq`: the config says it all.
    """

    name: str
    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    assets: Mapping[str, bytes]
    ignored: tuple[str, ...] = field(default=())

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """Return the tensor `name`: an array of its own, and the only memory that reading it takes for long."""

    @abstractmethod
    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return the rows [start, stop) of the tensor `name`, [stop - start, ...], and read few others."""

    def format_of(self, name: str) -> str | None:
        """Return the quantised format, of `models.quantization`, that the tensor `name` can be kept in as stored."""
        return None

    def read_packed(self, name: str) -> Any:
        """Return the tensor `name`, which has a format, in that format; its arrays are numpy's."""
        raise NotImplementedError(f"{type(self).__name__} holds nothing in a quantised format")

    @property
    @abstractmethod
    def layout(self) -> dict[str, str]:
        """The safetensors file, by name relative to an export's directory, in which each tensor belongs."""

    def fingerprint(self) -> str:
        """Return a short hash that tells this model from others, at little cost.

        It covers the config and each tensor's name, shape, dtype and first 256 bytes, not the files' names: enough to
        tell a base model from its fine-tuned siblings. It is no checksum: a change deep inside a tensor goes unseen.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, info in sorted(self.tensors.items()):
            digest.update(f"\n{name} {info.shape} {info.dtype}\n".encode())
            with open(info.file, "rb", buffering=0) as file:
                file.seek(info.offset)
                digest.update(file.read(min(_SAMPLE_BYTES, info.nbytes)))
        return digest.hexdigest()[:32]


def plan_shards(sizes: Mapping[str, int], limit: int) -> dict[str, str]:
    """Distribute tensors over safetensors files, in the given order, as Hugging Face names and fills them.

    Args:
        sizes: Bytes of each tensor by name.
        limit: Bytes of tensors that a file may hold; one larger tensor has a file of its own.

    Returns:
        File name by tensor name: `model.safetensors` where one file is enough.
    """
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) <= 1:
        return dict.fromkeys(sizes, "model.safetensors")
    return {
        name: f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number, names in enumerate(shards, start=1)
        for name in names
    }
