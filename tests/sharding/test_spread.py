from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from sharding.mesh import AXES, make_mesh
from sharding.spread import Spread

ARRAYS = [
    ((3, 40, 24), ("layers", "out", "in")),
    ((3, 7), ("layers", "codes")),
    ((3, 5), ("layers", "hidden")),
    ((10, 6), ("vocab", "hidden")),
    ((8, 3), ("devices", None)),
    ((), ()),
]


def absent_mesh(**sizes: int) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@pytest.mark.parametrize(("shape", "axes"), ARRAYS, ids=str)
def test_spreading_is_undone(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> None:
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    spread = Spread(make_mesh({}, jax.devices()[:1]), jax.ShapeDtypeStruct(shape, jnp.float32), axes)
    stored = spread.put(array)
    np.testing.assert_array_equal(spread.whole_array(stored), array)
    abstract, zeros = spread.abstract(), spread.zeros()
    assert jax.tree.structure(stored) == jax.tree.structure(abstract) == jax.tree.structure(zeros)
    assert [leaf.shape for leaf in jax.tree.leaves(stored)] == [leaf.shape for leaf in jax.tree.leaves(abstract)]
    assert not any(leaf.any() for leaf in jax.tree.leaves(zeros))


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_each_device_has_an_equal_part_of_a_large_array(devices: int) -> None:
    """Of any number of devices, whatever they divide: a part is padded by less than a unit, or a row."""
    for shape, axes, unit in (((3, 40, 24), ("layers", "out", "in"), 64), ((101, 6), ("vocab", "hidden"), 1)):
        spread = Spread(absent_mesh(fsdp=devices), jax.ShapeDtypeStruct(shape, jnp.float32), axes, unit)
        share = 4 * math.prod(shape) / devices
        padding = 4 * (3 * unit if axes[0] == "layers" else shape[1])
        assert share <= spread.device_bytes <= share + padding


def test_each_device_has_its_row_of_what_differs() -> None:
    mesh = absent_mesh(data=2, fsdp=4)
    spread = Spread(mesh, jax.ShapeDtypeStruct((8, 3), jnp.float32), ("devices", None))
    assert spread.device_bytes == 4 * 3


def test_replicas_have_the_same() -> None:
    whole = jax.ShapeDtypeStruct((3, 512), jnp.float32)
    assert Spread(absent_mesh(data=4), whole, ("layers", "in")).device_bytes == 4 * 3 * 512
