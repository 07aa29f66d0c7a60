"""What `monitor` shows: the cards, the host, and the runs, for a person or as JSON."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zagora_jax.reporting.cards import GIB, USUAL_THROTTLES, Card, CardReading, Cards, NoCardsError
from zagora_jax.reporting.run_view import RunView, Snapshot, find_runs
from zagora_jax.reporting.terminal import visible
from zagora_jax.reporting.terminal_plot import braille_curve

CURVE_HEIGHT = 8  # lines
CURVE_POINTS = 400
STATE_STYLES = {"running": "green", "preparing": "cyan", "finished": "bold", "stopped": "yellow"}
RETRY_AFTER = 10.0  # seconds before a driver that did not answer is asked again


@dataclass(frozen=True)
class Host:
    """The machine: GiB of memory in use and at all, percent of all cores' time."""

    memory_gib: float
    memory_total_gib: float
    cpu_percent: float


class Monitor:
    """Follows the cards of this machine, and the runs at a path."""

    def __init__(
        self, path: Path, *, open_cards: Callable[[], Cards] | None = None, clock: Callable[[], float] = time.monotonic
    ):
        """Begin.

        Args:
            path: a run directory, or a folder of some.
            open_cards: connects to the driver; where not given, to that of this machine.
            clock: gives seconds.
        """
        self._path, self._clock = path, clock
        self._open_cards = open_cards or (lambda: Cards(all_cards=True))
        self._cards: Cards | None = None
        self._asked: float | None = None
        self._views: dict[Path, RunView] = {}
        self.why_no_cards = ""
        self.readings: list[CardReading] = []
        self.snapshots: list[Snapshot] = []
        self._host_looks = 0

    def refresh(self) -> None:
        """Look at everything once."""
        self._read_cards()
        memory = psutil.virtual_memory()
        self.host = Host((memory.total - memory.available) / GIB, memory.total / GIB, self._cpu_percent())
        runs = find_runs(self._path)
        self._views = {run: self._views.get(run) or RunView(run) for run in runs}
        self.snapshots = [view.refresh() for view in self._views.values()]

    def _cpu_percent(self) -> float:
        """Return what the cores did since the last look, or at the first one for a tenth of a second."""
        self._host_looks += 1
        return psutil.cpu_percent(interval=0.1 if self._host_looks == 1 else None)

    def _read_cards(self) -> None:
        self.readings = []
        if self._cards is None:
            if self._asked is not None and self._clock() - self._asked < RETRY_AFTER:
                return
            self._asked = self._clock()
            try:
                self._cards = self._open_cards()
            except NoCardsError as error:
                self.why_no_cards = str(error)
                return
        self.readings = self._cards.read()

    @property
    def cards(self) -> tuple[Card, ...]:
        """The cards of this machine."""
        return () if self._cards is None else self._cards.cards

    def to_json(self) -> dict[str, Any]:
        """Return all of it for scripts; rates and sizes are in the units that the names say."""
        cards = [
            {
                "name": card.name,
                "memory_total_gib": card.memory_gib,
                "watts_limit": card.watts_limit,
                "celsius_limit": card.celsius_limit,
                **reading.to_json(),
            }
            for card, reading in zip(self.cards, self.readings, strict=True)
        ]
        return {
            "time": time.time(),
            "cards": cards,
            "why_no_cards": None if self.cards else self.why_no_cards,
            "host": asdict(self.host),
            "runs": [asdict(snapshot) for snapshot in self.snapshots],
        }

    def render(self, width: int) -> RenderableType:
        """Lay all of it out for a terminal that has so many columns: the newest run in full, all others a line each."""
        parts: list[RenderableType] = [self._card_table(), self._host_line()]
        if not self.snapshots:
            parts.append(Text(visible(f"{self._path}: no run here (no config.yaml in it, nor in a folder in it)")))
        for number, (view, snapshot) in enumerate(zip(self._views.values(), self.snapshots, strict=True)):
            if number == 0:
                parts += _run_in_full(view, snapshot, width)
        if len(self.snapshots) > 1:
            parts.append(_other_runs(self.snapshots[1:]))
        return Group(*parts)

    def _card_table(self) -> RenderableType:
        if not self.cards:
            return Text(visible(f"cards: {self.why_no_cards}"), "yellow")
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("card", "memory GiB", "", "busy", "°C", "watts", "PCIe in MB/s", "out", ""):
            table.add_column(column, justify="left" if column in ("card", "") else "right")
        for card, reading in zip(self.cards, self.readings, strict=True):
            used, total = reading.memory_gib, card.memory_gib
            bar = ProgressBar(total=total or 1.0, completed=used or 0.0, width=12)
            table.add_row(
                Text(visible(f"{card.index} {card.name}")),
                f"{_number(used, '.1f')} / {_number(total, '.1f')}",
                bar,
                f"{_number(reading.utilisation, '.0f')} %",
                f"{_number(reading.celsius, '.0f')}",
                f"{_number(reading.watts, '.0f')} / {_number(card.watts_limit, '.0f')}",
                _number(reading.pcie_received_mb_s, ",.0f"),
                _number(reading.pcie_sent_mb_s, ",.0f"),
                Text(visible(reading.error or ", ".join(reading.throttled_by)), "red" if reading.error else "yellow"),
            )
        return table

    def _host_line(self) -> Text:
        host = self.host
        return Text(
            f"host: {host.memory_gib:.1f} of {host.memory_total_gib:.1f} GiB, cores {host.cpu_percent:.0f} % busy",
            "dim",
        )


