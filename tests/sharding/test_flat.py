"""Flat forms; devices are the entries of a mapped axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.flat import FlatShard, bare, clothed, gather, padded_size, unflatten


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("shape", "multiple", "size"), [((3, 5), 4, 16), ((4, 4), 4, 16), ((1,), 256, 256)])
def test_sizes_are_rounded_up(shape: tuple[int, ...], multiple: int, size: int) -> None:
    assert padded_size(shape, multiple) == size


def flat(array: np.ndarray, size: int) -> FlatShard:
    """A stack [L, 3, 5] in flat form, padded."""
    rows = array.reshape(len(array), -1)
    return FlatShard(jnp.pad(rows, ((0, 0), (0, size - rows.shape[1]))), array.shape[1:])


def test_padding_is_left_out() -> None:
    array = draw(2, 3, 5)
    np.testing.assert_array_equal(unflatten(flat(array, 16)), array)


def test_devices_gather_a_layer_and_scatter_its_gradients_sum() -> None:
    devices, array, weights = 4, draw(3, 5), draw(4, 3, 5)
    shards = flat(array[None], 16).array.reshape(devices, -1)

    def loss(shard, weight):
        whole = gather({"weight": FlatShard(shard, (3, 5)), "bias": jnp.ones(2)})
        assert whole["bias"].shape == (2,)  # what is no shard is left as it is
        return jnp.sum(whole["weight"] * weight), whole["weight"]

    differentiated = jax.vmap(jax.grad(loss, has_aux=True), axis_name="fsdp")
    gradients, whole = differentiated(shards, weights)
    for gathered in whole:
        np.testing.assert_array_equal(gathered, array)
    # A float32 sum of four terms.
    np.testing.assert_allclose(gradients.reshape(-1)[:15], weights.sum(axis=0).reshape(-1), rtol=1e-6, atol=1e-6)
    assert not gradients.reshape(-1)[15:].any()


def test_shards_are_stripped_and_clothed_again() -> None:
    tree = {"a": flat(np.ones((2, 3, 5)), 16), "b": jnp.zeros(2)}
    stripped = bare(tree)
    assert stripped["a"].shape == (2, 16)
    again = clothed(jax.tree.map(lambda x: x + 1, stripped), tree)
    assert again["a"].shape == (3, 5)
    np.testing.assert_array_equal(unflatten(again["a"]), np.full((2, 3, 5), 2))
    np.testing.assert_array_equal(again["b"], np.ones(2))
