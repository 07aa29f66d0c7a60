"""SIGTERM, SIGINT, SIGHUP: work that can be saved is saved first, anything else ends at once, and a second signal too.

Python runs a signal's handler in the main thread alone, and not while that is inside of compiled code: XLA may compile
for minutes. So a thread of its own reads the signals as they come, from the file descriptor that Python writes them to,
and ends the process where the main thread does not in time. Nothing is half-written then: no file has its name before
it is complete.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from zagora_jax.exiting import exit_at_once

# EX_TEMPFAIL of sysexits.h: all work is safe, and the same command can be given again.
STOPPED = 75
# After a signal, how long the main thread may take to end where there is nothing to save, in seconds.
UNWINDING = 10.0

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end, and no work is lost by it."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)


class _Watch:
    """What the handlers and the watching thread share; one at a time, since signals are the process's."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.grace: float | None = None  # seconds, where work has to be saved first
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)

    def start(self) -> None:
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # as for `command &`
        self._handlers = {number: signal.signal(number, self._handle) for number in heard}
        self._thread.start()

    def stop(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writer)  # which ends the thread
        self._thread.join()
        os.close(self._reader)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal in the main thread."""
        self.received = number
        if self.grace is None:
            raise Interrupted(number)

    def _watch(self) -> None:
        """Wait for the first signal, and then for a second one, or for the time to be up."""
        first = self._next()
        if first is None:
            return
        self.received = first
        name, grace = signal.Signals(first).name, self.grace
        if grace is not None:
            _say(f"{name}: the step that runs is finished and saved, within {grace:g} s; a second signal ends at once")
        try:
            second = self._next(UNWINDING if grace is None else grace)
        except TimeoutError:
            if self.grace is None:
                _say(f"{name}: ended; there was nothing left to save")
                exit_at_once(STOPPED, name)
            _say(f"{name}: not finished within {grace:g} s: ended; the steps since the last save are lost")
            exit_at_once(128 + first, f"{name}: not finished in time")
        if second is not None:
            _say(f"{signal.Signals(second).name}: ended at once")
            exit_at_once(128 + second, f"{name}, and a second signal")

    def _next(self, seconds: float | None = None) -> int | None:
        """Return the next signal, or None when the watch has ended."""
        end = None if seconds is None else time.monotonic() + seconds
        while select.select([self._reader], [], [], None if end is None else max(0.0, end - time.monotonic()))[0]:
            data = os.read(self._reader, 1)
            if not data or data[0] in _SIGNALS:
                return data[0] if data else None
        raise TimeoutError


_current: _Watch | None = None


@contextmanager
def interruptible() -> Iterator[None]:
    """Let these signals raise `Interrupted` in the block, or set a flag where work is `saving_first`.

    Within another such block, or outside of the main thread, where Python cannot handle signals, nothing changes.
    """
    global _current
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _current = _Watch()
    _current.start()
    try:
        yield
    finally:
        watch, _current = _current, None
        watch.stop()


@contextmanager
def saving_first(grace: float) -> Iterator[None]:
    """Keep signals from breaking into the block, which asks for them with `requested` or `check`, and saves.

    Args:
        grace: after so many seconds the process ends, whatever the block does.
    """
    if _current is None:
        yield
        return
    check()
    _current.grace = grace
    try:
        yield
    finally:
        _current.grace = None
    check()


def requested() -> bool:
    """Tell whether a signal has asked the process to end."""
    return _current is not None and _current.received is not None


def ask() -> None:
    """Ask this process to end, since a signal has asked another process of its run."""
    if _current is not None and _current.received is None:
        _current.received = signal.SIGTERM


def check() -> None:
    """Raise `Interrupted` where a signal has asked the process to end."""
    if _current is not None and _current.received is not None:
        raise Interrupted(_current.received)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
