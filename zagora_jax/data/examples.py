"""Tokenised rows, held together in a few arrays: a million rows cost what their tokens cost."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from zagora_jax.data.sources import Location


class Example(NamedTuple):
    """One tokenised row: tokens int32[n], supervised bool[n], and where it came from."""

    tokens: np.ndarray
    supervised: np.ndarray
    location: Location


@dataclass(frozen=True)
class Examples(Sequence[Example]):
    """Tokenised rows in the order of their files.

    Attributes:
        tokens: int32[N], all rows one after the other.
        supervised: bool[N], whether the model learns to write the token.
        starts: int64[rows + 1]; row r holds tokens[starts[r]:starts[r + 1]].
        locations: where each row stands in the data files.
    """

    tokens: np.ndarray
    supervised: np.ndarray
    starts: np.ndarray
    locations: Sequence[Location]

    @classmethod
    def of(cls, examples: Iterable[Example]) -> "Examples":
        """Joins single rows."""
        rows = list(examples)
        lengths = [len(row.tokens) for row in rows]
        return cls(
            tokens=np.concatenate([np.empty(0, np.int32), *(row.tokens for row in rows)]).astype(np.int32),
            supervised=np.concatenate([np.empty(0, bool), *(row.supervised for row in rows)]).astype(bool),
            starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
            locations=[row.location for row in rows],
        )

    @classmethod
    def concatenate(cls, parts: Sequence["Examples"]) -> "Examples":
        """Joins several into one, in order."""
        lengths = np.concatenate([np.empty(0, np.int64), *(part.lengths for part in parts)])
        return cls(
            tokens=np.concatenate([np.empty(0, np.int32), *(part.tokens for part in parts)]),
            supervised=np.concatenate([np.empty(0, bool), *(part.supervised for part in parts)]),
            starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
            locations=[location for part in parts for location in part.locations],
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index):  # type: ignore[no-untyped-def,override]
        """The row at `index`, or a list of rows for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        part = slice(self.starts[row], self.starts[row + 1])
        return Example(self.tokens[part], self.supervised[part], self.locations[row])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in each row, int64[rows]."""
        return np.diff(self.starts)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of tokens, masks and row borders: equal for equal rows in equal order, wherever they were read."""
        digest = hashlib.sha256()
        for array, dtype in ((self.tokens, "<i4"), (self.supervised, "u1"), (self.starts, "<i8")):
            digest.update(np.ascontiguousarray(array, dtype).tobytes())
        return digest.hexdigest()
