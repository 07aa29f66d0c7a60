"""Runs that several processes share, on this machine: real processes, which find each other by their options.

Each costs an interpreter's start and a compilation: most tests are slow ones.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import eight_devices
import numpy as np
import pytest
from oracles import tiny_llama
from runs import numbers, remains, tiny_config, write_rows
from safetensors.numpy import load_file

from zagora_jax.config_file import save_config

# The command train. It counts what it reads, and FAULT="process:step:signal" has a process send itself a signal behind
# a step; peers lose patience sooner.
COMMAND = """
import json, os, signal, sys
from pathlib import Path
from runs import saves_in_time
from zagora_jax import peers, trainer
from zagora_jax.checkpoints.huggingface import HuggingFaceCheckpoint
from zagora_jax.command_line import run_command
from zagora_jax.config import TrainConfig
from zagora_jax.data.examples import Examples
from zagora_jax.train import main

index, counts = sys.argv.pop(1), {"bytes": 0, "rows": 0}
peers.BEAT, peers.LOST_AFTER = 0.5, 5.0
saves_in_time()
read_rows, get = HuggingFaceCheckpoint.read_rows, Examples.__getitem__
def counted_read(self, *args):
    rows = read_rows(self, *args)
    counts["bytes"] += rows.nbytes
    return rows
def counted_get(self, index):
    counts["rows"] += 1
    return get(self, index)
HuggingFaceCheckpoint.read_rows, Examples.__getitem__ = counted_read, counted_get
step = trainer._Run._step
def faulty(self, function, state, number):
    if os.environ.get("FAULT", "").startswith(f"{index}:{number}:"):
        os.kill(os.getpid(), int(os.environ["FAULT"].rpartition(":")[2]))
    return step(self, function, state, number)
trainer._Run._step = faulty
status = run_command(TrainConfig, main)
if os.environ.get("COUNTS"):
    Path(os.environ["COUNTS"] + index).write_text(json.dumps(counts))
sys.exit(status)
"""
TIMEOUT = 240  # seconds
ROWS = 16


class Ended(NamedTuple):
    statuses: list[int]
    errors: list[str]
    printed: list[str]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model and rows."""
    folder = tmp_path_factory.mktemp("processes")
    tiny_llama(folder / "model", num_hidden_layers=4)
    write_rows(folder / "rows.jsonl", ROWS)
    return folder


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(world: Path, run: Path, *, processes: int, devices: int, fault: str = "", **options) -> list:
    """Start processes with so many devices each."""
    small = {"max_steps": 3, "save_every": 1, "keep_checkpoints": 9, "log_every": 1, "micro_batch_size": 1}
    config = world / f"{run.name}.yaml"
    save_config(tiny_config(world / "model", run, world / "rows.jsonl", **small | options), config)
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {eight_devices.QUICK_COMPILATION}",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
        "FAULT": fault,
        "COUNTS": str(world / f"{run.name}.counts"),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    port, started = free_port(), []
    for index in range(processes):
        place = ["--coordinator", f"127.0.0.1:{port}", "--process-count", f"{processes}", "--process-index", f"{index}"]
        command = [sys.executable, "-c", COMMAND, f"{index}", str(config), *(place if processes > 1 else [])]
        if "resume" in options:
            command.append("--resume")
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    return started


def ended(started: list) -> Ended:
    end = time.monotonic() + TIMEOUT
    try:
        texts = [process.communicate(timeout=max(1, end - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
    return Ended(
        [process.returncode for process in started], [error for _, error in texts], [printed for printed, _ in texts]
    )


def train(world: Path, run: Path, **options) -> Ended:
    """Train to the end, which all processes reach."""
    found = ended(start(world, run, **options))
    assert set(found.statuses) == {0}, found.errors
    return found


def counts(world: Path, run: Path, count: int) -> list[dict[str, int]]:
    return [json.loads((world / f"{run.name}.counts{index}").read_text()) for index in range(count)]


def require_same(run: Path, other: Path, rtol: float = 1e-6) -> None:
    """Two runs' losses, adapters and checkpoints are the same, but for the order of sums.

    In float32, one exchange between processes may add in another order than that within one: a relative 2**-23 a sum,
    of some ten sums one after the other; AdamW divides by the root of the second moment, which keeps that small.
    """
    losses, others = ([line["loss"] for line in numbers(each)] for each in (run, other))
    np.testing.assert_allclose(losses, others, rtol=rtol)
    weights, theirs = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (run, other))
    assert weights.keys() == theirs.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, theirs[name], rtol=0, atol=1e-2 * 3e-4)  # of three steps of the rate 1e-2
    assert steps(run) == steps(other)


def steps(run: Path) -> list[str]:
    return sorted(entry.name for entry in (run / "checkpoints").iterdir())


def test_two_processes_train_as_one_and_one_goes_on(world, tmp_path):
    """Each process reads its share of the weights and rows; one process alone goes on from what two have saved."""
    train(world, tmp_path / "one", processes=1, devices=4)
    found = train(world, tmp_path / "two", processes=2, devices=2)
    require_same(tmp_path / "two", tmp_path / "one")
    assert remains(tmp_path / "two") == []
    assert "step 3/3" in found.printed[0]
    assert "step" not in found.printed[1]  # gloo alone prints there
    assert "step 3/3" in (tmp_path / "two" / "process-1.log").read_text()
    (whole,), shares = counts(world, tmp_path / "one", 1), counts(world, tmp_path / "two", 2)
    for share in shares:
        # Half of all layers and table rows, and the one vector of the last norm.
        assert abs(share["bytes"] - whole["bytes"] / 2) < 1024
    assert sum(share["rows"] for share in shares) == whole["rows"]
    assert abs(shares[0]["rows"] - shares[1]["rows"]) <= 2
