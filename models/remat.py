"""The loop over layers: what its backward pass computes again, and where what it keeps waits.

A layer's input is kept, and of the rest of the layer:

none: queries, keys and values, attention's output, the residual, gate and up: no product of matrices is computed again.
    What lies between them is, such as norms: to read it again would take as long.
mlp: the same without gate and up, which are the most by far.
attention: attention's output, with what attention's backward pass needs beside.
full: nothing.
stage: nothing; and of a pipeline's stage, whose backward pass comes later, not even that: but its first layer's input.
nested: of groups of layers only the first input is kept. A group's backward pass first computes the inputs of its
    layers again, which costs a third forward pass: about 2 sqrt(L) inputs at a time, in place of L (Chen et al. 2016,
    "Training deep nets with sublinear memory cost", arXiv:1604.06174).

But with nested, what is kept can wait in pinned host memory: XLA cannot move what a loop inside another one keeps.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

LAYER_INPUT = "layer_input"

# What a layer gives names to, by `checkpoint_name`, in the order in which it is worth keeping.
_ATTENTION = ("attention_output", "attention_statistics")
_PROJECTIONS = ("query", "key", "value", "residual")
_GATES = ("gate", "up")
KEPT: dict[str, tuple[str, ...]] = {
    "none": (*_ATTENTION, *_PROJECTIONS, *_GATES),
    "mlp": (*_ATTENTION, *_PROJECTIONS),
    "attention": _ATTENTION,
    "full": (),
    "stage": (),
}

# From the one that computes least again.
REMATS = (*KEPT, "nested")

# Those whose kept arrays can wait in host memory.
OFFLOADABLE = tuple(KEPT)

# Maps (carry, one layer's inputs) to (carry, outputs).
Layer = Callable[[Any, Any], tuple[Any, Any]]


@functools.cache
def _policy(remat: str, offload: bool) -> Callable[..., Any]:
    """Return what `jax.checkpoint` asks of every operation: whether, and where, its result is kept."""
    kept = KEPT[remat]
    named = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[] if offload else kept,
        names_which_can_be_offloaded=[LAYER_INPUT, *kept] if offload else [],
        offload_src="device",
        offload_dst="pinned_host",
    )
    naming = jax.make_jaxpr(lambda x: checkpoint_name(x, _ATTENTION[0]))(jnp.float32(0)).eqns[0]

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        # cuDNN's results, which its backward pass needs, have no names.
        if "dot_product_attention" in primitive.name:
            return named(naming.primitive, **naming.params)
        return named(primitive, *args, **params)

    return policy


def scan_layers(layer: Layer, carry: Any, inputs: Any, remat: str, *, offload: bool = False) -> tuple[Any, Any]:
    """Run layers one after the other.

    Args:
        layer: computes one layer. It gives its input the name LAYER_INPUT, by `checkpoint_name`.
        carry: what the first layer gets; what every layer returns has the same shapes.
        inputs: a pytree of arrays [L, ...], of which each layer gets its slice.
        remat: one of REMATS.
        offload: whether what is kept waits in pinned host memory, with one of OFFLOADABLE.

    Returns:
        What the last layer returns, and the outputs of all layers, stacked.

    Raises:
        ValueError: an unknown `remat`, one that does not go with `offload`, or layers that cannot be nested.
    """
    if offload and remat not in OFFLOADABLE:
        raise ValueError(f"remat {remat!r} keeps nothing that could be offloaded; use {' or '.join(OFFLOADABLE)}")
    if remat not in REMATS:
        raise ValueError(f"remat {remat!r} is not known; accepted values: {', '.join(REMATS)}")
    if remat == "nested":
        return _scan_nested(_checkpoint(layer, jax.checkpoint_policies.nothing_saveable), carry, inputs)
    return jax.lax.scan(_checkpoint(layer, _policy(remat, offload)), carry, inputs)


def _scan_nested(layer: Layer, carry: Any, inputs: Any) -> tuple[Any, Any]:
    layers = len(jax.tree.leaves(inputs)[0])
    groups = group_count(layers)

    def group(carry: Any, of_group: Any) -> tuple[Any, Any]:
        return jax.lax.scan(layer, carry, of_group)

    grouped = jax.tree.map(lambda array: array.reshape(groups, layers // groups, *array.shape[1:]), inputs)
    carry, outputs = jax.lax.scan(_checkpoint(group, jax.checkpoint_policies.nothing_saveable), carry, grouped)
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
