"""Rows for an embedder: a query, the passage that answers it, and passages that do not.

| keys of the row | |
|---|---|
| `query` | the text that is asked |
| `positive` | the passage that answers it |
| `negatives` | optional: a list of passages that do not |

Keys in `turns.METADATA_KEYS` are ignored; any other is refused.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from zagora_jax.config import TrainConfig
from zagora_jax.data.batches import Batch, Batches, random_order
from zagora_jax.data.examples import Example, Examples
from zagora_jax.data.files import read_rows
from zagora_jax.data.held_out import is_held_out
from zagora_jax.data.locate import locate_all
from zagora_jax.data.rows import PlainText
from zagora_jax.data.sources import Location, SourceRow, describe
from zagora_jax.data.statistics import Tally
from zagora_jax.data.turns import METADATA_KEYS, read_text
from zagora_jax.errors import UserError
from zagora_jax.option_groups import RetrievalConfig

CHUNK_TEXTS = 1024  # tokenised together


@dataclass(frozen=True)
class Pair:
    """A query and its passage, and wrong ones."""

    query: str
    positive: str
    negatives: tuple[str, ...]
    location: Location


@dataclass
class PairStatistics:
    """What became of rows that were read.

    Attributes:
        rows: rows read, those of the other part among them.
        pairs: those that are used.
        texts: their queries, passages and negatives.
        tokens: of these texts.
        longest: tokens of the longest text.
        truncated: texts that were cut off at the sequence length.
        complete: whether all rows were read; the command check may stop earlier.
    """

    rows: int = 0
    pairs: int = 0
    texts: int = 0
    tokens: int = 0
    longest: int = 0
    truncated: Tally = field(default_factory=Tally)
    complete: bool = True

    def __str__(self) -> str:
        """A line for the numbers, and one for texts that were cut, if any."""
        cut = f"\ntexts cut off at the sequence length: {self.truncated}" if self.truncated.count else ""
        return (
            f"{self.pairs:,} pairs of {self.rows:,} rows, {self.texts:,} texts, {self.tokens:,} tokens, longest text "
            f"{self.longest:,}{cut}"
        )

    def to_json(self) -> dict[str, Any]:
        """The same for a program: JSON values under the attributes' names."""
        first = [location._asdict() for location in self.truncated.first]
        return asdict(self) | {"truncated": {"count": self.truncated.count, "first": first}}


def read_pairs(
    sources: Sequence[str], statistics: PairStatistics | None = None, first_rows: int | None = None
) -> Iterator[Pair]:
    """Read the rows of all sources, as `locate` takes them.

    Args:
        sources: see above.
        statistics: where rows are counted.
        first_rows: rows read of each source at most; None: all.

    Raises:
        UserError: a row is wrong.
    """
    statistics = statistics or PairStatistics()
    for _, files in locate_all(list(sources)):
        rows = chain.from_iterable(map(read_rows, files))
        for row in islice(rows, first_rows):
            statistics.rows += 1
            yield _pair(row)
        if first_rows is not None and next(rows, None) is not None:
            statistics.complete = False


def _pair(row: SourceRow) -> Pair:
    value, location = row
    given = {key for key in value.keys() - METADATA_KEYS if value[key] is not None}
    if not {"query", "positive"} <= given or given - {"query", "positive", "negatives"}:
        raise UserError(
            f"{location}: expected the keys query and positive, and perhaps negatives, found "
            f"{', '.join(value) or 'no keys'}; rename the keys, or remove those that do not belong there"
        )
    negatives = value.get("negatives") or []
    if not isinstance(negatives, list):
        raise UserError(f"{location}, field negatives: expected a list of texts, found {describe(negatives)}")
    texts = [
        _text(value["query"], location, "query"),
        _text(value["positive"], location, "positive"),
        *(_text(text, location, f"negatives[{index}]") for index, text in enumerate(negatives)),
    ]
    return Pair(texts[0], texts[1], tuple(texts[2:]), location)


def _text(value: Any, location: Location, field: str) -> str:
    text = read_text(value, location, field)
    if not text.strip():
        raise UserError(f"{location}, field {field}: expected a text, found nothing but space")
    return text


def training_pairs(
    config: TrainConfig, statistics: PairStatistics | None = None, first_rows: int | None = None
) -> list[Pair]:
    """Read the rows of data, without those that eval_fraction holds out; see `read_pairs`.

    Raises:
        UserError: there are none, or a row is wrong or has too few negatives.
    """
    if config.data is None:
        raise UserError("data is required: give --data on the command line, or data: in the YAML file")
    read = read_pairs(config.data, statistics, first_rows)
    pairs = [pair for pair in read if not _is_held_out(pair, config.eval_fraction)]
    if not pairs:
        raise UserError(f"{', '.join(config.data)}: eval_fraction leaves no row to train on")
    wanted = config.retrieval.hard_negatives
    for pair in pairs:
        if len(pair.negatives) < wanted:
            raise UserError(
                f"{pair.location}, field negatives: retrieval.hard_negatives is {wanted}, found "
                f"{len(pair.negatives)}; give more, or lower it"
            )
    return pairs


