"""A run's steps in a notebook: a table of them, and curves of their numbers."""

import html
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zagora_jax.checkpoints.atomic import write_bytes
from zagora_jax.errors import UserError
from zagora_jax.reporting.charts import Curve, line_chart
from zagora_jax.reporting.history import Series, numbers_of

COLUMNS = ("step", "loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second", "seconds", "peak_memory_gib")
MOST_ROWS = 12
MOST_POINTS = 240


class Picture:
    """An SVG that notebooks show."""

    def __init__(self, svg: str):
        """Keep the SVG's text."""
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        write_bytes(Path(path), self.svg.encode())


class Steps(list[dict[str, Any]]):
    """The lines of metrics.jsonl, first to last: a list of dicts, of which `pandas.DataFrame` makes a table too."""

    def series(self, name: str) -> Series:
        """Return a number over the steps that have it, such as "loss" or "cards.0.celsius".

        Raises:
            UserError: no step has it; names those that there are.
        """
        found = Series()
        names: set[str] = set()
        for line in self:
            numbers = numbers_of(line)
            names |= numbers.keys()
            if name in numbers:
                found.append(line["step"], numbers[name])
        if not found.steps:
            raise UserError(
                f"{name}: no step has such a number; there are {', '.join(sorted(names)) or 'no steps yet'}"
            )
        return found

    def plot(self, *names: str, title: str = "") -> Picture:
        """Draw numbers over the steps, on one pair of axes; the loss where none is named.

        Raises:
            UserError: no step has one of them.
        """
        names = names or ("loss",)
        curves = [Curve(name, self.series(name).buckets(MOST_POINTS), dots=name.startswith("eval_")) for name in names]
        return Picture(line_chart(curves, title or ", ".join(names)))

    def _repr_html_(self) -> str:
        """Lay out some of the steps, first and last among them, in the columns that any of them has."""
        columns = [name for name in COLUMNS if any(name in line for line in self)]
        rows = [self[index] for index in _spread(len(self), MOST_ROWS)]
        return (
            f"<table><caption>{len(self)} steps</caption>{_row('th', columns)}"
            + "".join(_row("td", (_written(line.get(name)) for name in columns)) for line in rows)
            + "</table>"
        )


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` indices below `count`, evenly from the first to the last."""
    if count <= most:
        return list(range(count))
    return [round(at * (count - 1) / (most - 1)) for at in range(most)]


def _row(cell: str, texts: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{html.escape(text)}</{cell}>" for text in texts) + "</tr>"


def _written(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
