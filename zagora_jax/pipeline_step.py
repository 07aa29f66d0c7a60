"""An optimizer step, or an evaluation, through the stages of a pipeline.

One host dispatches the stages' programs before their inputs are there, so that every device has its next tasks in its
queue. It waits for results once a step, where the norm of the gradients needs all stages.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from models.stream_order import StreamOrder
from sharding.balance import Balancer, Move, pace
from sharding.moving import moved_layers
from sharding.schedule import Task, dispatch_order, inputs_held
from sharding.watch import Watch, Work
from zagora_jax.arrangement import Recipe, Say, silent
from zagora_jax.data.batches import Batch
from zagora_jax.devices import lacking_memory
from zagora_jax.distribution import wire_bytes
from zagora_jax.pipeline_frozen import frozen_of_stages
from zagora_jax.stage import Place, Stage
from zagora_jax.stage_programs import MOST_QUEUED, PipelineState, StagePrograms
from zagora_jax.train_state import TrainState

if TYPE_CHECKING:
    from zagora_jax.pipeline import Pipeline


@dataclass
class _Flow:
    """What a stage has in hand during one step."""

    programs: StagePrograms
    adapters: nnx.State
    frozen: nnx.State
    batch: Batch
    gradients: nnx.State
    inputs: dict[int, Any] = field(default_factory=dict)  # by micro-batch, until it went backward
    cotangents: dict[int, Any] = field(default_factory=dict)


class PipelineStep:
    """A compiled optimizer step."""

    def __init__(self, pipeline: "Pipeline", recipe: Recipe, whole: TrainState, batch: Batch, say: Say = silent):
        """Compile the programs of all stages; `whole` and `batch` give shapes."""
        self.pipeline, self._recipe, self._whole, self._batch, self._say = pipeline, recipe, whole, batch, say
        self._compiled: dict[Any, StagePrograms] = {}
        started = time.perf_counter()
        self.programs = self._compile(pipeline.stages)
        self._move_seconds = time.perf_counter() - started  # that a move takes: compiling, mostly
        self._order = dispatch_order(len(self.programs), len(batch.tokens))
        self._watches = [Watch(MOST_QUEUED) for _ in self.programs]
        self.work: list[Work] = []  # of the last step
        self._refused: list[int] = []
        self._balancer = None
        if (balance := pipeline.balance) is not None and len(self.programs) > 1:
            self._balancer = Balancer(pipeline.costs, threshold=balance.threshold, patience=balance.patience)

    def _compile(self, stages: Sequence[Stage]) -> list[StagePrograms]:
        """Compile what the stages need and what was not compiled yet, several programs at a time."""

        def of_stage(item: tuple[int, Stage]) -> StagePrograms:
            index, stage = item
            known = self._compiled.get(_shape(index, stage))
            if known is not None:
                return known.at(stage)
            return StagePrograms(stage, self._recipe, stage.part_of(self._whole), self._batch)

        with ThreadPoolExecutor() as threads:
            programs = list(threads.map(of_stage, enumerate(stages)))
        self._compiled |= {_shape(index, made.stage): made for index, made in enumerate(programs)}
        return programs

    def __call__(
        self, state: PipelineState, frozen: nnx.State, batch: Batch
    ) -> tuple[PipelineState, Mapping[str, Any]]:
        """Take the step; `batch` is on the host. The state is used up."""
        state, metrics = self._take(state, frozen, batch)
        self.work = [watch.take() for watch in self._watches]
        metrics["idle"] = np.float32(idle_share(self.work))
        if self._balancer is not None:
            seconds = seconds_of(self.work, self.pipeline.layers)
            move = self._balancer.observe(seconds, self.pipeline.layers)
            if move is not None:
                before = self.pipeline.layers
                state = self._move(move, state, frozen, seconds)
                if moved := moved_layers(before, self.pipeline.layers):
                    metrics["moved_layers"] = np.int32(moved)
        return state, metrics

    def _take(self, state: PipelineState, frozen: nnx.State, batch: Batch) -> tuple[PipelineState, dict[str, Any]]:
        weight = np.float32(batch.weights.sum()) or np.float32(1)
        scale, step = self._scale_and_step(state)
        flows = self._begin(state, frozen, batch, np.float32(scale / weight))
        losses = [self._dispatch(task, flows, step, batch) for task in self._order]
        exchanged = [
            flow.programs.exchange(flow.gradients, own.residuals, scale)
            for flow, own in zip(flows, state.stages, strict=True)
        ]
        norm = np.sqrt(sum(jax.device_get([squares for _, _, squares in exchanged]), np.float32(0)))
        loss = sum(jax.device_get([loss for loss in losses if loss is not None]), np.float32(0)) / weight
        updates = [
            program.update(own, gradients, residuals, norm, np.float32(loss))
            for program, own, (gradients, residuals, _) in zip(self.programs, state.stages, exchanged, strict=True)
        ]
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": updates[-1][1],
            "supervised_tokens": np.float32(np.count_nonzero(batch.weights)),
            **updates[-1][2],
        }
        return PipelineState(tuple(new for new, *_ in updates)), metrics

    def finish(self, state: PipelineState) -> tuple[PipelineState, Mapping[str, Any]]:
        """Return the state: nothing is left to apply."""
        return state, {}

    @staticmethod
    def _scale_and_step(state: PipelineState) -> tuple[np.float32, np.int32]:
        first = state.stages[0]
        scale = np.float32(1) if first.loss_scale is None else np.float32(first.loss_scale.scale)
        return scale, np.int32(first.step)

    def _move(self, move: Move, state: PipelineState, frozen: nnx.State, seconds: Sequence[float]) -> PipelineState:
        """Give the stages the layers of a better cut, if they fit and the rest of the run makes up for the move."""
        layers = self.pipeline.layers
        slowest = int(np.argmax(seconds))
        saved = move.gain * max(seconds) * len(self._batch.tokens)
        left = self._recipe.total_steps - int(state.stages[0].step)
        what = (
            f"stage {slowest} takes {max(seconds) * 1e3:.3g} ms a micro-batch with {layers[slowest]} layers, and the "
            f"slowest stage would take {pace(move.costs, move.cut) * 1e3:.3g} ms with {', '.join(map(str, move.cut))}"
        )
        if saved * left < self._move_seconds:
            return self._refuse(
                move, state, f"{what}; {left} steps do not make up for a move of {self._move_seconds:.1f} s"
            )
        started = time.perf_counter()
        stages = self.pipeline.recut(move.cut)
        programs = self._compile(stages)
        held = self.pipeline.held_while_moving(stages)
        if lacking := lacking_memory(self._planned(programs)) or lacking_memory(held, "the move"):
            return self._refuse(move, state, f"{what}; but {lacking}")
        moved = moved_layers(layers, move.cut)
        state = jax.block_until_ready(self.pipeline.move(stages, state, frozen))
        self.programs = programs
        self._move_seconds = time.perf_counter() - started
        self._say(
            f"moved {moved} layer{'s' if moved > 1 else ''}: {what}. It took {self._move_seconds:.1f} s and should "
            f"save {saved * 1e3:.3g} ms a step ({move.gain:.0%})"
        )
        return state

    def _refuse(self, move: Move, state: PipelineState, why: str) -> PipelineState:
        """Say once why layers stay where they are."""
        if move.cut != self._refused:
            self._refused = move.cut
            self._say(f"no layers moved: {why}")
        return state

    def _begin(self, state: PipelineState, frozen: nnx.State, batch: Batch, factor: np.float32) -> list[_Flow]:
        flows = [
            _Flow(programs, own.adapters, own_frozen, programs.stage.distribution.put_batch(batch), programs.zeros())
            for programs, own, own_frozen in zip(
                self.programs, state.stages, frozen_of_stages(frozen, self.pipeline.stages), strict=True
            )
        ]
        flows[-1].cotangents = dict.fromkeys(range(len(batch.tokens)), factor)
        return flows

    def _dispatch(self, task: Task, flows: list[_Flow], step: np.int32, batch: Batch) -> jax.Array | None:
        """Dispatch one task, and send what comes of it to the neighbour; returns the loss of a last stage's task."""
        flow, watch = flows[task.stage], self._watches[task.stage]
        programs = flow.programs
        place = Place(step, np.int32(task.micro_batch), np.int32(programs.stage.first_layer))
        watch.wait_for_place()
        if task.stage == 0 and task.micro_batch not in flow.inputs:
            flow.inputs[task.micro_batch] = self.pipeline.first_inputs(batch.tokens[task.micro_batch])
        if task.kind == "forward":
            inputs = flow.inputs[task.micro_batch]
            assert programs.forward is not None
            out = programs.forward(flow.adapters, flow.frozen, flow.batch, place, inputs)
            if programs.kept is not None:
                out, flow.inputs[task.micro_batch] = out
            watch.dispatched("forward", inputs, out)
            receiver = flows[task.stage + 1]
            receiver.inputs[task.micro_batch] = receiver.programs.stage.send(out)
            return None
        inputs, cotangent = flow.inputs.pop(task.micro_batch), flow.cotangents.pop(task.micro_batch)
        flow.gradients, d_inputs, loss = programs.backward(
            flow.gradients, flow.adapters, flow.frozen, flow.batch, place, inputs, cotangent
        )
        watch.dispatched("backward", (inputs, cotangent), loss)
        if task.stage > 0:
            receiver = flows[task.stage - 1]
            receiver.cotangents[task.micro_batch] = receiver.programs.stage.send(d_inputs)
        return loss if programs.stage.is_last else None

    def planned_memory(self) -> dict[jax.Device, int]:
        """Return the bytes that the step needs of each device: what the stage holds, and its largest program's rest."""
        return self._planned(self.programs)

    def planned_host_memory(self) -> dict[jax.Device, int]:
        """Return the bytes of pinned host memory that the step needs for each device."""
        stages, micro_batches = len(self.programs), len(self._batch.tokens)
        planned: dict[jax.Device, int] = {}
        for index, programs in enumerate(self.programs):
            needed = programs.planned_host_memory(inputs_held(index, stages, micro_batches))
            planned |= dict.fromkeys(programs.stage.distribution.mesh.devices.flat, needed)
        return planned

    def _planned(self, of_stages: Sequence[StagePrograms]) -> dict[jax.Device, int]:
        stages, micro_batches = len(of_stages), len(self._batch.tokens)
        planned: dict[jax.Device, int] = {}
        for index, programs in enumerate(of_stages):
            needed = programs.planned_memory(*activations_held(index, stages, micro_batches))
            planned |= dict.fromkeys(programs.stage.distribution.mesh.devices.flat, needed)
        return planned

    def wire_bytes(self) -> dict[str, int]:
        """Return the bytes that the device which sends most sends in a step."""
        sent = [self._sent_by(index) for index in range(len(self.programs))]
        return max(sent, key=lambda kinds: sum(kinds.values()))

    def _sent_by(self, index: int) -> dict[str, int]:
        programs, micro_batches = self.programs[index], len(self._batch.tokens)
        mesh = programs.stage.distribution.mesh
        sent: Counter[str] = Counter(wire_bytes(programs.exchange, mesh))
        for program in (programs.forward, programs.backward):
            for kind, size in wire_bytes(program, mesh).items() if program is not None else ():
                sent[kind] += size * micro_batches
        neighbours = (index > 0) + (index < len(self.programs) - 1)
        if neighbours:
            sent["activations over stage"] += neighbours * micro_batches * programs.activation_bytes
        return dict(sent)


