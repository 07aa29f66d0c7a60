"""8-bit integers in blocks of 128."""

import jax.numpy as jnp
import numpy as np

from models.quantization import int8


def test_each_number_is_within_half_a_step():
    weight = np.random.default_rng(0).standard_normal((40, 100)).astype(np.float32)
    stored = int8.quantize(jnp.asarray(weight))
    blocks = np.pad(weight.reshape(-1), (0, -weight.size % 128)).reshape(-1, 128)
    np.testing.assert_allclose(stored.scales, np.abs(blocks).max(axis=1) / 127, rtol=2**-22)
    steps = np.repeat(stored.scales, 128)[: weight.size].reshape(weight.shape)
    found = np.asarray(int8.dequantize(stored, jnp.float32))
    assert (np.abs(found - weight) <= steps * (0.5 + 1e-4)).all()  # a quotient near a half may round either way
    assert 0.004 < np.linalg.norm(found - weight) / np.linalg.norm(weight) < 0.008


def test_largest_numbers_and_zeros_are_kept():
    weight = np.zeros((4, 128), np.float32)
    weight[1], weight[2, ::2], weight[3, 5] = -3.0, 1e-30, 2.0
    found = np.asarray(int8.dequantize(int8.quantize(jnp.asarray(weight)), jnp.float32))
    np.testing.assert_allclose(found, weight, rtol=1e-6)
