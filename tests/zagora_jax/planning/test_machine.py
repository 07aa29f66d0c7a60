"""Machines by their cards' names, what joins them, and what is left of a card for arrays."""

import json

import pytest

from sharding.targets import GPUS
from zagora_jax.commands import ConfigureConfig
from zagora_jax.errors import UserError
from zagora_jax.planning import probe
from zagora_jax.planning.links import DISK_GB_S, NAMES, find_link
from zagora_jax.planning.machine import find_machine, gpu_budget

GIB = 2**30


def machine(**options):
    return find_machine(ConfigureConfig(model_size="8B", **options))


def test_a_cards_room_is_what_context_and_margin_leave():
    budget = machine(gpu="rtx4090", gpu_count=2).budget
    assert budget.total == GPUS["rtx4090"].memory_bytes
    assert budget.limit == budget.total - budget.context - budget.margin
    # The bound that several cards of 24 GB are planned with elsewhere in the project's tests.
    assert 22.0 < budget.limit / GIB < 22.5
    assert gpu_budget(budget.total, 1).limit > budget.limit  # one card exchanges nothing


def test_memory_alone_takes_the_slowest_card_and_says_so():
    found = machine(memory_per_gpu=24)
    assert found.gpu.kind == "rtx3090"
    assert "planned for rtx3090, the slowest card of this size (also rtx3090ti, rtx4090" in found.notes[0]


def test_24_means_the_whole_card_and_less_is_a_bound():
    assert machine(gpu="rtx4090", memory_per_gpu=24).memory == GPUS["rtx4090"].memory_bytes
    assert machine(gpu="rtx4090", memory_per_gpu=16).memory == 16 * GIB


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "rtx4095"}, r"--gpu rtx4095: GPU 'rtx4095' is not known; the nearest are .*rtx4090"),
        ({"gpu": "rtx4090", "memory_per_gpu": 48}, r"--memory-per-gpu 48: NVIDIA GeForce RTX 4090 is sold with 24 GB"),
        ({"memory_per_gpu": 23}, r"--memory-per-gpu 23: no known card is sold with that; sizes: 8, 10, 12, 16"),
        ({"gpu": "rtx4090", "interconnect": "nvlink"}, r"NVIDIA GeForce RTX 4090 has none; cards with it: rtx3090"),
        ({"gpu": "rtx4090", "interconnect": "pci4"}, r"--interconnect pci4: not known; the nearest are pcie4"),
        ({"gpu": "a100", "interconnect": "nvlink", "peer_to_peer": False}, r"leave --peer-to-peer false out"),
        ({"gpu_count": 3}, r"--gpu-count 3: this machine has 1 x cpu; for cards that are not here, name them"),
        ({"interconnect": "pcie"}, r"no GPU was found in this machine; name the cards with --gpu"),
    ],
)
def test_wrong_machines_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        machine(**options)


def test_measured_links_take_the_place_of_named_ones(tmp_path):
    """The slowest pair counts; without a rate to the host, that of the slot stays."""
    named = machine(gpu="rtx4090", gpu_count=2).link
    file = tmp_path / "connections.json"
    link = {"source": "cuda:0", "target": "cuda:1", "between": "devices"}
    file.write_text(json.dumps({"links": [link | {"gb_s": 11.5}, link | {"gb_s": 9.25}], "host_gb_s": None}))
    found = machine(gpu="rtx4090", gpu_count=2, links=file).link
    assert (found.gpu_gb_s, found.host_gb_s, found.measured) == (9.25, named.host_gb_s, True)
    assert found.name == "measured, the slowest of 2 pairs"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "expected the key links with measured pairs, found None"),
        ({"links": []}, "expected the key links with measured pairs"),
        ({"links": [{"gb_s": 0}]}, r"links\[0\].gb_s: expected a positive number, found 0"),
        ({"links": [{"gb_s": 1}], "host_gb_s": "fast"}, "host_gb_s: expected a positive number, found 'fast'"),
    ],
)
def test_links_that_were_not_measured_are_refused(tmp_path, content, message):
    file = tmp_path / "connections.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        machine(gpu="rtx4090", links=file)


def test_links_of_devices_without_figures_are_refused(tmp_path):
    file = tmp_path / "connections.json"
    file.write_text(json.dumps({"links": [{"gb_s": 1}]}))
    with pytest.raises(UserError, match=r"--links .*: of CPU no time is planned; name the cards with --gpu"):
        machine(links=file)


def test_this_machine_is_planned_for_where_no_card_is_named():
    found = machine()
    assert (found.name, found.count, found.is_gpu) == ("CPU", 1, False)
    assert "no GPU was found here" in found.notes[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_link_has_a_rate(name):
    assert find_link(name, GPUS["h200"], None).gpu_gb_s > 1


def test_links_are_as_fast_as_both_ends_and_the_way_between():
    card, workstation = GPUS["rtx4090"], GPUS["a5000"]
    assert find_link("pcie5-x16", card, None) == find_link("pcie", card, None)  # the card is of generation 4
    assert find_link("pcie4-x8", card, None).gpu_gb_s == pytest.approx(find_link("pcie", card, None).gpu_gb_s / 2)
    assert find_link("PCIe 3.0 x16", card, None) == find_link("pcie3", card, None)
    # GeForce cards reach each other through the host only, unless said otherwise.
    assert find_link("pcie", card, None).gpu_gb_s == pytest.approx(find_link("pcie", card, True).gpu_gb_s / 2)
    assert find_link("pcie", workstation, None) == find_link("pcie", workstation, True)
    assert find_link("pcie", card, False).host_gb_s == find_link("pcie", card, True).host_gb_s


def test_a_disk_is_measured_by_the_layers_that_are_on_it(tmp_path, monkeypatch):
    assert probe.disk_gb_s(None) is None
    assert probe.disk_gb_s(tmp_path) is None
    monkeypatch.setattr(probe, "LEAST_READ", 1000)
    for number in range(3):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / f"layer-{number}.safetensors").write_bytes(bytes(400))
    assert probe.disk_gb_s(tmp_path) > 0


def test_the_rate_of_the_disk_is_as_given():
    assert machine(gpu="rtx4090", disk_gb_s=7.5).link.disk_gb_s == 7.5
    assert machine(gpu="rtx4090").link.disk_gb_s == DISK_GB_S
