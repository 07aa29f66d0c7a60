"""How a model reaches its parameters where other devices hold a part of them. The model itself knows no mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax

from models.stream_order import Ring, StreamOrder
from models.vocabulary import WHOLE_VOCABULARY, Vocabulary

Parameters = TypeVar("Parameters")

# Called on a layer's parameter (an array or a pytree of arrays) just before its use, in the forward and the backward
# pass.
Fetch = Callable[[Parameters], Parameters]


def identity(parameters: Parameters) -> Parameters:
    """Return `parameters` as they are: everything is on the device already."""
    return parameters


def whole(array: jax.Array, name: str, axis: int) -> jax.Array:
    """Return an array as it is: the device computes with all of it."""
    return array


class AdapterExchange(Protocol):
    """How a layer's adapters come together before it runs, and what becomes of their gradients in the backward pass."""

    def begin(self, adapters: Any, exchanged: Any) -> tuple[Any, Any, Any]:
        """Prepare for the loop over layers.

        Args:
            adapters: all adapter parameters, stacked [L, ...].
            exchanged: whatever else the exchange takes, and may have gradients of, stacked [L, ...].

        Returns:
            What takes the places of both in the loop, and what is handed from layer to layer at first.
        """

    def layer(self, adapters: Any, exchanged: Any, waiting: Any) -> tuple[Any, Any]:
        """Return a layer's adapters as it uses them, and what is handed on; all given are the layer's own."""


class LocalAdapters:
    """Adapters are fetched with the weights that they stand beside."""

    def begin(self, adapters: Any, exchanged: Any) -> tuple[Any, Any, Any]:
        """Return both as they are; nothing is handed on."""
        return adapters, exchanged, None

    def layer(self, adapters: Any, exchanged: Any, waiting: Any) -> tuple[Any, Any]:
        """Return the adapters as they are."""
        return adapters, waiting


AS_THEY_ARE = LocalAdapters()


@dataclass(frozen=True)
class Placement:
    """What whoever lays parameters out over devices hands to the model.

    Attributes:
        fetch: brings a layer's parameter together.
        vocabulary: reaches the rows of the embedding and of the head.
        adapters: called on all adapter parameters of a layer before it runs.
        part: called on an array that is whole, with the name of a logical axis and its place in the array's shape:
            returns what this device computes with, padded with zeros. A frozen matrix is fetched as a part already.
        enter: called on the input of layers that are cut along their output; each device's gradient for it is one term
            of a sum, so backwards the terms are added up.
        leave: called on the result of a layer that is cut along its input, one term of a sum: adds up the terms.
        alike: called on a trained parameter that several devices use in the same way, on the same tokens: backwards, of
            the gradients that they all have, the sum over the devices is to count one.
        stream: which layers' frozen parameters wait in host memory, as `models.stream.StreamedStack`s; None: none do.
        ring: where host memory holds only some of those at a time; None: it holds all.
    """

    fetch: Fetch = identity
    vocabulary: Vocabulary = WHOLE_VOCABULARY
    adapters: AdapterExchange = AS_THEY_ARE
    part: Callable[[jax.Array, str, int], jax.Array] = whole
    enter: Callable[[jax.Array], jax.Array] = identity
    leave: Callable[[jax.Array], jax.Array] = identity
    alike: Callable[[jax.Array], jax.Array] = identity
    stream: StreamOrder | None = None
    ring: Ring | None = None


LOCAL = Placement()
