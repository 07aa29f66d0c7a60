"""The training story, from a configuration to an adapter."""

import importlib.metadata
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

import zagora_jax
from models.lora import initial_adapter
from zagora_jax.adapter import save_adapter
from zagora_jax.base import open_base
from zagora_jax.checkpoints.load import split
from zagora_jax.checkpoints.run_state import RunStates
from zagora_jax.config import TrainConfig
from zagora_jax.config_file import save_config
from zagora_jax.data.batches import Batch
from zagora_jax.data.prepare import evaluation_batches, training_batches
from zagora_jax.errors import UserError
from zagora_jax.evaluation import compile_evaluation, evaluate
from zagora_jax.kernels import forward_options
from zagora_jax.optimizer import make_optimizer, make_schedule
from zagora_jax.reporting.progress import Reporter
from zagora_jax.reporting.sensors import GIB, peak_memory_gib
from zagora_jax.resume import Progress, find_state
from zagora_jax.run_directory import MetricsFile, RunDirectory
from zagora_jax.step import TrainState, initial_state, make_train_step

MAX_SKIPPED_IN_A_ROW = 5


@dataclass(frozen=True)
class TrainResult:
    """What came of a run; the losses are those on eval-data, None where none was given."""

    run_directory: Path
    steps: int
    loss_before: float | None
    loss_after: float | None


def train(config: TrainConfig, reporter: Reporter | None = None) -> TrainResult:
    """Train an adapter as `config` says, or go on with a run that was broken off.

    Raises:
        UserError: wrong input, found before the weights are read.
    """
    return _Run(config, reporter or Reporter()).train()


