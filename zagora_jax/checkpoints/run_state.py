"""A run's numbered states on disk: written with Orbax, proven readable, and checked whenever they are read.

The folder of a state, named by its step, holds an Orbax checkpoint, progress.json and manifest.json. The manifest has
the SHA-256 of every other file and the shape and dtype of every array, so that damage, or another model's state, is
found before any array is used.
"""

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from zagora_jax.checkpoints.atomic import fsync_directory, fsync_tree
from zagora_jax.checkpoints.json_files import read_json_object
from zagora_jax.errors import UserError
from zagora_jax.train_state import TrainState

MANIFEST, PROGRESS = "manifest.json", "progress.json"

Items = dict[str, Any]

# The first process of a run has whole states, and alone writes and reads them.
_ALONE = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0}, barrier_sync_key_prefix="first")


class StateWriter:
    """Writes numbered states to a run's checkpoints/ folder, where each appears and disappears in one piece."""

    def __init__(self, directory: Path, *, keep: int, after_step: int):
        """Open the folder, making it where needed, and remove what broken saves left behind.

        Args:
            directory: the folder.
            keep: how many of the newest states are kept.
            after_step: the step that the run goes on from; states beyond it are removed.
        """
        self._directory, self._keep = directory.absolute(), keep
        self._directory.mkdir(parents=True, exist_ok=True)
        self._remove_remains()
        for step in _steps(self._directory):
            if step > after_step:
                self._remove(step)

    def save(
        self,
        state: TrainState,
        progress: Mapping[str, Any],
        best: int | None = None,
        further: Items | None = None,
    ) -> None:
        """Write `state`, and beside it the JSON-serialisable `progress`; the state of step `best` is kept too.

        `further` are trees of arrays that belong to the step, by name.

        What was written is read back, from the disk, before the state gets its name and older ones are removed.

        Raises:
            OSError: the disk is full or broken, or what was written reads back differently; the states saved before
                stand.
            RuntimeError: there is a state of this step already.
        """
        step = int(state.step)
        final = self._directory / str(step)
        # A name of its own: what a save that failed has abandoned may be written, and made again, for a while yet.
        temporary = self._directory / f".{step}.saving.{secrets.token_hex(6)}"
        if final.exists():
            raise RuntimeError(f"{final}: the state of step {step} is there already")
        items = _items(jax.device_get(state)) | (further or {})
        try:
            self._write(temporary, items, progress)
            _prove(temporary, items)
            os.rename(temporary, final)
        except BaseException:
            self._remove_remains()
            raise
        fsync_directory(self._directory)
        for old in _steps(self._directory)[: -self._keep]:
            if old != best:
                self._remove(old)

    def _write(self, folder: Path, items: Items, progress: Mapping[str, Any]) -> None:
        folder.mkdir()
        with (
            _operating_system_errors(self._directory),
            _raised_exceptions_unlogged(),
            _abandoned_writes_unheard(),
            _checkpointer(ocp.StandardCheckpointHandler(multiprocessing_options=_ALONE)) as orbax,
        ):
            for name, tree in items.items():  # one by one: when one fails, no thread goes on writing others
                orbax.save(folder / name, args=ocp.args.StandardSave(tree))
        (folder / PROGRESS).write_text(json.dumps(dict(progress)), "utf-8")
        arrays = {name: _described(tree) for name, tree in items.items()}
        manifest = {"arrays": arrays, "sha256": {name: _digest(folder / name) for name in _files(folder)}}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
        fsync_tree(folder)

    def _remove_remains(self) -> None:
        """Remove what has no name yet, or no longer."""
        for pattern in (".*.saving*", ".*.removed"):
            for remains in self._directory.glob(pattern):
                _delete(remains, ignore_errors=True)

    def _remove(self, step: int) -> None:
        """Take a state's name away first, so that no half of it is ever found."""
        removed = self._directory / f".{step}.removed"
        os.rename(self._directory / str(step), removed)
        _delete(removed)


