"""From sources of rows to tokenised rows, with an account of what was read, cut and left out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from zagora_jax.data.chat import Rendered, render
from zagora_jax.data.examples import Example, Examples, ExamplesWriter
from zagora_jax.data.files import read_rows
from zagora_jax.data.locate import locate_all
from zagora_jax.data.masks import Encoder
from zagora_jax.data.rows import Conversation, Form, TokenRow, interpret
from zagora_jax.data.sources import Location
from zagora_jax.data.statistics import SourceStatistics, Statistics
from zagora_jax.errors import UserError

# Rows are tokenised this many together, or fewer when they are long.
CHUNK_ROWS = 256
CHUNK_CHARACTERS = 2_000_000


@dataclass(frozen=True)
class Preparation:
    """What rows are made into.

    Attributes:
        sequence_length: tokens of a row at most.
        long_rows: what becomes of a longer one: cut off at its end, refused, or (plain text alone; others are cut)
            split in parts.
        overlap: tokens that a part repeats of the one before it, for context: they are supervised there alone.
        max_left_out: the largest share of rows that may have no supervised token.
        first_rows: rows read of each source at most; None: all.
    """

    sequence_length: int
    long_rows: Literal["cut", "split", "refuse"] = "cut"
    overlap: int = 1
    max_left_out: float = 1.0
    first_rows: int | None = None


@dataclass(frozen=True)
class TokenizedData:
    """Rows ready for batches, and the account of how they came about.

    Attributes:
        examples: the rows.
        statistics: the account.
        sources: of each source, the rows that it gave.
        doubt: what is refused if the rows that were not read are like those that were; None where all were read.
    """

    examples: Examples
    statistics: Statistics
    sources: tuple[range, ...]
    doubt: str | None = None


def tokenize_rows(
    sources: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    preparation: Preparation,
    wanted: Callable[[Form], bool] = lambda form: True,
    passes: Sequence[float] | None = None,
) -> TokenizedData:
    """Reads, renders and tokenises all rows of `sources`.

    A row that keeps no supervised token is left out and counted, with the places of the first ones.

    Args:
        sources: as `locate` takes them, read in this order.
        tokenizer: of the base model; it must be a fast one.
        preparation: what becomes of the rows.
        wanted: tells whether a row belongs to the part of the data that is meant.
        passes: how often an epoch goes through each source, for the account.

    Raises:
        UserError: a row is wrong; or, where all are read, too many are left out or none is left.
    """
    located = locate_all([str(source) for source in sources])
    statistics = Statistics()
    encoder = Encoder(tokenizer, preparation.sequence_length, whole=preparation.long_rows == "split")
    ranges = []
    with ExamplesWriter() as writer:
        for number, (name, files) in enumerate(located):
            first_row, first_token = len(writer), writer.tokens
            rendered = _rendered(files, tokenizer, statistics, preparation.first_rows, wanted)
            for chunk in _chunks(rendered):
                rows, locations = zip(*chunk, strict=True)
                encoded = encoder.encode(rows, locations)
                for row, pair, location in zip(rows, encoded, locations, strict=True):
                    for example in _prepare(row, Example(*pair, location), preparation, statistics):
                        _count(example, statistics)
                        writer.add(example)
            ranges.append(range(first_row, len(writer)))
            weight = 1.0 if passes is None else passes[number]
            kept = SourceStatistics(name, len(files), len(ranges[-1]), writer.tokens - first_token, weight)
            statistics.sources.append(kept)
        examples = writer.finish()
    complaint = _complain(", ".join(map(str, sources)), statistics, preparation.max_left_out)
    if complaint and statistics.complete:
        raise UserError(complaint)
    return TokenizedData(examples, statistics, tuple(ranges), complaint)


def _rendered(
    files: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    statistics: Statistics,
    first_rows: int | None,
    wanted: Callable[[Form], bool],
) -> Iterator[tuple[Rendered | TokenRow, Location]]:
    rows = (row for file in files for row in read_rows(file))
    for row in islice(rows, first_rows):
        form = interpret(row)
        if not wanted(form):
            statistics.other_part += 1
            continue
        statistics.rows += 1
        if isinstance(form, Conversation) and form.turns[-1].role != "assistant":
            statistics.ends_with_user.add(row.location)
        yield form if isinstance(form, TokenRow) else render(form, tokenizer, row.location), row.location
    if first_rows is not None and next(rows, None) is not None:
        statistics.complete = False


def _chunks(
    rows: Iterable[tuple[Rendered | TokenRow, Location]],
) -> Iterator[list[tuple[Rendered | TokenRow, Location]]]:
    chunk: list[tuple[Rendered | TokenRow, Location]] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += len(row[0].tokens if isinstance(row[0], TokenRow) else row[0].text)
        if len(chunk) == CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _prepare(
    row: Rendered | TokenRow, example: Example, preparation: Preparation, statistics: Statistics
) -> Iterator[Example]:
    """What is trained on of a row: all of it, its beginning, its parts or nothing."""
    tokens, weights, location = example
    length = preparation.sequence_length
    if not weights.any():
        statistics.unsupervised.add(location)
    elif len(tokens) <= length:
        yield example
    elif preparation.long_rows == "refuse":
        raise UserError(
            f"{location}: has {len(tokens):,} tokens, more than sequence_length {length:,}, and long_rows is refuse; "
            "cut the row, or give --long-rows cut or split"
        )
    elif preparation.long_rows == "split" and _is_plain(row, weights):
        statistics.split.add(location)
        yield from _parts(example, length, preparation.overlap)
    elif not weights[:length].any():
        statistics.cut_away.add(location)
    else:
        statistics.truncated.add(location)
        yield Example(tokens[:length], weights[:length], location)


def _is_plain(row: Rendered | TokenRow, weights: np.ndarray) -> bool:
    """Whether a row is text that is learned from its beginning on, so that any part of it can stand alone."""
    if isinstance(row, TokenRow):
        return bool(weights[1:].all())
    return not row.chat and bool(row.spans) and row.spans[0].start == 0


def _parts(example: Example, length: int, overlap: int) -> Iterator[Example]:
    """Parts of a long row, in which each of its supervised tokens is supervised once."""
    tokens, weights, location = example
    for start in range(0, len(tokens) - overlap, length - overlap):
        part = weights[start : start + length].copy()
        if start:
            part[:overlap] = 0
        if part.any():
            yield Example(tokens[start : start + length], part, location)


def _count(example: Example, statistics: Statistics) -> None:
    statistics.kept += 1
    statistics.tokens += len(example.tokens)
    statistics.supervised_tokens += int(np.count_nonzero(example.weights))
    statistics.weight += float(example.weights.sum(dtype=np.float64))
    statistics.longest = max(statistics.longest, len(example.tokens))


def _complain(sources: str, statistics: Statistics, max_left_out: float) -> str | None:
    """What is wrong with the rows as a whole."""
    if not statistics.rows and statistics.other_part:
        return f"{sources}: eval_fraction leaves none of the {statistics.other_part:,} rows for this part"
    if not statistics.kept:
        return f"{sources}: no row is left to train on\n{statistics}"
    share = statistics.left_out / statistics.rows
    if share <= max_left_out:
        return None
    return (
        f"{sources}: {statistics.left_out:,} of {statistics.rows:,} rows ({share:.1%}) have no supervised token "
        f"within the sequence length, more than max_left_out ({max_left_out:.1%}). Look at them with the command "
        f"preview; if they are to be left out, raise --max-left-out\n{statistics}"
    )
