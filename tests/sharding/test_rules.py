from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from sharding.mesh import AXES, make_mesh
from sharding.rules import RULES, named_sharding, partition_spec


def test_every_rule_names_axes_of_the_mesh() -> None:
    mesh = make_mesh({}, jax.devices()[:1])
    for axis, over in RULES.items():
        assert set((over,) if isinstance(over, str) else over or ()) <= set(AXES)
        assert named_sharding(mesh, (axis,)).spec == PartitionSpec(over)


def test_each_logical_axis_is_mapped_by_its_line() -> None:
    rules = {"a": "x", "b": ("y", "z"), "c": None}
    assert partition_spec(("c", "a", None, "b"), rules) == PartitionSpec(None, "x", None, ("y", "z"))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("a", "d"), "logical axis 'd' has no rule; known: a, b"),
        (("a", "b"), "logical axes 'a' and 'b' would both be laid over mesh axis 'x'"),
    ],
)
def test_unknown_axes_and_collisions_are_refused(axes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition_spec(axes, {"a": "x", "b": ("y", "x")})
