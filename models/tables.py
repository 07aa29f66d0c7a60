"""Tables of words [vocab, hidden], plain or with quantised rows, and products with them.

Each row of a quantised table is a matrix [1, hidden] of its own in one of the formats of `models.quantization`: so any
rows can be taken, and a table can be cut between any two. Products dequantise a piece of the table at a time.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from models import quantization as formats

FORMATS = ("int8", "nf4")
PIECE_WEIGHTS = 2**25  # that are dequantised at a time: 64 MiB in 16 bits


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class QuantizedTable:
    """A table [vocab, hidden].

    Attributes:
        rows: a quantised tensor, of a stack [vocab] of matrices [1, hidden].
    """

    rows: Any

    @property
    def shape(self) -> tuple[int, int]:
        """(vocab, hidden)."""
        return jax.tree.leaves(self.rows)[0].shape[0], self.rows.shape[1]


Table = jax.Array | QuantizedTable


def abstract(quantization: str, shape: tuple[int, int], dtype: jnp.dtype) -> Any:
    """Describe a table of `shape` in a format, or of `dtype` (quantization "none")."""
    if quantization == "none":
        return jax.ShapeDtypeStruct(shape, dtype)
    return QuantizedTable(formats.abstract(quantization, (1, shape[1]), (shape[0],), dtype))


def axes(quantization: str, shape: tuple[int, int]) -> Any:
    """Name the logical axes of what `abstract` describes."""
    if quantization == "none":
        return ("vocab", "hidden")
    return QuantizedTable(formats.axes(quantization, (1, shape[1]), ("vocab",), ("row", "hidden")))


def quantize(quantization: str, rows: jax.Array) -> QuantizedTable:
    """Quantise some rows [n, hidden] of a table."""
    return QuantizedTable(jax.vmap(lambda row: formats.quantize(quantization, row[None]))(rows))


def dequantize(table: Table, dtype: jnp.dtype) -> jax.Array:
    """Return all rows [vocab, hidden] of a table in `dtype`."""
    if not isinstance(table, QuantizedTable):
        return table.astype(dtype)
    return jax.vmap(lambda row: formats.dequantize(row, dtype)[0])(table.rows)


def take(table: Table, words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return rows of a table in `dtype`: [*words.shape, hidden]; a word that is not there gets another one's row."""
    rows = jax.tree.map(lambda leaf: jnp.take(leaf, words.reshape(-1), axis=0, mode="clip"), table)
    return dequantize(rows, dtype).reshape(*words.shape, -1)


def logits(hidden: jax.Array, head: Table) -> jax.Array:
    """Return hidden [t, hidden] times the transpose of the head: float32 [t, vocab]."""

    def product(rows: Table) -> jax.Array:
        operand = dequantize(rows, hidden.dtype)
        return jnp.einsum("td,vd->tv", hidden, operand, preferred_element_type=jnp.float32)

    if not isinstance(head, QuantizedTable):
        return product(head)

    def put(out: jax.Array, rows: QuantizedTable, start: int | jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(out, product(rows), start, 1)

    return _over_pieces(put, jnp.zeros((len(hidden), head.shape[0]), jnp.float32), head, hidden)


def input_gradient(d_logits: jax.Array, head: Table) -> jax.Array:
    """Return d_logits [t, vocab] times the head, whose operands are in d_logits.dtype: float32 [t, hidden]."""

    def product(d_logits: jax.Array, rows: Table) -> jax.Array:
        operand = dequantize(rows, d_logits.dtype)
        return jnp.einsum("tv,vd->td", d_logits, operand, preferred_element_type=jnp.float32)

    if not isinstance(head, QuantizedTable):
        return product(d_logits, head)

    def add(total: jax.Array, rows: QuantizedTable, start: int | jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(d_logits, start, rows.shape[0], 1)
        return total + product(part, rows)

    return _over_pieces(add, jnp.zeros((len(d_logits), head.shape[1]), jnp.float32), head, d_logits)


def _over_pieces(
    step: Callable[[jax.Array, QuantizedTable, int | jax.Array], jax.Array],
    carry: jax.Array,
    table: QuantizedTable,
    operand: jax.Array,
) -> jax.Array:
    """Call `step` with what it returned before, a piece of the table, and the first word of that.

    Which piece is tied to the operand: else JAX dequantises all of them ahead of a loop over operands, and keeps them.
    """
    rows, width = table.shape
    count = math.ceil(rows * width / PIECE_WEIGHTS)
    size = rows // count

    def piece(start: int | jax.Array, size: int) -> QuantizedTable:
        return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size), table)

    def body(index: jax.Array, carry: jax.Array) -> jax.Array:
        start, _ = lax.optimization_barrier((index * size, operand))
        return step(carry, piece(start, size), start)

    carry = lax.fori_loop(0, count, body, carry)
    rest = rows - count * size
    return step(carry, piece(count * size, rest), count * size) if rest else carry


def joined(parts: Iterator[QuantizedTable], rows: int) -> QuantizedTable:
    """Put parts of a table of so many rows together, one after the other as they come."""
    first = next(parts)
    whole = jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), first)
    whole, start = _put_rows(whole, first, 0), first.shape[0]
    for part in parts:
        whole, start = _put_rows(whole, part, start), start + part.shape[0]
    return whole


@functools.partial(jax.jit, donate_argnums=0)
def _put_rows(whole: Any, rows: Any, start: int | jax.Array) -> Any:
    return jax.tree.map(lambda all_, some: lax.dynamic_update_slice_in_dim(all_, some, start, 0), whole, rows)
