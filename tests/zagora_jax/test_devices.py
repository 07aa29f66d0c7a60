"""The mesh that options ask for, and the cap on memory."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pynvml
import pytest

from zagora_jax import devices
from zagora_jax.config import TrainConfig
from zagora_jax.devices import choose_mesh, limit_memory
from zagora_jax.errors import UserError
from zagora_jax.option_groups import MeshConfig
from zagora_jax.reporting.sensors import GIB


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


class Driver:
    """In place of NVIDIA's: cards of so many GiB."""

    NVMLError = pynvml.NVMLError

    def __init__(self, *gib):
        self.totals = [size * GIB for size in gib]
        self.nvmlInit = lambda: None
        self.nvmlDeviceGetCount = lambda: len(self.totals)
        self.nvmlDeviceGetHandleByIndex = self.totals.__getitem__
        self.nvmlDeviceGetMemoryInfo = lambda total: SimpleNamespace(total=total)

    def devices(self):
        """As XLA shows them, whose allocator takes what the environment says."""
        fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))
        return [
            SimpleNamespace(memory_stats=lambda total=total: {"bytes_limit": fraction * total}, id=index)
            for index, total in enumerate(self.totals)
        ]


@pytest.fixture
def machine(monkeypatch):
    def install(*gib):
        driver = Driver(*gib)
        for name in devices._FRACTIONS:
            monkeypatch.setenv(name, "")  # so that what is set meanwhile is taken back
            monkeypatch.delenv(name)
        monkeypatch.setattr(devices, "_set_here", None)
        monkeypatch.setattr(devices, "pynvml", driver)
        monkeypatch.setattr(jax, "local_devices", driver.devices)
        return driver

    return install


def test_a_memory_limit_caps_every_device(machine):
    driver = machine(24, 24, 16)
    limit_memory(12)
    assert [device.memory_stats()["bytes_limit"] / GIB for device in driver.devices()] == [12, 12, 8]


def test_a_memory_limit_that_comes_too_late_for_a_device_is_refused(machine, monkeypatch):
    driver = machine(24, 24)
    late = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 18 * GIB}, device_kind="RTX 4090", id=1)
    monkeypatch.setattr(jax, "local_devices", lambda: [driver.devices()[0], late])
    with pytest.raises(UserError, match=r"--device-memory-limit 12: could not be set, found a limit of 18.0 GiB"):
        limit_memory(12)
    endless = SimpleNamespace(memory_stats=lambda: None, device_kind="RTX 4090", id=0)
    monkeypatch.setattr(jax, "local_devices", lambda: [endless])
    with pytest.raises(UserError, match=r"found an allocator without limits of RTX 4090 0"):
        limit_memory(12)


@pytest.mark.parametrize("name", devices._FRACTIONS)
def test_a_share_that_the_user_has_set_is_not_overridden(machine, monkeypatch, name):
    machine(24)
    monkeypatch.setenv(name, "0.9")
    with pytest.raises(UserError, match=rf"--device-memory-limit 12: the environment has {name}=0\.9"):
        limit_memory(12)
    assert os.environ[name] == "0.9"


def test_a_limit_can_be_set_again_in_one_process(machine):
    driver = machine(24)
    limit_memory(12)
    limit_memory(11)
    assert [device.memory_stats()["bytes_limit"] / GIB for device in driver.devices()] == [pytest.approx(11, rel=1e-5)]


@pytest.mark.gpu
def test_a_memory_limit_on_gpus():
    program = (
        "import jax; from zagora_jax.devices import limit_memory; limit_memory(2.0); "
        "print(max(device.memory_stats()['bytes_limit'] for device in jax.devices()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 1.9 * GIB < int(done.stdout) <= 2.02 * GIB


def test_a_memory_limit_without_a_gpu_is_refused():
    with pytest.raises(UserError, match=r"--device-memory-limit 23: needs an NVIDIA GPU"):
        limit_memory(23)
