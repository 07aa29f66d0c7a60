"""Data files in: JSON Lines, JSON and Parquet, each also gzip-compressed, read row by row.

Reading is strict, since a row that is skipped or cut in silence is a row that is not trained on. Only a line feed
(with or without a carriage return before it) ends a row of JSON Lines: the Unicode separators that
`str.splitlines` also splits at stay inside their string. Raw control characters inside strings are kept.
"""

import difflib
import gzip
import json
import math
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow
import pyarrow.parquet

from zagora_jax.errors import UserError

GIT_LFS_MAGIC = b"version https://git-lfs.github.com/spec/"
GZIP_MAGIC = b"\x1f\x8b"
UTF8_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class Location(NamedTuple):
    """Where a row stands. `number` counts from 1, in lines (JSON Lines) or in rows (JSON, Parquet)."""

    file: str
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


class SourceRow(NamedTuple):
    """One object of a data file, not yet interpreted."""

    value: dict[str, Any]
    location: Location


def read_rows(file: str | Path) -> Iterator[SourceRow]:
    """Yields the rows of one data file, in order.

    Raises:
        UserError: the file is missing, empty, of an unknown kind, damaged, or holds a row that is not an object of
            plain JSON values.
    """
    name = str(file)
    reader, compressed = _kind(name)
    count = 0
    with _open(name, compressed) as stream:
        try:
            for row in reader(stream, name):
                count += 1
                _check_values(row.value, row.location, "")
                yield row
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(
                f"{name}: damaged gzip data after row {count} ({error}); write or fetch it again"
            ) from error
    if not count:
        raise UserError(f"{name}: expected at least one row, found an empty file")


def _kind(name: str) -> tuple[Callable[[BinaryIO, str], Iterator[SourceRow]], bool]:
    """The reader that a file's suffix asks for, and whether the file is compressed."""
    readers = {".jsonl": _read_json_lines, ".json": _read_json, ".parquet": _read_parquet}
    stem = name.removesuffix(".gz")
    for suffix, reader in readers.items():
        if stem.endswith(suffix):
            return reader, stem != name
    known = ", ".join(suffix + ending for suffix in readers for ending in ("", ".gz"))
    raise UserError(f"{name}: unknown kind of data file; expected a name that ends in one of {known}")


def _open(name: str, compressed: bool) -> BinaryIO:
    """Opens a data file for reading, decompressed, after a look at its first bytes."""
    path = Path(name)
    if path.is_dir():
        raise UserError(f"{name}: is a directory; name the data files in it")
    if not path.exists():
        raise UserError(f"{name}: no such file{_suggestion(path)}")
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UserError(f"{name}: cannot be opened ({error.strerror})") from error
    head = stream.read(64)
    stream.seek(0)
    complaint = None
    if head.startswith(GIT_LFS_MAGIC):
        complaint = "line 1 is not data but a Git LFS pointer; fetch the file itself with `git lfs pull`"
    elif compressed and not head.startswith(GZIP_MAGIC):
        complaint = (
            "the name ends in .gz, but the content is not gzip data" if head else "expected rows, found an empty file"
        )
    elif not compressed and head.startswith(GZIP_MAGIC):
        complaint = "the content is gzip data; give the file a name that ends in .gz"
    elif head.startswith(UTF16_MARKS):
        complaint = "expected UTF-8, found the byte-order mark of UTF-16; save the file as UTF-8"
    if complaint:
        stream.close()
        raise UserError(f"{name}: {complaint}")
    return cast(BinaryIO, gzip.GzipFile(fileobj=stream, mode="rb")) if compressed else stream


def _suggestion(path: Path) -> str:
    if not path.parent.is_dir():
        return f": there is no directory {path.parent}"
    siblings = [sibling.name for sibling in path.parent.iterdir() if sibling.is_file()]
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; did you mean {path.with_name(near[0])}?" if near else f" in {path.parent.resolve()}"


def _read_json_lines(stream: BinaryIO, name: str) -> Iterator[SourceRow]:
    for number, line in enumerate(stream, start=1):
        location = Location(name, number)
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


