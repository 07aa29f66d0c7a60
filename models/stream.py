"""The loop over layers whose frozen weights wait in host memory, with its backward pass written out.

The layers that wait in host memory come to the device one ahead of their use, under the computation of the layer before
them, forwards and backwards. In between stand layers that are resident on the device, whose computation gives the link
more time. `jax.checkpoint` over `lax.scan` cannot say this: a weight brought in ahead would have to be part of the
loop's carry, which the backward pass would then keep of every layer.

All micro-batches of an optimizer step pass through a layer before the next one is brought in (layer-major order), so
that the weights cross the link twice a step, however many micro-batches there are. Of each layer its inputs are kept,
on the device or in host memory; the rest of the layer is computed again.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models.stream_order import Ring, StreamOrder

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


# One layer: (x, shared, frozen, adapters, index) -> x, for one micro-batch.
Layer = Callable[[jax.Array, Any, Any, Any, jax.Array], jax.Array]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["resident"], meta_fields=["shape", "dtype", "start"])
@dataclass(frozen=True)
class StreamedStack:
    """A stack of L layers of an array, of which some are streamed: those lie in the waiting layers, as bytes.

    Attributes:
        resident: [L - K, *shape] on the device; None where all layers are streamed.
        shape: of one layer's array, as a device holds it.
        dtype: of the array.
        start: the array's first byte in a waiting layer.
    """

    resident: Any
    shape: tuple[int, ...]
    dtype: Any
    start: int

    @property
    def end(self) -> int:
        """The byte behind the array's last one in a waiting layer."""
        return self.start + math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def of_waiting(self, layer: jax.Array) -> jax.Array:
        """Cut the array out of a waiting layer uint8[bytes]."""
        data = layer[self.start : self.end]
        width = jnp.dtype(self.dtype).itemsize
        elements = data.reshape(self.shape) if width == 1 else data.reshape(*self.shape, width)
        return lax.bitcast_convert_type(elements, self.dtype)


class _Place(NamedTuple):
    """Where a layer's parameters stand: the layer's number among all, and among the streamed or the resident ones."""

    layer: jax.Array
    of_kind: jax.Array


class _Ahead(NamedTuple):
    """A layer on its way to the device, uint8 [bytes].

    Attributes:
        arrived: with a ring its answer, the number 0. The next question takes it, or else nobody would wait for it.
    """

    layer: jax.Array
    arrived: jax.Array | None


@dataclass(frozen=True)
class StreamedLoop:
    """What the loop is made of: nothing here is an array.

    Attributes:
        layer: computes one layer for one micro-batch.
        open_adapters: brings a layer's trained parameters together, once for all micro-batches.
        fetch_layer: brings a layer's frozen parameters together where there are several micro-batches; with one, the
            layer fetches each by itself.
        order: which layers are streamed.
        offload_inputs: whether layer inputs wait in host memory.
        ring: where host memory holds only some of the streamed layers at a time; None: it holds all.
    """

    layer: Layer
    open_adapters: Callable[[Any], Any]
    fetch_layer: Callable[[Any], Any]
    order: StreamOrder
    offload_inputs: bool
    ring: Ring | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def stream_layers(
    loop: StreamedLoop, x: jax.Array, shared: Any, frozen: Any, waiting: jax.Array, trained: Any
) -> jax.Array:
    """Run all micro-batches through all layers.

    Args:
        loop: how.
        x: [A, ...], the first layer's inputs of A micro-batches.
        shared: arrays [A, ...] that every layer gets; they have no gradient.
        frozen: arrays [L, ...], or StreamedStacks in the loop's order, without a gradient.
        waiting: uint8 [K, bytes] in host memory, the streamed layers; with a ring [slots, bytes].
        trained: arrays [L, ...].

    Returns:
        The last layer's results [A, ...].
    """
    return _forward(loop, x, shared, frozen, waiting, trained)[0]


class LayerInputs(NamedTuple):
    """What the forward pass keeps for the backward pass.

    Attributes:
        lead: [layers in front, A, ...], None where there are none.
        of_groups: for each layer of a group [groups, A, ...].
    """

    lead: Any
    of_groups: list[Any]


