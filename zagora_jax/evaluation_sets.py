"""The rows that a run holds out, in one set or in several by name, and what is measured on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from zagora_jax.arrangement import Arrangement
from zagora_jax.base import BaseModel
from zagora_jax.config import TrainConfig
from zagora_jax.data.batches import Batches
from zagora_jax.data.pairs import held_out_pairs
from zagora_jax.data.prepare import evaluation_batches
from zagora_jax.distribution import Distribution
from zagora_jax.evaluation import Evaluation, Totals, compile_evaluation, totals
from zagora_jax.option_groups import RetrievalConfig
from zagora_jax.reporting.progress import Reporter
from zagora_jax.retrieval import Embedder, RetrievalSet, measure, retrieval_set
from zagora_jax.step import ForwardOptions

MAIN = ""  # the set of eval_data or eval_fraction


class Measured(NamedTuple):
    """What came of one set: sums over its rows, and further numbers by name."""

    totals: Totals
    numbers: dict[str, float]


class HeldOut(Protocol):
    """Rows to measure a model on."""

    def compile(self, options: ForwardOptions, arrangement: Any, frozen: Any) -> Callable[[Any], Measured]:
        """Return what measures adapters that are laid out."""


@dataclass(frozen=True)
class HeldOutText:
    """Rows of a language model."""

    batches: Batches

    @property
    def fingerprint(self) -> str:
        """A hash of the rows."""
        return self.batches.fingerprint

    def compile(self, options: ForwardOptions, arrangement: Arrangement, frozen: Any) -> Callable[[Any], Measured]:
        """Compile the loss."""
        step = compile_evaluation(options, arrangement, frozen, self.batches)
        return lambda adapters: Measured(totals(step, adapters, self.batches.epoch(0)), {})


@dataclass(frozen=True)
class HeldOutPairs:
    """Rows of an embedder: its loss is that of finding each query's passage among all of the set."""

    rows: RetrievalSet
    options: RetrievalConfig
    rows_at_a_time: int
    sequence_length: int

    def compile(self, options: ForwardOptions, arrangement: Distribution, frozen: Any) -> Callable[[Any], Measured]:
        """Make ready to embed; programs are compiled by width."""
        pooling, temperature = self.options.pooling, self.options.temperature
        assert pooling != "none", "embedders pool"
        embedder = Embedder(
            arrangement, options, frozen, pooling, rows=self.rows_at_a_time, sequence_length=self.sequence_length
        )

        def measured(adapters: Any) -> Measured:
            found = measure(partial(embedder, adapters), self.rows, temperature)
            queries = len(found.losses)
            return Measured(Totals(float(found.losses.sum()), queries, queries), found.numbers())

        return measured


def evaluation_sets(
    config: TrainConfig, base: BaseModel, replicas: int, reporter: Reporter, sources: Sequence[str] | None = None
) -> dict[str, HeldOut]:
    """Read the rows of `sources`, or else all that the run holds out, by the names of their sets.

    Args:
        config: the options.
        base: whose tokenizer reads the rows.
        replicas: how many devices have rows of their own.
        reporter: told what became of the rows.
        sources: named as those of data.

    Raises:
        UserError: something is wrong with them.
    """

    def read(sources: Sequence[str] | None) -> HeldOut | None:
        if config.retrieval.pooling == "none":
            batches = evaluation_batches(config, base, replicas, reporter, sources)
            return None if batches is None else HeldOutText(batches)
        if not (sources or config.eval_data or config.eval_fraction):
            return None
        return _pairs(config, base, replicas, reporter, sources)

    sets = {MAIN: read(sources)}
    if not sources:
        sets |= {name: read(of_set) for name, of_set in config.named_eval_sets.items()}
    return {name: rows for name, rows in sets.items() if rows is not None}


def _pairs(
    config: TrainConfig, base: BaseModel, replicas: int, reporter: Reporter, sources: Sequence[str] | None
) -> HeldOutPairs:
    pairs, length = held_out_pairs(config, sources), config.sequence_length
    rows = retrieval_set(pairs, (), base.tokenizer(), config.retrieval, length)
    reporter.say(f"eval data: {len(rows.queries):,} queries, {len(rows.passages):,} passages to search")
    group = config.retrieval.texts_of_a_pair
    return HeldOutPairs(rows, config.retrieval, config.micro_batch_size * replicas * group, length)


def compile_sets(
    sets: dict[str, HeldOut], options: ForwardOptions, arrangement: Any, frozen: Any
) -> Callable[[Any], Evaluation]:
    """Return what measures adapters that are laid out on all sets.

    The loss is that of the main set, or, where there is none, of all sets together. What further numbers there are of
    a named set, and its loss, have its name behind a dot.
    """
    compiled = {name: rows.compile(options, arrangement, frozen) for name, rows in sets.items()}

    def measured(adapters: Any) -> Evaluation:
        found = {name: measure(adapters) for name, measure in compiled.items()}
        main = [found[MAIN]] if MAIN in found else list(found.values())
        whole = Totals(*(sum(column) for column in zip(*(one.totals for one in main), strict=True)))
        numbers: dict[str, float] = {}
        for name, one in found.items():
            ending = f".{name}" if name else ""
            loss = {"loss": one.totals.loss / one.totals.weight} if name else {}
            numbers |= {f"{key}{ending}": value for key, value in {**loss, **one.numbers}.items()}
        return Evaluation(whole.loss / whole.weight, whole.supervised_tokens, numbers)

    return measured
