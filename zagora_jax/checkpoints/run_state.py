"""Saving and restoring a run's state with Orbax."""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from flax import nnx

from zagora_jax.checkpoints.atomic import fsync_directory
from zagora_jax.errors import UserError
from zagora_jax.train_state import TrainState

# Where a state that is no longer wanted is renamed to before its files are removed.
DELETED = ".deleted"


class StateWriter:
    """Writes numbered states to a run's checkpoints/ folder, where each appears and disappears in one piece."""

    def __init__(self, directory: Path, *, keep: int, after_step: int):
        """Open the folder, making it where needed, and remove what broken saves left behind.

        Args:
            directory: the folder.
            keep: how many of the newest states are kept.
            after_step: the step that the run goes on from; states beyond it are removed.
        """
        self._directory = directory.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=True,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=False,
            todelete_subdir=DELETED,
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        for step in self._manager.all_steps():
            if step > after_step:
                self._manager.delete(step)
        self._settle()

    def save(self, state: TrainState, progress: Mapping[str, Any]) -> None:
        """Write `state`, and beside it the JSON-serialisable `progress`.

        Raises:
            OSError: the disk is full or broken; the states saved before stand.
        """
        # As arrays of the host, which can be restored to any devices.
        items = {name: ocp.args.StandardSave(item) for name, item in jax.device_get(_parts(state)).items() if item}
        try:
            saved = self._manager.save(
                int(state.step),
                args=ocp.args.Composite(**items, progress=ocp.args.JsonSave(dict(progress))),
            )
        except ValueError as error:  # what tensorstore makes of an error of the operating system
            code = re.search(r"os_error_code='(\d+)'", str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(self._directory)) from error
        if not saved:  # Orbax says so where a state of this or a later step exists.
            raise RuntimeError(f"{self._directory}: the state of step {state.step} was not saved")
        self._settle()

    def _settle(self) -> None:
        """Make the names in the folder durable, then free the space of states that have none any more."""
        fsync_directory(self._directory)
        shutil.rmtree(self._directory / DELETED, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()


class SavedStates:
    """The complete states in a run's checkpoints/ folder, for reading; nothing in the folder is changed."""

    def __init__(self, directory: Path):
        """Open the folder; one that does not exist holds no state."""
        self._directory = directory.absolute()
        self._manager = ocp.CheckpointManager(self._directory, options=ocp.CheckpointManagerOptions(create=False))

    def latest(self) -> int | None:
        """Return the step of the newest state."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Return the steps of all states, oldest first."""
        return sorted(self._manager.all_steps())

    def progress(self, step: int) -> dict[str, Any]:
        """Read what was saved beside the state of `step`.

        Raises:
            UserError: the files of the state are damaged; so do the other readers.
        """
        return self._read(step, progress=ocp.args.JsonRestore())

    def restore(self, step: int, like: TrainState, *, exchange: bool = True) -> TrainState:
        """Read the state of `step` into arrays like those of `like` (which gives shapes, dtypes and shardings).

        Args:
            step: the step.
            like: the state before the first step.
            exchange: whether to read what the exchange of gradients keeps, or to leave that as it is in `like`.
        """
        restored: dict[str, Any] = {}
        for name, item in _parts(like).items():
            if item and name != "adapters" and (exchange or name != "exchange"):
                target = jax.tree.map(ocp.utils.to_shape_dtype_struct, item)
                restored |= self._read(step, **{name: ocp.args.StandardRestore(target)})
        return like._replace(adapters=self.adapters(step, like.adapters), **restored)

    def adapters(self, step: int, like: nnx.State) -> nnx.State:
        """Read the adapter of `step` into arrays like those of `like`."""
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(like))
        adapters = jax.tree.map(lambda leaf: leaf, like)
        nnx.replace_by_pure_dict(adapters, self._read(step, adapters=ocp.args.StandardRestore(target)))
        return adapters

    def _read(self, step: int, **item: ocp.args.CheckpointArgs) -> Any:
        """Read one item of a state."""
        (name,) = item
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**item))[name]
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0][:200]
            raise UserError(
                f"{self._directory / str(step)}: the checkpoint is damaged ({reason}). The checkpoints here are "
                f"{', '.join(map(str, self.steps()))}: use another one, or remove this one"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()


def _parts(state: TrainState) -> dict[str, dict[str, Any]]:
    """Part a state into the items of a checkpoint.

    They are the adapter, which other commands read too; what only training needs; and of that, for its own, what the
    exchange of gradients keeps, whose shapes depend on the mesh.
    """
    training = {name: value for name, value in state._asdict().items() if value is not None}
    adapters = nnx.to_pure_dict(training.pop("adapters"))
    exchange = {name: training.pop(name) for name in ("residuals", "pending") if name in training}
    return {
        "adapters": adapters,
        "training": training,
        "exchange": {name: kept for name, kept in exchange.items() if jax.tree.leaves(kept)},
    }
