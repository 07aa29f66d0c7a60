"""The training story, from a configuration to an adapter."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from models.lora import initial_adapter
from models.parameters import split
from zagora_jax import interruption, processes, shared_run
from zagora_jax.adapter import (
    open_adapter,
    save_adapter,
    with_adapters_options,
)
from zagora_jax.arrange import arrange
from zagora_jax.arrangement import Arrangement, CompiledStep, Recipe
from zagora_jax.base import open_base
from zagora_jax.callbacks import Begin, Callback, Callbacks, End, Evaluated, Saved
from zagora_jax.callbacks import Step as StepEvent
from zagora_jax.checkpoints.background import BackgroundWriter, copy_to_host
from zagora_jax.checkpoints.load import Destination
from zagora_jax.checkpoints.run_state import SavedStates, StateWriter
from zagora_jax.compaction import compact
from zagora_jax.config import TrainConfig
from zagora_jax.contrastive import Contrastive
from zagora_jax.data.batches import Batch
from zagora_jax.data.pairs import PairBatches
from zagora_jax.data.prepare import training_batches
from zagora_jax.devices import TAKES_LESS, limit_memory, memory_limit
from zagora_jax.errors import UserError
from zagora_jax.evaluation import Evaluation
from zagora_jax.evaluation_sets import compile_sets, evaluation_sets
from zagora_jax.factors import InitialFactors
from zagora_jax.frozen_weights import load_weights
from zagora_jax.hanging import Pace
from zagora_jax.held_out_losses import LOSS, HeldOutLosses
from zagora_jax.host_memory import allow_pinned_memory, require_pinned_memory
from zagora_jax.kernels import forward_options
from zagora_jax.optimizer import make_optimizer, make_schedule
from zagora_jax.out_of_memory import out_of_memory
from zagora_jax.planning.check import require_fit
from zagora_jax.reporting.attached import attached
from zagora_jax.reporting.card_watch import CardWatch
from zagora_jax.reporting.progress import Reporter
from zagora_jax.reporting.sensors import GIB, peak_memory_gib
from zagora_jax.reporting.trace import show_trace, tracing
from zagora_jax.residency import settle_form, settle_remat, settle_source, settle_streaming
from zagora_jax.resume import Progress, SavedPoint, find_saved
from zagora_jax.row_lengths import RowLengths
from zagora_jax.run_directory import MetricsFile, RunDirectory, read_metrics
from zagora_jax.run_facts import run_facts, versions
from zagora_jax.samples import RunSamples
from zagora_jax.saving import Saver
from zagora_jax.sites.site import Site
from zagora_jax.skipped_steps import SkippedSteps
from zagora_jax.step import NEXT_TOKEN, Objective
from zagora_jax.train_state import TrainState, initial_state
from zagora_jax.tuned import with_initial_adapter

SITES = "sites"  # names, in a checkpoint, what the run keeps as one of several sites
Step = Callable[[Any, Batch], tuple[Any, Mapping[str, Any]]]
Measure = Callable[[Any], Evaluation]  # of adapters that are laid out


@dataclass(frozen=True)
class TrainResult:
    """What came of a run.

    Attributes:
        run_directory: where it wrote.
        steps: finished ones.
        loss_before: on eval-data before the first step; None where none was given.
        loss_after: the same after the last.
        is_told_here: whether this process is the one of the run that tells people.
    """

    run_directory: Path
    steps: int
    loss_before: float | None
    loss_after: float | None
    is_told_here: bool = True


def train(config: TrainConfig, reporter: Reporter | None = None, callbacks: Sequence[Callback] = ()) -> TrainResult:
    """Train an adapter as `config` says, or go on with a run that was broken off.

    Args:
        config: the options.
        reporter: prints the run's story; by default to the standard output.
        callbacks: are told what happens, see `zagora_jax.callbacks`.

    Raises:
        UserError: wrong input, found before the weights are read; a training that diverges; a disk that is full; a
            device that fails.
        Interrupted: SIGTERM, SIGINT or SIGHUP came; every finished step is saved.
    """
    with interruption.interruptible(), processes.joined(config):
        run = _Run(config, reporter or Reporter(), callbacks)
        try:
            return run.train()
        except OSError as error:
            raise UserError(
                f"{error.filename or run.directory.path}: {error.strerror or error}. What was saved before stands: "
                "once this is mended, the same command with --resume goes on from the newest checkpoint"
            ) from error
        except jax.errors.JaxRuntimeError as error:
            if reason := out_of_memory(error, run.planned, TAKES_LESS):
                raise UserError(reason) from error
            raise


class _Run:
    """One training run. The constructor reads and checks; `train` uses the device and writes."""

    def __init__(self, config: TrainConfig, reporter: Reporter, callbacks: Sequence[Callback] = ()):
        config = with_adapters_options(config)
        self.processes = processes.present()
        shared_run.require_shareable(config, self.processes)
        self.config, self.reporter = config, shared_run.own_reporter(self.processes, reporter, config.output)
        written = attached(config, reporter.say) if self.processes.is_first else []
        self.callbacks = Callbacks([*callbacks, *written])
        allow_pinned_memory(config)
        if config.device_memory_limit is not None:
            limit_memory(config.device_memory_limit)
        self.processes.meet_devices()
        self.directory = RunDirectory(self.processes.scratch or config.output)
        if not config.resume:
            self.directory.require_free()
        self.base = open_base(
            config.model,
            quantization=config.quantization,
            dtype=config.compute_dtype,
            lora=config.lora,
            embeddings=config.embeddings,
            seed=config.seed,
            quantized_cache=config.quantized_folder,
        )
        _, self.declared_frozen, self.declared_adapters = split(self.base.model)
        self.arrangement = self._arrange(config)
        self.options = forward_options(config, self.base)
        self.processes.doing("reading rows")
        self.batches = training_batches(config, self.base, self.arrangement.rows_divisor, self.reporter)
        self.held_out = evaluation_sets(config, self.base, self.arrangement.rows_divisor, self.reporter)
        self.total_steps = config.max_steps or self.batches.total_steps(config.epochs)
        self.warmup_steps = config.warmup_of(self.total_steps)
        self.schedule = make_schedule(config.schedule, config.learning_rate, self.warmup_steps, self.total_steps)
        self.optimizer = make_optimizer(config.optimizer, self.schedule, config.weight_decay)
        self.first_adapter = None if config.adapter is None else open_adapter(config.adapter, self.base.model)
        self.row_lengths: Mapping[tuple[str, ...], Any] = {}  # for DoRA, once the weights are read
        self.originals: dict[tuple[str, ...], Any] = {}  # of what is trained in full, likewise
        self.state_shapes = jax.eval_shape(self._new_state)
        self.site: Site | None = None
        self.in_sites = config.sites.folder is not None
        if self.in_sites and self.processes.is_first:
            self.site = Site(config, self.base, self.state_shapes.adapters, reporter.say)
        self.iterator = self.batches.from_step(0, self.total_steps)
        self.progress = Progress.of(config, self.base, self.iterator, self.total_steps, self.arrangement.exchange_state)
        shared_run.require_same_run(self.processes, config, self.progress, self.total_steps, self.held_out)
        find = partial(find_saved, self.directory, config, self.progress, self.iterator, self.reporter.say)
        self.saved = shared_run.agreed_saved(self.processes, find, self.iterator)
        self.planned: Mapping[jax.Device, int] | None = None  # bytes of a step, once it is compiled
        self.first_step = self.finished_steps = 0 if self.saved is None else self.saved.step
        before = [line for line in read_metrics(self.directory.metrics) if line["step"] <= self.first_step]
        self.before = shared_run.agreed_metrics(self.processes, before, self.directory.metrics)
        saved = self.processes.from_first(SavedStates(self.directory.checkpoints).steps())
        self.losses = HeldOutLosses(config.early_stopping, self.before, saved)
        self.stop = self._earlier_stop()
        self.goes_on = self.first_step < self.total_steps and self.stop is None
        self.pace = Pace(
            "A device, its driver or the link to another one does not answer. The steps up to the last saved one, in "
            f"{self.directory.checkpoints}, stand: the same command with --resume goes on from there"
        )
        self.sensors = CardWatch(self.reporter.say, config.pause_above_celsius)
        self._check_profiled_step()

    def _arrange(self, config: TrainConfig, mesh: Mesh | None = None) -> Arrangement:
        """Lay the model out, on devices that all processes have alike."""
        arrangement = arrange(shared_run.shareable(config, self.processes), self.base.model, mesh)
        shared_run.require_spread_evenly(arrangement.mesh, self.processes)
        shared_run.require_one_program(arrangement, config, self.base.model, self.processes)
        return arrangement

    def _check_profiled_step(self) -> None:
        """Refuse, or after a resumption mention, a step to be profiled that does not come."""
        step = self.config.profile_step
        if step is not None and step > self.total_steps:
            raise UserError(f"--profile-step {step}: the run has {self.total_steps} steps; give one of them")
        if step is not None and step <= self.first_step:
            self.reporter.say(f"--profile-step {step}: is past, and is not profiled: the run goes on behind it")

    def _earlier_stop(self) -> str | None:
        """Say why the run was ended behind the saved step before its last, if it was.

        Who names the checkpoint to go on from goes on, but for early stopping, which the options ask for.
        """
        by_callback = self.before[-1].get("stop") if self.before and self.config.resume is True else None
        return by_callback or self.losses.stop

    def train(self) -> TrainResult:
        if self.processes.from_first(self._is_finished()):
            stopped = ""
            if self.stop is not None:
                checkpoint = self.directory.checkpoints / str(self.first_step)
                more = "a higher patience" if self.losses.stop else f"--resume {checkpoint}"
                stopped = f": {self.stop}. With {more} it goes on"
            self.reporter.say(
                f"{self.directory.path}: finished already, at step {self.first_step} of {self.total_steps}{stopped}"
            )
            return self._result()
        with self.directory.claimed():
            if not self.config.resume:
                self.directory.require_free()  # again: another run may have ended there since
            try:
                result = self._train()
            except BaseException as error:
                self.callbacks.tell(End(self.directory.path, None, error))
                raise
            finally:
                if self.arrangement.feed is not None:
                    self.arrangement.feed.close()
                if self.site is not None:
                    self.site.close()
            self.callbacks.tell(End(self.directory.path, result, None))
            return result

    def _train(self) -> TrainResult:
        config = self.config
        self._settle()
        shared_run.split_rows(self.arrangement, self.batches, self.processes)
        path, tell = self.directory.samples, self.callbacks.tell
        samples = RunSamples(config.samples, self.base, self.arrangement, self.options, path, self.first_step, tell)
        self._open_directory()
        if self.goes_on:
            self.processes.meet("trying the links between devices")
            shared_run.try_links(self.arrangement.mesh, self.processes, self.directory, self.reporter.say)
        # Before any weight is read, so that a step that cannot fit costs seconds.
        compiled = self._compile_step() if self.goes_on else None
        frozen = self._load()
        state = self._initial_state()
        if self.saved is None and config.lora.initialization != "default":
            self._save_adapter(self._whole(state), self.directory.initial_adapter)
        if compiled is not None:
            frozen, state = compact((frozen, state), compiled.planned_memory())
        # States are forgotten before the metrics of their steps: those of every saved step are always there.
        states = StateWriter(self.directory.checkpoints, keep=config.keep_checkpoints, after_step=self.first_step)
        measure = self._compile_evaluation(frozen)
        self.callbacks.tell(Begin(config, self.directory.path, self.first_step, self.total_steps, self.facts))
        if self.saved is None:
            self._evaluate(measure, state.adapters, "loss_before")
            samples.take(0, state.adapters, frozen)
        if compiled is not None:
            state = self._loop(compiled, frozen, measure, samples, states, state)
            if self.site is not None:
                self.site.leave()
        last = self._evaluate(measure, state.adapters, "loss_after")
        adapters = state.adapters if last is None else self._end_with_best(measure, last, state.adapters)
        samples.take(self.finished_steps, adapters, frozen)
        return self._result()

    def _end_with_best(self, measure: Measure | None, last: Evaluation, adapters: Any) -> Any:
        """Put the adapter of the best step in adapter/, if that is asked for and not the last step's; returns it."""
        best = self.losses.best
        if not self.config.keep_best or best is None or last.loss <= best.loss:
            return adapters
        whole = self._restored(best.step, exchange=False)
        self._save_adapter(whole)
        self.directory.update_report({"best_step": best.step, "loss_last": last.loss})
        self.reporter.say(f"the best step was {best.step}: its adapter is the result")
        adapters = self.arrangement.put_adapters(whole.adapters)
        self._evaluate(measure, adapters, "loss_after")
        return adapters

    def _settle(self) -> None:
        """Decide what stays on the devices, where that depends on them, and on how long sequences are."""
        mesh = self.arrangement.mesh
        sequences = self.config.micro_batch_size * self.config.retrieval.texts_of_a_pair
        settled = self._config_as_run.model_copy(update={"micro_batch_size": sequences})
        settled = settle_streaming(settled, self.base, mesh, self.reporter.say)
        settled = settle_source(settled, self.base, mesh, self.reporter.say)
        settled = settle_form(settled, self.base, mesh, self.reporter.say)
        settled = settle_remat(settled, self.base, mesh, self.reporter.say)
        self.options = forward_options(settled, self.base)
        self.arrangement = self._arrange(settled, mesh)

    @property
    def _config_as_run(self) -> TrainConfig:
        """The options with sequences no longer than the longest row needs."""
        return self.config.model_copy(update={"sequence_length": self.batches.width})

    def _is_finished(self) -> bool:
        """Tell whether all is done: a run may also break off behind its last step, before the last evaluation."""
        if self.goes_on or not self.directory.adapter.is_dir():
            return False
        return not self.held_out or self.directory.read_report().get("loss_after") is not None

    def _open_directory(self) -> None:
        """Say what will be done, and write it down."""
        self.directory.create()
        if self.saved is None and self.config.resume:
            self.reporter.say(f"{self.directory.path}: no step was saved here yet, so this run begins at the first one")
        self.facts = run_facts(
            self.config,
            self.base,
            self.arrangement,
            self.options,
            width=self.batches.width,
            steps=f"{self.total_steps}" + (f", going on from {self.first_step}" if self.first_step else ""),
        )
        self.reporter.banner("zagora-jax train", self.facts)
        if self.config.gradient_exchange == "delayed":
            self.reporter.say(
                "gradient exchange delayed: each step applies the gradients of the one before, so the first applies "
                "none; the last one's are applied at the end"
            )
        if self.batches.width > (context := self.base.model.config.max_positions):
            self.reporter.say(
                f"warning: rows have up to {self.batches.width} tokens, but the model's context is {context}"
            )
        self.directory.write_config(self.config)
        if self.saved is None:
            self.directory.report.unlink(missing_ok=True)
        self.directory.update_report(
            {
                "synthetic": self.base.synthetic,
                "model_fingerprint": self.progress.model,
                "options": self.progress.options,
                "facts": self.facts,
                "versions": versions(),
                "total_steps": self.total_steps,
                "loss_after": None,
                "stopped": None,
                **self.sensors.facts(),
            }
        )

    def _load(self) -> Any:
        self.processes.meet("reading weights")
        with self.reporter.loading(self.base.parameter_count()) as on_tensor:
            if self.saved is None and self.first_adapter is None:
                self.originals = self.base.originals(on_tensor)
            factors = self._initial_factors()
            if factors is not None:
                self.originals |= factors.of_parameters  # filled while weights are read
            load = partial(load_weights, self.base, self.arrangement, on_tensor, self.reporter.say)
            if self.saved is not None or self.first_adapter is not None or not self.config.lora.use_dora:
                return load()

            def measured(destination: Destination) -> Destination:
                lengths = RowLengths(destination, self.base.model)
                self.row_lengths = lengths.of_modules  # filled while weights are read
                return lengths

            return load(measured)

    def _initial_factors(self) -> InitialFactors | None:
        """Prepare the weights for adapters that begin as a part of them; a run that goes on knows that part."""
        lora = self.config.lora
        if lora.initialization == "default":
            return None
        if self.saved is not None:
            self.base = with_initial_adapter(self.directory, self.base, self.config)
            return None
        if self.base.synthetic:
            raise UserError(f"--lora.initialization {lora.initialization}: synthetic weights have no principal part")
        factors = InitialFactors(self.base.model, lora.initialization, self.base.quantization, self.config.seed)
        self.base = replace(self.base, prepare=factors)
        return factors

    def _new_state(self) -> TrainState:
        """Return the whole state before the first step, on one device."""
        adapters = self.first_adapter
        if adapters is None:
            adapters = initial_adapter(self.declared_adapters, self.config.seed, self.row_lengths, self.originals)
        state = initial_state(adapters, self.optimizer, self.config.compute_dtype, self.config.loss_spike_factor)
        return self.arrangement.begin(state)

    def _initial_state(self) -> TrainState:
        """Return the state to go on from, spread over the devices: a new one, or the saved one."""
        state = self._new_state() if self.saved is None else self._saved_state(self.saved)
        if self.in_sites and self.goes_on:
            state = self._join_sites(state)
        if self.saved is None:
            state = state._replace(adapters=self.processes.arrays_from_first(state.adapters))
        return self.arrangement.put_state(state)

    def _join_sites(self, state: TrainState) -> TrainState:
        """Begin with the adapter that all sites have, or take part again; the first process does."""
        if self.site is None:
            return state
        if self.saved is None:
            return state._replace(adapters=self.site.begin(state.adapters))
        saved = SavedStates(self.directory.checkpoints).further(self.saved.step, SITES, self.site.like_saved())
        self.site.go_on(state.adapters, saved)
        return state

    def _saved_state(self, saved: SavedPoint) -> TrainState:
        """Read the saved state, into the host's memory."""
        same = saved.progress.exchange == self.progress.exchange
        if not same:
            self._say_what_is_lost(saved.progress)
        return self._restored(saved.step, exchange=same)

    def _restored(self, step: int, *, exchange: bool) -> TrainState:
        like = self.arrangement.begin(self.state_shapes)
        read = partial(SavedStates(self.directory.checkpoints).restore, step, like, exchange=exchange)
        return shared_run.restored(self.processes, read, like)

    def _whole(self, state: TrainState) -> TrainState:
        """Return the whole state, on the host of the process that writes it."""
        return self.arrangement.whole_state(shared_run.on_host(self.processes, state), self.state_shapes)

    def _say_what_is_lost(self, saved: Progress) -> None:
        """Tell what a state that was saved with another exchange of gradients cannot hand over to this one."""
        lost = ["what compression had rounded off"] if saved.exchange["compression"] != "none" else []
        lost += [f"the gradients of step {self.first_step}, which no step has applied"] if saved.pending else []
        if lost:
            self.reporter.say(
                "warning: the mesh or the exchange of gradients is not that of the checkpoint, whose state of it is "
                f"left behind: {', and '.join(lost)}"
            )

    def _compile_evaluation(self, frozen: nnx.State) -> Measure | None:
        if not self.held_out:
            return None
        return compile_sets(self.held_out, self.options, self.arrangement, frozen)

    def _evaluate(self, measure: Measure | None, adapters: Any, name: str) -> Evaluation | None:
        """Put the loss on eval-data, where there is any, in the report as `name`."""
        if measure is None:
            return None
        result = measure(adapters)
        further = {name.replace("loss", "further", 1): dict(result.numbers)} if result.numbers else {}
        self.directory.update_report({name: result.loss, "eval_supervised_tokens": result.supervised_tokens, **further})
        self.reporter.say(f"eval loss {result.loss:.4f} over {result.supervised_tokens:,} supervised tokens")
        if result.numbers:
            self.reporter.say("; ".join(f"{key} {value:.4f}" for key, value in result.numbers.items()))
        self._tell_evaluation(result, self.finished_steps)
        return result

    def _compile_step(self) -> CompiledStep:
        """Compile the train step once and for all: the result refuses other shapes instead of compiling again."""
        config = self.config
        self.processes.doing("compiling the step")
        recipe = Recipe(
            self.optimizer,
            self.schedule,
            self.options,
            max_grad_norm=config.max_grad_norm,
            dropout_seed=config.seed if config.lora.dropout else None,
            total_steps=self.total_steps,
            objective=self._objective(),
        )
        started = time.perf_counter()
        compiled = self.arrangement.compile_training(
            recipe, self.state_shapes, self.batches.abstract(), self.reporter.say
        )
        self.planned = planned = compiled.planned_memory()
        most = max(planned.values()) / GIB
        self.reporter.say(f"compiled in {time.perf_counter() - started:.1f} s; the step needs {most:.2f} GiB a device")
        self.directory.update_report({"planned_memory_gib": most})
        if config.plan_check:
            mesh = self.arrangement.mesh
            require_fit(planned, self._config_as_run, self.base, mesh)
            here = self.processes.processes_here()
            pinned = [size for device, size in compiled.planned_host_memory().items() if device.process_index in here]
            require_pinned_memory(sum(pinned), mesh.devices.flat[0].platform)
        layout = self._write_layout(compiled)
        for name, size in (layout["wire_bytes_a_step"] or {}).items():
            self.reporter.say(f"on the wire a step and device: {name}: {size / 1e6:,.1f} MB")
        return compiled

    def _objective(self) -> Objective:
        """Return what a step lowers: the loss of the next token, or of finding the right passage."""
        pooling = self.config.retrieval.pooling
        if pooling == "none":
            return NEXT_TOKEN
        assert isinstance(self.batches, PairBatches), "embedders train on pairs"
        return Contrastive(pooling, self.config.retrieval.temperature, self.batches.group)

    def _write_layout(self, compiled: CompiledStep) -> dict[str, Any]:
        """Write down where the arrays are, and what crosses between devices in a step; returns it."""
        planned = compiled.planned_memory()
        layout = self.arrangement.layout(self.state_shapes)
        layout["layers"] = self.base.model.config.num_layers
        layout["planned_bytes_a_device"] = {f"{device.platform}:{device.id}": size for device, size in planned.items()}
        limits = {f"{device.platform}:{device.id}": memory_limit(device) for device in planned}
        layout["limit_bytes_a_device"] = {name: limit for name, limit in limits.items() if limit is not None}
        try:
            layout["wire_bytes_a_step"] = compiled.wire_bytes()
        except ValueError as error:
            layout["wire_bytes_a_step"] = None
            self.reporter.say(f"what a step puts on the wire cannot be read from its program: {error}")
        self.directory.write_layout(layout)
        return layout

    def _follow_moved_layers(self, compiled: CompiledStep) -> None:
        """Write down where everything is now."""
        self.planned = compiled.planned_memory()
        self._write_layout(compiled)
        self.facts |= self.arrangement.facts()
        self.directory.update_report({"facts": self.facts})

    def _loop(
        self,
        compiled: CompiledStep,
        frozen: nnx.State,
        measure: Measure | None,
        samples: RunSamples,
        states: StateWriter,
        state: TrainState,
    ) -> TrainState:
        config, first, last = self.config, self.first_step, self.total_steps
        skipped = SkippedSteps(config, self.batches, self.reporter.say, self.before)
        missing: dict[str, Any] = {}
        if measure and first and self._evaluates(first) and self.before and LOSS not in self.before[-1]:
            missing = self._evaluation(measure, state, first)
            self.losses.after({"step": first, **missing})
        if first and self._samples(first):
            samples.take(first, state.adapters, frozen)
        with (
            interruption.saving_first(config.stop_grace),
            MetricsFile(self.directory.metrics, after_step=first, missing=missing) as metrics_file,
            self.reporter.training(last, first, config.log_every) as bar,
            BackgroundWriter() as background,
            self.sensors,
        ):
            prepare = partial(self._prepare_save, states, metrics_file)
            saver = Saver(prepare, background, self.reporter.say, first_step=first, every=config.save_every)
            if first:
                state, _ = self._exchange_with_sites(state, first)
                self._save_adapter(self._whole(state))
            with saver.rescuing(lambda: state):
                for number in range(first + 1, last + 1 if self.losses.stop is None else 0):
                    background.raise_if_failed()
                    with self._profiling(number):
                        state, metrics = self._step(lambda state, batch: compiled(state, frozen, batch), state, number)
                    self.finished_steps = number
                    if number == last:
                        state = self._finish(compiled, state, metrics)
                    state, exchanged = self._exchange_with_sites(state, number, ends=number == last)
                    metrics |= exchanged
                    if "moved_layers" in metrics:
                        self._follow_moved_layers(compiled)
                    metrics |= skipped.after(metrics)
                    metrics |= self.sensors.after_step()
                    metrics |= saver.after(number, is_good=not skipped.in_a_row)
                    try:
                        self.processes.doing(f"behind step {number}")
                        if measure and self._evaluates(number):
                            with suppress(interruption.Interrupted):  # then it is evaluated on resumption
                                metrics |= self._evaluation(measure, state, number)
                        is_best = self.losses.after(metrics, may_be_best=not skipped.in_a_row) and config.keep_best
                        if self._samples(number) and not self.processes.is_to_stop():
                            with suppress(interruption.Interrupted):  # likewise
                                samples.take(number, state.adapters, frozen)
                        stops = self._tell_step(metrics)
                        if stops and number < last:
                            state = self._finish(compiled, state, metrics)
                            state, exchanged = self._exchange_with_sites(state, number, ends=True)
                            metrics |= exchanged
                    finally:
                        metrics_file.write(metrics)
                    bar.step(metrics)
                    skipped.stop_if_diverged(metrics, self.directory.checkpoints)
                    if number == last or stops or self.processes.is_to_stop():
                        saver.save(state)
                        break
                    if is_best:
                        saver.save(state)
                    saver.save_if_due(state)
                    self._tell_saves(saver)
                    self.sensors.cool_down()
                    if config.pause_above_celsius is not None:
                        self.processes.meet(f"behind step {number}")
            background.wait()
            self._tell_saves(saver)
        self.directory.update_report(
            {"skipped_updates": skipped.total, "saves_put_off": saver.put_off, **self.sensors.facts()}
        )
        return state

    def _evaluation(self, measure: Measure, state: TrainState, step: int) -> dict[str, float]:
        """Evaluate after a step, and return what its metrics say of it."""
        result = measure(state.adapters)
        self._tell_evaluation(result, step)
        return _as_metrics(result)

    def _tell_evaluation(self, result: Evaluation, step: int) -> None:
        self.callbacks.tell(Evaluated(step, self.total_steps, _as_metrics(result), result.supervised_tokens))

    def _tell_step(self, metrics: dict[str, Any]) -> bool:
        """Tell of a finished step; returns whether the run is to end behind it, and why that is, in its metrics."""
        event = StepEvent(self.finished_steps, self.total_steps, metrics)
        self.callbacks.tell(event)
        if event.stops:
            metrics["stop"] = "; ".join(event.stops)
        (stops,) = self.processes.any_of(bool(event.stops))
        if stops and not event.stops:
            metrics["stop"] = "a callback of another process asked for it"
        reasons = [reason for reason in (metrics.get("stop"), self.losses.stop) if reason]
        if reasons and event.step < event.total_steps:
            reason = "; ".join(reasons)
            self.reporter.say(f"the run ends behind step {event.step} of {event.total_steps}: {reason}")
            self.directory.update_report({"stopped": {"step": event.step, "reason": reason}})
        return bool(reasons)

    @staticmethod
    def _finish(compiled: CompiledStep, state: TrainState, metrics: dict[str, Any]) -> TrainState:
        """Apply what the last step has left, which its metrics tell."""
        state, left = compiled.finish(state)
        metrics |= {f"flushed_{name}": value.item() for name, value in jax.device_get(left).items()}
        return state

    def _exchange_with_sites(
        self, state: TrainState, step: int, *, ends: bool = False
    ) -> tuple[TrainState, dict[str, Any]]:
        """Exchange outer updates with the other sites, where it is time; returns the state and metrics."""
        if not self.in_sites or not self.processes.from_first(self.site and self.site.is_due(step, ends=ends)):
            return state, {}
        whole = self._whole(state)
        exchanged = None if self.site is None else self.site.exchange(step, whole.adapters, ends=ends)
        metrics = self.processes.from_first(None if exchanged is None else exchanged[1])
        if metrics is None:
            if ends:
                interruption.check()
            return state, {}
        adapters = self.processes.arrays_from_first(whole.adapters if exchanged is None else exchanged[0])
        if self.processes.alone:
            return self.arrangement.put_state(whole._replace(adapters=adapters)), metrics
        return state._replace(adapters=self.arrangement.put_adapters(adapters)), metrics

    def _tell_saves(self, saver: Saver) -> None:
        """Tell of the saves that have come to their end since."""
        for step in saver.completed():
            self.callbacks.tell(Saved(step, self.directory.path))

    @contextmanager
    def _profiling(self, number: int) -> Iterator[None]:
        """Trace the step that `profile_step` names, and print what it did."""
        if number != self.config.profile_step:
            yield
            return
        with tracing(self.directory.profile):
            yield
        show_trace(self.directory.profile, number, self.reporter)

    def _samples(self, number: int) -> bool:
        """Tell whether the step `number` is followed by samples; those after the last are none of a step's."""
        every = self.config.samples.every
        return bool(every) and number % every == 0 and number < self.total_steps

    def _evaluates(self, number: int) -> bool:
        """Tell whether the step `number` is followed by an evaluation; that after the last is none of a step's."""
        every = self.config.eval_every
        return bool(every) and number % every == 0 and number < self.total_steps

    def _step(self, step: Step, state: TrainState, number: int) -> tuple[TrainState, dict[str, Any]]:
        started = time.perf_counter()
        self.processes.doing(f"step {number}")
        batch = next(self.iterator)
        try:
            with self.pace.watched(f"step {number}"):
                state, numbers = step(state, batch)
                metrics = {name: value.item() for name, value in jax.device_get(numbers).items()}
        except jax.errors.JaxRuntimeError as error:
            reason = out_of_memory(error, self.planned, TAKES_LESS)
            reason = reason or f"a device failed: {str(error).strip().splitlines()[0]:.500}"
            raise UserError(
                f"step {number}: {reason}. The steps up to the last saved one, in {self.directory.checkpoints}, stand: "
                "the same command with --resume goes on from there"
            ) from error
        seconds = time.perf_counter() - started
        return state, {
            "step": number,
            **metrics,
            "supervised_tokens": int(metrics["supervised_tokens"]),
            "tokens_per_second": self.batches.tokens_of_step(number - 1) / seconds,
            "seconds": seconds,
            "peak_memory_gib": peak_memory_gib(),
        }

    def _prepare_save(self, states: StateWriter, metrics_file: MetricsFile, state: TrainState) -> Callable[[], None]:
        """Copy `state`, whose arrays the next step may reuse, and return what writes the copy."""
        of_state = copy_to_host(state)
        if not self.processes.is_first:
            return lambda: None
        best = self.losses.best.step if self.config.keep_best and self.losses.best is not None else None
        arrangement = copy(self.arrangement)  # as it is now: layers may move to other stages in the next step
        progress = asdict(replace(self.progress, data=self.iterator.get_state()))
        further = None if self.site is None else {SITES: self.site.saved()}

        def write() -> None:
            self.directory.require_in_place()
            whole = arrangement.whole_state(of_state, self.state_shapes)
            # First what a saved state always has beside it: its steps' metrics, and its adapter.
            metrics_file.sync()
            self._save_adapter(whole)
            pending = whole.pending is not None and bool(whole.pending.usable)
            try:
                states.save(whole, {**progress, "pending": pending}, best, further)
            except Exception:
                self.directory.require_in_place()  # which says better why a file is missing
                raise

        return write

    def _save_adapter(self, whole: TrainState, directory: Path | None = None) -> None:
        if not self.processes.is_first:
            return
        save_adapter(
            directory or self.directory.adapter,
            self.base.model,
            whole.adapters,
            self.config.lora,
            self.config.with_absolute_paths().model,
            trained=int(whole.updates) > (1 if self.warmup_steps else 0),  # a warm-up's first rate is 0
        )

    def _result(self) -> TrainResult:
        report = self.directory.read_report()
        return TrainResult(
            self.config.output,
            self.finished_steps,
            report.get("loss_before"),
            report.get("loss_after"),
            self.processes.is_first,
        )


def _as_metrics(result: Evaluation) -> dict[str, float]:
    return {"eval_loss": result.loss, **{f"eval_{name}": value for name, value in result.numbers.items()}}
