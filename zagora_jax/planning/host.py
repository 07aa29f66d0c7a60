"""What a run needs of the host: memory to load, to offload and to save, and disk for what it writes."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zagora_jax.checkpoints.cache_writer import WAITING_BYTES
from zagora_jax.checkpoints.read_ahead import PIECE_BYTES, READERS
from zagora_jax.config import TrainConfig
from zagora_jax.host_memory import RESERVE
from zagora_jax.layer_ring import LEAST_SLOTS
from zagora_jax.planning.memory import DeviceMemory
from zagora_jax.planning.shapes import Shapes, mesh_shape

# Of a tensor that is being read: what the threads hold, and what goes to the device. Measured beside full-size layers
# of 70B on a GPU: 0.34 GiB, and 0.48 where a fast disk took what the cache of quantised layers keeps (docs/loading.md).
PIECES = READERS + 1
STORED_BYTES = 4  # of a weight in a checkpoint, at most


@dataclass(frozen=True)
class HostNeeds:
    """Bytes of the host, and what is there; None where the plan is for another machine, or nobody said.

    Attributes:
        loading: memory of the process while it reads weights: pieces of tensors, quantised layers that wait for being
            written to their cache, as many as a slow disk makes wait, and streamed layers' pinned memory.
        pinned: memory that the GPUs' offloaded arrays take, all GPUs together.
        saving: memory for one copy of the training state.
        checkpoints: disk for the kept checkpoints, one being written, and the adapter.
        export: disk for a merged model in 16 bits.
        memory_there: all memory of the host.
        disk_free: on the disk of the run directory.
    """

    loading: int
    pinned: int
    saving: int
    checkpoints: int
    export: int
    memory_there: int | None
    disk_free: int | None

    @property
    def memory(self) -> int:
        """At most, at one time: loading comes before the rest."""
        return RESERVE + max(self.loading, self.pinned + self.saving)

    @property
    def shortages(self) -> list[str]:
        """What is too little, in words."""
        found = []
        if self.memory_there is not None and self.memory > self.memory_there:
            found.append(f"the host needs {_gib(self.memory)} of memory and has {_gib(self.memory_there)}")
        if self.disk_free is not None and self.checkpoints + self.export > self.disk_free:
            needed = f"checkpoints {_gib(self.checkpoints)}, a merged export {_gib(self.export)}"
            found.append(f"the disk has {_gib(self.disk_free)} free ({needed})")
        return found


def host_needs(
    config: TrainConfig,
    shapes: Shapes,
    stages: Sequence[DeviceMemory],
    *,
    host_memory: int | None,
    here: bool,
) -> HostNeeds:
    """Reckon what a run needs.

    Args:
        config: of the run.
        shapes: of its model.
        stages: the memory of a device of each stage.
        host_memory: bytes of the host, where known.
        here: whether the run would be on this machine.
    """
    largest, elements = shapes.tensor_elements
    mesh = mesh_shape(config)
    devices, shards = math.prod(mesh.values()) // mesh["stage"], mesh["fsdp"] * mesh["tensor"]  # of a stage
    adapters = sum(memory.lora for memory in stages) * shards
    moments = sum(memory.optimizer for memory in stages) * shards + sum(shapes.moments_on_host(config)) * shards
    state = adapters + moments + sum(memory.error_feedback for memory in stages) * devices
    kept = config.keep_checkpoints + 1
    return HostNeeds(
        loading=PIECES * min(PIECE_BYTES, STORED_BYTES * largest)
        + _waiting_for_the_cache(config, shapes)
        + sum(memory.waiting for memory in stages) * devices,
        pinned=sum(memory.host for memory in stages) * devices,
        saving=state,
        checkpoints=kept * state + 2 * adapters,
        export=2 * elements,
        memory_there=host_memory,
        disk_free=shutil.disk_usage(_existing(config.output)).free if here else None,
    )


def _waiting_for_the_cache(config: TrainConfig, shapes: Shapes) -> int:
    if config.quantized_folder is None or config.quantization == "none":
        return 0
    return min(WAITING_BYTES, shapes.layer_weight_bytes * shapes.base.model.config.num_layers)


def slots_in_host_memory(config: TrainConfig, needs: HostNeeds, waiting: int, streamed: int) -> int | None:
    """Return for how many streamed layers the host has room, where the others may come from the disk; else None.

    Args:
        config: of a run with all streamed layers in host memory.
        needs: what that needs of the host.
        waiting: bytes of the streamed layers of a device.
        streamed: their number.
    """
    if config.offload.weights_from != "auto" or config.strategy == "layerwise":
        return None
    if not waiting or needs.memory_there is None or needs.memory <= needs.memory_there:
        return None
    waiting *= math.prod(mesh_shape(config).values())
    room = (needs.memory_there - (needs.memory - waiting)) * streamed // waiting
    return room if room >= min(LEAST_SLOTS, streamed) else None


def _existing(path: Path) -> Path:
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
