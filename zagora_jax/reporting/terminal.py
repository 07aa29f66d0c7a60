"""What reaches a terminal: text of others' files without its control characters, and no end of work if it is gone."""

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

# Control characters (all of C0 and C1 but tab and line feed) would act on the terminal, not be seen on it. Those below
# 32 and 127 have pictures in Unicode.
_VISIBLE = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
    | {127: 0x2421}
    | {code: f"\\x{code:02x}" for code in range(128, 160)}
)


def visible(text: str) -> str:
    """Return the text with what stands for each control character in its place."""
    return text.translate(_VISIBLE)


class SafeConsole(Console):
    """A console that prints plain text as it stands: no control character, markup of rich's alone, and no emoji codes.

    What is given as `rich.text.Text` must be `visible` already.
    """

    def __init__(self, **options: Any):
        """Take rich's options."""
        super().__init__(highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a Text of a str, as rich does."""
        return super().render_str(visible(text), **options)


class _Enduring(io.FileIO):
    """A standard stream's descriptor: once it cannot be written, what is written to it is lost."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # not blocking, and full
                select.select([], [self], [])
            return written
        except OSError as error:
            self.lost = error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


@dataclass
class Outcome:
    """What became of the standard output; `lost` says why some of it is missing, if a reader may miss it."""

    lost: OSError | None = None


@contextmanager
def enduring_output() -> Iterator[Outcome]:
    """Let the block go on when its output's reader, terminal or disk is gone: a training is worth more than its lines.

    A reader that closed its pipe, as `head` does, has what it wanted; any other loss is in the outcome afterwards.
    Nothing changes where a stream was closed from the start, or is another than Python's own, as in a notebook.
    """
    outcome = Outcome()
    out, err = sys.__stdout__, sys.__stderr__
    if out is None or err is None or sys.stdout is not out or sys.stderr is not err:
        yield outcome
        return
    sys.stdout, sys.stderr = _endure(out), _endure(err)
    try:
        yield outcome
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        lost = sys.stdout.buffer.raw.lost  # type: ignore[attr-defined]
        outcome.lost = None if isinstance(lost, BrokenPipeError) else lost
        sys.stdout, sys.stderr = out, err


def _endure(stream: TextIO) -> TextIO:
    with suppress(OSError):  # the next write tells
        stream.flush()
    raw = _Enduring(stream.fileno(), "w", closefd=False)
    is_terminal = raw.isatty()
    # What the encoding does not have is escaped: a name of a file must not end the command that prints it.
    return io.TextIOWrapper(
        io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=is_terminal or stream is sys.stderr
    )
