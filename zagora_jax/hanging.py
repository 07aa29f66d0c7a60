"""Work that hangs: it is named, with the place where it stands, and in the end the process is ended.

A thread that waits for a dead disk cannot be ended, and a main thread that waits for a dead device, inside of compiled
code, can raise nothing. So a thread of its own looks at the work that is under way. Nothing is half-written when it
ends the process: no file has its name before it is complete.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from zagora_jax.errors import UserError
from zagora_jax.exiting import exit_at_once

T = TypeVar("T")

# Seconds after which the work of a thread is named, and after which it has failed.
NAMED_AFTER, ENDED_AFTER = 30.0, 60.0
# The same for what may rightly take long, or would lose finished steps if it were ended: more patience.
SLOW_NAMED_AFTER, SLOW_ENDED_AFTER = 60.0, 600.0
POLLING = 0.5
FAILED = 2  # the exit status, as of a UserError

ROOT = Path(__file__).parents[1]
_PACKAGES = tuple(str(ROOT / name) + os.sep for name in ("zagora_jax", "models", "sharding"))


@dataclass(eq=False)
class Activity:
    """Work that is under way.

    Attributes:
        what: for people.
        named_after: seconds after which it is named, and again after twice as many, and so on.
        ended_after: seconds after which it ends the process; None: never.
        advice: what to do then.
        saves: whether the process is not ended amid it for the sake of other work.
        age: seconds since it began or went on.
    """

    what: str
    named_after: float
    ended_after: float | None
    advice: str
    saves: bool
    age: float = 0.0
    named: int = 0  # times

    @property
    def is_late(self) -> bool:
        """Whether it is time to name it (again)."""
        return self.age >= self.named_after * 2**self.named

    def late(self) -> str:
        """Say how late it is, and where all threads stand."""
        return f"{self.what}: hangs: nothing has come of it for {self.age:.0f} s{_places()}{_elsewhere()}"


class _Watchdog:
    """Looks at what is under way, twice a second."""

    def __init__(self) -> None:
        self.activities: list[Activity] = []
        self.leaving: int | None = None  # the exit status of a process that is done
        self._ended_by: Activity | None = None
        threading.Thread(target=self._run, name="hanging", daemon=True).start()

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(POLLING)
            now = time.monotonic()
            # The time in which the whole process stood still, as after Ctrl-Z, is nobody's.
            passed, last = min(now - last, 2 * POLLING), now
            for activity in list(self.activities):
                activity.age += passed
                self._look_at(activity)
            ended_by = self._ended_by
            if ended_by and ended_by not in self.activities:
                _say(f"{ended_by.what}: goes on after all")
                self._ended_by = None
            elif ended_by and not any(other.saves and other is not ended_by for other in self.activities):
                exit_at_once(FAILED, f"{ended_by.what}: hangs")

    def _look_at(self, activity: Activity) -> None:
        if activity.ended_after is not None and activity.age >= activity.ended_after:
            if self._ended_by is None or (activity.saves and activity is not self._ended_by):
                self._ended_by = activity
                _say(f"error: {activity.late()}" + (f"\n{activity.advice}" if activity.advice else ""))
        elif activity.is_late:
            activity.named += 1
            _say(f"warning: {activity.late()}")
            if self.leaving is not None:
                os._exit(self.leaving)


_watchdog: _Watchdog | None = None
_elsewhere: Callable[[], str] = str
_one_watchdog = threading.Lock()


@contextmanager
def watched(
    what: str, *, slow: bool = False, longer: float = 0.0, ends: bool = True, advice: str = "", saves: bool = False
) -> Iterator[Activity]:
    """Watch over the block.

    Args:
        what: names the work in messages.
        slow: whether the limits are SLOW_NAMED_AFTER and SLOW_ENDED_AFTER.
        longer: seconds that the work may take besides, and ten times as many before it is ended.
        ends: whether the process is ended, with status FAILED.
        advice: said then.
        saves: whether the process is not ended for the sake of other work before this is done or hangs itself.
    """
    global _watchdog
    with _one_watchdog:
        _watchdog = watchdog = _watchdog or _Watchdog()
    named_after, ended_after = (SLOW_NAMED_AFTER, SLOW_ENDED_AFTER) if slow else (NAMED_AFTER, ENDED_AFTER)
    activity = Activity(what, named_after + longer, ended_after + 10 * longer if ends else None, advice, saves)
    watchdog.activities.append(activity)
    try:
        yield activity
    finally:
        watchdog.activities.remove(activity)


class Pace:
    """Watches over work that comes again and again, such as steps: what is late depends on what they took so far."""

    def __init__(self, advice: str = ""):
        """`advice` is said when the process is ended."""
        self._advice = advice
        self._slowest: float | None = None

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """Watch over one piece of the work; the first may take any time, and is only named."""
        slowest, started = self._slowest or 0.0, time.perf_counter()
        with watched(what, slow=True, longer=2 * slowest, ends=self._slowest is not None, advice=self._advice):
            yield
        self._slowest = max(slowest, time.perf_counter() - started)


def in_time(what: str, work: Callable[[], T], advice: str = "") -> T:
    """Return what `work` returns, or raise what it raises, in a thread of its own.

    Raises:
        UserError: it takes longer than ENDED_AFTER.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    with watched(what, ends=False) as activity:
        threading.Thread(target=run, name=what, daemon=True).start()
        try:
            return result.result(ENDED_AFTER)
        except TimeoutError:
            if result.done():
                raise  # that of the work
            _remember_hanging()
            raise UserError(f"{activity.late()}\n{advice}") from None


_hung = False


def _remember_hanging() -> None:
    global _hung
    _hung = True


def say_too(elsewhere: Callable[[], str]) -> None:
    """Say with all that hangs what `elsewhere` returns: what other processes are at."""
    global _elsewhere
    _elsewhere = elsewhere


def leave_at_once() -> None:
    """Let `leave` end the process without waiting for threads and what libraries do at the end."""
    _remember_hanging()


def wait_for_saves(seconds: float) -> None:
    """Wait until no save is under way, but not longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and _watchdog and any(activity.saves for activity in list(_watchdog.activities)):
        time.sleep(POLLING)


def leave(status: int) -> int:
    """Return the exit status of a process that is done, or end it where a thread hangs that it would wait for."""
    if _hung or (_watchdog is not None and any(activity.named for activity in _watchdog.activities)):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if _watchdog is not None:
        _watchdog.leaving = status
    return status


def _places() -> str:
    """Say where the threads that run our code stand."""
    own = threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for thread, frame in sys._current_frames().items():
        if thread == own:
            continue
        at = frame
        while at is not None and (at.f_code.co_filename == __file__ or not at.f_code.co_filename.startswith(_PACKAGES)):
            at = at.f_back  # type: ignore[assignment]
        if at is not None:
            path = Path(at.f_code.co_filename).relative_to(ROOT)
            found.append(f"\n  {names.get(thread, thread)}: {path}:{at.f_lineno}, in {at.f_code.co_qualname}")
    return "".join(sorted(found))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
