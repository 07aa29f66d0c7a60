"""A row of a data file before it is interpreted, and where it stands."""

from collections.abc import Iterable
from typing import Any, NamedTuple


class Location(NamedTuple):
    """Where a row stands. `number` counts from 1, in lines (JSON Lines) or in rows (JSON, Parquet, Arrow)."""

    file: str
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


class SourceRow(NamedTuple):
    """One object of a data file, not yet interpreted."""

    value: dict[str, Any]
    location: Location


def describe(value: Any) -> str:
    """What a value is, in JSON's words, for an error message."""
    names: Iterable[tuple[type, str]] = ((dict, "an object"), (list, "a list"), (str, "a string"), (bool, "a boolean"))
    if value is None:
        return "null"
    for kind, name in names:
        if isinstance(value, kind):
            return name
    if isinstance(value, int | float):
        return f"the number {str(value)[:40]}"
    return f"a value of type {type(value).__name__}"
