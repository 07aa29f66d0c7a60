"""The command line: precedence, spellings, refusals, exit statuses, help."""

import signal
import sys
from pathlib import Path

import pytest

from zagora_jax.command_line import help_text, parse, run_command
from zagora_jax.commands import COMMANDS, ExportConfig, GenerateConfig
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.options import options_of

BASE = ["--model", "base", "--data", "rows.jsonl"]


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text("model: base\ndata: rows.jsonl\nepochs: 3\nseed: 7\nmax_steps: 9\nlora: {rank: 4, alpha: 5}\n")
    return str(path)


def test_the_command_line_goes_before_the_file_and_that_before_the_defaults(config_file):
    config = parse(TrainConfig, ["--epochs", "2", config_file, "--lora.rank", "8", "--max-steps", "null"])
    assert (config.epochs, config.seed, config.save_every, config.max_steps) == (2, 7, 100, None)
    assert (config.lora.rank, config.lora.alpha, config.lora.dropout) == (8, 5, 0.0)


@pytest.mark.parametrize(
    "spelling",
    [["--lora.use-rslora"], ["--lora.use_rslora", "true"], ["--lora.use-rslora=true"], ["--lora.use_rslora=True"]],
)
def test_spellings(spelling):
    assert parse(TrainConfig, BASE + spelling).lora.use_rslora is True


@pytest.mark.parametrize(
    ("arguments", "packing"),
    [
        (["--packing"], True),
        (["--packing", "true"], True),
        (["--packing", "false"], False),
        (["--packing=false"], False),
    ],
)
def test_a_boolean_option_alone_means_true(config_file, arguments, packing):
    assert parse(TrainConfig, BASE + arguments).packing is packing
    assert parse(TrainConfig, [*arguments, config_file]).packing is packing  # the file is not taken for the value
    assert parse(TrainConfig, [config_file, *arguments, "--epochs", "2"]).packing is packing


@pytest.mark.parametrize(
    ("arguments", "resume"),
    [
        (["--resume"], True),
        (["--resume", "true"], True),
        (["--resume", "false"], False),
        (["--resume", "runs/x/checkpoints/5"], Path("runs/x/checkpoints/5")),
        (["--resume", "5"], Path("5")),
        (["--resume", "--packing"], True),
    ],
)
def test_resume_is_a_boolean_or_a_path(config_file, arguments, resume):
    assert parse(TrainConfig, [*arguments, *BASE]).resume == resume
    assert parse(TrainConfig, [*arguments, config_file]).resume == resume


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("a", ["a"]),
        ("2024", ["2024"]),
        ("a,b", ["a", "b"]),
        ("a, b", ["a", "b"]),
        ("[a, 'b,c']", ["a", "b,c"]),
        ("'a,b'", ["a,b"]),
        ('["a"]', ["a"]),
    ],
)
def test_lists(text, paths):
    assert parse(TrainConfig, ["--model", "base", "--data", text]).data == paths


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("all-linear", "all-linear"),
        ("q_proj", "q_proj"),
        ("q_proj,v_proj", ["q_proj", "v_proj"]),
        ("[q_proj]", ["q_proj"]),
        (r".*self_attn\.(q|v)_proj", r".*self_attn\.(q|v)_proj"),
        (r"'.*\.\d{1,2}\..*q_proj'", r".*\.\d{1,2}\..*q_proj"),
    ],
)
def test_adapter_targets(text, targets):
    assert parse(TrainConfig, [*BASE, "--lora.targets", text]).lora.targets == targets


def test_an_option_that_takes_a_list_takes_one_value_too():
    for option, text, expected in (
        ("modules_to_save", "embed_tokens", ["embed_tokens"]),
        ("rank_pattern", "down_proj=2", ["down_proj=2"]),
        ("alpha_pattern", "down_proj=2.5", ["down_proj=2.5"]),
        ("layers", "3", [3]),
        ("layers", "3,4", [3, 4]),
    ):
        assert getattr(parse(TrainConfig, [*BASE, f"--lora.{option}", text]).lora, option) == expected
    assert parse(TrainConfig, [*BASE, "--eval-sets", "a=b.jsonl"]).eval_sets == ["a=b.jsonl"]


def test_texts_are_taken_as_they_are():
    for prompt in ["a, b: c", "[x]", "'q'", "yes", "12", "-x", "#"]:
        assert parse(GenerateConfig, ["runs/x", "--prompt", prompt]).prompt == prompt


