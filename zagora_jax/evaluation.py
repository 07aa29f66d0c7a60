"""The loss of a model on held-out rows."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from zagora_jax import interruption, processes
from zagora_jax.arrangement import Arrangement
from zagora_jax.data.batches import Batch, Batches
from zagora_jax.hanging import Pace
from zagora_jax.step import ForwardOptions

EvaluationStep = Callable[[Any, Batch], tuple[Any, Any]]


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over supervised tokens (an embedder's: over queries), each by its weight, and their number.

    Attributes:
        loss: the mean.
        supervised_tokens: their number.
        numbers: what else was measured, such as recall_at_1, or loss.NAME of a set of that name.
    """

    loss: float
    supervised_tokens: int
    numbers: Mapping[str, float] = field(default_factory=dict)


class Totals(NamedTuple):
    """Sums over rows: of the loss, of the weights of supervised tokens, and of their numbers."""

    loss: float
    weight: float
    supervised_tokens: int


def compile_evaluation(
    options: ForwardOptions, arrangement: Arrangement, frozen: nnx.State, batches: Batches
) -> EvaluationStep:
    """Compile the evaluation of batches of one shape, over frozen parameters that are laid out already."""
    compiled = arrangement.compile_evaluation(options, batches.abstract())
    return lambda adapters, batch: compiled(adapters, frozen, batch)


def evaluate(step: EvaluationStep, adapters: Any, batches: Iterable[Batch]) -> Evaluation:
    """Divide the loss summed over all batches by the weight of all supervised tokens, however rows are batched.

    Raises:
        ValueError: no token is supervised.
        Interrupted: a signal asked the process to end.
    """
    found = totals(step, adapters, batches)
    return Evaluation(found.loss / found.weight, found.supervised_tokens)


def totals(step: EvaluationStep, adapters: Any, batches: Iterable[Batch]) -> Totals:
    """Sum over all batches; see `evaluate`."""
    total, weight, count = 0.0, 0.0, 0
    pace = Pace()
    for number, batch in enumerate(batches, start=1):
        if processes.present().is_to_stop():
            interruption.check()
        with pace.watched(f"evaluation, batch {number}"):
            batch_total, batch_weight = map(float, step(adapters, batch))
        total, weight = total + batch_total, weight + batch_weight
        count += int(np.count_nonzero(batch.weights))
    if not count:
        raise ValueError("no supervised token in the evaluation data")
    return Totals(total, weight, count)
