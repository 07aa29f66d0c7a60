"""Tables of words with quantised rows: the same numbers as the formats give each row, and as plain tables of those."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import largest_compiled

from models import quantization as formats
from models import tables
from models.cross_entropy import cross_entropy_sum
from models.quantization import bits_per_parameter
from models.vocabulary import WHOLE_VOCABULARY, look_up

VOCAB, WIDTH, TOKENS = 70, 200, 24  # no multiples of the formats' blocks


@pytest.fixture(params=tables.FORMATS)
def quantized(request):
    rows = np.random.default_rng(0).normal(size=(VOCAB, WIDTH)).astype(np.float32)
    rows *= np.geomspace(0.01, 10, VOCAB)[:, None].astype(np.float32)  # words differ in size, as they do
    return request.param, rows, jax.jit(tables.quantize, static_argnums=0)(request.param, rows)


def test_each_row_is_a_matrix_of_the_format(quantized):
    name, rows, table = quantized
    assert table.shape == rows.shape
    found = tables.dequantize(table, jnp.float32)
    for word in (0, 1, 33, VOCAB - 1):
        expected = formats.dequantize(formats.quantize(name, rows[word][None]), jnp.float32)[0]
        np.testing.assert_array_equal(found[word], expected)
    described = tables.abstract(name, rows.shape, jnp.float32)
    assert described.shape == rows.shape
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), table) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), described
    )


def test_rows_are_looked_up(quantized):
    _, _, table = quantized
    tokens = np.array([[0, 69, 5], [5, 1, 0]], np.int32)
    found = look_up(table, tokens, WHOLE_VOCABULARY, jnp.float32)
    np.testing.assert_array_equal(found, tables.dequantize(table, jnp.float32)[tokens])


@pytest.mark.parametrize("pieces", [1, 4])  # 4: of 17 rows each, and a rest of 2
def test_a_quantised_heads_loss_and_gradient_are_those_of_the_plain_one(quantized, monkeypatch, pieces):
    monkeypatch.setattr(tables, "PIECE_WEIGHTS", -(-VOCAB // pieces) * WIDTH)
    _, _, table = quantized
    rng = np.random.default_rng(1)
    hidden = rng.normal(size=(TOKENS, WIDTH)).astype(np.float32)
    targets, weights = rng.integers(0, VOCAB, TOKENS).astype(np.int32), rng.random(TOKENS).astype(np.float32)

    def loss(hidden, head):
        return cross_entropy_sum(hidden, head, targets, weights, 7)

    found = jax.jit(jax.value_and_grad(loss))(hidden, table)
    expected = jax.jit(jax.value_and_grad(loss))(hidden, tables.dequantize(table, jnp.float32))
    # The same products, of which the gradient's are added up piece by piece.
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-6 * np.abs(expected[1]).max())


def test_a_quantised_head_is_never_whole(quantized, monkeypatch):
    monkeypatch.setattr(tables, "PIECE_WEIGHTS", 10 * WIDTH)
    _, _, table = quantized
    hidden, targets, weights = np.zeros((8, WIDTH), np.float32), np.zeros(8, np.int32), np.ones(8, np.float32)
    largest = largest_compiled(jax.grad(lambda *x: cross_entropy_sum(*x, 4)), hidden, table, targets, weights)
    assert largest == VOCAB * WIDTH // (1 if isinstance(table.rows, formats.Int8Tensor) else 2)  # the codes


@pytest.mark.parametrize(("name", "bits"), [("int8", 8.25), ("nf4", 4.129)])
def test_bits_a_weight(name, bits):
    leaves = jax.tree.leaves(tables.abstract(name, (1000, 4096), jnp.bfloat16))
    assert 8 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 4_096_000 == pytest.approx(bits, abs=0.02)
    assert bits_per_parameter(name, (4096, 4096), jnp.bfloat16) == pytest.approx(bits, abs=0.02)
