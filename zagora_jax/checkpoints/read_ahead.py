"""Reading in threads, ahead of the use of what is read."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

# Several, since neither one core's copying out of the page cache nor one request at a time gives a fast disk's rate.
READERS = 4
# What one job reads at most: enough for a disk to read in sequence, little against a layer of 70B, which has 1.7 GB.
PIECE_BYTES = 64 * 2**20


@contextmanager
def read_ahead(jobs: Iterable[Callable[[], T]], readers: int = READERS) -> Iterator[Iterator[T]]:
    """Yield an iterator over what the jobs return, in their order, while the next ones run in as many threads.

    Beside the result in use there are those of `readers` jobs at most, read or being read. What a job raises is raised
    in its place. At the end of the block no job runs any more.
    """
    with ThreadPoolExecutor(readers, thread_name_prefix="reading") as pool:
        waiting: deque[Future[T]] = deque()

        def results() -> Iterator[T]:
            for job in jobs:
                if len(waiting) == readers:
                    result = waiting.popleft().result()
                    waiting.append(pool.submit(job))
                    yield result
                else:
                    waiting.append(pool.submit(job))
            while waiting:
                yield waiting.popleft().result()

        try:
            yield results()
        finally:
            for future in waiting:
                future.cancel()


def row_pieces(shape: Sequence[int], itemsize: int) -> list[tuple[int, int]]:
    """Cut the rows of an array into ranges [start, stop) of PIECE_BYTES at most, or of one row, and about equal."""
    rows, row_bytes = shape[0], itemsize
    for size in shape[1:]:
        row_bytes *= size
    count = min(rows, -(-rows * row_bytes // PIECE_BYTES))
    together = -(-rows // count)
    return [(start, min(start + together, rows)) for start in range(0, rows, together)]
