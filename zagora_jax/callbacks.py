"""What others attach to a run: callbacks, which the trainer tells what happens, as it happens.

They are called one after the other in the training's own thread, between steps, so that what takes long there makes the
run wait. What a callback raises ends the run, which saves its last finished step first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # whoever makes callbacks needs no jax for it
    from zagora_jax.config import TrainConfig
    from zagora_jax.trainer import TrainResult


@dataclass(frozen=True)
class Begin:
    """A run begins or goes on: the step is compiled, the weights are in place.

    Attributes:
        config: the options.
        run_directory: where the run writes; config.yaml, report.json and layout.json are there.
        first_step: finished steps, 0 where it begins.
        total_steps: all steps of the run.
        facts: what the banner says, by name.
    """

    config: "TrainConfig"
    run_directory: Path
    first_step: int
    total_steps: int
    facts: Mapping[str, str]


@dataclass(frozen=True)
class Step:
    """An optimizer step is finished.

    Attributes:
        step: its number, from 1.
        total_steps: all steps of the run.
        metrics: its line of metrics.jsonl, not yet written: a callback may add numbers under names of its own.
        stops: why the run is to end behind this step, for each who asked.
    """

    step: int
    total_steps: int
    metrics: dict[str, Any]
    stops: list[str] = field(default_factory=list)

    def stop(self, reason: str) -> None:
        """Ask the run to end behind this step, which is saved; `reason` is said, and stands in report.json."""
        self.stops.append(reason)


@dataclass(frozen=True)
class Evaluated:
    """Held-out rows were evaluated, between steps, before the first or after the last.

    Attributes:
        step: finished steps.
        total_steps: all steps of the run.
        numbers: "eval_loss", by which runs are compared, the mean over supervised tokens (an embedder's: over queries);
            "eval_loss.NAME" of a set of that name; of an embedder "eval_recall_at_1" and more.
        supervised_tokens: of "eval_loss".
    """

    step: int
    total_steps: int
    numbers: Mapping[str, float]
    supervised_tokens: int


@dataclass(frozen=True)
class Sample:
    """A prompt, and what the model in training makes of it."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Sampled:
    """The model has answered the prompts of `samples.prompts`, after `step` finished steps."""

    step: int
    samples: Sequence[Sample]


@dataclass(frozen=True)
class Saved:
    """A step's state and adapter are on the disk, proven readable; told between later steps, or behind the last.

    Attributes:
        step: the one that was saved.
        run_directory: where; the state is in checkpoints/STEP.
    """

    step: int
    run_directory: Path


@dataclass(frozen=True)
class End:
    """Nothing more comes.

    Attributes:
        run_directory: of the run.
        result: what came of it; None where it broke off.
        error: what broke it off: Interrupted or an error; None where it is finished.
    """

    run_directory: Path
    result: "TrainResult | None"
    error: BaseException | None


class Callback:
    """Does nothing at any of a run's events; overwrite what should do something."""

    def on_begin(self, event: Begin) -> None:
        """Hear that the run begins."""

    def on_step(self, event: Step) -> None:
        """Hear of a finished step, after its evaluation, if any, and before its metrics are written."""

    def on_evaluate(self, event: Evaluated) -> None:
        """Hear of an evaluation."""

    def on_sample(self, event: Sampled) -> None:
        """Hear of sampled texts."""

    def on_save(self, event: Saved) -> None:
        """Hear of a save that is complete."""

    def on_end(self, event: End) -> None:
        """Hear that the run is over; called once wherever `on_begin` was, whatever ended the run."""


Event = TypeVar("Event", Begin, Step, Evaluated, Sampled, Saved, End)

_HOOKS: Mapping[type, Callable[[Callback, Any], None]] = {
    Begin: lambda callback, event: callback.on_begin(event),
    Step: lambda callback, event: callback.on_step(event),
    Evaluated: lambda callback, event: callback.on_evaluate(event),
    Sampled: lambda callback, event: callback.on_sample(event),
    Saved: lambda callback, event: callback.on_save(event),
    End: lambda callback, event: callback.on_end(event),
}


class Callbacks:
    """The callbacks of a run, in the order in which they are told."""

    def __init__(self, callbacks: Sequence[Callback] = ()):
        self._callbacks = tuple(callbacks)
        self._has_begun = False

    def tell(self, event: Event) -> None:
        """Call each callback's hook for `event`; of an end they hear only after a beginning."""
        if isinstance(event, End):
            if not self._has_begun:
                return
            self._has_begun = False
        self._has_begun |= isinstance(event, Begin)
        for callback in self._callbacks:
            _HOOKS[type(event)](callback, event)
