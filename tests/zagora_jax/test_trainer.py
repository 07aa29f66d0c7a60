"""Training runs, seen from the outside: what they leave, what they say, what they never do."""

import errno
import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from oracles import load_peft, tiny_llama
from runs import recorder, tiny_config, write_rows

from models.lora import initial_adapter
from models.parameters import split
from zagora_jax import interruption, trainer
from zagora_jax import train as command
from zagora_jax.adapter import peft_tensors
from zagora_jax.base import BaseModel, open_base
from zagora_jax.checkpoints import run_state
from zagora_jax.checkpoints.known_models import KNOWN_MODELS
from zagora_jax.checkpoints.peft import read_adapter
from zagora_jax.checkpoints.run_state import SavedStates
from zagora_jax.checkpoints.source import open_checkpoint
from zagora_jax.config import TrainConfig
from zagora_jax.config_file import load_config
from zagora_jax.data.batches import Batches
from zagora_jax.errors import UserError
from zagora_jax.evaluation import Evaluation
from zagora_jax.interruption import Interrupted
from zagora_jax.option_groups import LoraConfig
from zagora_jax.run_directory import RunDirectory, read_metrics
from zagora_jax.trainer import TrainResult, train

COMPILATION = "/jax/core/compile/backend_compile_duration"


@dataclass
class Run:
    """A finished run and what was seen of it on the way."""

    config: TrainConfig
    result: TrainResult
    printed: str
    events: list[str]
    frozen: nnx.State
    frozen_before: list[bytes]

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.config.output)


def as_bytes(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    tiny_llama(folder / "model")
    write_rows(folder / "rows.jsonl", 11)
    write_rows(folder / "held_out.jsonl", 3, first=20)
    return folder


def configure(folder, output, **options):
    return tiny_config(folder / "model", output, folder / "rows.jsonl", **options)


@pytest.fixture(scope="module")
def run(folder):
    """Two epochs of 3 steps each, the third with 3 rows in place of 4; every step saved, every second evaluated."""
    config = configure(
        folder,
        folder / "run",
        lora=LoraConfig(rank=4, dropout=0.1),
        epochs=2,
        eval_data=[folder / "held_out.jsonl"],
        eval_every=2,
        save_every=1,
        keep_checkpoints=6,
        log_every=4,
    )
    events, frozen, before = [], [], []
    take_step, load = trainer._Run._step, BaseModel.load

    def observed_step(self, step, state, number):
        events.append("step")
        return take_step(self, step, state, number)

    def observed_load(self, on_tensor, **options):
        frozen.append(load(self, on_tensor, **options))
        before.extend(as_bytes(frozen[0]))
        return frozen[0]

    listening = [True]
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **__: events.append("compilation") if name == COMPILATION and listening else None
    )
    reporter, printed = recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer._Run, "_step", observed_step)
        patch.setattr(BaseModel, "load", observed_load)
        result = train(config, reporter)
    listening.clear()
    return Run(config, result, printed(), events, frozen[0], before)


def test_the_step_is_compiled_once(run):
    """Over epochs, short windows, evaluations and saves."""
    first_step = run.events.index("step")
    assert "compilation" in run.events[:first_step]
    assert run.events[first_step:] == ["step"] * 6


def test_metrics_have_every_step_whatever_the_console_shows(run):
    lines = read_metrics(run.directory.metrics)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    expected = {"step", "loss", "grad_norm", "learning_rate", "supervised_tokens", "tokens_per_second", "seconds"}
    expected |= {"peak_memory_gib", "finite"}
    for line in lines:
        assert line.keys() - {"eval_loss"} == expected
        assert all(line[name] > 0 for name in expected)
    # cosine without warm-up
    rates = [run.config.learning_rate * (1 + np.cos(np.pi * step / 6)) / 2 for step in range(6)]
    assert [line["learning_rate"] for line in lines] == pytest.approx(rates, rel=1e-5)
    # every epoch supervises the same tokens
    tokens = [line["supervised_tokens"] for line in lines]
    assert sum(tokens[:3]) == sum(tokens[3:])
    shown = [line.split("  ")[0] for line in run.printed.splitlines() if line.startswith("step ")]
    assert shown == ["step 4/6", "step 6/6"]


