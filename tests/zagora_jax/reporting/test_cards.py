"""What is read of cards whose driver is a fake one."""

import importlib
import threading
import time
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pynvml
import pytest
from fake_nvml import FakeCard, FakeNvml
from runs import recorder

from zagora_jax.config import TrainConfig
from zagora_jax.reporting.cards import Card, CardReading, Cards, NoCardsError, summary
from zagora_jax.run_directory import read_metrics
from zagora_jax.trainer import train


def test_a_card_tells_everything():
    cards = Cards(FakeNvml())
    assert cards.cards == (Card(0, "NVIDIA GeForce RTX 4090", 24.0, 450.0, 94.0),)
    # 1,000,000 KiB/s are 1,024 MB/s.
    assert cards.read() == [CardReading(0, 20.0, 97.0, 65.0, 430.0, 1024.0, 512.0)]
    assert cards.read()[0].to_json() == {
        "card": 0, "memory_gib": 20.0, "utilisation": 97.0, "celsius": 65.0, "watts": 430.0,
        "pcie_received_mb_s": 1024.0, "pcie_sent_mb_s": 512.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "field", ["used", "utilisation", "celsius", "milliwatts", "received_kib_s", "sent_kib_s", "reasons"]
)
def test_what_a_driver_does_not_support_is_left_out(field):
    whole, lacking = (Cards(FakeNvml([card])).read()[0] for card in (FakeCard(), FakeCard(**{field: None})))
    missing = [name for name, value in asdict(lacking).items() if value != getattr(whole, name)]
    names = {
        "used": "memory_gib",
        "milliwatts": "watts",
        "received_kib_s": "pcie_received_mb_s",
        "sent_kib_s": "pcie_sent_mb_s",
    }
    assert missing == ([] if field == "reasons" else [names.get(field, field)])
    assert not set(missing) & lacking.to_json().keys()


@pytest.mark.parametrize("old_driver", [False, True])
def test_reasons_of_throttling_have_names(old_driver):
    reasons = pynvml.nvmlClocksEventReasonSwThermalSlowdown | pynvml.nvmlClocksEventReasonSwPowerCap
    idle = pynvml.nvmlClocksEventReasonGpuIdle
    nvml = FakeNvml([FakeCard(reasons=reasons), FakeCard(reasons=idle)], old_driver=old_driver)
    assert [reading.throttled_by for reading in Cards(nvml).read()] == [("power limit", "temperature (driver)"), ()]


@pytest.mark.parametrize("since", ["lost", "gone"])
def test_a_card_that_is_lost_does_not_hide_the_others(since):
    lost, fine = Cards(FakeNvml([FakeCard(**{since: True}), FakeCard()])).read()
    assert (lost.to_json(), fine.memory_gib) == ({"card": 0, "error": "GPU is lost"}, 20.0)


def test_where_a_lost_card_may_be_the_one_that_is_named_all_are_read(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0")
    cards = Cards(FakeNvml([FakeCard(gone=True), FakeCard(uuid="GPU-1")])).cards
    assert [(card.index, card.name) for card in cards] == [(0, "unnamed card"), (1, "NVIDIA GeForce RTX 4090")]


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


@pytest.mark.gpu
def test_real_cards_tell_plausible_figures():
    """While one of them multiplies and is sent to. What a driver may leave out, in a container or of a part of a card,
    is judged where it is there."""
    cards = Cards()
    x, block = jnp.ones((4096, 4096), jnp.bfloat16), np.ones(2**26, np.float32)
    multiply = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: (y @ x) / 4096, x))
    jax.block_until_ready(multiply(x))
    done = threading.Event()

    def work():
        while not done.is_set():
            jax.block_until_ready((multiply(x), jax.device_put(block)))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        time.sleep(3)  # utilisation is that of a second that has passed
        readings = [cards.read() for _ in range(5)]
    finally:
        done.set()
        thread.join()
    found = [summary(list(of_card)) for of_card in zip(*readings, strict=True)]
    for card, reading in zip(cards.cards, found, strict=True):
        print(card, reading.to_json())  # with -s
        assert reading.error is None
        assert card.name
        assert card.memory_gib is None or 0 < reading.memory_gib <= card.memory_gib < 2048
        assert reading.utilisation is None or 0 <= reading.utilisation <= 100
        assert 0 < reading.celsius < 120
        assert card.celsius_limit is None or reading.celsius < card.celsius_limit + 20
        assert reading.watts is None or 1 < reading.watts < 1.5 * (card.watts_limit or 2000)
        for rate in (reading.pcie_received_mb_s, reading.pcie_sent_mb_s):
            assert rate is None or 0 <= rate < 300_000
    busiest = [reading.utilisation for reading in found if reading.utilisation is not None]
    assert not busiest or max(busiest) > 20
    received = [reading.pcie_received_mb_s for reading in found if reading.pcie_received_mb_s is not None]
    assert not received or max(received) > 10  # blocks of 256 MiB go there all the time


@pytest.mark.gpu
def test_a_run_on_a_gpu_writes_down_its_sensors(tmp_path):
    config = TrainConfig(
        model="synthetic:smollm2-135m", output=tmp_path / "run", max_steps=200, sequence_length=512, log_every=1000
    )
    train(config, recorder()[0])
    lines = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if "cards" in line]
    assert lines
    assert all(card["celsius"] > 0 for line in lines for card in line["cards"])
    assert "temperature" in (tmp_path / "run/report.html").read_text()


@pytest.mark.parametrize(
    "where", [pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)]
)
def test_the_benchmark_of_watching_measures(where, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    watching = importlib.import_module("watching")
    monkeypatch.setattr(watching, "ROUNDS", 1)
    monkeypatch.setattr(watching, "WARM", 5)
    model = "synthetic:llama-3-8b?layers=2" if where == "gpu" else "synthetic:smollm2-135m?layers=1"
    length = "512" if where == "gpu" else "16"
    given = ["--model", model, "--sequence-length", length, "--max-steps", "12", "--save-every", "4"]
    found = watching.measure([*given, "--gradient-accumulation-steps", "1"])
    assert found["cards"] == (len(Cards().cards) if where == "gpu" else watching.FAKE_CARDS)
    names = {"without_step_ms", "sensors_step_ms", "sensors_and_report_step_ms", "page_ms", "page_kib", "reading_ms"}
    assert found.keys() == names | {"cards"}
    assert all(value > 0 for value in found.values())
