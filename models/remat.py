"""The loop over layers: what its backward pass computes again, and where what it keeps waits.

none: every intermediate result is kept on the device.
attention: a layer's input is kept, and what attention's backward pass needs.
full: a layer's input is kept; the rest of the layer is computed again.
offload: as full, but the inputs wait in pinned host memory.
nested: the inputs of groups of layers are kept. A group's backward pass first computes the inputs of its layers again,
    which costs a third forward pass: about 2 sqrt(L) inputs at a time, in place of L (Chen et al. 2016, "Training deep
    nets with sublinear memory cost", arXiv:1604.06174).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

REMATS = ("full", "attention", "offload", "nested", "none")

# Maps (carry, one layer's inputs) to (carry, outputs).
Layer = Callable[[jax.Array, Any], tuple[jax.Array, Any]]

_save_nothing = jax.checkpoint_policies.nothing_saveable
_save_named_attention = jax.checkpoint_policies.save_only_these_names("attention_output", "attention_statistics")
_offload_layer_input = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["layer_input"],
    offload_src="device",
    offload_dst="pinned_host",
)


def _save_attention(primitive: Any, *args: Any, **params: Any) -> Any:
    """Keep what attention's backward pass needs of its forward pass: by name, or as cuDNN's own outputs."""
    return "dot_product_attention" in primitive.name or _save_named_attention(primitive, *args, **params)


def scan_layers(layer: Layer, x: jax.Array, inputs: Any, remat: str) -> tuple[jax.Array, Any]:
    """Run layers one after the other.

    Args:
        layer: computes one layer.
        x: the first layer's input; every layer's result has its shape.
        inputs: a pytree of arrays [L, ...], of which each layer gets its slice.
        remat: one of REMATS.

    Returns:
        The last layer's result, and the outputs of all layers, stacked.

    Raises:
        ValueError: an unknown `remat`, or layers that cannot be nested.
    """
    match remat:
        case "none":
            return jax.lax.scan(layer, x, inputs)
        case "full":
            return jax.lax.scan(_checkpoint(layer, _save_nothing), x, inputs)
        case "attention":
            return jax.lax.scan(_checkpoint(layer, _save_attention), x, inputs)
        case "offload":

            def named(x: jax.Array, of_layer: Any) -> tuple[jax.Array, Any]:
                return layer(checkpoint_name(x, "layer_input"), of_layer)

            return jax.lax.scan(_checkpoint(named, _offload_layer_input), x, inputs)
        case "nested":
            return _scan_nested(_checkpoint(layer, _save_nothing), x, inputs)
    raise ValueError(f"remat {remat!r} is not known; accepted values: {', '.join(REMATS)}")


def _scan_nested(layer: Layer, x: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
    layers = len(jax.tree.leaves(inputs)[0])
    groups = group_count(layers)

    def group(x: jax.Array, of_group: Any) -> tuple[jax.Array, Any]:
        return jax.lax.scan(layer, x, of_group)

    grouped = jax.tree.map(lambda array: array.reshape(groups, layers // groups, *array.shape[1:]), inputs)
    x, outputs = jax.lax.scan(_checkpoint(group, _save_nothing), x, grouped)
    return x, jax.tree.map(lambda array: array.reshape(layers, *array.shape[2:]), outputs)


def group_count(layers: int) -> int:
    """Return into how many equal groups `nested` cuts: the divisor nearest below sqrt(layers).

    Raises:
        ValueError: there is none but 1, so that nothing would be saved.
    """
    groups = next(divisor for divisor in range(math.isqrt(layers), 0, -1) if layers % divisor == 0)
    if groups == 1:
        raise ValueError(f"remat 'nested' needs layers in equal groups, and {layers} has no divisor; use 'offload'")
    return groups


def _checkpoint(function: Layer, policy: Callable[..., Any]) -> Layer:
    return jax.checkpoint(function, policy=policy, prevent_cse=False)
