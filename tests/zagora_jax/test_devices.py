"""The mesh that options ask for, and refusing what does not fit."""

from dataclasses import dataclass, field

import pytest

from zagora_jax import devices
from zagora_jax.config import MeshConfig, TrainConfig
from zagora_jax.devices import choose_mesh, limit_memory, require_memory
from zagora_jax.errors import UserError


@dataclass(frozen=True)
class Card:
    id: int
    statistics: dict | None = field(hash=False)
    platform: str = "gpu"
    device_kind: str = "RTX 4090"

    def memory_stats(self):
        return self.statistics


def cards(count, limit=None):
    """Stand-ins for devices, of which a mesh and the memory check need no more."""
    statistics = None if limit is None else {"bytes_limit": limit}
    return [Card(i, statistics) for i in range(count)]


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


def test_a_step_that_cannot_fit_is_refused_with_what_takes_less():
    gib = 2**30
    small, large = cards(2, limit=23 * gib)
    require_memory({small: 23 * gib, large: 22 * gib})
    require_memory(dict.fromkeys(cards(2), 99 * gib))  # CPUs tell no limit
    with pytest.raises(UserError, match=r"needs 24.00 GiB of RTX 4090 1, which has 23.00 GiB.*adamw_8bit"):
        require_memory({small: 23 * gib, large: 24 * gib})


def test_a_memory_limit_without_a_gpu_is_refused():
    with pytest.raises(UserError, match=r"--device-memory-limit 23: needs an NVIDIA GPU"):
        limit_memory(23)
