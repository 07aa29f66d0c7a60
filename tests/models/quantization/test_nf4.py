"""NF4 against bitsandbytes, against numpy, and by hand: equal means equal bit for bit."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import nf4_reference
import numpy as np
import pytest

from models.quantization import nf4
from models.quantization.nf4 import NF4Tensor

# Odd sizes, one value, less than a block, whole blocks, more than one group of blocks, a projection of SmolLM2.
SHAPES = [(1, 1), (5, 7), (1, 63), (1, 64), (3, 65), (64, 64), (7, 130), (65, 257), (576, 1536)]
DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
MIDPOINTS = (nf4.TABLE[:-1] + nf4.TABLE[1:]) / np.float32(2)

dequantize = jax.jit(nf4.dequantize, static_argnums=1)


def normal(shape, dtype=np.float32, scale=0.02, seed=0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def assert_same_bits(found, expected, what: str) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype, what
    chex.assert_equal_shape([found, expected])
    different = np.flatnonzero(found.reshape(-1).view(np.uint8) != expected.reshape(-1).view(np.uint8))
    assert different.size == 0, f"{what}: {different.size} bytes differ, the first at {different[0]}"


@pytest.fixture(scope="module")
def bitsandbytes_nf4():
    """A function from a weight to bitsandbytes' arrays and its dequantised weight, both as numpy arrays."""
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("bitsandbytes").functional
    threads = torch.get_num_threads()
    # More threads change the order of torch.mean above 32,768 blocks.
    torch.set_num_threads(1)

    def quantize(weight: np.ndarray) -> tuple[nf4_reference.Quantized, np.ndarray]:
        tensor = torch.tensor(weight.astype(np.float32)).to(getattr(torch, weight.dtype.name))
        packed, state = functional.quantize_4bit(tensor, compress_statistics=True, quant_type="nf4")
        arrays = [packed.reshape(-1), state.absmax, state.state2.absmax, state.offset]
        # Called below the public function, which compiles a new program for every odd width.
        scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
        whole = functional.dequantize_4bit(packed, state) if weight.shape[1] % 2 == 0 else None
        levels = state.code[torch.stack([packed >> 4, packed & 15], -1).reshape(-1).int()][: weight.size]
        by_hand = (levels * scales.repeat_interleave(64)[: weight.size]).to(tensor.dtype).reshape(weight.shape)
        if whole is not None:
            assert torch.equal(whole, by_hand)
        return nf4_reference.Quantized(*(array.numpy() for array in arrays)), by_hand.float().numpy()

    yield quantize
    torch.set_num_threads(threads)


def assert_equals(weight: np.ndarray, expected: nf4_reference.Quantized, dequantized: np.ndarray | None) -> NF4Tensor:
    found = nf4.quantize(weight)
    assert found.shape == weight.shape
    for name in expected._fields:
        assert_same_bits(getattr(found, name), getattr(expected, name), name)
    if dequantized is not None:
        values = dequantize(found, weight.dtype)
        assert values.dtype == weight.dtype
        assert_same_bits(values.astype(np.float32), dequantized, "dequantized")
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_bitsandbytes(bitsandbytes_nf4, shape, dtype):
    weight = normal(shape, dtype)
    assert_equals(weight, *bitsandbytes_nf4(weight))


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_equals_numpy(shape):
    weight = normal(shape, seed=1)
    expected = nf4_reference.quantize(weight)
    assert_equals(weight, expected, nf4_reference.dequantize(expected, shape))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_numpy_on_gpu(shape, dtype):
    """What could differ there: approximate reciprocals and divisions, fused multiply-adds, the order of the mean."""
    assert jax.default_backend() == "gpu"
    weight = normal(shape, dtype, seed=2)
    expected = nf4_reference.quantize(weight)
    found = assert_equals(weight, expected, None)
    assert_same_bits(dequantize(found, jnp.float32), nf4_reference.dequantize(expected, shape), "dequantized")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_zero_weights_stay_zero(bitsandbytes_nf4, shape):
    weight = np.zeros(shape, np.float32)
    expected, _ = bitsandbytes_nf4(weight)  # Its zeros can be negative: they stand for a scale of -1e-43.
    found = assert_equals(weight, expected, None)
    assert not np.asarray(dequantize(found, jnp.float32)).any()


