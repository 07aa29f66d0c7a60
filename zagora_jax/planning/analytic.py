"""An estimate of a step's memory from shapes, for where the compiler is not at hand, and to order candidates by.

Arguments are exact. What the forward pass keeps follows from `models.remat` and from the arrays that compiled programs
store; the workspace is a straight line through compiled programs: of Llama shapes from 135M to 123B parameters, 512 to
16,384 tokens, one to eight devices (jax 0.10.2). tests/zagora_jax/planning/test_analytic.py holds it to the compiler.
"""

from dataclasses import asdict

from models.attention import BLOCK_SCORES, LARGEST_BLOCK, SMALLEST_BLOCK
from models.config import ModelConfig
from models.cross_entropy import CHUNK_TOKENS
from models.remat import group_count
from models.stream_order import StreamOrder
from sharding.lockstep import most_kept
from sharding.schedule import inputs_held
from zagora_jax.config import TrainConfig
from zagora_jax.planning.kept import kept_elements
from zagora_jax.planning.memory import DeviceMemory
from zagora_jax.planning.shapes import Shapes, mesh_shape
from zagora_jax.stage_programs import MOST_QUEUED
from zagora_jax.streaming import slots_of

ERROR = 0.07  # of the peak, at most

# The workspace in multiples of: the largest dequantised weight, one layer's intermediate and hidden activations, and
# the adapter's gradients.
WEIGHTS, INTERMEDIATES, HIDDENS, GRADIENTS = 1.5, 3.55, 11.7, 0.2
# Where attention takes more than the feed-forward block: arrays of scores and their gradients, and hidden activations.
SCORES, ATTENTION_HIDDENS = 5, 5
RESIDUALS = 2  # those of compressed exchanges, old and new
# Layers that are there at a time, those that arrive ahead of their turn included. Where the arguments alone are more
# than four fifths of the device, XLA schedules for least memory, and next to nothing arrives ahead.
GATHERED_LAYERS, GATHERED_LAYERS_TIGHT, TIGHT = 2.1, 0.0, 0.8
# Of equal stages in one program: what goes on, what comes back, and the last stage's result and its gradient.
TURNING = 4
# The same of what their layers keep, from one half of a tick to another: what is made is put aside, and comes back.
IN_WORK = 1.45
# Of streamed layers: the one that is computed and the one that arrives.
STREAMED_LAYERS = 2
# A streamed layer is computed again where its gradients are, so that its activations exist beside their gradients;
# hidden states of all micro-batches where there are several; and the trained parameters' gradients, of which a stage
# adds those of a micro-batch to those before.
STREAMED_INTERMEDIATES, STREAMED_HIDDENS, STREAMED_TOGETHER = 5.7, 7.0, 3.13
STREAMED_GRADIENTS, STAGE_GRADIENTS = 0.85, 1.8
# Layer inputs on their way to or from host memory, where resident layers stand between the streamed ones: of a
# micro-batch, or of all that are together.
STAGE_INPUTS, INPUTS_TOGETHER = 3, 4
TURNING_HIDDENS, TURNING_LOGITS = 6.9, 3.0  # the same where the loss is computed, and the logits of a piece of it


def estimate_memory(config: TrainConfig, shapes: Shapes, kernel: str, device: int | None) -> tuple[DeviceMemory, ...]:
    """Estimate what a step of full sequences needs of a device of each stage; there is one stage, if not layerwise.

    Args:
        config: with every mesh axis given.
        shapes: of its model.
        kernel: of attention, as `models.attention.choose_kernel` names it.
        device: bytes of a device's memory; None where XLA plans without a bound.
    """
    return tuple(
        _of_stage(config, shapes, kernel, device, index, layers) for index, layers in enumerate(shapes.layers(config))
    )


