"""Keeps a device's queue short, and measures how long the device works on what stands in it."""

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import jax


@dataclass
class Work:
    """What a device has done since `Watch.take`.

    Attributes:
        busy: seconds in which it computed, by kind of task.
        tasks: how many tasks those were.
        began: when the first task could begin, by time.perf_counter.
        ended: when the last task ended.
    """

    busy: dict[str, float]
    tasks: dict[str, int]
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """Seconds in which the device computed."""
        return sum(self.busy.values())


class Watch:
    """Waits in a thread of its own for the tasks that a device, or a group of them, was given.

    A device begins a task when the one before it has ended and its inputs are there, so that its time is known without
    anything being measured on the device. Without a bound on the queue, results of tasks far ahead would take memory
    already: XLA allocates them when a program is dispatched, not when it runs.
    """

    def __init__(self, most_queued: int = 3):
        """Start to watch; `most_queued` tasks may be dispatched and not yet ended."""
        self._places = threading.Semaphore(most_queued)
        self._queue: queue.Queue[tuple[str, Any, Any] | None] = queue.Queue()
        self._error: Exception | None = None
        self._previous_end = 0.0
        self._work = _no_work()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_for_place(self) -> None:
        """Wait until another task may be dispatched.

        Raises:
            Exception: what a task before has failed with.
        """
        self._places.acquire()
        if self._error is not None:
            self._places.release()
            raise self._error

    def dispatched(self, kind: str, inputs: Any, result: Any) -> None:
        """Tell of a task behind `wait_for_place`: arrays that it waited for, none of them donated, and one it makes."""
        self._queue.put((kind, inputs, result))

    def take(self) -> Work:
        """Wait for all tasks, and return what was done since the last call."""
        self._queue.join()
        if self._error is not None:
            raise self._error
        work, self._work = self._work, _no_work()
        return work

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                self._measure(*task)
            except Exception as error:
                self._error = error
            finally:
                del task
                self._places.release()
                self._queue.task_done()
        self._queue.task_done()

    def _measure(self, kind: str, inputs: Any, result: Any) -> None:
        jax.block_until_ready(inputs)
        began = max(time.perf_counter(), self._previous_end)
        jax.block_until_ready(result)
        self._previous_end = time.perf_counter()
        work = self._work
        work.busy[kind] = work.busy.get(kind, 0.0) + self._previous_end - began
        work.tasks[kind] = work.tasks.get(kind, 0) + 1
        work.began, work.ended = min(work.began, began), self._previous_end


def _no_work() -> Work:
    return Work({}, {}, began=float("inf"), ended=0.0)
