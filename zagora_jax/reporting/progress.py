"""What a person sees while a run goes on: a banner, bars on a terminal and in a notebook, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from zagora_jax.reporting.notebook import NotebookBar
from zagora_jax.reporting.terminal import SafeConsole

SECONDS_BETWEEN_LINES = 10.0  # while weights are read, where there is no terminal


class Reporter:
    """Prints a run's story to a console."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        """Print to `console`, by default the standard output's; `clock` gives seconds."""
        self.console = console or SafeConsole()
        self._clock = clock

    def banner(self, title: str, facts: Mapping[str, object]) -> None:
        """Print what was decided, a line a fact."""
        table = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            table.add_row(f"[dim]{name}[/dim]", str(value).replace("[", r"\["))
        self.console.rule(f"[bold]{title}", align="left")
        self.console.print(table)

    def say(self, text: str) -> None:
        """Print one line, however long: in a file it is not broken."""
        self.console.print(text, markup=False, soft_wrap=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table."""
        table = Table(*columns, title=title, title_justify="left", show_lines=False)
        for row in rows:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        self.console.print(table)

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator["Count"]:
        """Show how many of `total` things are done."""
        if not self.console.is_terminal:
            self.say(f"{what}: {total}")
            yield Count(None, None)
            return
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console) as progress:
            yield Count(progress, progress.add_task(what, total=total))

    @contextmanager
    def loading(self, parameters: int) -> Iterator[Callable[[int], None]]:
        """Show how far the reading of so many parameters is; yields what is called with the number just read."""
        started = self._clock()
        what = f"weights: {parameters / 1e9:,.2f} billion parameters" if parameters >= 1e9 else "weights"
        if self.console.is_terminal:
            columns = (
                TextColumn(what), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left"),
                TimeRemainingColumn(),
            )  # fmt: skip
            with Progress(*columns, console=self.console, transient=True) as progress:
                task = progress.add_task(what, total=parameters)
                yield lambda count: progress.advance(task, count)
        else:
            yield LoadingLines(self, what, parameters, self._clock).advance
        self.say(f"{what} in place after {self._clock() - started:.1f} s")

    @contextmanager
    def training(self, total_steps: int, first_step: int, log_every: int) -> Iterator["TrainingProgress"]:
        """Show the optimizer steps, from `first_step` (finished already) to `total_steps`."""
        if self.console.is_jupyter:
            bar = NotebookBar(total_steps, first_step)
            try:
                yield TrainingProgress(self, bar, total_steps, log_every)
            finally:
                bar.show()
            return
        if not self.console.is_terminal:
            yield TrainingProgress(self, None, total_steps, log_every)
            return
        columns = (
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self.console, expand=True) as progress:
            task = progress.add_task("step", total=total_steps, completed=first_step, numbers="compiling")
            yield TrainingProgress(self, TerminalBar(progress, task), total_steps, log_every)


class Count:
    """Counts finished things."""

    def __init__(self, progress: Progress | None, task: object):
        self._progress, self._task = progress, task

    def advance(self) -> None:
        """Count one more."""
        if self._progress is not None:
            self._progress.advance(self._task)  # type: ignore[arg-type]


class LoadingLines:
    """Says every some seconds how far the reading of weights is, in plain lines."""

    def __init__(self, reporter: Reporter, what: str, parameters: int, clock: Callable[[], float]):
        self._reporter, self._what, self._parameters, self._clock = reporter, what, parameters, clock
        self._started = self._said = clock()
        self._read = 0

    def advance(self, count: int) -> None:
        """Count so many parameters more."""
        self._read += count
        now = self._clock()
        if now - self._said < SECONDS_BETWEEN_LINES or self._read >= self._parameters:
            return
        self._said, passed = now, now - self._started
        left = passed * (self._parameters - self._read) / self._read
        self._reporter.say(
            f"{self._what}: {self._read / self._parameters:.0%} read in {passed:.0f} s, about {left:.0f} s left"
        )


class Bar(Protocol):
    """Shows how far a training is."""

    def update(self, step: int, loss: float, numbers: str) -> None:
        """Show a finished step, and the newest `numbers` in words."""


class TerminalBar:
    """A line of the terminal."""

    def __init__(self, progress: Progress, task: TaskID):
        self._progress, self._task = progress, task

    def update(self, step: int, loss: float, numbers: str) -> None:
        """Show a finished step."""
        self._progress.update(self._task, completed=step, numbers=numbers)


class TrainingProgress:
    """Shows each step's numbers."""

    def __init__(self, reporter: Reporter, bar: Bar | None, total_steps: int, log_every: int):
        self._reporter, self._bar, self._numbers = reporter, bar, "compiling"
        self._total_steps, self._log_every = total_steps, log_every

    def step(self, metrics: Mapping[str, float]) -> None:
        """Show a finished step, and its numbers every `log_every` steps and at the last."""
        step = int(metrics["step"])
        if said := not step % self._log_every or step == self._total_steps:
            self._numbers = (
                f"loss {metrics['loss']:.4f}  lr {metrics['learning_rate']:.2e}  grad {metrics['grad_norm']:.3f}  "
                f"{metrics['tokens_per_second']:,.0f} tok/s  {metrics['peak_memory_gib']:.2f} GiB"
            )
        if self._bar is not None:
            self._bar.update(step, metrics["loss"], self._numbers)
        elif said:
            self._reporter.say(f"step {step}/{self._total_steps}  {self._numbers}")
