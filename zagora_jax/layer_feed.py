"""Streamed layers that are read from the cache of quantised models while programs run.

Host memory holds a ring of them (`zagora_jax.layer_ring`), from which the devices copy. A program asks the host for
each layer before it copies it, and the answer, a number, comes once the layer is there. Only the question passes
through Python and a device's stream of operations; the layer itself is copied beside the computation, as every streamed
layer is.
All devices go through the layers together, so a byte is read from the disk once for all of them.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh

from models.llama import Llama
from models.parameters import Path
from models.stream_order import Ring, StreamOrder, arrivals
from sharding.targets import is_absent
from zagora_jax.checkpoints.layer_files import LayerFile, Share, shares
from zagora_jax.checkpoints.load import expected_tensors
from zagora_jax.checkpoints.quantized_cache import QuantizedCache
from zagora_jax.errors import UserError
from zagora_jax.layer_ring import Job, LayerRing
from zagora_jax.streaming import StreamedSpread

# What jax calls its own callback from a GPU: a program for absent devices has such a call, which nobody answers.
GPU_CALLBACK = "xla_ffi_python_gpu_callback"


class LayerFeed:
    """What fills the ring of streamed layers of a mesh, and tells its programs when each layer is there."""

    def __init__(self, mesh: Mesh, model: Llama, order: StreamOrder, slots: int, spreads: Mapping[Path, Any]):
        """Describe the feed; `open` starts it.

        Args:
            mesh: the devices.
            model: as declared.
            order: which layers are streamed.
            slots: for how many of them host memory has room.
            spreads: of the frozen parameters, some of them StreamedSpreads.
        """
        self.mesh, self.order, self.slots = mesh, order, slots
        self._model, self._spreads = model, spreads
        self._ring: LayerRing | None = None
        self._files: list[LayerFile] = []
        self._waiting: jax.Array | None = None

    @cached_property
    def ring(self) -> Ring:
        """What the programs know of it."""
        result, on_cpu = jax.ShapeDtypeStruct((), jnp.int32), self.mesh.devices.flat[0].platform == "cpu"

        def arrive(layer: jax.Array, after: jax.Array) -> jax.Array:
            if is_absent(self.mesh):
                return jax.ffi.ffi_call(GPU_CALLBACK, result, has_side_effect=True)(layer, index=np.uint64(0))
            device = jax.lax.axis_index(self.mesh.axis_names)
            return io_callback(self._arrive, result, layer, device, *((after,) if on_cpu else ()))

        return Ring(self.slots, arrive, data_dependent=on_cpu)

    def _arrive(self, layer: Any, device: Any, *_: Any) -> np.ndarray:
        if self._ring is not None:  # else the run is over, and what is left of a program may end
            self._ring.arrive(int(layer), int(device))
        return np.zeros((), np.int32)

    def open(self, cache: QuantizedCache, waiting: jax.Array) -> None:
        """Begin to read layers into `waiting`, uint8 [slots, devices * bytes].

        Raises:
            UserError: the cache lacks a layer.
        """
        rows, self._waiting = _rows_of_shares(waiting), waiting
        streamed = [layer for layer, is_streamed in enumerate(self.order.layer_kinds) if is_streamed]
        if lacking := [layer for layer in streamed if layer not in cache.found]:
            raise UserError(
                f"{cache.file(lacking[0])} is not there, but layers are to be read from there in training "
                "(--offload.weights-from). Did another program remove it? Start again: it is made anew"
            )
        self._files = [LayerFile(cache.found[layer], self._shares_of(cache, layer)) for layer in streamed]

        def jobs_of(number: int, slot: int) -> Sequence[Job]:
            return self._files[number].jobs({share: [of[slot] for of in same] for share, same in rows.items()})

        self._ring = LayerRing(self.slots, self.mesh.size, jobs_of)
        self._ring.begin(arrivals(len(streamed), backward=True))

    def _shares_of(self, cache: QuantizedCache, layer: int) -> dict[str, list[Share]]:
        """Return where the bytes of each streamed array of a layer go, by its name in the cache."""
        found = {}
        for name, form in cache.layers[layer].items():
            spreads = jax.tree.leaves(self._spreads[expected_tensors(self._model)[name].path])
            for (array, stored), spread in zip(form.arrays.items(), spreads, strict=True):
                if isinstance(spread, StreamedSpread):
                    size = stored.size * stored.dtype.itemsize
                    found[array] = shares(size, spread.end - spread.start, spread.start)
        return found

    @contextmanager
    def running(self, *, backward: bool) -> Iterator[None]:
        """Run one program in the block, and wait there for its end; no other may run.

        Raises:
            UserError: a layer could not be read, so what the program has computed is wrong.
        """
        assert self._ring is not None, "open() comes first"
        self._ring.begin(arrivals(self.order.streamed_layers, backward=backward))
        yield
        if (failure := self._ring.failure) is not None:
            raise UserError(
                f"{failure}: the layers that wait on the disk cannot be read any more. The steps up to the last saved "
                "one stand: the same command with --resume goes on from there, and makes anew what is damaged"
            ) from failure

    @property
    def seconds_waited(self) -> float:
        """How long the last program's devices have waited for the disk: of all, the longest."""
        return 0.0 if self._ring is None else max(self._ring.waited)

    @property
    def layers_read(self) -> int:
        """How many layers have been read from the disk since the feed was opened."""
        return 0 if self._ring is None else self._ring.layers_read

    def close(self) -> None:
        """Stop reading, and leave `waiting` alone."""
        if self._ring is not None:
            self._ring.close()
        for file in self._files:
            file.close()
        self._ring, self._files, self._waiting = None, [], None


def _rows_of_shares(waiting: jax.Array) -> dict[int, list[np.ndarray]]:
    """Return the memory of a host array [slots, shares * bytes]: of each share's devices uint8 [slots, bytes]."""
    slots, row = waiting.sharding.shard_shape(waiting.shape)
    found: dict[int, list[np.ndarray]] = {}
    for shard in waiting.addressable_shards:
        memory = (ctypes.c_uint8 * (slots * row)).from_address(shard.data.unsafe_buffer_pointer())
        of_share = found.setdefault((shard.index[1].start or 0) // row, [])
        of_share.append(np.ctypeslib.as_array(memory).reshape(slots, row))
    return found
