"""A run's numbers, read while they are written, and from files that are damaged."""

import json
import math

import pytest

from zagora_jax.reporting.history import History, Series
from zagora_jax.run_directory import MetricsFile


def write(path, *lines, mode="a"):
    with path.open(mode) as file:
        file.write("".join(lines))


def line(step, **numbers):
    return json.dumps({"step": step, **numbers}) + "\n"


def test_what_is_new_is_added(tmp_path):
    path = tmp_path / "metrics.jsonl"
    history = History(path).refresh()
    assert (history.step, list(history["loss"].values)) == (0, [])
    write(path, line(1, loss=2.0))
    assert list(history.refresh()["loss"].values) == [2.0]
    write(path, line(2, loss=1.5), line(3, loss=1.0))
    history.refresh()
    assert (list(history["loss"].steps), list(history["loss"].values)) == ([1, 2, 3], [2.0, 1.5, 1.0])
    assert history.refresh().step == 3


@pytest.mark.parametrize("cut", range(1, 22))
def test_a_half_written_line_is_read_when_it_is_whole(tmp_path, cut):
    path, whole = tmp_path / "metrics.jsonl", line(2, loss=1.5)
    assert len(whole) == 25
    write(path, line(1, loss=2.0), whole[:cut])
    history = History(path).refresh()
    assert (history.step, history.unreadable) == (1, 0)
    write(path, whole[cut:])
    assert list(history.refresh()["loss"].values) == [2.0, 1.5]


def test_a_run_that_goes_on_from_an_earlier_step_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, after_step=0) as file:
        for step in (1, 2, 3):
            file.write({"step": step, "loss": float(step), "finite": step != 2})
        history = History(path).refresh()
    assert (history.step, history.skipped) == (3, 1)
    with MetricsFile(path, after_step=1) as file:
        assert (history.refresh().step, history.skipped) == (1, 0)
        file.write({"step": 2, "loss": 9.0})
        assert list(history.refresh()["loss"].values) == [1.0, 9.0]


def test_a_file_that_is_gone_is_forgotten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, line(1, loss=2.0))
    history = History(path).refresh()
    path.unlink()
    assert (history.refresh().step, history.series) == (0, {})


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1, "loss": 3.0}\n\xff\n[]\n{}\n{"step": "2"}\n{"step": true}\n'
        + b'{"step": 9999999999999999999}\n\n{"step": 3, "loss": '
        + b"9" * 400
        + b"}\n"
        b'{"step": 4, "loss": {}, "cards": [1, {}, {"card": "x"}]}\n' + b"[" * 100_000 + b"\n"
    )
    history = History(path).refresh()
    assert (history.step, history.unreadable) == (4, 7)
    assert list(map(str, history["loss"].values)) == ["3.0", "nan"]


def test_what_was_not_finite_is_a_gap(tmp_path):
    write(path := tmp_path / "metrics.jsonl", line(1, loss=None), line(2, loss=1.0))
    history = History(path).refresh()
    assert math.isnan(history["loss"].values[0])
    assert history["loss"].buckets(10) == [(2.0, 1.0, 1.0, 1.0)]
    write(path, line(3, loss=None))
    assert history.refresh()["loss"].last is None


def test_each_card_has_numbers_of_its_own(tmp_path):
    cards = [{"card": 0, "celsius": 60.0, "throttled_by": ["power limit"]}, {"card": 3, "celsius": 70.0}]
    write(path := tmp_path / "metrics.jsonl", line(1, cards=cards), line(2, cards=cards), line(3))
    history = History(path).refresh()
    assert history.cards == [0, 3]
    assert list(history["cards.3.celsius"].values) == [70.0, 70.0]
    assert history.throttled == {(0, "power limit"): 2}


def test_many_steps_are_put_together():
    series = Series()
    for step in range(1, 1001):
        series.append(step, step % 10)
    buckets = series.buckets(100)
    assert len(buckets) == 100
    assert buckets[0] == (5.5, 4.5, 0.0, 9.0)
    assert series.recent(3) == [8.0, 9.0, 0.0]
