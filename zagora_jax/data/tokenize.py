"""From data files to tokenised rows, with an account of what was read, cut and left out."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from zagora_jax.data.chat import Rendered, render
from zagora_jax.data.examples import Example, Examples
from zagora_jax.data.masks import Encoder
from zagora_jax.data.rows import Conversation, interpret
from zagora_jax.data.sources import Location, read_rows
from zagora_jax.errors import UserError

# Rows are tokenised this many together, or fewer when they are long.
CHUNK_ROWS = 256
CHUNK_CHARACTERS = 2_000_000

LOCATIONS_KEPT = 5


@dataclass
class Tally:
    """A count of rows, with the places of the first few."""

    count: int = 0
    first: list[Location] = field(default_factory=list)

    def add(self, location: Location) -> None:
        """Counts a row."""
        self.count += 1
        if len(self.first) < LOCATIONS_KEPT:
            self.first.append(location)

    def __str__(self) -> str:
        places = "; ".join(map(str, self.first))
        return f"{self.count:,} ({places}{'; ...' if self.count > len(self.first) else ''})"


@dataclass
class Statistics:
    """What became of the rows that were read.

    Attributes:
        rows: rows read.
        kept: rows that are trained on.
        tokens: tokens of the kept rows.
        supervised_tokens: those of them that the model learns to write.
        longest: tokens of the longest kept row.
        truncated: kept rows that were cut off at the sequence length.
        cut_away: rows left out since all supervised tokens stood past the sequence length.
        unsupervised: rows left out since they have no supervised token: empty, or without an assistant turn.
        ends_with_user: conversations whose last turn is not the assistant's; that turn teaches nothing.
    """

    rows: int = 0
    kept: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    longest: int = 0
    truncated: Tally = field(default_factory=Tally)
    cut_away: Tally = field(default_factory=Tally)
    unsupervised: Tally = field(default_factory=Tally)
    ends_with_user: Tally = field(default_factory=Tally)

    def __str__(self) -> str:
        """A line for the numbers, and one for each kind of row that deserves a look."""
        share = self.supervised_tokens / self.tokens if self.tokens else 0.0
        notes = {
            "cut off at the sequence length": self.truncated,
            "left out, all supervised tokens past the sequence length": self.cut_away,
            "left out, no supervised token": self.unsupervised,
            "with a last turn that is not the assistant's, and not supervised": self.ends_with_user,
        }
        return "\n".join(
            [
                f"{self.kept:,} of {self.rows:,} rows, {self.tokens:,} tokens, longest row {self.longest:,}, "
                f"{self.supervised_tokens:,} supervised ({share:.1%})",
                *(f"rows {what}: {tally}" for what, tally in notes.items() if tally.count),
            ]
        )


@dataclass(frozen=True)
class TokenizedData:
    """Rows ready for batches, and the account of how they came about."""

    examples: Examples
    statistics: Statistics


def tokenize_rows(
    files: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
) -> TokenizedData:
    """Reads, renders and tokenises all rows of `files`.

    A row longer than `sequence_length` tokens is cut off at its end; a row that keeps no supervised token is left out.
    Both are counted, with the places of the first ones.

    Args:
        files: data files, read in this order.
        tokenizer: of the base model; it must be a fast one.
        sequence_length: tokens of a row at most.

    Raises:
        UserError: a row is wrong, or no row is left to train on.
    """
    statistics = Statistics()
    encoder = Encoder(tokenizer, sequence_length)
    parts: list[Examples] = []
    rendered = chain.from_iterable(_rendered(file, tokenizer, statistics) for file in files)
    for chunk in _chunks(rendered):
        rows, locations = zip(*chunk, strict=True)
        encoded = zip(encoder.encode(rows, locations), locations, strict=True)
        kept = _keep((Example(*row, location) for row, location in encoded), sequence_length, statistics)
        parts.append(Examples.of(kept))
    examples = Examples.concatenate(parts)
    if not len(examples):
        raise UserError(f"{', '.join(map(str, files))}: no row is left to train on\n{statistics}")
    statistics.kept = len(examples)
    statistics.tokens = len(examples.tokens)
    statistics.supervised_tokens = int(examples.supervised.sum())
    statistics.longest = int(examples.lengths.max())
    return TokenizedData(examples, statistics)


def _rendered(
    file: str | Path, tokenizer: PreTrainedTokenizerBase, statistics: Statistics
) -> Iterator[tuple[Rendered, Location]]:
    for row in read_rows(file):
        form = interpret(row)
        statistics.rows += 1
        if isinstance(form, Conversation) and form.turns[-1].role != "assistant":
            statistics.ends_with_user.add(row.location)
        yield render(form, tokenizer, row.location), row.location


def _chunks(rows: Iterable[tuple[Rendered, Location]]) -> Iterator[list[tuple[Rendered, Location]]]:
    chunk: list[tuple[Rendered, Location]] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += len(row[0].text)
        if len(chunk) == CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _keep(rows: Iterable[Example], sequence_length: int, statistics: Statistics) -> Iterator[Example]:
    for tokens, supervised, location in rows:
        if not supervised.any():
            statistics.unsupervised.add(location)
        elif not supervised[:sequence_length].any():
            statistics.cut_away.add(location)
        else:
            if len(tokens) > sequence_length:
                statistics.truncated.add(location)
            yield Example(tokens[:sequence_length], supervised[:sequence_length], location)