def held_out_pairs(
    config: TrainConfig,
    sources: Sequence[str] | None = None,
    statistics: PairStatistics | None = None,
    first_rows: int | None = None,
) -> list[Pair]:
    """Read the rows of `sources`, or else of eval_data, or else those of data that eval_fraction holds out.

    See `read_pairs`.

    Raises:
        UserError: there are none, or a row is wrong.
    """
    if chosen := sources or config.eval_data:
        return list(read_pairs(chosen, statistics, first_rows))
    if not config.eval_fraction:
        raise UserError("no pairs are held out: give some, eval_data or eval_fraction")
    read = read_pairs(config.data or [], statistics, first_rows)
    pairs = [pair for pair in read if _is_held_out(pair, config.eval_fraction)]
    if not pairs:
        raise UserError(f"{', '.join(config.data or [])}: eval_fraction holds no row out")
    return pairs


def _is_held_out(pair: Pair, fraction: float) -> bool:
    """Tell by the passage, so that no passage that is asked for in evaluation is one in training."""
    return is_held_out(PlainText(pair.positive), fraction)


def tokenized(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[list[int]]:
    """Tokenise texts as the tokenizer does by default, cut off behind `length` tokens."""
    texts = iter(texts)
    while chunk := list(islice(texts, CHUNK_TEXTS)):
        yield from tokenizer(chunk, truncation=True, max_length=length)["input_ids"]


class PairBatches(Batches):
    """Batches of groups of sequences that stay together: a query, its passage and its hard negatives."""

    def __init__(self, examples: Examples, *, group: int, **options: Any):
        """Take the sequences, group after group; other options are those of `Batches`, in sequences."""
        super().__init__(examples, packing=False, **options)
        self.group = group

    def at(self, step: int) -> Batch:
        """Make the batch of a step; the weight of each query is 1, at its first token."""
        batch = super().at(step)
        weights = np.zeros_like(batch.weights)
        is_query = np.arange(self._shape[1]) % self.group == 0
        weights[..., 0] = is_query & (batch.segment_ids > 0).any(axis=-1)
        return batch._replace(weights=weights)

    def identity(self) -> dict[str, Any]:
        """Add how many sequences stay together to what the batches depend on."""
        return {**super().identity(), "group": self.group}

    def _order(self, epoch: int) -> np.ndarray:
        groups = len(self.examples) // self.group
        order = random_order(self._seed, epoch, groups) if self._shuffle else np.arange(groups)
        return (order[:, None] * self.group + np.arange(self.group)).reshape(-1)


def tokenized_pairs(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], statistics: PairStatistics
) -> Iterator[Example]:
    """Tokenise the texts of pairs: of each its query, its passage and its hard negatives; `statistics` counts them."""
    length, statistics.pairs = config.sequence_length, len(pairs)
    texts = [(text, pair.location) for pair in pairs for text in _texts(pair, config.retrieval)]
    for tokens, (text, location) in zip(tokenized((text for text, _ in texts), tokenizer, length), texts, strict=True):
        statistics.texts += 1
        statistics.tokens += len(tokens)
        statistics.longest = max(statistics.longest, len(tokens))
        if len(tokens) == length and len(tokenizer(text)["input_ids"]) > length:
            statistics.truncated.add(location)
        yield Example(np.asarray(tokens, np.int32), np.zeros(len(tokens), np.float32), location)


def pair_batches(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, replicas: int, first_rows: int | None = None
) -> tuple[PairBatches, PairStatistics]:
    """Tokenise the training pairs and lay them out in batches; micro_batch_size counts pairs. See `read_pairs`.

    Raises:
        UserError: something is wrong with the rows.
    """
    statistics, group = PairStatistics(), config.retrieval.texts_of_a_pair
    pairs = training_pairs(config, statistics, first_rows)
    in_step = min(len(pairs), config.micro_batch_size * replicas * config.gradient_accumulation_steps)
    if in_step == 1 and not config.retrieval.hard_negatives:
        raise UserError(
            f"an optimizer step has one of the {len(pairs)} pairs, and no other passage to tell its own from: give "
            "more pairs, or raise micro_batch_size or gradient_accumulation_steps"
        )
    batches = PairBatches(
        Examples.of(tokenized_pairs(config, tokenizer, pairs, statistics)),
        group=group,
        sequence_length=config.sequence_length,
        micro_batch_size=config.micro_batch_size * replicas * group,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        seed=config.seed,
    )
    return batches, statistics


def _texts(pair: Pair, options: RetrievalConfig) -> Iterator[str]:
    yield options.query_prefix + pair.query
    yield from (options.passage_prefix + text for text in (pair.positive, *pair.negatives[: options.hard_negatives]))
