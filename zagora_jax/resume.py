"""Whether, and from where, a run goes on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zagora_jax.base import BaseModel
from zagora_jax.checkpoints.run_state import RunStates
from zagora_jax.config import TrainConfig
from zagora_jax.data.batches import Batches
from zagora_jax.errors import UserError
from zagora_jax.run_directory import RunDirectory

# Options that may differ when a run goes on: they change neither a step's numbers nor the order of rows.
FREE_OPTIONS = {
    "model",  # compared by fingerprint
    "data",  # likewise
    "output",
    "eval_data",
    "log_every",
    "eval_every",
    "save_every",
    "keep_checkpoints",
    "resume",
    "remat",
}


@dataclass(frozen=True)
class Progress:
    """What is saved beside a state, so that a change of model, data or options is noticed when it is resumed."""

    model: str
    data: str
    options: dict[str, Any]

    @classmethod
    def of(cls, config: TrainConfig, base: BaseModel, batches: Batches) -> "Progress":
        """Describe the run that `config` asks for."""
        options = config.model_dump(mode="json", exclude=FREE_OPTIONS)
        model = base.name if base.checkpoint is None else base.checkpoint.fingerprint()
        return cls(model=model, data=batches.fingerprint, options=options)


def find_state(directory: RunDirectory, config: TrainConfig, progress: Progress) -> int | None:
    """Return the step to resume from, None for a new run.

    Raises:
        UserError: a run stands where a new one is to begin, there is nothing to resume, or model, data or options
            are not those of the saved run.
    """
    if not config.resume:
        if directory.holds_a_run():
            raise UserError(
                f"--output {directory.path}: holds a run already. Give --resume to go on with it, or another --output"
            )
        return None
    with RunStates(directory.checkpoints, config.keep_checkpoints) as states:
        step = _chosen_step(directory, config, states)
        if step is None:
            return None
        saved = Progress(**states.progress(step))
    _compare(saved, progress, config, directory.checkpoints / str(step))
    return step


def _chosen_step(directory: RunDirectory, config: TrainConfig, states: RunStates) -> int | None:
    if config.resume is True:
        return states.latest()
    path = Path(str(config.resume))
    if path.resolve().parent != directory.checkpoints.resolve() or path.name not in map(str, states.steps()):
        raise UserError(
            f"--resume {path}: not a checkpoint of this run; those of {directory.checkpoints} are "
            f"{', '.join(map(str, states.steps())) or 'none'}"
        )
    return int(path.name)


def _compare(saved: Progress, present: Progress, config: TrainConfig, path: Path) -> None:
    if saved.model != present.model:
        raise UserError(f"{path}: was saved with other weights than those that --model {config.model} holds now")
    if saved.data != present.data:
        raise UserError(
            f"{path}: was saved with other rows than those that --data gives now; the order of rows cannot be kept. "
            "Put the old data back, or begin a new run"
        )
    changes = [
        f"{name} {saved.options.get(name)!r} -> {value!r}"
        for name, value in present.options.items()
        if saved.options.get(name) != value
    ]
    if changes:
        raise UserError(
            f"{path}: was saved with other options: {'; '.join(changes)}. Set them back, or begin a new run"
        )
