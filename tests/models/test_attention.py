"""Attention kernels against the formula in float64, and what packing, padding and remat rely on."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpus import needs_cudnn, needs_plugin
from programs import count, largest_compiled, largest_traced

import models.attention
from models.attention import EVERYTHING, Window, attention, choose_kernel, decode_attention
from sharding.mesh import make_mesh
from sharding.targets import absent_devices, compile_for

B, H, KV, D = 2, 6, 2, 8
LENGTHS = [1, 7, 48, 70]  # with blocks of 16: one block, part of one, whole blocks, a padded last block


@pytest.fixture
def small_blocks(monkeypatch):
    """Let tiny sequences take several blocks."""
    monkeypatch.setattr(models.attention, "LARGEST_BLOCK", 16)


def random_inputs(length: int, seed: int = 0, dtype=jnp.float32, heads=(H, KV, KV, H)) -> list[jax.Array]:
    """Queries, keys, values, and a gradient of the output."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((B, length, n, D)), dtype) for n in heads]


def segments(length: int) -> jax.Array:
    """Three rows and padding in the first sequence, one row in the second."""
    ids = np.ones((B, length), np.int32)
    ids[0, length // 4 :], ids[0, length // 3 :], ids[0, length - length // 6 :] = 2, 3, 0
    return jnp.asarray(ids)


def compiled(kernel: str, windows: tuple[int | None, ...] = (None,)) -> Callable[..., list[jax.Array]]:
    """A program that returns the output, and the gradients of queries, keys and values."""

    @jax.jit
    def run(q, k, v, d_out, segment_ids, index=0):
        def attend(*qkv):
            return attention(*qkv, segment_ids=segment_ids, kernel=kernel, window=Window(windows, index))

        out, pull_back = jax.vjp(attend, q, k, v)
        return [out, *pull_back(d_out)]

    return run


def output_and_gradients(kernel: str, inputs: list[jax.Array], segment_ids: jax.Array | None) -> list[np.ndarray]:
    return [np.asarray(x, np.float32) for x in compiled(kernel)(*inputs, segment_ids)]


def formula(q, k, v, segment_ids=None, window=None) -> np.ndarray:
    """Attention, one query at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(q.shape[:3]):
        seen = np.arange(0 if window is None else max(0, t + 1 - window), t + 1)
        if segment_ids is not None:
            seen = seen[np.asarray(segment_ids)[b, seen] == segment_ids[b, t]]
        kv = h // (q.shape[2] // k.shape[2])
        weights = np.exp(k[b, seen, kv] @ q[b, t, h] / np.sqrt(q.shape[3]))
        out[b, t, h] = weights @ v[b, seen, kv] / weights.sum()
    return out


def assert_close(found, expected, terms: int, unit: float = 2**-24) -> None:
    """Compare within the rounding of sums of `terms` products, relative to the largest value."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=terms * unit * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("kernel", ["reference", "chunked"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_output_equals_the_formula(kernel, packed, length, small_blocks):
    q, k, v, _ = random_inputs(length)
    segment_ids = segments(length) if packed else None
    found = attention(q, k, v, segment_ids=segment_ids, kernel=kernel)
    assert_close(found, formula(q, k, v, segment_ids), terms=length + D)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_gradients_of_chunked_equal_those_of_the_reference(packed, length, small_blocks):
    inputs, segment_ids = random_inputs(length), segments(length) if packed else None
    expected = output_and_gradients("reference", inputs, segment_ids)
    for found, wanted in zip(output_and_gradients("chunked", inputs, segment_ids), expected, strict=True):
        # A gradient of keys sums over the three query heads of a group too.
        assert_close(found, wanted, terms=(length + D) * H // KV)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_a_query_sees_as_far_back_as_its_layers_window(packed, small_blocks):
    length, windows = 70, (4, None, 40)  # within a block, everything, over several blocks
    inputs, ids = random_inputs(length), segments(length) if packed else None
    chunked, reference = compiled("chunked", windows), compiled("reference", windows)
    for index, window in enumerate(windows):
        ours, theirs = chunked(*inputs, ids, index), reference(*inputs, ids, index)
        exact = formula(*inputs[:3], segment_ids=ids, window=window)
        for found in (ours[0], theirs[0]):
            np.testing.assert_allclose(found, exact, rtol=0, atol=3e-6)  # sums of at most 70 float32 terms near 1
        for found, expected in zip(ours[1:], theirs[1:], strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_blocks_beyond_the_window_are_left_out(small_blocks):
    q = random_inputs(64)[0]  # four blocks

    def pairs(window) -> int:
        blocks = models.attention._Blocks.of(q, None, window)
        return int(blocks.for_each_pair(lambda i, j, n: (n[0] + 1,), (0,))[0])

    assert pairs(Window((64,)).limit(64)) == pairs(None) == 10
    # One token back: the diagonal. Two: the last of the block before. 18: its first query sees all of the block before
    # and the last token of the one before that.
    assert [pairs(Window((window,)).limit(64)) for window in (1, 2, 17, 18)] == [4, 7, 7, 9]
    assert EVERYTHING.limit(64) is None


def test_blocks_of_full_size():
    length = models.attention.LARGEST_BLOCK + 1
    inputs = [x[:1, :, :n] for x, n in zip(random_inputs(length), (2, 1, 1, 2), strict=True)]
    expected = output_and_gradients("reference", inputs, None)
    for found, wanted in zip(output_and_gradients("chunked", inputs, None), expected, strict=True):
        assert_close(found, wanted, terms=2 * (length + D))


def test_bfloat16_keeps_its_dtype_and_float32_statistics(small_blocks):
    inputs = random_inputs(70, dtype=jnp.bfloat16)
    assert attention(*inputs[:3], segment_ids=None, kernel="chunked").dtype == jnp.bfloat16
    exact = output_and_gradients("reference", [x.astype(jnp.float32) for x in inputs], None)
    for found, wanted in zip(output_and_gradients("chunked", inputs, None), exact, strict=True):
        # Weights, their gradients and the result are rounded to 8 bits; sums are not. Statistics in bfloat16 would
        # be off by 2^-8 of sums of 70 terms.
        assert_close(found, wanted, terms=4, unit=2**-8)


@pytest.mark.parametrize("block", [16, 512])
@pytest.mark.parametrize("start", [0, 1])
def test_a_packed_row_does_not_change_by_a_bit_with_its_neighbours(block, start, monkeypatch):
    monkeypatch.setattr(models.attention, "LARGEST_BLOCK", block)
    length = 70
    borders = (0, 20) if start == 0 else (20, 50)
    row = slice(*borders)
    one, other = random_inputs(length), random_inputs(length, seed=1)
    mixed = [there.at[0, row].set(here[0, row]) for here, there in zip(one, other, strict=True)]
    ids = np.ones((B, length), np.int32)
    ids[:, 20:], ids[:, 50:] = 2, 3
    split = ids.copy()  # the row's neighbours divided otherwise, or mere padding
    split[0, 60:], split[1] = 4, 0
    if start == 1:
        split[0, :9] = 7
    run = compiled("chunked")
    before = run(*one, jnp.asarray(ids))
    for segment_ids in (ids, split):
        for x, y in zip(before, run(*mixed, jnp.asarray(segment_ids)), strict=True):
            np.testing.assert_array_equal(x[0, row], y[0, row])
            assert not np.array_equal(x[0], y[0])


def test_a_packed_row_equals_the_row_alone(small_blocks):
    length, row = 70, slice(20, 50)
    inputs = random_inputs(length)
    ids = jnp.asarray(np.repeat([[1, 2, 3]], [20, 30, 20], axis=1).repeat(B, axis=0), jnp.int32)
    packed = output_and_gradients("chunked", inputs, ids)
    alone = output_and_gradients("chunked", [x[:, row] for x in inputs], None)
    for x, y in zip(packed, alone, strict=True):
        assert_close(x[:, row], y, terms=(30 + D) * H // KV)


@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_padding_is_finite_and_sends_no_gradient_into_rows(kernel, small_blocks):
    length, padding = 70, slice(50, 70)
    ids = jnp.asarray(np.repeat([[1, 0]], [50, 20], axis=1).repeat(B, axis=0), jnp.int32)
    q, k, v, d_out = random_inputs(length)
    d_out = d_out.at[:, : padding.start].set(0)  # a gradient at padding alone
    out, *gradients = output_and_gradients(kernel, [q, k, v, d_out], ids)
    assert np.all(np.isfinite(out))
    for gradient in gradients:
        assert np.all(np.isfinite(gradient))
        assert not gradient[:, : padding.start].any()
        assert gradient[:, padding].any()


def test_pairs_of_blocks_without_a_common_segment_are_left_out(small_blocks):
    q = jnp.zeros((1, 64, 1, 8))  # four blocks of 16

    def pairs(ids) -> int:
        segment_ids = None if ids is None else jnp.asarray([ids], jnp.int32)
        return int(
            models.attention._Blocks.of(q, segment_ids, None).for_each_pair(lambda i, j, n: (n[0] + 1,), (0,))[0]
        )

    assert pairs(None) == 10
    assert pairs([1] * 64) == 10
    assert pairs([1] * 16 + [2] * 16 + [3] * 32) == 5
    assert pairs([1] * 20 + [2] * 12 + [3] * 16 + [0] * 16) == 5
    assert pairs([1] * 20 + [2] * 20 + [0] * 24) == 7


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_of_the_size_of_a_mask_exists(packed, small_blocks):
    length = 256
    x = jnp.ones((1, length, 1, 2))
    segment_ids = jnp.ones((1, length), jnp.int32) if packed else None

    def loss(kernel):
        @jax.checkpoint
        def layer(x, _):
            return attention(x, x, x, segment_ids=segment_ids, kernel=kernel), None

        return jax.grad(lambda x: jax.lax.scan(layer, x, None, length=3)[0].sum())

    assert largest_traced(loss("reference"), x) >= length**2
    for largest in (largest_traced, largest_compiled):
        # Three layers' inputs are the most there is.
        assert largest(loss("chunked"), x) <= 3 * x.size < length**2


def test_a_block_of_scores_is_bounded_whatever_the_batch():
    sizes = [
        models.attention._Blocks.of(jnp.zeros((b, 4096, h, 1)), None, None).size for b, h in [(1, 32), (4, 32), (8, 64)]
    ]
    assert sizes == [512, 256, 128]


def test_saved_statistics_spare_the_backward_pass_a_second_forward_pass(small_blocks):
    x = random_inputs(40, heads=(KV,))[0]

    def products(policy) -> int:
        layer = jax.checkpoint(lambda x: attention(x, x, x, segment_ids=None, kernel="chunked"), policy=policy)
        return count("dot_general", jax.grad(lambda x: jnp.sin(layer(x)).sum()), x)

    policies = jax.checkpoint_policies
    forward, backward = 2, 5  # scores and output; scores again, and four gradients
    assert products(policies.nothing_saveable) == 2 * forward + backward
    saved = policies.save_only_these_names("attention_output", "attention_statistics")
    assert products(saved) == forward + backward


def test_decoding_equals_the_last_row_of_attention():
    q, k, v, _ = random_inputs(20)
    expected = attention(q, k, v, segment_ids=None, kernel="reference")
    unused = jnp.full_like(k[:, :5], 1e3)
    keys, values = jnp.concatenate([k, unused], axis=1), jnp.concatenate([v, unused], axis=1)
    valid = jnp.broadcast_to(jnp.arange(25) < 20, (B, 25))
    found = decode_attention(q[:, -1:], keys, values, valid)
    assert found.shape == (B, 1, H, D)
    assert_close(found, expected[:, -1:], terms=20 + D)
    causal = jnp.broadcast_to(jnp.arange(25) <= jnp.arange(20)[:, None], (B, 20, 25))
    assert_close(decode_attention(q, keys, values, causal), expected, terms=20 + D)


def test_a_query_that_sees_nothing_gets_zeros():
    q, k, v, _ = random_inputs(4)
    assert not decode_attention(q[:, :1], k, v, jnp.zeros((B, 4), bool)).any()


@pytest.mark.parametrize(
    ("arguments", "kernel"),
    [
        (("auto", "cpu", False, jnp.float32, 64), "chunked"),
        (("auto", "cpu", True, jnp.bfloat16, 64), "chunked"),
        (("auto", "gpu", False, jnp.bfloat16, 128), "cudnn"),
        (("auto", "cuda", False, jnp.float16, 64), "cudnn"),
        (("auto", "gpu", True, jnp.bfloat16, 128), "chunked"),
        (("auto", "gpu", False, jnp.float32, 128), "chunked"),
        (("auto", "gpu", False, jnp.bfloat16, 256), "chunked"),
        (("cudnn", "gpu", False, jnp.bfloat16, 128), "cudnn"),
        (("chunked", "gpu", False, jnp.bfloat16, 128), "chunked"),
        (("reference", "cpu", True, jnp.float32, 7), "reference"),
    ],
)
def test_the_chosen_kernel(arguments, kernel):
    assert choose_kernel(*arguments) == kernel


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("flash", "gpu", False, jnp.bfloat16, 64), "'flash' is not known; accepted values: auto, reference"),
        (("cudnn", "cpu", False, jnp.bfloat16, 64), "needs an NVIDIA GPU, and the platform is 'cpu'"),
        (("cudnn", "gpu", True, jnp.bfloat16, 64), "takes no segment ids"),
        (("cudnn", "gpu", False, jnp.float32, 64), "the dtype is float32"),
        (("cudnn", "gpu", False, jnp.bfloat16, 60), "multiple of 8 and at most 128, and the model's is 60"),
    ],
)
def test_a_kernel_that_cannot_serve_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        choose_kernel(*arguments)


def test_attention_refuses_what_choose_kernel_would():
    q, k, v, _ = random_inputs(4)
    with pytest.raises(ValueError, match="takes no segment_ids"):
        attention(q, k, v, segment_ids=segments(4), kernel="cudnn")
    with pytest.raises(ValueError, match="'auto' is not known"):
        attention(q, k, v, segment_ids=None, kernel="auto")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["chunked", "cudnn"])
