"""A table of words, its rows spread over the devices of a mesh. For use under shard_map."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from sharding.mesh import PARAMETER_AXES

# Of the devices that hold rows, those along this axis work on different tokens, the others on the same.
TOKENS = "fsdp"
SAME_TOKENS = tuple(axis for axis in PARAMETER_AXES if axis != TOKENS)


@dataclass(frozen=True)
class ShardedVocabulary:
    """Equal ranges of rows over PARAMETER_AXES; the last ones may be padding, behind the `size` words.

    It fulfils the protocol `Vocabulary` of the models.
    """

    size: int

    def words(self, rows: int) -> jax.Array:
        """Return the words of this device's rows, -1 for padding."""
        words = lax.axis_index(PARAMETER_AXES) * rows + jnp.arange(rows)
        return jnp.where(words < self.size, words, -1)

    def gather(self, x: jax.Array) -> jax.Array:
        """All-gather tokens along the first axis."""
        return lax.all_gather(x, TOKENS, tiled=True)

    def scatter_sum(self, x: jax.Array) -> jax.Array:
        """Reduce-scatter along the first axis, and sum what devices with the same tokens have."""
        return lax.psum(lax.psum_scatter(x, TOKENS, tiled=True), SAME_TOKENS)

    def own(self, x: jax.Array) -> jax.Array:
        """Slice the part of this device's tokens out."""
        size = x.shape[0] // lax.axis_size(TOKENS)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(TOKENS) * size, size)

    def maximum(self, x: jax.Array) -> jax.Array:
        """All-reduce by maximum."""
        return lax.pmax(x, PARAMETER_AXES)

    def total(self, x: jax.Array) -> jax.Array:
        """All-reduce by sum."""
        return lax.psum(x, PARAMETER_AXES)
