"""What a step's arguments take of each device, from their declared shapes: exact, without a compiler or devices."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from models.llama import Ends, Llama
from models.modules import linear_modules
from models.parameters import by_path, split
from models.stream_order import StreamOrder, stream_order
from sharding.mesh import AXES
from zagora_jax.arrange import layers_of_stages, why_not_one_jit
from zagora_jax.base import BaseModel
from zagora_jax.checkpoints.load import expected_tensors, is_stacked
from zagora_jax.config import TrainConfig
from zagora_jax.distribution import Distribution
from zagora_jax.optimizer import make_optimizer
from zagora_jax.planning.trained_tables import TrainedTables
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
        self._weights = functools.cache(self._weights_of)
        self._trained = functools.cache(self._trained_of)
        self._waiting = functools.cache(self._waiting_of)
        self._part = functools.cache(self._part_of)
        self._layers: dict[tuple[int, str, bool], tuple[int, ...]] = {}

    def arguments(self, config: TrainConfig) -> tuple[Arguments, ...]:
        """Return what the step's arguments take of each device, the batch left out: for each stage, if in stages."""
        weights = self._weights_of_stages(config)
        return tuple(
            Arguments(held, trained.lora, trained.of_optimizer(config.offload.optimizer), trained.error_feedback)
            for held, trained in zip(weights, self._trained_of_stages(config), strict=True)
        )

    def moments_on_host(self, config: TrainConfig) -> tuple[int, ...]:
        """Return the bytes of moments that wait in host memory for a device of each stage."""
        return tuple(trained.moments if config.offload.optimizer else 0 for trained in self._trained_of_stages(config))

    def _weights_of_stages(self, config: TrainConfig) -> tuple[int, ...]:
        of_streams = functools.partial(self._weights, config.embeddings, tuple(mesh_shape(config).items()))
        streams, layers = self.streams(config), self.layers(config)
        if self.in_one_program(config):
            return of_streams((None,), ()) * len(layers)
        if len(layers) > 1 or streams[0] is None or (resident := layers[0] - streams[0].streamed_layers) == 0:
            return of_streams(streams, layers)
        # Each resident layer takes as much: two numbers of them tell of all.
        none, one = (of_streams((stream_order(layers[0], layers[0] - count),), layers)[0] for count in (0, 1))
        return (none + resident * (one - none),)

    def _trained_of_stages(self, config: TrainConfig) -> tuple["_Trained", ...]:
        exchange = (config.gradient_compression, config.gradient_exchange)
        axes, streams = tuple(mesh_shape(config).items()), config.streamed_weights != "none"
        of_layers = functools.partial(self._trained, config.optimizer, config.compute_dtype, exchange, axes, streams)
        layers = self.layers(config)
        return of_layers(()) * len(layers) if self.in_one_program(config) else of_layers(layers)

    def in_one_program(self, config: TrainConfig) -> bool:
        """Whether equal stages share one program."""
        mesh = _abstract(mesh_shape(config))
        return config.strategy == "layerwise" and why_not_one_jit(config, self.base.model, mesh) is None

    def waiting(self, config: TrainConfig) -> int:
        """Return the bytes of a device's part of one layer that waits in host memory; 0 where none does."""
        stream = stream_of(config, self.base.model)
        return 0 if stream is None else self._waiting(tuple({**mesh_shape(config), "stage": 1}.items()), stream)

    def layers(self, config: TrainConfig) -> tuple[int, ...]:
        """Return how many layers each stage has; all of them without stages."""
        if config.strategy != "layerwise":
            return (self.base.model.config.num_layers,)
        shape = mesh_shape(config)
        key = (shape["stage"], str(config.stage_layers), self.in_one_program(config))
        if key not in self._layers:
            self._layers[key] = tuple(layers_of_stages(config, self.base.model, _abstract(shape)))
        return self._layers[key]

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
        """Elements of what is trained of one layer."""
        trained = by_path(self._adapters).items()
        elements = sum(variable.get_value().size for path, variable in trained if is_stacked(path))
        return elements // self.base.model.config.num_layers

    @functools.cached_property
    def trained_tables(self) -> TrainedTables:
        """The tables that are trained in full."""
        return TrainedTables.of(self.base.model)

    @property
    def _adapters(self) -> nnx.State:
        return split(self.base.model)[2]

    def _part_of(self, embeddings: str, count: int, ends: Ends) -> Llama:
        model = self.base.model.with_embeddings(embeddings)
        return model if count == model.config.num_layers else model.part(count, ends)

    def _parts(self, embeddings: str, axes: Axes, layers: tuple[int, ...]) -> list[tuple[AbstractMesh, Llama]]:
        """Return the mesh and the model of each stage; of equal stages in one program (`layers` is empty), of all."""
        if not layers:
            return [(_abstract(dict(axes)), self._part(embeddings, self.base.model.config.num_layers, Ends()))]
        mesh, last = _abstract({**dict(axes), "stage": 1}), len(layers) - 1
        ends = [Ends(first=index == 0, last=index == last) for index in range(len(layers))]
        return [(mesh, self._part(embeddings, count, end)) for count, end in zip(layers, ends, strict=True)]

    def _weights_of(
        self, embeddings: str, axes: Axes, streams: tuple[StreamOrder | None, ...], layers: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return the bytes of frozen parameters of a device of each stage."""
        parts = zip(self._parts(embeddings, axes, layers), streams, strict=True)
        return tuple(
            _device_bytes(Distribution(mesh, model, stream=stream).frozen)  # type: ignore[arg-type]
            for (mesh, model), stream in parts
        )

    def _trained_of(
        self, optimizer: str, dtype: str, exchange: tuple[str, str], axes: Axes, streams: bool, layers: tuple[int, ...]
    ) -> tuple["_Trained", ...]:
        """Return the bytes of the training state of a device of each stage."""
        whole, found, first = self._state(optimizer, dtype), [], 0
        compression, when = exchange
        for mesh, model in self._parts(self.base.model.embeddings, axes, layers):
            count = model.config.num_layers
            order = stream_order(count, count) if streams else None
            when = "synchronous" if len(layers) > 1 else when
            distribution = Distribution(mesh, model, compression, when, order, moments_on_host=True)  # type: ignore[arg-type]
            of_stage = Stage(first, distribution).part_of(whole) if len(layers) > 1 else whole
            found.append(_Trained.of(distribution.state(of_stage)))
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


@dataclass(frozen=True)
class _Trained:
    """Bytes of one device's training state; `moments` may wait in host memory, `counters` do not."""

    lora: int
    moments: int
    counters: int
    error_feedback: int

    @classmethod
    def of(cls, state: TrainState) -> "_Trained":
        """Sum the Spreads of a state whose moments are on the host."""
        moments = sum(spread.host_bytes for spread in jax.tree.leaves(state.optimizer))
        error_feedback = _device_bytes(state.residuals) + _device_bytes(state.pending)
        return cls(_device_bytes(state.adapters), moments, _device_bytes(state.optimizer), error_feedback)

    def of_optimizer(self, on_host: bool) -> int:
        """What of the optimizer is on the device."""
        return self.counters + (0 if on_host else self.moments)


def _device_bytes(spreads: Any) -> int:
    return sum(spread.device_bytes for spread in jax.tree.leaves(spreads))