class SavedStates:
    """The complete states in a run's checkpoints/ folder, for reading; nothing in the folder is changed."""

    def __init__(self, directory: Path):
        """Name the folder; one that does not exist holds no state."""
        self._directory = directory.absolute()

    def steps(self) -> list[int]:
        """Return the steps of all states, oldest first."""
        return _steps(self._directory)

    def check(self, step: int) -> None:
        """Compare the files of a state with its manifest.

        Raises:
            UserError: a file is missing, or is not what was written.
        """
        problem = _damage(self._directory / str(step))
        if problem is not None:
            raise UserError(
                f"{self._directory / str(step)}: the checkpoint is damaged ({problem}). The checkpoints here are "
                f"{', '.join(map(str, self.steps()))}: use another one, or remove this one"
            )

    def newest_intact(self, say: Callable[[str], None]) -> int | None:
        """Return the step of the newest state that is not damaged, None where there is no state.

        Args:
            say: is told of every damaged state that is passed over.

        Raises:
            UserError: every state is damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            folder = self._directory / str(step)
            problem = _damage(folder)
            if problem is None:
                return step
            instead = "there is none before" if step == steps[0] else "the one before is used"
            say(f"warning: {folder}: the checkpoint is damaged ({problem}); {instead}")
        if steps:
            raise UserError(
                f"{self._directory}: every checkpoint is damaged: {', '.join(map(str, steps))}. Put a copy of one "
                "back, or begin a new run with another --output"
            )
        return None

    def progress(self, step: int) -> dict[str, Any]:
        """Read what was saved beside the state of `step`."""
        return read_json_object(self._directory / str(step) / PROGRESS)

    def restore(self, step: int, like: TrainState, *, exchange: bool = True) -> TrainState:
        """Read the state of `step` as arrays of the host.

        Args:
            step: of a state that `check` has found sound.
            like: the state before the first step, which gives the shapes and dtypes that are expected.
            exchange: whether to read what the exchange of gradients keeps, or to leave that as it is in `like`.

        Raises:
            UserError: an array is missing, or has another shape or dtype.
        """
        restored: dict[str, Any] = {}
        for name, tree in _items(like).items():
            if name != "adapters" and (exchange or name != "exchange"):
                restored |= self._read(step, name, tree)
        return like._replace(adapters=self.adapters(step, like.adapters), **restored)

    def adapters(self, step: int, like: nnx.State) -> nnx.State:
        """Read the adapter of `step`, like `restore`."""
        return _filled(like, self._read(step, "adapters", nnx.to_pure_dict(like)))

    def further(self, step: int, name: str, like: Any) -> Any:
        """Read one of the further trees of arrays of `step`, like `restore`."""
        return self._read(step, name, like)

    def _read(self, step: int, item: str, like: Any) -> Any:
        folder = self._directory / str(step)
        found, expected = self._arrays(step).get(item, {}), _described(like)
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name) != expected.get(name):
                raise UserError(
                    f"{folder}: {item}{name}: expected {_written(expected.get(name))}, found "
                    f"{_written(found.get(name))}: it was saved by another version of zagora-jax, or with another model"
                )
        return _restore(folder / item, like)

    def _arrays(self, step: int) -> dict[str, Any]:
        return read_json_object(self._directory / str(step) / MANIFEST).get("arrays", {})


def _items(state: TrainState) -> Items:
    """Part a state into the items of a checkpoint, without those that are empty.

    They are the adapter, which other commands read too; what only training needs; and of that, for its own, what the
    exchange of gradients keeps, whose shapes depend on the mesh.
    """
    training = {name: value for name, value in state._asdict().items() if jax.tree.leaves(value)}
    adapters = nnx.to_pure_dict(training.pop("adapters"))
    exchange = {name: training.pop(name) for name in ("residuals", "pending") if name in training}
    items = {"adapters": adapters, "training": training, "exchange": exchange}
    return {name: item for name, item in items.items() if item}


def _filled(like: nnx.State, values: Any) -> nnx.State:
    adapters = jax.tree.map(lambda leaf: leaf, like)
    nnx.replace_by_pure_dict(adapters, values)
    return adapters


def _steps(directory: Path) -> list[int]:
    names = [entry.name for entry in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def _delete(entry: Path, *, ignore_errors: bool = False) -> None:
    """Remove what had the name of a state: a folder with all in it; of a link, or a file, the name alone."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=ignore_errors)
    else:
        entry.unlink(missing_ok=True)


