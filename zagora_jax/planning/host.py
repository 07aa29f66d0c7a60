"""What a run needs of the host: memory to load, to offload and to save, and disk for what it writes."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zagora_jax.config import TrainConfig
from zagora_jax.host_memory import RESERVE
from zagora_jax.planning.memory import DeviceMemory
from zagora_jax.planning.shapes import Shapes, mesh_shape

# Weights are read a tensor at a time: as stored, as float32, and what is made of it.
TENSOR_COPIES = 3


@dataclass(frozen=True)
class HostNeeds:
    """Bytes of the host, and what is there; None where the plan is for another machine, or nobody said.

    Attributes:
        loading: memory of the process while it reads weights, streamed layers' pinned memory included.
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
    moments = sum(memory.optimizer for memory in stages) * shards
    state = adapters + moments + sum(memory.error_feedback for memory in stages) * devices
    kept = config.keep_checkpoints + 1
    return HostNeeds(
        loading=TENSOR_COPIES * 4 * largest + sum(memory.waiting for memory in stages) * devices,
        pinned=sum(memory.host for memory in stages) * devices,
        saving=state,
        checkpoints=kept * state + 2 * adapters,
        export=2 * elements,
        memory_there=host_memory,
        disk_free=shutil.disk_usage(_existing(config.output)).free if here else None,
    )


def _existing(path: Path) -> Path:
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
