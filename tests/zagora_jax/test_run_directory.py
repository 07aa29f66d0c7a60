"""The files of a run directory."""

import json
import math
import os

import pytest
from runs import tiny_config

from zagora_jax.config import TrainConfig
from zagora_jax.config_file import load_config
from zagora_jax.errors import UserError
from zagora_jax.run_directory import MetricsFile, RunDirectory, completed_options, read_metrics


def write_steps(path, *steps, after_step=0):
    with MetricsFile(path, after_step=after_step) as file:
        for step in steps:
            file.write({"step": step, "loss": 1.5})


def test_metrics_are_read_back_and_forgotten_beyond_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2, 3, 4)
    write_steps(path, 3, after_step=2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    assert read_metrics(path)[0] == {"step": 1, "loss": 1.5}


def test_a_line_that_broke_off_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2)
    path.write_text(path.read_text() + '{"step": 3, "lo')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    write_steps(path, 3, after_step=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_line_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, after_step=0) as file:
        file.write({"step": 1})
        assert read_metrics(path) == [{"step": 1}]


def test_what_is_not_finite_is_null(tmp_path):
    """NaN and Infinity are no JSON: jq and pandas would refuse the file."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, after_step=0) as file:
        file.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "finite": False})
    assert path.read_text() == '{"step": 1, "loss": null, "grad_norm": null, "finite": false}\n'


def test_the_report_grows(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.read_report() == {}
    directory.update_report({"loss_before": 2.0, "steps": 1})
    directory.update_report({"steps": 2})
    assert directory.read_report() == json.loads(directory.report.read_text()) == {"loss_before": 2.0, "steps": 2}


def test_a_damaged_report_is_named(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.report.write_text('{"loss')
    with pytest.raises(UserError, match=r"report.json is not valid JSON"):
        directory.read_report()


def test_the_config_begins_the_same_run_from_any_directory(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    config = tiny_config("model", "run", "rows.jsonl", eval_data=["held_out.jsonl"], resume=True)
    directory = RunDirectory("run")
    directory.create()
    directory.write_config(config)
    expected = tiny_config(
        tmp_path / "model", tmp_path / "run", tmp_path / "rows.jsonl", eval_data=[tmp_path / "held_out.jsonl"]
    )
    assert load_config(TrainConfig, tmp_path / "run" / "config.yaml") == expected
    assert directory.read_config() == expected


def test_a_directory_without_a_config_is_no_run(tmp_path):
    with pytest.raises(UserError, match=r"not a run directory \(no config.yaml\)"):
        RunDirectory(tmp_path).read_config()


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "adapter"])
def test_a_directory_with_steps_in_it_is_taken(tmp_path, name):
    directory = RunDirectory(tmp_path)
    directory.write_config(tiny_config("org/model", tmp_path, "rows.jsonl"))
    directory.update_report({"synthetic": False})
    directory.require_free()  # a run that failed before its first step leaves this; nothing of worth is lost
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"--output {tmp_path}: holds a run already \({name} is there\)"):
        directory.require_free()


def test_an_adapter_whose_checkpoints_were_removed_is_not_written_over(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.require_no_result()  # nothing is there yet
    directory.checkpoints.mkdir()
    directory.adapter.mkdir()
    (directory.adapter / "adapter_model.safetensors").write_bytes(b"adapter")
    directory.update_report({"synthetic": False})
    directory.require_no_result()  # of a run that was killed in its first save
    message = f"--resume: {tmp_path} holds an adapter, but no checkpoint to go on from"
    directory.update_report({"saves_put_off": 0})  # a run that has ended has saved
    with pytest.raises(UserError, match=message):
        directory.require_no_result()
    directory.report.unlink()
    directory.checkpoints.rmdir()
    with pytest.raises(UserError, match=message):
        directory.require_no_result()


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=f"--output {path}: cannot be made: "):
            RunDirectory(path).create()


@pytest.mark.parametrize("output", ["taken", "taken/run"])
def test_a_directory_that_cannot_be_made_is_known_ahead(tmp_path, monkeypatch, output):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match=rf"--output {tmp_path}/{output}: cannot be made: {tmp_path}/taken is a file"):
        RunDirectory(tmp_path / output).require_free()
    RunDirectory(tmp_path / "some" / "run").require_free()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match=rf"cannot be made: {tmp_path} may not be written to; give another --output"):
        RunDirectory(tmp_path / "some" / "run").require_free()


@pytest.mark.parametrize("name", ["checkpoints", "adapter"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=f"{tmp_path / name}: expected a folder, found a file"):
        RunDirectory(tmp_path).create()


@pytest.mark.parametrize("line", [b"junk\n", b"{}\n", b'{"step": "1"}\n'])
def test_metrics_that_were_damaged_are_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n\n' + line
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"{path} line 3.*\. Without this line the run can go on"):
        MetricsFile(path, after_step=1)
    assert path.read_bytes() == content


def test_metrics_of_other_bytes_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\xff\n")
    with pytest.raises(UserError, match=f"{path}: expected JSON in UTF-8"):
        MetricsFile(path, after_step=1)


def test_a_directory_that_may_not_be_written_to_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # nothing is forbidden to root
    with pytest.raises(UserError, match=f"--output {tmp_path}: may not be written to"):
        RunDirectory(tmp_path).create()


def test_a_directory_has_one_run_at_a_time(tmp_path):
    path = tmp_path / "run"
    with RunDirectory(path).claimed():
        message = f"--output {path}: another run is writing there now"
        with pytest.raises(UserError, match=message), RunDirectory(path).claimed():
            pytest.fail("two runs have one directory")
    with RunDirectory(path).claimed():
        assert path.is_dir()


def test_half_written_files_are_removed_and_others_left(tmp_path):
    directory = RunDirectory(tmp_path)
    (tmp_path / "adapter").mkdir()
    ours = [".report.json.01ab.tmp", ".metrics.jsonl.01ab.tmp", "adapter/.adapter_model.safetensors.01ab.tmp"]
    others = ["notes.tmp", ".notes.01ab.tmp", "report.json"]
    for name in ours + others:
        (tmp_path / name).write_text("{}")
    directory.create()
    assert [name for name in ours + others if (tmp_path / name).exists()] == others


def test_options_that_were_not_recorded_are_their_defaults():
    """Those of a group too; what was recorded stays, also by a name that is no option any more."""
    recorded = {"learning_rate": 1e-3, "lora": {"rank": 4}, "gone": 1}
    completed = completed_options(recorded)
    assert (completed["embeddings"], completed["lora"]["use_dora"]) == ("none", False)
    assert (completed["learning_rate"], completed["lora"]["rank"], completed["gone"]) == (1e-3, 4, 1)
    assert completed_options({"lora": None})["lora"] is None
