"""The dynamic 8-bit maps and their block quantisation against bitsandbytes' CPU kernels: equal bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.quantization import dynamic

SIGNS = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def blocks(signed: bool, count: int = 64, seed: int = 0) -> np.ndarray:
    """Blocks of widely differing values, float32[count * 256]."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(count * 256) * 10.0 ** rng.uniform(-7, 0, count * 256)
    return (values if signed else values**2).astype(np.float32)


def boundaries(signed: bool) -> np.ndarray:
    """Values within some float32 steps of every place where the code can change; each block's largest is 1."""
    sums = np.arange(65536) - 0.5  # of value + 1, in grid steps, where the grid point changes
    values = (np.clip(sums / 32767.5, 0, 2) - 1).astype(np.float32)
    near = np.concatenate([values + np.float32(2.0**-24 * step) for step in range(-4, 5)])
    near = near[(near < 1) & (near > -1 if signed else near >= 0)]
    near = near[: near.size // 255 * 255].reshape(-1, 255)
    return np.concatenate([np.ones((len(near), 1), np.float32), near], axis=1).reshape(-1)


@pytest.fixture(scope="module")
def kernels():
    torch = pytest.importorskip("torch")
    pytest.importorskip("bitsandbytes")
    return torch, torch.ops.bitsandbytes


@SIGNS
def test_map_equals_bitsandbytes(signed):
    functional = pytest.importorskip("bitsandbytes").functional
    expected = functional.create_dynamic_map(signed=signed).numpy()
    assert dynamic.dynamic_map(signed=signed).dtype == np.float32
    np.testing.assert_array_equal(dynamic.dynamic_map(signed=signed), expected)


def test_maps_by_hand():
    signed, unsigned = dynamic.dynamic_map(signed=True), dynamic.dynamic_map(signed=False)
    assert signed.shape == unsigned.shape == (256,)
    assert (np.diff(signed) > 0).all()
    assert (np.diff(unsigned) > 0).all()
    # The lowest decade has one part, 0.1 to 1 with the middle 0.55, times 1e-6; unsigned two, with the first 0.325.
    np.testing.assert_allclose(signed[[126, 127, 128]], [-5.5e-7, 0, 5.5e-7], rtol=1e-6)
    np.testing.assert_allclose(unsigned[:2], [0, 3.25e-7], rtol=1e-6)
    # The highest has 64 parts of 0.9 / 64 each; unsigned 128.
    np.testing.assert_allclose(signed[[0, -2, -1]], [-1 + 0.45 / 64, 1 - 0.45 / 64, 1], rtol=1e-6)
    np.testing.assert_allclose(unsigned[[-2, -1]], [1 - 0.45 / 128, 1], rtol=1e-6)


@SIGNS
@pytest.mark.parametrize("make", [blocks, boundaries])
def test_quantize_equals_bitsandbytes(kernels, signed, make):
    torch, operators = kernels
    values = make(signed)
    code = torch.tensor(dynamic.dynamic_map(signed=signed))
    expected_codes, expected_absmax = operators.quantize_blockwise(torch.tensor(values), code, 256)
    codes, absmax = jax.jit(dynamic.quantize, static_argnames="signed")(values, signed=signed)
    np.testing.assert_array_equal(codes, expected_codes.numpy())
    np.testing.assert_array_equal(absmax, expected_absmax.numpy())
    expected = operators.dequantize_blockwise(expected_codes, expected_absmax, code, 256, torch.float32)
    np.testing.assert_array_equal(dynamic.dequantize(codes, absmax, signed=signed), expected.numpy())


@SIGNS
def test_stacks_are_quantized_row_by_row(signed):
    values = blocks(signed, count=6).reshape(3, 512)
    codes, absmax = dynamic.quantize(values, signed=signed)
    assert codes.dtype == jnp.uint8
    assert codes.shape == (3, 512)
    assert absmax.shape == (3, 2)
    for row in range(3):
        alone = dynamic.quantize(values[row], signed=signed)
        np.testing.assert_array_equal(codes[row], alone[0])
        np.testing.assert_array_equal(absmax[row], alone[1])
    np.testing.assert_array_equal(
        dynamic.dequantize(codes, absmax, signed=signed)[1], dynamic.dequantize(codes[1], absmax[1], signed=signed)
    )


def test_signs_survive():
    values = blocks(signed=True)
    largest = np.repeat(np.abs(values).reshape(-1, 256).max(1), 256)
    restored = np.asarray(dynamic.dequantize(*dynamic.quantize(values, signed=True), signed=True))
    kept = np.abs(values) > 2.0**-24 * largest
    assert kept.mean() > 0.9
    np.testing.assert_array_equal(np.sign(restored[kept]), np.sign(values[kept]))


@SIGNS
@pytest.mark.parametrize("value", [0.0, 1e-39], ids=["zero", "subnormal"])
def test_block_without_normal_numbers_is_zero(signed, value):
    codes, absmax = dynamic.quantize(jnp.full(256, value, jnp.float32), signed=signed)
    assert not codes.any()
    np.testing.assert_array_equal(absmax, [0])
    np.testing.assert_array_equal(dynamic.dequantize(codes, absmax, signed=signed), np.zeros(256))


@pytest.mark.parametrize(("size", "padded"), [(1, 256), (256, 256), (257, 512)])
def test_pad_to_blocks(size, padded):
    result = dynamic.pad_to_blocks(jnp.ones((2, size)))
    assert result.shape == (2, padded)
    assert result.sum() == 2 * size
