"""A run directory as a spectator sees it, while it is written, after it, or in the middle of a broken write."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from zagora_jax.reporting.history import History, finite

RECENT_STEPS = 50  # of which speeds are taken
SPEED_STEPS = 10
MOST_RUNS = 50  # of a folder, the newest

State = Literal["preparing", "running", "finished", "stopped"]


@dataclass(frozen=True)
class Snapshot:
    """What is known of a run at one moment; None is what is not known (yet).

    Attributes:
        path: the run directory.
        state: running and preparing (no step is finished yet) if a process of this machine holds the directory;
            finished, or stopped, if none does.
        step: finished optimizer steps.
        total_steps: of the whole run.
        loss: of the newest step.
        eval_loss: the newest on held-out rows.
        learning_rate: of the newest step.
        grad_norm: likewise.
        tokens_per_second: the median of the last steps.
        seconds_a_step: likewise.
        eta_seconds: until the last step.
        peak_memory_gib: of the fullest device.
        skipped: steps without an update.
        written_seconds_ago: since the newest line of metrics.
        problems: what could not be read, in words.
    """

    path: str
    state: State
    step: int
    total_steps: int | None
    loss: float | None
    eval_loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    tokens_per_second: float | None
    seconds_a_step: float | None
    eta_seconds: float | None
    peak_memory_gib: float | None
    skipped: int
    written_seconds_ago: float | None
    problems: tuple[str, ...]


class RunView:
    """Follows one run directory; never writes, locks or complains."""

    def __init__(self, path: Path):
        """Begin; the directory may be in any state."""
        self.path = path
        self.history = History(path / "metrics.jsonl")
        self.report: dict[str, Any] = {}
        self.problems: list[str] = []

    def refresh(self) -> Snapshot:
        """Read what is new."""
        self.problems = []
        self.history.refresh()
        self.report = self._read_object("report.json")
        if self.history.unreadable:
            self.problems.append(f"metrics.jsonl: {self.history.unreadable} lines cannot be read")
        return self._snapshot()

    def _snapshot(self) -> Snapshot:
        history, total = self.history, self.report.get("total_steps")
        total = total if type(total) is int and 0 <= total < 2**63 else None
        steps = history["seconds"].recent(SPEED_STEPS)
        speeds = history["tokens_per_second"].recent(SPEED_STEPS)
        pace = history["seconds"].recent(RECENT_STEPS)
        state = self._state(total)
        eta = None
        if total is not None and pace and state == "running":
            eta = finite(max(0, total - history.step) * sum(pace) / len(pace))
        loss_after = finite(self.report.get("loss_after"))
        eval_loss = history["eval_loss"].last if loss_after is None else loss_after
        return Snapshot(
            str(self.path),
            state,
            history.step,
            total,
            history["loss"].last,
            eval_loss,
            history["learning_rate"].last,
            history["grad_norm"].last,
            median(speeds) if speeds else None,
            median(steps) if steps else None,
            eta,
            history["peak_memory_gib"].last,
            history.skipped,
            self._age(),
            tuple(self.problems),
        )

    def _state(self, total: int | None) -> State:
        if is_claimed(self.path):
            return "running" if self.history.step else "preparing"
        return "finished" if total is not None and self.history.step >= total else "stopped"

    def _age(self) -> float | None:
        try:
            return max(0.0, time.time() - self.history.path.stat().st_mtime)
        except OSError:
            return None

    def _read_object(self, name: str) -> dict[str, Any]:
        return read_object(self.path / name, self.problems)


def read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """Read a JSON object; where that cannot be done it is empty, and a problem is added unless no file is there."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name}: cannot be read: {error}")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{path.name}: expected an object, found {type(content).__name__}")
        return {}
    return content


def is_claimed(path: Path) -> bool:
    """Tell whether a process of this machine holds a run directory's lock, without touching it.

    Taking the lock to see whether it is free would refuse a run that begins at that moment. The kernel lists the locks
    by device and inode; the inode alone is compared, since some file systems have another device there than for stat.
    """
    try:
        inode = str(os.stat(path).st_ino)
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    for line in locks.splitlines():
        fields = line.split()  # "1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE 0 EOF"
        if fields[1:4] == ["FLOCK", "ADVISORY", "WRITE"] and fields[5].rpartition(":")[2] == inode:
            return True
    return False


def find_runs(path: Path) -> list[Path]:
    """Return the run directory at `path`, or those in that folder, the one written last first."""
    if (path / "config.yaml").is_file():
        return [path]
    try:
        found = [folder for folder in path.iterdir() if (folder / "config.yaml").is_file()]
    except OSError:
        return []
    return sorted(found, key=_written, reverse=True)[:MOST_RUNS]


def _written(run: Path) -> float:
    times = []
    for name in ("metrics.jsonl", "config.yaml"):
        try:
            times.append((run / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
