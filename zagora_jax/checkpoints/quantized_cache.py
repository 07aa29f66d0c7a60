"""The quantised layers of a model on disk, made once: the next start reads a quarter of the bytes, quantises nothing.

An entry is a folder with one safetensors file a layer. Arrays are whole, so they suit every mesh and strategy. A file
is there when it is complete; what an interrupted start has written, the next one uses. Checksums of all pieces stand in
the header, and are compared whenever a piece is read. Parameters outside of the layers are not quantised, so they are
read from the model's own files.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash
from flax import nnx

from models.llama import Llama
from models.parameters import Frozen, by_path
from models.quantization import FORMATS, is_quantized
from zagora_jax.checkpoints import read_ahead
from zagora_jax.checkpoints.checkpoint import Checkpoint, TensorInfo
from zagora_jax.checkpoints.load import expected_tensors
from zagora_jax.checkpoints.read_ahead import row_pieces
from zagora_jax.checkpoints.reading import DamagedCacheError, Reading, assembled, digest
from zagora_jax.checkpoints.safetensors_file import read_header, read_metadata, read_rows, read_tensor
from zagora_jax.errors import UserError

FORMAT_VERSION = 1


@dataclass(frozen=True)
class StoredForm:
    """What a tensor becomes: shape and dtype of its arrays by their names in the cache, and their tree structure."""

    arrays: Mapping[str, jax.ShapeDtypeStruct]
    structure: Any

    @classmethod
    def of(cls, name: str, stack: Any) -> "StoredForm":
        """Return that of the tensor `name`, which is a layer's place in the declared `stack`."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(stack)
        arrays = {
            ".".join((name, *(key.name for key in path))): jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
            for path, leaf in leaves
        }
        return cls(arrays, structure)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in self.arrays.values())


@dataclass(frozen=True)
class CachedLayer:
    """The complete file of a layer: where each array is in it, and the checksums of each array's pieces."""

    path: Path
    arrays: Mapping[str, TensorInfo]
    checksums: Mapping[str, list[str]]

    @classmethod
    def open(cls, path: Path, forms: Mapping[str, StoredForm]) -> "CachedLayer":
        """Read the header of the file that holds the tensors `forms`.

        Raises:
            DamagedCacheError: it is not what was written.
        """
        try:
            found, checksums = read_header(path), json.loads(read_metadata(path)["checksums"])
        except (UserError, KeyError, ValueError) as error:
            raise DamagedCacheError(path, str(error)) from error
        for name, array in ((name, array) for form in forms.values() for name, array in form.arrays.items()):
            info = found.get(name)
            if info is None or (info.shape, info.dtype) != (array.shape, array.dtype):
                raise DamagedCacheError(path, f"expected {name} as {array.dtype}{list(array.shape)}, found {info}")
            if not isinstance(checksums, dict) or len(checksums.get(name, ())) != len(_pieces(info)):
                raise DamagedCacheError(path, f"expected {len(_pieces(info))} checksums of {name}")
        return cls(path, found, checksums)

    def jobs(self, name: str) -> list[Callable[[], np.ndarray]]:
        """Return what reads the array `name` in pieces."""
        pieces = zip(_pieces(self.arrays[name]), self.checksums[name], strict=True)
        return [partial(self._read, name, piece, expected) for piece, expected in pieces]

    def byte_pieces(self, name: str) -> list[tuple[int, int, str]]:
        """Return each piece of the array `name`: its first byte within the array, the byte behind it, its checksum."""
        info = self.arrays[name]
        row_bytes = info.nbytes // (info.shape[0] if info.shape else 1)
        rows = [piece or (0, 1) for piece in _pieces(info)]
        return [
            (start * row_bytes, stop * row_bytes, checksum)
            for (start, stop), checksum in zip(rows, self.checksums[name], strict=True)
        ]

    def _read(self, name: str, piece: tuple[int, int] | None, expected: str) -> np.ndarray:
        """Read a piece, and compare its checksum."""
        info = self.arrays[name]
        try:
            array = read_tensor(info) if piece is None else read_rows(info, *piece)
        except UserError as error:
            raise DamagedCacheError(self.path, str(error)) from error
        if digest(array) != expected:
            raise DamagedCacheError(self.path, f"the checksum of {name} is not that of what was written")
        return array


def _pieces(info: TensorInfo) -> list[tuple[int, int] | None]:
    """Cut an array into ranges of rows; None is all of a number that has no rows."""
    return list(row_pieces(info.shape, info.dtype.itemsize)) if info.shape else [None]


def checksums_of(array: np.ndarray) -> list[str]:
    """Return the checksum of each piece of an array."""
    if not array.shape:
        return [digest(array)]
    return [digest(array[start:stop]) for start, stop in row_pieces(array.shape, array.dtype.itemsize)]


