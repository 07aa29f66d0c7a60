"""How many layers each stage of a pipeline gets, and when that should change."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StageCost:
    """What a stage's devices take for a micro-batch, forward and backward, and how many layers they can hold.

    Attributes:
        layer_seconds: for each layer.
        fixed_seconds: for the embedding, or the output head and the loss.
        most_layers: as their memory allows; None where it sets no limit.
    """

    layer_seconds: float
    fixed_seconds: float = 0.0
    most_layers: int | None = None

    def seconds(self, layers: int) -> float:
        """Return the time of a stage with so many layers."""
        return self.fixed_seconds + layers * self.layer_seconds


def choose_cut(costs: Sequence[StageCost], layers: int) -> list[int]:
    """Return the numbers of layers that make the slowest stage as fast as can be, none below 1.

    Layers are alike, so giving each one to the stage that then is fastest is exact.

    Raises:
        ValueError: there are fewer layers than stages, or the devices cannot hold them all.
    """
    room = sum(layers if cost.most_layers is None else cost.most_layers for cost in costs)
    if layers < len(costs) or any(cost.most_layers == 0 for cost in costs) or room < layers:
        most = ", ".join("any number" if cost.most_layers is None else str(cost.most_layers) for cost in costs)
        raise ValueError(f"{layers} layers do not go into {len(costs)} stages that can hold {most}")
    cut = [1] * len(costs)
    for _ in range(layers - len(costs)):
        open_ = [stage for stage, cost in enumerate(costs) if cost.most_layers is None or cut[stage] < cost.most_layers]
        cut[min(open_, key=lambda stage: costs[stage].seconds(cut[stage] + 1))] += 1
    return cut


def pace(costs: Sequence[StageCost], cut: Sequence[int]) -> float:
    """Return the time of the slowest stage, which all others follow."""
    return max(cost.seconds(layers) for cost, layers in zip(costs, cut, strict=True))


def explain(costs: Sequence[StageCost], cut: Sequence[int]) -> str:
    """Say what each stage takes with its layers, and what held it back."""

    def of_stage(stage: int, cost: StageCost, layers: int) -> str:
        fixed = f" + {cost.fixed_seconds * 1e3:.3g}" if cost.fixed_seconds else ""
        text = f"stage {stage}: {layers} x {cost.layer_seconds * 1e3:.3g}{fixed} = {cost.seconds(layers) * 1e3:.3g} ms"
        return text + (", as many as its memory holds" if layers == cost.most_layers else "")

    return "; ".join(of_stage(stage, *pair) for stage, pair in enumerate(zip(costs, cut, strict=True)))


@dataclass(frozen=True)
class Move:
    """A better cut.

    Attributes:
        cut: layers of each stage.
        costs: the measured costs that it follows from.
        gain: the part of a step's time that it is expected to save.
    """

    cut: list[int]
    costs: list[StageCost]
    gain: float


class Balancer:
    """Watches the stages' times, and proposes another cut when one stage has been slow for long enough.

    A single step proves nothing: another cut must have promised more than the threshold in every one of `patience`
    steps in a row, by that step's own times; it is then chosen by their median. As a proposal clears what was seen, and
    the way back would have to promise as much again, layers do not wander to and fro.
    """

    def __init__(self, costs: Sequence[StageCost], *, threshold: float, patience: int):
        """Start to watch.

        Args:
            costs: what was expected; each stage's costs are taken to change by one factor.
            threshold: the part of a step's time that a move must save.
            patience: over how many steps in a row.
        """
        self._expected = list(costs)
        self._threshold, self._patience = threshold, patience
        self._seen: deque[list[float]] = deque(maxlen=patience)

    def observe(self, seconds: Sequence[float], cut: Sequence[int]) -> Move | None:
        """Take a step's times of a micro-batch in each stage; returns a better cut once it is due."""
        factors = [
            measured / cost.seconds(layers) for measured, cost, layers in zip(seconds, self._expected, cut, strict=True)
        ]
        if self._better(factors, cut) is None:
            self._seen.clear()
            return None
        self._seen.append(factors)
        if len(self._seen) < self._patience:
            return None
        move = self._better(np.median(list(self._seen), axis=0).tolist(), cut)
        self._seen.clear()
        return move

    def _better(self, factors: Sequence[float], cut: Sequence[int]) -> Move | None:
        costs = [
            StageCost(cost.layer_seconds * factor, cost.fixed_seconds * factor, cost.most_layers)
            for cost, factor in zip(self._expected, factors, strict=True)
        ]
        best = choose_cut(costs, sum(cut))
        gain = 1 - pace(costs, best) / pace(costs, cut)
        return Move(best, costs, gain) if gain > self._threshold else None


class Slowdown:
    """Tells when steps, which nobody can look into, have become slower, and have been so for long enough.

    What is usual is the median of the first `patience` steps; so again after each slowdown that was told.
    """

    def __init__(self, *, threshold: float, patience: int):
        """Tell of steps that take more than 1 + threshold times what is usual, `patience` of them in a row."""
        self._threshold, self._patience = threshold, patience
        self._usual: float | None = None
        self._seen: list[float] = []

    def observe(self, seconds: float) -> bool:
        """Take a step's time; returns whether a slowdown is to be told."""
        if self._usual is not None and seconds <= (1 + self._threshold) * self._usual:
            self._seen.clear()
            return False
        self._seen.append(seconds)
        if len(self._seen) < self._patience:
            return False
        told = self._usual is not None
        self._usual = None if told else float(np.median(self._seen))
        self._seen.clear()
        return told
