"""A run's arrays cut into stages: each group of devices keeps its own layers, and activations travel between them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models.llama import Ends, Llama
from models.parameters import Path, by_path
from sharding.compression import Compression, ErrorFeedback
from sharding.mesh import rows_divisor, stage_mesh
from sharding.overlap import ExchangeErrors
from zagora_jax.arrangement import CompiledEvaluation, CompiledStep, Recipe
from zagora_jax.checkpoints.load import is_stacked
from zagora_jax.data.batches import Batch
from zagora_jax.distribution import Distribution, describe_devices
from zagora_jax.pipeline_step import PipelineEvaluation, PipelineStep
from zagora_jax.stage import PipelineState, Stage
from zagora_jax.step import ForwardOptions
from zagora_jax.train_state import TrainState


class Pipeline:
    """An `Arrangement` in stages. The value of a frozen parameter is a tuple: what each stage has of it, or None."""

    def __init__(self, mesh: Mesh, model: Llama, layers: Sequence[int], compression: Compression = "none"):
        """Cut `model` into as many stages as the mesh has.

        Args:
            mesh: the devices; those of a stage hold its layers as `Distribution` lays them out.
            model: the declared model.
            layers: how many layers each stage has.
            compression: how gradients travel between the replicas of a stage.

        Raises:
            ValueError: `layers` does not cut the model's layers into the mesh's stages.
        """
        stages = mesh.shape["stage"]
        if len(layers) != stages or min(layers) < 1 or sum(layers) != model.config.num_layers:
            raise ValueError(
                f"expected {stages} numbers of layers, none below 1, that sum to {model.config.num_layers}; "
                f"found {', '.join(map(str, layers))}"
            )
        self.mesh, self.model, self.compression = mesh, model, compression
        self.stages = self.cut(layers)

    def cut(self, layers: Sequence[int]) -> list[Stage]:
        """Describe the stages that have so many layers each."""
        stages, first = [], 0
        for index, count in enumerate(layers):
            part = self.model.part(count, Ends(first=index == 0, last=index == len(layers) - 1))
            stages.append(Stage(first, Distribution(stage_mesh(self.mesh, index), part, self.compression)))
            first += count
        return stages

    @property
    def layers(self) -> list[int]:
        """How many layers each stage has."""
        return [stage.num_layers for stage in self.stages]

    @property
    def rows_divisor(self) -> int:
        """How many devices share the rows of a micro-batch."""
        return rows_divisor(self.mesh)

    def facts(self) -> dict[str, str]:
        """Name the devices and the cut."""
        return {"devices": describe_devices(self.mesh), "layers of each stage": ", ".join(map(str, self.layers))}

    def empty(self, path: Path, declared: Any) -> Any:
        """Return every stage's stack of layers of a frozen parameter, without values yet."""
        return tuple(stage.distribution.empty(path, declared) for stage in self.stages)

    def set_layer(self, path: Path, stack: Any, value: Any, layer: int) -> Any:
        """Put one layer's value into the stack of its stage."""
        return tuple(
            stage.distribution.set_layer(path, own, value, layer - stage.first_layer)
            if layer in range(stage.layers.start, stage.layers.stop)
            else own
            for stage, own in zip(self.stages, stack, strict=True)
        )

    def whole(self, path: Path, value: Any) -> Any:
        """Lay out a frozen parameter that is not stacked, or a whole stack."""

        def of_stage(stage: Stage) -> Any:
            if path not in stage.paths:
                return None
            part = jax.tree.map(lambda array: array[stage.layers], value) if is_stacked(path) else value
            return stage.distribution.whole(path, part)

        return tuple(map(of_stage, self.stages))

    def frozen_of_stages(self, frozen: nnx.State) -> list[nnx.State]:
        """Part the frozen parameters into each stage's own."""
        variables = by_path(frozen)
        return [
            nnx.from_flat_state(
                [
                    (path, variable.replace(variable.get_value()[index]))
                    for path, variable in variables.items()
                    if path in stage.paths
                ]
            )
            for index, stage in enumerate(self.stages)
        ]

    @property
    def exchange_state(self) -> dict[str, Any]:
        """Say what the residuals of a whole state belong to; they are by layers, so not to a cut into stages."""
        return {"compression": self.compression, "exchange": "layerwise", "mesh": {"data": self.mesh.shape["data"]}}

    def begin(self, state: TrainState) -> TrainState:
        """Add the residuals before the first step to a whole state."""
        of_stage = self.stages[0].distribution.begin(state).residuals.reduced
        if of_stage is None:
            return state
        layers, width, dtype = self.model.config.num_layers, sum(self.stages[0].adapter_widths), of_stage.sent.dtype
        sent = np.zeros((self.mesh.shape["data"], layers, width), dtype)
        reduced = ErrorFeedback(sent, np.zeros((layers, width), dtype))  # type: ignore[arg-type]
        return state._replace(residuals=ExchangeErrors(reduced=reduced))

    def put_state(self, whole: TrainState) -> PipelineState:
        """Lay a training state out."""
        return PipelineState(tuple(stage.put_state(whole) for stage in self.stages))

    def whole_state(self, state: PipelineState, like: TrainState) -> TrainState:
        """Undo `put_state`, on the host."""
        parts = [stage.whole_state(own, like) for stage, own in zip(self.stages, state.stages, strict=True)]

        def join(*leaves: np.ndarray) -> np.ndarray:
            return np.concatenate(leaves) if leaves[0].ndim else leaves[0]

        whole = jax.tree.map(join, *(part._replace(residuals=ExchangeErrors()) for part in parts))
        by_layer = [part.residuals.reduced for part in parts]
        if by_layer[0] is None:
            return whole
        sent, owned = zip(*by_layer, strict=True)  # type: ignore[arg-type]
        reduced = ErrorFeedback(np.concatenate(sent, axis=1), np.concatenate(owned))  # type: ignore[arg-type]
        return whole._replace(residuals=ExchangeErrors(reduced=reduced))

    def put_adapters(self, whole: nnx.State) -> tuple[nnx.State, ...]:
        """Lay whole adapters out."""
        return tuple(
            stage.distribution.put_adapters(jax.tree.map(lambda leaf, own=stage.layers: leaf[own], whole))
            for stage in self.stages
        )

    def layout(self, like: TrainState) -> dict[str, Any]:
        """Return the bytes that each device holds, by kind; `like` gives the shapes of the training state."""
        layouts = [stage.distribution.layout(stage.part_of(like)) for stage in self.stages]
        held = {device: kinds for layout in layouts for device, kinds in layout["bytes_a_device"].items()}
        return {"mesh": dict(self.mesh.shape), "layers_of_stages": self.layers, "bytes_a_device": held}

    def compile_training(self, recipe: Recipe, whole: TrainState, batch: Batch) -> CompiledStep:
        """Compile the programs of all stages."""
        return PipelineStep(self, recipe, whole, batch)

    def compile_evaluation(self, options: ForwardOptions, batch: Batch) -> CompiledEvaluation:
        """Compile a forward pass through all stages."""
        return PipelineEvaluation(self, options, batch)
