"""Signs of life between processes, over a service that is only a dictionary."""

from __future__ import annotations

import json
import threading

import pytest

from zagora_jax import hanging, peers
from zagora_jax.hanging import FAILED
from zagora_jax.interruption import STOPPED
from zagora_jax.peers import PEER_LOST, Peers

NAMES = ["process 0 of 2 (a)", "process 1 of 2 (b)"]
SOON = 20.0  # seconds, in which what is to happen happens even on a busy machine


class Service(dict):
    """Keeps words by key, as the coordination service does; where it is stopped, calls hang."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        self.goes_on.wait()
        self[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        self.goes_on.wait()
        return [(key, value) for key, value in self.items() if key.startswith(folder)]


@pytest.fixture
def ends(monkeypatch):
    """The statuses with which processes would have ended."""
    statuses: list[int] = []
    ended = threading.Event()

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()
        threading.Event().wait()  # the process would be gone

    monkeypatch.setattr(peers.os, "_exit", end)
    monkeypatch.setattr(peers, "BEAT", 0.02)
    monkeypatch.setattr(peers, "LOST_AFTER", 0.3)
    monkeypatch.setattr(peers, "LINGERING", 0.1)
    monkeypatch.setattr(peers, "_watching", None)
    return lambda: ended.wait(SOON) and statuses


def sign(count: int, doing: str = "step 3", ended: dict | None = None) -> str:
    return json.dumps({"count": count, "doing": doing, "ended": ended})


def watch(service: Service, index: int = 0) -> Peers:
    return Peers(service, "127.0.0.1:1", index, NAMES, run=1)


def test_a_process_that_falls_silent_is_named_with_what_it_was_at(ends, capfd):
    service = Service()
    service["zagora/alive/1/1"] = sign(7)
    own = watch(service)
    assert ends() == [PEER_LOST]
    said = capfd.readouterr().err
    assert said.startswith("error: process 1 of 2 (b) has given no sign of life for ")
    assert "last at: step 3. " in said
    assert "So ends process 0 of 2 (a) too" in said
    assert json.loads(service["zagora/alive/1/0"])["ended"]["status"] == PEER_LOST  # for a third one
    own.close()


def test_a_process_that_never_began_is_named(ends, capfd):
    own = watch(Service())
    assert ends() == [PEER_LOST]
    assert "process 1 of 2 (b) has given no sign of life" in capfd.readouterr().err
    own.close()


def test_where_the_service_stands_still_process_0_is_named(ends, capfd):
    service = Service()
    own = watch(service, index=1)
    service.goes_on.clear()
    assert ends() == [PEER_LOST]
    assert "process 0 of 2 (a) has given no sign of life" in capfd.readouterr().err
    own.close()
    service.goes_on.set()


@pytest.mark.parametrize(
    ("ended", "status", "message"),
    [
        (
            {"status": FAILED, "message": "rows.jsonl: is no file"},
            PEER_LOST,
            "(b) ended: rows.jsonl: is no file\nSo ends",
        ),
        ({"status": STOPPED, "message": "SIGTERM"}, STOPPED, "process 1 of 2 (b) was stopped (SIGTERM), and so ends"),
        ({"status": PEER_LOST, "message": "error: process 2 is gone"}, PEER_LOST, "error: process 2 is gone"),
    ],
)
def test_what_ends_one_process_ends_the_others(ends, capfd, ended, status, message):
    service = Service()
    service["zagora/alive/1/1"] = sign(7, ended=ended)
    own = watch(service)
    assert ends() == [status]
    assert message in capfd.readouterr().err
    own.close()


def test_who_ends_by_itself_tells_and_is_not_ended(ends):
    service = Service()
    service["zagora/alive/1/1"] = sign(7)
    own = watch(service)
    own.end(FAILED, "a full disk")
    assert json.loads(service["zagora/alive/1/0"])["ended"] == {"status": FAILED, "message": "a full disk"}


def test_a_save_that_is_under_way_is_finished_first(ends):
    service, saved = Service(), threading.Event()
    with hanging.watched("saving", saves=True):
        own = watch(service)
        assert not saved.wait(1.0)  # longer than a silent process is waited for
        saved.set()
        assert own._verdict.is_set()
    assert ends() == [PEER_LOST]
    own.close()


def test_what_the_others_are_at_is_said(ends):
    service = Service()
    service["zagora/alive/1/1"] = sign(7, doing="behind step 3")
    own = watch(service)
    own.doing = "step 4"
    waiting = threading.Event()
    for _ in range(1000):
        if own.behind():
            break
        waiting.wait(0.01)
    assert own.behind() == "\nprocess 1 of 2 (b) is at: behind step 3"
    own.close()
