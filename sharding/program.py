"""What a compiled program does: which arrays travel between devices, which it holds, and how much memory it needs.

Read from the program that XLA made, so that a plan or a contract speaks of what runs and not of what was meant.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import jax
import numpy as np

from sharding.hlo import Array, Groups, Instruction, Module, Visit, parse, replica_groups

# Of the bytes of the whole array, the share that a device sends in a ring of n devices.
_RING = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: float(n > 1),
}

# What moves data between devices in ways that are not counted here.
_UNCOUNTED = ("collective-broadcast", "ragged-all-to-all", "send")

# Instructions that do nothing when they run.
_BOOKKEEPING = frozenset(["parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all"])

# Instructions that run others, which store what these return.
_CALLERS = frozenset(("while", "conditional", "call"))


@dataclass(frozen=True)
class Collective:
    """One array that an instruction exchanges between devices; several for an instruction that combines several.

    Attributes:
        kind: all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute.
        dtype: XLA's name of the element type as it travels.
        shape: the whole array of one group: what an all-gather returns, else what a device gives.
        groups: the devices, by position in the mesh, that exchange with each other.
        axes: the mesh axes along which they differ; None where no mesh was given.
        loop_trips: how often it runs in a call of the program; None inside a loop whose count is not known.
        asynchronous: whether it starts in one place of the schedule and is waited for in another.
        overlapped: the work that is scheduled between the two: neither other exchanges nor mere bookkeeping.
        name: of the instruction.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    groups: Groups
    axes: tuple[str, ...] | None
    loop_trips: int | None
    asynchronous: bool
    overlapped: tuple[Instruction, ...] = field(repr=False)
    name: str

    @property
    def group_size(self) -> int:
        """How many devices exchange with each other."""
        return max(map(len, self.groups))

    @property
    def bytes(self) -> int:
        """Size of the whole array."""
        return Array(self.dtype, self.shape).bytes

    @property
    def ring_bytes(self) -> float:
        """Bytes that a device sends each time it runs."""
        return self.bytes * _RING[self.kind](self.group_size)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in one call of the program.

        Raises:
            ValueError: it runs in a loop whose trip count the compiler does not know.
        """
        if self.loop_trips is None:
            raise ValueError(f"{self.kind} {self.name} runs in a loop whose trip count is not known")
        return self.ring_bytes * self.loop_trips


def collectives(compiled: jax.stages.Compiled, mesh: Mapping[str, int] | None = None) -> list[Collective]:
    """List what travels between devices, in the order of the schedule.

    Args:
        compiled: the program. A CPU's program widens bfloat16 and splits an all-to-all into pieces; its dtypes and
            shapes are not a GPU's.
        mesh: sizes of the mesh's axes in its order (`mesh.shape`), to name the axes of each.

    Raises:
        ValueError: an instruction that moves data between devices in a way that is not known here.
    """
    module = _module(compiled)
    found = []
    for visit in module.walk():
        kind = visit.instruction.opcode.removesuffix("-start")
        if kind in _RING:
            found += _exchanged(module, visit, kind, mesh)
        elif kind in _UNCOUNTED and "is_host_transfer=true" not in visit.instruction.attributes:
            raise ValueError(f"{visit.instruction.name} is a {kind}, whose traffic is not counted")
    return found


def _module(compiled: jax.stages.Compiled) -> Module:
    text = compiled.as_text()
    if text is None:
        raise ValueError("the backend does not print a compiled program")
    return parse(text)


def _exchanged(module: Module, visit: Visit, kind: str, mesh: Mapping[str, int] | None) -> list[Collective]:
    """Split a collective instruction into the arrays that it exchanges."""
    instruction = visit.instruction
    groups = replica_groups(instruction.attributes, module.devices)
    size = max(map(len, groups))
    start = visit if instruction.opcode.endswith("-start") else visit.start
    if start is not None and (start.instruction.synchronous_start or instruction.synchronous_start):
        start = None
    overlapped = _between(module, start) if start is not None else ()
    axes = mesh_axes(groups, mesh) if mesh is not None else None
    gathered = int(re.findall(r"dimensions=\{(\d+)\}", instruction.attributes)[0]) if kind == "all-gather" else None
    return [
        Collective(
            kind=kind,
            dtype=array.dtype,
            shape=tuple(n * size if axis == gathered else n for axis, n in enumerate(array.shape)),
            groups=groups,
            axes=axes,
            loop_trips=visit.trips,
            asynchronous=start is not None,
            overlapped=overlapped,
            name=instruction.name,
        )
        for operand in instruction.operands
        for array in module.by_name[visit.computation, operand].arrays
    ]


def _between(module: Module, start: Visit) -> tuple[Instruction, ...]:
    """Return the work that is scheduled between an asynchronous start and its done."""
    instructions = module.computations[start.computation]
    handles = {start.instruction.name}
    between: list[Instruction] = []
    for instruction in instructions[instructions.index(start.instruction) + 1 :]:
        if instruction.opcode.endswith(("-update", "-done")) and handles & set(instruction.operands):
            if instruction.opcode.endswith("-done"):
                return tuple(between)
            handles.add(instruction.name)
        elif instruction.opcode.endswith("-done") or instruction.opcode.removesuffix("-start") in _RING:
            continue
        elif instruction.opcode not in _BOOKKEEPING:
            between.append(instruction)
    raise ValueError(f"expected a done for {start.instruction.name} in {start.computation}, found none")


def mesh_axes(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Name the mesh axes along which the devices of a group differ.

    Args:
        groups: devices by position in the mesh.
        mesh: sizes of its axes, in order.
    """
    differing: set[int] = set()
    for group in groups:
        coordinates = np.unravel_index(group, tuple(mesh.values()))  # one array an axis
        differing |= {index for index, along in enumerate(coordinates) if len(set(along.tolist())) > 1}
    return tuple(axis for index, axis in enumerate(mesh) if index in differing)


