"""Trackers: what they are sent, what becomes of a run whose tracker is missing, slow or away."""

import json
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from zagora_jax.callbacks import Begin, End, Evaluated, Step
from zagora_jax.errors import UserError
from zagora_jax.reporting import tracking
from zagora_jax.reporting.trackers import TRACKERS, Trackio, WeightsAndBiases, require_installed
from zagora_jax.reporting.tracking import Tracking, trackings

CONFIG = SimpleNamespace(model_dump=lambda mode: {"learning_rate": 1e-4})


class FakeTracker:
    """Keeps what it is sent; fails where a test says so."""

    made: list  # of it, by each test
    fails_to_begin = fails = hangs = None

    def __init__(self, run, identity, options, first_step):
        if self.fails_to_begin:
            raise ConnectionError("no route")
        self.begun, self.sent, self.closed = (run, identity, options, first_step), [], False
        self.made.append(self)

    def log(self, step, numbers):
        if self.hangs:
            self.hangs.wait(10)
        if self.fails:
            raise TimeoutError(f"step {step}")
        self.sent.append((step, numbers))

    def close(self):
        self.closed = True


def tracker_class(**attributes):
    return type("Fake", (FakeTracker,), {"made": [], **attributes})


def send(path, make, steps=3, first=0, **options):
    """Runs a training's events through a tracking; returns it and what it said."""
    said = []
    sender = Tracking("wandb", said.append, make=make, **options)
    sender.on_begin(Begin(CONFIG, path, first, first + steps, {}))
    sender.on_evaluate(Evaluated(first, first + steps, {"eval_loss": 9.0}, 10))
    for step in range(first + 1, first + steps + 1):
        metrics = {
            "step": step,
            "loss": 1.0 / step,
            "eval_loss": 8.0,
            "finite": True,
            "cards": [{"card": 0, "watts": 300}],
        }
        sender.on_step(Step(step, first + steps, metrics))
    sender.on_end(End(path, None, None))
    return sender, said


def test_everything_is_sent_in_order(tmp_path):
    make = tracker_class()
    sender, said = send(tmp_path, make)
    (made,) = make.made
    identity = json.loads((tmp_path / "tracking.json").read_text())["id"]
    assert made.begun == (tmp_path, identity, {"learning_rate": 1e-4}, 0)
    assert made.sent == [
        (0, {"eval_loss": 9.0}),
        *((step, {"loss": 1.0 / step, "cards/0/watts": 300.0}) for step in (1, 2, 3)),
    ]
    assert made.closed
    assert (sender.sent, sender.lost, said) == (4, 0, [])


def test_a_run_that_goes_on_is_the_same_to_a_tracker(tmp_path):
    make = tracker_class()
    send(tmp_path, make)
    send(tmp_path, make, first=3)
    send(tmp_path, make)  # begun anew in the same place
    first, second, third = (made.begun[1] for made in make.made)
    assert first == second != third
    assert make.made[1].begun[3] == 3


def test_a_tracker_that_is_away_ends_nothing(tmp_path):
    sender, said = send(tmp_path, tracker_class(fails_to_begin=True))
    assert (sender.sent, sender.lost) == (0, 4)
    assert len(said) == 2
    assert said[0].startswith("warning: --track wandb: could not begin: ConnectionError: no route. Training goes on")
    assert said[1] == "warning: --track wandb: 4 of 4 entries were not sent"


def test_a_tracker_that_comes_back_gets_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "RETRY_AFTER", 0.0)

    class Later(FakeTracker):
        made, tries = [], 0

        def __init__(self, *arguments):
            type(self).tries += 1
            self.fails_to_begin = self.tries < 3
            super().__init__(*arguments)

    sender, said = send(tmp_path, Later)
    assert (sender.sent, sender.lost, len(said)) == (2, 2, 2)
    assert [step for step, _ in Later.made[0].sent] == [2, 3]


