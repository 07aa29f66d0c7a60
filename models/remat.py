"""The loop over layers: what its backward pass computes again, and where what it keeps waits.

none: every intermediate result is kept on the device.
attention: a layer's input is kept, and what attention's backward pass needs.
full: a layer's input is kept; the rest of the layer is computed again.
nested: the inputs of groups of layers are kept. A group's backward pass first computes the inputs of its layers again,
    which costs a third forward pass: about 2 sqrt(L) inputs at a time, in place of L (Chen et al. 2016, "Training deep
    nets with sublinear memory cost", arXiv:1604.06174).

With attention and full, the layers' inputs can wait in pinned host memory. Not with nested: XLA cannot move what a loop
inside another one keeps.
"""

import math
from collections.abc import Callable
from typing import Any

import jax

REMATS = ("full", "attention", "nested", "none")

# Those that keep the layers' inputs and no more than a little beside them.
OFFLOADABLE = ("full", "attention")

LAYER_INPUT = "layer_input"

# Maps (carry, one layer's inputs) to (carry, outputs).
Layer = Callable[[Any, Any], tuple[Any, Any]]

_save_nothing = jax.checkpoint_policies.nothing_saveable
_save_named_attention = jax.checkpoint_policies.save_only_these_names("attention_output", "attention_statistics")
_offload_layer_input = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[LAYER_INPUT],
    offload_src="device",
    offload_dst="pinned_host",
)


def _save_attention(primitive: Any, *args: Any, **params: Any) -> Any:
    """Keep what attention's backward pass needs of its forward pass: by name, or as cuDNN's own outputs."""
    return "dot_product_attention" in primitive.name or _save_named_attention(primitive, *args, **params)


def _save_attention_and_offload(primitive: Any, *args: Any, **params: Any) -> Any:
    return _save_attention(primitive, *args, **params) or _offload_layer_input(primitive, *args, **params)


_POLICIES = {
    ("full", False): _save_nothing,
    ("full", True): _offload_layer_input,
    ("attention", False): _save_attention,
    ("attention", True): _save_attention_and_offload,
}


def scan_layers(layer: Layer, carry: Any, inputs: Any, remat: str, *, offload: bool = False) -> tuple[Any, Any]:
    """Run layers one after the other.

    Args:
        layer: computes one layer. It gives its input the name LAYER_INPUT, by `checkpoint_name`.
        carry: what the first layer gets; what every layer returns has the same shapes.
        inputs: a pytree of arrays [L, ...], of which each layer gets its slice.
        remat: one of REMATS.
        offload: whether the layers' inputs wait in pinned host memory, with one of OFFLOADABLE.

    Returns:
        What the last layer returns, and the outputs of all layers, stacked.

    Raises:
        ValueError: an unknown `remat`, one that does not go with `offload`, or layers that cannot be nested.
    """
    if offload and remat not in OFFLOADABLE:
        raise ValueError(f"remat {remat!r} keeps no layer inputs to offload; use {' or '.join(OFFLOADABLE)}")
    match remat:
        case "none":
            return jax.lax.scan(layer, carry, inputs)
        case "full" | "attention":
            return jax.lax.scan(_checkpoint(layer, _POLICIES[remat, offload]), carry, inputs)
        case "nested":
            return _scan_nested(_checkpoint(layer, _save_nothing), carry, inputs)
    raise ValueError(f"remat {remat!r} is not known; accepted values: {', '.join(REMATS)}")


def _scan_nested(layer: Layer, carry: Any, inputs: Any) -> tuple[Any, Any]:
    layers = len(jax.tree.leaves(inputs)[0])
    groups = group_count(layers)

    def group(carry: Any, of_group: Any) -> tuple[Any, Any]:
        return jax.lax.scan(layer, carry, of_group)

    grouped = jax.tree.map(lambda array: array.reshape(groups, layers // groups, *array.shape[1:]), inputs)
    carry, outputs = jax.lax.scan(_checkpoint(group, _save_nothing), carry, grouped)
    return carry, jax.tree.map(lambda array: array.reshape(layers, *array.shape[2:]), outputs)


def group_count(layers: int) -> int:
    """Return into how many equal groups `nested` cuts: the divisor nearest below sqrt(layers).

    Raises:
        ValueError: there is none but 1, so that nothing would be saved.
    """
    groups = next(divisor for divisor in range(math.isqrt(layers), 0, -1) if layers % divisor == 0)
    if groups == 1:
        raise ValueError(f"remat 'nested' needs layers in equal groups, and {layers} has no divisor; use 'full'")
    return groups


def _checkpoint(function: Layer, policy: Callable[..., Any]) -> Layer:
    return jax.checkpoint(function, policy=policy, prevent_cse=False)
