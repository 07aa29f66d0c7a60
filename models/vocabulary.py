"""How the embedding and the output head are reached where each device may hold a part of their rows."""

from typing import Protocol

import jax
import jax.numpy as jnp

from models import tables
from models.tables import Table


class Vocabulary(Protocol):
    """The rows of a table [V, D] that this device holds, and the group of devices that hold the others.

    `gather`, `scatter_sum` and `own` go over those devices of the group that work on different tokens ("peers" below);
    several devices may work on the same ones.
    """

    def words(self, rows: int) -> jax.Array:
        """Return int32 [rows], the word of each row that this device holds; -1 for a row of padding."""

    def gather(self, x: jax.Array) -> jax.Array:
        """Join the peers' arrays [t, ...] along the first axis, in their order: [peers * t, ...]."""

    def scatter_sum(self, x: jax.Array) -> jax.Array:
        """Sum the group's arrays [peers * t, ...], and return the part of this device's tokens [t, ...]."""

    def own(self, x: jax.Array) -> jax.Array:
        """Return the part [t, ...] of this device's tokens of an array [peers * t, ...] that the whole group has."""

    def maximum(self, x: jax.Array) -> jax.Array:
        """Return the elementwise maximum over the group."""

    def total(self, x: jax.Array) -> jax.Array:
        """Return the elementwise sum over the group."""


class WholeVocabulary:
    """Every row is here."""

    def words(self, rows: int) -> jax.Array:
        """Return 0 to rows - 1."""
        return jnp.arange(rows)

    def gather(self, x: jax.Array) -> jax.Array:
        """Return x."""
        return x

    scatter_sum = own = maximum = total = gather


WHOLE_VOCABULARY = WholeVocabulary()


def look_up(table: Table, tokens: jax.Array, vocabulary: Vocabulary, dtype: jnp.dtype) -> jax.Array:
    """Return the rows of `table` for tokens [B, S], as [B, S, D] of `dtype`; without a gradient for the table.

    Each device looks up what it holds for the tokens of its whole group; the sum over the group is exact, since all
    terms but one are zero.
    """
    if isinstance(vocabulary, WholeVocabulary):
        return tables.take(table, tokens, dtype)
    words = vocabulary.words(table.shape[0])
    wanted = vocabulary.gather(tokens)  # [peers * B, S]
    row = wanted - words[0]
    here = (row >= 0) & (row < table.shape[0])
    rows = jnp.where(here[..., None], tables.take(table, row, dtype), 0)
    return vocabulary.scatter_sum(rows)
