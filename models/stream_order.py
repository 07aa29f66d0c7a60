"""Which layers wait outside of the device, and which are resident on it."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

# Streamed layers in a group: an even number, so that the two buffers they alternate between are the same in every turn
# of the loop. With an odd number XLA copies a whole layer's codes at the end of each turn.
_STREAMED_IN_A_GROUP = (2, 4)
_LARGEST_GROUP = 6  # a group's layers are unrolled, so this bounds the program's size


@dataclass(frozen=True)
class StreamOrder:
    """Which of L layers wait in host memory: `lead` resident ones, then `groups` times `streamed` and `resident` ones.

    Within a group the resident layers are spread between the streamed ones.
    """

    lead: int
    groups: int
    streamed: int
    resident: int

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Whether each layer of a group is streamed."""
        kinds: list[bool] = []
        for place in range(self.streamed):
            share = self.resident * (place + 1) // self.streamed - self.resident * place // self.streamed
            kinds += [True] + [False] * share
        return tuple(kinds)

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        """Whether each of the L layers is streamed."""
        return (False,) * self.lead + self.kinds * self.groups

    def place(self, layer: int) -> tuple[bool, int]:
        """Return whether a layer is streamed, and its place among those of its kind."""
        kinds = self.layer_kinds
        return kinds[layer], kinds[:layer].count(kinds[layer])

    @property
    def streamed_layers(self) -> int:
        """K, the number of layers in host memory."""
        return self.groups * self.streamed


def stream_order(layers: int, streamed: int) -> StreamOrder:
    """Spread `streamed` of `layers` layers as evenly as groups allow.

    Raises:
        ValueError: there are not so many layers, or no group of the sizes that are compiled gives this number.
    """
    if not 1 <= streamed <= layers:
        raise ValueError(f"{streamed} of {layers} layers cannot wait in host memory")
    orders = [
        StreamOrder(layers - groups * (size + resident), groups, size, resident)
        for size in (*_STREAMED_IN_A_GROUP, 1)
        if streamed % size == 0
        for groups in [streamed // size]
        for resident in range(_LARGEST_GROUP - size + 1)
        if groups * (size + resident) <= layers
    ]
    # The fewest layers in front; among equals the smallest group, but one that alternates between two buffers.
    return min(orders, key=lambda order: (order.lead, order.streamed == 1, order.streamed + order.resident))


@dataclass(frozen=True)
class Ring:
    """Host memory for some of the streamed layers at a time, which the host fills while a program runs.

    The k-th streamed layer lies in slot k modulo `slots`.

    Attributes:
        slots: how many layers it holds.
        arrive: called in the program with a streamed layer's number, int32, just before that is copied out of its slot,
            and with a number that is computed before: returns 0, int32, once the layer is there. What was copied before
            the copy before this one has been used by then.
        data_dependent: whether programs run two operations at once unless one takes the other's result, as XLA's do on
            a CPU. Else they keep an order that `jax.lax.optimization_barrier` gives.
    """

    slots: int
    arrive: Callable[[jax.Array, jax.Array], jax.Array]
    data_dependent: bool


def arrivals(streamed: int, *, backward: bool) -> tuple[int, ...]:
    """Return the streamed layers in the order in which a program brings them to the device.

    Args:
        streamed: K, their number.
        backward: whether the program goes through the layers a second time, for gradients.
    """
    # The last one comes twice, since the backward pass begins with it, and the first at the end for nothing.
    forward = (0, *(min(layer + 1, streamed - 1) for layer in range(streamed)))
    return forward + tuple(max(layer - 1, 0) for layer in reversed(range(streamed))) * backward
