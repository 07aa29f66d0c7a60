import chex
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from flax import nnx

from models.linear import Linear, frozen_matmul, tuned_matmul
from models.lora import LoRAConfig
from models.parameters import split
from models.placement import LOCAL, identity
from models.quantization import dequantize, nf4

IN, OUT = 40, 24


def stored(quantization, key=0, shape=(OUT, IN)):
    weight = jax.random.normal(jax.random.key(key), shape)
    return nf4.quantize(weight) if quantization == "nf4" else weight


@pytest.mark.parametrize("quantization", ["nf4", "none"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_and_gradients_are_those_of_the_plain_product(quantization, dtype):
    weight = stored(quantization)
    x = jax.random.normal(jax.random.key(1), (2, 3, IN), dtype)
    cotangent = jax.random.normal(jax.random.key(2), (2, 3, OUT), dtype)
    y, pull_back = jax.vjp(lambda x: frozen_matmul(x, weight, identity), x)
    expected, pull_back_plain = jax.vjp(lambda x: x @ dequantize(weight, dtype).T, x)
    chex.assert_shape(y, (2, 3, OUT))
    chex.assert_trees_all_equal_shapes_and_dtypes(pull_back(cotangent), (x,))
    # The same sums, if in another order: some roundings of the dtype.
    tolerance = 40 * float(jnp.finfo(dtype).eps)
    chex.assert_trees_all_close(y, expected, rtol=tolerance, atol=tolerance)
    chex.assert_trees_all_close(pull_back(cotangent), pull_back_plain(cotangent), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_the_weight_gets_no_gradient(quantization):
    weight = stored(quantization)
    _, pull_back = jax.vjp(lambda w: frozen_matmul(jnp.ones((1, IN)), w, identity), weight)
    (gradient,) = pull_back(jnp.ones((1, OUT)))
    for leaf, original in zip(jax.tree.leaves(gradient), jax.tree.leaves(weight), strict=True):
        assert leaf.shape == original.shape
        assert leaf.dtype == jax.dtypes.float0 or not leaf.any()


def test_the_backward_pass_keeps_the_stored_weight_alone():
    weight = stored("nf4", shape=(64, 128))
    _, pull_back = jax.vjp(lambda x: frozen_matmul(x, weight, identity), jnp.ones((1, 128)))
    kept = jax.tree.leaves(pull_back)
    assert sum(leaf.nbytes for leaf in kept) <= sum(leaf.nbytes for leaf in jax.tree.leaves(weight))


def test_fetching_happens_in_both_passes():
    """What `fetch` returns, twice the weight here, is what both passes use."""
    weight, calls = stored("none"), []

    def fetch(weight):
        calls.append(1)
        return 2 * weight

    x = jnp.ones((1, IN))
    y, pull_back = jax.vjp(lambda x: frozen_matmul(x, weight, fetch), x)
    assert len(calls) == 1
    chex.assert_trees_all_close(y, 2 * x @ weight.T, rtol=1e-5)
    chex.assert_trees_all_close(pull_back(jnp.ones((1, OUT)))[0], 2 * jnp.ones((1, OUT)) @ weight, rtol=1e-5)
    assert len(calls) == 2


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_of_a_stack_adds_its_own_bias(bias):
    linear = Linear(IN, OUT, bias=bias, quantization="none", dtype=jnp.dtype(jnp.bfloat16), stack=(3,))
    graph, declared, _ = split(linear)
    chex.assert_shape(jax.tree.leaves(declared), [(3, OUT)] * bias + [(3, OUT, IN)])
    values = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.ndim), leaf.shape, leaf.dtype), declared)
    second = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[1], values), nnx.State({}))
    y = second(jnp.zeros((2, IN), jnp.float32), LOCAL, None)
    chex.assert_type(y, jnp.float32)
    expected = np.asarray(values["bias"].get_value()[1], np.float32) if bias else np.zeros(OUT)
    np.testing.assert_array_equal(y, np.broadcast_to(expected, (2, OUT)))


def test_one_product_forward_and_one_backward():
    weight = stored("nf4")
    assert programs.count("dot_general", lambda x: frozen_matmul(x, weight, identity), jnp.ones((1, IN))) == 1
    gradient = jax.grad(lambda x: frozen_matmul(x, weight, identity).sum())
    assert programs.count("dot_general", gradient, jnp.ones((1, IN))) == 2


def adapter(rank=3, dtype=jnp.float32):
    b = jax.random.normal(jax.random.key(3), (OUT, rank), dtype)
    return b, jax.random.normal(jax.random.key(4), (rank, IN), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_tuned_product_is_that_with_the_weight_and_that_with_the_adapter(dtype):
    weight, (b, a) = stored("nf4"), adapter(dtype=dtype)
    x = jax.random.normal(jax.random.key(1), (2, 3, IN), dtype)
    cotangent = jax.random.normal(jax.random.key(2), (2, 3, OUT), dtype)

    def apart(x, b, a):
        return x @ dequantize(weight, jnp.float32).T + (x @ a.T) @ b.T

    found, pull_back = jax.vjp(lambda *args: tuned_matmul(args[0], weight, *args[1:], identity), x, b, a)
    wide = tuple(array.astype(jnp.float32) for array in (x, b, a))
    expected, pull_back_apart = jax.vjp(apart, *wide)
    # Sums of up to 40 products of numbers of about 1, rounded to the dtype along the way; relative to the largest.
    tolerance = 8 * float(jnp.finfo(dtype).eps)
    gradients = pull_back(cotangent)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, (x, b, a))
    wanted = (expected, *pull_back_apart(cotangent.astype(jnp.float32)))
    for own, other in zip((found, *gradients), wanted, strict=True):
        np.testing.assert_allclose(
            np.asarray(own, np.float32), other, rtol=0, atol=tolerance * float(jnp.abs(other).max())
        )


def test_a_tuned_product_is_one_product_and_what_the_adapter_needs_backward():
    """Counted with the making of the sum, which on a GPU is no product of XLA's."""
    weight, (b, a) = stored("nf4"), adapter()
    forward = programs.count("dot_general", lambda x: tuned_matmul(x, weight, b, a, identity), jnp.ones((1, IN)))
    assert forward == 1 + 1
    gradient = jax.grad(lambda x, b, a: tuned_matmul(x, weight, b, a, identity).sum(), argnums=(0, 1, 2))
    assert programs.count("dot_general", gradient, jnp.ones((1, IN)), b, a) == 2 * (1 + 1) + 4


@pytest.mark.parametrize(("dropout", "merges"), [(0.0, True), (0.5, False)])
def test_an_adapter_is_merged_where_nothing_is_dropped(dropout, merges):
    linear = Linear(IN, OUT, bias=False, quantization="nf4", dtype=jnp.dtype(jnp.float32), stack=())
    linear.add_adapter(LoRAConfig(3, 6, dropout, False, frozenset()), stream=0)
    graph, frozen, adapters = split(linear)
    b, a = adapter()
    adapters["adapter"]["lora_A"].set_value(a)
    adapters["adapter"]["lora_B"].set_value(b)
    weight = stored("nf4")
    frozen["weight"].set_value(weight)

    def run(x):
        return nnx.merge(graph, frozen, adapters)(x, LOCAL, jax.random.split(jax.random.key(0), 2))

    products = programs.count("dot_general", run, jnp.ones((2, IN)))
    assert products == (2 if merges else 3)
    if merges:
        expected = dequantize(weight, jnp.float32).sum(axis=1) + 2 * (b @ a).sum(axis=1)
        np.testing.assert_allclose(run(jnp.ones((2, IN)))[0], expected, rtol=1e-4, atol=1e-4)