def test_evaluations_are_reported(run):
    report = run.directory.read_report()
    assert run.result == TrainResult(run.directory.path, 6, report["loss_before"], report["loss_after"])
    assert report["loss_after"] < report["loss_before"]
    assert report["eval_supervised_tokens"] > 0
    evaluated = {line["step"]: line["eval_loss"] for line in read_metrics(run.directory.metrics) if "eval_loss" in line}
    assert evaluated.keys() == {2, 4}
    assert report["loss_after"] < evaluated[4] < evaluated[2] < report["loss_before"]


def test_the_base_never_changes(run):
    assert len(run.frozen_before) > 10
    assert as_bytes(run.frozen) == run.frozen_before


def test_the_config_is_written_in_full(run):
    assert load_config(TrainConfig, run.directory.config) == run.config


def test_the_report_names_model_and_versions(run, folder):
    report = json.loads(run.directory.report.read_text())
    assert report["model_fingerprint"] == open_checkpoint(str(folder / "model")).fingerprint()
    assert report["synthetic"] is False
    assert report["versions"]["jax"] == jax.__version__
    assert "14 modules: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in report["facts"]["adapted"]
    assert report["planned_memory_gib"] > 0


def test_nothing_else_is_left(run):
    assert {path.name for path in run.directory.path.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "report.json",
        "report.html",
        "layout.json",
        "checkpoints",
        "adapter",
    }
    assert {path.name for path in run.directory.checkpoints.iterdir()} == set("123456")
    assert {path.name for path in run.directory.adapter.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def adapter_of_step(run, step):
    base = open_base(run.config.model, quantization="nf4", dtype="float32", lora=run.config.lora)
    _, _, declared = split(base.model)
    states = SavedStates(run.directory.checkpoints)
    adapters = states.adapters(step, initial_adapter(declared, seed=0))
    return peft_tensors(base.model, adapters)


def test_every_adapted_module_learns_in_the_first_step(run):
    """AdamW moves a weight if and only if its gradient is not zero."""
    tensors = adapter_of_step(run, 1)
    moved = [name for name, tensor in tensors.items() if ".lora_B." in name and tensor.any()]
    assert len(moved) == 14
    assert len(tensors) == 28


def test_the_adapter_is_that_of_the_last_step_and_loads_in_peft(run):
    tensors, config = read_adapter(run.directory.adapter)
    last = adapter_of_step(run, 6)
    assert {name: tensor.tobytes() for name, tensor in tensors.items()} == {
        name: tensor.tobytes() for name, tensor in last.items()
    }
    assert config.base_model_name_or_path == run.config.model

    pytest.importorskip("torch")
    network = load_peft(Path(run.config.model), run.directory.adapter)
    loaded = {name: parameter for name, parameter in network.named_parameters() if ".lora_" in name}
    assert len(loaded) == 28
    for name, parameter in loaded.items():
        assert np.array_equal(parameter.detach().numpy(), tensors[name.replace(".default", "")])


def test_the_command_ends_with_losses_and_the_adapter(run, capsys):
    command.main(run.config.model_copy(update={"resume": True}))
    printed = " ".join(capsys.readouterr().out.split())
    assert f"eval loss {run.result.loss_before:.4f} before, {run.result.loss_after:.4f} after" in printed
    assert "finished already" in printed


def test_float16_with_8_bit_moments_and_packing_trains(folder, tmp_path):
    """Max-steps goes before epochs; after the first step of the warm-up, whose rate is 0, B is zero and saved."""
    config = configure(
        folder,
        tmp_path / "run",
        lora=LoraConfig(rank=32, targets=["down_proj"]),
        optimizer="adamw_8bit",
        packing=True,
        compute_dtype="float16",
        max_steps=8,
        epochs=1,
        warmup_steps=1,
        save_every=1,
    )
    train(config, recorder()[0])
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[0]["learning_rate"] == 0
    assert all(line["finite"] and line["loss_scale"] >= 1 for line in lines)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]