class _Run:
    """One training run. The constructor reads and checks; `train` uses the device and writes."""

    def __init__(self, config: TrainConfig, reporter: Reporter):
        self.config, self.reporter = config, reporter
        self.directory = RunDirectory(config.output)
        self.base = open_base(
            config.model,
            quantization=config.quantization,
            dtype=config.compute_dtype,
            lora=config.lora,
            seed=config.seed,
        )
        self.batches = training_batches(config, self.base, reporter)
        self.eval_batches = evaluation_batches(config, self.base, reporter)
        self.total_steps = config.max_steps or self.batches.total_steps(config.epochs)
        self.progress = Progress.of(config, self.base, self.batches)
        self.resumed_from = find_state(self.directory, config, self.progress)
        self.options = forward_options(config, self.base)
        self.schedule = make_schedule(config.schedule, config.learning_rate, config.warmup_steps, self.total_steps)
        self.optimizer = make_optimizer(config.optimizer, self.schedule, config.weight_decay)

    def train(self) -> TrainResult:
        if self.resumed_from is not None and self.resumed_from >= self.total_steps:
            self.reporter.say(
                f"{self.directory.path}: finished already, at step {self.resumed_from} of {self.total_steps}"
            )
            return self._result()
        self._begin()
        frozen = self._load()
        state = self._state()
        evaluation = None
        if self.eval_batches is not None:
            graph, _, _ = split(self.base.model)
            evaluation = compile_evaluation(graph, self.options, state.adapters, frozen, self.eval_batches)
        if self.resumed_from is None:
            self._evaluate(evaluation, state, frozen, "loss_before")
        step = self._compile(state, frozen)
        state = self._loop(step, evaluation, state, frozen)
        self._evaluate(evaluation, state, frozen, "loss_after")
        return self._result()

    def _begin(self) -> None:
        self.directory.create()
        save_config(self.config, self.directory.config)
        lora = self.config.lora
        _, frozen, adapters = split(self.base.model)
        trained = sum(leaf.size for leaf in jax.tree.leaves(adapters))
        total = self.base.parameter_count()
        frozen_gib = sum(_bytes(leaf) for leaf in jax.tree.leaves(frozen)) / GIB
        facts = {
            "model": f"{self.base.name} ({total / 1e6:,.1f} M parameters)"
            + (" SYNTHETIC" if self.base.synthetic else ""),
            "weights": f"{self.config.quantization}, {frozen_gib:.2f} GiB",
            "adapter": f"rank {lora.rank}, {trained / 1e6:,.2f} M trained parameters ({trained / total:.2%})",
            "device": f"{jax.devices()[0].device_kind} ({jax.default_backend()})",
            "computation": f"{self.config.compute_dtype}, attention {self.options.kernel}, remat {self.options.remat}",
            "optimizer step": f"{self.config.gradient_accumulation_steps} x {self.config.micro_batch_size} x "
            f"{self.batches.width} tokens, {self.config.optimizer}, {self.config.schedule} schedule",
            "steps": f"{self.total_steps}" + (f", going on from {self.resumed_from}" if self.resumed_from else ""),
            "run directory": self.directory.path,
        }
        self.reporter.banner("zagora-jax train", facts)
        self.directory.update_report(
            {"synthetic": self.base.synthetic, "facts": {k: str(v) for k, v in facts.items()}, "versions": _versions()}
        )

    def _load(self) -> nnx.State:
        with self.reporter.counting("reading and quantising tensors", self.base.tensor_count()) as count:
            return self.base.load(count.advance)

    def _state(self) -> TrainState:
        _, _, declared = split(self.base.model)
        adapters = initial_adapter(declared, self.config.seed)
        state = initial_state(adapters, self.optimizer, self.config.compute_dtype)
        if self.resumed_from is None:
            return state
        with RunStates(self.directory.checkpoints, self.config.keep_checkpoints) as states:
            return states.restore(self.resumed_from, state)

    def _compile(self, state: TrainState, frozen: nnx.State) -> Any:
        """Compile the train step once and for all: the result refuses other shapes instead of compiling again."""
        graph, _, _ = split(self.base.model)
        lora = self.config.lora
        step = make_train_step(
            graph,
            self.optimizer,
            self.schedule,
            self.options,
            max_grad_norm=self.config.max_grad_norm,
            dropout_seed=self.config.seed if lora.dropout else None,
        )
        started = time.perf_counter()
        compiled = jax.jit(step, donate_argnums=0).lower(state, frozen, self.batches.abstract()).compile()
        memory = compiled.memory_analysis()
        planned = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / GIB
        self.reporter.say(f"compiled in {time.perf_counter() - started:.1f} s; the step needs {planned:.2f} GiB")
        self.directory.update_report({"planned_memory_gib": planned})
        return compiled

    def _evaluate(self, evaluation: Any, state: TrainState, frozen: nnx.State, name: str) -> float | None:
        if self.eval_batches is None:
            return None
        result = evaluate(evaluation, state.adapters, frozen, self.eval_batches.epoch(0))
        self.directory.update_report({name: result.loss, "eval_supervised_tokens": result.supervised_tokens})
        self.reporter.say(f"eval loss {result.loss:.4f} over {result.supervised_tokens:,} supervised tokens")
        return result.loss

    def _loop(self, step: Any, evaluation: Any, state: TrainState, frozen: nnx.State) -> TrainState:
        config, first = self.config, self.resumed_from or 0
        skipped = 0
        metrics_file = MetricsFile(self.directory.metrics, after_step=first)
        states = RunStates(self.directory.checkpoints, config.keep_checkpoints)
        with self.reporter.training(self.total_steps, first, config.log_every) as bar, states, metrics_file:
            for number, batch in enumerate(self.batches.from_step(first, self.total_steps), start=first + 1):
                started = time.perf_counter()
                state, numbers = step(state, frozen, batch)
                metrics = self._metrics(number, numbers, batch, started)
                skipped = 0 if metrics["finite"] else skipped + 1
                if config.eval_every and number % config.eval_every == 0 and number < self.total_steps:
                    metrics["eval_loss"] = self._evaluate(evaluation, state, frozen, "eval_loss")
                metrics_file.write(metrics)
                bar.step(metrics)
                self._stop_if_diverged(skipped, metrics)
                if number == self.total_steps or (config.save_every and number % config.save_every == 0):
                    metrics_file.sync()
                    self._save(states, state)
        return state

    def _metrics(self, number: int, numbers: Mapping[str, jax.Array], batch: Batch, started: float) -> dict[str, Any]:
        metrics = {name: value.item() for name, value in jax.device_get(dict(numbers)).items()}
        seconds = time.perf_counter() - started
        return {
            "step": number,
            **metrics,
            "supervised_tokens": int(metrics["supervised_tokens"]),
            "tokens_per_second": int((batch.segment_ids > 0).sum()) / seconds,
            "seconds": seconds,
            "peak_memory_gib": peak_memory_gib(),
        }

    def _stop_if_diverged(self, skipped: int, metrics: Mapping[str, Any]) -> None:
        if skipped >= MAX_SKIPPED_IN_A_ROW and metrics.get("loss_scale", 1.0) <= 1.0:
            raise UserError(
                f"step {metrics['step']}: loss or gradients were not finite in {skipped} steps in a row, whose updates "
                f"were skipped; the last saved state stands in {self.directory.checkpoints}. Try a lower "
                "learning_rate, or compute_dtype float32 or bfloat16 in place of float16"
            )

    def _save(self, states: RunStates, state: TrainState) -> None:
        states.save(state, asdict(self.progress))
        save_adapter(self.directory.adapter, self.base.model, state.adapters, self.config.lora, self.base.name)

    def _result(self) -> TrainResult:
        report = self.directory.read_report()
        return TrainResult(self.directory.path, self.total_steps, report.get("loss_before"), report.get("loss_after"))


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize


def _versions() -> dict[str, str]:
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")
    return {
        "python": platform.python_version(),
        "zagora-jax": zagora_jax.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
    }
