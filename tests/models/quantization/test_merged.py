"""W + B A in one matrix: the kernel against XLA, XLA against the dequantised matrix and its adapter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpus import needs_plugin

from models.quantization import can_merge, dequantize, merge, nf4
from models.quantization.fp4 import FP4Tensor
from models.quantization.merged import merge_by_kernel, merge_by_xla
from sharding.mesh import make_mesh
from sharding.targets import absent_devices, compile_for

OUT, IN, RANK = 64, 256, 16


def subject(shape=(OUT, IN), rank=RANK, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 3)
    weight = nf4.quantize(0.02 * jax.random.normal(keys[0], shape))
    b = (0.1 * jax.random.normal(keys[1], (shape[0], rank))).astype(dtype)
    return weight, b, (0.1 * jax.random.normal(keys[2], (rank, shape[1]))).astype(dtype)


def wide(array):
    return np.asarray(array, np.float32)


def single(weight):
    """The same codes, with scales that are not quantised."""
    return nf4.NF4Tensor(weight.codes, nf4.block_scales(weight), None, None, weight.shape)


@pytest.mark.parametrize("shape", [(OUT, IN), (24, 40)])
@pytest.mark.parametrize("form", ["nf4", "nf4-single", "fp4"])
def test_merging_adds_the_update_and_rounds_once(shape, form):
    weight, b, a = subject(shape)
    if form == "fp4":
        weight = FP4Tensor(weight.codes, weight.absmax, weight.nested_absmax, weight.offset, weight.shape)
    if form == "nf4-single":
        weight = single(weight)
    exact = np.asarray(dequantize(weight, jnp.float32), np.float64) + wide(b).astype(np.float64) @ wide(a)
    merged = merge(weight, b, a)
    assert merged.dtype == jnp.bfloat16
    # Half a unit of the last of eight bits, and what float32 loses in sums of numbers below 1.
    np.testing.assert_allclose(wide(merged), exact, rtol=2**-8, atol=1e-6)
    b, a = b.astype(jnp.float32), a.astype(jnp.float32)
    np.testing.assert_allclose(merge(weight, b, a), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rank", [4, 16, 24])
@pytest.mark.parametrize("tile", [(32, 128), (16, 64)])
def test_the_kernel_computes_what_xla_does(rank, tile):
    weight, b, a = subject(rank=rank)
    by_kernel = merge_by_kernel(weight, b, a, tile=tile, interpret=True)
    # The update's sums may be in another order, which shows where a sum lies between two numbers of bfloat16.
    np.testing.assert_allclose(wide(by_kernel), wide(merge_by_xla(weight, b, a)), rtol=2**-7, atol=1e-7)
    assert (by_kernel == merge_by_xla(weight, b, a)).mean() > 0.99


def test_without_an_update_the_kernel_dequantises():
    weight, b, a = subject()
    merged = merge_by_kernel(weight, 0 * b, a, tile=(32, 128), interpret=True)
    np.testing.assert_array_equal(wide(merged), wide(dequantize(weight, jnp.bfloat16)))


def test_formats_of_four_bits_are_merged_and_no_others():
    assert can_merge(subject()[0])
    assert not can_merge(jnp.zeros((2, 2)))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(14336, 4096), (1024, 4096), (192, 576)])
def test_the_kernel_on_a_gpu(shape):
    weight, b, a = subject(shape)
    merged, expected = jax.jit(merge)(weight, b, a), jax.jit(merge_by_xla)(weight, b, a)
    np.testing.assert_allclose(wide(merged), wide(expected), rtol=2**-7, atol=1e-6)
    assert (merged == expected).mean() > 0.99
    np.testing.assert_array_equal(wide(jax.jit(merge)(weight, 0 * b, a)), wide(dequantize(weight, jnp.bfloat16)))


@needs_plugin
@pytest.mark.parametrize("kind", ["rtx3090", "rtx4090", "rtx5070ti", "h200"])
def test_gpus_of_every_kind_get_the_kernel(kind):
    weight, b, a = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), subject())
    program = compile_for(make_mesh({}, absent_devices(kind, 1)), jax.jit(merge), weight, b, a).as_text()
    assert program is not None
    assert "__gpu$xla.gpu.triton" in program
    assert f"f32[{OUT},{IN}]" not in program
