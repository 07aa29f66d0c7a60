"""The machine that a plan is for: this one, or one that is described by its cards' names."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import psutil

from sharding.targets import GPUS, Gpu, absent_devices
from sharding.targets import gpu as find_gpu
from zagora_jax.commands import ConfigureConfig
from zagora_jax.config import quantized_folder
from zagora_jax.devices import installed_gpus
from zagora_jax.errors import UserError
from zagora_jax.planning.links import Link, find_link, with_measured
from zagora_jax.planning.probe import disk_gb_s, gpu_gb_s, host_gb_s
from zagora_jax.reporting.sensors import GIB

# What a process takes of a GPU beside its arrays: the CUDA context with cuBLAS's and cuDNN's kernels and workspaces;
# NCCL's buffers where several GPUs exchange. Not measured on every card: they are on the safe side of public reports.
CONTEXT = round(0.6 * GIB)
NCCL = round(0.4 * GIB)
# Of the whole card, for the allocator's fragments and what a desktop shows.
MARGIN = 0.02

# Sizes that cards are sold with, in the GB of their boxes.
SOLD_GB = (6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141)


@dataclass(frozen=True)
class Budget:
    """Bytes of one device: what it has, and what is left of it for arrays."""

    total: int
    context: int
    margin: int

    @property
    def limit(self) -> int:
        """Bytes that arrays may take."""
        return self.total - self.context - self.margin


@dataclass(frozen=True)
class Machine:
    """The devices of a plan and what they stand in.

    Attributes:
        name: of a device.
        count: of devices, all of one kind.
        memory: bytes of a device, as its driver reports them.
        gpu: the vendor's figures; None of a CPU, and of a GPU that `sharding.targets` does not know.
        link: to each other and to the host; None without figures.
        host_memory: bytes of the host; None where nobody said.
        present: the devices, where they are in this machine.
        notes: what was assumed.
    """

    name: str
    count: int
    memory: int
    gpu: Gpu | None
    link: Link | None
    host_memory: int | None
    present: tuple[jax.Device, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_gpu(self) -> bool:
        """Whether the devices are GPUs."""
        return not self.present or self.present[0].platform != "cpu"

    @property
    def budget(self) -> Budget:
        """What a device has room for. Devices of a CPU share the host's memory."""
        if not self.is_gpu:
            return Budget(self.memory // self.count, 0, round(0.1 * self.memory / self.count))
        return gpu_budget(self.memory, self.count)

    def devices(self) -> Sequence[jax.Device]:
        """Return devices to compile for.

        Raises:
            ModuleNotFoundError: they are not here, and neither is the compiler for absent ones.
        """
        if self.present:
            return self.present[: self.count]
        assert self.gpu is not None  # an absent GPU is known by its figures
        return absent_devices(self.gpu.kind, self.count)

    def with_count(self, count: int) -> "Machine":
        """Return one with another number of the same cards."""
        return replace(self, count=count, present=())

    def with_gpu(self, gpu: Gpu) -> "Machine":
        """Return one with as many cards of another kind."""
        return replace(self, gpu=gpu, name=gpu.name, memory=gpu.memory_bytes, present=())

    def with_host_memory(self, size: int) -> "Machine":
        """Return one whose host has that many bytes."""
        return replace(self, host_memory=size)


def budget_here(count: int) -> Budget:
    """Return what each of `count` GPUs of this machine has room for."""
    return gpu_budget(min(installed_gpus()), count)


def gpu_budget(memory: int, count: int) -> Budget:
    """Part the memory of one of `count` GPUs."""
    return Budget(memory, CONTEXT + (NCCL if count > 1 else 0), round(MARGIN * memory))


def find_machine(config: ConfigureConfig) -> Machine:
    """Return the machine that the options describe: this one, where they name no GPU.

    Raises:
        UserError: an unknown GPU or link, more memory than the card has, or no GPU to find here.
    """
    machine = _described(config)
    if config.links is None:
        return machine
    if machine.link is None:
        raise UserError(f"--links {config.links}: of {machine.name} no time is planned; name the cards with --gpu")
    return replace(machine, link=with_measured(machine.link, config.links))


def _described(config: ConfigureConfig) -> Machine:
    if config.gpu is None and config.memory_per_gpu is None:
        return _with_disk(_this_machine(config), config.disk_gb_s or disk_gb_s(quantized_folder("auto")))
    gpu, notes = _described_gpu(config)
    memory = gpu.memory_bytes
    if config.memory_per_gpu is not None:
        memory = _given_memory(config.memory_per_gpu, gpu, config.gpu_count or 1)
    link = find_link(config.interconnect or "pcie", gpu, config.peer_to_peer)
    host = None if config.host_memory is None else round(config.host_memory * GIB)
    return _with_disk(Machine(gpu.name, config.gpu_count or 1, memory, gpu, link, host, notes=notes), config.disk_gb_s)


def _with_disk(machine: Machine, gb_s: float | None) -> Machine:
    """Return the machine with a disk of this rate, where it is known."""
    if machine.link is None or gb_s is None:
        return machine
    return replace(machine, link=replace(machine.link, disk_gb_s=gb_s))


def _described_gpu(config: ConfigureConfig) -> tuple[Gpu, tuple[str, ...]]:
    if config.gpu is not None:
        try:
            return find_gpu(config.gpu), ()
        except ValueError as error:
            raise UserError(f"--gpu {config.gpu}: {error}") from error
    assert config.memory_per_gpu is not None
    sized = [gpu for gpu in GPUS.values() if _sold_gb(gpu) == round(config.memory_per_gpu)]
    if not sized:
        sizes = sorted({_sold_gb(gpu) for gpu in GPUS.values()})
        raise UserError(
            f"--memory-per-gpu {config.memory_per_gpu:g}: no known card is sold with that; "
            f"sizes: {', '.join(map(str, sizes))}. Or name the card with --gpu"
        )
    slowest = min(sized, key=lambda gpu: gpu.bf16_tflop_s)
    others = ", ".join(gpu.kind for gpu in sized if gpu is not slowest) or "no other"
    return slowest, (f"no --gpu was given: planned for {slowest.kind}, the slowest card of this size (also {others})",)


def _sold_gb(gpu: Gpu) -> int:
    """The GB on the box: CUDA reports a little less."""
    return next(size for size in SOLD_GB if size * 1024 >= gpu.memory_mib)


def _given_memory(gib: float, gpu: Gpu, count: int) -> int:
    sold = _sold_gb(gpu)
    if gib > sold:
        raise UserError(
            f"--memory-per-gpu {gib:g}: {gpu.name} is sold with {sold} GB, of which CUDA reports "
            f"{gpu.memory_mib / 1024:.2f} GiB; give less to leave room, or leave it out"
        )
    # "24" means the whole card of 24 GB, though it reports less; a smaller number is a bound.
    memory = min(round(gib * GIB), gpu.memory_bytes)
    budget = gpu_budget(memory, count)
    if budget.limit <= 0:
        takers = "CUDA context and NCCL's buffers alone take" if count > 1 else "the CUDA context alone takes"
        raise UserError(f"--memory-per-gpu {gib:g}: {takers} {budget.context / GIB:.1f} GiB of a card; give more")
    return memory


def _this_machine(config: ConfigureConfig) -> Machine:
    found = tuple(jax.devices())
    count = config.gpu_count or len(found)
    if count > len(found):
        raise UserError(
            f"--gpu-count {count}: this machine has {len(found)} x {found[0].device_kind}; for cards that are not "
            "here, name them with --gpu"
        )
    host = psutil.virtual_memory().total if config.host_memory is None else round(config.host_memory * GIB)
    if found[0].platform == "cpu":
        if config.interconnect is not None or config.peer_to_peer is not None:
            raise UserError("--interconnect: no GPU was found in this machine; name the cards with --gpu")
        note = "no GPU was found here: planned for this machine's CPU; for other cards, name them with --gpu"
        return Machine("CPU", count, host, None, None, host, found[:count], (note,))
    return _with_figures(config, found[:count], host)


def _with_figures(config: ConfigureConfig, devices: tuple[jax.Device, ...], host: int) -> Machine:
    """Describe GPUs that are here by what their driver says and, where they are known, the vendor's figures."""
    kind = devices[0].device_kind
    memory = min(installed_gpus())
    try:
        gpu: Gpu | None = find_gpu(kind)
    except ValueError:
        gpu = None
    notes: tuple[str, ...] = ()
    link = None
    if gpu is None:
        notes = (f"{kind} is not in sharding/targets/gpus.py: memory is planned, but not time",)
    else:
        link = _link_here(config, gpu, devices)
    return Machine(kind, len(devices), memory, gpu, link, host, devices, notes)


def _link_here(config: ConfigureConfig, gpu: Gpu, devices: tuple[jax.Device, ...]) -> Link:
    """Measure what joins the cards here, unless it was named."""
    named = find_link(config.interconnect or "pcie", gpu, config.peer_to_peer)
    if config.interconnect is not None or config.peer_to_peer is not None:
        return named
    between = gpu_gb_s(devices) if len(devices) > 1 else named.gpu_gb_s
    return Link("measured", between, host_gb_s(devices[0]), measured=True)
