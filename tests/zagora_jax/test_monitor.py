"""The command monitor: for a person and for scripts, with and without cards, in every state of a run."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pynvml
import pytest
from fake_nvml import FakeCard, FakeNvml
from rich.console import Console
from run_directories import make_run

from zagora_jax import monitor
from zagora_jax.command_line import parse
from zagora_jax.commands import MonitorConfig
from zagora_jax.errors import UserError
from zagora_jax.reporting.cards import Cards
from zagora_jax.reporting.dashboard import Monitor, duration
from zagora_jax.reporting.terminal_plot import braille_curve

TIMEOUT = 60  # seconds


def look(path, nvml=None, width=120):
    watched = Monitor(path, open_cards=lambda: Cards(nvml or FakeNvml(driver=False)))
    watched.refresh()
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(watched.render(width))
    return watched, console.file.getvalue()


def test_cards_and_a_run_are_shown(tmp_path):
    hot = pynvml.nvmlClocksEventReasonSwThermalSlowdown
    nvml = FakeNvml([FakeCard(), FakeCard("[bold]\x1b[31mcard", celsius=91, reasons=hot, sent_kib_s=None)])
    make_run(tmp_path / "run", steps=30, total=100)
    watched, text = look(tmp_path / "run", nvml, width=160)
    lines = text.splitlines()
    assert "0 NVIDIA GeForce RTX 4090" in lines[1]
    assert "20.0 / 24.0" in lines[1]
    assert "430 / 450" in lines[1]
    assert "1,024" in lines[1]
    assert "[bold]␛[31mcard" in lines[2]
    assert lines[2].rstrip().endswith("-  temperature (driver)")
    assert "step 30 of 100" in text
    assert "loss 2.0000" in text
    assert any("⠉" in line or "⠑" in line for line in lines)
    described = watched.to_json()
    assert [card["card"] for card in described["cards"]] == [0, 1]
    assert described["cards"][1]["throttled_by"] == ("temperature (driver)",)
    assert described["why_no_cards"] is None


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_every_width_has_room(tmp_path, width):
    make_run(tmp_path / "run", steps=30)
    _, text = look(tmp_path / "run", FakeNvml(), width)
    assert max(map(len, text.splitlines())) <= width


def test_without_a_driver_the_rest_is_shown(tmp_path):
    make_run(tmp_path / "run", steps=3, cards=[{"card": 0, "celsius": 66.0, "memory_gib": 11.5}])
    watched, text = look(tmp_path / "run")
    assert text.startswith("cards: no NVIDIA driver answers (NVML Shared Library Not Found)\n")
    assert "step 3 of 10" in text
    assert "card 0 in step 3: 11.5 GiB, 66 °C" in text
    assert watched.to_json()["cards"] == []
    assert "no NVIDIA driver answers" in watched.to_json()["why_no_cards"]


def test_a_driver_that_comes_later_is_found(tmp_path):
    nvml, now = FakeNvml(driver=False), [0.0]
    watched = Monitor(tmp_path, open_cards=lambda: Cards(nvml), clock=lambda: now[0])
    watched.refresh()
    nvml.driver = True
    watched.refresh()
    assert not watched.cards
    now[0] = 11.0
    watched.refresh()
    assert len(watched.cards) == len(watched.readings) == 1


def test_several_runs_are_listed_and_the_newest_is_shown(tmp_path):
    make_run(tmp_path / "old", steps=10)
    make_run(tmp_path / "new", steps=2)
    for name, when in (("old", 1000), ("new", 2000)):
        for file in (tmp_path / name).iterdir():
            os.utime(file, (when, when))
    watched, text = look(tmp_path)
    assert [snapshot.path for snapshot in watched.snapshots] == [str(tmp_path / "new"), str(tmp_path / "old")]
    assert text.index("step 2 of 10") < text.index("other runs") < text.index("10 of 10")


def test_no_run_is_said(tmp_path):
    _, text = look(tmp_path)
    assert "no run here" in text


def test_warnings_of_a_run_are_shown(tmp_path):
    cards = [{"card": 1, "throttled_by": ["hardware slowdown", "power limit"]}]
    run = make_run(tmp_path / "run", steps=4, cards=cards, finite=False, save_put_off=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("junk\n")
    _, text = look(run)
    assert "4 steps of card 1 slowed down: hardware slowdown" in text
    assert "power limit" not in text  # at which every busy consumer card is
    assert "4 updates left out" in text
    assert "4 saves put off" in text
    assert "metrics.jsonl: 1 lines cannot be read" in text


def test_json_has_no_number_that_json_has_not(tmp_path, capsys, monkeypatch):
    make_run(tmp_path / "run", steps=3, loss=None, grad_norm=None)
    monitor.main(parse(MonitorConfig, [str(tmp_path / "run"), "--json"]))
    run = json.loads(capsys.readouterr().out)["runs"][0]
    assert (run["step"], run["loss"], run["seconds_a_step"]) == (3, None, 2.0)


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path / 'none'}: expected a run directory"):
        monitor.main(parse(MonitorConfig, [str(tmp_path / "none")]))


def heed_ctrl_c():
    """Undo what a shell does to programs in the background, which hands it on to these tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_live_view_follows_a_run_and_ends_with_ctrl_c(tmp_path):
    """In a real terminal: what is written appears, and Ctrl-C is no failure."""
    run = make_run(tmp_path / "run", steps=1)
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "zagora_jax.monitor", str(run), "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, env=environment, preexec_fn=heed_ctrl_c
    )
    os.close(inside)
    seen = ""
    end = time.monotonic() + TIMEOUT

    def read_until(text):
        nonlocal seen
        while text not in seen:
            assert time.monotonic() < end, seen
            if select.select([terminal], [], [], 1.0)[0]:
                seen += os.read(terminal, 65536).decode(errors="replace")

    try:
        read_until("step 1 of 10")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 7, "loss": 0.5}\n')
        read_until("step 7 of 10")
        process.send_signal(signal.SIGINT)
        while select.select([terminal], [], [], 1.0)[0]:
            assert time.monotonic() < end, "goes on after Ctrl-C"
            try:
                seen += os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # its other end is closed
                break
        assert process.wait(TIMEOUT) == 0
        assert "Traceback" not in seen
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_a_curve_is_drawn_between_its_extremes():
    rows = braille_curve([(0, 0.0), (1, 1.0)], 10, 2)
    assert [row[:2] for row in rows] == ["1 ", "0 "]
    assert len(rows[0]) == len(rows[1]) == 10
    assert rows[0].rstrip("⠀")[-1] != " "
    assert rows[1][2] != "⠀"  # begins at the lower left
    assert rows[0][-1] != "⠀"  # ends at the upper right
    assert rows[0][2] == rows[1][-1] == "⠀"
    assert braille_curve([], 10, 2) == []
    assert len(braille_curve([(3, 5.0)], 10, 2)) == 2  # neither range has a length


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (3661, "1 h 01 min"), (200_000, "2 d 7 h")]
)
def test_times_are_written_for_people(seconds, text):
    assert duration(seconds) == text