@pytest.mark.parametrize("zero", [slice(0, 64), slice(128, 192), slice(192, 195)], ids=["first", "inner", "rest"])
def test_zero_block_stays_zero(bitsandbytes_nf4, zero):
    weight = normal((3, 65))
    weight.reshape(-1)[zero] = 0
    found = assert_equals(weight, *bitsandbytes_nf4(weight))
    assert not np.asarray(dequantize(found, jnp.float32)).reshape(-1)[zero].any()


@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-30, 1e30])
@pytest.mark.parametrize("width", [64, 63], ids=["whole block", "rest"])
def test_midpoints_go_down(bitsandbytes_nf4, width, scale):
    beside = [np.nextafter(MIDPOINTS, np.float32(side)) for side in (-1, 1)]
    row = np.concatenate([[1.0], MIDPOINTS, *beside, nf4.TABLE, [-0.0, 0.0]]).astype(np.float32)
    weight = (row[None, :width] * np.float32(scale)).astype(np.float32)
    found = assert_equals(weight, *bitsandbytes_nf4(weight))
    if scale == 1:
        packed = np.asarray(found.codes)
        codes = np.stack([packed >> 4, packed & 15], 1).reshape(-1)
        np.testing.assert_array_equal(codes[1:16], range(15))  # midpoints
        np.testing.assert_array_equal(codes[16:31], range(15))  # just below
        np.testing.assert_array_equal(codes[31:46], range(1, 16))  # just above


@pytest.mark.parametrize(
    "weight",
    [
        normal((64, 64), scale=1e30),
        normal((64, 64), scale=1e-30),
        normal((64, 130)) * np.float32(10) ** np.random.default_rng(3).uniform(-43, -30, (64, 130)).astype(np.float32),
        np.concatenate([normal((20, 65), scale=4e-40), normal((44, 65))]),
        np.concatenate([normal((20, 65), scale=1e-38), normal((1, 3 * 65), scale=1e-42).reshape(3, 65)]),
    ],
    ids=["huge", "small", "wide range", "subnormal rows", "smallest scale"],
)
def test_extreme_magnitudes(bitsandbytes_nf4, weight):
    weight = weight.astype(np.float32)
    expected, dequantized = bitsandbytes_nf4(weight)
    found = assert_equals(weight, expected, None)
    # Both products of the dequantisation are flushed to zero by XLA:CPU where they are below 2**-126.
    np.testing.assert_allclose(dequantize(found, np.float32), dequantized, rtol=0, atol=2 * 2.0**-126)


def test_hand_made_vector():
    """Half of the table, four times: one scale, so the offset is the scale and everything comes back exactly."""
    weight = np.tile(nf4.TABLE * np.float32(0.5), (2, 8))  # [2, 128], four blocks
    found = nf4.quantize(weight)
    np.testing.assert_array_equal(found.codes, [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF] * 16)
    np.testing.assert_array_equal(found.absmax, [0, 0, 0, 0])
    np.testing.assert_array_equal(found.nested_absmax, [0.0])
    assert found.offset == 0.5
    np.testing.assert_array_equal(dequantize(found, jnp.float32), weight)


@pytest.mark.parametrize("shape", [(5, 7), (65, 257)])
def test_single_quantisation_has_the_scales_themselves(shape):
    """What bitsandbytes keeps without compress_statistics: float32 scales, here those of the numpy reference."""
    weight = normal(shape)
    flat = np.pad(weight.reshape(-1), (0, -weight.size % 64)).reshape(-1, 64)
    codes = nf4.quantize(jnp.asarray(weight)).codes
    absmax = np.abs(flat).max(axis=1)
    single = NF4Tensor(codes, jnp.asarray(absmax), None, None, shape)
    unpacked = np.stack([np.asarray(codes) >> 4, np.asarray(codes) & 15], axis=-1).reshape(-1)[: weight.size]
    expected = nf4.TABLE[unpacked] * np.repeat(absmax, 64)[: weight.size]
    assert_same_bits(dequantize(single, jnp.float32), expected.reshape(shape), "weights")
    assert len(jax.tree.leaves(single)) == 2


