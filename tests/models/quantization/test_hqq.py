"""HQQ against the errors of its authors' package, and the arrays that it and the other formats keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.quantization import FORMATS, bits_per_parameter, dequantize, hqq, quantize


def matrix(kind):
    rng = np.random.default_rng(0)
    return {
        "normal": lambda: rng.standard_normal((128, 256), np.float32),
        "heavy tails": lambda: (rng.standard_t(4, (128, 256)) * 0.02).astype(np.float32),
        "exponential": lambda: rng.laplace(size=(128, 256)).astype(np.float32),
        "shifted": lambda: (rng.standard_normal((128, 256)) * 0.02 + 0.05).astype(np.float32),
    }[kind]()


# Of hqq 0.2.8: Quantizer.quantize(W, nbits=4, group_size=64, axis=1, optimize=True, compute_dtype=torch.float32), with
# float32 scales and zero points: the norm of the error over that of W, and the mean of |error| over that of |W|.
HQQ_ERRORS = {
    "normal": (0.08626, 0.09197),
    "heavy tails": (0.11202, 0.12841),
    "exponential": (0.10569, 0.12508),
    "shifted": (0.03186, 0.02903),
}


def errors(weight, found):
    return (
        float(np.linalg.norm(found - weight) / np.linalg.norm(weight)),
        float(np.abs(found - weight).mean() / np.abs(weight).mean()),
    )


@pytest.mark.parametrize("kind", HQQ_ERRORS)
def test_errors_are_below_those_of_hqq(kind):
    weight = matrix(kind)
    found = np.asarray(hqq.dequantize(hqq.quantize(jnp.asarray(weight)), jnp.float32))
    for ours, theirs in zip(errors(weight, found), HQQ_ERRORS[kind], strict=True):
        assert 0.9 * theirs < ours <= theirs


def test_a_block_is_never_worse_off_than_by_plain_rounding():
    weight = jnp.asarray(matrix("heavy tails"))
    blocks = weight.reshape(-1, hqq.BLOCK)
    plain = hqq._squared_error(blocks, *hqq._first_scales(blocks))[:, 0]
    found = hqq.dequantize(hqq.quantize(weight), jnp.float32).reshape(-1, hqq.BLOCK)
    fitted = jnp.sum((found - blocks) ** 2, axis=1)
    assert bool((fitted <= plain * (1 + 1e-5)).all())
    assert float((fitted < 0.99 * plain).mean()) > 0.9


def test_parts_of_a_matrix_have_the_same_bits(monkeypatch):
    weight = matrix("normal")
    expected = hqq.quantize(weight)
    monkeypatch.setattr(hqq, "_BLOCKS_TOGETHER", 64)  # of 512
    for ours, theirs in zip(
        jax.tree.leaves(hqq.quantize(weight.reshape(256, 128))), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_special_blocks():
    flat = np.zeros(325, np.float32)  # of 5 rows of 65: a last block of 5, an odd number of codes
    flat[64:128], flat[128:192] = 3.0, -1e-6  # constant
    flat[192:256] = 100.0 + np.arange(64) * 1e-3  # close together, far from zero
    flat[320:] = 7.0
    stored = hqq.quantize(jnp.asarray(flat.reshape(5, 65)))
    found = np.asarray(hqq.dequantize(stored, jnp.float32)).reshape(-1)
    assert (found[:64] == 0).all()
    assert (found[256:320] == 0).all()
    # Half a step of the range that such blocks are given, an eighth of the largest, and the scale's rounding to 8 bits.
    np.testing.assert_allclose(found, flat, rtol=2**-8 + 0.5 / (8 * 15))
    assert stored.codes.shape == (163,)


@pytest.mark.parametrize("format", [name for name, format in FORMATS.items() if format.quantize])
@pytest.mark.parametrize("shape", [(3, 65), (64, 64)])
def test_formats_are_what_they_declare(format, shape):
    weight = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    stored = quantize(format, jnp.asarray(weight))
    declared = FORMATS[format].abstract(shape)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), stored) == jax.tree.map(lambda x: (x.shape, x.dtype), declared)
    axes = FORMATS[format].axes((), shape)
    for array, names in zip(jax.tree.leaves(stored), jax.tree.leaves(axes, is_leaf=_is_names), strict=True):
        assert array.ndim == len(names)
    found = dequantize(stored, jnp.float32)
    assert found.shape == shape
    # The last block, of 3 numbers, is kept as well as the others: 4 bits leave at most a part in 6 of the largest.
    assert np.abs(np.asarray(found) - weight).max() < np.abs(weight).max() / 6
    half = dequantize(stored, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(half), np.asarray(found.astype(jnp.bfloat16)))  # rounded once


def _is_names(value):
    return isinstance(value, tuple)


def test_bits_a_parameter():
    bits = {name: bits_per_parameter(name, (4096, 4096), jnp.dtype(jnp.bfloat16)) for name in (*FORMATS, "none")}
    assert bits == pytest.approx(
        {"nf4": 4.127, "hqq": 4.5, "int8": 8.25, "nf4-single": 4.5, "fp4": 4.127, "fp4-single": 4.5, "none": 16.0},
        abs=1e-3,
    )


@pytest.mark.parametrize("format", ["hqq", "int8"])
def test_what_is_no_matrix_is_refused(format):
    for weight in (jnp.zeros(3), jnp.zeros((0, 3)), jnp.zeros((2, 2), jnp.int32)):
        with pytest.raises(ValueError, match="a non-empty floating-point matrix"):
            quantize(format, weight)
    with pytest.raises(ValueError, match="takes one matrix"):
        dequantize(jax.tree.map(lambda x: x[None], quantize(format, jnp.ones((2, 2)))), jnp.float32)


def test_formats_that_are_only_read_quantise_nothing():
    with pytest.raises(ValueError, match="fp4 is read from checkpoints alone"):
        quantize("fp4", jnp.ones((2, 2)))
