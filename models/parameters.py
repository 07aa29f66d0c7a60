"""The two kinds of parameters: frozen base weights and trained adapter weights."""

from typing import TYPE_CHECKING

import jax
from flax import nnx

if TYPE_CHECKING:
    from models.placement import Placement


class Frozen(nnx.Variable):
    """A base weight that training never changes: an array, or a quantised tensor (a pytree of arrays).

    The metadata `axes` names the logical axis of each array dimension; it has the structure of the value.
    """


class Adapter(nnx.Param):
    """A trained float32 weight. The metadata `axes` names the logical axis of each dimension.

    With the metadata `whole` it takes the place of a weight of the base model, and begins as that.
    """


def trained(weight: Adapter, placement: "Placement", dtype: jax.typing.DTypeLike) -> jax.Array:
    """Bring a trained weight that belongs to no layer, a stack of one, together: cast before it travels."""
    return placement.fetch(jax.tree.map(lambda leaf: leaf[0].astype(dtype), weight.get_value()))


Path = tuple[str, ...]


def split(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Split a model into its graph, its frozen and its adapter parameters; `nnx.merge` joins them again."""
    graph, *states = nnx.split(model, Frozen, Adapter)
    frozen, adapters = states
    return graph, frozen, adapters


def by_path(state: nnx.State) -> dict[Path, nnx.Variable]:
    """Return the variables of a tree of parameters by their path of attribute names."""
    return {tuple(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
