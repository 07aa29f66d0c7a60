"""What stays on the device: which layers' frozen weights, and what the forward pass computes of a layer."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from models.stream_order import StreamOrder
from zagora_jax import processes
from zagora_jax.arrange import arrange, why_not_one_jit
from zagora_jax.base import BaseModel
from zagora_jax.checkpoints.load import is_stacked, trained_in_full
from zagora_jax.config import TrainConfig
from zagora_jax.devices import memory_limit
from zagora_jax.distribution import Distribution
from zagora_jax.errors import UserError
from zagora_jax.host_memory import room_to_pin
from zagora_jax.kernels import forward_options
from zagora_jax.layer_ring import LEAST_SLOTS
from zagora_jax.planning.analytic import ERROR, estimate_memory
from zagora_jax.planning.candidates import on_mesh
from zagora_jax.planning.compiled import compile_planned
from zagora_jax.planning.shapes import Shapes
from zagora_jax.reporting.sensors import GIB
from zagora_jax.streaming import fitting_order

_FROM_LEAST = ("none", "mlp", "attention")


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


def settle_form(config: TrainConfig, base: BaseModel, mesh: Mesh, say: Callable[[str], None]) -> TrainConfig:
    """Replace stage_form "auto" by "programs" where one program has no room and those need less.

    Embedding and head, which equal stages share out, are whole on the first and the last stage with programs; but those
    keep less between the passes. The one program is compiled where an estimate does not tell whether it fits.
    """
    limits = [limit for device in mesh.devices.flat if (limit := memory_limit(device)) is not None]
    is_open = config.strategy == "layerwise" and config.stage_form == "auto"
    if not limits or not is_open or why_not_one_jit(config, base.model, mesh) is not None:
        return config
    kernel = forward_options(config, base, mesh.devices.flat[0].platform).kernel
    shapes, limit = Shapes(base), min(limits)
    programs = config.model_copy(update={"stage_form": "programs"})
    one, several = (
        max(estimate.peak for estimate in estimate_memory(on_mesh(form, mesh), shapes, kernel, limit))
        for form in (config, programs)
    )
    if one <= limit * (1 + ERROR):
        if one * (1 + ERROR) <= limit:
            return config
        one = max(compile_planned(config, mesh, base).planned_memory().values())
    if one <= limit or several >= one:
        return config
    say(
        f"stages: a program for each, since one for all would need about {one / GIB:.2f} of {limit / GIB:.2f} GiB a "
        f"device, and these {several / GIB:.2f}"
    )
    return programs


def settle_remat(config: TrainConfig, base: BaseModel, mesh: Mesh, say: Callable[[str], None]) -> TrainConfig:
    """Replace remat "auto" by what computes least again of what the devices of a mesh have room for.

    The step that keeps most comes first. Where an estimate leaves open whether it fits, it is compiled for these
    devices. Where something waits in host memory, memory is short: then it is full, as it is where a device's memory
    has no limit. Stages that have no room for that keep their input alone.
    """
    if config.remat != "auto":
        return config
    limits = [limit for device in mesh.devices.flat if (limit := memory_limit(device)) is not None]
    least = config.model_copy(update={"remat": config.planned_remat})
    if config.offload.activations or config.streamed_weights != "none":
        return least
    full = config.model_copy(update={"remat": "full"})
    if not limits:
        return full
    remats = () if config.offload.optimizer else _FROM_LEAST
    shapes, limit = Shapes(base), min(limits)
    for remat in (*remats, "full") if least.remat == "stage" else remats:
        chosen = config.model_copy(update={"remat": remat})
        kernel = forward_options(chosen, base, mesh.devices.flat[0].platform).kernel
        estimates = estimate_memory(on_mesh(chosen, mesh), shapes, kernel, limit)
        planned = max(estimate.peak for estimate in estimates)
        if planned > limit * (1 + ERROR):
            continue
        if planned * (1 + ERROR) > limit:
            planned = max(compile_planned(chosen, mesh, base).planned_memory().values())
        if planned <= limit:
            say(f"remat: {remat}, with about {planned / GIB:.2f} of {limit / GIB:.2f} GiB a device")
            return chosen
    return least


def settle_source(config: TrainConfig, base: BaseModel, mesh: Mesh, say: Callable[[str], None]) -> TrainConfig:
    """Replace offload.weights_from "auto" by "host", or by the number of layers that host memory has room for.

    Args:
        config: with offload.weights settled.
        base: the model.
        mesh: the devices.
        say: told what layers on the disk mean.

    Raises:
        UserError: layers are to be read from the disk, but there is no file of them.
    """
    source = config.offload.weights_from
    if config.streamed_weights == "none" or source == "host" or config.strategy == "layerwise":
        return config
    problem = _problem(config, base)
    if source != "auto" and problem:
        raise UserError(f"--offload.weights-from {source}: {problem}")
    if source == "auto":
        slots = None if problem or not processes.present().alone else _room(config, base, mesh, say)
        offload = config.offload.model_copy(update={"weights_from": slots or "host"})
        config = config.model_copy(update={"offload": offload})
    return config


def _problem(config: TrainConfig, base: BaseModel) -> str | None:
    """Say what is against reading layers from the disk while a program runs."""
    if (initialization := config.lora.initialization) != "default":
        return f"with --lora.initialization {initialization} the cache is not used; leave one of both out"
    if base.synthetic:
        return "random weights are in no file; leave it out"
    if any(map(is_stacked, trained_in_full(base.model))):
        return "norms of layers are trained (--lora.modules-to-save), and the cache is not used; leave one of both out"
    if base.quantized_cache is None:
        return "there is no cache of quantised layers; give --quantized-cache a folder, or auto"
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError:
        return "programs ask for layers through JAX's CPU backend, which JAX_PLATFORMS leaves out: set it to cuda,cpu"
    return None


def _room(config: TrainConfig, base: BaseModel, mesh: Mesh, say: Callable[[str], None]) -> int | None:
    """Return for how many streamed layers host memory has room beside what else waits there; None: for all."""
    arrangement = arrange(config, base.model, mesh)
    assert isinstance(arrangement, Distribution)
    assert arrangement.waiting is not None
    waiting = arrangement.waiting
    explicit, shapes = on_mesh(config, mesh), Shapes(base)
    (estimate,) = estimate_memory(explicit, shapes, forward_options(config, base).kernel, None)
    others = estimate.host - estimate.waiting
    of_layer = waiting.device_bytes * mesh.size
    room = (room_to_pin(mesh.devices.flat[0].platform) - others * mesh.size) // of_layer
    streamed = waiting.order.streamed_layers
    if room >= streamed:
        return None
    slots = max(room, min(LEAST_SLOTS, streamed))
    say(
        f"weights: the {streamed} layers take {streamed * of_layer / GIB:.1f} GiB of host memory, which has room for "
        f"{max(0, room)}: they are read from the cache on the disk when they are needed, through {slots} layers' room"
    )
    return slots


def _fit(config: TrainConfig, base: BaseModel, mesh: Mesh, limit: int) -> StreamOrder | None:
    """Fill what a step with all layers streamed leaves of the memory with resident layers."""
    layers, arrangement = base.model.config.num_layers, arrange(config, base.model, mesh)
    assert isinstance(arrangement, Distribution)
    assert arrangement.waiting is not None
    planned = max(compile_planned(config, mesh, base).planned_memory().values())
    return fitting_order(layers, arrangement.waiting.device_bytes, planned, limit)
