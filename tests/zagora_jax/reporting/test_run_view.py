"""Run directories as a spectator sees them: being written, finished, broken off, damaged, several."""

import os

import pytest
from run_directories import make_run

from zagora_jax.reporting.run_view import RunView, find_runs, is_claimed
from zagora_jax.run_directory import MetricsFile, RunDirectory


def test_a_run_goes_through_its_states(tmp_path):
    run = make_run(tmp_path / "run")
    view = RunView(run)
    assert view.refresh().state == "stopped"
    with RunDirectory(run).claimed():
        assert view.refresh().state == "preparing"
        with MetricsFile(run / "metrics.jsonl", after_step=0) as file:
            for step in range(1, 5):
                file.write({"step": step, "loss": 2.0, "seconds": 3.0, "tokens_per_second": 10.0 * step})
            now = view.refresh()
    assert (now.state, now.step, now.loss, now.tokens_per_second, now.eta_seconds) == ("running", 4, 2.0, 25.0, 18.0)
    assert view.refresh().state == "stopped"
    assert view.refresh().eta_seconds is None


def test_a_finished_run_has_its_last_loss(tmp_path):
    now = RunView(make_run(tmp_path / "run", steps=10, report={"loss_after": 1.25})).refresh()
    assert (now.state, now.step, now.eval_loss) == ("finished", 10, 1.25)


def test_looking_takes_no_lock(tmp_path):
    """A run that begins while somebody looks is not refused."""
    assert not is_claimed(tmp_path)
    with RunDirectory(tmp_path).claimed():
        assert is_claimed(tmp_path)
    assert not is_claimed(tmp_path)
    assert not is_claimed(tmp_path / "none")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"total_steps": "many"}', '{"total_steps": true, "facts": 3}'])
def test_a_damaged_report_leaves_the_rest(tmp_path, content):
    run = make_run(tmp_path / "run", steps=3)
    (run / "report.json").write_text(content)
    now = RunView(run).refresh()
    assert (now.step, now.total_steps, now.loss) == (3, None, 4.7)
    assert bool(now.problems) == (not content.startswith('{"'))


def test_an_empty_directory_is_a_run_of_no_steps(tmp_path):
    now = RunView(tmp_path).refresh()
    assert (now.state, now.step, now.loss, now.written_seconds_ago, now.problems) == ("stopped", 0, None, None, ())


def test_runs_are_found_newest_first(tmp_path):
    assert find_runs(tmp_path / "none") == find_runs(tmp_path) == []
    for number, name in enumerate(("old", "new", "middle")):
        run = make_run(tmp_path / name)
        for file in run.iterdir():
            os.utime(file, (1000 + 10 * (number % 2), 1000 + 10 * (number % 2)))
    os.utime(tmp_path / "middle" / "metrics.jsonl", (1005, 1005))
    (tmp_path / "no run").mkdir()
    assert [run.name for run in find_runs(tmp_path)] == ["new", "middle", "old"]
    assert find_runs(tmp_path / "old") == [tmp_path / "old"]