def _run_in_full(view: RunView, snapshot: Snapshot, width: int) -> list[RenderableType]:
    state = (snapshot.state, STATE_STYLES[snapshot.state])
    title = Text.assemble(("\n" + visible(snapshot.path), "bold"), "  ", state, "  ", _age(snapshot))
    parts: list[RenderableType] = [title]
    facts = view.report.get("facts")
    if isinstance(facts, dict):
        told = [str(facts[name]) for name in ("model", "devices", "optimizer step") if name in facts]
        parts.append(Text(visible("; ".join(told)), "dim"))
    parts.append(_steps(snapshot, width))
    parts.append(Text(_numbers(snapshot)))
    points = [(step, mean) for step, mean, _, _ in view.history["loss"].buckets(CURVE_POINTS)]
    if len(points) > 1:
        parts.append(Text("loss", "dim"))
        parts += [Text(line, "cyan", no_wrap=True) for line in braille_curve(points, min(width, 100), CURVE_HEIGHT)]
        parts.append(Text(f"steps {points[0][0]:.0f} to {view.history['loss'].steps[-1]}", "dim"))
    parts += _cards_of_run(view)
    warnings = [
        f"{count} steps of card {card} slowed down: {why}"
        for (card, why), count in view.history.throttled.items()
        if why not in USUAL_THROTTLES
    ]
    if snapshot.skipped:
        warnings.append(f"{snapshot.skipped} updates left out")
    if view.history.put_off:
        warnings.append(f"{view.history.put_off} saves put off: the disk is slow")
    parts += [Text(visible(text), "yellow") for text in (*warnings, *snapshot.problems)]
    return parts


def _cards_of_run(view: RunView) -> list[RenderableType]:
    """Tell what the run last wrote of its cards, which may be another machine's, or others' by now."""
    units = (
        ("memory_gib", ".1f", "GiB"),
        ("utilisation", ".0f", "% busy"),
        ("celsius", ".0f", "°C"),
        ("watts", ".0f", "W"),
    )
    lines = []
    for card in view.history.cards:
        known = [(view.history[f"cards.{card}.{name}"].last, form, unit) for name, form, unit in units]
        told = ", ".join(f"{value:{form}} {unit}" for value, form, unit in known if value is not None)
        lines.append(Text(f"card {card} in step {view.history.step}: {told}", "dim"))
    return [*lines]


def _steps(snapshot: Snapshot, width: int) -> RenderableType:
    if snapshot.total_steps is None:
        return Text(f"step {snapshot.step}")
    line = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=snapshot.total_steps, completed=snapshot.step, width=max(10, min(width, 100) - 40))
    left = "" if snapshot.eta_seconds is None else f"{duration(snapshot.eta_seconds)} left"
    line.add_row(f"step {snapshot.step:,} of {snapshot.total_steps:,}", bar, left)
    return line


def _numbers(snapshot: Snapshot) -> str:
    values = (
        ("loss", snapshot.loss, ".4f", ""),
        ("held out", snapshot.eval_loss, ".4f", ""),
        ("lr", snapshot.learning_rate, ".2e", ""),
        ("grad", snapshot.grad_norm, ".3f", ""),
        ("", snapshot.tokens_per_second, ",.0f", " tokens/s"),
        ("", snapshot.seconds_a_step, ".2f", " s a step"),
        ("", snapshot.peak_memory_gib, ".2f", " GiB at most"),
    )
    return "  ".join(f"{name} {value:{form}}{unit}".strip() for name, value, form, unit in values if value is not None)


def _other_runs(snapshots: list[Snapshot]) -> Table:
    table = Table(box=None, padding=(1, 2, 0, 0), header_style="dim")
    for column in ("other runs", "", "step", "loss", "held out", "tokens/s"):
        table.add_column(column, justify="left" if column in ("other runs", "") else "right")
    for number, snapshot in enumerate(snapshots):
        table.padding = (0, 2, 0, 0) if number else table.padding
        total = "" if snapshot.total_steps is None else f" of {snapshot.total_steps:,}"
        table.add_row(
            Text(visible(snapshot.path)),
            Text(snapshot.state, STATE_STYLES[snapshot.state]),
            f"{snapshot.step:,}{total}",
            _number(snapshot.loss, ".4f"),
            _number(snapshot.eval_loss, ".4f"),
            _number(snapshot.tokens_per_second, ",.0f"),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _age(snapshot: Snapshot) -> str:
    ago = snapshot.written_seconds_ago
    return "no step is finished yet" if ago is None else f"last written {duration(ago)} ago"


def duration(seconds: float) -> str:
    """Write a time for people: `2 h 05 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
