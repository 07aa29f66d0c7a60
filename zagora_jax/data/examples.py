"""Tokenised rows, held together in two files that are mapped into memory: rows may take more than memory holds."""

import hashlib
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple, Self, cast

import numpy as np

from zagora_jax.data.sources import Location
from zagora_jax.errors import UserError

CHUNK = 2**22  # elements that are looked at together


class Example(NamedTuple):
    """One tokenised row: tokens int32[n], the weight of each in the loss float32[n], and where it came from."""

    tokens: np.ndarray
    weights: np.ndarray
    location: Location

    @property
    def supervised(self) -> np.ndarray:
        """bool[n], whether the model learns to write the token."""
        return self.weights > 0


@dataclass(frozen=True)
class Examples(Sequence[Example]):
    """Tokenised rows in the order of their files.

    Attributes:
        tokens: int32[N], all rows one after the other.
        weights: float32[N], the weight of each token in the loss; 0 where it is not supervised.
        starts: int64[rows + 1]; row r holds tokens[starts[r]:starts[r + 1]].
        locations: where each row stands in the data files.
    """

    tokens: np.ndarray
    weights: np.ndarray
    starts: np.ndarray
    locations: Sequence[Location]

    @classmethod
    def of(cls, examples: Iterable[Example]) -> "Examples":
        """Joins single rows."""
        with ExamplesWriter() as writer:
            for example in examples:
                writer.add(example)
            return writer.finish()

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index):  # type: ignore[no-untyped-def,override]
        """The row at `index`, or a list of rows for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        part = slice(self.starts[row], self.starts[row + 1])
        return Example(self.tokens[part], self.weights[part], self.locations[row])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in each row, int64[rows]."""
        return np.diff(self.starts)

    @cached_property
    def supervised_tokens(self) -> int:
        """How many tokens the model learns to write."""
        return sum(int(np.count_nonzero(part)) for part in _chunks(self.weights))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of tokens, weights and row borders: equal for equal rows in equal order, wherever they were read."""
        digest = hashlib.sha256()
        for values, dtype in ((self.tokens, "<i4"), (self.weights, "<f4"), (self.starts, "<i8")):
            for part in _chunks(values):
                digest.update(np.ascontiguousarray(part, dtype).data)
        return digest.hexdigest()


def _chunks(values: np.ndarray) -> Iterable[np.ndarray]:
    return (values[start : start + CHUNK] for start in range(0, len(values), CHUNK))


class ExamplesWriter:
    """Collects rows in temporary files, which the system removes when the last array over them is gone."""

    def __init__(self) -> None:
        self._tokens, self._weights = (cast(BinaryIO, tempfile.TemporaryFile()) for _ in range(2))  # noqa: SIM115
        self._starts = array("q", [0])
        self._locations = Locations()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tokens.close()
        self._weights.close()

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def tokens(self) -> int:
        """Tokens of the rows so far."""
        return self._starts[-1]

    def add(self, example: Example) -> None:
        """Puts a row behind the others.

        Raises:
            UserError: the disk is full.
        """
        try:
            self._tokens.write(np.ascontiguousarray(example.tokens, np.int32).data)
            self._weights.write(np.ascontiguousarray(example.weights, np.float32).data)
        except OSError as error:
            raise _no_room(error) from error
        self._starts.append(self._starts[-1] + len(example.tokens))
        self._locations.append(example.location)

    def finish(self) -> Examples:
        """All rows; the writer is of no further use."""
        try:
            tokens, weights = _mapped(self._tokens, np.int32), _mapped(self._weights, np.float32)
        except OSError as error:
            raise _no_room(error) from error
        return Examples(tokens, weights, np.frombuffer(self._starts, np.int64), self._locations)


def _mapped(file: BinaryIO, dtype: Any) -> np.ndarray:
    file.flush()
    # An empty file cannot be mapped.
    return np.memmap(file, dtype, mode="r") if file.tell() else np.empty(0, dtype)


def _no_room(error: OSError) -> UserError:
    return UserError(
        f"{tempfile.gettempdir()}: tokenised rows cannot be written there ({error.strerror}); they take 8 bytes a "
        "token. Make room, or set TMPDIR to a folder on a larger disk"
    )


class Locations(Sequence[Location]):
    """Where rows stand, in 16 bytes a row."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], int] = {}
        self._names: list[tuple[str, str]] = []
        self._file_of, self._numbers = array("q"), array("q")

    def append(self, location: Location) -> None:
        """Adds the place of a row."""
        key = (location.file, location.unit)
        if key not in self._files:
            self._files[key] = len(self._names)
            self._names.append(key)
        self._file_of.append(self._files[key])
        self._numbers.append(location.number)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index):  # type: ignore[no-untyped-def,override]
        """The place of the row at `index`, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        file, unit = self._names[self._file_of[index]]
        return Location(file, self._numbers[index], unit)
