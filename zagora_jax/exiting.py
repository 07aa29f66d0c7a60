"""Ending the process at once, from any thread, where the main thread cannot."""

import os
from collections.abc import Callable
from typing import NoReturn

Tell = Callable[[int, str], None]

_tell: Tell | None = None


def tell_before(tell: Tell | None) -> None:
    """Have `tell` called with the status and the reason before the process is ended; None: nobody is told."""
    global _tell
    _tell = tell


def exit_at_once(status: int, reason: str) -> NoReturn:
    """End the process with a status, without unwinding; nothing is half written, see `checkpoints.atomic`."""
    if _tell is not None:
        _tell(status, reason)
    os._exit(status)