@pytest.mark.parametrize("window", [None, 100])
def test_kernels_on_a_gpu(kernel, window):
    inputs = [jnp.tile(x, (1, 1, 1, 8)) for x in random_inputs(700, dtype=jnp.bfloat16)]
    with jax.default_matmul_precision("float32"):
        exact = compiled("reference", (window,))(*(x.astype(jnp.float32) for x in inputs), None)
    for found, wanted in zip(compiled(kernel, (window,))(*inputs, None), exact, strict=True):
        assert_close(np.asarray(found, np.float32), np.asarray(wanted), terms=4, unit=2**-8)


@needs_plugin
@needs_cudnn
def test_cudnn_compiles_with_windows_that_differ_between_layers():
    def loss(q, k, v, index):
        window = Window((None, 100), index)
        return attention(q, k, v, segment_ids=None, kernel="cudnn", window=window).astype(jnp.float32).sum()

    mesh = make_mesh({}, absent_devices("rtx4090", 1))
    q, k = (jax.ShapeDtypeStruct((1, 256, heads, 64), jnp.bfloat16) for heads in (4, 2))
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    program = compile_for(mesh, gradients, q, k, k, jax.ShapeDtypeStruct((), jnp.int32)).as_text()
    assert program is not None
    assert program.count("__cudnn$fmha") >= 4  # forward and backward, with a window and without
