import json
import subprocess
import sys

import pytest
from checkpoint_builders import write_folder
from oracles import tiny_llama
from runs import write_pairs, write_rows

from zagora_jax import checking
from zagora_jax.checking import check
from zagora_jax.command_line import parse
from zagora_jax.commands import CheckConfig
from zagora_jax.errors import UserError


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    tiny_llama(folder / "model")
    write_rows(folder / "rows.jsonl", 11)
    return folder


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setattr(checking, "installed_gpus", list)


def configure(world, *arguments, data=None, **options):
    given = {"output": world / "run", "sequence_length": 96} | options
    texts = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    return parse(CheckConfig, [str(world / "model"), str(data or world / "rows.jsonl"), *arguments, *texts])


def found(report, level):
    return {finding.subject: finding.message for finding in report.findings if finding.level == level}


def test_a_sound_training_passes(world):
    report = check(configure(world, micro_batch_size=2, gradient_accumulation_steps=2, epochs=3))
    assert report.passed
    assert not report.findings
    facts = json.loads(json.dumps(report.to_json()))["facts"]
    assert facts["tokenizer"]["answers_end_with"] == "<|im_end|>"
    assert facts["tokenizer"]["generation_stops_at"] == ["<|im_end|>"]
    assert (facts["data"]["rows"], facts["data"]["kept"], facts["data"]["complete"]) == (11, 11, True)
    assert facts["data"]["supervised_tokens"] > 0
    assert facts["steps"] == {"sequence_width": 64, "optimizer_steps": 9}
    assert facts["memory"]["estimated_gib_a_device"] > 0
    assert not (world / "run").exists()


def test_what_is_wrong_with_one_thing_does_not_hide_the_others(world, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": 3}\n')
    (tmp_path / "adapter").mkdir()
    config = configure(world, eval_data=bad, output=tmp_path, warmup_steps=5)
    report = check(config)
    assert not report.passed
    errors = found(report, "error")
    assert "line 2, field text: expected a string, found the number 3" in errors["eval data"]
    assert "holds a run already (adapter is there)" in errors["output"]
    assert "warmup-steps: expected 0 to the run's 2 optimizer steps, found 5" in errors["steps"]
    assert report.facts["data"]["kept"] == 11


def test_a_model_that_cannot_be_opened_leaves_the_rest(world, tmp_path):
    model = tiny_llama(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"")
    report = check(parse(CheckConfig, [str(model), str(world / "rows.jsonl"), "--mesh.fsdp", "2"]))
    assert "no safetensors file" in found(report, "error")["model"]
    assert report.facts["devices"]["mesh"] == {"fsdp": 2}
    assert "data" not in report.facts  # there is no tokenizer to read it with


def test_warnings_of_the_readers_are_part_of_the_report(world, tmp_path, caplog):
    model = tiny_llama(tmp_path / "model", eos_token_id=5)
    report = check(parse(CheckConfig, [str(model), str(world / "rows.jsonl"), "--output", str(tmp_path / "run")]))
    assert report.passed
    (warning,) = report.findings  # the tokenizer is asked several times, and read once
    assert (warning.level, warning.subject) == ("warning", "tokenizer")
    assert "config.json says eos_token_id 5, the tokenizer" in warning.message
    assert not caplog.records


def test_rows_that_deserve_a_look(world, tmp_path):
    rows = tmp_path / "rows.jsonl"
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "word " * 100}]}
    rows.write_text("".join(json.dumps(row) + "\n" for _ in range(5)) + '{"text": ""}\n')
    arguments = [str(world / "model"), str(rows), "--max-left-out", "0.5", "--sequence-length", "64"]
    report = check(parse(CheckConfig, [*arguments, "--output", str(tmp_path / "run")]))
    messages = [finding.message for finding in report.findings]
    assert report.passed
    assert any("rows cut off at sequence_length 64: 5 (" in message for message in messages)
    assert f"rows without a supervised token are left out: 1 ({rows}, line 6)" in messages


def test_the_first_rows_are_read_and_the_report_says_so(world):
    report = check(configure(world, rows=4))
    assert report.facts["data"]["rows"] == 4
    assert "only the first 4 rows of each source were read; --rows 0 reads all" in found(report, "warning")["data"]
    assert "optimizer_steps" not in report.facts["steps"]  # not known from a part
    assert check(configure(world, rows=0)).facts["steps"]["optimizer_steps"] == 2


@pytest.mark.parametrize(
    ("options", "doubt"),
    [
        ({}, "3 of 4 rows (75.0%) have no supervised token within the sequence length"),
        ({"sequence_length": 8}, "no row is left to train on"),
        ({"eval_fraction": 0.999999}, "eval_fraction leaves none of the 4 rows for this part"),
        ({"eval_fraction": 0.000001}, "eval_fraction leaves none of the 4 rows for this part"),
        ({"data_weights": 0.1}, None),  # rounds to no row of four
    ],
)
def test_what_only_the_rows_that_were_not_read_can_tell_is_no_error(world, tmp_path, options, doubt):
    rows = tmp_path / "rows.jsonl"
    bad = {"messages": [{"role": "user", "content": "Hi"}]} if doubt and "3 of 4" in doubt else None
    good = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good morning."}]}
    written = [good] + 3 * [bad or good] + 36 * [good]  # 3 of all 40 are less than a tenth
    rows.write_text("".join(json.dumps(row) + "\n" for row in written))
    options = {"output": tmp_path / "run"} | options
    texts = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    report = check(parse(CheckConfig, [str(world / "model"), str(rows), "--rows", "4", *texts]))
    assert report.passed
    warnings = [finding.message for finding in report.findings]
    doubts = [warning for warning in warnings if "if the rows that were not read are alike" in warning]
    assert (len(doubts), [doubt in found for found in doubts]) == ((1, [True]) if doubt else (0, []))
    assert any("only the first 4 rows of each source were read" in warning for warning in warnings)