def layer_inputs(order: StreamOrder, x: jax.ShapeDtypeStruct) -> LayerInputs:
    """Return the shapes of what is kept of layers that map `x` [A, ...]."""

    def stack(layers: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((layers, *x.shape), x.dtype)

    return LayerInputs(stack(order.lead) if order.lead else None, [stack(order.groups) for _ in order.kinds])


def run_layers(
    loop: StreamedLoop, x: jax.Array, shared: Any, frozen: Any, waiting: jax.Array, trained: Any
) -> tuple[jax.Array, LayerInputs]:
    """Do what `stream_layers` does, and return what the backward pass needs in another program: see `rerun_layers`."""
    x, (inputs, *_) = _forward(loop, x, shared, frozen, waiting, trained)
    return x, inputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rerun_layers(
    loop: StreamedLoop, x: jax.Array, shared: Any, frozen: Any, waiting: jax.Array, trained: Any, inputs: LayerInputs
) -> jax.Array:
    """Stand for a `stream_layers` that `run_layers` has computed: only its gradients are right, its result is zeros."""
    return jnp.zeros_like(x)


def _rerun_forward(
    loop: StreamedLoop, x: jax.Array, shared: Any, frozen: Any, waiting: jax.Array, trained: Any, inputs: LayerInputs
) -> tuple[jax.Array, Any]:
    ahead, _ = _bring(loop, _in_host_memory(waiting), jnp.int32(loop.order.streamed_layers - 1), x, None)
    return jnp.zeros_like(x), (inputs, ahead, shared, frozen, waiting, trained)


def _rerun_backward(loop: StreamedLoop, kept: Any, gradient: jax.Array) -> tuple:
    return *_backward(loop, kept, gradient), jax.tree.map(no_gradient, kept[0])


def is_streamed_stack(node: Any) -> bool:
    """Tell whether a node of a pytree is a StreamedStack."""
    return isinstance(node, StreamedStack)


def _at(stack: Any, index: jax.Array) -> Any:
    def of_array(array: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(array, index, keepdims=False, allow_negative_indices=False)

    return jax.tree.map(of_array, stack)


def _put(stack: Any, one: Any, index: jax.Array) -> Any:
    def of_array(array: jax.Array, one: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(array, one, index, 0, allow_negative_indices=False)

    return jax.tree.map(of_array, stack, one)


def _count(turns: int, turn: Callable[[jax.Array, Any], tuple[Any, Any]], carry: Any) -> tuple[Any, Any]:
    def body(state: tuple[jax.Array, Any], _: None) -> tuple[tuple[jax.Array, Any], Any]:
        counter, carry = state
        carry, out = turn(counter, carry)
        return (counter + 1, carry), out

    (_, carry), outs = lax.scan(body, (jnp.int32(0), carry), length=turns)
    return carry, outs


def _in_host_memory(waiting: jax.Array) -> jax.Array:
    """Return the array as it is. Under shard_map JAX does not know where it is: this says it."""
    return jax.device_put(waiting, HOST)


def _bring(
    loop: StreamedLoop, waiting: jax.Array, place: jax.Array, x: jax.Array, last: jax.Array | None
) -> tuple[_Ahead, jax.Array]:
    """Copy a waiting layer to the device; all of it at once, as XLA runs one copy at a time.

    In place of a layer before the first, or behind the last, that one is copied: for nothing, but a condition would
    turn the copy into a kernel. So would an index that depends on anything but the loop's counter.

    Returns:
        The layer, and `x`, which is computed before and used after a ring was asked for the layer.
    """
    ring = loop.ring
    if ring is None:
        return _Ahead(jax.device_put(_at(waiting, place), DEVICE), None), x
    place = jnp.clip(place, 0, loop.order.streamed_layers - 1)
    slot = lax.rem(place, jnp.int32(ring.slots))
    x, place = lax.optimization_barrier((x, place))
    arrived = ring.arrive(place if last is None else place + last, x.reshape(-1)[0])
    waiting, x, arrived = lax.optimization_barrier((waiting, x, arrived))
    if ring.data_dependent:
        slot, x = slot + arrived, jnp.where(arrived == 0, x, 0)
    return _Ahead(jax.device_put(_at(waiting, slot), DEVICE), arrived), x


def _bring_ahead(
    loop: StreamedLoop, waiting: jax.Array, ahead: _Ahead, place: jax.Array, x: jax.Array
) -> tuple[jax.Array, _Ahead, jax.Array]:
    """Begin to bring the layer at `place`; returns the one that was ahead until now, the new one, and `x`."""
    # Not before x is there: then the layer before the present one is done with its buffer.
    waiting, ahead, x = lax.optimization_barrier((waiting, ahead, x))
    return ahead.layer, *_bring(loop, waiting, place, x, ahead.arrived)


def _layer_of(frozen: Any, place: _Place, brought: jax.Array | None) -> Any:
    """Return one layer's frozen parameters: with `brought` of a streamed layer, without of a resident one."""

    def of_node(node: Any) -> Any:
        if not is_streamed_stack(node):
            return _at(node, place.layer)
        return _at(node.resident, place.of_kind) if brought is None else node.of_waiting(brought)

    return jax.tree.map(of_node, frozen, is_leaf=is_streamed_stack)


def _run(loop: StreamedLoop, x: jax.Array, shared: Any, frozen: Any, adapters: Any, index: jax.Array) -> jax.Array:
    """Run every micro-batch through one layer."""
    if len(x) == 1:
        return loop.layer(x[0], _first(shared), frozen, adapters, index)[None]
    whole = loop.fetch_layer(frozen)
    return lax.map(lambda of_rows: loop.layer(of_rows[0], of_rows[1], whole, adapters, index), (x, shared))


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda array: array[0], tree)


def _put_aside(loop: StreamedLoop, x: jax.Array) -> jax.Array:
    return jax.device_put(x, HOST) if loop.offload_inputs else x


def _take_back(loop: StreamedLoop, stack: jax.Array, index: jax.Array) -> jax.Array:
    """Return one of the inputs that were put aside, from their stack."""
    if not loop.offload_inputs:
        return _at(stack, index)
    # Of a stack of one, XLA would make the slice a mere view, which may not lie in another memory than what it views.
    return jax.device_put(stack, DEVICE)[0] if len(stack) == 1 else jax.device_put(_at(stack, index), DEVICE)


def _places(order: StreamOrder, group: jax.Array) -> list[_Place]:
    """Return where the layers of a group stand."""
    places, streamed, resident = [], group * order.streamed, order.lead + group * order.resident
    first = order.lead + group * len(order.kinds)
    for offset, is_streamed in enumerate(order.kinds):
        places.append(_Place(first + offset, streamed if is_streamed else resident))
        streamed, resident = streamed + is_streamed, resident + (not is_streamed)
    return places


def _forward(
    loop: StreamedLoop, x: jax.Array, shared: Any, frozen: Any, waiting: jax.Array, trained: Any
) -> tuple[jax.Array, Any]:
    order = loop.order
    waiting = _in_host_memory(waiting)

    def run(x: jax.Array, place: _Place, brought: jax.Array | None) -> jax.Array:
        adapters = loop.open_adapters(_at(trained, place.layer))
        return _run(loop, x, shared, _layer_of(frozen, place, brought), adapters, place.layer)

    def lead(x: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        return run(x, _Place(index, index), None), _put_aside(loop, x)

    def group(number: jax.Array, carry: tuple[jax.Array, _Ahead]) -> tuple:
        x, ahead = carry
        inputs = []
        for place, is_streamed in zip(_places(order, number), order.kinds, strict=True):
            inputs.append(_put_aside(loop, x))
            brought = None
            if is_streamed:
                brought, ahead, x = _bring_ahead(loop, waiting, ahead, place.of_kind + 1, x)
            x = run(x, place, brought)
        return (x, ahead), inputs

    ahead, x = _bring(loop, waiting, jnp.int32(0), x, None)
    x, lead_inputs = lax.scan(lead, x, jnp.arange(order.lead)) if order.lead else (x, None)
    (x, ahead), inputs = _count(order.groups, group, (x, ahead))
    # The backward pass begins with the layer that is on the device now, the last streamed one.
    return x, (LayerInputs(lead_inputs, inputs), ahead, shared, frozen, waiting, trained)


def _backward(loop: StreamedLoop, kept: Any, gradient: jax.Array) -> tuple[jax.Array, Any, Any, Any, Any]:
    inputs, ahead, shared, frozen, waiting, trained = kept
    order = loop.order
    waiting = _in_host_memory(waiting)

    def gradients_of(x: jax.Array, gradient: jax.Array, place: _Place, brought: jax.Array | None) -> tuple:
        # Not before its gradient is there: XLA would compute layers again ahead of their turn, and hold the results.
        x, gradient = lax.optimization_barrier((x, gradient))
        layer_frozen = _layer_of(frozen, place, brought)
        adapters, close = jax.vjp(loop.open_adapters, _at(trained, place.layer))
        of_layer = _gradients(loop, x, gradient, shared, layer_frozen, adapters, place.layer)
        # Both, before the next layer begins: the adapters' gradients are due much later, and would be put off with all
        # that they are made of.
        gradient, of_adapters = lax.optimization_barrier(of_layer)
        return gradient, close(of_adapters)[0]

    def group(turn: jax.Array, carry: tuple) -> tuple:
        gradient, gradients, ahead = carry
        number = order.groups - 1 - turn
        before = None  # the gradient with which the layer before began
        for place, is_streamed, of_groups in reversed(
            list(zip(_places(order, number), order.kinds, inputs.of_groups, strict=True))
        ):
            # One layer ahead, and not all that a turn needs at its beginning.
            stack = of_groups if before is None else lax.optimization_barrier((of_groups, before))[0]
            x, before, brought = _take_back(loop, stack, number), gradient, None
            if is_streamed:
                brought, ahead, gradient = _bring_ahead(loop, waiting, ahead, place.of_kind - 1, gradient)
            gradient, of_layer = gradients_of(x, gradient, place, brought)
            gradients = _put(gradients, of_layer, place.layer)
        return (gradient, gradients, ahead), None

    def lead(carry: tuple, index: jax.Array) -> tuple[tuple, None]:
        gradient, gradients = carry
        x = _take_back(loop, inputs.lead, index)
        gradient, of_layer = gradients_of(x, gradient, _Place(index, index), None)
        return (gradient, _put(gradients, of_layer, index)), None

    gradients = jax.tree.map(jnp.zeros_like, trained)
    (gradient, gradients, _), _ = _count(order.groups, group, (gradient, gradients, ahead))
    if order.lead:
        (gradient, gradients), _ = lax.scan(lead, (gradient, gradients), jnp.arange(order.lead), reverse=True)
    nothing = functools.partial(jax.tree.map, no_gradient)
    return gradient, nothing(shared), nothing(frozen), nothing(waiting), gradients


stream_layers.defvjp(_forward, _backward)
rerun_layers.defvjp(_rerun_forward, _rerun_backward)


def _gradients(
    loop: StreamedLoop, x: jax.Array, gradient: jax.Array, shared: Any, frozen: Any, adapters: Any, index: jax.Array
) -> tuple[jax.Array, Any]:
    """Return the gradients of one layer's inputs [A, ...], and of its adapters summed over the micro-batches."""

    def pull(x: jax.Array, shared: Any, gradient: jax.Array, frozen: Any) -> tuple[jax.Array, Any]:
        _, backward = jax.vjp(lambda x, adapters: loop.layer(x, shared, frozen, adapters, index), x, adapters)
        return backward(gradient)

    if len(x) == 1:
        of_x, of_adapters = pull(x[0], _first(shared), gradient[0], frozen)
        return of_x[None], of_adapters
    whole = loop.fetch_layer(frozen)

    def accumulate(total: Any, inputs: tuple[jax.Array, Any, jax.Array]) -> tuple[Any, jax.Array]:
        of_x, of_adapters = pull(*inputs, whole)
        return jax.tree.map(lambda sum_, one: sum_ + one.astype(sum_.dtype), total, of_adapters), of_x

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), adapters)
    total, of_x = lax.scan(accumulate, zeros, (x, shared, gradient))
    return of_x, jax.tree.map(lambda sum_, leaf: sum_.astype(leaf.dtype), total, adapters)


def no_gradient(leaf: jax.Array) -> Any:
    """Return the gradient of what has none, as `jax.custom_vjp` wants it."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.zeros_like(leaf)
    return np.zeros(leaf.shape, jax.dtypes.float0)
