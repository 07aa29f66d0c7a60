"""Which rows share a sequence."""

from typing import NamedTuple

import numpy as np

# Sequences that are kept open at a time. First fit over this many leaves as little unused as over all of them
# (below 1 % for rows of mixed lengths), and takes a time proportional to the number of rows.
OPEN_SEQUENCES = 128


class Packing(NamedTuple):
    """Sequence s holds rows[starts[s]:starts[s + 1]]; rows int64[rows], starts int64[sequences + 1]."""

    rows: np.ndarray
    starts: np.ndarray

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return len(self.starts) - 1


def one_row_each(order: np.ndarray) -> Packing:
    """Every row in a sequence of its own."""
    return Packing(order.astype(np.int64), np.arange(len(order) + 1, dtype=np.int64))


def first_fit(order: np.ndarray, lengths: np.ndarray, width: int) -> Packing:
    """Packs rows, taken in `order`, each into the first open sequence that has room for it.

    When none has, the fullest open sequence is closed for a new one. The result depends on the arguments alone.

    Args:
        order: int[rows], the rows to pack, each once.
        lengths: int[rows], tokens of each row, none above `width`.
        width: tokens that a sequence holds.

    Raises:
        ValueError: a row is longer than a sequence.
    """
    if len(order) and lengths[order].max() > width:
        raise ValueError(f"a row of {lengths[order].max()} tokens does not fit in a sequence of {width}")
    room = np.zeros(OPEN_SEQUENCES, np.int64)
    sequence_in_slot = np.zeros(OPEN_SEQUENCES, np.int64)
    sequence_of = np.empty(len(order), np.int64)
    count = 0
    for position, length in enumerate(lengths[order]):
        slot = np.argmax(room >= length)
        if room[slot] < length:
            slot = np.argmin(room)
            room[slot] = width
            sequence_in_slot[slot] = count
            count += 1
        room[slot] -= length
        sequence_of[position] = sequence_in_slot[slot]
    by_sequence = np.argsort(sequence_of, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(sequence_of, minlength=count))])
    return Packing(np.asarray(order, np.int64)[by_sequence], starts.astype(np.int64))
