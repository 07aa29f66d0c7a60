"""What a train step asks of the other devices. `Group` is for use under shard_map; `ALONE` is one device."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from sharding.compression import Compression, ErrorFeedback, all_reduce
from sharding.flat import FlatShard, unflatten
from sharding.mesh import ROW_AXES, SHARD_AXES
from sharding.overlap import Exchange, ExchangeErrors, exchange_in_backward


class Residuals(NamedTuple):
    """What compressed exchanges of gradients have rounded off so far; a row a device, so [1, ...] under shard_map.

    Attributes:
        scattered: [devices, L, n], of the sums over the shards in each layer's backward pass; None without such.
        reduced: of the sums over "data", once an optimizer step; None without such.
    """

    scattered: jax.Array | None = None
    reduced: ErrorFeedback | None = None


class DeviceGroup(Protocol):
    """The devices that share the rows of a step."""

    def first_row(self, rows: int) -> jax.Array | int:
        """Return the place of this device's first row of a micro-batch, of which it has `rows`."""

    def total(self, x: jax.Array) -> jax.Array:
        """Sum a device's own number over all devices."""

    def squared_norm(self, gradients: Any) -> jax.Array:
        """Return the sum of squares of a whole tree of gradients."""

    def exchange(self, gradients: Any, residuals: Residuals) -> tuple[Any, Residuals]:
        """Sum gradients over the replicas; returns them and the new residuals."""


class Alone:
    """One device: nothing to sum."""

    def first_row(self, rows: int) -> int:
        """Return 0."""
        return 0

    def total(self, x: jax.Array) -> jax.Array:
        """Return x."""
        return x

    def squared_norm(self, gradients: Any) -> jax.Array:
        """Sum the squares."""
        return sum_of_squares(gradients)

    def exchange(self, gradients: Any, residuals: Residuals) -> tuple[Any, Residuals]:
        """Return both as they are."""
        return gradients, residuals


ALONE = Alone()


@dataclass(frozen=True)
class Group:
    """The devices of a mesh. Gradients come out of the backward pass summed over SHARD_AXES, as shards.

    Attributes:
        compression: how gradients travel between replicas.
    """

    compression: Compression

    def first_row(self, rows: int) -> jax.Array:
        """Count the rows of the devices before this one, in the order of the mesh."""
        return lax.axis_index(ROW_AXES) * rows

    def total(self, x: jax.Array) -> jax.Array:
        """Sum over all devices that have rows of their own."""
        return lax.psum(x, ROW_AXES)

    def squared_norm(self, gradients: Any) -> jax.Array:
        """Sum the squares of the shards over the devices that hold one each."""
        return lax.psum(sum_of_squares(gradients), SHARD_AXES)

    def exchange(self, gradients: Any, residuals: Residuals) -> tuple[Any, Residuals]:
        """Sum over "data"; compressed where there are residuals."""
        if residuals.reduced is None:
            return lax.psum(gradients, "data"), residuals
        vector, unravel = ravel_pytree(gradients)
        errors = jax.tree.map(lambda row: row[0], residuals.reduced)
        total, errors = all_reduce(vector, errors, "data", self.compression)
        return unravel(total), residuals._replace(reduced=jax.tree.map(lambda error: error[None], errors))


def exchange_layer(adapters: Any, residuals: jax.Array, exchange: Exchange) -> Any:
    """Gather a layer's adapters, FlatShards, whose gradients are exchanged in the layer's backward pass.

    Args:
        adapters: a pytree of FlatShards.
        residuals: [n]; their gradient is the new residuals.
        exchange: over which axis, and how.
    """
    whole = exchange_in_backward(adapters, ExchangeErrors(residuals, None), None, exchange)
    return jax.tree.map(unflatten, whole, is_leaf=lambda leaf: isinstance(leaf, FlatShard))


def sum_of_squares(tree: Any) -> jax.Array:
    """Sum the squares of all elements of a tree, in float32."""
    return sum((jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)), jnp.float32(0))
