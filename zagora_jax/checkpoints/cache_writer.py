"""Writes what is quantised at this start into the cache of quantised models, beside everything else."""

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zagora_jax.checkpoints.atomic import atomic_file, fsync_directory
from zagora_jax.checkpoints.quantized_cache import QuantizedCache, checksums_of
from zagora_jax.checkpoints.safetensors_file import read_metadata
from zagora_jax.checkpoints.safetensors_writer import write_safetensors
from zagora_jax.errors import UserError
from zagora_jax.hanging import watched
from zagora_jax.reporting.sensors import GIB

# In host memory at most, of layers that wait for being written. Where a disk is slower than that, a layer is left out:
# loading never waits for it, and the next start writes what is missing.
WAITING_BYTES = 2 * GIB
# What stays free of the disk.
RESERVE_BYTES = 2 * GIB
# A temporary file that was last written to so long ago is of a process that was killed.
ABANDONED_SECONDS = 3600
OPTION = "--offload.weights-from"  # which needs all layers


class CacheWriter:
    """Gathers the tensors of a layer, and writes each complete one in a thread of its own."""

    def __init__(self, cache: QuantizedCache, *, all_layers: bool = False):
        """Prepare to write into the entry's folder, which exists.

        Args:
            cache: the entry.
            all_layers: whether loading waits for a slow disk, and fails where it cannot be written to, so that every
                layer is there in the end.
        """
        self.cache, self.all_layers = cache, all_layers
        self._arrays: dict[int, dict[str, np.ndarray]] = {}
        self._sources: dict[int, dict[str, list[str]]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="quantized-cache")
        self._written = threading.Condition()
        self._waiting_bytes, self._left_out, self._failed = 0, 0, False
        self._problem = ""

    def expect(self, name: str, value: Any) -> None:
        """Begin to copy to the host what `add` will be given."""
        if self.cache.layer_of(name) is not None:
            for leaf in jax.tree.leaves(value):
                leaf.copy_to_host_async()

    def add(self, name: str, value: Any, digests: list[str]) -> None:
        """Take the stored form of a tensor, which is on a device, and the hashes of what it was made of."""
        layer = self.cache.layer_of(name)
        if layer is None:
            return
        forms = self.cache.layers[layer]
        arrays = self._arrays.setdefault(layer, {})
        arrays |= zip(forms[name].arrays, map(np.asarray, jax.tree.leaves(value)), strict=True)
        self._sources.setdefault(layer, {})[name] = digests
        if self._sources[layer].keys() == forms.keys():
            self._submit(layer, self._arrays.pop(layer), self._sources.pop(layer))

    def _submit(self, layer: int, arrays: dict[str, np.ndarray], sources: dict[str, list[str]]) -> None:
        size = sum(array.nbytes for array in arrays.values())

        def has_room() -> bool:
            return self._waiting_bytes + size <= WAITING_BYTES or not self._waiting_bytes

        with self._written:
            if self.all_layers:
                self._written.wait_for(has_room)
                self._require_written()
            full = not has_room()
            self._waiting_bytes += 0 if full else size
        if full:
            self._left_out += 1
        elif not self._failed:
            self._pool.submit(self._write, layer, arrays, sources, size)

    def _write(self, layer: int, arrays: dict[str, np.ndarray], sources: dict[str, list[str]], size: int) -> None:
        """Write one file; a failure is said once, and ends the writing."""
        work = f"keeping layer {layer} of the quantised model in {self.cache.folder}"
        try:
            with watched(work, slow=True, ends=False):
                if not (self._failed or self.cache.file(layer).exists() or self._take_over(layer, sources)):
                    write_layer(self.cache, layer, arrays, sources)
        except Exception as error:  # of whatever kind, it is no reason to end a training
            self._failed = True
            where = error.filename if isinstance(error, OSError) else None
            what = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._problem = f"{where or self.cache.folder}: {what or error}"
            if not self.all_layers:
                self.cache.say(
                    f"warning: {self._problem}: the quantised model is not kept any further, and the next start "
                    "quantises what is missing"
                )
        finally:
            with self._written:
                self._waiting_bytes -= size
                self._written.notify_all()

    def _require_written(self) -> None:
        if self._failed:
            raise UserError(f"{self._problem}: layers are to be read from there in training ({OPTION} disk)")

    def _take_over(self, layer: int, sources: Mapping[str, list[str]]) -> bool:
        """Give a file of the same content, made of another copy of the model, a second name; remove outdated ones."""
        for other in self.cache.others(layer):
            try:
                same = json.loads(read_metadata(other)["source_hashes"]) == sources
                if same:
                    os.link(other, self.cache.file(layer))
                    fsync_directory(self.cache.folder)
                    return True
            except (UserError, KeyError, ValueError, OSError):
                continue  # damaged, gone meanwhile, or on a file system without links
            other.unlink(missing_ok=True)
        return False

    def close(self, *, complete: bool) -> None:
        """Take no more tensors; what waits is still written, also beyond this call, if loading was complete.

        Raises:
            UserError: all layers were to be written, and one could not be.
        """
        self._pool.shutdown(wait=complete and self.all_layers, cancel_futures=not complete)
        if complete and self.all_layers:
            self._require_written()
        if self._left_out:
            self.cache.say(
                f"the disk of {self.cache.folder} is slower than loading: {self._left_out} of {len(self.cache.layers)} "
                "layers of the quantised model are left to be kept at the next start"
            )


