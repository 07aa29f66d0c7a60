"""One vector for a sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.pooling import pooled

HIDDEN = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float32)
LENGTHS = np.array([3, 5, 1], np.int32)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_real_tokens_alone_count(pooling):
    rows = [row[:length] for row, length in zip(HIDDEN, LENGTHS, strict=True)]
    expected = np.stack([row.mean(0) if pooling == "mean" else row[-1] for row in rows])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(pooled(HIDDEN, LENGTHS, pooling), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_empty_sequence_has_no_direction_and_no_gradient(pooling):
    lengths = jnp.array([3, 0, 1])
    assert not np.asarray(pooled(HIDDEN, lengths, pooling))[1].any()
    gradient = jax.grad(lambda hidden: pooled(hidden, lengths, pooling).sum())(jnp.asarray(HIDDEN))
    assert np.isfinite(gradient).all()
    assert not gradient[1].any()
