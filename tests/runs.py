"""Small training runs for tests, in this process or in a child that is killed at a chosen moment."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from rich.console import Console

from zagora_jax.callbacks import Callback
from zagora_jax.checkpoints.background import BackgroundWriter
from zagora_jax.checkpoints.source import open_checkpoint
from zagora_jax.commands import ExportConfig
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig
from zagora_jax.reporting.progress import Reporter
from zagora_jax.run_directory import MetricsFile, RunDirectory, read_metrics

# The moments of a run are the calls of these, described as "5: rename OLD NEW", the lines of metrics, as "7: metrics
# STEP", the beginnings of a training's parts, as "3: part _load", what the threads beside it do, as "4: read TENSOR" or
# "5: batch STEP", and the calls of the compiled step, as "6: step STEP".
FILE_OPERATIONS = ("rename", "replace", "fsync", "mkdir", "rmdir")
PARTS = ("_compile_step", "_load", "_initial_state", "_compile_evaluation", "_evaluate", "_step")
# For runs that hang: seconds in the place of half a minute or more.
SHORT_LIMITS = {"NAMED_AFTER": 1.0, "ENDED_AFTER": 6.0, "SLOW_NAMED_AFTER": 1.0, "SLOW_ENDED_AFTER": 6.0}
TIMEOUT = 600  # seconds
INTERRUPTED = 3  # the exit status of a child that ends with KeyboardInterrupt


@dataclass(frozen=True)
class Finished:
    """A run, or an export, that came to its end: its moments, and what it printed."""

    moments: list[str]
    printed: str


def write_rows(path: Path, count: int, *, first: int = 0) -> Path:
    """Conversations of different lengths, all of them short."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(first, first + count):
            turns = [
                {"role": "user", "content": f"What is {number}?"},
                {"role": "assistant", "content": f"It is {number * 7}. " * (1 + number % 3)},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def write_pairs(path: Path, count: int) -> Path:
    """Queries with a passage and a wrong one each."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            row = {
                "query": f"What is {number}?",
                "positive": f"It is {number * 7}. " * (1 + number % 3),
                "negatives": [f"It is not {number}."],
            }
            file.write(json.dumps(row) + "\n")
    return path


def tiny_config(model: Path, output: Path, rows: Path, **options: Any) -> TrainConfig:
    """Options that train a tiny model in float32 on rows of at most 96 tokens."""
    small: dict[str, Any] = {
        "lora": LoraConfig(rank=4, targets=["q_proj", "down_proj"]),
        "sequence_length": 96,
        "compute_dtype": "float32",
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "remat": "none",
        "attention": "reference",
        "learning_rate": 1e-2,
        "quantized_cache": "off",  # whose files would be written at any moment
    }
    return TrainConfig(model=str(model), data=[rows], output=output, **(small | options))


def finished_run(directory: Path, config: TrainConfig) -> RunDirectory:
    """A run directory as training leaves it, without checkpoints and with an adapter that does something."""
    from oracles import PROJECTIONS, random_adapter, write_adapter

    run = RunDirectory(directory)
    run.create()
    run.write_config(config)
    fingerprint = open_checkpoint(config.model).fingerprint()
    options = config.model_dump(mode="json")
    run.update_report({"synthetic": False, "model_fingerprint": fingerprint, "options": options})
    targets = PROJECTIONS if config.lora.targets == "all-linear" else config.lora.targets
    tensors = random_adapter(Path(config.model), rank=config.lora.rank, targets=targets)
    write_adapter(run.adapter, tensors, alpha=config.lora.alpha, targets=targets)
    return run


class Listener(Callback):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    on_begin = on_step = on_evaluate = on_sample = on_save = on_end = lambda self, event: self.events.append(event)

    def heard(self, kind: type) -> list[Any]:
        """What it has heard of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def recorder() -> tuple[Reporter, Callable[[], str]]:
    """A reporter that prints nothing, and what it would have printed."""
    console = Console(file=io.StringIO(), width=500)
    return Reporter(console), console.file.getvalue  # type: ignore[attr-defined]


def saves_in_time(patch: Callable[[type, str, Callable], None] = setattr) -> None:
    """Let no save be put off: a step that is to be saved waits for the save before."""

    def is_busy(self: BackgroundWriter) -> bool:
        wait([] if self._job is None else [self._job])
        return False

    patch(BackgroundWriter, "is_busy", is_busy)


@contextmanager
def compiled_once(folder: Path) -> Iterator[None]:
    """Let all runs in the block share what they compile, in `folder`: most of a tiny run's time."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    options = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}

    def use(options: dict[str, Any]) -> None:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    use(options)
    try:
        yield
    finally:
        use(before)


def remains(run: Path) -> list[Path]:
    """What broken writes have left."""
    return [path for path in run.rglob(".*") if re.search(r"\.tmp$|\.saving|\.removed$", path.name)]


def numbers(run: Path) -> list[dict[str, Any]]:
    """A run's metrics, without those that are never the same twice."""
    timed = {"seconds", "tokens_per_second", "peak_memory_gib", "idle", "save_put_off", "cards", "paused_seconds"}
    return [
        {name: value for name, value in line.items() if name not in timed}
        for line in read_metrics(run / "metrics.jsonl")
    ]


@dataclass(frozen=True)
class Break:
    """So many seconds after the first moment that a regular expression matches, a signal is sent.

    Where there is none, the thread hangs there.
    """

    moment: str
    by: signal.Signals | None
    seconds: float = 0.0


class Child:
    """Trains and exports in processes of its own, which share a folder of compiled programs and their imports.

    The processes are forked from one that has imported what training needs, but has not started JAX.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["zagora_jax.trainer", "zagora_jax.exporter", "zagora_jax.checkpoints.tokenizer"]
        )

    def train(self, config: TrainConfig | ExportConfig) -> Finished:
        """Train, or export, to the end."""
        exitcode, finished = self._run(config)
        assert exitcode == 0
        assert finished is not None
        return finished

    export = train

    def break_off(self, config: TrainConfig, moment: str, by: signal.Signals = signal.SIGKILL) -> None:
        """Train until the process is killed just before the first moment that the regular expression matches."""
        exitcode, finished = self._run(config, Break(moment, by))
        assert finished is None, f"no moment {moment!r} among {finished.moments}"
        assert exitcode == (-signal.SIGKILL if by == signal.SIGKILL else INTERRUPTED)

    def kill(self, config: TrainConfig | ExportConfig, moment: str, seconds: float, *, compiles: bool = False) -> bool:
        """Kill the process so long after the first moment that matches; tells whether it was not at its end by then.

        Args:
            config: what to do until then.
            moment: a regular expression.
            seconds: the time after it.
            compiles: whether programs are compiled anew, so that there is time for a kill meanwhile.
        """
        with tempfile.TemporaryDirectory(dir=self._folder) as empty:
            folder = Path(empty) if compiles else None
            end = Break(moment, signal.SIGKILL, seconds)
            exitcode, finished = self._run(config, end, all_saves=False, compiled=folder)
        assert (exitcode, finished is None) in ((0, False), (-signal.SIGKILL, True), (-signal.SIGKILL, False))
        return finished is None

    def hang(self, config: TrainConfig, moment: str) -> tuple[int | None, str]:
        """Train until a thread hangs at the first moment that the regular expression matches: status, errors."""
        errors = self._folder / "errors.txt"
        exitcode, _ = self._run(config, Break(moment, None), errors)
        return exitcode, errors.read_text()

    def _run(
        self,
        config: TrainConfig | ExportConfig,
        end: Break | None = None,
        errors: Path | None = None,
        *,
        all_saves: bool = True,
        compiled: Path | None = None,
    ) -> tuple[int | None, Finished | None]:
        """Return the exit status and what came of it; `all_saves` lets no save be put off."""
        receiver, sender = self._context.Pipe(duplex=False)
        folder = compiled or self._folder
        process = self._context.Process(target=_work, args=(config, folder, end, sender, errors, all_saves))
        process.start()
        sender.close()
        if not receiver.poll(TIMEOUT):
            process.kill()
            raise TimeoutError(f"a run is not over after {TIMEOUT} s")
        try:
            finished = receiver.recv()
        except EOFError:
            finished = None
        process.join()
        return process.exitcode, finished


def _work(
    config: TrainConfig | ExportConfig,
    compiled: Path,
    end: Break | None,
    sender: Any,
    errors: Path | None,
    all_saves: bool,
) -> None:
    import jax

    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(compiled))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

    from zagora_jax import exporter, hanging, trainer

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores in what it runs in the background
    if all_saves:
        saves_in_time()
    if errors is not None:
        sys.stderr = errors.open("w")
        for name, seconds in SHORT_LIMITS.items():
            setattr(hanging, name, seconds)
    moments = _record_moments(end)
    reporter, printed = recorder()
    try:
        if isinstance(config, TrainConfig):
            trainer.train(config, reporter)
        else:
            exporter.export(config, reporter)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(hanging.leave(hanging.FAILED))
    sender.send(Finished(moments, printed()))
    hanging.leave(0)


def _record_moments(end: Break | None) -> list[str]:
    """Make the process send itself a signal at the given moment; returns the list that moments are put in."""
    from zagora_jax import trainer
    from zagora_jax.checkpoints.huggingface import HuggingFaceCheckpoint
    from zagora_jax.data.batches import Batches
    from zagora_jax.distribution import SpreadStep

    moments: list[str] = []

    def record(description: str) -> None:
        if threading.current_thread().name == "report":
            return  # it may leave a page out, so that its moments are not the same twice
        moments.append(f"{len(moments)}: {description}")
        if end is None or not re.search(end.moment, moments[-1]):
            return
        if end.by is None:
            threading.Event().wait()
        elif end.seconds:
            threading.Timer(end.seconds, os.kill, (os.getpid(), end.by)).start()
        else:
            os.kill(os.getpid(), end.by)

    def recorded(name: str, function: Callable) -> Callable:
        @wraps(function)
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            record(f"{name} {' '.join(str(arg) for arg in (path, *args[:1]) if isinstance(arg, str | Path))}")
            return function(path, *args, **kwargs)

        return call

    def method_recorded(owner: type, name: str, describe: Callable[..., str]) -> None:
        function = getattr(owner, name)

        @wraps(function)
        def call(*args: Any) -> Any:
            record(describe(*args[1:]))
            return function(*args)

        setattr(owner, name, call)

    for name in FILE_OPERATIONS:
        setattr(os, name, recorded(name, getattr(os, name)))
    for name in PARTS:
        method_recorded(trainer._Run, name, lambda *_, name=name: f"part {name}")
    method_recorded(MetricsFile, "write", lambda entry: f"metrics {entry['step']}")
    method_recorded(HuggingFaceCheckpoint, "read_rows", lambda tensor, *_: f"read {tensor}")
    method_recorded(Batches, "at", lambda step: f"batch {step + 1}")
    method_recorded(SpreadStep, "__call__", lambda state, *_: f"step {int(state.step) + 1}")
    return moments
