"""Layers that change their stage."""

import jax
import numpy as np
import pytest

from sharding.moving import bounds, moved_layers, recut, recut_trees


def stacks(cut):
    whole = np.arange(sum(cut) * 6.0).reshape(-1, 2, 3)
    return whole, [jax.numpy.asarray(whole[own.start : own.stop]) for own in bounds(cut)]


@pytest.mark.parametrize(
    ("old", "new", "moved"),
    [([3, 2], [3, 2], 0), ([3, 2], [2, 3], 1), ([4, 1, 2], [1, 3, 3], 4), ([1, 1, 5], [3, 3, 1], 5)],
)
def test_every_layer_arrives(old, new, moved):
    whole, arrays = stacks(old)
    result = recut(arrays, old, new)
    assert [len(array) for array in result] == new
    np.testing.assert_array_equal(np.concatenate(result), whole)
    assert moved_layers(old, new) == moved
    for stage, (before, after) in enumerate(zip(bounds(old), bounds(new), strict=True)):
        assert (result[stage] is arrays[stage]) == (before == after)


def test_numbers_stay():
    whole, arrays = stacks([2, 3])
    trees = [{"a": array, "count": jax.numpy.int32(7)} for array in arrays]
    result = recut_trees(trees, [2, 3], [4, 1])
    np.testing.assert_array_equal(np.concatenate([tree["a"] for tree in result]), whole)
    assert [int(tree["count"]) for tree in result] == [7, 7]