def _shape(index: int, stage: Stage) -> tuple[int, int, StreamOrder | None]:
    """Return what the programs of a stage depend on."""
    return index, stage.num_layers, stage.distribution.stream


class PipelineForward:
    """The forward pass through all stages, compiled."""

    def __init__(self, pipeline: "Pipeline", compile_stage: Callable[[Stage], jax.stages.Compiled]):
        """Compile the program of every stage, for batches of one shape; see `Stage.compile_forward`."""
        self._pipeline, self._compile = pipeline, compile_stage
        self._stages: list[Stage] = []
        self._programs: list[jax.stages.Compiled] = []
        self._follow()

    def _follow(self) -> None:
        """Compile for the stages as they are now: their layers may have moved."""
        if self._stages is not self._pipeline.stages:
            before = dict(enumerate(zip(self._stages, self._programs, strict=True)))
            self._stages = self._pipeline.stages
            self._programs = [
                before[index][1]
                if index in before and _shape(index, before[index][0]) == _shape(index, stage)
                else self._compile(stage)
                for index, stage in enumerate(self._stages)
            ]

    def __call__(self, adapters: tuple[nnx.State, ...], frozen: nnx.State, batch: Batch) -> list[jax.Array]:
        """Return what the last stage makes of every micro-batch."""
        self._follow()
        batches = [stage.distribution.put_batch(batch) for stage in self._stages]
        own_frozen = frozen_of_stages(frozen, self._stages)
        results = []
        for micro_batch in range(len(batch.tokens)):
            inputs: Any = self._pipeline.first_inputs(batch.tokens[micro_batch])
            for index, (stage, program) in enumerate(zip(self._stages, self._programs, strict=True)):
                place = Place(np.int32(0), np.int32(micro_batch), np.int32(stage.first_layer))
                inputs = stage.send(inputs) if inputs is not None and index else inputs
                inputs = program(adapters[index], own_frozen[index], batches[index], place, inputs)
            results.append(inputs)
        return results


def seconds_of(work: list[Work], layers: Sequence[int]) -> list[float]:
    """Return what each stage, of so many layers, took for a micro-batch."""
    return [of_stage.seconds / of_stage.tasks["backward"] for of_stage in work]


def activations_held(stage: int, stages: int, micro_batches: int) -> tuple[int, int]:
    """Return how many inputs a stage has at most, and how many activations are on their way: one on either side."""
    return inputs_held(stage, stages, micro_batches), 2 if 0 < stage < stages - 1 else 1


def idle_share(work: list[Work]) -> float:
    """Return the share of the devices' time between the first task's begin and the last one's end that they waited."""
    span = max(of_stage.ended for of_stage in work) - min(of_stage.began for of_stage in work)
    return 1 - sum(of_stage.seconds for of_stage in work) / (len(work) * span)
