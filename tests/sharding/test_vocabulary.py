"""Tables of words in equal parts; devices are the entries of a mapped axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cross_entropy import cross_entropy_sum
from models.vocabulary import WHOLE_VOCABULARY, look_up
from sharding.vocabulary import ShardedVocabulary

DEVICES, WORDS, WIDTH, TOKENS = 3, 10, 4, 5
VOCABULARY = ShardedVocabulary(WORDS)
ROWS = -(-WORDS // DEVICES)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def on_devices(function, *arguments, along="fsdp"):
    """Call for each device, whose arguments are rows [DEVICES, ...]; the other axes have size 1."""

    def mapped(function, axis):
        def alone(*own):
            return jax.tree.map(lambda x: x[0], jax.vmap(lambda _: function(*own), axis_name=axis)(jnp.zeros(1)))

        return alone

    for axis in {"stage", "fsdp", "tensor"} - {along}:
        function = mapped(function, axis)
    return jax.vmap(function, axis_name=along)(*arguments)


def parts(table: np.ndarray) -> np.ndarray:
    padded = np.pad(table, ((0, DEVICES * ROWS - WORDS), (0, 0)), constant_values=np.nan)
    return padded.reshape(DEVICES, ROWS, -1)


def test_each_device_has_a_range_of_words_and_padding_behind_the_last() -> None:
    words = on_devices(lambda _: VOCABULARY.words(ROWS), jnp.arange(DEVICES))
    assert words.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, -1, -1]]


def test_words_are_looked_up_wherever_they_lie() -> None:
    table = draw(WORDS, WIDTH)
    tokens = np.random.default_rng(1).integers(0, WORDS, (DEVICES, 2, TOKENS)).astype(np.int32)
    found = on_devices(
        lambda rows, tokens: look_up(rows, tokens, VOCABULARY, jnp.float32), np.nan_to_num(parts(table)), tokens
    )
    np.testing.assert_array_equal(found, table[tokens])


@pytest.mark.parametrize("along", ["stage", "tensor"])
def test_devices_with_the_same_tokens_find_the_same(along: str) -> None:
    table, hidden = draw(WORDS, WIDTH), draw(TOKENS, WIDTH)
    tokens = np.random.default_rng(1).integers(0, WORDS, (1, TOKENS)).astype(np.int32)
    weights = np.ones(TOKENS, np.float32)

    def work(rows, vocabulary=VOCABULARY):
        def loss(hidden):
            return cross_entropy_sum(hidden, rows, tokens[0], weights, 2, vocabulary)

        return look_up(rows, tokens, vocabulary, rows.dtype), *jax.value_and_grad(loss)(hidden)

    words, loss, gradient = on_devices(work, np.nan_to_num(parts(table)), along=along)
    want_words, want_loss, want_gradient = work(table, WHOLE_VOCABULARY)
    for device in range(DEVICES):
        np.testing.assert_array_equal(words[device], want_words)
        np.testing.assert_allclose(loss[device], want_loss, rtol=1e-6)
        np.testing.assert_allclose(gradient[device], want_gradient, rtol=1e-5, atol=1e-6)


def test_each_device_takes_its_own_part_of_what_all_have() -> None:
    found = on_devices(lambda _: VOCABULARY.own(jnp.arange(2 * DEVICES)), jnp.arange(DEVICES))
    assert found.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_the_loss_and_its_gradient_are_those_of_the_whole_head() -> None:
    head, hidden = draw(WORDS, WIDTH), draw(DEVICES, TOKENS, WIDTH)
    targets = np.random.default_rng(1).integers(0, WORDS, (DEVICES, TOKENS)).astype(np.int32)
    weights = np.array([[1, 1, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]], np.float32)  # uneven over devices

    def loss(rows, hidden, targets, weights, vocabulary=VOCABULARY):
        return cross_entropy_sum(hidden, rows, targets, weights, 2, vocabulary)

    per_device = jax.value_and_grad(loss, argnums=1)
    losses, gradients = on_devices(per_device, np.nan_to_num(parts(head)), hidden, targets, weights)
    flat = (hidden.reshape(-1, WIDTH), targets.reshape(-1), weights.reshape(-1))
    want, want_gradients = jax.value_and_grad(loss, argnums=1)(head, *flat, WHOLE_VOCABULARY)
    # Float32, in another order of sums over ten words.
    np.testing.assert_allclose(losses.sum(), want, rtol=1e-6)
    np.testing.assert_allclose(gradients.reshape(-1, WIDTH), want_gradients, rtol=1e-5, atol=1e-6)
