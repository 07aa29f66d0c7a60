"""The mesh that options ask for, and the cap on memory."""

from types import SimpleNamespace

import pytest

from zagora_jax import devices
from zagora_jax.config import MeshConfig, TrainConfig
from zagora_jax.devices import choose_mesh, limit_memory
from zagora_jax.errors import UserError


def cards(count):
    """Stand-ins for devices, of which a mesh needs no more."""
    return [SimpleNamespace(id=i, platform="gpu", device_kind="RTX 4090") for i in range(count)]


@pytest.fixture
def shapes(monkeypatch):
    """`choose_mesh` with the mesh's sizes in place of a mesh of real devices."""

    def sizes(strategy="auto", count=4, **mesh):
        monkeypatch.setattr(devices, "make_mesh", lambda sizes, used: (sizes, len(used)))
        return choose_mesh(TrainConfig(model="m", strategy=strategy, mesh=MeshConfig(**mesh)), cards(count))

    return sizes


def test_the_strategys_axis_takes_what_the_mesh_leaves(shapes):
    assert shapes() == ({"fsdp": 4}, 4)
    assert shapes("replicas") == ({"data": 4}, 4)
    assert shapes("tensor") == ({"tensor": 4}, 4)
    assert shapes("tensor", data=2) == ({"data": 2, "tensor": 2}, 4)
    assert shapes(tensor=2) == ({"tensor": 2, "fsdp": 2}, 4)
    assert shapes("fsdp", data=2) == ({"data": 2, "fsdp": 2}, 4)
    assert shapes("replicas", fsdp=2) == ({"fsdp": 2, "data": 2}, 4)
    assert shapes(count=3) == ({"fsdp": 3}, 3)


def test_given_sizes_are_taken_and_other_devices_left(shapes):
    assert shapes(fsdp=2) == ({"fsdp": 2}, 2)
    assert shapes(data=1, fsdp=3) == ({"data": 1, "fsdp": 3}, 3)


def test_more_devices_than_there_are(shapes):
    with pytest.raises(UserError, match=r"--mesh.data 2 --mesh.fsdp 3: needs 6 devices, but there are 4: gpu:0, gpu:1"):
        shapes(data=2, fsdp=3)


def test_devices_that_cannot_be_shared_out(shapes):
    with pytest.raises(UserError, match=r"--mesh.data 3: 4 devices cannot be shared out evenly over fsdp"):
        shapes(data=3)


def test_a_memory_limit_without_a_gpu_is_refused():
    with pytest.raises(UserError, match=r"--device-memory-limit 23: needs an NVIDIA GPU"):
        limit_memory(23)
