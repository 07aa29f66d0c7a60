"""What is read of cards whose driver is a fake one."""

from dataclasses import asdict

import pynvml
import pytest
from fake_nvml import FakeCard, FakeNvml

from zagora_jax.reporting.cards import Card, CardReading, Cards, NoCardsError, summary


def test_a_card_tells_everything():
    cards = Cards(FakeNvml())
    assert cards.cards == (Card(0, "NVIDIA GeForce RTX 4090", 24.0, 450.0, 94.0),)
    # 1,000,000 KiB/s are 1,024 MB/s.
    assert cards.read() == [CardReading(0, 20.0, 97.0, 65.0, 430.0, 1024.0, 512.0)]
    assert cards.read()[0].to_json() == {
        "card": 0, "memory_gib": 20.0, "utilisation": 97.0, "celsius": 65.0, "watts": 430.0,
        "pcie_received_mb_s": 1024.0, "pcie_sent_mb_s": 512.0,
    }  # fmt: skip


@pytest.mark.parametrize("field", ["utilisation", "celsius", "milliwatts", "received_kib_s", "sent_kib_s", "reasons"])
def test_what_a_driver_does_not_support_is_left_out(field):
    whole, lacking = (Cards(FakeNvml([card])).read()[0] for card in (FakeCard(), FakeCard(**{field: None})))
    missing = [name for name, value in asdict(lacking).items() if value != getattr(whole, name)]
    names = {"milliwatts": "watts", "received_kib_s": "pcie_received_mb_s", "sent_kib_s": "pcie_sent_mb_s"}
    assert missing == ([] if field == "reasons" else [names.get(field, field)])
    assert not set(missing) & lacking.to_json().keys()


@pytest.mark.parametrize("old_driver", [False, True])
def test_reasons_of_throttling_have_names(old_driver):
    reasons = pynvml.nvmlClocksEventReasonSwThermalSlowdown | pynvml.nvmlClocksEventReasonSwPowerCap
    idle = pynvml.nvmlClocksEventReasonGpuIdle
    nvml = FakeNvml([FakeCard(reasons=reasons), FakeCard(reasons=idle)], old_driver=old_driver)
    assert [reading.throttled_by for reading in Cards(nvml).read()] == [("power limit", "temperature (driver)"), ()]


def test_a_card_that_is_lost_does_not_hide_the_others():
    lost, fine = Cards(FakeNvml([FakeCard(lost=True), FakeCard()])).read()
    assert (lost.to_json(), fine.memory_gib) == ({"card": 0, "error": "GPU is lost"}, 20.0)


@pytest.mark.parametrize(
    ("nvml", "why"),
    [
        (FakeNvml(driver=False), r"no NVIDIA driver answers \(NVML Shared Library Not Found\)"),
        (FakeNvml([]), "the NVIDIA driver sees no card"),
    ],
)
def test_no_cards_say_why(nvml, why):
    with pytest.raises(NoCardsError, match=why):
        Cards(nvml)


@pytest.mark.parametrize(
    ("visible", "order", "second", "expected"),
    [
        (None, None, "A", [0, 1, 2]),
        ("1", None, "A", [1]),
        ("2,0", None, "A", [0, 2]),
        ("1", None, "B", [0, 1, 2]),  # CUDA's card 1 may be another one than NVML's
        ("1", "PCI_BUS_ID", "B", [1]),
        ("GPU-bb", None, "B", [1]),
        ("MIG-1", None, "A", [0, 1, 2]),
    ],
)
def test_cards_are_those_that_cuda_shows(monkeypatch, visible, order, second, expected):
    for name, value in {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    nvml = FakeNvml([FakeCard("A", "GPU-aa"), FakeCard(second, "GPU-bb"), FakeCard("A", "GPU-cc")])
    assert [card.index for card in Cards(nvml).cards] == expected
    assert [card.index for card in Cards(nvml, all_cards=True).cards] == [0, 1, 2]


def test_hidden_cards_are_none(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(NoCardsError, match="CUDA_VISIBLE_DEVICES hides all cards"):
        Cards(FakeNvml())


def test_readings_are_put_together():
    one = CardReading(0, 10.0, 100.0, 60.0, 400.0, 10.0, None, ("power limit",))
    other = CardReading(0, 9.0, 50.0, 64.0, 300.0, 30.0, None, ("hardware slowdown", "power limit"))
    expected = CardReading(0, 10.0, 75.0, 64.0, 350.0, 20.0, None, ("power limit", "hardware slowdown"))
    assert summary([one, other]) == expected
