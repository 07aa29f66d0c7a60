"""How a layer gets at its parameters."""

from collections.abc import Callable
from typing import TypeVar

Parameters = TypeVar("Parameters")

# Called on a parameter (an array or a pytree of arrays) just before its use, in the forward and the
# backward pass. Whoever lays parameters out over devices passes the callable that brings them together.
Fetch = Callable[[Parameters], Parameters]


def identity(parameters: Parameters) -> Parameters:
    """Return `parameters` as they are: everything is on the device already."""
    return parameters
