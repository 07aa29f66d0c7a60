"""Chunked cross entropy against log_softmax over all logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import count, largest_compiled, largest_traced

from models.cross_entropy import cross_entropy_sum

TOKENS, VOCABULARY, WIDTH = 37, 50, 16
# Rounding of a logit (WIDTH products of order 1), of a sum over the vocabulary, and of one over tokens.
UNITS = (WIDTH + VOCABULARY + TOKENS) * 2**-24


def random_inputs(tokens: int = TOKENS, vocabulary: int = VOCABULARY, dtype=jnp.float32):
    rng = np.random.default_rng(tokens)
    return (
        jnp.asarray(rng.standard_normal((tokens, WIDTH)), dtype),
        jnp.asarray(rng.standard_normal((vocabulary, WIDTH)), dtype),
        jnp.asarray(rng.integers(0, vocabulary, tokens), jnp.int32),
        jnp.asarray(rng.integers(0, 2, tokens) * rng.random(tokens), jnp.float32),
    )


def plain(hidden, head, targets, weights) -> jax.Array:
    """The same with all logits, in the precision of its arguments."""
    log_probabilities = jax.nn.log_softmax(hidden @ head.T)
    return -jnp.sum(weights * log_probabilities[jnp.arange(len(targets)), targets])


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 256])
def test_value_and_gradient_equal_the_plain_ones(chunk_tokens):
    inputs = random_inputs()
    expected, expected_gradient = jax.value_and_grad(plain)(*inputs)
    loss, gradient = jax.jit(jax.value_and_grad(lambda *x: 3 * cross_entropy_sum(*x, chunk_tokens)))(*inputs)
    assert loss.dtype == gradient.dtype == jnp.float32
    np.testing.assert_allclose(loss / 3, expected, rtol=UNITS)
    np.testing.assert_allclose(gradient / 3, expected_gradient, atol=UNITS * np.abs(expected_gradient).max())
    np.testing.assert_allclose(cross_entropy_sum(*inputs, chunk_tokens), expected, rtol=UNITS)


def test_trained_heads_and_capped_logits_have_the_plain_gradients():
    """Of logits that are the sum of two products, one of whose heads is trained."""
    hidden, head, targets, weights = random_inputs()
    rng = np.random.default_rng(1)
    low = jnp.asarray(rng.standard_normal((TOKENS, 3)), jnp.float32)
    rows = jnp.asarray(rng.standard_normal((VOCABULARY, 3)), jnp.float32)

    def expected(hidden, low, rows):
        logits = 5 * jnp.tanh((hidden @ head.T + low @ rows.T) / 5)
        return -jnp.sum(weights * jax.nn.log_softmax(logits)[jnp.arange(TOKENS), targets])

    def found(hidden, low, rows):
        heads, trained = (head, rows), (False, True)
        return cross_entropy_sum((hidden, low), heads, targets, weights, 8, trained=trained, softcap=5.0)

    plain_loss, plain_gradients = jax.value_and_grad(expected, argnums=(0, 1, 2))(hidden, low, rows)
    loss, gradients = jax.jit(jax.value_and_grad(found, argnums=(0, 1, 2)))(hidden, low, rows)
    np.testing.assert_allclose(loss, plain_loss, rtol=UNITS)
    np.testing.assert_allclose(found(hidden, low, rows), plain_loss, rtol=UNITS)
    for gradient, plain_gradient in zip(gradients, plain_gradients, strict=True):
        np.testing.assert_allclose(gradient, plain_gradient, atol=UNITS * np.abs(plain_gradient).max())


def test_one_supervised_token_is_right_in_every_place():
    hidden, head, targets, _ = random_inputs()
    expected = -jax.nn.log_softmax(hidden @ head.T)[jnp.arange(TOKENS), targets]
    run = jax.jit(lambda weights: cross_entropy_sum(hidden, head, targets, weights, 8))
    found = [run(weights) for weights in jnp.eye(TOKENS)]
    np.testing.assert_allclose(found, expected, rtol=UNITS, atol=UNITS)


def test_no_supervised_token_gives_zero():
    hidden, head, targets, _ = random_inputs()
    loss, gradient = jax.value_and_grad(cross_entropy_sum)(hidden, head, targets, jnp.zeros(TOKENS), 8)
    assert loss == 0
    assert not gradient.any()


def test_an_unsupervised_token_gets_no_gradient():
    *inputs, weights = random_inputs()
    gradient = jax.grad(cross_entropy_sum)(*inputs, weights, 8)
    np.testing.assert_array_equal(np.asarray(gradient).any(axis=-1), np.asarray(weights) > 0)


def test_the_head_is_frozen():
    hidden, head, targets, weights = random_inputs()
    assert not jax.grad(cross_entropy_sum, argnums=1)(hidden, head, targets, weights).any()


def test_large_logits_stay_finite():
    hidden, head, targets, weights = random_inputs()
    loss, gradient = jax.value_and_grad(cross_entropy_sum)(hidden * 1e4, head, targets, weights, 8)
    assert np.isfinite(loss)
    assert np.all(np.isfinite(gradient))


def test_bfloat16_has_float32_logits():
    inputs = random_inputs(dtype=jnp.bfloat16)
    exact, exact_gradient = jax.value_and_grad(plain)(*(x.astype(jnp.float32) for x in inputs[:2]), *inputs[2:])
    loss, gradient = jax.value_and_grad(cross_entropy_sum)(*inputs)
    assert (loss.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)
    # Products of bfloat16 are exact in float32, so the loss is as good as in float32.
    np.testing.assert_allclose(loss, exact, rtol=UNITS)
    # Gradients of logits are rounded to 8 bits, and so is the result.
    np.testing.assert_allclose(gradient, exact_gradient, atol=2 * 2**-8 * np.abs(exact_gradient).max())


def test_a_float32_head_serves_bfloat16_states():
    hidden, head, targets, weights = random_inputs(dtype=jnp.bfloat16)
    expected = cross_entropy_sum(hidden, head, targets, weights)
    assert cross_entropy_sum(hidden, head.astype(jnp.float32), targets, weights) == expected


def test_logits_of_all_tokens_never_exist():
    inputs = random_inputs(tokens=512, vocabulary=640)
    chunk = 32

    def chunked(*inputs):
        return cross_entropy_sum(*inputs, chunk)

    assert largest_traced(plain, *inputs) == 512 * 640
    for function in (chunked, jax.grad(chunked), jax.grad(jax.checkpoint(chunked))):
        assert largest_traced(function, *inputs) <= chunk * 640
        assert largest_compiled(function, *inputs) <= chunk * 640


def test_the_gradient_is_computed_only_where_it_is_wanted():
    inputs = random_inputs()
    assert count("dot_general", cross_entropy_sum, *inputs) == 1
    assert count("dot_general", jax.value_and_grad(cross_entropy_sum), *inputs) == 2
