"""The directory that an export writes: it gets its name only when it is complete."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zagora_jax.checkpoints.atomic import fsync_directory, fsync_tree
from zagora_jax.errors import UserError

# A directory that holds one of these can be an earlier export, and only such a one is ever replaced.
_MARKS = ("config.json", "adapter_config.json")


@contextmanager
def export_directory(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield an empty directory beside `path` that takes its place when the block ends well.

    What an interrupted export left beside `path` is removed first; after an exception, `path` is as it was.

    Args:
        path: New, empty, or, where `overwrite`, an earlier export.
        overwrite: Whether an earlier export is replaced. It stays until the new one is complete.

    Raises:
        UserError: `path` may not be replaced, cannot be written, or another export is writing it.
    """
    path = path.resolve()
    temporary, replaced = path.with_name(f".{path.name}.exporting"), path.with_name(f".{path.name}.replaced")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _claimed(temporary, path):
            try:
                _settle(path, replaced)
                check_replaceable(path, overwrite=overwrite)
                yield temporary
                fsync_tree(temporary)
                if path.exists():
                    os.rename(path, replaced)
                os.rename(temporary, path)
                fsync_directory(path.parent)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
                _settle(path, replaced)
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror or error}") from error


def check_replaceable(path: Path, *, overwrite: bool) -> None:
    """Refuse a `path` that holds something else than what may be replaced."""
    if path.exists() and not path.is_dir():
        raise UserError(f"--to {path}: is a file; give a directory")
    names = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    if names and not overwrite:
        raise UserError(f"--to {path}: is not empty (it holds {names[0]}). Give --overwrite, or another directory")
    if names and not any(mark in names for mark in _MARKS):
        raise UserError(
            f"--to {path}: holds no earlier export (neither {' nor '.join(_MARKS)}), so --overwrite does not replace "
            f"it; found {', '.join(names[:3])}. Give another directory"
        )


@contextmanager
def _claimed(temporary: Path, path: Path) -> Iterator[None]:
    """Make `temporary`, or empty what a dead export left under its name, and keep other exports from it.

    The lock is the directory's own and ends with the process.
    """
    temporary.mkdir(exist_ok=True)
    descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(descriptor), os.stat(temporary))
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:  # another export holds it, or renamed it just now
            raise UserError(f"--to {path}: another export is writing there now")
        for entry in temporary.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        yield
    finally:
        os.close(descriptor)


def _settle(path: Path, replaced: Path) -> None:
    """Undo or finish a replacement that was broken off between its two renames."""
    if replaced.exists() and not path.exists():
        os.rename(replaced, path)
    shutil.rmtree(replaced, ignore_errors=True)
