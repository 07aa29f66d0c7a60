"""Whatever the files of a run directory say, the monitor, report.html and the history of a trainer show something."""

import io
import json
import random

import pytest
from fake_nvml import FakeNvml
from rich.console import Console
from run_directories import make_run

from zagora_jax.errors import UserError
from zagora_jax.reporting.cards import Cards
from zagora_jax.reporting.dashboard import Monitor
from zagora_jax.reporting.report_page import render_report
from zagora_jax.reporting.run_view import RunView
from zagora_jax.reporting.steps import Steps
from zagora_jax.run_directory import read_metrics

NUMBERS = [True, -1, 0, 3, 10**400, 1e308, -1e308, float("inf"), float("nan")]
TEXTS = [
    "<script>alert(1)</script>",
    "</svg><img src=x onerror=alert(1)>",
    "\x1b]0;x\x07",
    "\ud800",
    "[bold]",
    "{{7*7}}",
]
OF_REPORT = (
    "facts versions cards loss_before loss_after total_steps throttled_steps bytes_a_device host_bytes_a_device mesh "
    "layers layers_of_stages planned_bytes_a_device limit_bytes_a_device wire_bytes_a_step"
)
OF_STEP = (
    "step loss seconds tokens_per_second cards eval_loss finite spike peak_memory_gib stop learning_rate grad_norm"
)


def any_value(rng, depth=0):
    if depth < 3 and rng.random() < 0.3:
        return {name: any_value(rng, depth + 1) for name in rng.sample([*TEXTS, "a", "card", "loss", "cpu:0"], 3)}
    return rng.choice([None, *NUMBERS, *TEXTS, [1, 2], [{"card": 0, "celsius": 1e308}]])


def damaged_run(folder, rng):
    make_run(folder, steps=5, total=10)
    for name in ("report.json", "layout.json"):
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        content |= {key: any_value(rng) for key in rng.sample([*content, *OF_REPORT.split()], 6)}
        path.write_text(json.dumps(content))
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(6, 9):
            line = {"step": step, "loss": 1.0, "seconds": 0.1}
            line |= {key: any_value(rng) for key in OF_STEP.split() if rng.random() < 0.25}
            file.write(json.dumps(line) + "\n")
        file.write('{"step": 9, "lo')
    return folder


@pytest.mark.parametrize("seed", range(80))
def test_damaged_files_are_shown_as_far_as_they_can_be(tmp_path, seed):
    run = damaged_run(tmp_path / "run", random.Random(seed))
    monitor = Monitor(run, open_cards=lambda: Cards(FakeNvml()))
    for _ in range(2):
        monitor.refresh()
    Console(file=io.StringIO(), width=80).print(monitor.render(80))
    json.dumps(monitor.to_json(), allow_nan=False)
    page = render_report(RunView(run))
    page.encode("utf-8", errors="replace")
    assert "<script" not in page
    assert "<img" not in page
    try:
        steps = Steps(read_metrics(run / "metrics.jsonl"))
    except UserError:
        return  # which names the line
    assert "<script" not in steps._repr_html_()
    steps.plot("loss")


def test_a_directory_that_vanishes_is_no_run_any_more(tmp_path):
    run = make_run(tmp_path / "run", steps=5, total=10)
    monitor = Monitor(tmp_path, open_cards=lambda: Cards(FakeNvml()))
    monitor.refresh()
    assert [snapshot.step for snapshot in monitor.snapshots] == [5]
    run.rename(tmp_path / "away")
    for file in (tmp_path / "away").iterdir():
        file.unlink()
    (tmp_path / "away").rmdir()
    monitor.refresh()
    console = Console(file=io.StringIO(), width=80)
    console.print(monitor.render(80))
    assert "no run here" in " ".join(console.file.getvalue().split())  # wherever the path's length breaks the line
