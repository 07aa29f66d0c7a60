"""An estimate of a step's memory from shapes, for where the compiler is not at hand, and to order candidates by.

Arguments are exact. What the forward pass keeps follows from `models.remat` and from the arrays that compiled programs
store; the workspace is a straight line through compiled programs: of Llama shapes from 135M to 123B parameters, 512 to
16,384 tokens, one to eight devices (jax 0.10.2). tests/zagora_jax/planning/test_analytic.py holds it to the compiler.
"""

from dataclasses import asdict

from models.attention import BLOCK_SCORES, LARGEST_BLOCK, SMALLEST_BLOCK
from models.config import ModelConfig
from models.remat import group_count
from sharding.schedule import inputs_held
from zagora_jax.config import TrainConfig
from zagora_jax.planning.memory import DeviceMemory
from zagora_jax.planning.shapes import Shapes, mesh_shape

ERROR = 0.07  # of the peak, at most

# The workspace in multiples of: the largest dequantised weight, one layer's intermediate and hidden activations, and
# the adapter's gradients.
WEIGHTS, INTERMEDIATES, HIDDENS, GRADIENTS = 1.5, 3.55, 11.7, 0.2
# Where attention takes more than the feed-forward block: arrays of scores and their gradients, and hidden activations.
SCORES, ATTENTION_HIDDENS = 5, 7
RESIDUALS = 2  # those of compressed exchanges, old and new
# Layers that are there at a time, the ones that arrive ahead of their turn included. Where the arguments alone are more
# than four fifths of the device, XLA schedules for least memory, and next to nothing arrives ahead.
GATHERED_LAYERS, GATHERED_LAYERS_TIGHT, TIGHT = 2.1, 0.0, 0.8


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
    arguments = shapes.arguments(config)[index]
    tokens = config.micro_batch_size * config.sequence_length
    width = 4 if config.compute_dtype == "float32" else 2  # bytes of an activation
    kept = width * tokens * _kept_elements(config, model, layers)
    kept += width * tokens * model.hidden_size * activations_held(config, index)
    layer_bytes = shapes.layer_weight_bytes
    gathered = 0
    if mesh["fsdp"] > 1:
        is_tight = device is not None and arguments.total > TIGHT * device
        times = GATHERED_LAYERS_TIGHT if is_tight else GATHERED_LAYERS
        gathered = round(times * (layer_bytes + width * shapes.layer_adapter_elements))
    sums = config.gradient_accumulation_steps > 1 or mesh["stage"] > 1  # gradients of several micro-batches
    feed_forward = width * (
        WEIGHTS * model.hidden_size * model.intermediate_size
        + INTERMEDIATES * tokens * model.intermediate_size
        + HIDDENS * tokens * model.hidden_size
    )
    attention = width * (WEIGHTS * model.hidden_size**2 + ATTENTION_HIDDENS * tokens * model.hidden_size)
    attention += _score_bytes(config, model, kernel)
    workspace = arguments.lora * (1 + GRADIENTS + sums) + max(feed_forward, attention)
    workspace += RESIDUALS * arguments.error_feedback
    if config.remat == "nested":  # XLA copies the packed weights of a group
        workspace += layer_bytes * (layers // group_count(layers)) / mesh["fsdp"]
    return DeviceMemory(
        **asdict(arguments),
        activations=kept,
        gathered=gathered,
        workspace=round(workspace),
        host=width * tokens * model.hidden_size * layers if config.offload.activations else 0,
        source="analytic",
    )


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


def activations_held(config: TrainConfig, stage: int) -> int:
    """Return how many micro-batches' activations a stage of layerwise holds beside what it computes."""
    stages = mesh_shape(config)["stage"]
    if stages == 1:
        return 0
    travelling = 2 if 0 < stage < stages - 1 else 1  # one arrives and one leaves on either side
    return inputs_held(stage, stages, config.gradient_accumulation_steps) + travelling


def _kept_elements(config: TrainConfig, model: ModelConfig, layers: int) -> int:
    """What the forward pass keeps on the device of a token, all layers together."""
    hidden, queries, keys = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    match config.remat:
        case "none":
            of_layer = 6 * model.intermediate_size + 7 * hidden + 2 * queries + 2 * keys
        case "attention":
            of_layer = hidden + queries + 2 * model.num_heads  # statistics of the softmax, in float32
        case "nested":
            groups = group_count(layers)
            return (groups + layers // groups) * hidden
        case _:
            of_layer = hidden
    if config.offload.activations:
        of_layer -= hidden
    return of_layer * layers