def write_layer(
    cache: QuantizedCache, layer: int, arrays: Mapping[str, np.ndarray], sources: Mapping[str, list[str]]
) -> None:
    """Write the file of a layer, durably, under its name only when it is complete.

    Args:
        cache: the entry.
        layer: its number.
        arrays: the layer's arrays by their names in the file.
        sources: of each tensor, hashes of what was read of it.
    """
    metadata = {
        **{name: value if isinstance(value, str) else json.dumps(value) for name, value in cache.identity.items()},
        "source": cache.checkpoint.name,
        "source_hashes": json.dumps(sources),
        "checksums": json.dumps({name: checksums_of(array) for name, array in arrays.items()}),
    }
    specs = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    with atomic_file(cache.file(layer)) as file:
        write_safetensors(file, specs, arrays.__getitem__, metadata)


@contextmanager
def writing(cache: QuantizedCache, *, all_layers: bool = False) -> Iterator[CacheWriter | None]:
    """Yield what writes layers of a cache that are missing, or turn out to be damaged; None where it cannot be written.

    Says what will be read from where, and what is written.

    Raises:
        UserError: all layers are to be written, and cannot be.
    """
    missing = cache.layers.keys() - cache.found.keys()
    part = "" if not missing else f"{len(cache.found)} of {len(cache.layers)} layers of "
    if cache.found:
        cache.say(f"reading {part}the quantised model from {cache.folder}")
    if missing:
        size = sum(form.nbytes for layer in missing for form in cache.layers[layer].values())
        if (problem := _prepare(cache.folder, size)) is not None:
            if all_layers:
                raise UserError(f"{problem}: layers are to be read from there in training ({OPTION} disk)")
            cache.say(f"the quantised model is not kept for the next start: {problem}")
            yield None
            return
        cache.say(f"keeping {size / GIB:.2f} GiB of quantised layers for the next start in {cache.folder}")
    writer = CacheWriter(cache, all_layers=all_layers)
    try:
        yield writer
    except BaseException:
        writer.close(complete=False)
        raise
    writer.close(complete=True)


def _prepare(folder: Path, size: int) -> str | None:
    """Make the folder, and say what is against writing `size` bytes into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(".*.tmp"):
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                path.unlink(missing_ok=True)
        if not os.access(folder, os.W_OK):
            return f"{folder} cannot be written to"
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror or error}"
    if free < size + RESERVE_BYTES:
        return (
            f"it takes {size / GIB:.2f} GiB, and of the {free / GIB:.2f} GiB free on the disk of {folder} "
            f"{RESERVE_BYTES / GIB:.0f} are left alone"
        )
    return None
