"""What a run leaves behind: config.yaml, metrics.jsonl, report.json and .html, checkpoints/, adapter/."""

import errno
import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from zagora_jax.checkpoints.atomic import write_bytes
from zagora_jax.checkpoints.json_files import parse_json_object, read_json_object
from zagora_jax.checkpoints.peft import CONFIG, WEIGHTS
from zagora_jax.config import TrainConfig
from zagora_jax.config_file import load_config, save_config
from zagora_jax.errors import UserError


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._descriptor: int | None = None

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
    def report_page(self) -> Path:
        """The run on one page, for a browser."""
        return self.path / "report.html"

    @property
    def layout(self) -> Path:
        """Where the arrays lie: bytes a device, by kind."""
        return self.path / "layout.json"

    @property
    def connections(self) -> Path:
        """How fast the devices reach each other, as measured at the start."""
        return self.path / "connections.json"

    @property
    def samples(self) -> Path:
        """One JSON object for every prompt and each time that it was answered."""
        return self.path / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The states to resume from."""
        return self.path / "checkpoints"

    @property
    def initial_adapter(self) -> Path:
        """What the adapter began as, where that was a part of the weights, in PEFT's format."""
        return self.path / "initial_adapter"

    @property
    def adapter(self) -> Path:
        """The newest adapter, in PEFT's format."""
        return self.path / "adapter"

    @property
    def profile(self) -> Path:
        """The trace of a profiled step."""
        return self.path / "profile"

    def is_run(self) -> bool:
        """Whether a run was begun here."""
        return self.config.is_file()

    def require_run(self) -> None:
        """Refuse a directory that no run was begun in."""
        if not self.is_run():
            raise UserError(f"{self.path}: not a run directory (no config.yaml); give the --output of a training run")

    def require_free(self) -> None:
        """Refuse a directory in which a new run would mix with another's steps, or that cannot be made."""
        whole = self.path.absolute()
        place = next(path for path in (whole, *whole.parents) if path.exists())
        if not place.is_dir() or not os.access(place, os.W_OK):
            what = "may not be written to" if place.is_dir() else "is a file"
            raise UserError(f"--output {self.path}: cannot be made: {place} {what}; give another --output")
        for taken in (self.metrics, self.checkpoints, self.adapter):
            if taken.exists():
                raise UserError(
                    f"--output {self.path}: holds a run already ({taken.name} is there). "
                    "Give --resume to go on with it, or another --output"
                )

    def require_no_result(self) -> None:
        """Refuse to begin anew over an adapter whose checkpoints were removed.

        A run that is killed before its first save has made the folder of its checkpoints, and has not ended.
        """
        ended = not self.checkpoints.is_dir() or "saves_put_off" in self.read_report()
        if ended and (self.adapter / WEIGHTS).exists():
            raise UserError(
                f"--resume: {self.path} holds an adapter, but no checkpoint to go on from, and to begin anew would "
                "write over it. Put its checkpoints/ back, or give another --output"
            )

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Make the directory and keep other runs from it; the lock is the directory's own and ends with the process.

        Raises:
            UserError: the directory cannot be made or written to, or another run is writing there.
        """
        self._make()
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"--output {self.path}: another run is writing there now; wait for it, or give another --output"
                ) from error
            self._descriptor = descriptor
            yield
        finally:
            self._descriptor = None
            os.close(descriptor)

    def require_in_place(self) -> None:
        """Refuse to go on where the claimed directory has been moved, removed or replaced since.

        Raises:
            OSError: what is to be written would be lost, or mixed with another run's files.
        """
        assert self._descriptor is not None
        if not self.path.is_dir() or not os.path.samestat(os.fstat(self._descriptor), os.stat(self.path)):
            raise FileNotFoundError(errno.ENOENT, "the run directory was moved or removed during the run", self.path)

    def create(self) -> None:
        """Make the directory, see that it can be written to, and remove files that a broken run left half written."""
        self._make()
        ours = [self.config, self.metrics, self.report, self.report_page, self.layout, self.connections]
        for file in ours + [self.adapter / name for name in (CONFIG, WEIGHTS)]:
            for remains in file.parent.glob(f".{file.name}.*.tmp"):
                remains.unlink()

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output {self.path}: cannot be made: {error.strerror}") from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise UserError(f"--output {self.path}: may not be written to; give another --output")
        for folder in (self.checkpoints, self.adapter):
            if folder.exists() and not folder.is_dir():
                raise UserError(f"{folder}: expected a folder, found a file; remove it, or give another --output")

    def read_config(self) -> TrainConfig:
        """Read config.yaml."""
        self.require_run()
        return load_config(TrainConfig, self.config)

    def write_config(self, config: TrainConfig) -> None:
        """Write config.yaml, from which the same run can be begun again, from any working directory."""
        of_this_start = dict.fromkeys(("coordinator", "process_count", "process_index"), None)
        save_config(config.with_absolute_paths().model_copy(update={"resume": False, **of_this_start}), self.config)

    def read_report(self) -> dict[str, Any]:
        """Read report.json; empty where there is none yet."""
        return read_json_object(self.report) if self.report.exists() else {}

    def write_layout(self, layout: Mapping[str, Any]) -> None:
        """Write layout.json."""
        write_bytes(self.layout, (json.dumps(layout, indent=2) + "\n").encode())

    def write_connections(self, measured: Mapping[str, Any]) -> None:
        """Write connections.json."""
        write_bytes(self.connections, (json.dumps(measured, indent=1) + "\n").encode())

    def update_report(self, entries: Mapping[str, Any]) -> None:
        """Add `entries` to report.json."""
        content = {**self.read_report(), **entries}
        write_bytes(self.report, (json.dumps(content, indent=2) + "\n").encode())


class MetricsFile:
    """Appends to metrics.jsonl, a line an optimizer step."""

    def __init__(self, path: Path, *, after_step: int, missing: Mapping[str, Any] | None = None):
        """Open `path`, forgetting what a broken run wrote beyond `after_step`, the step that is resumed from.

        What is `missing` yet in that step's line is added to it.
        """
        kept = [line for source, line in _complete_lines(path) if _parse(line, source)["step"] <= after_step]
        if missing:
            kept[-1] = _written({**_parse(kept[-1], str(path)), **missing})
        write_bytes(path, "".join(kept).encode())
        self._file = path.open("a", encoding="utf-8")

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one object and hand it to the operating system."""
        self._file.write(_written(entry))
        self._file.flush()

    def sync(self) -> None:
        """Force what was written to the disk."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sync()
        self._file.close()


def completed_options(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a run was saved with; those that it does not mention have their defaults.

    A run that was saved before an option existed trained as that option's default does.
    """
    return _completed(recorded, TrainConfig(model="any", data=None).model_dump(mode="json"))


