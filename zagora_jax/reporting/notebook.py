"""A training's progress in a notebook: one cell that changes, in Jupyter, Colab and VS Code alike, without widgets."""

import html
import time
from collections.abc import Callable
from typing import Any

from zagora_jax.reporting.charts import Curve, line_chart
from zagora_jax.reporting.history import Series

SECONDS_BETWEEN_UPDATES = 0.5
MOST_POINTS = 120  # of the loss


class NotebookBar:
    """Shows how many steps are done, what is left, the newest numbers and the loss so far."""

    def __init__(self, total_steps: int, first_step: int, clock: Callable[[], float] = time.monotonic):
        """Begin to show, in the cell that runs."""
        self._total, self._first, self._clock = total_steps, first_step, clock
        self._started = clock()
        self._shown = self._started - SECONDS_BETWEEN_UPDATES
        self._step = first_step
        self._loss = Series()
        self._numbers = "compiling"
        from IPython.display import display

        self._handle: Any = display(self._picture(first_step), display_id=True)

    def update(self, step: int, loss: float, numbers: str) -> None:
        """Take a finished step in, and show it unless the last one was shown just now."""
        self._loss.append(step, loss)
        self._step, self._numbers = step, numbers
        now = self._clock()
        if now - self._shown >= SECONDS_BETWEEN_UPDATES:
            self._shown = now
            self.show()

    def show(self) -> None:
        """Show the newest of all."""
        self._handle.update(self._picture(self._step))

    def _picture(self, step: int) -> Any:
        from IPython.display import HTML

        done, passed = step - self._first, self._clock() - self._started
        left = f"{passed * (self._total - step) / done:.0f} s left" if done else ""
        points = self._loss.buckets(MOST_POINTS)
        chart = line_chart([Curve("", points)], "loss") if len(points) > 1 else ""
        return HTML(
            f'<div style="max-width:640px"><progress value="{step}" max="{self._total}" style="width:60%"></progress> '
            f"step {step:,} of {self._total:,} {html.escape(left)}<br><small>{html.escape(self._numbers)}</small>"
            f"{chart}</div>"
        )
