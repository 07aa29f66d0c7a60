"""Writing beside the training: one job at a time, in a thread of its own."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import jax


def copy_to_host(arrays: Any) -> Any:
    """Begin to copy a tree of arrays to pinned memory of the host; a program that reuses theirs waits for that."""
    pinned = jax.tree.map(lambda array: array.sharding.with_memory_kind("pinned_host"), arrays)
    return jax.device_put(arrays, pinned)


class BackgroundWriter:
    """Runs jobs one after the other. What a job raises is raised by the next call, or at the end of the block."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saving")
        self._job: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Begin `job`, after the one before has ended."""
        self.wait()
        self._job = self._pool.submit(job)

    def raise_if_failed(self) -> None:
        """Raise what a job that has ended raised."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is left to do."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._pool.shutdown()