def test_failures_are_said_once_and_counted(tmp_path):
    make = tracker_class(fails=True)
    sender, said = send(tmp_path, make, steps=5)
    assert (sender.sent, sender.lost) == (0, 6)
    assert said[0].startswith("warning: --track wandb: TimeoutError: step 0. Training goes on")
    assert said[1:] == ["warning: --track wandb: 6 of 6 entries were not sent"]
    assert make.made[0].closed


def test_a_tracker_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "CLOSING", 0.02)
    free = threading.Event()
    sender, said = send(tmp_path, tracker_class(hangs=free), waiting=3, steps=20)
    assert said[0].startswith("warning: --track wandb: 3 steps wait to be sent. Training goes on")
    # One is in its hands, three wait, all others were dropped.
    assert 17 <= sender.lost <= 18
    assert said[1] == f"warning: --track wandb: does not answer; {sender.lost + 3} entries were not sent"
    free.set()


def test_one_that_is_not_installed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in TRACKERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / name).mkdir()  # as W&B makes one where it runs: no package
        with pytest.raises(
            UserError, match=rf"--track {name}: needs {name}: install it with `pip install 'zagora-jax\["
        ):
            require_installed(name)
        with pytest.raises(UserError, match=name):
            trackings([name], print)


def test_one_is_not_named_twice():
    with pytest.raises(UserError, match="--track: wandb is named twice"):
        trackings(["wandb", "trackio", "wandb"], print)


def test_none_is_imported_unless_asked_for(tmp_path):
    assert trackings([], print) == []
    assert not {"wandb", "trackio"} & sys.modules.keys()


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, said = send(tmp_path, TRACKERS["tensorboard"], steps=5)
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(read.Tags()["scalars"]) == ["cards/0/watts", "eval_loss", "loss"]
    assert [event.step for event in read.Scalars("loss")] == [1, 2, 3, 4, 5]
    assert [event.value for event in read.Scalars("loss")] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert [(event.step, event.value) for event in read.Scalars("eval_loss")] == [(0, 9.0)]
    # It broke off, and goes on behind step 3: what was sent of 4 and 5 does not hold any more.
    send(tmp_path, TRACKERS["tensorboard"], first=3, steps=1)
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in read.Scalars("loss")] == [1, 2, 3, 4]
    assert said == []


class FakeWandb(ModuleType):
    """The part of wandb that is used."""

    def __init__(self):
        super().__init__("wandb")
        self.calls = []
        self.Settings = lambda **settings: settings

    def init(self, **arguments):
        self.calls.append(("init", arguments))
        return SimpleNamespace(
            log=lambda numbers, step: self.calls.append(("log", step, numbers)),
            finish=lambda: self.calls.append(("finish",)),
        )


@pytest.mark.parametrize("project", [None, "mine"])
def test_wandb_is_called_as_its_documentation_says(tmp_path, monkeypatch, project):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    if project:
        monkeypatch.setenv("WANDB_PROJECT", project)
    tracker = WeightsAndBiases(tmp_path / "run", "ab12", {"seed": 1}, 0)
    tracker.log(4, {"loss": 2.0})
    tracker.close()
    (_, arguments), *rest = wandb.calls
    assert rest == [("log", 4, {"loss": 2.0}), ("finish",)]
    assert arguments == {
        "project": None if project else "zagora-jax",  # None: it reads the variable itself
        "name": "run",
        "id": "ab12",
        "resume": "allow",
        "config": {"seed": 1},
        "dir": str(tmp_path / "run"),
        "settings": {"login_timeout": 30, "init_timeout": 60, "console": "off"},
    }


def test_trackio_is_called_as_its_documentation_says(tmp_path, monkeypatch):
    calls, trackio = [], ModuleType("trackio")
    trackio.init = lambda **arguments: calls.append(("init", arguments))
    trackio.log = lambda numbers, step: calls.append(("log", step, numbers))
    trackio.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    tracker = Trackio(tmp_path / "run", "ab12", {"seed": 1}, 0)
    tracker.log(4, {"loss": 2.0})
    tracker.close()
    assert calls == [
        ("init", {"project": "zagora-jax", "name": "run-ab12", "resume": "allow", "config": {"seed": 1}}),
        ("log", 4, {"loss": 2.0}),
        ("finish",),
    ]
