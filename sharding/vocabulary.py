"""A table of words, its rows spread over the devices of a mesh axis. For use under shard_map."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class ShardedVocabulary:
    """Equal ranges of rows along the mesh axis `axis`; the last ones may be padding, behind the `size` words.

    It fulfils the protocol `Vocabulary` of the models.
    """

    axis: str
    size: int

    def words(self, rows: int) -> jax.Array:
        """Return the words of this device's rows, -1 for padding."""
        words = lax.axis_index(self.axis) * rows + jnp.arange(rows)
        return jnp.where(words < self.size, words, -1)

    def gather(self, x: jax.Array) -> jax.Array:
        """All-gather along the first axis."""
        return lax.all_gather(x, self.axis, tiled=True)

    def scatter_sum(self, x: jax.Array) -> jax.Array:
        """Reduce-scatter along the first axis."""
        return lax.psum_scatter(x, self.axis, tiled=True)

    def own(self, x: jax.Array) -> jax.Array:
        """Slice this device's part out."""
        size = x.shape[0] // lax.axis_size(self.axis)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis) * size, size)

    def maximum(self, x: jax.Array) -> jax.Array:
        """All-reduce by maximum."""
        return lax.pmax(x, self.axis)

    def total(self, x: jax.Array) -> jax.Array:
        """All-reduce by sum."""
        return lax.psum(x, self.axis)
