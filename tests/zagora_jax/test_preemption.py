"""SIGTERM to the command `train` itself: while it compiles, evaluates and saves, and twice."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from oracles import tiny_llama
from runs import compiled_once, recorder, tiny_config, write_rows

from zagora_jax.checkpoints.run_state import SavedStates
from zagora_jax.config_file import save_config
from zagora_jax.interruption import STOPPED
from zagora_jax.run_directory import read_metrics
from zagora_jax.trainer import train

STEPS = 6
WEIGHTS = Path("adapter/adapter_model.safetensors")
# The command, which sends itself SIGTERM: `seconds` after the `call`th call of `part` begins, and so often.
COMMAND = """
import functools, os, signal, sys, threading
from zagora_jax import evaluation_sets, interruption, trainer
from zagora_jax.checkpoints.run_state import StateWriter
from zagora_jax.command_line import run_command
from zagora_jax.config import TrainConfig
from zagora_jax.train import main

part, call, seconds, times = sys.argv.pop(1), *map(float, sys.argv.pop(1).split(","))
owner = {"_compile_step": trainer._Run, "totals": evaluation_sets, "save": StateWriter}[part]
function, calls = getattr(owner, part), []

def pre_empt():
    for _ in range(int(times)):
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(0.2)

@functools.wraps(function)
def begin(*args, **kwargs):
    calls.append(None)
    if len(calls) == call:
        threading.Timer(seconds, pre_empt).start()
        if part == "save":
            threading.Event().wait(seconds + 0.5 * times)  # a slow disk: the signal comes amid the save
    return function(*args, **kwargs)

setattr(owner, part, begin)
sys.exit(run_command(TrainConfig, main))
"""


class Ended(NamedTuple):
    status: int
    errors: str
    steps: list[int]  # that metrics tell of
    saved: list[int]  # whole


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, rows and compiled programs."""
    folder = tmp_path_factory.mktemp("preempted")
    tiny_llama(folder / "model")
    write_rows(folder / "rows.jsonl", 8)
    with compiled_once(folder / "compiled"):
        train(configure(folder, folder / "whole"), recorder()[0])
        yield folder


def configure(folder: Path, run: Path, **options):
    rows = folder / "rows.jsonl"
    given = {"max_steps": STEPS, "save_every": 2, "keep_checkpoints": STEPS, "eval_data": [rows], "eval_every": 2}
    return tiny_config(folder / "model", run, rows, **given | options)


def pre_empt(world: Path, run: Path, part: str, call: int, seconds: float = 0.0, times: int = 1, **options) -> Ended:
    config = world / f"{run.name}.yaml"
    save_config(configure(world, run, **options), config)
    compiled = world / ("compiled" if part != "_compile_step" else "nothing compiled")
    settings = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-c", COMMAND, part, f"{call},{seconds},{times}", str(config)]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120, check=False)
    metrics, states = run / "metrics.jsonl", SavedStates(run / "checkpoints")
    for step in states.steps():
        states.check(step)
    steps = [line["step"] for line in read_metrics(metrics)] if metrics.exists() else []
    return Ended(done.returncode, done.stderr, steps, states.steps())


def test_while_it_compiles_there_is_nothing_to_save(world, tmp_path):
    ended = pre_empt(world, tmp_path / "run", "_compile_step", call=1, seconds=0.3)
    assert (ended.status, ended.steps, ended.saved) == (STOPPED, [], [])
    assert "SIGTERM: " in ended.errors
    assert "nothing" in ended.errors  # left to save, or lost
    assert "Traceback" not in ended.errors


def test_while_it_evaluates_the_last_finished_step_is_saved(world, tmp_path):
    ended = pre_empt(world, tmp_path / "run", "totals", call=3)  # before the first step, and behind 2 and 4
    assert ended.status == STOPPED
    assert ended.steps[-1] == ended.saved[-1] >= 4
    assert "the step that runs is finished and saved" in ended.errors
    # The same command with --resume goes on.
    train(configure(world, tmp_path / "run", resume=True), recorder()[0])
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert (tmp_path / "run" / WEIGHTS).read_bytes() == (world / "whole" / WEIGHTS).read_bytes()


def test_while_it_saves_that_is_finished_and_the_last_step_saved(world, tmp_path):
    ended = pre_empt(world, tmp_path / "run", "save", call=2, seconds=0.2)
    assert ended.status == STOPPED
    assert ended.steps[-1] == ended.saved[-1]


def test_a_second_signal_amid_a_save_ends_at_once_and_leaves_the_save_before(world, tmp_path):
    ended = pre_empt(world, tmp_path / "run", "save", call=2, seconds=0.2, times=2)
    assert ended.status == 128 + signal.SIGTERM
    assert "ended at once" in ended.errors
    assert ended.saved[-1] < ended.steps[-1]
    assert len(ended.saved) == 1
    train(configure(world, tmp_path / "run", resume=True), recorder()[0])
    assert (tmp_path / "run" / WEIGHTS).read_bytes() == (world / "whole" / WEIGHTS).read_bytes()
