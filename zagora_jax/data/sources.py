"""A row of a data file before it is interpreted, and where it stands."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from zagora_jax.errors import UserError


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


def require_plain(value: Any, location: Location, field: str) -> None:
    """Refuses what JSON does not have: numbers that are not finite, and half of a surrogate pair.

    Raises:
        UserError: names the field within `field`.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(value[error.start]):04x}"
            raise UserError(
                f"{location}, field {field or 'name'}: expected Unicode text, found {half}, half of a surrogate pair, "
                f"at character {error.start + 1}"
            ) from error
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{location}, field {field}: expected text, found {describe(value)}, which JSON does not have")
    elif isinstance(value, dict):
        for key, item in value.items():
            require_plain(key, location, "")
            require_plain(item, location, f"{field}.{key}" if field else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            require_plain(item, location, f"{field}[{index}]")
