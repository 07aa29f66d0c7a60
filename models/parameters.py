"""The two kinds of parameters: frozen base weights and trained adapter weights."""

from flax import nnx


class Frozen(nnx.Variable):
    """A base weight that training never changes: an array, or a quantised tensor (a pytree of arrays).

    The metadata `axes` names the logical axis of each array dimension; it has the structure of the value.
    """


class Adapter(nnx.Param):
    """A trained float32 weight. The metadata `axes` names the logical axis of each dimension."""