def traffic(exchanged: Iterable[Collective]) -> dict[tuple[str, str], float]:
    """Sum the bytes that a device sends in one call, by kind and by mesh axes ("data+fsdp")."""
    sums: Counter[tuple[str, str]] = Counter()
    for collective in exchanged:
        if collective.group_size > 1:
            sums[collective.kind, "+".join(collective.axes or ())] += collective.wire_bytes  # type: ignore[assignment]
    return dict(sums)


@dataclass(frozen=True)
class Buffer:
    """An array that the program stores.

    Attributes:
        dtype: XLA's name of the element type.
        shape: what one device holds.
        host: whether in pinned host memory.
        loop_trips: how often it is written; None inside a loop whose count is not known.
        opcode: what writes it; `parameter` is an argument of the program.
        name: of the instruction that writes it.
    """

    dtype: str
    shape: tuple[int, ...]
    host: bool
    loop_trips: int | None
    opcode: str
    name: str

    @property
    def bytes(self) -> int:
        """Size, without the padding of its layout."""
        return Array(self.dtype, self.shape).bytes


def buffers(compiled: jax.stages.Compiled) -> list[Buffer]:
    """List the arrays that the program stores, largest first; those inside fusions never reach memory.

    Several may share memory, one after the other or in place: `memory` tells how much they need together.
    """
    module = _module(compiled)
    found = []
    for visit in module.walk():
        opcode = visit.instruction.opcode
        argument = opcode == "parameter" and visit.computation == module.entry
        # The result of an asynchronous operation is counted at its done; its start repeats the operands.
        if visit.fused or opcode in _CALLERS or opcode.endswith(("-start", "-update")):
            continue
        if opcode not in _BOOKKEEPING or argument:
            arrays = visit.instruction.arrays
            found += [Buffer(a.dtype, a.shape, a.host, visit.trips, opcode, visit.instruction.name) for a in arrays]
    return sorted(found, key=lambda buffer: -buffer.bytes)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a compiled program needs on each device, and in host memory for each device.

    `outputs` counts those that take the place of donated arguments too; `aliased` is their size.
    """

    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    host_arguments: int
    host_temporaries: int
    host_outputs: int
    host_aliased: int

    @property
    def peak(self) -> int:
        """Device memory: arguments, temporaries, and the outputs that replace no donated argument.

        Not among them: the CUDA context, the libraries' own workspaces and the allocator's fragments.
        """
        return self.arguments + self.temporaries + self.outputs - self.aliased

    @property
    def host_peak(self) -> int:
        """Pinned host memory of one device."""
        return self.host_arguments + self.host_temporaries + self.host_outputs - self.host_aliased


def memory(compiled: jax.stages.Compiled) -> MemoryPlan:
    """Read what XLA's buffer assignment settled; `peak_memory_in_bytes` is no use, since it adds host and device.

    Raises:
        ValueError: a backend that tells nothing about memory.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("the backend tells nothing about the memory of a compiled program")
    names = {"arguments": "argument", "temporaries": "temp", "outputs": "output", "aliased": "alias"}
    return MemoryPlan(
        **{name: getattr(stats, f"{part}_size_in_bytes") for name, part in names.items()},
        **{f"host_{name}": getattr(stats, f"host_{part}_size_in_bytes") for name, part in names.items()},
    )
