"""Vectors of texts, and how well queries find their passages by them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from models.parameters import split
from models.pooling import Pooling
from sharding.rules import partition_spec
from sharding.spanning import on_host
from zagora_jax.contrastive import embed
from zagora_jax.data.batches import Batch
from zagora_jax.data.pairs import Pair, tokenized
from zagora_jax.distribution import Distribution
from zagora_jax.option_groups import RetrievalConfig
from zagora_jax.step import ForwardOptions

RECALLS = (1, 5, 10)
NARROWEST = 16  # tokens of the narrowest program; others are twice, four times, ... as wide
CHUNK_QUERIES = 1024  # whose scores for all passages exist at a time


class Embedder:
    """Makes vectors of tokenised texts on the devices of an arrangement; the widths of programs are few."""

    def __init__(
        self,
        arrangement: Distribution,
        options: ForwardOptions,
        frozen: Any,
        pooling: Pooling,
        *,
        rows: int,
        sequence_length: int,
    ):
        """Take the weights.

        Args:
            arrangement: where they are.
            options: of the forward pass.
            frozen: the weights.
            pooling: how a text becomes a vector.
            rows: texts computed together.
            sequence_length: tokens of the longest text.
        """
        self._arrangement, self._options, self._frozen, self._pooling = arrangement, options, frozen, pooling
        self._rows, self._longest = rows, sequence_length
        self._programs: dict[int, Callable[[nnx.State, Any, Batch], np.ndarray]] = {}

    def __call__(self, adapters: Any, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Return unit vectors float32 [N, D] of N texts, with adapters that are on the devices."""
        order = sorted(range(len(texts)), key=lambda text: len(texts[text]))
        vectors: list[Any] = [None] * len(texts)
        for start in range(0, len(order), self._rows):
            chosen = order[start : start + self._rows]
            batch = self._batch([texts[text] for text in chosen])
            for text, vector in zip(chosen, self._program(batch)(adapters, self._frozen, batch)[0], strict=False):
                vectors[text] = vector
        return np.stack(vectors)

    def _batch(self, texts: Sequence[Sequence[int]]) -> Batch:
        width = NARROWEST
        while width < max(map(len, texts)):
            width *= 2
        shape = (1, self._rows, min(width, self._longest))
        tokens, segment_ids = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row, text in enumerate(texts):
            tokens[0, row, : len(text)], segment_ids[0, row, : len(text)] = text, 1
        positions = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
        return Batch(tokens, np.zeros(shape, np.int32), np.zeros(shape, np.float32), segment_ids, positions)

    def _program(self, batch: Batch) -> Callable[[nnx.State, Any, Batch], np.ndarray]:
        width = batch.tokens.shape[-1]
        if width not in self._programs:
            self._programs[width] = self._compile(batch)
        return self._programs[width]

    def _compile(self, batch: Batch) -> Callable[[nnx.State, Any, Batch], np.ndarray]:
        """Compile what gives the vectors float32 [A, M, D] of batches of one shape, on the host."""
        spread, graph = self._arrangement, split(self._arrangement.model)[0]

        def embed_all(adapters: nnx.State, frozen: Any, batch: Batch) -> jax.Array:
            model = nnx.merge(graph, frozen, adapters)
            return jax.lax.map(
                lambda own: embed(model, own, self._pooling, self._options, None, spread.placement), batch
            )

        arguments = (spread.abstract_adapters(), spread.abstract_frozen(), spread.abstract_batch(batch))
        compiled = spread.compile(embed_all, arguments, partition_spec(("accumulation", "rows", None)))
        return lambda adapters, frozen, batch: on_host(compiled(adapters, frozen, spread.put_batch(batch)))


@dataclass(frozen=True)
class RetrievalSet:
    """Queries, the passages that are searched, and which of these are right for each query.

    Attributes:
        queries: tokens of each.
        passages: tokens of each; no two have the same text.
        right: for each query, the numbers of the passages that are right.
    """

    queries: list[list[int]]
    passages: list[list[int]]
    right: list[frozenset[int]]


def retrieval_set(
    pairs: Iterable[Pair], corpus: Iterable[str], tokenizer: Any, options: RetrievalConfig, length: int
) -> RetrievalSet:
    """Let each query look for its passages among those of all pairs, their negatives, and `corpus`."""
    numbers: dict[str, int] = {}
    right: dict[str, set[int]] = {}
    for pair in pairs:
        own = numbers.setdefault(pair.positive, len(numbers))
        right.setdefault(pair.query, set()).add(own)
        for text in pair.negatives:
            numbers.setdefault(text, len(numbers))
    for text in corpus:
        numbers.setdefault(text, len(numbers))

    def tokens(prefix: str, texts: Iterable[str]) -> list[list[int]]:
        return list(tokenized((prefix + text for text in texts), tokenizer, length))

    return RetrievalSet(
        tokens(options.query_prefix, right),
        tokens(options.passage_prefix, numbers),
        list(map(frozenset, right.values())),
    )


@dataclass(frozen=True)
class Found:
    """How well queries find their passages.

    Attributes:
        ranks: int64 [Q], of the best right passage of each query, from 1: one more than the passages that are not
            right and score as much or more.
        losses: float64 [Q], minus the log of the right passage's share in the softmax over all, at a temperature.
    """

    ranks: np.ndarray
    losses: np.ndarray

    def numbers(self) -> dict[str, float]:
        """Return recall at 1, 5 and 10, and the mean reciprocal rank."""
        recalls = {f"recall_at_{k}": float((self.ranks <= k).mean()) for k in RECALLS}
        return {**recalls, "mrr": float((1 / self.ranks).mean())}


def search(queries: np.ndarray, passages: np.ndarray, right: Sequence[frozenset[int]], temperature: float) -> Found:
    """Compare vectors of queries [Q, D] with those of passages [P, D]."""
    ranks, losses = np.empty(len(queries), np.int64), np.empty(len(queries))
    for start in range(0, len(queries), CHUNK_QUERIES):
        scores = queries[start : start + CHUNK_QUERIES] @ passages.T  # [q, P]
        for row, of_query in enumerate(scores, start=start):
            own = sorted(right[row])
            best = of_query[own].max()
            others = np.delete(of_query, own)
            ranks[row] = 1 + (others >= best).sum()
            logits = np.append(others, best).astype(np.float64) / temperature
            losses[row] = np.logaddexp.reduce(logits) - logits[-1]
    return Found(ranks, losses)


def measure(embed: Callable[[Sequence[Sequence[int]]], np.ndarray], rows: RetrievalSet, temperature: float) -> Found:
    """Embed all texts of a set and search it."""
    return search(embed(rows.queries), embed(rows.passages), rows.right, temperature)


def as_percent(numbers: Mapping[str, float]) -> str:
    """Write what `Found.numbers` returns in words."""
    recalls = ", ".join(f"{numbers[f'recall_at_{k}']:.1%} at {k}" for k in RECALLS)
    return f"recall {recalls}; MRR {numbers['mrr']:.3f}"
