"""Data files in: JSON Lines, JSON, Parquet and Arrow, also compressed with gzip or Zstandard, read row by row.

Reading is strict, since a row that is skipped or cut in silence is a row that is not trained on. A file is never held
in memory, only the row at hand and a buffer, so a file may be larger than memory.
"""

import difflib
import gzip
import io
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import pyarrow

from zagora_jax.data.arrow_rows import read_arrow, read_parquet
from zagora_jax.data.json_rows import read_json, read_json_lines
from zagora_jax.data.sources import SourceRow, require_plain
from zagora_jax.errors import UserError
from zagora_jax.git_lfs import STUB

# Of a frame, and of those that readers skip (RFC 8878), such as pzstd writes before each frame.
ZSTANDARD_MAGIC = (b"\x28\xb5\x2f\xfd", *(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60)))
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")

Reader = Callable[[BinaryIO, str], Iterator[SourceRow]]


class _Compression(NamedTuple):
    name: str
    magic: tuple[bytes, ...]
    open: Callable[[BinaryIO], BinaryIO]


def _open_gzip(stream: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=stream, mode="rb"))


def _open_zstandard(stream: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(stream, "zstd"), 1 << 20))  # type: ignore[type-var]


_READERS: dict[str, Reader] = {
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
_SEEKING = (read_parquet, read_arrow)  # they go back and forth in a file, so it has to be decompressed first
_COMPRESSIONS = {
    ".gz": _Compression("gzip", (b"\x1f\x8b",), _open_gzip),
    ".zst": _Compression("Zstandard", ZSTANDARD_MAGIC, _open_zstandard),
}

SUFFIXES = tuple(suffix + ending for suffix in _READERS for ending in ("", *_COMPRESSIONS))


def read_rows(file: str | Path) -> Iterator[SourceRow]:
    """Yields the rows of one data file, in order.

    Raises:
        UserError: the file is missing, empty, of an unknown kind, damaged, or holds a row that is not an object of
            plain JSON values.
    """
    name = str(file)
    reader, compression = _kind(name)
    count = 0
    with _open(name, compression) as stream:
        try:
            for row in reader(_seekable(stream) if compression and reader in _SEEKING else stream, name):
                count += 1
                require_plain(row.value, row.location, "")
                yield row
        except (EOFError, zlib.error, OSError) as error:
            if compression is None:
                raise UserError(f"{name}: cannot be read after row {count} ({error})") from error
            raise UserError(
                f"{name}: damaged {compression.name} data after row {count} ({error}); write or fetch it again"
            ) from error
    if not count:
        raise UserError(f"{name}: expected at least one row, found an empty file")


def _kind(name: str) -> tuple[Reader, _Compression | None]:
    """The reader that a file's suffix asks for, and how the file is compressed."""
    ending = next((ending for ending in _COMPRESSIONS if name.endswith(ending)), "")
    stem = name.removesuffix(ending)
    for suffix, reader in _READERS.items():
        if stem.endswith(suffix):
            return reader, _COMPRESSIONS.get(ending)
    raise UserError(
        f"{name}: unknown kind of data file; expected a name that ends in one of {', '.join(_READERS)}, also with "
        f"{' or '.join(_COMPRESSIONS)} behind it"
    )


def _open(name: str, compression: _Compression | None) -> BinaryIO:
    """Opens a data file for reading, decompressed, after a look at its first bytes."""
    path = Path(name)
    if not path.exists():
        raise UserError(f"{name}: no such file{nearest(path)}")
    if not path.is_file():  # opening a pipe would wait for ever
        raise UserError(f"{name}: expected a file, found {'a directory' if path.is_dir() else 'something else'}")
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UserError(f"{name}: cannot be opened ({error.strerror})") from error
    head = stream.read(64)
    stream.seek(0)
    if complaint := _complain(head, compression):
        stream.close()
        raise UserError(f"{name}: {complaint}")
    return compression.open(stream) if compression else stream


def _complain(head: bytes, compression: _Compression | None) -> str | None:
    """What is wrong with a file that begins with these bytes."""
    if head.startswith(STUB):
        return "line 1 is not data but a Git LFS pointer; fetch the file itself with `git lfs pull`"
    if compression:
        if not head:
            return "expected rows, found an empty file"
        ending = next(ending for ending, known in _COMPRESSIONS.items() if known is compression)
        wrong = f"the name ends in {ending}, but the content is not {compression.name} data"
        return None if head.startswith(compression.magic) else wrong
    for ending, known in _COMPRESSIONS.items():
        if head.startswith(known.magic):
            return f"the content is {known.name} data; give the file a name that ends in {ending}"
    if head.startswith(UTF16_MARKS):
        return "expected UTF-8, found the byte-order mark of UTF-16; save the file as UTF-8"
    return None


def _seekable(stream: BinaryIO) -> BinaryIO:
    plain = tempfile.TemporaryFile()  # noqa: SIM115
    shutil.copyfileobj(stream, plain)
    plain.seek(0)
    return cast(BinaryIO, plain)


def nearest(path: Path) -> str:
    """Says which existing file the user may have meant by `path`."""
    if not path.parent.is_dir():
        return f": there is no directory {path.parent}"
    if path.is_symlink():
        return f": it is a link to {path.readlink()}, which is not there"
    siblings = [sibling.name for sibling in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; did you mean {path.with_name(near[0])}?" if near else f" in {path.parent.resolve()}"
