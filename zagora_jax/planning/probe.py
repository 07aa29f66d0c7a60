"""What this machine is: devices, free memory, measured links; and the report that a bug needs, without secrets."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import psutil
import pynvml
from jax.sharding import SingleDeviceSharding
from rich.console import Console

import zagora_jax
from sharding.targets import absent_devices
from zagora_jax.checkpoints.read_ahead import PIECE_BYTES, read_ahead
from zagora_jax.config import quantized_folder

GIB = 2**30
PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
    "flax", "optax", "orbax-checkpoint", "numpy", "ml_dtypes", "safetensors", "tokenizers", "transformers",
)  # fmt: skip
# Variables that change how JAX computes. No others are printed: they may hold tokens and passwords.
VARIABLES = re.compile(r"JAX_\w+|XLA_\w+|NCCL_\w+|CUDA_VISIBLE_DEVICES|TF_GPU_ALLOCATOR")
COPIED_BYTES = 256 * 2**20
COPIES = 4
# Bytes of layers' files to measure a disk by: fewer tell nothing, and more take long.
LEAST_READ, MOST_READ = 2**28, 2**32


def print_report(console: Console) -> None:
    """Print all that a bug report needs of this machine."""
    for name, value in report():
        console.print(f"{name + ':':28}{value}", markup=False, soft_wrap=True)


def report() -> Iterator[tuple[str, str]]:
    """Yield the facts by name; each that can fail says so in its own line."""
    yield "zagora-jax", zagora_jax.__version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for package in PACKAGES:
        if version := _version(package):
            yield package, version
    memory = psutil.virtual_memory()
    yield "cpu", f"{os.cpu_count()} cores, {platform.machine()}"
    yield "host memory", f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} available"
    yield "disk here", f"{shutil.disk_usage(Path.cwd()).free / GIB:.1f} GiB free"
    yield from _driver()
    for device in jax.devices():
        yield f"device {device.id}", f"{device.device_kind} ({device.platform}){_allocator(device)}"
    yield from _links(jax.devices())
    if (rate := disk_gb_s(quantized_folder("auto"))) is not None:
        yield "disk of quantized_cache", f"{rate:.2f} GB/s"
    yield "compiles for absent GPUs", _attempt(lambda: f"yes ({len(absent_devices('rtx4090', 1))} device)")
    for name in sorted(filter(VARIABLES.fullmatch, os.environ)):
        yield name, os.environ[name].replace(str(Path.home()), "~")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _attempt(say: Callable[[], str]) -> str:
    try:
        return say()
    except Exception as error:  # a report never breaks off: what fails is what it is about
        return f"no: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _allocator(device: jax.Device) -> str:
    statistics = device.memory_stats() or {}
    limit, used = statistics.get("bytes_limit"), statistics.get("bytes_in_use", 0)
    return "" if limit is None else f", XLA may take {limit / GIB:.2f} GiB and holds {used / GIB:.2f}"


def _driver() -> Iterator[tuple[str, str]]:
    """What NVIDIA's driver says of the cards."""
    try:
        pynvml.nvmlInit()
        yield "driver", pynvml.nvmlSystemGetDriverVersion()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            generation = pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)
            width = pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
            yield (
                f"gpu {index}",
                f"{pynvml.nvmlDeviceGetName(handle)}, {memory.free / GIB:.2f} of {memory.total / GIB:.2f} GiB free, "
                f"PCIe {generation} x{width}",
            )
    except pynvml.NVMLError as error:
        yield "driver", f"none ({error})"


def _links(devices: Sequence[jax.Device]) -> Iterator[tuple[str, str]]:
    if devices[0].platform == "cpu":
        return
    yield "host to device", _attempt(lambda: f"{host_gb_s(devices[0]):.1f} GB/s")
    if len(devices) > 1:
        yield "device to device", _attempt(lambda: f"{gpu_gb_s(devices):.1f} GB/s (0 to 1)")


def host_gb_s(device: jax.Device) -> float:
    """Measure copies from pinned host memory to a GPU, in GB/s."""
    there = SingleDeviceSharding(device, memory_kind="pinned_host")
    return _copy_rate(jax.device_put(jnp.zeros(COPIED_BYTES, jnp.uint8), there), SingleDeviceSharding(device))


def gpu_gb_s(devices: Sequence[jax.Device]) -> float:
    """Measure copies from the first GPU to the second, in GB/s."""
    here = jax.device_put(jnp.zeros(COPIED_BYTES, jnp.uint8), devices[0])
    return _copy_rate(here, SingleDeviceSharding(devices[1]))


def disk_gb_s(folder: Path | None) -> float | None:
    """Measure how fast layers come from the disk of a cache of quantised models; None where it holds too few of them.

    What is read leaves the kernel's cache of files before and after.
    """
    files: list[tuple[Path, int]] = []
    for path in sorted(folder.glob("*/*.safetensors")) if folder is not None else ():
        files.append((path, path.stat().st_size))
        if sum(size for _, size in files) > MOST_READ:
            break
    total = sum(size for _, size in files)
    if total < LEAST_READ:
        return None
    pieces = [(path, start) for path, size in files for start in range(0, size, PIECE_BYTES)]
    for path, size in files:
        _forget(path, 0, size)
    started = time.perf_counter()
    with read_ahead([partial(_read_piece, *piece) for piece in pieces]) as sizes:
        read = sum(sizes)
    return read / (time.perf_counter() - started) / 1e9


def _read_piece(path: Path, start: int) -> int:
    with path.open("rb", buffering=0) as file:
        count = len(os.pread(file.fileno(), PIECE_BYTES, start))
    _forget(path, start, count)
    return count


def _forget(path: Path, start: int, count: int) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), start, count, os.POSIX_FADV_DONTNEED)


def _copy_rate(array: jax.Array, to: jax.sharding.Sharding) -> float:
    jax.device_put(array, to).block_until_ready()
    started = time.perf_counter()
    for _ in range(COPIES):
        jax.device_put(array, to).block_until_ready()
    return COPIES * array.nbytes / (time.perf_counter() - started) / 1e9
