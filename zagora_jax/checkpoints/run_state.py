"""Saving and restoring a run's state with Orbax."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from zagora_jax.step import LossScale, TrainState


class RunStates:
    """The numbered states under a run's checkpoints/ folder; a state appears there only when it is complete."""

    def __init__(self, directory: Path, keep: int):
        """Open the folder, making it where needed; the newest `keep` states are kept."""
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def latest(self) -> int | None:
        """Return the step of the newest complete state."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Return the steps of all complete states, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, progress: Mapping[str, Any]) -> None:
        """Write `state`, and beside it the JSON-serialisable `progress`."""
        # Copied to the host first: the next step donates the device's buffers, which on a CPU are the host's own.
        adapters, rest = jax.tree.map(lambda leaf: np.array(leaf, copy=True), _parts(state))
        self._manager.save(
            int(state.step),
            args=ocp.args.Composite(
                adapters=ocp.args.StandardSave(adapters),
                training=ocp.args.StandardSave(rest),
                progress=ocp.args.JsonSave(dict(progress)),
            ),
        )

    def progress(self, step: int) -> dict[str, Any]:
        """Read what was saved beside the state of `step`."""
        return self._manager.restore(step, args=ocp.args.Composite(progress=ocp.args.JsonRestore()))["progress"]

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Read the state of `step` into arrays like those of `like` (which gives shapes, dtypes and shardings)."""
        _, rest = _parts(like)
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, rest)
        args = ocp.args.Composite(training=ocp.args.StandardRestore(target))
        restored = self._manager.restore(step, args=args)["training"]
        loss_scale = LossScale(**restored["loss_scale"]) if like.loss_scale is not None else None
        return TrainState(
            restored["step"],
            restored["updates"],
            self.adapters(step, like.adapters),
            restored["optimizer"],
            loss_scale,
        )

    def adapters(self, step: int, like: nnx.State) -> nnx.State:
        """Read the adapter of `step` into arrays like those of `like`."""
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(like))
        args = ocp.args.Composite(adapters=ocp.args.StandardRestore(target))
        adapters = jax.tree.map(lambda leaf: leaf, like)
        nnx.replace_by_pure_dict(adapters, self._manager.restore(step, args=args)["adapters"])
        return adapters

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()


def _parts(state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part a state into the adapter, which other commands read too, and what only training needs."""
    rest: dict[str, Any] = {"step": state.step, "updates": state.updates, "optimizer": state.optimizer}
    if state.loss_scale is not None:
        rest["loss_scale"] = state.loss_scale._asdict()
    return nnx.to_pure_dict(state.adapters), rest
