"""Files and directories that get their final name only when they are complete."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from zagora_jax.errors import UserError


def _temporary_sibling(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def fsync_directory(directory: Path) -> None:
    """Make the names inside `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Make all files in and below `directory`, and their names in it, durable."""
    for parent, _, names in os.walk(directory):
        for name in names:
            with Path(parent, name).open("rb") as file:
                os.fsync(file.fileno())
        fsync_directory(Path(parent))


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary sibling of `path` for writing; it takes the place of `path` when the block ends well.

    After an exception the temporary file is gone and `path` is what it was before.
    """
    temporary = _temporary_sibling(path)
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # Writing to a full disk names no file. An error without a number has no place for one either: its text is all.
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    fsync_directory(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` as the whole content of `path`, atomically and durably."""
    with atomic_file(path) as file:
        file.write(data)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty temporary sibling directory that is renamed to `path` when the block ends well.

    Raises:
        UserError: `path` exists already and is not an empty directory.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists already and is not an empty folder: name another one, or remove it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_sibling(path)
    temporary.mkdir()
    try:
        yield temporary
        fsync_tree(temporary)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_directory(path.parent)
