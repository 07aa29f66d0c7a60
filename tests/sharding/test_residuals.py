"""Residuals by layers, and back."""

import jax
import ml_dtypes
import numpy as np
import pytest

from sharding.compression import ErrorFeedback, chunk_size
from sharding.residuals import from_layers, to_layers

LAYERS, N = 4, 10


def drawn(replicas: int) -> ErrorFeedback:
    rng, chunk = np.random.default_rng(0), chunk_size(N, replicas)
    owned = rng.standard_normal((LAYERS, replicas * chunk))
    owned[:, N:] = 0  # padding has no error
    sent = rng.standard_normal((replicas, LAYERS, N))
    owned = owned.reshape(LAYERS, replicas, chunk).swapaxes(0, 1)
    return ErrorFeedback(sent.astype(ml_dtypes.bfloat16), owned.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_owned_chunks_are_put_together_layer_by_layer(replicas):
    errors = drawn(replicas)
    by_layer = to_layers(errors)
    np.testing.assert_array_equal(by_layer.sent, errors.sent)
    for layer in range(LAYERS):
        np.testing.assert_array_equal(by_layer.owned[layer], np.concatenate(errors.owned[:, layer])[:N])


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_back_is_exact_in_bfloat16(replicas):
    errors = drawn(replicas)
    for a, b in zip(jax.tree.leaves(errors), jax.tree.leaves(from_layers(to_layers(errors))), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
