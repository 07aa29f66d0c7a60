"""XLA's text form of a compiled program (HLO), parsed as far as memory and traffic need it."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from sharding.trip_counts import trip_count

PINNED_HOST_SPACE = 5  # xla::Layout::kHostMemorySpace

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*-> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_GROUPS = re.compile(
    r"replica_groups=(\{\{.*?\}\}|\{\}"  # {{0,1},{2,3}}
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"  # [2,2]<=[2,2]T(1,0)
    r"|mesh\[.*?\](?:, device_ids=\((?:[^()]|\([^()]*\))*\))? ?\{[^}]*\})"  # mesh['data'=2,'fsdp'=2] {'fsdp'}
)

_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")  # 'fsdp' or 'fsdp':(2)2

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Array:
    """The type of one array: what a device holds of it."""

    dtype: str  # XLA's name: bf16, f32, u8, pred
    shape: tuple[int, ...]
    host: bool = False  # in pinned host memory

    @property
    def bytes(self) -> int:
        """Size without the padding of its layout; a token has none."""
        bits = 8 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or ["0"])[0])
        return math.ceil(math.prod(self.shape) * bits / 8)


@dataclass(frozen=True)
class Instruction:
    """One instruction; a result that is a tuple is flattened to its arrays.

    Attributes:
        literal: what stands in the place of operands: a constant's value, a parameter's position.
        is_root: whether its computation returns it.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str
    is_root: bool

    def attribute(self, key: str) -> str | None:
        """Return the value of `key=value`, where the value is a name or a number."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None

    @property
    def computations(self) -> tuple[str, ...]:
        """The computations that it runs as such: loop bodies, branches, calls, fusions; not reducers on scalars."""
        if self.opcode.endswith(("-update", "-done")):
            return ()  # They may repeat what their start runs.
        if self.opcode == "while":
            keys = ["condition", "body"]
        elif self.opcode == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
            if branches:
                return tuple(name.strip().lstrip("%") for name in branches[1].split(","))
            keys = ["true_computation", "false_computation"]
        else:
            keys = ["calls", *(["to_apply"] if self.opcode == "call" else [])]
        return tuple(name for key in keys if (name := self.attribute(key)))

    @property
    def trip_count(self) -> int | None:
        """How often the body of a `while` runs, where the compiler has noted it; see `sharding.trip_counts`."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    @property
    def counter(self) -> int | None:
        """Which part of a `while` loop's state counts its trips, where the compiler has noted it."""
        found = re.search(r'"known_induction_variable":\{"tuple_index":"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    @property
    def synchronous_start(self) -> bool:
        """Whether a start is written apart from its done, yet is waited for at once, as GPU programs mark it."""
        return '"is_sync":true' in self.attributes


@dataclass(frozen=True)
class Visit:
    """An instruction as the program reaches it from its entry.

    Attributes:
        computation: the name of the computation that holds it.
        trips: how often it runs: the product of the trip counts of the loops around it; None where one is unknown.
        fused: inside a fusion, where arrays are not stored.
        start: the asynchronous start that wraps its computation, as a visit.
    """

    instruction: Instruction
    computation: str
    trips: int | None
    fused: bool
    start: "Visit | None"


@dataclass(frozen=True)
class Module:
    """A compiled program: the instructions of each computation, in the order in which they are scheduled."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str
    devices: int

    def walk(self) -> Iterator[Visit]:
        """Visit every instruction once for each place from which the program reaches it."""
        yield from self._walk(self.entry, 1, False, None)

    def _walk(self, computation: str, trips: int | None, fused: bool, start: Visit | None) -> Iterator[Visit]:
        for instruction in self.computations[computation]:
            visit = Visit(instruction, computation, trips, fused, start)
            yield visit
            if instruction.opcode == "while":
                known = trip_count(self, computation, instruction)
                inner = None if trips is None or known is None else trips * known
            else:
                inner = trips
            starts = instruction.opcode.endswith("-start")
            for called in instruction.computations:
                inside = fused or instruction.opcode.startswith("fusion") or starts
                yield from self._walk(called, inner, inside, visit if starts else start)

    @cached_property
    def by_name(self) -> dict[tuple[str, str], Instruction]:
        """Instructions by computation and name."""
        return {(c, i.name): i for c, instructions in self.computations.items() for i in instructions}

    def root(self, computation: str) -> Instruction:
        """Return the instruction whose result a computation returns."""
        return next(instruction for instruction in self.computations[computation] if instruction.is_root)


def parse(text: str) -> Module:
    """Parse what `jax.stages.Compiled.as_text()` returns.

    Raises:
        ValueError: text that is not a compiled program's.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            current = computations.setdefault(found[2], [])
            entry = found[2] if found[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current.append(_instruction(found[2], found[3], bool(found[1])))
    if not entry:
        raise ValueError("expected the text of a compiled program with an ENTRY computation, found none")
    header = text.split("\n", 1)[0]
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    return Module({name: tuple(body) for name, body in computations.items()}, entry, math.prod(map(int, counts)))


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    """Parse `SHAPE opcode(operands), attributes`."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    close = _closing("(" + rest, 0) - 1
    operands, attributes = rest[: close - 1], rest[close:]
    arrays = tuple(
        Array(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n), f"S({PINNED_HOST_SPACE})" in layout)
        for dtype, dims, layout in _ARRAY.findall(shape)
    )
    names = tuple(re.findall(r"%([\w.\-]+)", operands))
    return Instruction(name, opcode, arrays, names, "" if names else operands, attributes, is_root)


def _closing(text: str, start: int) -> int:
    """Return the index after the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


def replica_groups(attributes: str, devices: int) -> Groups:
    """Return the groups of devices that a collective runs in, by position in the mesh.

    Raises:
        ValueError: a notation that is not known.
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?\})\}", attributes):
        return _connected([tuple(map(int, pair.split(","))) for pair in re.findall(r"\{([\d,]+)\}", pairs[1])])
    found = _GROUPS.search(attributes)
    if not found:
        raise ValueError(f"expected the replica groups of a collective, found {attributes[:200]!r}")
    text = found[1]
    if text == "{}":
        return (tuple(range(devices)),)
    if text.startswith("{"):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text))
    ids = _mesh_groups(text) if text.startswith("mesh") else _iota(text)
    return tuple(tuple(map(int, group)) for group in ids)


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(text: str) -> np.ndarray:
    """Evaluate `[2,2]<=[2,2]T(1,0)`: count, reshape to the right side, transpose, reshape to the left side."""
    left, right = text.split("<=")
    sizes, _, permutation = right.partition("T")
    ids = np.arange(math.prod(_integers(sizes))).reshape(_integers(sizes))
    return (ids.transpose(_integers(permutation)) if permutation else ids).reshape(_integers(left))


def _mesh_groups(text: str) -> np.ndarray:
    """Evaluate `mesh['data'=2,'fsdp'=4] {'data','fsdp':(2)2}`: one group for each place on the axes not named.

    `'fsdp':(2)2` is a part of an axis: the 2 after the first factor 2.
    """
    mesh, order, named = re.fullmatch(r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? ?\{(.*)\}", text).groups()  # type: ignore[union-attr]
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", mesh)}
    if not order:
        ids = np.arange(math.prod(sizes.values()))
    else:
        ids = _iota(order).ravel() if "<=" in order else np.array(_integers(order))
    dimensions: list[tuple[str, int, int]] = []  # axis, size of the parts before, size
    parts = [(n, int(pre or 1), int(size or sizes[n])) for n, pre, size in _AXIS.findall(named)]
    for axis, size in sizes.items():
        cuts = sorted({1, size} | {p for n, pre, s in parts if n == axis for p in (pre, pre * s)})
        dimensions += [(axis, before, after // before) for before, after in pairwise(cuts)]
    inside = [
        index
        for index, (axis, before, size) in enumerate(dimensions)
        if any(n == axis and pre <= before and before * size <= pre * s for n, pre, s in parts)
    ]
    outside = [index for index in range(len(dimensions)) if index not in inside]
    ids = ids.reshape([size for _, _, size in dimensions])
    group_size = math.prod(dimensions[index][2] for index in inside)
    return ids.transpose(outside + inside).reshape(-1, group_size)


def _connected(pairs: list[tuple[int, ...]]) -> Groups:
    """Join pairs that share a device."""
    groups: list[set[int]] = []
    for pair in pairs:
        joined = set(pair).union(*(group for group in groups if group & set(pair)))
        groups = [group for group in groups if not group & joined] + [joined]
    return tuple(tuple(sorted(group)) for group in sorted(groups, key=min))
