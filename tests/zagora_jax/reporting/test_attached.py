"""A real training with everything attached: sensors of fake cards, the page, a tracker."""

import html
import importlib.util
import json
from types import SimpleNamespace

import pytest
from fake_nvml import FakeCard, FakeNvml
from oracles import tiny_llama
from runs import recorder, tiny_config, write_rows

from zagora_jax import trainer
from zagora_jax.callbacks import Callback
from zagora_jax.reporting.card_watch import CardWatch
from zagora_jax.reporting.cards import Cards
from zagora_jax.run_directory import read_metrics

STEPS = 3
TRACK = ["tensorboard"] if importlib.util.find_spec("tensorboard") else None


class Look(Callback):
    """Notes at each step whether the page is there."""

    def __init__(self, page):
        self.page, self.seen = page, []

    def on_step(self, event):
        self.seen.append(self.page.exists())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attached")
    tiny_llama(folder / "model")
    rows = write_rows(folder / "rows.jsonl", 8)
    config = tiny_config(folder / "model", folder / "run", rows, max_steps=STEPS, save_every=1, eval_data=[rows])
    nvml = FakeNvml([FakeCard(celsius=50), FakeCard(celsius=51)])
    look = Look(folder / "run" / "report.html")
    reporter, printed = recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trainer,
            "CardWatch",
            lambda say, limit: CardWatch(say, limit, open_cards=lambda: Cards(nvml), interval=0.001),
        )
        trainer.train(config.model_copy(update={"pause_above_celsius": 80.0, "track": TRACK}), reporter, [look])
    return SimpleNamespace(path=folder / "run", printed=printed(), look=look)


def test_the_metrics_have_what_the_cards_say(run):
    lines = read_metrics(run.path / "metrics.jsonl")
    readings = [[card["celsius"] for card in line["cards"]] for line in lines if "cards" in line]
    assert readings
    assert all(reading == [50.0, 51.0] for reading in readings)
    report = json.loads((run.path / "report.json").read_text())
    assert [card["name"] for card in report["cards"]] == ["NVIDIA GeForce RTX 4090"] * 2
    assert report["total_steps"] == STEPS


def test_the_page_is_complete(run):
    page = html.unescape((run.path / "report.html").read_text())
    report = json.loads((run.path / "report.json").read_text())
    for words in (f"{STEPS} of {STEPS}", ": finished.", f"{report['loss_after']:.4f}", "temperature", "card 1"):
        assert words in page, words
    assert (run.path / "config.yaml").read_text() in page
    assert run.look.seen[1:] == [True] * (STEPS - 1)  # that of the beginning is written beside the first step


@pytest.mark.skipif(TRACK is None, reason="needs tensorboard")
def test_the_tracker_has_every_step(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run.path / "tensorboard")).Reload()
    written = read_metrics(run.path / "metrics.jsonl")
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [
        (line["step"], pytest.approx(line["loss"])) for line in written
    ]
    assert [event.step for event in read.Scalars("eval_loss")] == [0, STEPS]


def test_nothing_went_wrong(run):
    assert "warning" not in run.printed
