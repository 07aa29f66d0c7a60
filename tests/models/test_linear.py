import chex
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from flax import nnx

from models.linear import Linear, frozen_matmul
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
