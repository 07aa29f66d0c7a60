from __future__ import annotations

import jax
import pytest
from absent_gpus import needs_plugin
from jax.sharding import AxisType

from sharding.mesh import AXES, make_mesh, rows_divisor
from sharding.targets import absent_devices


def test_axes_that_are_not_named_have_one_device() -> None:
    mesh = make_mesh({}, jax.devices()[:1])
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1)
    assert mesh.axis_types == (AxisType.Auto,) * len(AXES)
    assert rows_divisor(mesh) == 1


@needs_plugin
def test_devices_keep_their_order_and_rows_are_shared_over_data_and_fsdp() -> None:
    devices = absent_devices("rtx4090", 4)
    mesh = make_mesh({"fsdp": 2, "data": 2}, devices)
    assert list(mesh.devices.flat) == list(devices)
    assert (mesh.shape["data"], mesh.shape["fsdp"], rows_divisor(mesh)) == (2, 2, 4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dta": 1}, "mesh axis 'dta' is not known; the axes are "),
        ({"fsdp": 0}, "mesh sizes must be at least 1, found {'fsdp': 0}"),
        ({"data": 3}, "the mesh .*data 3 .* has 3 places, but there are 1 devices"),
    ],
)
def test_meshes_that_cannot_be_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_mesh(sizes, jax.devices()[:1])
