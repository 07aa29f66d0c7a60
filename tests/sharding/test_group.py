"""What devices ask of each other; they are the entries of mapped axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.exchange import Exchange, ExchangeErrors
from sharding.group import ALONE, Group

REPLICAS, SHARDS, LAYERS = 2, 2, 3


def on_mesh(function, *arguments):
    """Call for each device, whose arguments are rows [REPLICAS, SHARDS, ...]."""

    def along_tensor(*own):
        along_stage = jax.vmap(lambda _: function(*own), axis_name="stage")
        alone = jax.vmap(lambda _: along_stage(jnp.zeros(1)), axis_name="tensor")(jnp.zeros(1))
        return jax.tree.map(lambda x: x[0, 0], alone)

    return jax.vmap(jax.vmap(along_tensor, axis_name="fsdp"), axis_name="data")(*arguments)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((REPLICAS, SHARDS, *shape)).astype(np.float32)


def test_rows_are_counted_in_the_order_of_the_mesh() -> None:
    found = on_mesh(lambda _: Group("none").first_row(5), jnp.zeros((REPLICAS, SHARDS)))
    assert found.tolist() == [[0, 5], [10, 15]]
    assert ALONE.first_row(5) == 0


def test_totals_are_over_all_and_norms_over_the_shards_of_one_replica() -> None:
    x = draw()
    np.testing.assert_allclose(on_mesh(Group("none").total, x), np.full(x.shape, x.sum()), rtol=1e-6)
    norms = on_mesh(lambda x: Group("none").squared_norm({"a": x, "b": 2 * x}), x)
    np.testing.assert_allclose(norms, np.broadcast_to(5 * (x**2).sum(axis=1, keepdims=True), x.shape), rtol=1e-6)
    assert float(ALONE.squared_norm({"a": jnp.full(3, 2.0)})) == 12


def test_uncompressed_gradients_are_summed_over_the_replicas() -> None:
    gradients = {"a": draw(LAYERS, 4), "b": draw(LAYERS, 2, 3)}
    summed, errors = on_mesh(lambda g: Group("none").exchange(g, ExchangeErrors()), gradients)
    assert errors == ExchangeErrors()
    for name, leaf in gradients.items():
        want = np.broadcast_to(leaf.sum(axis=0, keepdims=True), leaf.shape)
        np.testing.assert_allclose(summed[name], want, rtol=1e-6)


@pytest.mark.parametrize("halfway", [None, 1.5, np.nan])
def test_compressed_gradients_are_exchanged_layer_by_layer(halfway: float | None) -> None:
    """With the values and residuals of one exchange a layer, whatever is known halfway."""
    gradients = {"a": draw(LAYERS, 40), "b": draw(LAYERS, 2, 35)}
    exchange = Exchange("int4", replicas="data")
    of_layer = jax.eval_shape(
        lambda g: exchange.no_errors(g, REPLICAS, 1), jax.tree.map(lambda g: g[0, 0, 0], gradients)
    )
    errors = jax.tree.map(lambda e: jnp.full((REPLICAS, SHARDS, LAYERS, *e.shape), 0.01, e.dtype), of_layer)

    def layer_by_layer(gradients, errors):
        sums = []
        for layer in range(LAYERS):
            g, e = jax.tree.map(lambda x, layer=layer: x[layer], (gradients, errors))
            total, e = exchange.sum(exchange.join(g), e)
            sums.append((exchange.split(total, g), e))
        return jax.tree.map(lambda *layers: jnp.stack(layers), *sums)

    found = on_mesh(lambda g, e: Group("int4").exchange(g, e, halfway), gradients, errors)
    jax.tree.map(np.testing.assert_array_equal, found, on_mesh(layer_by_layer, gradients, errors))
    # An integer of 4 bits is off by at most half of the block's largest / 7, in each of two phases.
    for name, leaf in gradients.items():
        want = leaf.sum(axis=0, keepdims=True)
        assert np.abs(found[0][name] - want).max() < 2 * np.abs(leaf).max() / 7 + np.abs(want).max() / 7
