"""How the embedding and the output head are reached where each device may hold a part of their rows."""

import functools
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
    """Return the rows of `table` for tokens [B, S], as [B, S, D] of `dtype`.

    Each device looks up what it holds for the tokens of its whole group; the sum over the group is exact, since all
    terms but one are zero. Backwards, each device sums the gradients of its own rows, in the table's dtype.
    """
    if isinstance(vocabulary, WholeVocabulary):
        return tables.take(table, tokens, dtype)
    return _look_up(table, tokens, vocabulary, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _look_up(table: Table, tokens: jax.Array, vocabulary: Vocabulary, dtype: jnp.dtype) -> jax.Array:
    row, here = _places(table, tokens, vocabulary)
    rows = jnp.where(here[..., None], tables.take(table, row, dtype), 0)
    return vocabulary.scatter_sum(rows)


def _forward(
    table: Table, tokens: jax.Array, vocabulary: Vocabulary, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[Table, jax.Array]]:
    return _look_up(table, tokens, vocabulary, dtype), (table, tokens)


def _backward(
    vocabulary: Vocabulary, dtype: jnp.dtype, kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None]:
    table, tokens = kept  # a trained one, which is plain
    row, here = _places(table, tokens, vocabulary)
    gradients = jnp.where(here[..., None], vocabulary.gather(gradient), 0).astype(table.dtype)
    return jnp.zeros_like(table).at[jnp.where(here, row, 0)].add(gradients), None


_look_up.defvjp(_forward, _backward)


def _places(table: Table, tokens: jax.Array, vocabulary: Vocabulary) -> tuple[jax.Array, jax.Array]:
    """Return which row of `table` each token of the group [peers * B, S] has, and whether it is one of them."""
    first = vocabulary.words(table.shape[0])[0]
    row = vocabulary.gather(tokens) - first
    return row, (row >= 0) & (row < table.shape[0]) & (first >= 0)
