"""Trackers: where a run's numbers are sent beside metrics.jsonl. Each is an extra, imported only when asked for."""

import importlib
import importlib.util
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from zagora_jax.errors import UserError

PROJECT = "zagora-jax"
LOGIN = 30  # seconds in which W&B may ask for a key
START = 60  # seconds in which it may begin


class Tracker(Protocol):
    """What takes numbers; each call may take long or fail, and none is made in the training's thread."""

    def __init__(self, run: Path, identity: str, options: Mapping[str, Any], first_step: int):
        """Begin, or go on.

        Args:
            run: the run directory, which gives the name.
            identity: of the run, the same when it goes on.
            options: of the training.
            first_step: finished steps; what was sent of later ones does not hold any more.
        """

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send a step's numbers; those of a step may come in several calls."""

    def close(self) -> None:
        """Send what is left."""


class TensorBoard:
    """Writes event files into `tensorboard/` of the run directory: `tensorboard --logdir runs`."""

    def __init__(self, run: Path, identity: str, options: Mapping[str, Any], first_step: int):
        # As torch.utils.tensorboard does: these need neither TensorFlow nor torch.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run / "tensorboard"))
        if first_step:  # steps from here on replace what an earlier file says of them
            self._writer.add_event(Event(step=first_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send a step's numbers."""
        values = [self._summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=values)))

    def close(self) -> None:
        """Send what is left."""
        self._writer.close()


class WeightsAndBiases:
    """Sends to Weights & Biases; its own variables, such as WANDB_PROJECT and WANDB_MODE=offline, count."""

    def __init__(self, run: Path, identity: str, options: Mapping[str, Any], first_step: int):
        wandb = importlib.import_module("wandb")
        project = None if "WANDB_PROJECT" in os.environ else PROJECT
        settings = wandb.Settings(login_timeout=LOGIN, init_timeout=START, console="off")
        self._run = wandb.init(
            project=project, name=run.name, id=identity, resume="allow", config=dict(options), dir=str(run),
            settings=settings,
        )  # fmt: skip

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send a step's numbers."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class Trackio:
    """Writes to trackio's own files, or to a Space, as its own variables say."""

    def __init__(self, run: Path, identity: str, options: Mapping[str, Any], first_step: int):
        self._trackio = importlib.import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._trackio.init(project=project, name=f"{run.name}-{identity}", resume="allow", config=dict(options))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send a step's numbers."""
        self._trackio.log(dict(numbers), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._trackio.finish()


TRACKERS: Mapping[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}


def require_installed(name: str) -> None:
    """Refuse a tracker whose extra is missing.

    Raises:
        UserError: tells what installs it.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # a folder of that name, such as W&B makes, counts as a package of its own
        raise UserError(f"--track {name}: needs {name}: install it with `pip install 'zagora-jax[{name}]'`")