def _read_json(stream: BinaryIO, name: str) -> Iterator[SourceRow]:
    text = _decode(stream.read().removeprefix(UTF8_MARK), name)
    position = _skip_space(text, 0)
    if position == len(text):
        return
    if text[position] != "[":
        hint = "; a file with one object a line is named .jsonl" if text[position] == "{" else ""
        raise UserError(f"{name}: expected a list of objects, found {text[position : position + 40]!r}{hint}")
    position = _skip_space(text, position + 1)
    number = 0
    while text[position : position + 1] != "]":
        number += 1
        location = Location(name, number, "row")
        value, position = _parse(text, position, location)
        yield SourceRow(_expect_object(value, location), location)
        position = _skip_space(text, position)
        separator = text[position : position + 1]
        if separator == ",":
            position = _skip_space(text, position + 1)
        elif separator != "]":
            found = repr(text[position : position + 40]) if separator else "the end of the file"
            raise UserError(f"{location}: expected a comma or the end of the list after the row, found {found}")
    if rest := text[position + 1 :].strip():
        raise UserError(f"{name}: expected the end of the file after the list, found {rest[:40]!r}")


def _read_parquet(stream: BinaryIO, name: str) -> Iterator[SourceRow]:
    if isinstance(stream, gzip.GzipFile):  # Parquet is read from its end, so it has to be decompressed first
        with tempfile.TemporaryFile() as plain:
            shutil.copyfileobj(stream, plain)
            plain.seek(0)
            yield from _read_parquet(plain, name)
        return
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(stream).iter_batches(batch_size=256):
            for value in batch.to_pylist():
                number += 1
                yield SourceRow(value, Location(name, number, "row"))
    except (pyarrow.ArrowException, ValueError, OverflowError, OSError) as error:  # such as a date past the year 9999
        raise UserError(f"{name}: cannot be read as Parquet after row {number} ({error})") from error


def _decode(data: bytes, place: Location | str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        found = f"0x{data[error.start]:02x} at byte {error.start + 1}"
        raise UserError(f"{place}: expected UTF-8, found {found}; save the file as UTF-8") from error


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


def _parse(text: str, position: int, location: Location) -> tuple[Any, int]:
    """Parses the JSON value at `position`; returns it and the position after it."""
    try:
        return _DECODER.raw_decode(text, _skip_space(text, position))
    except json.JSONDecodeError as error:
        found = repr(text[error.pos : error.pos + 40]) if error.pos < len(text) else "the end of the text"
        if location.unit == "line":
            place = f"column {error.pos + 1}"
        else:
            place = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{location}: not JSON at {place}: {error.msg}, found {found}") from error
    except RecursionError as error:
        raise UserError(f"{location}: the values are nested too deeply") from error
    except ValueError as error:  # a duplicate key, or a number of thousands of digits
        raise UserError(f"{location}: {error}") from error


def _skip_space(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\t", "\n", "\r"):
        position += 1
    return position


def _expect_object(value: Any, location: Location, hint: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{location}: expected an object, found {describe(value)}{hint}")
    return value


def _check_values(value: Any, location: Location, field: str) -> None:
    """Refuses what JSON does not have: numbers that are not finite, and half of a surrogate pair."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(value[error.start]):04x}"
            raise UserError(
                f"{location}, field {field or 'name'}: expected Unicode text, found {half}, half of a surrogate pair, "
                f"at character {error.start + 1}"
            ) from error
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{location}, field {field}: expected text, found {describe(value)}, which JSON does not have")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_values(key, location, "")
            _check_values(item, location, f"{field}.{key}" if field else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_values(item, location, f"{field}[{index}]")


def describe(value: Any) -> str:
    """What a value is, in JSON's words, for an error message."""
    names: Iterable[tuple[type, str]] = ((dict, "an object"), (list, "a list"), (str, "a string"), (bool, "a boolean"))
    if value is None:
        return "null"
    for kind, name in names:
        if isinstance(value, kind):
            return name
    if isinstance(value, int | float):
        return f"the number {str(value)[:40]}"
    return f"a value of type {type(value).__name__}"
