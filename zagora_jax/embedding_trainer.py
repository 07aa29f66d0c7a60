"""The trainer for embedders: a decoder learns to give queries and their passages vectors of the same direction."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zagora_jax.callbacks import Callback
from zagora_jax.data.in_memory import Dataset, sources_of
from zagora_jax.data.pairs import Pair, held_out_pairs, read_pairs
from zagora_jax.embedding_model import TextEmbedder, mine, open_embedder
from zagora_jax.options import Given
from zagora_jax.reporting.progress import Reporter
from zagora_jax.retrieval import as_percent
from zagora_jax.run_directory import RunDirectory
from zagora_jax.trainer import TrainResult
from zagora_jax.trainers import Trainer, constructed
from zagora_jax.training_arguments import Arguments, merged


class EmbeddingTrainer(Trainer):
    """Tunes a decoder as an embedder with LoRA.

    Rows are {"query": ..., "positive": ..., "negatives": [...]}, the last optional. In an optimizer step, each query's
    passage stands against all other passages of the step, on all devices. per_device_train_batch_size pairs are
    computed at a time, gradient_accumulation_steps of these make the step: more of them cost time, but no memory.

    ```
    trainer = EmbeddingTrainer("path/to/model", pooling="last", gradient_accumulation_steps=16)
    trainer.train(pairs, eval_dataset=held_out, per_device_train_batch_size=4, learning_rate=2e-4)
    vectors = trainer.embed(["a passage"])
    trainer.export("embedder")
    ```
    """

    _embedder: TextEmbedder | None = None

    def __init__(
        self,
        model_name: str | Path,
        gpu_ids: Sequence[int] | None = None,
        partition_strategy: str | None = None,
        gradient_accumulation_steps: int | None = None,
        *,
        pooling: str = "last",
        temperature: float = 0.05,
        query_prefix: str = "",
        passage_prefix: str = "",
        callbacks: Sequence[Callback] = (),
        reporter: Reporter | None = None,
        **options: Any,
    ):
        """Take the options that hold for every training; see `zagora_jax.trainers.DistributedTrainer`.

        Args:
            model_name: as the option model.
            gpu_ids: the numbers of the devices.
            partition_strategy: as the option strategy; not layerwise or streaming.
            gradient_accumulation_steps: how many times micro_batch_size pairs an optimizer step has.
            pooling: the vector of a text is that of its last token (last), or the mean over all (mean).
            temperature: scores are divided by it in the loss.
            query_prefix: what is put before each query.
            passage_prefix: what is put before each passage.
            callbacks: are told what happens.
            reporter: prints the run's story.
            **options: of `zagora_jax.config.TrainConfig`.

        Raises:
            UserError: an option is wrong.
        """
        where = type(self).__name__
        given = constructed(where, model_name, gpu_ids, partition_strategy, gradient_accumulation_steps, options)
        own = {
            "pooling": pooling,
            "temperature": temperature,
            "query_prefix": query_prefix,
            "passage_prefix": passage_prefix,
        }
        named = {f"retrieval.{name}": Given(value, f"{where}: {name}") for name, value in own.items()}
        super().__init__(merged(named, given), callbacks, reporter)

    def train(
        self,
        dataset: Dataset,
        training_args: Arguments = None,
        *,
        eval_dataset: Dataset | None = None,
        mined_negatives: int = 0,
        **arguments: Any,
    ) -> TrainResult:
        """Train; report.json and metrics.jsonl have recall and MRR on the held-out pairs before, amid and after.

        Args:
            dataset: the pairs, as files or rows; see `DistributedTrainer.train`.
            training_args: as of `DistributedTrainer.train`.
            eval_dataset: pairs held out. Each query looks for its passage among those of all of them.
            mined_negatives: for each query so many passages that the model as it is takes for right and that are not
                stand beside its passage; see `mine`. A row's own negatives are not used then.
            **arguments: more training arguments, by name.
        """
        if mined_negatives:
            dataset = self.mine(dataset, mined_negatives)
            arguments = {**arguments, "retrieval.hard_negatives": mined_negatives}
        return self._fit(dataset, eval_dataset, None, training_args, arguments)

    def embed(self, texts: Sequence[str], *, query: bool = False) -> np.ndarray:
        """Return unit vectors float32 [N, D] of texts, as queries or as passages.

        By the run's model, or, where nothing is trained yet, by the base model.
        """
        embedder = self._opened()
        return embedder.queries(texts) if query else embedder.passages(texts)

    def mine(
        self, dataset: Dataset, count: int, *, corpus: Sequence[str] = (), ceiling: float = 0.95
    ) -> list[dict[str, Any]]:
        """Return rows with hard negatives, found with the model as it is; see `zagora_jax.embedding_model.mine`."""
        return mine(self._opened(), self._pairs(dataset), count, corpus, ceiling)

    def evaluate(
        self, dataset: Dataset | None = None, *, checkpoint: int | None = None, corpus: Sequence[str] = ()
    ) -> dict[str, float]:
        """Measure how well queries find their passages, before any training too.

        Args:
            dataset: the pairs; those that the run held out where not given.
            checkpoint: the step whose adapter is measured; else the one in adapter/.
            corpus: passages to search beside those of the pairs.

        Returns:
            recall_at_1, recall_at_5, recall_at_10, mrr.
        """
        embedder = (
            self._opened()
            if checkpoint is None
            else open_embedder(self.config, self._run(), self._reporter, checkpoint)
        )
        found = embedder.find(held_out_pairs(self.config) if dataset is None else self._pairs(dataset), corpus)
        numbers = found.numbers()
        self._reporter.say(f"{len(found.ranks):,} queries: {as_percent(numbers)}")
        return numbers

    def export(self, to: str | Path, *, base: str | None = None, overwrite: bool = False) -> Path:
        """Write a folder that sentence-transformers loads, with the adapter merged into the weights.

        Args:
            to: the folder.
            base: the weights that the adapter is added to: dequantized, those that training saw, so that the vectors
                are those of `embed`; or original. Where not given: dequantized, if they were quantised.
            overwrite: replace an earlier export.
        """
        self._require_run("export")
        quantization = RunDirectory(self.run_directory).read_config().quantization
        base = base or ("original" if quantization == "none" else "dequantized")
        return self._export(to, format="merged", base=base, overwrite=overwrite)

    def _train(self, given: Mapping[str, Given]) -> TrainResult:
        self._embedder = None  # whose weights the training has no room for
        return super()._train(given)

    def _run(self) -> Path | None:
        return self.run_directory if RunDirectory(self.run_directory).adapter.is_dir() else None

    def _opened(self) -> TextEmbedder:
        if self._embedder is None:
            self._embedder = open_embedder(self.config, self._run(), self._reporter)
        return self._embedder

    def _pairs(self, dataset: Dataset) -> list[Pair]:
        with tempfile.TemporaryDirectory() as folder:
            return list(read_pairs(sources_of(dataset, Path(folder), "dataset")))
