"""Everything about a training that can be known before a device is used, looked at in seconds."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import jax
from transformers import PreTrainedTokenizerBase

from models.attention import choose_kernel
from models.parameters import split
from zagora_jax.adapter import adapted_modules, open_adapter, with_adapters_options
from zagora_jax.base import BaseModel, open_base
from zagora_jax.commands import CheckConfig
from zagora_jax.config import TrainConfig
from zagora_jax.data.batches import Batches
from zagora_jax.data.chat import has_generation_marks
from zagora_jax.data.masks import end_of_turn
from zagora_jax.data.pairs import PairStatistics, held_out_pairs, pair_batches, tokenized_pairs
from zagora_jax.data.prepare import held_out_rows, lay_out, mixture, training_rows
from zagora_jax.data.statistics import Tally
from zagora_jax.data.tokenize import TokenizedData
from zagora_jax.devices import installed_gpus, mesh_sizes
from zagora_jax.end_tokens import end_tokens
from zagora_jax.errors import UserError, in_words
from zagora_jax.optimizer import make_schedule
from zagora_jax.planning.analytic import ERROR, estimate_memory
from zagora_jax.planning.shapes import Shapes
from zagora_jax.reporting.sensors import GIB
from zagora_jax.run_directory import RunDirectory

T = TypeVar("T")

# Of rows that were cut, above which it deserves a word.
MANY_CUT = 0.05


@dataclass(frozen=True)
class Finding:
    """Something to know; training refuses to start for an error."""

    level: Literal["error", "warning"]
    subject: str
    message: str


@dataclass
class Report:
    """What was found: facts by subject and name, as JSON values, and what deserves a look."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing was found that training would refuse."""
        return all(finding.level != "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"passed": self.passed, "findings": [asdict(finding) for finding in self.findings], "facts": self.facts}


def check(config: CheckConfig) -> Report:
    """Look at model, tokenizer, rows, steps and memory of a training; what is wrong with one does not hide the others.

    No device but the CPU is used, no weight is read and nothing is written.
    """
    return _Check(config).run()


class _Check:
    def __init__(self, config: CheckConfig):
        self.config, self.report = config, Report()
        self.gpus = installed_gpus()

    def run(self) -> Report:
        base = self._try("model", self._model)
        tokenizer = self._try("tokenizer", lambda: self._tokenizer(base)) if base and not base.synthetic else None
        sizes = self._try("devices", self._devices)
        batches = self._try("data", lambda: self._data(tokenizer, sizes)) if tokenizer and sizes else None
        if tokenizer:
            for subject, sources in self._held_out():
                self._try(subject, partial(self._eval_data, subject, tokenizer, sources))
        if base and batches:
            self._try("steps", lambda: self._steps(base, batches))
        if base and sizes:
            self._try("memory", lambda: self._memory(base, sizes, batches))
        self._try("output", self._output)
        return self.report

    def _try(self, subject: str, look: Callable[[], T]) -> T | None:
        with self._warnings(subject):
            try:
                return look()
            except UserError as error:
                self._find("error", subject, str(error))
            except OSError as error:
                self._find("error", subject, in_words(error))
            return None

    def _find(self, level: Literal["error", "warning"], subject: str, message: str) -> None:
        self.report.findings.append(Finding(level, subject, message))

    @contextmanager
    def _warnings(self, subject: str) -> Iterator[None]:
        """Take what is logged as warnings into the report."""
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self._find("warning", subject, record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("zagora_jax")
        propagate, logger.propagate = logger.propagate, False
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = propagate

    def _model(self) -> BaseModel:
        config = self.config = with_adapters_options(self.config)
        base = open_base(
            config.model,
            quantization=config.quantization,
            dtype=config.compute_dtype,
            lora=config.lora,
            embeddings=config.embeddings,
            seed=config.seed,
        )
        if config.adapter is not None:
            open_adapter(config.adapter, base.model)  # must fit
        _, _, adapters = split(base.model)
        modules = adapted_modules(base.model)
        self.report.facts["model"] = {
            "name": base.name,
            "parameters": base.parameter_count(),
            "tensors": base.tensor_count(),
            "layers": base.model.config.num_layers,
            "context": base.model.config.max_positions,
            "head_tied": base.model.config.tie_embeddings,
            "quantization": base.quantization,
            "adapted_weights": len(modules),
            "trained_parameters": sum(leaf.size for leaf in jax.tree.leaves(adapters)),
        }
        return base

    def _tokenizer(self, base: BaseModel) -> PreTrainedTokenizerBase:
        tokenizer = base.tokenizer()
        last, ends = end_of_turn(tokenizer), end_tokens(base)
        text = tokenizer.convert_ids_to_tokens
        self.report.facts["tokenizer"] = {
            "tokens": len(tokenizer),
            "embedding_rows": base.model.config.vocab_size,
            "bos": tokenizer.bos_token,
            "eos": tokenizer.eos_token,
            "chat_template": bool(tokenizer.chat_template),
            "generation_marks": has_generation_marks(tokenizer),
            "answers_end_with": None if last is None else text(last),
            "generation_stops_at": sorted(str(text(end)) for end in ends),
        }
        return tokenizer

    def _devices(self) -> dict[str, int]:
        """The sizes of the mesh's axes on the GPUs that are here, or else those that are asked for."""
        given = [size for size in self.config.mesh.model_dump().values() if size is not None]
        count = len(self.gpus) or math.prod(given)
        sizes = mesh_sizes(self.config, count, f"{count} GPUs")
        self.report.facts["devices"] = {"gpus": len(self.gpus), "mesh": sizes}
        return sizes

    def _data(self, tokenizer: PreTrainedTokenizerBase, sizes: dict[str, int]) -> Batches | None:
        """The batches; None where no row that was read is trained on."""
        rows = sizes.get("data", 1) * sizes.get("fsdp", 1)
        if self._is_embedder:
            pairs, statistics = pair_batches(self.config, tokenizer, rows, self._first_rows)
            self._describe_pairs("data", statistics)
            return pairs
        data = training_rows(self.config, tokenizer, self._first_rows)
        self._describe("data", data)
        if not len(data.examples):
            return None
        # Of a part of the rows, a mixture tells nothing.
        shares = mixture(self.config, data) if data.statistics.complete else []
        return lay_out(self.config, data.examples, rows, shares)

    def _held_out(self) -> Iterator[tuple[str, list[str] | None]]:
        """Name the sets of held-out rows; sources of None are those of eval_data or eval_fraction."""
        if self.config.eval_data or self.config.eval_fraction:
            yield "eval data", None
        for name, sources in self.config.named_eval_sets.items():
            yield f"eval set {name}", sources

    def _eval_data(self, subject: str, tokenizer: PreTrainedTokenizerBase, sources: list[str] | None) -> None:
        if not self._is_embedder:
            self._describe(subject, held_out_rows(self.config, tokenizer, sources, self._first_rows))
            return
        statistics = PairStatistics()
        pairs = held_out_pairs(self.config, sources, statistics, self._first_rows)
        queries_and_passages = self.config.model_copy(
            update={"retrieval": self.config.retrieval.model_copy(update={"hard_negatives": 0})}
        )
        for _ in tokenized_pairs(queries_and_passages, tokenizer, pairs, statistics):
            pass  # which counts them
        self._describe_pairs(subject, statistics)

    @property
    def _is_embedder(self) -> bool:
        return self.config.retrieval.pooling != "none"

    @property
    def _first_rows(self) -> int | None:
        return self.config.rows or None

    def _describe_pairs(self, subject: str, statistics: PairStatistics) -> None:
        self.report.facts[subject.replace(" ", "_")] = statistics.to_json()
        self._look_at_cuts(subject, "texts", statistics.truncated, statistics.texts)
        self._say_if_incomplete(subject, statistics.complete)

    def _describe(self, subject: str, data: TokenizedData) -> None:
        statistics = data.statistics
        self.report.facts[subject.replace(" ", "_")] = statistics.to_json()
        self._look_at_cuts(subject, "rows", statistics.truncated, statistics.rows)
        if statistics.left_out:
            places = "; ".join(str(tally) for tally in (statistics.unsupervised, statistics.cut_away) if tally.count)
            self._find("warning", subject, f"rows without a supervised token are left out: {places}")
        self._say_if_incomplete(subject, statistics.complete)
        if data.doubt:
            self._find("warning", subject, f"training refuses, if the rows that were not read are alike: {data.doubt}")

    def _look_at_cuts(self, subject: str, what: str, cut: Tally, count: int) -> None:
        if cut.count > MANY_CUT * count:
            self._find("warning", subject, f"{what} cut off at sequence_length {self.config.sequence_length}: {cut}")

    def _say_if_incomplete(self, subject: str, complete: bool) -> None:
        if not complete:
            first = f"only the first {self.config.rows:,} rows of each source were read; --rows 0 reads all"
            self._find("warning", subject, first)

    def _steps(self, base: BaseModel, batches: Batches) -> None:
        config, context = self.config, base.model.config.max_positions
        if batches.width > context:
            self._find(
                "warning", "data", f"rows have up to {batches.width} tokens, but the model's context is {context}"
            )
        facts: dict[str, Any] = {"sequence_width": batches.width}
        if config.max_steps or self.report.facts["data"]["complete"]:
            total = config.max_steps or batches.total_steps(config.epochs)
            make_schedule(config.schedule, config.learning_rate, config.warmup_of(total), total)
            facts["optimizer_steps"] = total
        self.report.facts["steps"] = facts

    def _memory(self, base: BaseModel, sizes: dict[str, int], batches: Batches | None) -> None:
        complete = batches is not None and self.report.facts["data"]["complete"]
        width = batches.width if batches is not None and complete else self.config.sequence_length
        sequences = self.config.micro_batch_size * self.config.retrieval.texts_of_a_pair
        config = _with_mesh(self.config, sizes).model_copy(
            update={"sequence_length": width, "micro_batch_size": sequences}
        )
        kernel = choose_kernel(
            config.attention,
            platform="gpu" if self.gpus else "cpu",
            packing=config.packing,
            dtype=config.compute_dtype,
            head_dim=base.model.config.head_dim,
            softcap=base.model.config.attention_softcap,
        )
        smallest = min(self.gpus, default=None)
        memory = max(estimate_memory(config, Shapes(base), kernel, smallest), key=lambda stage: stage.peak)
        self.report.facts["memory"] = {
            "estimated_gib_a_device": round(memory.peak / GIB, 4),
            "estimate_within": ERROR,
            "parts_gib": {name: round(size / GIB, 4) for name, size in memory.parts.items() if size},
            "host_gib_a_device": round(memory.host / GIB, 4),
            "gpu_gib": [round(size / GIB, 2) for size in self.gpus],
        }
        if smallest is not None and memory.peak * (1 - ERROR) > smallest:
            raise UserError(
                f"a step needs about {memory.peak / GIB:.2f} GiB of each GPU (to {ERROR:.0%}), and the smallest has "
                f"{smallest / GIB:.2f}; the command configure finds settings that fit"
            )
        if smallest is not None and memory.peak * (1 + ERROR) > 0.9 * smallest:
            self._find("warning", "memory", "a step needs nearly all of a GPU; train tells exactly, before it starts")

    def _output(self) -> None:
        if not self.config.resume:
            RunDirectory(self.config.output).require_free()


def _with_mesh(config: TrainConfig, sizes: dict[str, int]) -> TrainConfig:
    return config.model_copy(update={"mesh": config.mesh.model_copy(update=sizes)})
