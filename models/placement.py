"""How a model reaches its parameters where other devices hold a part of them. The model itself knows no mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

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


def as_they_are(adapters: Any, residuals: Any) -> Any:
    """Return a layer's adapters as they are."""
    return adapters


@dataclass(frozen=True)
class Placement:
    """What whoever lays parameters out over devices hands to the model.

    Attributes:
        fetch: brings a layer's parameter together.
        vocabulary: reaches the rows of the embedding and of the head.
        adapters: called on all adapter parameters of a layer before it runs, with the layer's slice of the residuals
            of compressed gradient exchanges (None without such).
        part: called on an array that is whole, with the name of a logical axis and its place in the array's shape:
            returns what this device computes with, padded with zeros. A frozen matrix is fetched as a part already.
        enter: called on the input of layers that are cut along their output; each device's gradient for it is one term
            of a sum, so backwards the terms are added up.
        leave: called on the result of a layer that is cut along its input, one term of a sum: adds up the terms.
    """

    fetch: Fetch = identity
    vocabulary: Vocabulary = WHOLE_VOCABULARY
    adapters: Callable[[Any, Any], Any] = as_they_are
    part: Callable[[jax.Array, str, int], jax.Array] = whole
    enter: Callable[[jax.Array], jax.Array] = identity
    leave: Callable[[jax.Array], jax.Array] = identity


LOCAL = Placement()