def _described(tree: Any) -> dict[str, list[Any]]:
    """Give shape and dtype of every array by its path, as JSON."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): [list(leaf.shape), leaf.dtype.name] for path, leaf in leaves}


def _written(described: list[Any] | None) -> str:
    return "nothing" if described is None else f"{described[1]}{described[0]}"


def _files(folder: Path) -> list[str]:
    """Name all files of a state but the manifest."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in paths if name != MANIFEST)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damage(folder: Path) -> str | None:
    """Say what in a state's folder is not as it was written."""
    try:
        recorded = read_json_object(folder / MANIFEST).get("sha256")
        if not isinstance(recorded, dict):
            return f"{MANIFEST}: expected sha256 to be an object"
        for name in sorted(recorded.keys() | set(_files(folder))):
            if not (folder / name).is_file():
                return f"{name} is missing"
            if recorded.get(name) != _digest(folder / name):
                return f"{name} has not the content that was written"
    except (UserError, OSError) as error:
        return str(error)
    return None


def _prove(folder: Path, items: Items) -> None:
    """Read a state that was just written back from the disk, and compare it bit for bit."""
    for name in _files(folder):
        with (folder / name).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # or else memory would be read, not the disk
    problem = _damage(folder)
    if problem is not None:
        raise _reads_back_differently(folder, problem)
    for item, tree in items.items():
        restored = jax.tree.leaves(_restore(folder / item, tree))
        for (path, leaf), found in zip(jax.tree_util.tree_leaves_with_path(tree), restored, strict=True):
            same = (found.shape, found.dtype) == (leaf.shape, leaf.dtype)
            if not same or not np.array_equal(_bytes(found), _bytes(leaf)):
                name = item + jax.tree_util.keystr(path)
                raise _reads_back_differently(folder, name)


def _reads_back_differently(folder: Path, what: str) -> OSError:
    return OSError(
        errno.EIO, f"what was saved reads back differently: {what}; disk, cable or memory may be broken", folder
    )


def _bytes(array: Any) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _checkpointer(handler: ocp.CheckpointHandler) -> ocp.Checkpointer:
    return ocp.Checkpointer(handler, multiprocessing_options=_ALONE)


def _restore(folder: Path, like: Any) -> Any:
    target = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), like)
    with _checkpointer(ocp.PyTreeCheckpointHandler(multiprocessing_options=_ALONE)) as orbax:
        return orbax.restore(
            folder, ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
        )


@contextmanager
def _operating_system_errors(directory: Path) -> Iterator[None]:
    """Turn what tensorstore makes of an error of the operating system back into one."""
    try:
        yield
    except ValueError as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(directory)) from error


@contextmanager
def _abandoned_writes_unheard() -> Iterator[None]:
    """When writing one array fails, keep the end of the others' writing from being printed, with tracebacks.

    Orbax leaves its event loop at the first failure and closes it, while tensorstore still writes the others. Each that
    ends then wants to tell the loop so, from a thread of tensorstore's, where what is raised has nobody to go to; and
    asyncio logs each failure that nobody asked for.
    """
    print_unraisable, logger = sys.unraisablehook, logging.getLogger("asyncio")

    def without_closed_loops(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            print_unraisable(unraisable)

    def is_heard(record: logging.LogRecord) -> bool:
        return "exception was never retrieved" not in record.getMessage()

    sys.unraisablehook = without_closed_loops
    logger.addFilter(is_heard)
    yield
    # After a failure both stay: what is abandoned may take any time.
    sys.unraisablehook = print_unraisable
    logger.removeFilter(is_heard)


@contextmanager
def _raised_exceptions_unlogged() -> Iterator[None]:
    """Keep Orbax from logging the exception that it raises once for each of its threads, with all their tracebacks."""

    def without_exception(record: logging.LogRecord) -> bool:
        return not record.exc_info

    logger = logging.getLogger("absl")
    logger.addFilter(without_exception)
    try:
        yield
    finally:
        logger.removeFilter(without_exception)
