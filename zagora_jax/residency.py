"""Which layers' frozen weights stay on the device, and which wait in host memory."""

from collections.abc import Callable

from jax.sharding import Mesh

from models.stream_order import StreamOrder
from zagora_jax.arrange import arrange
from zagora_jax.base import BaseModel
from zagora_jax.config import TrainConfig
from zagora_jax.devices import memory_limit
from zagora_jax.distribution import Distribution
from zagora_jax.planning.compiled import compile_planned
from zagora_jax.reporting.sensors import GIB
from zagora_jax.streaming import fitting_order


def settle_streaming(config: TrainConfig, base: BaseModel, mesh: Mesh, say: Callable[[str], None]) -> TrainConfig:
    """Replace offload.weights "auto" by a number of layers, or by "none", for the devices of a mesh.

    A `Pipeline` settles it by itself, for each stage, when it knows its layers.

    The step is compiled with all layers streamed, and what it leaves of the smallest device's memory is filled with
    layers.
    """
    if config.streamed_weights != "auto" or config.strategy == "layerwise":
        return config
    layers = base.model.config.num_layers
    limits = [limit for device in mesh.devices.flat if (limit := memory_limit(device)) is not None]
    limit = min(limits, default=None)
    order = None if limit is None else _fit(config, base, mesh, limit)
    streamed = 0 if order is None else order.streamed_layers
    of_limit = "this device's memory has no limit" if limit is None else f"the limit is {limit / GIB:.2f} GiB a device"
    say(f"weights: {streamed} of {layers} layers wait in host memory ({of_limit})")
    strategy = "replicas" if config.strategy == "streaming" else config.strategy  # else it would ask for auto again
    offload = config.offload.model_copy(update={"weights": streamed or "none"})
    return config.model_copy(update={"strategy": strategy, "offload": offload})


def _fit(config: TrainConfig, base: BaseModel, mesh: Mesh, limit: int) -> StreamOrder | None:
    """Fill what a step with all layers streamed leaves of the memory with resident layers."""
    layers, arrangement = base.model.config.num_layers, arrange(config, base.model, mesh)
    assert isinstance(arrangement, Distribution)
    assert arrangement.waiting is not None
    planned = max(compile_planned(config, mesh, base).planned_memory().values())
    return fitting_order(layers, arrangement.waiting.device_bytes, planned, limit)
