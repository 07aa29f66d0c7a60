"""Steps whose update is left out: they are counted, named with their rows, and too many in a row end the run."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from zagora_jax.config import TrainConfig
from zagora_jax.data.batches import Batches
from zagora_jax.data.sources import Location
from zagora_jax.errors import UserError

MAX_IN_A_ROW = 5
# Places named on the console; metrics.jsonl has them all.
PLACES_SAID = 10


class SkippedSteps:
    """Watches the metrics of one step after the other.

    Attributes:
        total: steps that were left out so far.
        in_a_row: those of them since the last that was not.
    """

    def __init__(
        self,
        config: TrainConfig,
        batches: Batches,
        say: Callable[[str], None],
        before: Iterable[Mapping[str, Any]] = (),
    ):
        """Begin after the steps whose metrics are `before`."""
        self._config, self._batches, self._say = config, batches, say
        self.total = self.in_a_row = 0
        for metrics in before:
            self._count(metrics)

    def after(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Count a step, and return what its metrics should say besides: the rows of one that was left out."""
        self._count(metrics)
        if not self.in_a_row:
            return {}
        places = self._places(int(metrics["step"]))
        if not _seeks_scale(metrics):
            self._say(
                f"warning: step {metrics['step']}: {_reason(metrics)}: its update is left out ({self.in_a_row} in a "
                f"row, {self.total} in all). Its rows: {in_words(places, PLACES_SAID)}"
            )
        return {"rows": [str(place) for place in places]}

    def stop_if_diverged(self, metrics: Mapping[str, Any], checkpoints: Path) -> None:
        """End a run that does not recover.

        Raises:
            UserError: too many updates in a row were left out, or loss_spike_action says stop.
        """
        if metrics.get("spike") and self._config.loss_spike_action == "stop":
            raise UserError(
                f"step {metrics['step']}: {_reason(metrics)}, and --loss-spike-action is stop; the last saved state "
                f"stands in {checkpoints}"
            )
        if self.in_a_row >= MAX_IN_A_ROW and not _seeks_scale(metrics):
            raise UserError(
                f"step {metrics['step']}: loss or gradients were not finite, or the loss was a spike, in "
                f"{self.in_a_row} steps in a row, whose updates were skipped; the last saved state stands in "
                f"{checkpoints}. Look at the rows that are named above. Try a lower learning_rate, or compute_dtype "
                "float32 or bfloat16 in place of float16"
            )

    def _count(self, metrics: Mapping[str, Any]) -> None:
        left_out = not metrics["finite"] or bool(metrics.get("spike"))
        self.total += left_out
        self.in_a_row = self.in_a_row + 1 if left_out else 0

    def _places(self, step: int) -> list[Location]:
        locations = self._batches.examples.locations
        return sorted(locations[row] for rows in self._batches.rows_of_step(step - 1) for row in rows)


def _seeks_scale(metrics: Mapping[str, Any]) -> bool:
    """Whether float16 gradients overflowed at a loss scale that can be lower still: that is no fault."""
    return not metrics["finite"] and metrics.get("loss_scale", 1.0) > 1.0


def _reason(metrics: Mapping[str, Any]) -> str:
    if metrics["finite"]:
        return f"the loss {metrics['loss']:.4g} is a spike, usual is {metrics['usual_loss']:.4g}"
    return f"loss or gradients are not finite (loss {metrics['loss']:.4g}, gradient norm {metrics['grad_norm']:.4g})"


def in_words(places: Iterable[Location], limit: int) -> str:
    """Name places by file, runs of numbers as one: `rows.jsonl, lines 3, 7-9`."""
    numbers: dict[tuple[str, str], list[int]] = defaultdict(list)
    for place in places:
        numbers[place.file, place.unit].append(place.number)
    parts = []
    for (file, unit), found in numbers.items():
        runs = _runs(found)
        shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:limit])
        plural = "s" if len(found) > 1 else ""
        parts.append(f"{file}, {unit}{plural} {shown}{', ...' if len(runs) > limit else ''}")
    return "; ".join(parts)


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Join neighbouring numbers of an ascending list."""
    breaks = [index for index, (one, other) in enumerate(pairwise(numbers), start=1) if other > one + 1]
    return [(numbers[start], numbers[stop - 1]) for start, stop in pairwise([0, *breaks, len(numbers)])]
