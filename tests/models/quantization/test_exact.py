"""Arithmetic that must round as PyTorch's does."""

import jax
import jax.numpy as jnp
import nf4_reference
import numpy as np
import pytest

from models.quantization import exact

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 63, 255, 511, 512, 513, 2048, 5000, 13824, 32767, 32768, 131077, 600_001]


@pytest.mark.parametrize("size", SIZES)
def test_mean_equals_torch(size):
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(size).uniform(0, 0.1, size).astype(np.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = torch.tensor(values).mean().item()
    finally:
        torch.set_num_threads(threads)
    assert float(jax.jit(exact.mean_in_torch_order)(values)) == expected


def test_divide_is_correctly_rounded():
    rng = np.random.default_rng(0)
    dividend, divisor = (
        (rng.uniform(1, 2, 200_000) * 2.0 ** rng.integers(-60, 60, 200_000)).astype(np.float32) for _ in range(2)
    )
    # Quotients just beside 1 and powers of two, where the exponent changes, and all signs.
    beside = np.nextafter(divisor[:1000], np.float32(np.inf))
    dividend[:3000] = np.concatenate([beside, divisor[1000:2000], np.nextafter(divisor[2000:3000], np.float32(0))])
    dividend[::2] *= -1
    dividend[5000:5010] = 0
    divide = jax.jit(exact.divide)
    np.testing.assert_array_equal(divide(dividend, divisor), dividend / divisor)
    np.testing.assert_array_equal(divide(np.float32(1), divisor), 1 / divisor)
    np.testing.assert_array_equal(divide(np.float32([1e-30, 2.0**-126]), np.float32([1e30, 1.0])), [0, 2.0**-126])


@pytest.mark.gpu
def test_divide_and_mean_on_gpu():
    assert jax.default_backend() == "gpu"
    test_divide_is_correctly_rounded()
    for size in SIZES[:-1]:
        values = np.random.default_rng(size).uniform(0, 0.1, size).astype(np.float32)
        expected = nf4_reference.torch_sum(values) / np.float32(size)
        assert float(jax.jit(exact.mean_in_torch_order)(values)) == expected


def test_rounded_product_is_not_fused_with_a_sum():
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(4096).astype(np.float32) for _ in range(3))
    found = jax.jit(lambda a, b, c: exact.rounded(a * b) + c)(a, b, c)
    np.testing.assert_array_equal(found, a * b + c)
    fused = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (fused != a * b + c).any()


def test_lift_and_lower():
    subnormal = np.array([0, 1, 2, 0x7FFFFF], np.uint32).view(np.float32)
    values = np.concatenate([subnormal, np.array([2.0**-126, 1e-30, 1.0, 2.0**60], np.float32)])
    lifted = jax.jit(exact.lift)(values, True)
    np.testing.assert_array_equal(np.asarray(lifted, np.float64), values.astype(np.float64) * 2.0**64)
    np.testing.assert_array_equal(jax.jit(exact.lift)(-values, True), -lifted)
    lowered = np.asarray(jax.jit(exact.lower)(lifted, True))
    np.testing.assert_array_equal(lowered.view(np.uint32), values.view(np.uint32))
    normal = jnp.array([2.0**70, 0.0], jnp.float32)
    np.testing.assert_array_equal(exact.lower(exact.lift(normal, False), False), normal)


def test_lower_rounds_to_the_nearest_subnormal():
    unit = 2.0**-149 * exact.LIFT
    lowered = exact.lower(jnp.array([0.4, 0.6, 1.5, 2.5], jnp.float32) * unit, True)
    np.testing.assert_array_equal(np.asarray(lowered).view(np.uint32), [0, 1, 2, 2])
