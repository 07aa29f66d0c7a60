"""Rows of JSON Lines and JSON files.

Only a line feed (with or without a carriage return before it) ends a row of JSON Lines: the Unicode separators that
`str.splitlines` also splits at stay inside their string. Raw control characters inside strings are kept. A JSON file
is one list of objects, of which one at a time is held in memory.
"""

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from zagora_jax.data.sources import Location, SourceRow, describe, require_plain
from zagora_jax.errors import UserError

UTF8_MARK = b"\xef\xbb\xbf"
SPACES = " \t\n\r"

MAX_ROW_BYTES = 256 * 2**20  # parsed, a row takes several times its size
READ_BYTES = 2**20
LONGEST_WORD = len("-Infinity") + 3  # of JSON's that may be cut in two; also an escaped character


def read_json_lines(stream: BinaryIO, name: str) -> Iterator[SourceRow]:
    """Yields a row for every line that is not blank."""
    number = 0
    while line := stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        location = Location(name, number)
        if len(line) > MAX_ROW_BYTES:
            raise _too_long(location)
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            line = line.removeprefix(UTF8_MARK)
        if not line.strip():
            continue
        text = _decode(line, location)
        value, end = _parse(text, 0, location)
        if text[end:].strip():
            raise UserError(
                f"{location}: expected the end of the line after the object, found {text[end:].strip()[:40]!r}"
            )
        hint = "; a list of objects belongs in a .json file" if isinstance(value, list) else ""
        yield SourceRow(_expect_object(value, location, hint), location)


def read_json(stream: BinaryIO, name: str) -> Iterator[SourceRow]:
    """Yields the objects of a list."""
    text = _Window(stream, name)
    first = text.peek()
    if not first:
        return
    if first != "[":
        hint = "; a file with one object a line is named .jsonl" if first == "{" else ""
        raise UserError(f"{name}: expected a list of objects, found {text.ahead()!r}{hint}")
    text.take()
    number = 0
    while text.peek() != "]":
        number += 1
        location = Location(name, number, "row")
        yield SourceRow(_expect_object(text.parse(location), location), location)
        separator = text.peek()
        if separator == ",":
            text.take()
            text.peek()
        elif separator != "]":
            found = repr(text.ahead()) if separator else "the end of the file"
            raise UserError(f"{location}: expected a comma or the end of the list after the row, found {found}")
    text.take()
    if text.peek():
        raise UserError(f"{name}: expected the end of the file after the list, found {text.ahead()!r}")


class _Window:
    """The part of a JSON file that is being looked at; what was taken is forgotten."""

    def __init__(self, stream: BinaryIO, name: str):
        self._stream, self._name = stream, name
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._position = "", 0
        self._place = (1, 1)  # line and column of the position
        self._bytes_read, self._ended = 0, False

    def peek(self) -> str:
        """The next character that is no white space, without taking it; empty at the end of the file."""
        while True:
            self._go_to(_skip_space(self._text, self._position))
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._more(READ_BYTES):
                return ""

    def take(self) -> None:
        """Goes on by a character."""
        self._go_to(self._position + 1)

    def ahead(self) -> str:
        """The next characters, for a message."""
        self._more(40)
        return self._text[self._position : self._position + 40].rstrip()

    def parse(self, location: Location) -> Any:
        """The value at the present position, which is taken."""
        size = READ_BYTES
        while True:
            try:
                value, end = _parse(self._text, self._position, location, self._place)
            except UserError as error:
                if not _may_go_on(error.__cause__, self._text):
                    raise
                if len(self._text) - self._position > MAX_ROW_BYTES:
                    raise _too_long(location) from None
                if not self._more(size):
                    raise
                size *= 2  # so that a long value is not parsed too often
                continue
            if end == len(self._text) and self._more(READ_BYTES):
                continue  # a number may go on
            self._go_to(end)
            return value

    def _go_to(self, position: int) -> None:
        self._place = _place_of(self._text, position, self._position, self._place)
        self._position = position

    def _more(self, size: int) -> bool:
        """Reads on and forgets what was taken; False at the end of the file."""
        if self._ended:
            return False
        data = self._stream.read(size)
        self._ended = not data
        try:
            text = self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            at = self._bytes_read - (len(error.object) - len(data)) + error.start
            raise _not_utf8(self._name, error, at) from error
        self._bytes_read += len(data)
        self._text, self._position = self._text[self._position :] + text, 0
        return not self._ended


def _may_go_on(error: BaseException | None, text: str) -> bool:
    """Whether what could not be parsed may be the beginning of a value that goes on behind `text`."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos > len(text) - LONGEST_WORD


def _place_of(text: str, position: int, known: int, place: tuple[int, int]) -> tuple[int, int]:
    """Line and column of `position`, given those of the position `known` before it."""
    line, column = place
    newline = text.rfind("\n", known, position)
    if newline < 0:
        return line, column + position - known
    return line + text.count("\n", known, position), position - newline


def _decode(data: bytes, place: Location) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(place, error, error.start) from error


def _not_utf8(place: Location | str, error: UnicodeDecodeError, at: int) -> UserError:
    found = f"0x{error.object[error.start]:02x} at byte {at + 1}"
    return UserError(f"{place}: expected UTF-8, found {found}; save the file as UTF-8")


def _too_long(location: Location) -> UserError:
    return UserError(f"{location}: has more than {MAX_ROW_BYTES // 2**20} MiB; cut it into several rows")


class _DuplicateKeyError(ValueError):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise _DuplicateKeyError(f"expected each key once, found {twice!r} twice in one object")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, strict=False)


def _parse(text: str, position: int, location: Location, place: tuple[int, int] = (1, 1)) -> tuple[Any, int]:
    """Parses the JSON value at `position`, whose line and column are `place`; returns it and the position after it."""
    try:
        return _DECODER.raw_decode(text, _skip_space(text, position))
    except json.JSONDecodeError as error:
        found = repr(text[error.pos : error.pos + 40]) if error.pos < len(text) else "the end of the text"
        line, column = _place_of(text, error.pos, position, place)
        where = f"column {column}" if location.unit == "line" else f"line {line}, column {column}"
        raise UserError(f"{location}: not JSON at {where}: {error.msg}, found {found}") from error
    except RecursionError as error:
        raise UserError(f"{location}: the values are nested too deeply") from error
    except ValueError as error:  # a duplicate key, or a number of thousands of digits
        raise UserError(f"{location}: {error}") from error


def parse_text(text: str, location: Location, field: str) -> Any:
    """Parses the JSON that the string in `field` of a row holds, as strictly as a row.

    Raises:
        UserError: it is not JSON, or has a value that JSON does not have.
    """
    inside = f"{location}, field {field}: the text in it"
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, strict=False)
        require_plain(value, location, field)
    except json.JSONDecodeError as error:
        raise UserError(f"{inside} is not JSON: {error}") from error
    except RecursionError as error:
        raise UserError(f"{inside} is nested too deeply") from error
    except ValueError as error:  # a duplicate key, or a number of thousands of digits
        raise UserError(f"{inside}: {error}") from error
    return value


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in SPACES:
        position += 1
    return position


def _expect_object(value: Any, location: Location, hint: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{location}: expected an object, found {describe(value)}{hint}")
    return value
