"""An embedder that is ready to use: a run's, or a base model as it is before any training."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from models.parameters import split
from sharding.mesh import rows_divisor
from zagora_jax.adapter import open_adapter, with_adapters_options
from zagora_jax.arrange import arrange
from zagora_jax.base import open_base
from zagora_jax.config import TrainConfig
from zagora_jax.data.in_memory import texts_of
from zagora_jax.data.pairs import Pair, tokenized
from zagora_jax.devices import choose_mesh
from zagora_jax.distribution import Distribution
from zagora_jax.errors import UserError
from zagora_jax.frozen_weights import load_weights
from zagora_jax.kernels import forward_options
from zagora_jax.reporting.progress import Reporter
from zagora_jax.retrieval import Embedder, Found, measure, retrieval_set
from zagora_jax.tuned import open_tuned

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK_PAIRS = 1024  # whose scores for all passages exist at a time
ROWS = 64  # texts that a device computes together, where training has fewer


class TextEmbedder:
    """Makes vectors of texts."""

    def __init__(self, config: TrainConfig, tokenizer: "PreTrainedTokenizerBase", embedder: Embedder, adapters: Any):
        """Take what computes; `adapters` are on the devices."""
        self._config, self._tokenizer, self._embed = config, tokenizer, partial(embedder, adapters)

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors float32 [N, D] of queries."""
        return self._vectors(self._config.retrieval.query_prefix, texts)

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors float32 [N, D] of passages."""
        return self._vectors(self._config.retrieval.passage_prefix, texts)

    def find(self, pairs: Sequence[Pair], corpus: Sequence[str] = ()) -> Found:
        """Let each pair's query look for its passage among those of all, their negatives, and `corpus`."""
        options = self._config.retrieval
        rows = retrieval_set(pairs, corpus, self._tokenizer, options, self._config.sequence_length)
        return measure(self._embed, rows, options.temperature)

    def _vectors(self, prefix: str, texts: Sequence[str]) -> np.ndarray:
        texts = texts_of(texts, "texts")
        if not texts:
            raise UserError("expected at least one text, found none")
        if empty := [number for number, text in enumerate(texts, start=1) if not (prefix + text).strip()]:
            raise UserError(f"text {empty[0]}: expected a text, found nothing but space")
        prefixed = (prefix + text for text in texts)
        return self._embed(list(tokenized(prefixed, self._tokenizer, self._config.sequence_length)))


def open_embedder(
    config: TrainConfig, run: Path | None, reporter: Reporter, checkpoint: int | None = None
) -> TextEmbedder:
    """Put the model of a run, or else that which `config` begins with, on the devices of `config`.

    Of the run, the adapter of the checkpoint at step `checkpoint` is taken, or else the one in adapter/.

    Raises:
        UserError: it cannot be opened.
    """
    if run is None:
        config = with_adapters_options(config)
        base = open_base(
            config.model,
            quantization=config.quantization,
            dtype=config.compute_dtype,
            lora=None if config.adapter is None else config.lora,
            embeddings=config.embeddings,
            seed=config.seed,
            quantized_cache=config.quantized_folder,
        )
        adapters = split(base.model)[2] if config.adapter is None else open_adapter(config.adapter, base.model)
    else:
        tuned = open_tuned(run, checkpoint)
        base, adapters = tuned.base, tuned.adapters
        if tuned.config.retrieval.pooling != config.retrieval.pooling:
            raise UserError(
                f"{run}: was trained with retrieval.pooling {tuned.config.retrieval.pooling}, not "
                f"{config.retrieval.pooling}; from_run() takes a run up with its own options"
            )
    plain = {"gradient_compression": "none", "gradient_exchange": "synchronous"}
    mesh = choose_mesh(config)
    arrangement = arrange(config.model_copy(update=plain), base.model, mesh)
    assert isinstance(arrangement, Distribution), "embedders are in one program"
    tokenizer = base.tokenizer()
    with reporter.loading(base.parameter_count()) as on_tensor:
        frozen = load_weights(base, arrangement, on_tensor, reporter.say)
    pooling = config.retrieval.pooling
    assert pooling != "none", "embedders pool"
    embedder = Embedder(
        arrangement,
        forward_options(config, base),
        frozen,
        pooling,
        rows=max(ROWS, config.micro_batch_size) * rows_divisor(mesh),
        sequence_length=config.sequence_length,
    )
    return TextEmbedder(config, tokenizer, embedder, arrangement.put_adapters(adapters))


def mine(
    embedder: TextEmbedder, pairs: Sequence[Pair], count: int, corpus: Sequence[str] = (), ceiling: float = 0.95
) -> list[dict[str, Any]]:
    """Find for each query the passages that the embedder takes for its own and that are not.

    A passage that scores more than `ceiling` times what the right one does is left alone: it may be a right answer that
    nobody noted (NV-Retriever, arXiv:2407.15831).

    Args:
        embedder: which scores.
        pairs: queries and right passages.
        count: passages to find for each.
        corpus: more passages to search.
        ceiling: see above.

    Returns:
        Rows {query, positive, negatives}, the negatives from the best score down.

    Raises:
        UserError: there are too few passages.
    """
    numbers = {text: None for pair in pairs for text in (pair.positive, *pair.negatives)} | dict.fromkeys(corpus)
    passages = list(numbers)
    right: dict[str, set[str]] = {}
    for pair in pairs:
        right.setdefault(pair.query, set()).add(pair.positive)
    most = max(map(len, right.values()))
    if count < 1 or count > len(passages) - most:
        raise UserError(
            f"mined negatives: expected 1 to {len(passages) - most}, the passages that are wrong for a query, found "
            f"{count}"
        )
    places = {text: place for place, text in enumerate(passages)}
    vectors = embedder.passages(passages)
    rows: list[dict[str, Any]] = []
    for start in range(0, len(pairs), CHUNK_PAIRS):
        chunk = pairs[start : start + CHUNK_PAIRS]
        for pair, scores in zip(chunk, embedder.queries([pair.query for pair in chunk]) @ vectors.T, strict=True):
            limit = ceiling * float(scores[places[pair.positive]])
            chosen = hardest(scores, [places[text] for text in right[pair.query]], limit, count)
            negatives = [passages[place] for place in chosen]
            rows.append({"query": pair.query, "positive": pair.positive, "negatives": negatives})
    return rows


def hardest(scores: np.ndarray, right: list[int], limit: float, count: int) -> np.ndarray:
    """Return the places of the `count` highest scores [P] up to `limit`; where they are fewer, the lowest above too."""
    wrong = np.delete(np.arange(len(scores)), right)
    below, above = wrong[scores[wrong] <= limit], wrong[scores[wrong] > limit]
    order = np.concatenate([below[np.argsort(-scores[below], kind="stable")], above[np.argsort(scores[above])]])
    return order[:count]
