"""Limits of time and memory for chat templates, which are programs out of the files of a model.

Jinja's sandbox keeps a template from files, modules and Python's internals, but not from looping for ever or from
building a text of all the memory there is. A template runs in this process, so each limit has a way of its own:

- A loop is ended by an exception that another thread raises in the template's.
- An allocation fails once the process has grown by MEMORY.
- One call of the interpreter that takes for ever lets no other thread run. The operator for that, `**`, is refused
  before the template runs; against any other, the system ends the process (by SIGVTALRM) after CPU_SECONDS.
"""

import ctypes
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from jinja2 import Environment, TemplateSyntaxError

SECONDS = 10.0
CPU_SECONDS = 60.0
MEMORY = 512 * 2**20  # bytes
CHARACTERS = 16 * 2**20  # of a rendered row
POLLING = 0.25  # seconds

T = TypeVar("T")


class TemplateLimitError(Exception):
    """A template took more than it may."""


class _OutOfTimeError(Exception):
    """Raised in the template's thread."""


class _Watch:
    """Raises `_OutOfTimeError` in the thread that is beyond its time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._end = 0.0
        self._raised = False
        threading.Thread(target=self._run, name="template-limits", daemon=True).start()

    def begin(self) -> None:
        with self._lock:
            self._thread, self._end, self._raised = threading.get_ident(), time.monotonic() + SECONDS, False

    def end(self) -> None:
        """Stop watching; an exception that may be on its way is waited for, since it would strike elsewhere."""
        with self._lock:
            self._thread = None
            raised = self._raised
        for _ in range(100 if raised else 0):
            time.sleep(0.001)

    def _run(self) -> None:
        while True:
            time.sleep(POLLING)
            with self._lock:
                if self._thread is not None and not self._raised and time.monotonic() > self._end:
                    self._raised = True
                    exception = ctypes.py_object(_OutOfTimeError)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), exception)


_watch: _Watch | None = None
_one_at_a_time = threading.Lock()  # limits are the process's


def within_limits(render: Callable[[], T]) -> T:
    """Return what `render` returns.

    Raises:
        TemplateLimitError: it takes too long, or too much memory.
    """
    global _watch
    with _one_at_a_time:
        _watch = _watch or _Watch()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        allowed = _address_space() + MEMORY
        try:
            _watch.begin()
            signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
            resource.setrlimit(resource.RLIMIT_AS, (allowed if soft < 0 else min(soft, allowed), hard))
            try:
                return render()
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                _watch.end()
        except _OutOfTimeError:
            raise TemplateLimitError(f"takes more than {SECONDS:g} s") from None
        except MemoryError:
            raise TemplateLimitError(f"takes more than {MEMORY >> 20} MiB of memory") from None


@lru_cache
def require_harmless(source: str) -> None:
    """Refuse a template with a power, whose digits can take for ever; no chat needs one.

    Raises:
        TemplateLimitError: there is one.
    """
    try:
        tokens = list(Environment(autoescape=True).lex(source))
    except TemplateSyntaxError:
        return  # which rendering says better
    for line, kind, value in tokens:
        if kind == "operator" and value == "**":
            raise TemplateLimitError(f"has a power (**) in line {line}, which no chat needs")


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
