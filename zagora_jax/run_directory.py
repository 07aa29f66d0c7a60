"""What a run leaves behind: config.yaml, metrics.jsonl, report.json, checkpoints/, adapter/."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from zagora_jax.checkpoints.atomic import write_bytes
from zagora_jax.errors import UserError


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @property
    def config(self) -> Path:
        """The configuration in full."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object for every optimizer step."""
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        """What is known of the run beside its metrics: versions, sizes, losses before and after."""
        return self.path / "report.json"

    @property
    def checkpoints(self) -> Path:
        """The states to resume from."""
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        """The newest adapter, in PEFT's format."""
        return self.path / "adapter"

    def holds_a_run(self) -> bool:
        """Whether a run was begun here."""
        return self.config.exists() or self.metrics.exists() or self.checkpoints.exists()

    def require_run(self) -> None:
        """Refuse a directory that no run was begun in."""
        if not self.config.is_file():
            raise UserError(f"{self.path}: not a run directory (no config.yaml); give the --output of a training run")

    def create(self) -> None:
        """Make the directory."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output {self.path}: cannot be made: {error.strerror}") from error

    def read_report(self) -> dict[str, Any]:
        """Read report.json; empty where there is none yet."""
        return json.loads(self.report.read_text("utf-8")) if self.report.is_file() else {}

    def update_report(self, entries: Mapping[str, Any]) -> None:
        """Add `entries` to report.json."""
        content = {**self.read_report(), **entries}
        write_bytes(self.report, (json.dumps(content, indent=2) + "\n").encode())


class MetricsFile:
    """Appends to metrics.jsonl, a line an optimizer step."""

    def __init__(self, path: Path, after_step: int):
        """Open `path`, forgetting what a broken run wrote beyond `after_step`, the step that is resumed from."""
        kept = [line for line in _complete_lines(path) if json.loads(line)["step"] <= after_step]
        write_bytes(path, "".join(kept).encode())
        self._file = path.open("a", encoding="utf-8")

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one object, and hand it to the operating system."""
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Force what was written to the disk."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sync()
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl; a line that a power cut left incomplete is not counted."""
    return [json.loads(line) for line in _complete_lines(path)]


def _complete_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [line for line in file if line.endswith("\n") and line.strip()]
