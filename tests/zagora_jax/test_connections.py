"""Devices that do not reach each other are named before a run relies on them."""

from __future__ import annotations

import threading

import eight_devices
import jax
import numpy as np
import pytest

from sharding.mesh import make_mesh
from zagora_jax import connections, hanging
from zagora_jax.connections import try_connections
from zagora_jax.errors import UserError


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


@pytest.fixture
def mesh():
    return make_mesh({"data": 2, "fsdp": 3}, jax.devices()[:6])


@pytest.mark.eight_devices
def test_sound_devices_pass(mesh) -> None:
    try_connections(mesh)
    sums = connections._sum(mesh, "fsdp")
    assert sums.keys() == set(mesh.devices.flat)
    assert sums[mesh.devices.flat[5]][:3].tolist() == [7 * 2, 7 * 3, 7 * 4]  # 1 + 2 + 4 times the numbers


@pytest.mark.eight_devices
def test_a_copy_that_arrives_as_zeros_names_the_pair(mesh, monkeypatch) -> None:
    sound = connections._copy
    broken = (jax.devices()[2], jax.devices()[4])
    monkeypatch.setattr(connections, "_copy", lambda *pair: sound(*pair) * (pair != broken))
    with pytest.raises(
        UserError, match=r"from cpu 2 to cpu 4: 65,536 of 65,536 .* as 0 in place of 2\n.*NCCL_P2P_DISABLE"
    ):
        try_connections(mesh)


@pytest.mark.eight_devices
def test_a_sum_that_is_wrong_on_one_device_names_it(mesh, monkeypatch) -> None:
    sound = connections._sum

    def wrong(mesh, axis):
        sums = sound(mesh, axis)
        return sums | {jax.devices()[3]: np.where(np.arange(connections.COUNT) == 9, 1, sums[jax.devices()[3]])}

    monkeypatch.setattr(connections, "_sum", wrong)
    with pytest.raises(
        UserError, match=r"along the mesh's axis data, as cpu 3 has it: 1 of 65,536 .* in place of 33\n"
    ):
        try_connections(mesh)


@pytest.mark.eight_devices
def test_a_copy_that_never_arrives_names_the_pair(mesh, monkeypatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(connections, "_copy", lambda source, target: ended.wait())
    monkeypatch.setattr(hanging, "ENDED_AFTER", 0.1)
    monkeypatch.setattr(hanging, "_hung", False)
    with pytest.raises(UserError, match=r"copying from cpu 0 to cpu 1[^\0]*NCCL_P2P_DISABLE=1"):
        try_connections(mesh)
    ended.set()
