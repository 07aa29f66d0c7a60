"""A run's numbers over its steps, read from metrics.jsonl while it grows."""

import json
import math
import os
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

READ_AT_A_TIME = 1 << 24  # bytes
LARGEST = 1e200  # of numbers that anything is done with: their squares and sums are finite


@dataclass
class Series:
    """One number over the steps that have it; what was not finite is NaN."""

    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))

    def append(self, step: int, value: float) -> None:
        """Add a step's value."""
        self.steps.append(step)
        self.values.append(value)

    @property
    def last(self) -> float | None:
        """The newest value; None where there is none, or it was not finite."""
        return self.values[-1] if self.values and math.isfinite(self.values[-1]) else None

    def recent(self, count: int) -> list[float]:
        """Return the finite ones among the last `count` values."""
        return [value for value in self.values[-count:] if math.isfinite(value)]

    def buckets(self, most: int) -> list[tuple[float, float, float, float]]:
        """Return at most `most` of (step, mean, least, most): neighbours are put together, NaN left out."""
        steps, values = np.array(self.steps, np.float64), np.array(self.values, np.float64)
        finite = np.isfinite(values)
        steps, values = steps[finite], values[finite]
        parts = np.array_split(np.arange(len(steps)), min(most, len(steps))) if len(steps) else []
        return [
            (
                float(steps[part].mean()),
                float(values[part].mean()),
                float(values[part].min()),
                float(values[part].max()),
            )
            for part in parts
        ]


class History:
    """All numbers of a metrics.jsonl by name; those of a card are called as in `cards.0.celsius`.

    Sixteen bytes a number, so that a run of any length has room. What `refresh` finds is added; a file that was
    replaced, as a run does that goes on from an earlier step, is read anew.

    Attributes:
        step: the newest step; 0 where there is none.
        series: the numbers by name.
        throttled: steps by card and reason.
        skipped: steps without an update.
        put_off: saves that were put off.
        unreadable: lines that are no object with a step.
    """

    def __init__(self, path: Path):
        """Begin empty; `path` need not exist yet."""
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.step = self.skipped = self.put_off = self.unreadable = 0
        self.series: dict[str, Series] = {}
        self.throttled: Counter[tuple[int, str]] = Counter()
        self._offset, self._inode = 0, -1

    def __getitem__(self, name: str) -> Series:
        """Return a number's series; an empty one where no step has it."""
        return self.series.get(name, Series())

    def refresh(self) -> Self:
        """Read what was written since; a line that is still being written waits for its end."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._forget()
                    self._inode = status.st_ino
                file.seek(self._offset)
                while lines := file.readlines(READ_AT_A_TIME):
                    complete = [line for line in lines if line.endswith(b"\n")]
                    self._offset += sum(map(len, complete))
                    for line in complete:
                        self._add_line(line)
                    if len(complete) < len(lines):
                        break
        except OSError:  # not there yet, or not any more
            self._forget()
        return self

    def _add_line(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            entry = json.loads(line)
            step = entry["step"]
            if type(step) is not int or not 0 <= step < 2**63:
                raise TypeError("a step is a whole number")
        except (ValueError, TypeError, KeyError, RecursionError):
            self.unreadable += 1
            return
        self.add(entry, step)

    def add(self, entry: dict[str, Any], step: int) -> None:
        """Add what a step's line says."""
        self.step = step
        self.skipped += entry.get("finite") is False or entry.get("spike") is True
        self.put_off += entry.get("save_put_off") is True
        for name, value in numbers_of(entry).items():
            self.series.setdefault(name, Series()).append(step, value)
        for card in _cards_of(entry):
            reasons = card.get("throttled_by")
            for reason in reasons if isinstance(reasons, list) else ():
                self.throttled[card["card"], str(reason)] += 1

    @property
    def cards(self) -> list[int]:
        """The cards that some line tells of."""
        return sorted({int(name.split(".")[1]) for name in self.series if name.startswith("cards.")})


def numbers_of(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a step's metrics by name; what is not finite is NaN."""
    found = {name: value for name, value in entry.items() if name != "step"}
    for card in _cards_of(entry):
        found |= {f"cards.{card['card']}.{name}": value for name, value in card.items() if name != "card"}
    return {name: number for name, value in found.items() if (number := _number(value)) is not None}


def _cards_of(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    cards = entry.get("cards")
    found = cards if isinstance(cards, list) else []
    return [card for card in found if isinstance(card, dict) and isinstance(card.get("card"), int)]


def _number(value: Any) -> float | None:
    if value is None:  # as what is not finite is written
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    known = finite(value)
    return math.nan if known is None else known


def finite(value: Any) -> float | None:
    """Return a number that sums and charts have room for; None for anything else, whatever a damaged file says."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return None
    return float(value)