def test_an_interrupted_command_says_how_to_go_on(folder, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(trainer, "train", interrupted)
    with pytest.raises(Interrupted):
        command.main(configure(folder, tmp_path / "run"))
    assert "the same command with --resume goes on" in " ".join(capsys.readouterr().out.split())


# --- The loop around a step that is made up ---------------------------------------------------------------------------


@pytest.fixture
def made_up(monkeypatch):
    """Sets what each step returns in place of computing anything."""

    def make_up(results):
        results = iter(results)

        def step(state, _frozen, batch):
            finite, scale, *others = next(results)
            if isinstance(finite, Exception):
                raise finite
            numbers = {
                "loss": np.float32(1.0 if finite else np.nan),
                "grad_norm": np.float32(1.0 if finite else np.inf),
                "learning_rate": np.float32(0.1),
                "supervised_tokens": batch.weights.sum(),
                "finite": np.bool_(finite),
            }
            numbers |= {} if scale is None else {"loss_scale": np.float32(scale)}
            numbers |= others[0] if others else {}
            return state._replace(step=state.step + 1), numbers

        step.finish = lambda state: (state, {})
        step.planned_memory = lambda: dict.fromkeys(jax.devices(), 0)
        monkeypatch.setattr(trainer._Run, "_compile_step", lambda *_: step)

    return make_up


def test_a_run_that_diverges_is_stopped(folder, tmp_path, made_up):
    made_up([(True, None)] + [(False, None)] * 5)
    config = configure(folder, tmp_path / "run", max_steps=20, save_every=2)
    reporter, printed = recorder()
    with pytest.raises(UserError, match=r"step 6: loss or gradients were not finite, .* in 5 steps in a row"):
        train(config, reporter)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["loss"] for line in lines] == [1.0, *[None] * 5]
    assert SavedStates(tmp_path / "run" / "checkpoints").steps() == [1]  # none of those that were due since
    rows = lines[1]["rows"]
    assert len(rows) == 4
    assert all(re.fullmatch(rf"{folder}/rows.jsonl, line \d+", row) for row in rows)
    found = re.search(
        rf"step 2: loss or .*: its update is left out .* Its rows: {folder}/rows.jsonl, lines (.*)", printed()
    )
    said = [range(int(run.split("-")[0]), int(run.split("-")[-1]) + 1) for run in found[1].split(", ")]
    assert sorted(line for run in said for line in run) == sorted(int(row.split()[-1]) for row in rows)


def test_single_skipped_steps_are_no_divergence_and_are_counted(folder, tmp_path, made_up):
    """Also over a resumption; a state that is due amid them is saved after them."""
    bad, good = (False, None), (True, None)
    made_up([good, *[bad] * 4, good, bad, bad, good])
    config = configure(folder, tmp_path / "run", max_steps=9, save_every=4, keep_checkpoints=9, schedule="constant")
    train(config, recorder()[0])
    assert SavedStates(tmp_path / "run" / "checkpoints").steps() == [1, 6, 9]
    made_up([bad, good])
    train(config.model_copy(update={"max_steps": 11, "resume": True}), recorder()[0])
    assert RunDirectory(tmp_path / "run").read_report()["skipped_updates"] == 7


@pytest.mark.parametrize(("action", "message"), [("skip", "in 5 steps in a row"), ("stop", "step 2: .* is stop")])
def test_a_spike_is_named_and_skipped_or_ends_the_run(folder, tmp_path, made_up, action, message):
    spike = (True, None, {"loss": np.float32(9), "spike": np.bool_(True), "usual_loss": np.float32(1.5)})
    made_up([(True, None), *[spike] * 5])
    options = {"loss_spike_factor": 4.0, "loss_spike_action": action, "max_steps": 20, "save_every": 1}
    reporter, printed = recorder()
    with pytest.raises(UserError, match=message):
        train(configure(folder, tmp_path / "run", **options), reporter)
    assert "step 2: the loss 9 is a spike, usual is 1.5: its update is left out (1 in a row, 1 in all)" in printed()
    assert SavedStates(tmp_path / "run" / "checkpoints").steps() == [1]