def test_a_positional_option():
    for arguments in (["runs/x", "--to", "out"], ["--to", "out", "runs/x"], ["--to", "out", "--run", "runs/x"]):
        config = parse(ExportConfig, arguments)
        assert (config.run, config.to) == (Path("runs/x"), Path("out"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning-rte", "1"], r"^command line: unknown option --learning-rte; the nearest is --learning-rate$"),
        (["--lr", "1"], r"unknown option --lr; the nearest is --learning-rate$"),
        (["--rank", "1"], r"unknown option --rank; the nearest is --lora\.rank$"),
        (["--learning", "1"], r"unknown option --learning; the nearest is --learning-rate$"),  # no abbreviations
        (["--zzzz"], r"unknown option --zzzz; --help lists the options$"),
        (["-v"], r"unknown option -v"),
        (["-epochs", "1"], r"unknown option -epochs; the nearest is --epochs$"),
        (["--"], r"unknown option --"),
        (["--epochs"], r"--epochs: expected a value after it, found none$"),
        (["--epochs", "--packing"], r"--epochs: expected a value after it, found --packing; .* --epochs=VALUE$"),
        (["--epochs", "1", "--epochs=2"], r"^command line: --epochs is given twice: 1 and 2$"),
        (["--max-steps", "1", "--max_steps", "1"], r"--max-steps is given twice"),
        (["--epochs", "two"], r'^command line: --epochs: expected a whole number, found "two"$'),
        (["--epochs", ""], r'--epochs: expected a whole number, found ""$'),
        (["--learning-rate", "-1"], r"--learning-rate: expected more than 0.*, found -1$"),
        (["--packing", "yes"], r'--packing: expected true or false, found "yes"$'),
        (["--packing=maybe"], r'--packing: expected true or false, found "maybe"$'),
        (["--lora.dropout", "1.5"], r"--lora\.dropout: expected less than 1.*, found 1\.5$"),
        (["--lora.targets", "[a-z].*"], r"--lora\.targets: expected a YAML list or text, found \[a-z\]"),
        (["--output", ""], r'--output: expected a path, found ""$'),
        (["--eval-data", "a,"], r'--eval-data: expected a path or the name of a data set, found ""$'),
        (["--overlap", "5"], r"^overlap is 5 but long_rows is cut: only split has an overlap$"),
        (["--long-rows", "split", "--overlap", "2048"], r"^overlap \(2048\) must be below sequence_length \(2048\)$"),
        (["--eval-every", "5"], r"^eval_every is 5 but there is no eval_data"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        parse(TrainConfig, BASE + arguments)


def test_wrong_positionals(config_file):
    with pytest.raises(UserError, match=r"unexpected argument more\.yaml"):
        parse(TrainConfig, [config_file, "more.yaml"])
    with pytest.raises(UserError, match=r"absent\.yaml: .*No such file"):
        parse(TrainConfig, ["absent.yaml"])
    with pytest.raises(UserError, match="run is given twice: a and b"):
        parse(ExportConfig, ["a", "--run", "b", "--to", "c"])
    with pytest.raises(UserError, match="unexpected argument b"):
        parse(ExportConfig, ["a", "b", "--to", "c"])


def test_missing_options():
    with pytest.raises(UserError) as refused:
        parse(TrainConfig, [])
    assert str(refused.value).splitlines() == [
        "model is required: give --model on the command line, or model: in the YAML file",
    ]
    with pytest.raises(UserError, match=r"^run is required: give RUN on the command line$"):
        parse(ExportConfig, ["--to", "x"])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option(command, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(command, ["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed == help_text(command)
    words = printed.split()
    for option in options_of(command).values():
        assert (option.name.upper() if option.name == command.positional else option.flag) in words
    assert max(map(len, printed.splitlines())) <= 110


def test_help_shows_headings_defaults_and_values():
    text = help_text(TrainConfig)
    assert "usage: python -m zagora_jax.train [CONFIG.yaml] [--option value ...]" in text
    for heading in TrainConfig.headings.values():
        assert f"\n{heading}:\n" in text
    assert "--lora.rank N                 Rank of the two adapter matrices beside each targeted weight. [16]\n" in text
    assert "--quantization nf4|hqq|int8|none" in text


def run(monkeypatch, main, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["train", *BASE, *arguments])
    return run_command(TrainConfig, main)


def test_exit_statuses(monkeypatch, capsys):
    def refuse(config: TrainConfig) -> None:
        raise UserError("rows.jsonl:3: no text\nrows.jsonl:4: no text")

    def interrupt(config: TrainConfig) -> None:
        signal.raise_signal(signal.SIGTERM)

    seen: list[TrainConfig] = []
    assert run(monkeypatch, seen.append, "--epochs", "2") == 0
    assert seen[0].epochs == 2
    assert run(monkeypatch, lambda config: 3) == 3
    assert run(monkeypatch, seen.append, "--epochs", "0") == 2
    assert capsys.readouterr() == ("", "error: command line: --epochs: expected at least 1, found 0\n")
    assert run(monkeypatch, refuse) == 2
    assert capsys.readouterr() == ("", "error: rows.jsonl:3: no text\nrows.jsonl:4: no text\n")
    assert run(monkeypatch, lambda config: Path("/nowhere/at/all").read_text()) == 2
    assert capsys.readouterr() == ("", "error: /nowhere/at/all: No such file or directory\n")
    assert run(monkeypatch, interrupt) == 75
    assert capsys.readouterr() == ("", "SIGTERM: stopped; nothing is lost, nothing half written\n")
    with pytest.raises(ZeroDivisionError):  # a fault of ours keeps its traceback
        run(monkeypatch, lambda config: 1 // 0)