class CachedReading:
    """A tensor that is read from the cache as it is; see `Reading`."""

    def __init__(self, name: str, form: StoredForm, layer: CachedLayer):
        """Prepare to read the tensor `name` from `layer`."""
        self.name, self.form, self.layer = name, form, layer
        of_arrays = [layer.jobs(array) for array in form.arrays]
        self._counts = [len(jobs) for jobs in of_arrays]
        self.jobs = [job for jobs in of_arrays for job in jobs]

    def finish(self, results: Iterator[Any]) -> tuple[Any, None]:
        """See `Reading`; what was written was finite."""
        arrays = [
            assembled(islice(results, count), array.shape, array.dtype)
            for count, array in zip(self._counts, self.form.arrays.values(), strict=True)
        ]
        return jax.tree.unflatten(self.form.structure, arrays), None


@dataclass
class QuantizedCache:
    """One model, quantised in one way.

    Attributes:
        root: the folder of all quantised models.
        checkpoint: the model.
        quantization: the format of its linear weights.
        model: as declared.
        say: is told what is read and written, and what is wrong.
        layers: what each layer's file holds, by tensor.
        found: the layers whose files are there.
    """

    root: Path
    checkpoint: Checkpoint
    quantization: str
    model: Llama
    say: Callable[[str], None]
    layers: dict[int, dict[str, StoredForm]] = field(init=False)
    found: dict[int, CachedLayer] = field(init=False)

    def __post_init__(self) -> None:
        declared = by_path(nnx.state(self.model, Frozen))
        self.layers, self.found, self._layer_of = {}, {}, {}
        for name, tensor in expected_tensors(self.model).items():
            if tensor.layer is not None:
                form = StoredForm.of(name, declared[tensor.path].get_value())
                self.layers.setdefault(tensor.layer, {})[name] = form
                self._layer_of[name] = tensor.layer
        for layer, forms in self.layers.items():
            if (path := self.file(layer)).exists():
                try:
                    self.found[layer] = CachedLayer.open(path, forms)
                except DamagedCacheError as damage:
                    self._remove(damage)

    @staticmethod
    def pays(checkpoint: Checkpoint, quantization: str, model: Llama) -> bool:
        """Tell whether anything is quantised at all: else the model's own files are read as fast."""
        declared = by_path(nnx.state(model, Frozen))
        return any(
            tensor.layer is not None
            and tensor.path in declared
            and is_quantized(declared[tensor.path].get_value())
            and checkpoint.format_of(name) != quantization
            for name, tensor in expected_tensors(model).items()
        )

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the numbers depend on, but for the files' content beyond what the fingerprint covers."""
        return {
            "format_version": FORMAT_VERSION,
            "source_fingerprint": self.checkpoint.fingerprint(),
            "quantization": self.quantization,
            "settings": dict(FORMATS[self.quantization].settings),
            "compute_dtype": str(self.model.dtype),
            "piece_bytes": read_ahead.PIECE_BYTES,
        }

    @cached_property
    def folder(self) -> Path:
        """The entry's folder: named after the model, but known by what follows."""
        key = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:20]
        there = sorted(self.root.glob(f"*-{key}"))
        name = re.sub(r"[^\w.-]+", "-", Path(self.checkpoint.name.rstrip("/")).name).strip("-.") or "model"
        return there[0] if there else self.root / f"{name}-{self.quantization}-{key}"

    @cached_property
    def stamp(self) -> str:
        """A short text that changes with the size or the time of change of any of the model's files."""
        files = {info.file for info in self.checkpoint.tensors.values()}
        stats = sorted((file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files)
        return xxhash.xxh3_64_hexdigest(json.dumps(stats).encode())

    def file(self, layer: int) -> Path:
        """Return the file of a layer, made of the model's files as they are now."""
        return self.folder / f"layer-{layer:05d}.{self.stamp}.safetensors"

    def others(self, layer: int) -> list[Path]:
        """Return the files of a layer that were made of the model's files as they were, or of another copy of them."""
        return [path for path in self.folder.glob(f"layer-{layer:05d}.*.safetensors") if path != self.file(layer)]

    def layer_of(self, name: str) -> int | None:
        """Return the layer that the tensor `name` belongs to, if any."""
        return self._layer_of.get(name)

    def reading(self, name: str) -> Reading | None:
        """Return how the tensor `name` is read from here; None where it is not here."""
        layer = self._layer_of.get(name)
        if layer is None or layer not in self.found:
            return None
        return CachedReading(name, self.layers[layer][name], self.found[layer])

    def discard(self, damage: DamagedCacheError) -> set[str]:
        """Remove a damaged file; returns the names of all tensors that were in it."""
        (layer,) = (layer for layer, found in self.found.items() if found.path == damage.path)
        self._remove(damage)
        del self.found[layer]
        return set(self.layers[layer])

    def _remove(self, damage: DamagedCacheError) -> None:
        self.say(f"warning: {damage}. The file is damaged: it is removed, and made anew from the model")
        damage.path.unlink(missing_ok=True)
