"""Adding an adapter to its base model's weights, a shard and a tensor at a time, with checks of the result.

A weight that carries an adapter becomes W + scale * B A, added in float32 and rounded once to the type that is written;
nothing is ever quantised again. The sums are checked against the model's own layers (`merge_checks`), the files
against what was computed.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from models.llama import Llama
from models.modules import linear_modules, table_modules
from models.quantization import dequantize, quantize
from zagora_jax.checkpoints.checkpoint import Checkpoint, plan_shards
from zagora_jax.checkpoints.huggingface import INDEX, WEIGHTS, HuggingFaceCheckpoint
from zagora_jax.checkpoints.load import expected_tensors
from zagora_jax.checkpoints.merge_checks import MergeChecks, MergeReport, ProbedLayer, ProbedTable, Update
from zagora_jax.checkpoints.reading import Prepare
from zagora_jax.checkpoints.safetensors_file import read_header, read_tensor
from zagora_jax.checkpoints.safetensors_writer import write_safetensors
from zagora_jax.errors import UserError

SHARD_BYTES = 5 * 10**9  # of a file, where the source has no shards of its own

_CHUNK_BYTES = 8 * 2**20  # of float32 rows that are computed at once


class Merge:
    """A merged model that is computed while it is written."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: Llama,
        updates: Mapping[str, Update],
        *,
        replaced: Mapping[str, np.ndarray] | None = None,
        dequantized: str | None = None,
        prepare: Prepare | None = None,
        dtype: np.dtype | None = None,
    ):
        """Plan the files; no weight is read.

        Args:
            checkpoint: Holds the base model, whose tensors have been checked against `model`.
            model: Declared with its adapter, "none" as quantization and float32.
            updates: By tensor name.
            replaced: What takes the place of tensors, float32, by name: weights that were trained in full.
            dequantized: A quantization format: every linear layer's weight is replaced by what the format keeps of
                it. None takes the weights as they are.
            prepare: Makes what the format keeps of the weights that are read.
            dtype: Of all tensors that are written; None keeps each tensor's own.
        """
        self.checkpoint, self.updates = checkpoint, updates
        self._dequantized, self._replaced, self._prepare = dequantized, replaced or {}, prepare
        expected = expected_tensors(model)
        self.specs = {
            name: (info.shape, dtype or info.dtype) for name, info in checkpoint.tensors.items() if name in expected
        }
        layers, tables = linear_modules(model), table_modules(model)

        def of_kind(modules: Mapping[str, Any]) -> dict[str, Any]:
            by_name = {name: ".".join(tensor.path[:-1]) for name, tensor in expected.items()}
            return {
                name: modules[path] for name, path in by_name.items() if path in modules and name.endswith(".weight")
            }

        self._linear, self._tables = of_kind(layers), of_kind(tables)
        self._layers = {name: expected[name].layer or 0 for name in self._linear}
        self.layout = _layout(checkpoint, {name: nbytes(*spec) for name, spec in self.specs.items()})

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(nbytes(*spec) for spec in self.specs.values())

    def write(self, directory: Path, on_tensor: Callable[[], None] = lambda: None) -> MergeReport:
        """Write the safetensors files, and an index where there are several, into the empty `directory`.

        Raises:
            UserError: A number does not fit the dtype, or a weight is left as it was.
            RuntimeError: A check of the result failed.
        """
        checks = MergeChecks()
        for file in sorted(set(self.layout.values())):
            names = sorted(name for name in self.specs if self.layout[name] == file)
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            self._write_file(directory / file, names, checks, on_tensor)
        if set(self.layout.values()) != {WEIGHTS}:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(self.layout.items()))}
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
        return checks.report(len(self.specs), list(self.updates), len(self._replaced.keys() & self.specs.keys()))

    def _write_file(self, path: Path, names: list[str], checks: MergeChecks, on_tensor: Callable[[], None]) -> None:
        digests = {}

        def read(name: str) -> np.ndarray:
            tensor = self._compute(name, checks)
            digests[name] = _digest(tensor)
            on_tensor()
            return tensor

        specs = {name: self.specs[name] for name in names}
        with path.open("xb") as file:
            write_safetensors(file, specs, read, {"format": "pt"})
        written = read_header(path)
        if {name: (info.shape, info.dtype) for name, info in written.items()} != specs:
            raise RuntimeError(f"{path}: the header reads back differently from what was written")
        for name, info in written.items():
            if _digest(read_tensor(info)) != digests[name]:
                raise RuntimeError(f"{path}: tensor {name} reads back differently from what was written")

    def _compute(self, name: str, checks: MergeChecks) -> np.ndarray:
        """Return a tensor as it is to be written."""
        shape, dtype = self.specs[name]
        result = np.empty(shape, dtype)
        update = self.updates.get(name)
        layer = None if update is None else self._probed(name, update)
        replaced = self._replaced.get(name)
        for start, base in self._base_rows(name):
            stop = start + len(base)
            unchanged = _rounded(base, result.dtype, name)
            if replaced is not None:
                result[start:stop] = _rounded(replaced[start:stop], result.dtype, name)
                checks.count(name, unchanged, result[start:stop], *_difference(base, replaced[start:stop]))
                continue
            if update is None or layer is None:
                result[start:stop] = unchanged
                continue
            wide = base.astype(np.float32, copy=False)
            merged, delta = update.merged(wide, start)
            result[start:stop] = written = _rounded(merged, result.dtype, name)
            checks.compare(name, layer, wide, merged, start)
            checks.count(name, unchanged, written, wide, delta)
        return result

    def _probed(self, name: str, update: Update) -> "ProbedLayer | ProbedTable":
        if name in self._tables:
            return ProbedTable(self._tables[name], update)
        return ProbedLayer(self._linear[name], update, self._layers[name])

    def _base_rows(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yield some rows at a time of the base model's tensor, each with the number of its first row."""
        shape = self.specs[name][0]
        step = max(1, _CHUNK_BYTES // nbytes(shape[1:], np.dtype(np.float32)))
        if self._dequantized is not None and name in self._linear:
            weight = self.checkpoint.read(name)
            held = weight if self._prepare is None else self._prepare(name, weight)
            quantized = quantize(self._dequantized, jnp.asarray(held))
            whole = np.asarray(_dequantize(quantized))
            yield from ((start, whole[start : start + step]) for start in range(0, shape[0], step))
        else:
            for start in range(0, shape[0], step):
                yield start, self.checkpoint.read_rows(name, start, min(start + step, shape[0]))


def _difference(base: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what a weight was, and by how much it changed, float32."""
    wide = base.astype(np.float32, copy=False)
    return wide, trained - wide


def nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the bytes of a tensor."""
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _layout(checkpoint: Checkpoint, sizes: Mapping[str, int]) -> dict[str, str]:
    """Return the file of each tensor: the source's, where it has such files itself."""
    if isinstance(checkpoint, HuggingFaceCheckpoint):
        return {name: checkpoint.layout[name] for name in sizes}
    return plan_shards(sizes, SHARD_BYTES)


def _rounded(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Convert to `dtype`; a number that becomes infinite is an error."""
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(dtype)
    if not np.isfinite(result).all():
        limit = float(ml_dtypes.finfo(dtype).max)
        raise UserError(
            f"tensor {name} has numbers as large as {np.abs(values.astype(np.float32)).max():.3g}, which {dtype} "
            f"cannot hold (its largest is {limit:.3g}): give --dtype bfloat16 or float32"
        )
    return result


def _digest(tensor: np.ndarray) -> bytes:
    return hashlib.sha256(tensor.reshape(-1).view(np.uint8).data).digest()


_dequantize = jax.jit(partial(dequantize, dtype=jnp.float32))
