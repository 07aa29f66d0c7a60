"""An estimate of a step's memory from shapes, for where the compiler is not at hand, and to order candidates by.

Arguments are exact. What the forward pass keeps follows from `models.remat` and from the arrays that compiled programs
store; the workspace is a straight line through compiled programs: of Llama shapes from 135M to 123B parameters, 512 to
16,384 tokens, one to eight devices (jax 0.10.2). tests/zagora_jax/planning/test_analytic.py holds it to the compiler.
"""

from dataclasses import asdict

from models.config import ModelConfig
from models.remat import group_count
from zagora_jax.config import TrainConfig
from zagora_jax.planning.memory import DeviceMemory
from zagora_jax.planning.shapes import Shapes, mesh_shape

ERROR = 0.07  # of the peak, at most

# The workspace in multiples of: the largest dequantised weight, one layer's intermediate and hidden activations, and
# the adapter's gradients.
WEIGHTS, INTERMEDIATES, HIDDENS, GRADIENTS = 1.5, 3.55, 11.7, 0.2
# Layers that are there at a time, the ones that arrive ahead of their turn included. Where the arguments alone are more
# than four fifths of the device, XLA schedules for least memory, and next to nothing arrives ahead.
GATHERED_LAYERS, GATHERED_LAYERS_TIGHT, TIGHT = 2.1, 0.0, 0.8


def estimate_memory(config: TrainConfig, shapes: Shapes, kernel: str, device: int | None) -> DeviceMemory:
    """Estimate what a step of full sequences needs of a device.

    Args:
        config: with every mesh axis given.
        shapes: of its model.
        kernel: of attention, as `models.attention.choose_kernel` names it.
        device: bytes of a device's memory; None where XLA plans without a bound.
    """
    model, mesh = shapes.base.model.config, mesh_shape(config)
    arguments = shapes.arguments(config)
    tokens = config.micro_batch_size * config.sequence_length
    width = 4 if config.compute_dtype == "float32" else 2  # bytes of an activation
    kept = width * tokens * _kept_elements(config, model)
    layer_bytes = shapes.layer_weight_bytes
    gathered = 0
    if mesh["fsdp"] > 1:
        is_tight = device is not None and arguments.total > TIGHT * device
        gathered = round(
            (GATHERED_LAYERS_TIGHT if is_tight else GATHERED_LAYERS)
            * (layer_bytes + width * shapes.layer_adapter_elements)
        )
    gradients = arguments.lora
    workspace = gradients * (1 + GRADIENTS + (config.gradient_accumulation_steps > 1)) + width * (
        WEIGHTS * model.hidden_size * model.intermediate_size
        + INTERMEDIATES * tokens * model.intermediate_size
        + HIDDENS * tokens * model.hidden_size
    )
    if kernel == "reference":  # holds all scores, in float32, and their gradients
        workspace += 3 * 4 * config.micro_batch_size * model.num_heads * config.sequence_length**2
    if config.remat == "nested":  # XLA copies the packed weights of a group
        groups = group_count(model.num_layers)
        workspace += layer_bytes * (model.num_layers // groups) / mesh["fsdp"]
    inputs = width * tokens * model.hidden_size * model.num_layers
    return DeviceMemory(
        **asdict(arguments),
        activations=kept,
        gathered=gathered,
        workspace=round(workspace),
        host=inputs if config.offload.activations else 0,
        source="analytic",
    )


def _kept_elements(config: TrainConfig, model: ModelConfig) -> int:
    """What the forward pass keeps on the device of a token, all layers together."""
    hidden, queries, keys = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    match config.remat:
        case "none":
            of_layer = 6 * model.intermediate_size + 7 * hidden + 2 * queries + 2 * keys
        case "attention":
            of_layer = hidden + queries
        case "nested":
            groups = group_count(model.num_layers)
            return (groups + model.num_layers // groups) * hidden
        case _:
            of_layer = hidden
    if config.offload.activations:
        of_layer -= hidden
    return of_layer * model.num_layers