def _completed(recorded: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    groups = {
        name: _completed(recorded.get(name, {}), default)
        for name, default in defaults.items()
        if isinstance(default, Mapping) and isinstance(recorded.get(name, {}), Mapping)
    }
    return {**defaults, **recorded, **groups}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl; a line that a power cut left incomplete is not counted."""
    return [_parse(line, source) for source, line in _complete_lines(path)]


def _written(entry: Mapping[str, Any]) -> str:
    """Write a line of JSON, which has no number for what is not finite: null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in entry.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def _parse(line: str, source: str) -> dict[str, Any]:
    """Parse a line that `source` names."""
    try:
        entry = parse_json_object(line.encode(), source)
        if not isinstance(entry.get("step"), int):
            raise UserError(f"{source}: expected the number of a step in every line, found {line.strip():.80}.")
    except UserError as error:
        raise UserError(f"{error} Without this line the run can go on, and its record lacks that step") from error
    return entry


def _complete_lines(path: Path) -> list[tuple[str, str]]:
    """Return every line that was written to its end, and how to name it."""
    if not path.exists():
        return []
    try:
        with path.open(encoding="utf-8") as file:
            lines = [line for line in file if line.endswith("\n")]
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected JSON in UTF-8, found other bytes ({error.reason})") from error
    return [(f"{path} line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
