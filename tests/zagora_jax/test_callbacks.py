"""What callbacks are told of a run, and what they can do to it."""

import pytest
from oracles import tiny_llama
from runs import Listener, compiled_once, numbers, recorder, tiny_config, write_rows

from zagora_jax.callbacks import Callback, End, Evaluated, Saved, Step
from zagora_jax.run_directory import RunDirectory, read_metrics
from zagora_jax.trainer import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("callbacks")
    tiny_llama(folder / "model")
    write_rows(folder / "rows.jsonl", 11)
    with compiled_once(folder / "programs"):
        yield folder


def configure(folder, output, **options):
    given = {"epochs": 2, "eval_data": [folder / "rows.jsonl"], "eval_every": 2, "save_every": 2}
    return tiny_config(folder / "model", output, folder / "rows.jsonl", **given | options)


def test_a_run_is_told_in_its_order(folder, tmp_path):
    listener = Listener()
    config = configure(folder, tmp_path / "run")
    result = train(config, recorder()[0], [listener])
    begin, *events, end = listener.events
    assert (begin.config, begin.first_step, begin.total_steps) == (config, 0, 6)
    assert begin.facts["steps"] == "6"
    assert end == End(tmp_path / "run", result, None)
    told = [(type(event), event.step) for event in events if not isinstance(event, Saved)]
    of_steps = [(Step, 1), (Evaluated, 2), (Step, 2), (Step, 3), (Evaluated, 4), (Step, 4), (Step, 5), (Step, 6)]
    assert told == [(Evaluated, 0), *of_steps, (Evaluated, 6)]
    assert [event.step for event in listener.heard(Saved)] == [1, 2, 4, 6]
    losses = [event.numbers["eval_loss"] for event in listener.heard(Evaluated)]
    assert [losses[0], losses[-1]] == [result.loss_before, result.loss_after]


def test_numbers_of_a_callback_stand_in_the_metrics(folder, tmp_path):
    class Thermometer(Callback):
        def on_step(self, event):
            event.metrics["temperature"] = 40.0 + event.step

    train(configure(folder, tmp_path / "run"), recorder()[0], [Thermometer()])
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [line["temperature"] for line in lines] == [41.0, 42.0, 43.0, 44.0, 45.0, 46.0]


def test_a_run_that_a_callback_stops_is_finished_until_a_checkpoint_is_named(folder, tmp_path):
    class Stopper(Callback):
        def on_step(self, event):
            if event.step == 3:
                event.stop("seen enough")

    config = configure(folder, tmp_path / "run")
    listener, (reporter, printed) = Listener(), recorder()
    result = train(config, reporter, [Stopper(), listener])
    assert result.steps == 3
    assert [event.step for event in listener.heard(Saved)] == [1, 2, 3]
    assert [event.step for event in listener.heard(Evaluated)] == [0, 2, 3]
    assert read_metrics(tmp_path / "run/metrics.jsonl")[-1]["stop"] == "seen enough"
    assert "ends behind step 3 of 6: seen enough" in printed()

    told = len(listener.events)
    reporter, printed = recorder()
    again = train(config.model_copy(update={"resume": True}), reporter, [listener])
    assert again == result
    assert len(listener.events) == told  # nothing began, so nothing ended
    assert "finished already, at step 3 of 6: seen enough" in printed()
    checkpoint = RunDirectory(tmp_path / "run").checkpoints / "3"
    assert train(config.model_copy(update={"resume": checkpoint}), recorder()[0]).steps == 6
    unbroken = configure(folder, tmp_path / "unbroken")
    train(unbroken, recorder()[0])
    lines = [{name: value for name, value in line.items() if name != "stop"} for line in numbers(tmp_path / "run")]
    assert lines == numbers(tmp_path / "unbroken")


def test_what_a_callback_raises_ends_the_run_and_loses_no_step(folder, tmp_path):
    class Faulty(Callback):
        def on_step(self, event):
            if event.step == 3:
                raise ZeroDivisionError("a fault of the callback's")

    listener = Listener()
    with pytest.raises(ZeroDivisionError):
        train(configure(folder, tmp_path / "run", save_every=100), recorder()[0], [Faulty(), listener])
    assert isinstance(listener.events[-1].error, ZeroDivisionError)
    assert [line["step"] for line in read_metrics(tmp_path / "run/metrics.jsonl")] == [1, 2, 3]
    assert (tmp_path / "run/checkpoints/3").is_dir()
