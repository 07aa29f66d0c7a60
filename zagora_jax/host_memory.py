"""How much of the host's memory a run may pin for its GPUs.

XLA pins at most 64 GiB unless the environment says otherwise when its backend starts.
"""

import os
from pathlib import Path

import psutil

from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.reporting.sensors import GIB

LIMIT, DEFAULT_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64  # GiB, in spite of its name
# For the process beside what it pins (compiler, tensors that are read), and for the system.
RESERVE = 4 * GIB

_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def allow_pinned_memory(config: TrainConfig) -> None:
    """Let XLA pin what this host has, where the run keeps anything there; to be called before anything uses a device.

    A limit that the environment has already is left as it is.
    """
    offload = config.offload
    if LIMIT in os.environ or not (config.streamed_weights != "none" or offload.activations or offload.optimizer):
        return
    most = min([psutil.virtual_memory().total, *(limit for limit, _ in _cgroup_limits())]) - RESERVE
    if most > DEFAULT_LIMIT * GIB:
        os.environ[LIMIT] = str(most // GIB)


def require_pinned_memory(planned: int, platform: str) -> None:
    """Refuse a run whose GPUs need more pinned host memory than there is, before anything is read into it.

    Args:
        planned: bytes, for all devices together.
        platform: of the devices. A CPU's own memory has no limit of XLA's.

    Raises:
        UserError: XLA may not pin so much, or the host has not so much free.
    """
    if not planned:
        return
    what = f"the run keeps {planned / GIB:.1f} GiB in pinned host memory"
    limit = int(os.environ.get(LIMIT, DEFAULT_LIMIT))
    if platform != "cpu" and planned > limit * GIB:
        raise UserError(f"{what}, but XLA pins at most {limit} GiB: set {LIMIT} to more, {_less()}")
    if planned + RESERVE > (free := free_memory()):
        raise UserError(
            f"{what}, and {RESERVE / GIB:.0f} GiB should stay for the process and the system, but only "
            f"{free / GIB:.1f} GiB of the host's memory are free (by the system, or by this process's control group): "
            f"free some, {_less()}"
        )


def _less() -> str:
    return (
        "or keep less there: --offload.weights-from disk, a smaller --offload.weights, --offload.activations false, "
        "--offload.optimizer false"
    )


def room_to_pin(platform: str) -> int:
    """Return the bytes that may still be pinned for devices of a platform, the system's reserve left alone."""
    free = free_memory() - RESERVE
    return free if platform == "cpu" else min(free, int(os.environ.get(LIMIT, DEFAULT_LIMIT)) * GIB)


def free_memory() -> int:
    """Return the bytes that this process may still take: of the host, or of a control group that it is in."""
    return min([psutil.virtual_memory().available, *(limit - used for limit, used in _cgroup_limits())])


def _cgroup_limits() -> list[tuple[int, int]]:
    """Return the limits of the control groups that this process is in, each with what is in use of it, in bytes.

    What the kernel caches of files is not counted, since it gives that up. See the kernel's documentation, "Control
    Group v2" and "Memory Resource Controller" (v1).
    """
    found = []
    for line in _read(_OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = _CGROUPS / controllers
        names = (
            ("memory.max", "memory.current")
            if not controllers
            else (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        )
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            limit, used = (_read(folder / name).strip() for name in names)
            if limit.isdigit() and used.isdigit():
                found.append((int(limit), max(0, int(used) - _cached(folder))))
            if folder == root:
                break
    return found


def _cached(folder: Path) -> int:
    statistics = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines())
    return int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
