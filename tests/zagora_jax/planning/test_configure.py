"""The command: what it prints, writes and refuses; and that train runs what it wrote."""

import io
import json
import re
import sys

import pytest
from oracles import tiny_llama
from rich.console import Console
from runs import write_rows

from zagora_jax import configure
from zagora_jax.command_line import parse, run_command
from zagora_jax.commands import ConfigureConfig
from zagora_jax.config import TrainConfig
from zagora_jax.config_file import load_config
from zagora_jax.planning import plot
from zagora_jax.planning.probe import report
from zagora_jax.trainer import train

FOUR_CARDS = ["--gpu", "rtx4090", "--gpu-count", "4", "--interconnect", "pcie", "--source", "analytic"]


def run(capsys, monkeypatch, *arguments) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["configure", *map(str, arguments)])
    status = run_command(ConfigureConfig, configure.main)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_the_plan_as_json(capsys, monkeypatch):
    status, printed, _ = run(capsys, monkeypatch, "--model-size", "70B", "--host-memory", 64, "--json", *FOUR_CARDS)
    plan = json.loads(printed)
    assert status == 0
    assert plan["fits"] is True
    assert (plan["strategy"], plan["source"]) == ("fsdp", "analytic")
    assert len(plan["devices"]) == 4
    card = plan["devices"][0]
    assert sum(card["parts_gib"].values()) == pytest.approx(card["peak_gib"], abs=0.05)
    assert card["limit_gib"] == pytest.approx(card["total_gib"] - card["context_gib"] - card["margin_gib"], abs=0.02)
    assert card["peak_gib"] < card["limit_gib"]
    assert {"weights", "lora", "optimizer", "activations", "gathered", "workspace"} <= card["parts_gib"].keys()
    assert card["parts_gib"]["weights"] == pytest.approx(
        70.55 * 0.516 / 4 / 1.0737, rel=0.12
    )  # embeddings have 16 bits
    assert plan["host_gib"] > 0
    assert plan["tokens_per_second"] > 0
    assert plan["settings"]["mesh.fsdp"] == 4
    assert plan["alternatives"]
    for settings in (plan["settings"], *(other["settings"] for other in plan["alternatives"])):
        assert (settings["embeddings"], settings["sequence_length"]) == ("none", 2048)


def test_the_plan_as_a_table(capsys, monkeypatch):
    status, printed, _ = run(capsys, monkeypatch, "--model-size", "70B", *FOUR_CARDS)
    assert status == 0
    assert printed.startswith("fits: llama-3.3-70b on 4 x NVIDIA GeForce RTX 4090, about ")
    assert sum(line.startswith("card ") for line in printed.splitlines()) == 4
    for word in (
        "weights",
        "LoRA",
        "optimizer",
        "workspace",
        "CUDA context",
        "margin",
        "longest sequence",
        "next best",
    ):
        assert word in printed


def test_what_does_not_fit_says_what_would_with_another_status(capsys, monkeypatch, tmp_path):
    written = tmp_path / "zagora.yaml"
    arguments = ["--model-size", "70B", "--gpu", "rtx4090", "--source", "analytic", "--output", written]
    arguments += ["--offload.weights", "none"]
    status, printed, _ = run(capsys, monkeypatch, *arguments)
    assert status == 1
    assert printed.startswith("does not fit: ")
    assert "too much" in printed
    assert re.search(r"^would fit: --gpu-count [23]$", printed, re.MULTILINE)
    assert not written.exists()