def test_error_of_normal_weights():
    """QLoRA's table leaves 0.092 of the norm of normally distributed weights (one part in a thousand by sampling)."""
    weight = normal((512, 512))
    error = np.asarray(dequantize(nf4.quantize(weight), jnp.float32)) - weight
    assert np.linalg.norm(error) / np.linalg.norm(weight) == pytest.approx(0.0921, abs=5e-4)


def test_compiled_and_inlined_programs_agree():
    """Quantising inside a larger program, and in a loop over layers, gives the same bits."""
    weights = np.stack([normal((65, 130), seed=seed) for seed in range(3)])
    alone = [nf4.quantize(weight) for weight in weights]
    stacked = jax.jit(lambda stack: jax.lax.map(nf4.quantize, stack))(weights)
    chex.assert_trees_all_equal(stacked, jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone))

    def layer(carry, quantized):
        return carry + nf4.dequantize(quantized, jnp.float32), None

    total, _ = jax.jit(lambda stack: jax.lax.scan(layer, jnp.zeros((65, 130)), stack))(stacked)
    one_by_one = sum(np.asarray(dequantize(quantized, jnp.float32)) for quantized in alone)
    np.testing.assert_array_equal(total, one_by_one)


def test_scan_keeps_nothing_of_a_weights_size():
    """Forward and backward through a loop over layers, no array outside the loop is as large as one weight."""
    shape, tokens = (128, 128), 8

    @jax.checkpoint
    def layer(hidden, quantized):
        return hidden @ nf4.dequantize(quantized, jnp.float32), None

    def loss(hidden, stack):
        return jax.lax.scan(layer, hidden, stack)[0].sum()

    hidden = jax.ShapeDtypeStruct((tokens, shape[0]), jnp.float32)
    traced = jax.make_jaxpr(jax.grad(loss))(hidden, nf4.abstract(shape, (3,)))
    made = [variable.aval for equation in traced.eqns for variable in equation.outvars]
    assert any(equation.primitive.name == "scan" for equation in traced.eqns)
    assert max(array.size for array in made) < shape[0] * shape[1]


def test_layout():
    stack, shape = (3, 2), (3, 65)
    described = nf4.abstract(shape, stack)
    one = jax.eval_shape(nf4.quantize, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    assert one == nf4.abstract(shape)
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*stack, *leaf.shape), leaf.dtype), one)
    assert stacked == described
    assert described.codes.shape == (3, 2, 98)
    assert described.absmax.shape == (3, 2, 4)
    assert described.nested_absmax.shape == (3, 2, 1)
    assert described.offset.shape == (3, 2)

    names = nf4.axes(("layers", "experts"), shape)
    ranks = jax.tree.map(lambda leaf, axes: leaf.ndim - len(axes), described, names)
    assert set(jax.tree.leaves(ranks)) == {0}
    assert names.codes == ("layers", "experts", "codes")


def test_bits_per_parameter():
    # 4 bits, 8 / 64 for the block's index, 32 / (64 * 256) for the group's factor, the offset spread over all.
    assert nf4.bits_per_parameter((8192, 8192)) == 4 + 8 / 64 + 32 / (64 * 256) + 32 / 8192**2
    assert nf4.bits_per_parameter((1, 1)) == 8 + 8 + 32 + 32


@pytest.mark.parametrize(
    "wrong",
    [np.zeros((4,), np.float32), np.zeros((0, 4), np.float32), np.zeros((4, 4), np.int32)],
    ids=["1-D", "empty", "int"],
)
def test_refuses_what_is_no_matrix_of_floats(wrong):
    with pytest.raises(ValueError, match=r"non-empty floating-point matrix \[out, in\], not "):
        nf4.quantize(wrong)


def test_refuses_to_dequantize_a_stack():
    stacked = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), nf4.abstract((4, 4), (2,)))
    with pytest.raises(ValueError, match="stack axes"):
        nf4.dequantize(stacked, jnp.float32)


@pytest.mark.slow
def test_largest_projection_of_llama_3_70b(bitsandbytes_nf4):
    """[28672, 8192] in bfloat16: 3.7 million scales go into the mean."""
    weight = np.random.default_rng(0).standard_normal((28672, 8192), dtype=np.float32).astype(ml_dtypes.bfloat16)
    expected, _ = bitsandbytes_nf4(weight)
    assert_equals(weight, expected, None)
