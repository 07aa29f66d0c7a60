"""Whether, and from where, a run goes on."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from zagora_jax.base import BaseModel
from zagora_jax.checkpoints.run_state import SavedStates
from zagora_jax.config import TrainConfig
from zagora_jax.data.batches import BatchIterator
from zagora_jax.errors import UserError
from zagora_jax.run_directory import RunDirectory, completed_options

# Options that may differ when a run goes on: they change neither a step's numbers nor the order of rows.
FREE_OPTIONS = {
    "model",  # compared by fingerprint
    "data",  # likewise
    "epochs",  # compared by the number of steps that comes of them
    "max_steps",  # likewise
    "output",
    "eval_data",
    "eval_sets",
    "log_every",
    "profile_step",
    "eval_every",
    "save_every",
    "keep_checkpoints",
    "keep_best",
    "early_stopping",
    "samples",
    "loss_spike_action",
    "stop_grace",
    "pause_above_celsius",
    "track",
    "resume",
    "adapter",  # where training begins; its settings are compared as the lora options
    "quantized_cache",
    "remat",
    "offload",
    "device_memory_limit",
    "plan_check",
    "strategy",  # where arrays lie changes no number but by the order of sums
    "stage_layers",  # likewise
    "stage_form",  # likewise
    "balance",  # likewise
    "devices",  # likewise
    "coordinator",  # likewise
    "process_count",  # likewise
    "process_index",  # likewise
    "mesh",  # likewise
    "micro_batch_size",  # likewise; how many rows a step has is compared with the data
    "gradient_accumulation_steps",  # likewise
    "gradient_compression",  # what an exchange keeps is compared with `exchange`, and begun anew
    "gradient_exchange",  # likewise
}
# Likewise, in a group whose other options must not differ.
FREE_IN_GROUPS: dict[str, Any] = {"sites": {"folder", "wait"}}


@dataclass(frozen=True)
class Progress:
    """What is saved beside a state, so that a change of model, data or options is noticed when it is resumed.

    Attributes:
        model: the base model's fingerprint.
        data: the state of the iterator over batches.
        options: every option that decides what the steps compute.
        total_steps: the steps that the learning rate falls over; None where it is constant, so that a run can be
            made longer.
        exchange: what the state of the exchange of gradients belongs to.
        pending: whether there are gradients that the next step applies.
    """

    model: str
    data: dict[str, Any]
    options: dict[str, Any]
    total_steps: int | None
    exchange: dict[str, Any]
    pending: bool

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        base: BaseModel,
        batches: BatchIterator,
        total_steps: int,
        exchange: dict[str, Any],
    ) -> "Progress":
        """Describe the run that `config` asks for, as it stands at the next batch of `batches`."""
        return cls(
            model=base.fingerprint(),
            data=batches.get_state(),
            options=config.model_dump(mode="json", exclude={**dict.fromkeys(FREE_OPTIONS, True), **FREE_IN_GROUPS}),
            total_steps=None if config.schedule == "constant" and not config.warmup_ratio else total_steps,
            exchange=exchange,
            pending=False,
        )


@dataclass(frozen=True)
class SavedPoint:
    """The finished step that a run goes on from, and what was saved beside its state."""

    step: int
    progress: Progress


def find_saved(
    directory: RunDirectory,
    config: TrainConfig,
    present: Progress,
    batches: BatchIterator,
    say: Callable[[str], None],
) -> SavedPoint | None:
    """Return where `config` says to go on from, None for a beginning; then `batches` stands at the next batch.

    A damaged checkpoint that was not asked for by its name is passed over for the one before, and `say` is told.

    Raises:
        UserError: there is no such checkpoint, or none that is not damaged; or model, data or options are not those
            that it was saved with.
    """
    if not config.resume:
        return None
    states = SavedStates(directory.checkpoints)
    step = states.newest_intact(say) if config.resume is True else _step_of(Path(config.resume), directory, states)
    if step is None:
        directory.require_no_result()
        return None
    recorded = states.progress(step)
    path = directory.checkpoints / str(step)
    if recorded.keys() != {field.name for field in fields(Progress)}:
        raise UserError(
            f"{path}: progress: expected {', '.join(field.name for field in fields(Progress))}, found "
            f"{', '.join(recorded) or 'nothing'}: another version of zagora-jax saved it. Go on with that version, or "
            "begin a new run"
        )
    saved = Progress(**recorded)
    _compare(saved, present, config, path)
    try:
        batches.set_state(saved.data)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return SavedPoint(step, saved)


def _step_of(path: Path, directory: RunDirectory, states: SavedStates) -> int:
    if path.resolve().parent != directory.checkpoints.resolve() or path.name not in map(str, states.steps()):
        raise UserError(
            f"--resume {path}: not a checkpoint of this run; those of {directory.checkpoints} are "
            f"{', '.join(map(str, states.steps())) or 'none'}"
        )
    states.check(int(path.name))
    return int(path.name)


def _compare(saved: Progress, present: Progress, config: TrainConfig, path: Path) -> None:
    if saved.model != present.model:
        raise UserError(f"{path}: was saved with other weights than those that --model {config.model} holds now")
    before = completed_options(saved.options)
    changes = list(_changes(before, present.options))
    if changes:
        raise UserError(
            f"{path}: was saved with other options: {'; '.join(changes)}. Set them back, or begin a new run"
        )
    if saved.total_steps != present.total_steps:
        raise UserError(
            f"{path}: was saved in a run of {saved.total_steps} steps, this one would have {present.total_steps}, and "
            f"the {config.schedule} schedule's learning rates depend on that number. Set epochs or max_steps back, or "
            "begin a new run; with --schedule constant and no --warmup-ratio a run can be made longer at any time"
        )


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], group: str = "") -> Iterator[str]:
    """Name each option that differs, as it is written on the command line."""
    for name, value in now.items():
        if isinstance(value, Mapping) and isinstance(before[name], Mapping) and value.keys() <= before[name].keys():
            yield from _changes(before[name], value, f"{group}{name}.")
        elif before[name] != value:
            yield f"{group}{name} {before[name]!r} -> {value!r}"
