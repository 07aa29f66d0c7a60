"""Devices that do not reach each other are named before a run relies on them."""

from __future__ import annotations

import threading

import eight_devices
import jax
import numpy as np
import pytest

from sharding.mesh import make_mesh
from zagora_jax import connections, hanging
from zagora_jax.connections import Link, try_connections
from zagora_jax.errors import UserError


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


@pytest.fixture
def mesh():
    return make_mesh({"data": 2, "fsdp": 3}, jax.devices()[:6])


@pytest.mark.eight_devices
def test_sound_devices_pass(mesh) -> None:
    links = try_connections(mesh)
    assert {(link.source, link.target) for link in links} == {
        (f"cpu:{one}", f"cpu:{other}") for one in range(6) for other in range(6) if one != other
    }
    assert all(link.gb_s > 0 and link.between == "devices" for link in links)
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


@pytest.mark.eight_devices
@pytest.mark.parametrize(
    ("same_host", "between", "advice"),
    [(True, "processes", "--shm-size=1g"), (False, "machines", "NCCL_SOCKET_IFNAME=eth0")],
)
def test_an_exchange_between_processes_is_tried_in_both_directions(monkeypatch, same_host, between, advice) -> None:
    """As one process of both devices sees it."""
    one, other = jax.devices()[:2]
    link = connections._across(one, other, same_host, sends=False)
    assert (link.source, link.target, link.between) == ("cpu:1", "cpu:0", between)
    assert link.gb_s > 0
    monkeypatch.setattr(connections, "_swap", lambda mesh, numbers: np.zeros_like(numbers))
    with pytest.raises(UserError, match=rf"exchanging between cpu 0 \(process 0\) and cpu 1[^\0]*{advice}"):
        connections._across(one, other, same_host, sends=True)


def test_a_link_that_is_slower_than_others_is_said() -> None:
    links = [Link("cuda:0", f"cuda:{other}", rate, "devices") for other, rate in ((1, 22.0), (2, 21.0), (3, 3.0))]
    links.append(Link("cuda:0", "cuda:4", 1.1, "machines"))
    ours, warning, far = connections.in_words(links)
    assert ours == "links between devices: 3, 3 to 22 GB/s"
    assert warning.startswith("warning: cuda:0 to cuda:3 reaches 3 GB/s, others 21: ")
    assert far == "links between machines: 1, 1.1 to 1.1 GB/s"
