"""Which rows share a sequence."""

from typing import NamedTuple

import numpy as np


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


def best_fit(order: np.ndarray, lengths: np.ndarray, width: int) -> Packing:
    """Packs rows, taken in `order`, each into the sequence with the least room that is enough for it.

    The result depends on the arguments alone. A million rows take seconds.

    Args:
        order: int[rows], the rows to pack, each once.
        lengths: int[rows], tokens of each row, none above `width`.
        width: tokens that a sequence holds.

    Raises:
        ValueError: a row is longer than a sequence.
    """
    if len(order) and lengths[order].max() > width:
        raise ValueError(f"a row of {lengths[order].max()} tokens does not fit in a sequence of {width}")
    with_room: list[list[int]] = [[] for _ in range(width + 1)]  # sequences by their room
    some = np.zeros(width + 1, bool)  # whether any sequence has this room
    sequence_of = np.empty(len(order), np.int64)
    count = 0
    for position, length in enumerate(lengths[order].tolist()):
        room = length + int(some[length:].argmax())
        if some[room]:
            sequence = with_room[room].pop()
            some[room] = bool(with_room[room])
        else:
            sequence, room = count, width
            count += 1
        sequence_of[position] = sequence
        with_room[room - length].append(sequence)
        some[room - length] = True
    by_sequence = np.argsort(sequence_of, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(sequence_of, minlength=count))])
    return Packing(np.asarray(order, np.int64)[by_sequence], starts.astype(np.int64))
