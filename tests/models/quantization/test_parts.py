"""Parts of quantised matrices against the whole ones: equal means equal bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.quantization import dequantize, hqq, int8, nf4
from models.quantization.fp4 import FP4Tensor
from models.quantization.nf4 import NF4Tensor
from models.quantization.parts import axes, cut

dequantized = jax.jit(dequantize, static_argnums=1)


def bits(array):
    # A zero's sign is that of its scale, and padding may take any scale.
    return (np.asarray(array, np.float32) + 0.0).view(np.uint32)


def reassembled(parts, count, axis, size, dtype=jnp.float32):
    """Dequantise each part on its own, and put them side by side."""
    found = []
    for i in range(count):
        names = {"codes", "absmax", "scales", "zeros"} & {field.name for field in dataclasses.fields(parts.tensor)}
        tensor = dataclasses.replace(parts.tensor, **{name: getattr(parts.tensor, name)[i] for name in names})
        one = dataclasses.replace(parts, tensor=tensor, start=parts.start[i : i + 1])
        found.append(dequantized(one, dtype))
        assert found[-1].shape[axis] == size
    return np.concatenate(found, axis=axis)


def assert_parts_are_the_whole(matrix, axis, size, count):
    whole = np.asarray(dequantized(matrix, jnp.float32))
    found = reassembled(cut(matrix, axis, ((whole.shape[axis], size),), count), count, axis, size)
    kept, beyond = np.split(found, [matrix.shape[axis]], axis=axis)
    np.testing.assert_array_equal(bits(kept), bits(whole))
    assert not beyond.any()


def quantized(shape, seed=0, form=NF4Tensor):
    """Any codes and scales will do."""
    rng = np.random.default_rng(seed)
    described = nf4.abstract(shape)
    return form(
        codes=jnp.asarray(rng.integers(0, 256, described.codes.shape, np.uint8)),
        absmax=jnp.asarray(rng.integers(0, 256, described.absmax.shape, np.uint8)),
        nested_absmax=jnp.asarray(rng.random(-(-described.absmax.size // nf4.GROUP), np.float32)),
        offset=jnp.float32(rng.random()),
        shape=shape,
    )


# Whole blocks; blocks that rows and cuts break; parts of nothing but padding; several groups of 256 blocks.
@pytest.mark.parametrize(
    ("shape", "axis", "size", "count"),
    [
        ((192, 64), 0, 64, 3),
        ((64, 192), 1, 64, 4),
        ((64, 192), 1, 48, 4),
        ((10, 33), 0, 4, 3),
        ((7, 15), 1, 5, 3),
        ((5, 7), 1, 3, 3),
        ((300, 128), 0, 96, 4),
        ((300, 130), 1, 44, 3),
    ],
)
def test_parts_dequantise_to_the_whole(shape, axis, size, count):
    assert_parts_are_the_whole(quantized(shape), axis, size, count)


@settings(max_examples=8, deadline=None)
@given(st.tuples(st.integers(1, 40), st.integers(1, 150)), st.integers(0, 1), st.integers(1, 4), st.data())
def test_any_cut_dequantises_to_the_whole(shape, axis, count, data):
    least = -(-shape[axis] // count)
    size = data.draw(st.integers(least, least + 3))
    assert_parts_are_the_whole(quantized(shape, seed=shape[1]), axis, size, count)


# Queries, keys and values joined along the rows; blocks that span the seams.
@pytest.mark.parametrize(("width", "segments"), [(64, ((8, 4), (4, 2), (4, 2))), (33, ((10, 4), (5, 2), (5, 2)))])
@pytest.mark.parametrize("stored", ["nf4", "plain"])
def test_joined_matrices_are_cut_each_by_itself(width, segments, stored):
    matrix = quantized((sum(whole for whole, _ in segments), width))
    dense = np.asarray(dequantized(matrix, jnp.float32))
    parts = cut(matrix if stored == "nf4" else jnp.asarray(dense), 0, segments, 3)
    size = sum(size for _, size in segments)
    found = np.asarray(parts) if stored == "plain" else reassembled(parts, 3, 0, size).reshape(3, size, width)
    begin, place = 0, 0
    for whole, size in segments:
        piece = found[:, place : place + size].reshape(-1, width)
        np.testing.assert_array_equal(bits(piece[:whole]), bits(dense[begin : begin + whole]))
        assert not piece[whole:].any()
        begin, place = begin + whole, place + size


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("form", [FP4Tensor, hqq, int8])
@pytest.mark.parametrize("shape", [(12, 96), (7, 15), (6, 256)])
def test_other_formats_are_cut_alike(axis, form, shape):
    weight = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    matrix = quantized(shape, form=form) if form is FP4Tensor else form.quantize(weight)
    assert_parts_are_the_whole(matrix, axis, -(-shape[axis] // 3), 4)


@pytest.mark.parametrize("axis", [0, 1])
def test_single_quantisation_can_be_cut(axis):
    double = quantized((12, 96))
    scales = jnp.arange(1.0, 1 + double.absmax.size)
    single = dataclasses.replace(double, absmax=scales, nested_absmax=None, offset=None)
    assert_parts_are_the_whole(single, axis, 32 if axis else 4, 3)


def test_other_dtypes_are_rounded_alike():
    matrix = quantized((16, 128))
    found = reassembled(cut(matrix, 1, ((128, 64),), 2), 2, 1, 64, jnp.bfloat16)
    np.testing.assert_array_equal(bits(found), bits(dequantized(matrix, jnp.bfloat16)))


@pytest.mark.parametrize("axis", [0, 1])
def test_plain_matrices_are_cut_alike(axis):
    matrix = jnp.arange(35.0).reshape(5, 7)
    parts = cut(matrix, axis, ((matrix.shape[axis], 3),), 3)
    np.testing.assert_array_equal(np.concatenate(list(parts), axis=axis)[:5, :7], matrix)
    assert parts.shape == ((3, 3, 7), (3, 5, 3))[axis]
    assert axes(parts, ("layers",)) == ("layers", "part", "out", "in")


def test_a_part_takes_its_share():
    """Codes are cut without loss, and at real sizes a sub-block is a block."""
    matrix = quantized((256, 512))
    for axis, size in ((0, 64), (1, 128)):
        parts = cut(matrix, axis, ((matrix.shape[axis], size),), 4)
        assert parts.block == 64
        assert parts.tensor.codes.size == matrix.codes.size
        assert parts.tensor.absmax.size == matrix.absmax.size


def test_every_array_has_its_axes():
    parts = jax.eval_shape(jax.vmap(lambda m: cut(m, 0, ((10, 4),), 3)), nf4.abstract((10, 33), (2,)))
    names = axes(parts, ("layers",))
    named = jax.tree.leaves(names, is_leaf=lambda leaf: isinstance(leaf, tuple))
    for leaf, of_leaf in zip(jax.tree.leaves(parts), named, strict=True):
        assert leaf.ndim == len(of_leaf)
    assert names.start == ("layers", "part", "runs")


def test_refuses_to_dequantise_several_parts_at_once():
    with pytest.raises(ValueError, match="leading axes"):
        dequantize(cut(quantized((4, 64)), 0, ((4, 2),), 2), jnp.float32)
