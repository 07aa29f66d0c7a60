"""In which order the stages of a pipeline compute, and how long that takes.

Each stage runs the micro-batches forward and backward; the last stage's forward pass is part of its backward task, as
the loss stands between them. In the order called one-forward-one-backward (Narayanan et al. 2019, "PipeDream",
arXiv:1806.03377; Fan et al. 2020, "DAPPLE", arXiv:2007.01045) a stage begins with a few forward tasks and then
alternates, so that it holds the inputs of a few micro-batches, however many there are.

A stage that is d stages before the last needs d forward tasks ahead of its first backward task. That leaves no time for
an activation to travel: with `ahead` more for each border behind the stage, travel is hidden while there and back takes
less than `ahead` micro-batches' two tasks, at the price of d * ahead more stage inputs held.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Task(NamedTuple):
    """What one stage does with one micro-batch."""

    kind: Literal["forward", "backward"]
    stage: int
    micro_batch: int


def forward_tasks_ahead(stage: int, stages: int, micro_batches: int, ahead: int = 1) -> int:
    """Return how many forward tasks a stage runs before it begins to alternate; as many inputs + 1 it then holds."""
    return min(micro_batches, (stages - 1 - stage) * (1 + ahead))


def inputs_held(stage: int, stages: int, micro_batches: int, ahead: int = 1) -> int:
    """Return of how many micro-batches a stage holds the input at most."""
    return min(micro_batches, forward_tasks_ahead(stage, stages, micro_batches, ahead) + 1)


def tasks_of_stage(stage: int, stages: int, micro_batches: int, ahead: int = 1) -> list[Task]:
    """Return a stage's tasks in their order."""
    if stage == stages - 1:
        return [Task("backward", stage, micro_batch) for micro_batch in range(micro_batches)]
    first = forward_tasks_ahead(stage, stages, micro_batches, ahead)
    tasks = [Task("forward", stage, micro_batch) for micro_batch in range(first)]
    for micro_batch in range(micro_batches):
        if first + micro_batch < micro_batches:
            tasks.append(Task("forward", stage, first + micro_batch))
        tasks.append(Task("backward", stage, micro_batch))
    return tasks


def producer(task: Task, stages: int) -> Task | None:
    """Return the task of a neighbour whose result a task needs."""
    if task.kind == "backward" and task.stage < stages - 1:
        return Task("backward", task.stage + 1, task.micro_batch)
    return Task("forward", task.stage - 1, task.micro_batch) if task.stage > 0 else None


def dispatch_order(stages: int, micro_batches: int, ahead: int = 1) -> list[Task]:
    """Return all tasks in an order in which one host can dispatch them: each behind what it needs, the stages in turn.

    Raises:
        ValueError: a number below 1.
    """
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"expected at least 1 stage and 1 micro-batch, found {stages} and {micro_batches}")
    waiting = [tasks_of_stage(stage, stages, micro_batches, ahead)[::-1] for stage in range(stages)]
    done: set[Task | None] = {None}
    order: list[Task] = []
    while any(waiting):
        for tasks in waiting:
            if tasks and producer(tasks[-1], stages) in done:
                order.append(tasks.pop())
                done.add(order[-1])
    return order


@dataclass(frozen=True)
class Timeline:
    """How long the tasks of an optimizer step take.

    Attributes:
        seconds: from the first task's begin to the last one's end.
        busy: seconds that each stage computes.
    """

    seconds: float
    busy: tuple[float, ...]

    @property
    def idle(self) -> float:
        """The bubble: the share of the stages' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds)


def simulate(
    forward: Sequence[float], backward: Sequence[float], micro_batches: int, *, transfer: float = 0.0, ahead: int = 1
) -> Timeline:
    """Run the schedule on paper.

    Args:
        forward: seconds of each stage's forward task; the last stage's is none of its own, and added to its backward.
        backward: seconds of each stage's backward task.
        micro_batches: in an optimizer step.
        transfer: seconds that an activation, or its gradient, travels between neighbours, under their computation.
        ahead: see the module.
    """
    stages = len(forward)
    free, busy = [0.0] * stages, [0.0] * stages
    arrived: dict[Task | None, float] = {None: 0.0}
    for task in dispatch_order(stages, micro_batches, ahead):
        seconds = forward[task.stage] if task.kind == "forward" else backward[task.stage]
        if task.stage == stages - 1:
            seconds += forward[task.stage]
        free[task.stage] = max(free[task.stage], arrived[producer(task, stages)]) + seconds
        busy[task.stage] += seconds
        arrived[task] = free[task.stage] + transfer
    return Timeline(max(free), tuple(busy))