def test_too_little_host_memory_does_not_fit(capsys, monkeypatch):
    status, printed, _ = run(capsys, monkeypatch, "--model-size", "70B", "--host-memory", 4, "--json", *FOUR_CARDS)
    plan = json.loads(printed)
    assert (status, plan["fits"]) == (1, False)
    assert plan["host"]["shortages"][0].startswith("the host needs ")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--host-memory", "1e300", "at most 1048576.0"),
        ("--rows-per-step", 9 * 10**400, "at most 1048576"),
        ("--micro-batch-size", 10**400, "at most 1048576"),
        ("--epochs", 10**400, "at most 1048576"),
        ("--lora.rank", 10**400, "at most 65536"),
        ("--lora.alpha", 10**400, "at most 16777216"),
        ("--disk-gb-s", "1e-300", "at least 0.001"),
        ("--hourly-price", "1e300", "at most 1000000000.0"),
        ("--gpu-count", 65, "at most 64"),
    ],
)
def test_numbers_beyond_reason_are_refused(capsys, monkeypatch, option, value, expected):
    status, printed, error = run(capsys, monkeypatch, "--model-size", "8B", "--gpu", "rtx4090", option, value)
    assert (status, printed) == (2, "")
    assert f"{option}: expected {expected}, found " in " ".join(error.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configure")
    tiny_llama(folder / "model")
    write_rows(folder / "rows.jsonl", 11)
    return folder


def test_train_runs_what_configure_wrote(folder, capsys, monkeypatch, tmp_path):
    written = tmp_path / "zagora.yaml"
    status, printed, _ = run(
        capsys,
        monkeypatch,
        *("--model", folder / "model", "--data", folder / "rows.jsonl", "--output", written, "--hourly-price", 2),
        *("--sequence-length", 96, "--rows-per-step", 4, "--compute-dtype", "float32", "--lora.rank", 4, "--json"),
        *("--lora.targets", "[q_proj]", "--optimizer", "adamw"),
    )
    plan = json.loads(printed)
    assert (status, plan["source"], plan["devices"][0]["name"]) == (0, "compiled", "CPU")
    assert plan["data"]["rows"] == 11
    config = load_config(TrainConfig, written)
    assert written.read_text().startswith(
        "# Written by python -m zagora_jax.configure; run it with: python -m zagora_jax"
    )
    assert (config.sequence_length, config.lora.rank, config.device_memory_limit) == (96, 4, None)
    rows = config.micro_batch_size * config.gradient_accumulation_steps
    monkeypatch.chdir(tmp_path)
    result = train(config)
    assert result.steps == -(-11 // rows)
    # The plan is of the step that ran: rows were counted, so that its width is known.
    told = json.loads((result.run_directory / "report.json").read_text())["planned_memory_gib"]
    assert plan["devices"][0]["peak_gib"] == pytest.approx(told, abs=0.006)


def test_the_speed_of_alternatives_is_without_padding_too(capsys, monkeypatch, folder):
    options = ("--model", folder / "model", "--data", folder / "rows.jsonl", "--sequence-length", 96, "--json")
    card = ("--gpu", "rtx4090", "--gpu-count", 1, "--source", "analytic")
    status, printed, _ = run(capsys, monkeypatch, *options, *card)
    plan = json.loads(printed)
    speeds = [alternative["tokens_per_second"] for alternative in plan["alternatives"]]
    assert (status, len(speeds) > 0) == (0, True)
    assert max(speeds) <= plan["tokens_per_second"]


def test_a_size_without_weights_writes_a_trial(capsys, monkeypatch, tmp_path):
    written = tmp_path / "zagora.yaml"
    status, _, _ = run(capsys, monkeypatch, "--model-size", "8B", "--output", written, *FOUR_CARDS)
    assert status == 0
    config = load_config(TrainConfig, written)
    assert (config.model, config.max_steps) == ("synthetic:llama-3.1-8b", 20)
    assert 22.0 < config.device_memory_limit < 22.5
    assert "A trial on random weights" in written.read_text()


def test_a_streaming_plan_is_written_as_train_takes_it(capsys, monkeypatch, tmp_path):
    written = tmp_path / "zagora.yaml"
    arguments = ["--model-size", "70B", "--memory-per-gpu", "24", "--gpu-count", "1", "--host-memory", "64"]
    status, printed, _ = run(capsys, monkeypatch, *arguments, "--source", "analytic", "--json", "--output", written)
    plan, config = json.loads(printed), load_config(TrainConfig, written)
    assert (status, plan["strategy"]) == (0, "streaming")
    assert plan["settings"]["offload.weights"] == config.offload.weights != "none"
    assert 30 < plan["host"]["pinned_gib"] < 64
    assert config.strategy == "streaming"
    assert config.model == "synthetic:llama-3.3-70b"


def test_files_of_others_are_not_replaced(capsys, monkeypatch, tmp_path):
    written = tmp_path / "mine.yaml"
    written.write_text("model: mine\n")
    status, _, error = run(capsys, monkeypatch, "--model-size", "8B", "--output", written, *FOUR_CARDS)
    assert status == 2
    assert "was not written by configure" in error
    assert written.read_text() == "model: mine\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either model or model_size"),
        (["--model-size", "8B", "--model", "x"], "give either model or model_size"),
        (["--model-size", "8B", "--gpu-count=-1"], "--gpu-count: expected at least 1, found -1"),
        (["--model-size", "8B", "--memory-per-gpu", "0"], "--memory-per-gpu: expected more than 0.0, found 0"),
        (["--model-size", "llama-3.2-70b", *FOUR_CARDS], "no llama-3.2 of 70B was released"),
        (["--model-size=-7B", *FOUR_CARDS], "--model-size -7B: expected a size (70B) or a model"),
        (
            ["--model-size", "8B", "--gpu", "rtx3090", "--memory-per-gpu", "0.5"],
            "0.5: the CUDA context alone takes 0.6",
        ),
        (
            ["--model-size", "8B", "--gpu", "rtx3090", "--memory-per-gpu", "0.5", "--gpu-count", "2"],
            "0.5: CUDA context and NCCL's buffers alone take 1.0 GiB",
        ),
        (["--model-size", "8B", "--sequence-length", "99999999", *FOUR_CARDS], "--sequence-length: expected at most"),
        (["--model-size", "8B", "--offload.weights", "99", *FOUR_CARDS], "--offload.weights 99: the model has 32"),
        (["--model-size", "8B", "--data", "x.jsonl", *FOUR_CARDS], "--data: counting tokens needs the tokenizer"),
        (["--model-size", "8B", "--plot", "x.txt", *FOUR_CARDS], "--plot x.txt: expected a name that ends with .png"),
        (["--model-size", "8B", "--output", "no/x.yaml", *FOUR_CARDS], "the folder no does not exist"),
        (["--model-size", "8B", "--output", ".", *FOUR_CARDS], "--output .: is a folder; name a file in it"),
        (["--model-size", "8B", "--sequence-lenght", "4"], "the nearest is --sequence-length"),
    ],
)
def test_wrong_options_are_refused(arguments, message, capsys, monkeypatch):
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    status, _, error = run(capsys, monkeypatch, *arguments)
    assert status == 2
    assert message in error