def test_an_evaluation_that_a_signal_breaks_off_is_made_up_for(folder, tmp_path, made_up, monkeypatch):
    calls = []

    def evaluate(*_):
        calls.append(None)
        if len(calls) == 2:  # the first is that before the first step
            signal.raise_signal(signal.SIGTERM)
            interruption.check()
        return Evaluation(1.5, 10)

    monkeypatch.setattr(trainer, "compile_sets", lambda *_: evaluate)
    options = {"max_steps": 6, "eval_data": [folder / "held_out.jsonl"], "eval_every": 2}
    made_up([(True, None)] * 6)
    config = configure(folder, tmp_path / "run", **options)
    with pytest.raises(Interrupted, match="SIGTERM"):
        train(config, recorder()[0])
    assert ["eval_loss" in line for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [False, False]
    assert SavedStates(tmp_path / "run" / "checkpoints").steps() == [1, 2]
    made_up([(True, None)] * 4)
    train(config.model_copy(update={"resume": True}), recorder()[0])
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line.get("eval_loss") for line in lines] == [None, 1.5, None, 1.5, None, None]
    assert RunDirectory(tmp_path / "run").read_report()["loss_after"] == 1.5


def test_a_device_that_fails_ends_the_run_and_what_was_saved_stands(folder, tmp_path, made_up):
    failure = jax.errors.JaxRuntimeError("INTERNAL: the device was lost\nand much more")
    made_up([(True, None)] * 3 + [(failure, None)])
    config = configure(folder, tmp_path / "run", max_steps=6, save_every=3)
    message = rf"step 4: a device failed: INTERNAL: the device was lost. The steps up to .* {tmp_path}/run/checkpoints"
    with pytest.raises(UserError, match=message):
        train(config, recorder()[0])
    made_up([(True, None)] * 3)
    train(config.model_copy(update={"resume": True}), recorder()[0])
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_memory_that_runs_out_is_told_with_what_takes_less(folder, tmp_path, made_up, monkeypatch):
    failure = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.")
    made_up([(True, None)] * 3 + [(failure, None)])
    config = configure(folder, tmp_path / "run", max_steps=6, save_every=3)
    message = r"step 4: the memory of a device ran out: .* --optimizer adamw_8bit, .*/checkpoints, stand: .*--resume"
    with pytest.raises(UserError, match=message):
        train(config, recorder()[0])

    def fail(*_):
        raise failure

    monkeypatch.setattr(trainer, "load_weights", fail)  # ahead of any step
    with pytest.raises(UserError, match=r"^the memory of a device ran out: .* --optimizer adamw_8bit"):
        train(configure(folder, tmp_path / "other"), recorder()[0])


def test_rows_that_cannot_be_read_ahead_end_the_run_and_what_was_saved_stands(folder, tmp_path, made_up, monkeypatch):
    """Batches are made by a thread of their own."""
    at = Batches.at

    def failing(self, step):
        if step >= 3:
            raise RuntimeError("the rows are gone")
        return at(self, step)

    made_up([(True, None)] * 9)
    monkeypatch.setattr(Batches, "at", failing)
    with pytest.raises(RuntimeError, match="the rows are gone"):
        train(configure(folder, tmp_path / "run", max_steps=9, save_every=5), recorder()[0])
    states = SavedStates(tmp_path / "run" / "checkpoints")
    states.check(3)
    assert states.steps() == [1, 3]  # the last finished step is saved before the end


@pytest.mark.parametrize("lost", ["moved", "replaced"])
def test_a_run_directory_that_vanishes_is_named(folder, tmp_path, made_up, monkeypatch, lost):
    take_step = trainer._Run._step

    def step(self, step, state, number):
        if number == 3:
            while not (tmp_path / "run" / "checkpoints" / "1").is_dir():
                time.sleep(0.01)
            (tmp_path / "run").rename(tmp_path / "moved")
            if lost == "replaced":
                (tmp_path / "run").mkdir()
        return take_step(self, step, state, number)

    monkeypatch.setattr(trainer._Run, "_step", step)
    made_up([(True, None)] * 9)
    with pytest.raises(UserError, match=f"{tmp_path}/run: the run directory was moved or removed during the run"):
        train(configure(folder, tmp_path / "run", max_steps=9, save_every=4), recorder()[0])
    assert SavedStates(tmp_path / "moved" / "checkpoints").steps() == [1]
    assert not list((tmp_path / "run").glob("*"))


