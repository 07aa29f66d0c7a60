"""Which arrays travel between devices, read from a compiled program's text."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_ITEM_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32}
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_COLLECTIVE = re.compile(rf"= (.+?) ({'|'.join(_KINDS)})(-start)?\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_CALLEE = re.compile(r"(?:body|condition|calls|to_apply|branch_computations)=\{?([%\w.\-, ]+)")


class Collective(NamedTuple):
    """One collective operation.

    Attributes:
        kind: e.g. "all-gather".
        arrays: dtype and shape of its results on one device, e.g. ("u8", (4, 260)).
        in_loop: whether it stands in the body of a loop.
    """

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    in_loop: bool

    def wire_bytes(self, devices: int) -> int:
        """What a device sends when the operation runs over `devices` of them in a ring."""
        result = sum(math.prod(shape) * _ITEM_BITS[dtype] // 8 for dtype, shape in self.arrays)
        if self.kind == "all-reduce":
            return -(-2 * (devices - 1) * result // devices)
        if self.kind == "reduce-scatter":
            return (devices - 1) * result
        if self.kind in ("all-gather", "all-to-all"):
            return (devices - 1) * result // devices
        return result


def collectives(program: str) -> list[Collective]:
    """List the collectives in a program's text, `jax.jit(f).lower(...).compile().as_text()`."""
    computations: dict[str, list[str]] = {}
    for line in program.splitlines():
        if (header := _COMPUTATION.match(line)) and " = " not in line.split("(")[0]:
            lines = computations.setdefault(header.group(1), [])
        elif computations:
            lines.append(line)
    looped = _reached_from_loops(computations)
    found = []
    for name, lines in computations.items():
        for line in lines:
            if match := _COLLECTIVE.search(line):
                types, kind, start = match.groups()
                arrays = [(t, tuple(map(int, dims.split(","))) if dims else ()) for t, dims in _arrays(types)]
                if start and kind != "all-reduce":  # The type of an asynchronous start is (operands, results).
                    arrays = arrays[len(arrays) // 2 :]
                found.append(Collective(kind, tuple(arrays), name in looped))
    return found


def _arrays(types: str) -> list[tuple[str, str]]:
    return re.findall(rf"\b({'|'.join(_ITEM_BITS)})\[([\d,]*)\]", types)


def _reached_from_loops(computations: dict[str, list[str]]) -> set[str]:
    callees = {
        name: {callee.strip(" %") for line in lines for group in _CALLEE.findall(line) for callee in group.split(",")}
        for name, lines in computations.items()
    }
    bodies = re.findall(r"\bbody=%?([\w.\-]+)", "\n".join(line for lines in computations.values() for line in lines))
    reached, waiting = set(), list(bodies)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting.extend(callees.get(name, ()))
    return reached
