"""Which layers' frozen weights stay on the device, and which wait in host memory."""

from collections.abc import Callable

from jax.sharding import Mesh

from models.stream import StreamOrder, stream_order
from zagora_jax.arrange import arrange
from zagora_jax.base import BaseModel
from zagora_jax.config import TrainConfig
from zagora_jax.devices import choose_mesh, memory_limit
from zagora_jax.distribution import Distribution
from zagora_jax.planning.compiled import compile_planned
from zagora_jax.reporting.sensors import GIB

# Of the allocator's limit, what is left for what fragments.
HEADROOM = 0.02
# A few layers more in host memory than needed may lie better between the resident ones.
LEEWAY = 3


def settle_streaming(config: TrainConfig, base: BaseModel, say: Callable[[str], None]) -> TrainConfig:
    """Replace offload.weights "auto" by a number of layers, or by "none", for the devices of this machine.

    The step is compiled with all layers streamed, and what it leaves of the smallest device's memory is filled with
    layers.
    """
    if config.streamed_weights != "auto":
        return config
    layers, mesh = base.model.config.num_layers, choose_mesh(config)
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
    resident = max(0, int((limit * (1 - HEADROOM) - planned) // arrangement.waiting.device_bytes))
    if resident >= layers - 2:  # the two layers that a streaming step holds anyway make room for the last two
        return None
    needed = layers - resident
    orders = [stream_order(layers, streamed) for streamed in range(needed, min(needed + LEEWAY, layers) + 1)]
    return min(orders, key=lambda order: (order.lead + (order.streamed_layers - needed), order.streamed_layers))
