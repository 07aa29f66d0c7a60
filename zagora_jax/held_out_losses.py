"""The losses on held-out rows that a run has had: which step was the best, and whether better ones may be hoped for."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from zagora_jax.option_groups import EarlyStoppingConfig

LOSS = "eval_loss"


class Best(NamedTuple):
    """The evaluated step with the lowest loss."""

    step: int
    loss: float


class HeldOutLosses:
    """Watches the metrics of one step after the other.

    Attributes:
        best: the best step so far, the earlier of equal ones; None where none was evaluated.
        stop: why the run is to end: too many evaluations in a row have brought nothing; None where it is not.
    """

    def __init__(
        self,
        options: EarlyStoppingConfig,
        before: Iterable[Mapping[str, Any]] = (),
        saved: Collection[int] = (),
    ):
        """Begin after the steps whose metrics are `before`; of these, those that are not `saved` are never the best."""
        self._options = options
        self.best: Best | None = None
        self.stop: str | None = None
        self._lowest = math.inf  # that later losses must be below
        self._in_vain = 0
        for metrics in before:
            self.after(metrics, may_be_best=metrics["step"] in saved)

    def after(self, metrics: Mapping[str, Any], *, may_be_best: bool = True) -> bool:
        """Take note of a step; returns whether it is the best so far."""
        if LOSS not in metrics:
            return False
        loss = math.nan if metrics[LOSS] is None else metrics[LOSS]  # as metrics.jsonl has what is not finite
        self._count(loss)
        if not may_be_best or not loss < (math.inf if self.best is None else self.best.loss):
            return False
        self.best = Best(int(metrics["step"]), loss)
        return True

    def _count(self, loss: float) -> None:
        if loss < self._lowest - self._options.min_delta:
            self._lowest, self._in_vain, self.stop = loss, 0, None
            return
        self._in_vain += 1
        if self._options.patience is not None and self._in_vain >= self._options.patience:
            self.stop = (
                f"the eval loss was not below {self._lowest:.4f}"
                + (f" by more than {self._options.min_delta:g}" if self._options.min_delta else "")
                + f" in {self._in_vain} evaluations (early_stopping.patience {self._options.patience})"
            )
