"""The thread that reads sensors beside a training, its warnings and its pauses, with cards that are not there."""

import threading
import time

import pynvml
import pytest
from fake_nvml import FakeCard, FakeNvml
from oracles import tiny_llama
from runs import recorder, tiny_config, write_rows

from zagora_jax import interruption
from zagora_jax.errors import UserError
from zagora_jax.reporting import card_watch
from zagora_jax.reporting.card_watch import CardWatch
from zagora_jax.reporting.cards import Cards
from zagora_jax.trainer import train

INTERVAL = 0.005


def watch(nvml, said=None, pause_above=None):
    say = [].append if said is None else said.append
    return CardWatch(say, pause_above, open_cards=lambda: Cards(nvml), interval=INTERVAL)


def wait_for(condition):
    """Bounded: a condition that never holds fails the test."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(INTERVAL)


def wait_for_reads(nvml, count):
    before = nvml.reads
    wait_for(lambda: nvml.reads >= before + count)


def test_each_step_has_the_readings_since_the_last():
    nvml = FakeNvml([FakeCard(celsius=60), FakeCard(celsius=70)])
    with watch(nvml) as sensors:
        wait_for_reads(nvml, 6)
        first = sensors.after_step()["cards"]
        assert [(card["card"], card["celsius"]) for card in first] == [(0, 60.0), (1, 70.0)]
        nvml.cards[0].celsius = 61
        wait_for_reads(nvml, 6)
        assert sensors.after_step()["cards"][0]["celsius"] == 61.0
    assert not any(thread.name == "sensors" for thread in threading.enumerate())
    sensors.after_step()
    assert sensors.after_step() == {}  # nothing was read since


def test_without_a_driver_nothing_is_read_or_said():
    said = []
    with watch(FakeNvml(driver=False), said) as sensors:
        sensors.cool_down()
        assert sensors.after_step() == {}
    assert sensors.facts() == {"cards": [], "throttled_steps": {}}
    assert not said


def test_slow_cards_are_warned_of_once_and_counted():
    said = []
    nvml = FakeNvml([FakeCard(celsius=88, reasons=pynvml.nvmlClocksEventReasonHwThermalSlowdown | 4)])
    with watch(nvml, said) as sensors:
        for _ in range(2):
            wait_for_reads(nvml, 2)
            assert sensors.after_step()["cards"][0]["throttled_by"] == ("power limit", "temperature (hardware)")
    assert len(said) == 1
    assert said[0].startswith("warning: card 0 is slowed down at 88 °C: temperature (hardware)")
    assert sensors.facts()["throttled_steps"] == {"0: power limit": 2, "0: temperature (hardware)": 2}


def test_a_lost_card_is_warned_of():
    said, nvml = [], FakeNvml([FakeCard(), FakeCard()])
    with watch(nvml, said) as sensors:
        nvml.cards[1].lost = True
        wait_for_reads(nvml, 4)
        assert sensors.after_step()["cards"][1]["error"] == "GPU is lost"
    assert said == ["warning: card 1 does not answer: GPU is lost"]


def test_training_waits_until_the_cards_are_cool(monkeypatch):
    said, nvml = [], FakeNvml([FakeCard(celsius=60), FakeCard(celsius=84)])
    temperatures = iter([84, 81, 79, 78])

    def sleep(seconds):
        nvml.cards[1].celsius = next(temperatures)
        reads, event = nvml.reads, threading.Event()
        for _ in range(1000):  # until both cards have been read again, with another clock than that which is replaced
            if nvml.reads < reads + 4:
                event.wait(INTERVAL)

    with watch(nvml, said, pause_above=83) as sensors:
        monkeypatch.setattr(card_watch.time, "sleep", sleep)
        sensors.cool_down()
        assert next(temperatures, None) is None  # it went on at 78, not at 79
        assert sensors.after_step()["paused_seconds"] >= 0
        assert "paused_seconds" not in sensors.after_step()
        sensors.cool_down()  # at 78 it does not wait
    assert said[0].startswith("card 1 has 84 °C, more than --pause-above-celsius 83: training waits until every card")
    assert said[1].startswith("training goes on after a pause of ")
    assert len(said) == 2


def test_a_signal_ends_a_pause(monkeypatch):
    said = []
    with watch(FakeNvml([FakeCard(celsius=90)]), said, pause_above=80) as sensors:
        monkeypatch.setattr(interruption, "requested", lambda: True)
        sensors.cool_down()
    assert len(said) == 2


def test_a_driver_that_stops_to_answer_is_not_waited_for(monkeypatch):
    said = []
    sensors = watch(FakeNvml([FakeCard(celsius=90)]), said, pause_above=80)  # whose thread is not started
    monkeypatch.setattr(card_watch, "STALE_AFTER", 0.02)
    sensors.cool_down()
    assert said[1].startswith("warning: the cards' driver has told no temperature for 0.02 s")


@pytest.mark.parametrize(
    ("nvml", "why"),
    [
        (FakeNvml(driver=False), "--pause-above-celsius 80: no NVIDIA driver answers"),
        (FakeNvml([FakeCard(celsius=None)]), "--pause-above-celsius 80: the cards' driver tells no temperature"),
    ],
)
def test_a_limit_without_a_thermometer_is_refused(nvml, why):
    with pytest.raises(UserError, match=why):
        watch(nvml, pause_above=80)


def test_a_run_with_a_limit_needs_a_driver(tmp_path, monkeypatch):
    nvml = FakeNvml(driver=False)
    monkeypatch.setattr("zagora_jax.trainer.CardWatch", lambda say, limit: watch(nvml, [], limit))
    tiny_llama(model := tmp_path / "model")
    options = {"max_steps": 3, "pause_above_celsius": 80.0}
    config = tiny_config(model, tmp_path / "run", write_rows(tmp_path / "rows.jsonl", 8), **options)
    with pytest.raises(UserError, match="no NVIDIA driver answers"):
        train(config, recorder()[0])
    assert not (tmp_path / "run").exists()
