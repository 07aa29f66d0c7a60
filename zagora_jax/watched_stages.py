"""Equal stages in one program, until a card has been slow for long: then stages with a program each, of other sizes.

Nothing tells from outside one program which card the others wait for. So steps are timed as a whole; when they have
become slower, a layer is timed on each card, and the cut follows from that, as where cards differ from the beginning.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models.llama import Llama
from models.parameters import Path, by_path
from sharding.balance import Slowdown, StageCost, choose_cut, explain, pace
from sharding.compression import Compression
from sharding.moving import moved_layers, recut_trees
from sharding.spread import Spread
from zagora_jax.arrangement import CompiledEvaluation, CompiledNextTokens, CompiledStep, Recipe, Say, silent
from zagora_jax.checkpoints.load import is_stacked
from zagora_jax.data.batches import Batch
from zagora_jax.devices import lacking_memory
from zagora_jax.equal_stages import EqualStages
from zagora_jax.pipeline import Balance, Pipeline
from zagora_jax.pipeline_step import PipelineStep
from zagora_jax.stage import Stage
from zagora_jax.step import ForwardOptions
from zagora_jax.train_state import TrainState

_seconds = time.perf_counter


class WatchedStages(EqualStages):
    """An `Arrangement` in equal stages whose layers can move.

    Attributes:
        programs: what has taken over, once layers have moved.
    """

    def __init__(self, mesh: Mesh, model: Llama, compression: Compression, moments_on_host: bool, balance: Balance):
        """Cut `model` into equal stages; see `EqualStages` and `Balance`."""
        super().__init__(mesh, model, compression, moments_on_host)
        self.balance = balance
        self.programs: Pipeline | None = None

    def facts(self) -> dict[str, str]:
        """Name the devices and the cut."""
        if self.programs is not None:
            return self.programs.facts()
        cut = f"{', '.join(map(str, self.layers))}, in one program as long as no card is slow"
        return super().facts() | {"layers of each stage": cut}

    def in_programs(self) -> Pipeline:
        """Describe the same stages with a program each."""
        spread = self.distribution
        return Pipeline(
            self.mesh,
            self.model,
            self.layers,
            spread.compression,
            self.balance,
            moments_on_host=spread.moments_on_host,
        )

    def hand_over(self, programs: Pipeline, state: TrainState, frozen: nnx.State, like: TrainState) -> Any:
        """Let stages with a program each go on: `frozen` is changed in place, the new state is returned."""
        whole, equal = super().whole_state(state, like), self.in_programs().stages
        spreads = by_path(self.distribution.frozen)
        for path, variable in by_path(frozen).items():
            value = variable.get_value()
            if is_stacked(path):
                of_stages = [jax.tree.map(_own, _spreads(stage, path), value) for stage in equal]
                variable.set_value(tuple(recut_trees(of_stages, self.layers, programs.layers)))
            else:
                value = jax.tree.map(
                    lambda spread, stored: spread.whole_array(stored), spreads[path].get_value(), value
                )
                variable.set_value(
                    tuple(
                        stage.distribution.whole(path, value) if path in stage.paths else None
                        for stage in programs.stages
                    )
                )
        self.programs = programs
        return programs.put_state(whole)

    def put_state(self, whole: TrainState) -> Any:
        """Lay a training state out."""
        return super().put_state(whole) if self.programs is None else self.programs.put_state(whole)

    def whole_state(self, state: Any, like: TrainState) -> TrainState:
        """Undo `put_state`, on the host."""
        return super().whole_state(state, like) if self.programs is None else self.programs.whole_state(state, like)

    def put_adapters(self, whole: nnx.State) -> Any:
        """Lay whole adapters out."""
        return super().put_adapters(whole) if self.programs is None else self.programs.put_adapters(whole)

    def layout(self, like: TrainState) -> dict[str, Any]:
        """Return the bytes that each device holds, by kind; `like` gives the shapes of the training state."""
        return super().layout(like) if self.programs is None else self.programs.layout(like)

    def compile_training(self, recipe: Recipe, whole: TrainState, batch: Batch, say: Say = silent) -> CompiledStep:  # type: ignore[override]
        """Compile the train step of `recipe`."""
        return WatchedStep(self, super().compile_training(recipe, whole, batch), recipe, whole, batch, say)

    def compile_evaluation(self, options: ForwardOptions, batch: Batch) -> CompiledEvaluation:
        """Compile an evaluation of batches of one shape, and again once layers have moved."""
        in_one = super().compile_evaluation(options, batch)
        return self._until_moved(in_one, lambda programs: programs.compile_evaluation(options, batch))

    def compile_next_tokens(self, options: ForwardOptions, batch: Batch) -> CompiledNextTokens:
        """Compile what continues rows by a token each, and again once layers have moved."""
        in_one = super().compile_next_tokens(options, batch)
        return self._until_moved(in_one, lambda programs: programs.compile_next_tokens(options, batch))

    def _until_moved(self, in_one: Callable[..., Any], compile_later: Callable[[Pipeline], Any]) -> Callable[..., Any]:
        """Return what runs `in_one` as long as there is one program, and then what is compiled in its place."""
        later: list[Callable[..., Any]] = []

        def run(adapters: Any, frozen: nnx.State, batch: Batch) -> Any:
            if self.programs is None:
                return in_one(adapters, frozen, batch)
            if not later:
                later.append(compile_later(self.programs))
            return later[0](adapters, frozen, batch)

        return run


class WatchedStep:
    """A compiled step that is timed, and hands over to others when a card is slow."""

    def __init__(
        self, stages: WatchedStages, step: CompiledStep, recipe: Recipe, whole: TrainState, batch: Batch, say: Say
    ):
        """Watch `step`; the rest is what it was compiled for."""
        self._stages, self._step, self._say = stages, step, say
        self._recipe, self._whole, self._batch = recipe, whole, batch
        balance = stages.balance
        self._slowdown = Slowdown(threshold=balance.threshold, patience=balance.patience)
        self._has_run = False  # the first step is slower than others

    def __call__(self, state: Any, frozen: nnx.State, batch: Batch) -> tuple[Any, Mapping[str, Any]]:
        """Take the step; `batch` is on the host. The state is used up."""
        started = _seconds()
        state, metrics = self._step(state, frozen, batch)
        if self._stages.programs is not None:
            return state, metrics
        jax.block_until_ready(metrics)
        seconds = _seconds() - started
        if self._has_run and self._slowdown.observe(seconds):
            state = self._rebalance(state, frozen, seconds)
            if (programs := self._stages.programs) is not None:
                moved = moved_layers(self._stages.layers, programs.layers)
                metrics = {**metrics, "moved_layers": np.int32(moved)}
        self._has_run = True
        return state, metrics

    def _rebalance(self, state: TrainState, frozen: nnx.State, seconds: float) -> Any:
        """Find the cards' speeds, and give the stages layers accordingly if the rest of the run makes up for it."""
        started, slow = time.perf_counter(), f"steps have become slower and take {seconds:.3g} s"
        programs = self._stages.in_programs()
        try:
            costs = programs.measured_costs(self._recipe, self._whole, self._batch)
        except jax.errors.JaxRuntimeError as error:
            return self._stay(state, f"{slow}; timing a layer on each card failed: {str(error).splitlines()[0]:.200}")
        layers = sum(programs.layers)
        try:
            cut = choose_cut(costs, layers)
        except ValueError as error:
            return self._stay(state, f"{slow}; but {error}, by their memory")
        gain = 1 - pace(costs, cut) / _pace_in_lockstep(costs, self._stages.layers_of_each)
        found = f"{slow}. A micro-batch would take {explain(costs, cut)}"
        if gain <= self._stages.balance.threshold:
            return self._stay(state, f"{found}, which saves too little ({gain:.0%})")
        programs.costs, programs.stages = costs, programs.cut(cut)
        left, taken = self._recipe.total_steps - int(state.step), time.perf_counter() - started
        if gain * seconds * left < taken:
            return self._stay(state, f"{found}; {left} steps do not make up for a move of {taken:.1f} s")
        later = PipelineStep(programs, self._recipe, self._whole, self._batch, self._say)
        if lacking := lacking_memory(later.planned_memory()):
            return self._stay(state, f"{found}; but {lacking}")
        state = jax.block_until_ready(self._stages.hand_over(programs, state, frozen, self._whole))
        self._step = later
        self._say(
            f"layers moved, and each stage has a program of its own now: {found}. It took "
            f"{time.perf_counter() - started:.1f} s and should save {gain * seconds * 1e3:.3g} ms a step ({gain:.0%})"
        )
        return state

    def _stay(self, state: TrainState, why: str) -> TrainState:
        self._say(f"no layers moved: {why}")
        return state

    def finish(self, state: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the state: nothing is left to apply."""
        return self._step.finish(state)

    def planned_memory(self) -> dict[jax.Device, int]:
        """Return the bytes that the step needs of each device."""
        return self._step.planned_memory()

    def planned_host_memory(self) -> dict[jax.Device, int]:
        """Return the bytes of pinned host memory that the step needs for each device."""
        return self._step.planned_host_memory()

    def wire_bytes(self) -> dict[str, int]:
        """Return the bytes that a device sends in a step."""
        return self._step.wire_bytes()


def _pace_in_lockstep(costs: list[StageCost], layers: int) -> float:
    """Return what a micro-batch takes of equal stages: the slowest layers, and a share of what stands at the ends."""
    slowest = max(cost.layer_seconds for cost in costs)
    return layers * slowest + sum(cost.fixed_seconds for cost in costs) / len(costs)


def _spreads(stage: Stage, path: Path) -> Any:
    return by_path(stage.distribution.frozen)[path].get_value()


def _own(spread: Spread, stored: Any) -> Any:
    """Return a stage's part of an array over all stages; its pieces are taken over."""
    (array,) = jax.tree.leaves(stored)
    pieces = {shard.device: shard.data for shard in array.addressable_shards}
    of_stage = [pieces[device] for device in spread.mesh.devices.flat]
    return spread.wrap(jax.make_array_from_single_device_arrays(spread.stored, spread.sharding, of_stage))
