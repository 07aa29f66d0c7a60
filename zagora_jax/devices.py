"""The mesh that a run's options ask for."""

import math
import os
from collections.abc import Mapping, Sequence

import jax
import pynvml
from jax.sharding import Mesh

from sharding.mesh import AXES, make_mesh
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.reporting.sensors import GIB

# The share of a card's memory that XLA's allocator may take: an older name and a newer one, which jaxlib takes alone.
_FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
_set_here: str | None = None  # by `limit_memory`, and so not by the user


def limit_memory(gib: float) -> None:
    """Cap what XLA's allocator takes of each GPU; to be called before anything else uses a device.

    Raises:
        UserError: there is no GPU, its memory is in use by this process already, so that the cap came too late, or the
            environment says another share of it.
    """
    global _set_here
    if given := next((name for name in _FRACTIONS if os.environ.get(name) not in (None, "", _set_here)), None):
        raise UserError(
            f"--device-memory-limit {gib:g}: the environment has {given}={os.environ[given]}, which says it too; unset "
            "that, or leave the option out"
        )
    try:
        pynvml.nvmlInit()
        totals = [
            pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).total
            for index in range(pynvml.nvmlDeviceGetCount())
        ]
    except pynvml.NVMLError as error:
        raise UserError(f"--device-memory-limit {gib:g}: needs an NVIDIA GPU, and none was found ({error})") from error
    fraction = gib * GIB / max(totals)
    if fraction < 1:
        _set_here = os.environ[_FRACTIONS[0]] = f"{fraction:.6f}"
    for device in jax.local_devices():
        limit = memory_limit(device)
        if limit is None or limit > gib * GIB * 1.01:
            found = "an allocator without limits" if limit is None else f"a limit of {limit / GIB:.1f} GiB"
            raise UserError(
                f"--device-memory-limit {gib:g}: could not be set, found {found} of {device.device_kind} "
                f"{device.id}. In a program, nothing may use JAX before train() is called; elsewhere, set "
                f"{_FRACTIONS[0]} (and no XLA_PYTHON_CLIENT_ALLOCATOR)"
            )


TAKES_LESS = (
    "What takes less, from cheap to dear: --optimizer adamw_8bit, a smaller --micro-batch-size, --offload.activations "
    "true, --remat nested, --offload.weights auto, a shorter --sequence-length, a lower --lora.rank"
)


def memory_limit(device: jax.Device) -> int | None:
    """Return the bytes that XLA's allocator may take of a device; a CPU's memory has no limit of XLA's."""
    if device.id in _limits_elsewhere and device.process_index != jax.process_index():
        return _limits_elsewhere[device.id]
    return (device.memory_stats() or {}).get("bytes_limit")


_limits_elsewhere: dict[int, int | None] = {}


def know_limits(limits: Mapping[int, int | None]) -> None:
    """Take note of the limits of other processes' devices, which these alone can read, by the devices' numbers."""
    _limits_elsewhere.update(limits)


def lacking_memory(planned: Mapping[jax.Device, int], what: str = "the step") -> str | None:
    """Say which device has less memory than the bytes `planned` for `what`; None where there is none."""
    for device, needed in planned.items():
        limit = memory_limit(device)
        if limit is not None and needed > limit:
            return (
                f"{what} needs {needed / GIB:.2f} GiB of {device.device_kind} {device.id}, which has "
                f"{limit / GIB:.2f} GiB for it"
            )
    return None


def choose_mesh(config: TrainConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lay devices out as `mesh` says; the axis that `strategy` names takes all others, unless `mesh` gives its size.

    Raises:
        UserError: more devices are asked for than there are, or they cannot be shared out evenly.
    """
    devices = _chosen(config.devices) if devices is None else devices
    names = ", ".join(f"{device.platform}:{device.id}" for device in devices)
    sizes = mesh_sizes(config, len(devices), names)
    return make_mesh(sizes, devices[: math.prod(sizes.values())])


def _chosen(numbers: Sequence[int] | None) -> list[jax.Device]:
    there = {device.id: device for device in jax.devices()}
    if missing := [number for number in numbers or () if number not in there]:
        names = ", ".join(f"{number} ({device.device_kind})" for number, device in there.items())
        raise UserError(f"--devices {','.join(map(str, numbers or ()))}: there is no {missing[0]}; there are {names}")
    return list(there.values()) if numbers is None else [there[number] for number in numbers]


# The mesh axis that takes the devices which `mesh` leaves open, by strategy; fsdp for the others.
_FILLED_AXIS = {"replicas": "data", "streaming": "data", "tensor": "tensor", "layerwise": "stage"}


def mesh_sizes(config: TrainConfig, count: int, names: str) -> dict[str, int]:
    """Return the sizes of the mesh's axes on `count` devices, which are called `names` in errors.

    Raises:
        UserError: more devices are asked for than there are, or they cannot be shared out evenly.
    """
    sizes = {axis: size for axis in AXES if (size := getattr(config.mesh, axis, None)) is not None}
    asked = " ".join(f"--mesh.{axis} {size}" for axis, size in sizes.items())
    product = math.prod(sizes.values())
    if product > count:
        raise UserError(f"{asked}: needs {product} devices, but there are {count}: {names}")
    filled = _FILLED_AXIS.get(config.strategy, "fsdp")
    if sizes.get("stage", 1) > 1 and filled != "stage":
        raise UserError(f"--mesh.stage {sizes['stage']}: stages are for --strategy layerwise")
    if filled not in sizes:
        if count % product:
            raise UserError(
                f"{asked}: {count} devices cannot be shared out evenly over {filled}; give --mesh.{filled} too"
            )
        sizes[filled] = count // product
    return sizes


def installed_gpus() -> list[int]:
    """Return the bytes of memory of each NVIDIA GPU that is visible here, without using any."""
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        totals = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
    except pynvml.NVMLError:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return totals if visible is None else totals[: len([name for name in visible.split(",") if name.strip()])]