def test_a_run_directory_that_vanishes_amid_a_save_is_named(folder, tmp_path, made_up, monkeypatch):
    prove = run_state._prove

    def moved(folder, items):
        (tmp_path / "run").rename(tmp_path / "moved")
        prove(folder, items)

    monkeypatch.setattr(run_state, "_prove", moved)
    made_up([(True, None)] * 9)
    with pytest.raises(UserError, match=f"{tmp_path}/run: the run directory was moved or removed during the run"):
        train(configure(folder, tmp_path / "run", max_steps=9), recorder()[0])
    assert not (tmp_path / "run").exists()


def test_a_loss_scale_may_be_searched_for_until_it_is_one(folder, tmp_path, made_up):
    made_up([(False, 2.0**scale) for scale in range(15, -1, -1)])
    config = configure(folder, tmp_path / "run", max_steps=20, compute_dtype="float16")
    with pytest.raises(UserError, match=r"step 16: .* in 16 steps in a row"):
        train(config, recorder()[0])


def test_max_steps_goes_before_epochs(folder, tmp_path, made_up):
    made_up([(True, None)] * 10)
    assert train(configure(folder, tmp_path / "short", max_steps=1, epochs=3), recorder()[0]).steps == 1
    assert train(configure(folder, tmp_path / "long", max_steps=5, epochs=1), recorder()[0]).steps == 5


def test_a_window_larger_than_the_epoch_is_a_step(folder, tmp_path, made_up):
    """11 rows, 32 a step: a step an epoch."""
    made_up([(True, None)] * 2)
    config = configure(folder, tmp_path / "run", gradient_accumulation_steps=16, epochs=2)
    assert train(config, recorder()[0]).steps == 2


def test_warm_up_must_fit_in_the_run(folder, tmp_path):
    with pytest.raises(UserError, match="warmup-steps: expected 0 to the run's 3 optimizer steps, found 7"):
        train(configure(folder, tmp_path / "run", warmup_steps=7), recorder()[0])
    assert not (tmp_path / "run").exists()


def test_an_output_that_cannot_be_made_is_named(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"--output {tmp_path}/file/run: cannot be made"):
        train(configure(folder, tmp_path / "file" / "run"), recorder()[0])


def test_a_full_disk_is_named_and_resumed_from(folder, tmp_path, made_up, monkeypatch):
    def full(*_args, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "run" / "adapter"))

    made_up([(True, None)] * 3)
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "save_adapter", full)
        message = f"{tmp_path}/run/adapter: No space left on device. What was saved .* with --resume goes on"
        with pytest.raises(UserError, match=message):
            train(configure(folder, tmp_path / "run"), recorder()[0])
    made_up([(True, None)] * 3)
    train(configure(folder, tmp_path / "run", resume=True), recorder()[0])
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3


def test_resuming_without_a_saved_step_says_so_and_begins(folder, tmp_path, made_up):
    made_up([(True, None)] * 3)
    reporter, printed = recorder()
    train(configure(folder, tmp_path / "run", resume=True), reporter)
    assert f"{tmp_path}/run: no step was saved here yet, so this run begins at the first one" in printed()
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3


def test_a_synthetic_run_says_so(tmp_path, made_up, monkeypatch):
    made_up([(True, None)])
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "vocab_size": 256}
    monkeypatch.setitem(KNOWN_MODELS, "tiny", KNOWN_MODELS["smollm2-135m"] | small | {"num_key_value_heads": 1})
    config = TrainConfig(
        model="synthetic:tiny?layers=1",
        output=tmp_path / "run",
        max_steps=1,
        sequence_length=16,
        gradient_accumulation_steps=1,
        compute_dtype="float32",
    )
    reporter, printed = recorder()
    train(config, reporter)
    assert "SYNTHETIC" in printed()
    assert RunDirectory(config.output).read_report()["synthetic"] is True
    with pytest.raises(UserError, match="random tokens have no end"):
        train(config.model_copy(update={"max_steps": None, "output": tmp_path / "other"}), reporter)


def test_compression_without_anybody_to_send_to_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="--gradient-compression int8: one device has nobody to send gradients to"):
        train(configure(folder, tmp_path / "run", gradient_compression="int8"), recorder()[0])
    assert not (tmp_path / "run").exists()
