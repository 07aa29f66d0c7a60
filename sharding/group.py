"""What a train step asks of the other devices. `Group` is for use under shard_map; `ALONE` is one device."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from sharding.compression import Compression
from sharding.exchange import Exchange, ExchangeErrors
from sharding.mesh import PARAMETER_AXES, ROW_AXES


class DeviceGroup(Protocol):
    """The devices that share the rows of a step."""

    def first_row(self, rows: int) -> jax.Array | int:
        """Return the place of this device's first row of a micro-batch, of which it has `rows`."""

    def total(self, x: jax.Array) -> jax.Array:
        """Sum a device's own number over all devices."""

    def gather(self, x: jax.Array) -> jax.Array:
        """Put the rows [N, ...] of all devices that have some of their own one behind the other, in their order."""

    def squared_norm(self, gradients: Any) -> jax.Array:
        """Return the sum of squares of a whole tree of gradients."""

    def exchange(
        self, gradients: Any, errors: ExchangeErrors, halfway: jax.Array | None = None
    ) -> tuple[Any, ExchangeErrors]:
        """Sum gradients [L, ...] over the replicas; returns them and the new residuals.

        A number that is known halfway through computations beside which this runs keeps an exchange of two phases from
        running both beside their beginning, one in the other's way. It changes no sum.
        """


class Alone:
    """One device: nothing to sum."""

    def first_row(self, rows: int) -> int:
        """Return 0."""
        return 0

    def total(self, x: jax.Array) -> jax.Array:
        """Return x."""
        return x

    def gather(self, x: jax.Array) -> jax.Array:
        """Return x."""
        return x

    def squared_norm(self, gradients: Any) -> jax.Array:
        """Sum the squares."""
        return sum_of_squares(gradients)

    def exchange(
        self, gradients: Any, errors: ExchangeErrors, halfway: jax.Array | None = None
    ) -> tuple[Any, ExchangeErrors]:
        """Return both as they are."""
        return gradients, errors


ALONE = Alone()


@dataclass(frozen=True)
class Group:
    """The devices of a mesh. Gradients come out of the backward pass summed over the devices of a layer, as shards.

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

    def gather(self, x: jax.Array) -> jax.Array:
        """Gather over all devices that have rows of their own; backwards, their gradients are summed."""
        return lax.all_gather(x, ROW_AXES, axis=0, tiled=True)

    def squared_norm(self, gradients: Any) -> jax.Array:
        """Sum the squares of the shards over the devices that hold one each."""
        return lax.psum(sum_of_squares(gradients), PARAMETER_AXES)

    def exchange(
        self, gradients: Any, errors: ExchangeErrors, halfway: jax.Array | None = None
    ) -> tuple[Any, ExchangeErrors]:
        """Sum over "data"; compressed where there are residuals, each layer as `Exchange.sum` does it."""
        if errors.reduced is None:
            return lax.psum(gradients, "data"), errors
        exchange = Exchange(self.compression, replicas="data")
        vectors = jax.vmap(exchange.join)(gradients)  # [L, n]
        for number, phase in enumerate(exchange.phases):
            if number and halfway is not None:
                # Zero, which no compiler knows: a float times 0 could be something else.
                vectors += 0 * jnp.where(jnp.isfinite(halfway), halfway, 0)
            vectors, errors = jax.vmap(phase, in_axes=(0, 0, None))(vectors, errors, None)
        return jax.vmap(exchange.split)(vectors, gradients), errors


def sum_of_squares(tree: Any) -> jax.Array:
    """Sum the squares of all elements of a tree, in float32."""
    return sum((jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)), jnp.float32(0))