def test_a_compiled_plan_without_a_compiler_is_refused(capsys, monkeypatch):
    def none(kind, count):
        raise ModuleNotFoundError("compiling for absent GPUs needs jax's CUDA plugin")

    monkeypatch.setattr("zagora_jax.planning.machine.absent_devices", none)
    arguments = ["--model-size", "8B", "--gpu", "rtx4090"]
    status, _, error = run(capsys, monkeypatch, *arguments, "--source", "compiled")
    assert status == 2
    assert "--source compiled: compiling for absent GPUs needs jax's CUDA plugin" in error
    status, printed, _ = run(capsys, monkeypatch, *arguments, "--json")
    assert status == 0
    assert json.loads(printed)["source"] == "analytic"


def test_the_picture(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    run(capsys, monkeypatch, "--model-size", "8B", "--plot", path, *FOUR_CARDS)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    status, _, error = run(capsys, monkeypatch, "--model-size", "8B", "--plot", "plan.png", *FOUR_CARDS)
    assert status == 2
    assert "--plot plan.png: needs matplotlib: install it with" in error


def test_a_boolean_option_can_be_switched_off():
    assert parse(TrainConfig, ["--model", "m", "--no-plan-check"]).plan_check is False
    assert parse(TrainConfig, ["--model", "m", "--no-packing"]).packing is False


def test_the_report_has_facts_and_no_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    facts = dict(report())
    assert facts["device 0"].startswith("cpu")
    assert {"zagora-jax", "python", "jax", "host memory", "driver", "compiles for absent GPUs"} <= facts.keys()
    assert facts["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert not any("secret" in value or "hidden" in value for value in facts.values())


def test_a_narrow_terminal_still_shows_the_bars():
    from zagora_jax.planning.plan import make_plan
    from zagora_jax.planning.show import show

    console = Console(file=io.StringIO(), width=80)
    show(make_plan(parse(ConfigureConfig, ["--model-size", "8B", *FOUR_CARDS]), print), console)
    assert sum(line.startswith("card ") for line in console.file.getvalue().splitlines()) == 4
