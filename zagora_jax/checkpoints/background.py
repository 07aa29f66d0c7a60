"""Writing beside the training: one job at a time, in a thread of its own."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import jax
import numpy as np

from sharding.rules import PINNED
from sharding.spanning import whole_on_first


def copy_to_host(arrays: Any) -> Any:
    """Begin to copy a tree of arrays to pinned memory of the host; a program that reuses theirs waits for that.

    What is there already is copied at once: `jax.device_put` would return it as it is. Of arrays that several processes
    share, the first one gets whole copies, at once too.
    """

    def copy(array: jax.Array) -> jax.Array | np.ndarray:
        if not array.sharding.is_fully_addressable:
            return whole_on_first(array)
        if array.sharding.memory_kind == PINNED:
            return np.array(array)
        return jax.device_put(array, array.sharding.with_memory_kind(PINNED))

    return jax.tree.map(copy, arrays)


class BackgroundWriter:
    """Runs jobs one after the other. What a job raises is raised by the next call, or at the end of the block.

    Attributes:
        has_failed: whether a job has raised anything.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saving")
        self._job: Future[None] | None = None
        self.has_failed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Begin `job`, after the one before has ended."""
        self.wait()
        self._job = self._pool.submit(job)

    def is_busy(self) -> bool:
        """Tell whether a job is under way."""
        return self._job is not None and not self._job.done()

    def raise_if_failed(self) -> None:
        """Raise what a job that has ended raised."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is left to do."""
        job, self._job = self._job, None
        if job is not None:
            try:
                job.result()
            except BaseException:
                self.has_failed = True
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._pool.shutdown()
