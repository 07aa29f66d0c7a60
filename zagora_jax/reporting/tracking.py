"""Sends a run's numbers to a tracker beside the training, which never waits for it, and never fails with it."""

import json
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zagora_jax.callbacks import Begin, Callback, End, Evaluated, Step
from zagora_jax.checkpoints.atomic import write_bytes
from zagora_jax.errors import UserError
from zagora_jax.reporting.history import numbers_of
from zagora_jax.reporting.run_view import read_object
from zagora_jax.reporting.trackers import TRACKERS, Tracker, require_installed

WAITING = 10_000  # steps that may wait to be sent
RETRY_AFTER = 60.0  # seconds before a tracker that could not begin is tried again
CLOSING = 30.0  # seconds that it may take at the end of a run
IDENTITY = "tracking.json"  # in the run directory: what trackers know the run by

Entry = tuple[int, dict[str, float]]


class Tracking(Callback):
    """One tracker, in a thread of its own.

    Attributes:
        lost: entries, of a step or an evaluation, that it did not take.
        sent: those that it took.
    """

    def __init__(
        self, name: str, say: Callable[[str], None], *, make: type[Tracker] | None = None, waiting: int = WAITING
    ):
        """Begin.

        Args:
            name: of the tracker, as in the option `track`.
            say: is told of the first failure, and of the count of them at the end.
            make: the tracker's class, by default the one of that name.
            waiting: entries that may wait.

        Raises:
            UserError: its package is not installed.
        """
        if make is None:
            require_installed(name)
        self._name, self._say, self._make = name, say, make or TRACKERS[name]
        self._entries: queue.Queue[Entry | None] = queue.Queue(waiting)
        self._thread = threading.Thread(target=self._run, name=f"tracking {name}", daemon=True)
        self._has_failed = False
        self._count = threading.Lock()
        self.lost = self.sent = 0

    def on_begin(self, event: Begin) -> None:
        """Begin to send."""
        self._begin = event
        self._identity = run_identity(event.run_directory, is_new=not event.first_step)
        self._thread.start()

    def on_step(self, event: Step) -> None:
        """Send a step's numbers, but for those of evaluations, of which `on_evaluate` hears."""
        numbers = numbers_of(event.metrics)
        self._put(event.step, {name: value for name, value in numbers.items() if not name.startswith("eval_")})

    def on_evaluate(self, event: Evaluated) -> None:
        """Send the losses."""
        self._put(event.step, dict(event.numbers))

    def on_end(self, event: End) -> None:
        """Let the rest be sent, but do not wait for ever."""
        end = time.monotonic() + CLOSING
        try:
            self._entries.put(None, timeout=CLOSING)
        except queue.Full:
            pass
        else:
            self._thread.join(max(0.0, end - time.monotonic()))
        unsent = self._entries.qsize()
        if self._thread.is_alive():
            self._say(f"warning: --track {self._name}: does not answer; {unsent + self.lost} entries were not sent")
        elif self.lost:
            self._say(f"warning: --track {self._name}: {self.lost} of {self.lost + self.sent} entries were not sent")

    def _put(self, step: int, numbers: dict[str, float]) -> None:
        try:
            self._entries.put_nowait((step, {name.replace(".", "/"): value for name, value in numbers.items()}))
        except queue.Full:
            self._fail(f"{self._entries.maxsize:,} steps wait to be sent")

    def _run(self) -> None:
        """Send what comes until the end."""
        tracker: Tracker | None = None
        tried = -RETRY_AFTER
        while (entry := self._entries.get()) is not None:
            if tracker is None and time.monotonic() - tried >= RETRY_AFTER:
                tried = time.monotonic()
                tracker = self._open()
            if tracker is None:
                self._fail("could not begin")
                continue
            try:
                tracker.log(*entry)
                self.sent += 1
            except Exception as error:  # whatever a service's client raises
                self._fail(f"{type(error).__name__}: {error}")
        if tracker is not None:
            try:
                tracker.close()
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}")

    def _open(self) -> Tracker | None:
        begin = self._begin
        options: Mapping[str, Any] = begin.config.model_dump(mode="json")
        try:
            return self._make(begin.run_directory, self._identity, options, begin.first_step)
        except Exception as error:
            self._fail(f"could not begin: {type(error).__name__}: {error}", count=0)
            return None

    def _fail(self, reason: str, count: int = 1) -> None:
        with self._count:
            self.lost += count
            is_first, self._has_failed = not self._has_failed, True
        if is_first:
            self._say(
                f"warning: --track {self._name}: {reason}. Training goes on, metrics.jsonl has every number; more of "
                "these are counted, and not said"
            )


def run_identity(run: Path, *, is_new: bool) -> str:
    """Return what trackers know a run by: random, kept in the run directory, the same when it goes on."""
    path = run / IDENTITY
    known = read_object(path, []).get("id")
    if isinstance(known, str) and not is_new:
        return known
    identity = secrets.token_hex(4)
    write_bytes(path, (json.dumps({"id": identity}) + "\n").encode())
    return identity


def trackings(names: Sequence[str], say: Callable[[str], None]) -> list[Callback]:
    """Return what sends a run's numbers to the trackers of these names.

    Raises:
        UserError: a tracker's package is not installed, or one is named twice.
    """
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"--track: {twice[0]} is named twice")
    return [Tracking(name, say) for name in names]
