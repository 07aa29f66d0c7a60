"""What a step's arguments take of each device, from their declared shapes: exact, without a compiler or devices."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from models.llama import Ends, linear_modules
from models.parameters import split
from models.stream_order import StreamOrder, stream_order
from sharding.mesh import AXES
from zagora_jax.arrange import layers_of_stages, why_not_one_jit
from zagora_jax.base import BaseModel
from zagora_jax.checkpoints.load import expected_tensors
from zagora_jax.config import TrainConfig
from zagora_jax.distribution import Distribution
from zagora_jax.optimizer import make_optimizer
from zagora_jax.stage import Stage
from zagora_jax.streaming import stream_of, streamed_of_stages
from zagora_jax.train_state import TrainState, initial_state

Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Arguments:
    """Bytes of one device; see `zagora_jax.planning.memory.DeviceMemory`."""

    weights: int
    lora: int
    optimizer: int
    error_feedback: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))


def mesh_shape(config: TrainConfig) -> dict[str, int]:
    """Return the sizes of all mesh axes that the options name."""
    return {axis: getattr(config.mesh, axis, None) or 1 for axis in AXES}


class Shapes:
    """The shapes of one model's training under different options; what was reckoned once is kept."""

    def __init__(self, base: BaseModel):
        self.base = base
        self._state = functools.cache(self._state_of)
        self._arguments = functools.cache(self._arguments_of)
        self._waiting = functools.cache(self._waiting_of)

    def arguments(self, config: TrainConfig) -> tuple[Arguments, ...]:
        """Return what the step's arguments take of each device, the batch left out: for each stage, if in stages."""
        exchange = (config.gradient_compression, config.gradient_exchange)
        axes, optimizer = tuple(mesh_shape(config).items()), (config.optimizer, config.offload.optimizer)
        of_streams = functools.partial(
            self._arguments, config.embeddings, optimizer, config.compute_dtype, exchange, axes
        )
        streams, layers = self.streams(config), self.layers(config)
        if self.in_one_program(config):
            return of_streams((None,), layers) * len(layers)
        if len(layers) > 1 or streams[0] is None or (resident := layers[0] - streams[0].streamed_layers) == 0:
            return of_streams(streams, layers)
        # Each resident layer takes as much: two numbers of them tell of all.
        none, one = (of_streams((stream_order(layers[0], layers[0] - count),), layers)[0] for count in (0, 1))
        return (replace(none, weights=none.weights + resident * (one.weights - none.weights)),)

    def in_one_program(self, config: TrainConfig) -> bool:
        """Whether equal stages share one program."""
        mesh = _abstract(mesh_shape(config))
        return config.strategy == "layerwise" and why_not_one_jit(config, self.base.model, mesh) is None

    def waiting(self, config: TrainConfig) -> int:
        """Return the bytes of a device's part of one layer that waits in host memory; 0 where none does."""
        stream = stream_of(config, self.base.model)
        return 0 if stream is None else self._waiting(tuple(mesh_shape(config).items()), stream)

    def layers(self, config: TrainConfig) -> tuple[int, ...]:
        """Return how many layers each stage has; all of them without stages."""
        if config.strategy != "layerwise":
            return (self.base.model.config.num_layers,)
        return tuple(layers_of_stages(config, self.base.model, _abstract(mesh_shape(config))))

    def streams(self, config: TrainConfig) -> tuple[StreamOrder | None, ...]:
        """Return which layers of each stage wait in host memory, None: none do. Not in stages, there is one."""
        if config.strategy != "layerwise":
            return (stream_of(config, self.base.model),)
        layers = self.layers(config)
        streamed = streamed_of_stages(config.streamed_weights, layers)
        return tuple(stream_order(*pair) if pair[1] else None for pair in zip(layers, streamed, strict=True))

    @functools.cached_property
    def layer_weight_bytes(self) -> int:
        """Bytes of one layer's linear weights as they are stored, on one device."""
        modules = linear_modules(self.base.model).values()
        stored = (leaf for module in modules for leaf in jax.tree.leaves(module.weight.get_value()))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in stored) // self.base.model.config.num_layers

    @functools.cached_property
    def tensor_elements(self) -> tuple[int, int]:
        """Elements of the checkpoint's largest tensor, and of all."""
        sizes = [math.prod(tensor.shape) for tensor in expected_tensors(self.base.model).values()]
        return max(sizes), sum(sizes)

    @functools.cached_property
    def layer_adapter_elements(self) -> int:
        """Elements of one layer's adapters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self._adapters)) // self.base.model.config.num_layers

    @property
    def _adapters(self) -> nnx.State:
        return split(self.base.model)[2]

    def _arguments_of(
        self,
        embeddings: str,
        optimizer: tuple[str, bool],
        dtype: str,
        exchange: tuple[str, str],
        axes: Axes,
        streams: tuple[StreamOrder | None, ...],
        layers: tuple[int, ...],
    ) -> tuple[Arguments, ...]:
        name, on_host = optimizer
        model, whole = self.base.model.with_embeddings(embeddings), self._state(name, dtype)
        if len(streams) == 1:
            mesh = _abstract(dict(axes))
            return (_held(Distribution(mesh, model, *exchange, streams[0], moments_on_host=on_host), whole),)  # type: ignore[arg-type]
        mesh = _abstract({**dict(axes), "stage": 1})
        found, first = [], 0
        for index, count in enumerate(layers):
            part = model.part(count, Ends(first=index == 0, last=index == len(layers) - 1))
            distribution = Distribution(mesh, part, exchange[0], "synchronous", streams[index], on_host)  # type: ignore[arg-type]
            stage = Stage(first, distribution)
            found.append(_held(stage.distribution, stage.part_of(whole)))
            first += count
        return tuple(found)

    def _waiting_of(self, axes: Axes, stream: StreamOrder) -> int:
        waiting = Distribution(_abstract(dict(axes)), self.base.model, stream=stream).waiting  # type: ignore[arg-type]
        assert waiting is not None
        return waiting.device_bytes

    def _state_of(self, optimizer: str, dtype: str) -> TrainState:
        make = functools.partial(
            initial_state, optimizer=make_optimizer(optimizer, 1e-4, weight_decay=0.0), compute_dtype=dtype
        )
        return jax.eval_shape(make, self._adapters)


def _abstract(shape: Mapping[str, int]) -> AbstractMesh:
    """Return a mesh without devices."""
    return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def _held(distribution: Distribution, whole: TrainState) -> Arguments:
    kinds = distribution.device_bytes(whole)
    names = ("LoRA", "optimizer", "residuals", "pending gradients")
    lora, moments, residuals, pending = (kinds.pop(name) for name in names)
    return Arguments(sum(kinds.values()), lora, moments, residuals + pending)
