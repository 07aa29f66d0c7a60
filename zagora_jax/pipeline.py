"""A run's arrays cut into stages: each group of devices keeps its own layers, and activations travel between them."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models.llama import Ends, Llama
from models.parameters import by_path
from models.stream_order import StreamOrder, stream_order
from sharding.balance import StageCost, choose_cut, explain
from sharding.compression import Compression, ErrorFeedback
from sharding.exchange import ExchangeErrors
from sharding.mesh import rows_divisor, stage_mesh
from sharding.moving import recut_trees
from sharding.targets import is_absent
from zagora_jax.arrangement import CompiledEvaluation, CompiledNextTokens, CompiledStep, Recipe, Say, silent
from zagora_jax.calibration import estimated_costs, measure_costs
from zagora_jax.checkpoints.load import Destination, is_stacked
from zagora_jax.data.batches import Batch
from zagora_jax.devices import TAKES_LESS, memory_limit
from zagora_jax.distribution import Distribution, describe_devices
from zagora_jax.errors import UserError
from zagora_jax.moving_streams import move_streamed, streamed_after
from zagora_jax.pipeline_frozen import NO_TABLE, PipelineDestination, look_up_on_host
from zagora_jax.pipeline_step import PipelineForward, PipelineStep, activations_held
from zagora_jax.stage import Stage
from zagora_jax.stage_programs import PipelineState, StagePrograms
from zagora_jax.stage_residuals import exchange_state, first_residuals
from zagora_jax.step import ForwardOptions
from zagora_jax.streaming import StreamedFrozen, fitting_order, streamed_of_stages
from zagora_jax.train_state import TrainState


@dataclass(frozen=True)
class Balance:
    """When layers move between stages.

    Attributes:
        threshold: the part of a step's time that a move must save.
        patience: for how many steps in a row it must have promised that.
    """

    threshold: float
    patience: int


class Pipeline:
    """An `Arrangement` in stages; its frozen parameters are those of `zagora_jax.pipeline_frozen`."""

    def __init__(
        self,
        mesh: Mesh,
        model: Llama,
        layers: Sequence[int] | None = None,
        compression: Compression = "none",
        balance: Balance | None = None,
        host_embedding: bool = False,
        weights: str | int = "none",
        moments_on_host: bool = False,
        why: str = "",
    ):
        """Cut `model` into as many stages as the mesh has.

        Args:
            mesh: the devices; those of a stage hold its layers as `Distribution` lays them out.
            model: the declared model.
            layers: how many layers each stage has. None: by estimate, and by measurement when a step is compiled.
            compression: how gradients travel between the replicas of a stage.
            balance: when layers move in training; None: never.
            host_embedding: whether words are looked up in the host's memory, and their rows sent to the first stage.
            weights: how many layers wait in host memory: "none", "all", a number, or "auto", which is all until a step
                is compiled, and then as many as the devices' memory needs.
            moments_on_host: whether the optimizer's moments wait in host memory between the steps.
            why: the stages have a program each, where anybody asked.

        Raises:
            ValueError: `layers` does not cut the model's layers into the mesh's stages.
        """
        stages, of_model = mesh.shape["stage"], model.config.num_layers
        self.costs = estimated_costs(model.config, stages)
        self.measures, self.balance = layers is None and stages > 1, balance
        self.weights, self._is_settled = weights, weights != "auto"
        self.moments_on_host, self._why = moments_on_host, why
        layers = choose_cut(self.costs, of_model) if layers is None else layers
        if len(layers) != stages or min(layers) < 1 or sum(layers) != of_model:
            raise ValueError(
                f"expected {stages} numbers of layers, none below 1, that sum to {of_model}; "
                f"found {', '.join(map(str, layers))}"
            )
        self.mesh, self.model, self.compression = mesh, model, compression
        self.host_embedding, self._table = host_embedding, NO_TABLE
        self.stages = self.cut(layers)

    def cut(self, layers: Sequence[int], streamed: Sequence[int] | None = None) -> list[Stage]:
        """Describe the stages that have so many layers each, and so many in host memory: by default as `weights`."""
        stages, first = [], 0
        streamed = streamed_of_stages(self.weights, layers) if streamed is None else streamed
        for index, (count, waiting) in enumerate(zip(layers, streamed, strict=True)):
            ends = Ends(first=index == 0 and not self.host_embedding, last=index == len(layers) - 1)
            part, order = self.model.part(count, ends), stream_order(count, waiting) if waiting else None
            stages.append(Stage(first, self._distribution(stage_mesh(self.mesh, index), part, order)))
            first += count
        return stages

    def _distribution(self, mesh: Mesh, part: Llama, order: StreamOrder | None) -> Distribution:
        return Distribution(mesh, part, self.compression, stream=order, moments_on_host=self.moments_on_host)

    @property
    def layers(self) -> list[int]:
        """How many layers each stage has."""
        return [stage.num_layers for stage in self.stages]

    @property
    def rows_divisor(self) -> int:
        """How many devices share the rows of a micro-batch."""
        return rows_divisor(self.mesh)

    @property
    def feed(self) -> None:
        """Nothing reads layers from the disk: stages go through their layers once a micro-batch."""
        return None

    def facts(self) -> dict[str, str]:
        """Name the devices and the cut."""
        cut = "to be measured" if self.measures else ", ".join(map(str, self.layers))
        if self.weights != "none":
            orders = [stage.distribution.stream for stage in self.stages]
            waiting = ", ".join(str(order.streamed_layers if order else 0) for order in orders)
            cut += f"; of them in host memory: {waiting if self._is_settled else 'as the devices need'}"
        if self.host_embedding:
            cut += "; input embedding in host memory"
        cut += "; a program for each" + (f": {self._why}" if self._why else "")
        return {"devices": describe_devices(self.mesh), "layers of each stage": cut}

    def load(self, read: Callable[[Destination], nnx.State]) -> Any:
        """Bring frozen parameters onto the stages' devices, and streamed layers into host memory."""
        destination = PipelineDestination(self.stages, self.host_embedding)
        frozen = destination.loaded(read(destination))
        self._table = destination.embedding
        return frozen

    def first_inputs(self, tokens: np.ndarray) -> jax.Array | None:
        """Return what the first stage takes beside tokens [M, S]: their embeddings, where those are on the host."""
        if not self.host_embedding:
            return None
        return self.stages[0].send(look_up_on_host(self._table, tokens, self.model.dtype))  # type: ignore[arg-type]

    def recut(self, layers: Sequence[int]) -> list[Stage]:
        """Describe the stages that have so many layers each, after a move: as many as now stay on their devices."""
        return self.cut(layers, streamed_after(self.stages, layers))

    def held_while_moving(self, stages: Sequence[Stage]) -> dict[jax.Device, int]:
        """Return the bytes that devices hold while streamed layers move: a stage's new arrays beside its old ones."""
        held: dict[jax.Device, int] = {}
        for old, new in zip(self.stages, stages, strict=True):
            if self.weights != "none" and old.num_layers != new.num_layers:
                needed = sum(spread.device_bytes for spread in jax.tree.leaves(new.distribution.frozen))
                for device in new.distribution.mesh.devices.flat:
                    held[device] = needed + (device.memory_stats() or {}).get("bytes_in_use", 0)
        return held

    def move(self, stages: list[Stage], state: PipelineState, frozen: Any) -> PipelineState:
        """Take on a new cut, made by `recut`: `frozen` is changed in place, the new state is returned."""
        old, layers = self.layers, [stage.num_layers for stage in stages]
        if isinstance(frozen, StreamedFrozen):
            move_streamed(self.stages, stages, frozen)
        else:
            for path, variable in by_path(frozen).items():
                if is_stacked(path):
                    variable.set_value(tuple(recut_trees(variable.get_value(), old, layers)))
        whole_residuals = self._whole_residuals(state)
        bare = recut_trees([own._replace(residuals=ExchangeErrors()) for own in state.stages], old, layers)
        self.stages = stages
        if whole_residuals is None:
            return PipelineState(tuple(bare))
        return PipelineState(
            tuple(
                own._replace(residuals=stage.put_residuals(whole_residuals))
                for own, stage in zip(bare, stages, strict=True)
            )
        )

    def _whole_residuals(self, state: PipelineState) -> ErrorFeedback | None:
        """Return the residuals of all stages by layers, on the host."""
        by_layer = [stage.residuals_by_layer(own) for stage, own in zip(self.stages, state.stages, strict=True)]
        if by_layer[0] is None:
            return None
        sent, owned = zip(*by_layer, strict=True)  # type: ignore[arg-type]
        return ErrorFeedback(np.concatenate(sent, axis=1), np.concatenate(owned))  # type: ignore[arg-type]

    @property
    def exchange_state(self) -> dict[str, Any]:
        """Say what the residuals of a whole state belong to."""
        return exchange_state(self.mesh, self.compression)

    def begin(self, state: TrainState) -> TrainState:
        """Add the residuals before the first step to a whole state."""
        return first_residuals(state, self.stages[0].distribution, self.model.config.num_layers)

    def put_state(self, whole: TrainState) -> PipelineState:
        """Lay a training state out."""
        return PipelineState(tuple(stage.put_state(whole) for stage in self.stages))

    def whole_state(self, state: PipelineState, like: TrainState) -> TrainState:
        """Undo `put_state`, on the host."""
        parts = [stage.whole_state(own, like) for stage, own in zip(self.stages, state.stages, strict=True)]

        def join(*leaves: np.ndarray) -> np.ndarray:
            return np.concatenate(leaves) if leaves[0].ndim else leaves[0]

        return jax.tree.map(join, *parts)._replace(residuals=ExchangeErrors(reduced=self._whole_residuals(state)))

    def put_adapters(self, whole: nnx.State) -> tuple[nnx.State, ...]:
        """Lay whole adapters out."""
        return tuple(
            stage.distribution.put_adapters(jax.tree.map(lambda leaf, own=stage.layers: leaf[own], whole))
            for stage in self.stages
        )

    def layout(self, like: TrainState) -> dict[str, Any]:
        """Return the bytes that each device holds, by kind; `like` gives the shapes of the training state."""
        layouts = [stage.distribution.layout(stage.part_of(like)) for stage in self.stages]
        held = {
            name: {device: kinds for layout in layouts for device, kinds in layout[name].items()}
            for name in ("bytes_a_device", "host_bytes_a_device")
        }
        return {"mesh": dict(self.mesh.shape), "layers_of_stages": self.layers, **held}

    def compile_training(self, recipe: Recipe, whole: TrainState, batch: Batch, say: Say = silent) -> CompiledStep:
        """Compile the programs of all stages; first decide on their layers, where that was left open."""
        if self.measures and not is_absent(self.mesh):
            self._measure(recipe, whole, batch, say)
        if not self._is_settled and not is_absent(self.mesh):
            self._settle(recipe, whole, batch, say)
        return PipelineStep(self, recipe, whole, batch, say)

    def _settle(self, recipe: Recipe, whole: TrainState, batch: Batch, say: Say) -> None:
        """Keep as many layers of each stage on its devices as there is room for beside the streaming step."""

        def streamed(item: tuple[int, Stage]) -> int:
            index, stage = item
            limits = [memory_limit(device) for device in stage.distribution.mesh.devices.flat]
            limit = min((limit for limit in limits if limit is not None), default=None)
            if limit is None:
                return 0
            programs = StagePrograms(stage, recipe, stage.part_of(whole), batch)
            planned = programs.planned_memory(*activations_held(index, len(self.stages), len(batch.tokens)))
            assert stage.distribution.waiting is not None
            order = fitting_order(stage.num_layers, stage.distribution.waiting.device_bytes, planned, limit)
            return 0 if order is None else order.streamed_layers

        with ThreadPoolExecutor() as threads:
            found = list(threads.map(streamed, enumerate(self.stages)))
        of_stages = ", ".join(f"{count} of {stage.num_layers}" for count, stage in zip(found, self.stages, strict=True))
        say(f"weights: {of_stages} layers of the stages wait in host memory")
        self.stages, self._is_settled = self.cut(self.layers, found), True

    def measured_costs(self, recipe: Recipe, whole: TrainState, batch: Batch) -> list[StageCost]:
        """Measure what a layer costs on each stage's devices."""
        stages, micro_batches = len(self.stages), len(batch.tokens)
        held = [activations_held(index, stages, micro_batches) for index in range(stages)]
        return measure_costs(self.stages, self.resized, held, recipe, whole, batch)

    def _measure(self, recipe: Recipe, whole: TrainState, batch: Batch, say: Say) -> None:
        self.costs = self.measured_costs(recipe, whole, batch)
        if self.weights != "none":  # what a device has no room for waits in host memory
            self.costs = [replace(cost, most_layers=None) for cost in self.costs]
        try:
            cut = choose_cut(self.costs, self.model.config.num_layers)
        except ValueError as error:
            raise UserError(
                f"--strategy layerwise: {error}, by their memory. {TAKES_LESS}, more devices along --mesh.stage"
            ) from error
        say(f"layers of each stage: {', '.join(map(str, cut))}. A micro-batch takes {explain(self.costs, cut)}")
        self.stages = self.cut(cut)

    def resized(self, stage: Stage, layers: int) -> Stage:
        """Describe a stage with another number of layers, streamed if all are."""
        part = self.model.part(layers, stage.distribution.model.ends)
        order = stream_order(layers, layers) if self.weights == "all" else None
        return Stage(0, self._distribution(stage.distribution.mesh, part, order))

    def compile_evaluation(self, options: ForwardOptions, batch: Batch) -> CompiledEvaluation:
        """Compile a forward pass through all stages."""
        forward = PipelineForward(self, lambda stage: stage.compile_forward(options, None, batch))

        def evaluate(adapters: Any, frozen: nnx.State, batch: Batch) -> tuple[Any, np.float32]:
            losses = jax.device_get(forward(adapters, frozen, batch))
            return sum(losses, np.float32(0)), np.float32(batch.weights.sum())

        return evaluate

    def compile_next_tokens(self, options: ForwardOptions, batch: Batch) -> CompiledNextTokens:
        """Compile what continues rows by a token each, through all stages."""
        forward = PipelineForward(self, lambda stage: stage.compile_next_tokens(options, batch))
        return lambda adapters, frozen, batch: forward(adapters, frozen, batch)[0]
