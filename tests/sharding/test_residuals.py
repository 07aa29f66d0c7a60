"""Residuals by layers, and back."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from sharding.compression import ErrorFeedback, chunk_size
from sharding.residuals import from_layers, to_layers

WIDTHS = (3, 5, 2)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_layers_are_those_of_the_gradients(replicas):
    layers = 4
    gradients = [np.arange(layers)[:, None] * 100 + 10.0 * index + np.arange(w) for index, w in enumerate(WIDTHS)]
    vector = np.asarray(ravel_pytree(gradients)[0])
    sent = np.stack([vector + 1000 * replica for replica in range(replicas)])
    chunk = chunk_size(vector.size, replicas)
    owned = np.pad(vector, (0, chunk * replicas - vector.size)).reshape(replicas, chunk)

    by_layer = to_layers(ErrorFeedback(sent, owned), WIDTHS)
    expected = np.concatenate(gradients, axis=1)
    np.testing.assert_array_equal(by_layer.owned, expected)
    np.testing.assert_array_equal(by_layer.sent[-1], expected + 1000 * (replicas - 1))


def test_back_is_exact_in_bfloat16():
    rng = np.random.default_rng(0)
    n = 7 * sum(WIDTHS)
    padding = chunk_size(n, 3) * 3 - n
    owned = np.pad(rng.standard_normal(n), (0, padding)).reshape(3, -1).astype(ml_dtypes.bfloat16)
    errors = ErrorFeedback(rng.standard_normal((3, n)).astype(ml_dtypes.bfloat16), owned)
    back = from_layers(to_layers(errors, WIDTHS), WIDTHS)
    for a, b in zip(jax.tree.leaves(errors), jax.tree.leaves(back), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