def _of_stage(
    config: TrainConfig, shapes: Shapes, kernel: str, device: int | None, index: int, layers: int
) -> DeviceMemory:
    model, mesh = shapes.base.model.config, mesh_shape(config)
    arguments, stream = shapes.arguments(config)[index], shapes.streams(config)[index]
    waiting = 0 if stream is None else shapes.waiting(config)
    tokens, width = config.micro_batch_size * config.sequence_length, _width(config)
    # All micro-batches of a step pass through a streamed layer together, but in stages.
    together = 1 if stream is None or mesh["stage"] > 1 else config.gradient_accumulation_steps
    hiddens = width * tokens * together * model.hidden_size
    kept = width * tokens * together * kept_elements(config.planned_remat, model, layers, mesh["tensor"])
    one_program = shapes.in_one_program(config)
    kept = round(kept * times_kept(config, index, streams=stream is not None, one_program=one_program))
    kept, on_host = (0, kept) if config.offload.activations else (kept, 0)
    held = activations_held(config, index, streams=stream is not None, one_program=one_program)
    kept += width * tokens * model.hidden_size * held
    layer_bytes = shapes.layer_weight_bytes / mesh["tensor"]
    gathered = float(STREAMED_LAYERS * waiting)
    if mesh["fsdp"] > 1:
        is_tight = device is not None and arguments.total > TIGHT * device
        times = GATHERED_LAYERS_TIGHT if is_tight else GATHERED_LAYERS
        gathered += times * (layer_bytes + width * shapes.layer_adapter_elements)
    shards, tables = mesh["fsdp"] * mesh["tensor"], shapes.trained_tables
    lora = arguments.lora - tables.parameter_bytes(shards)
    if stream is None:
        sums = config.gradient_accumulation_steps > 1 or mesh["stage"] > 1  # gradients of several micro-batches
        workspace = lora * (1 + GRADIENTS + sums) + _layer_workspace(config, model, kernel)
    else:
        is_last = index == mesh["stage"] - 1
        workspace = _streamed_workspace(config, model, kernel, stream, lora, hiddens, is_last=is_last)
    workspace += RESIDUALS * arguments.error_feedback
    if config.planned_remat == "nested":  # XLA copies the packed weights of a group
        workspace += layer_bytes * (layers // group_count(layers)) / mesh["fsdp"]
    if tables.embedding or tables.head:
        summed = config.gradient_accumulation_steps > 1 and stream is None
        workspace = tables.workspace(round(workspace), kept, shards, tokens, summed=summed)
    slots = 0 if stream is None else slots_of(config, stream.streamed_layers) or stream.streamed_layers
    in_host_memory = waiting * slots
    offloaded = on_host + shapes.moments_on_host(config)[index]
    return DeviceMemory(
        **asdict(arguments),
        activations=kept,
        gathered=round(gathered),
        workspace=round(workspace),
        host=in_host_memory + offloaded,
        source="analytic",
        waiting=in_host_memory,
    )


def _streamed_workspace(
    config: TrainConfig,
    model: ModelConfig,
    kernel: str,
    stream: StreamOrder,
    lora: int,
    hiddens: int,
    *,
    is_last: bool,
) -> float:
    """Bytes of what a loop over streamed layers computes with: in it, or where it turns back.

    Args:
        config: the options.
        model: its model.
        kernel: of attention.
        stream: which layers are streamed.
        lora: bytes of the trained parameters of a device.
        hiddens: bytes of the hidden states of all micro-batches that pass through a layer together.
        is_last: whether it is the last stage, or the only one.
    """
    mesh, tokens, hidden = mesh_shape(config), config.micro_batch_size * config.sequence_length, model.hidden_size
    activations = STREAMED_INTERMEDIATES * model.intermediate_size + STREAMED_HIDDENS * hidden
    layer = max(
        _width(config) * max(tokens * activations, WEIGHTS * hidden * model.intermediate_size),
        _attention_workspace(config, model, kernel),
    )
    on_their_way = config.offload.activations and stream.resident > 0
    if mesh["stage"] > 1:
        inputs = STAGE_INPUTS * hiddens if on_their_way and not is_last else 0
        return STAGE_GRADIENTS * lora + layer + inputs
    several = config.gradient_accumulation_steps > 1
    together = several * (STREAMED_TOGETHER + on_their_way * INPUTS_TOGETHER) * hiddens
    logits = 4 * min(CHUNK_TOKENS, tokens) * model.vocab_size / mesh["fsdp"]
    turning = lora + TURNING_HIDDENS * hiddens + TURNING_LOGITS * logits
    return max(STREAMED_GRADIENTS * lora + layer + together, turning)


def _width(config: TrainConfig) -> int:
    """Bytes of an activation."""
    return 4 if config.compute_dtype == "float32" else 2


def _layer_workspace(config: TrainConfig, model: ModelConfig, kernel: str) -> float:
    """Bytes of what one layer computes with: in the feed-forward block, or in attention where that takes more."""
    parts, tokens, hidden = (
        mesh_shape(config)["tensor"],
        config.micro_batch_size * config.sequence_length,
        model.hidden_size,
    )
    intermediate = model.intermediate_size / parts
    feed_forward = WEIGHTS * hidden * intermediate + tokens * (INTERMEDIATES * intermediate + HIDDENS * hidden)
    return max(_width(config) * feed_forward, _attention_workspace(config, model, kernel))


def _attention_workspace(config: TrainConfig, model: ModelConfig, kernel: str) -> float:
    """Bytes of what attention computes with."""
    parts, tokens = mesh_shape(config)["tensor"], config.micro_batch_size * config.sequence_length
    attention = WEIGHTS * model.hidden_size**2 / parts + ATTENTION_HIDDENS * tokens * model.hidden_size
    return _width(config) * attention + _score_bytes(config, model, kernel) / parts


def _score_bytes(config: TrainConfig, model: ModelConfig, kernel: str) -> int:
    """Bytes of the arrays of float32 scores that exist at a time in attention's backward pass."""
    rows, heads, length = config.micro_batch_size, model.num_heads, config.sequence_length
    match kernel:
        case "chunked":
            block = LARGEST_BLOCK
            while block > SMALLEST_BLOCK and rows * heads * block**2 > BLOCK_SCORES:
                block //= 2
            return SCORES * 4 * rows * heads * min(block, length) ** 2
        case "reference":
            return SCORES * 4 * rows * heads * length**2
        case _:
            return 0


def activations_held(config: TrainConfig, stage: int, *, streams: bool, one_program: bool) -> int:
    """Return how many micro-batches' activations a stage of layerwise holds beside what it computes and keeps."""
    stages, times = mesh_shape(config)["stage"], config.gradient_accumulation_steps
    if stages == 1:
        return 0
    keeps = _keeps(config, stage, streams=streams)
    if one_program:
        return TURNING if keeps else most_kept(stages, times) + TURNING
    travelling = 2 if 0 < stage < stages - 1 else 1  # one arrives and one leaves on either side
    held = inputs_held(stage, stages, times)
    return (min(held, MOST_QUEUED) if keeps and not streams else held) + travelling


def times_kept(config: TrainConfig, stage: int, *, streams: bool, one_program: bool) -> float:
    """Return of how many micro-batches what `remat` keeps of the layers is there at a time."""
    stages, times = mesh_shape(config)["stage"], config.gradient_accumulation_steps
    if stages == 1 or not _keeps(config, stage, streams=streams):
        return 1
    if one_program:
        return most_kept(stages, times) + IN_WORK
    # In the last stage a micro-batch goes back at once. Before it, for one more room is made while the oldest is used.
    return 1 if stage == stages - 1 else inputs_held(stage, stages, times) + 1


def _keeps(config: TrainConfig, stage: int, *, streams: bool) -> bool:
    """Whether a stage keeps something of its layers from its forward to its backward task."""
    return config.offload.activations if streams else config.planned_remat != "stage"