def test_what_the_system_refuses_is_a_finding(world):
    report = check(parse(CheckConfig, [str(world / "model"), "a text that is no name " * 40]))
    assert "File name too long" in found(report, "error")["data"]
    assert "memory" in report.facts


def test_gpus_that_are_here_are_counted_and_compared(world, monkeypatch):
    monkeypatch.setattr(checking, "installed_gpus", lambda: [24 * 2**30] * 3)
    report = check(configure(world))
    assert report.passed
    assert report.facts["devices"] == {"gpus": 3, "mesh": {"fsdp": 3}}
    monkeypatch.setattr(checking, "installed_gpus", lambda: [2**16])
    assert "a step needs about" in found(check(configure(world)), "error")["memory"]
    monkeypatch.setattr(checking, "installed_gpus", lambda: [24 * 2**30] * 2)
    report = check(configure(world, "--strategy", "layerwise"))
    assert report.passed
    assert report.facts["devices"]["mesh"] == {"stage": 2}
    assert report.facts["memory"]["estimated_gib_a_device"] > 0
    report = check(configure(world, "--mesh.fsdp", "4"))
    assert found(report, "error")["devices"] == "--mesh.fsdp 4: needs 4 devices, but there are 2: 2 GPUs"


def test_rows_beyond_the_models_context(tmp_path):
    model = tiny_llama(tmp_path / "model", max_position_embeddings=32)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "word " * 20}))
    report = check(parse(CheckConfig, [str(model), str(rows), "--output", str(tmp_path / "run")]))
    assert "rows have up to 128 tokens, but the model's context is 32" in found(report, "warning")["data"]


def test_a_synthetic_model_has_no_rows(tmp_path):
    report = check(
        parse(CheckConfig, ["synthetic:llama-3.2-1b", "--max-steps", "3", "--output", str(tmp_path / "run")])
    )
    assert report.passed
    assert report.facts["memory"]["estimated_gib_a_device"] > 0.5


def test_the_places_on_the_command_line(tmp_path):
    (tmp_path / "run.yaml").write_text("model: base\ndata: a.jsonl\n")
    config = parse(CheckConfig, [str(tmp_path / "run.yaml"), "--rows", "3"])
    assert (config.model, config.data, config.rows) == ("base", ["a.jsonl"], 3)
    assert parse(CheckConfig, ["base", "a.jsonl,b.jsonl", "--json"]).data == ["a.jsonl", "b.jsonl"]
    assert parse(CheckConfig, ["base"]).data is None
    for arguments, message in (
        (["base", "a", "b"], "unexpected argument b"),
        (["base", "--model", "other"], "model is given twice: base and other"),
        ([], "model is required"),
    ):
        with pytest.raises(UserError, match=message):
            parse(CheckConfig, arguments)


def test_the_command(world, tmp_path):
    command = [sys.executable, "-m", "zagora_jax.check", str(world / "model"), str(world / "rows.jsonl")]
    result = subprocess.run(
        [*command, "--output", str(tmp_path / "run"), "--json"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["passed"] is True
    write_folder(tmp_path / "bare")  # a model without a tokenizer
    result = subprocess.run(
        [*command[:3], str(tmp_path / "bare"), *command[4:]], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "error: tokenizer: " in result.stdout
    assert "holds no tokenizer" in result.stdout
    assert "failed: 1 errors" in result.stdout


PAIRS = {"retrieval.pooling": "last", "retrieval.hard_negatives": 1, "micro_batch_size": 2}


def test_pairs_for_an_embedder_are_looked_at(world, tmp_path):
    rows, held_out = write_pairs(tmp_path / "pairs.jsonl", 24), write_pairs(tmp_path / "held_out.jsonl", 5)
    report = check(configure(world, data=rows, eval_data=held_out, gradient_accumulation_steps=3, **PAIRS))
    assert report.passed
    facts = json.loads(json.dumps(report.to_json()))["facts"]
    assert (facts["data"]["pairs"], facts["data"]["texts"], facts["data"]["complete"]) == (24, 72, True)
    assert (facts["eval_data"]["pairs"], facts["eval_data"]["texts"]) == (5, 10)
    assert facts["steps"]["optimizer_steps"] == 4
    of_one = check(configure(world, data=rows, **PAIRS | {"retrieval.hard_negatives": 0})).facts["memory"]
    assert facts["memory"]["estimated_gib_a_device"] >= of_one["estimated_gib_a_device"]

    short = check(configure(world, "--rows", "7", data=rows, **PAIRS | {"sequence_length": 12}))
    assert short.facts["data"]["pairs"] == 7
    assert "optimizer_steps" not in short.facts["steps"]
    messages = [finding.message for finding in short.findings]
    assert any(message.startswith("texts cut off at sequence_length 12: ") for message in messages)
    assert any("only the first 7 rows" in message for message in messages)


def test_a_wrong_pair_is_a_finding(world, tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"query": "a", "positive": "b"}\n{"query": "a"}\n')
    report = check(configure(world, data=tmp_path / "pairs.jsonl", **{"retrieval.pooling": "mean"}))
    assert "pairs.jsonl, line 2: expected the keys query and positive" in found(report, "error")["data"]


def test_every_set_of_held_out_rows_is_looked_at(world, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": 3}\n')
    report = check(configure(world, eval_sets=f"good={world / 'rows.jsonl'},bad={tmp_path / 'bad.jsonl'}"))
    assert report.facts["eval_set_good"]["rows"] == 11
    assert "bad.jsonl, line 1" in found(report, "error")["eval set bad"]
