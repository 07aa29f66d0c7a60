"""Runs that several processes share, on this machine: real processes, which find each other by their options.

Each costs an interpreter's start and a compilation: most tests are slow ones.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import eight_devices
import ml_dtypes
import numpy as np
import pytest
from oracles import tiny_llama
from runs import numbers, remains, tiny_config, write_rows
from safetensors.numpy import load_file

from zagora_jax import processes
from zagora_jax.config_file import save_config
from zagora_jax.interruption import STOPPED
from zagora_jax.option_groups import MeshConfig
from zagora_jax.peers import PEER_LOST
from zagora_jax.run_directory import read_metrics

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


def start(world: Path, run: Path, *, processes: int, devices: int, fault: str = "", last: str = "", **options) -> list:
    """Start processes with so many devices each; `last` is a further argument of the last one."""
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
        if last and index == processes - 1:
            command.append(last)
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


def test_arrays_travel_as_bytes_bit_for_bit():
    """Of any type and shape, behind each other at any address."""
    arrays = [
        np.array([True, False, True]),
        np.array(-0.0, np.float32),
        np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
        np.full((0, 4), 1.0),
        np.array([np.nan, 1e-45], np.float32),
    ]
    data = processes._bytes_of(arrays)
    assert data.nbytes == 1024
    for found, array in zip(processes._arrays_of(data, arrays), arrays, strict=True):
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.fixture(scope="module")
def one(world):
    """The run that one process makes alone."""
    train(world, world / "one", processes=1, devices=4)
    return world / "one"


def test_two_processes_train_as_one(world, one):
    """Each reads its share of the weights and rows, and the first alone writes."""
    run = world / "two"
    found = train(world, run, processes=2, devices=2)
    require_same(run, one)
    assert remains(run) == []
    assert "step 3/3" in found.printed[0]
    assert "step" not in found.printed[1]  # gloo alone prints there
    assert "step 3/3" in (run / "process-1.log").read_text()
    (whole,), shares = counts(world, one, 1), counts(world, run, 2)
    for share in shares:
        # Half of all layers and table rows, and the one vector of the last norm.
        assert abs(share["bytes"] - whole["bytes"] / 2) < 1024
    assert sum(share["rows"] for share in shares) == whole["rows"]
    assert abs(shares[0]["rows"] - shares[1]["rows"]) <= 2
    links = json.loads((run / "connections.json").read_text())["links"]
    assert sorted(link["between"] for link in links) == ["devices"] * 4 + ["processes"] * 2
    assert all(link["gb_s"] > 0 for link in links)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "options"),
    [
        (4, {}),
        (2, {"strategy": "layerwise", "mesh": MeshConfig(stage=4), "micro_batch_size": 4}),
        (4, {"strategy": "layerwise", "mesh": MeshConfig(stage=2, data=2), "micro_batch_size": 2}),
        (2, {"strategy": "streaming", "offload": {"weights": "all", "optimizer": True}, "remat": "full"}),
        (2, {"mesh": MeshConfig(data=2, tensor=2, fsdp=1), "micro_batch_size": 2}),
        (2, {"mesh": MeshConfig(fsdp=2, tensor=2), "micro_batch_size": 2}),
    ],
    ids=["four", "stages", "stages-replicas", "streaming", "tensor", "fsdp-tensor"],
)
def test_every_strategy_of_one_program_works_in_processes(world, one, tmp_path, count, options):
    """Float32 losses of the same rows differ by the order of sums, as on one process's devices."""
    train(world, tmp_path / "run", processes=count, devices=4 // count, **options)
    losses, expected = ([line["loss"] for line in numbers(run)] for run in (tmp_path / "run", one))
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert steps(tmp_path / "run") == steps(one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "replicas", "gradient_compression": "int8"},
        {"mesh": MeshConfig(data=2, fsdp=2), "gradient_compression": "int8", "gradient_exchange": "delayed"},
        {"strategy": "layerwise", "mesh": MeshConfig(stage=2, data=2), "gradient_compression": "int8"},
        {"embeddings": "int8", "optimizer": "adamw_8bit", "lora": {"rank": 4, "use_dora": True}},
    ],
    ids=["int8", "delayed", "stages", "8bit-dora"],
)
def test_what_is_rounded_is_rounded_alike_in_processes(world, tmp_path, options):
    """Residuals, pending gradients and 8-bit moments come from the same numbers as in one process."""
    train(world, tmp_path / "alone", processes=1, devices=4, **options)
    train(world, tmp_path / "shared", processes=2, devices=2, **options)
    require_same(tmp_path / "shared", tmp_path / "alone")


@pytest.mark.slow
def test_each_process_keeps_and_reads_the_quantised_layers_that_are_its_share(world, one, tmp_path):
    """Where a file of the cache is damaged, its layer is read from the model again."""
    cache = tmp_path / "cache"
    for name in ("first", "second", "damaged"):
        train(world, tmp_path / name, processes=2, devices=2, quantized_cache=cache)
        require_same(tmp_path / name, one)
        files = sorted(cache.rglob("layer-*.safetensors"))
        assert len(files) == 4
        files[1].write_bytes(files[1].read_bytes()[:-1] + b"?") if name == "second" else None
    first, second, damaged = (
        [share["bytes"] for share in counts(world, tmp_path / name, 2)] for name in ("first", "second", "damaged")
    )
    assert max(second) < min(first) / 2  # tables alone
    assert damaged[0] == second[0]
    assert damaged[1] > second[1]


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_to_one_process_ends_all_behind_the_same_step(world, one, signalled, tmp_path):
    """And as many go on, or fewer."""
    run = tmp_path / "run"
    found = ended(start(world, run, processes=2, devices=2, fault=f"{signalled}:2:{signal.SIGTERM.value}"))
    assert found.statuses == [STOPPED, STOPPED], found.errors
    assert steps(run) == ["1", "2"]
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2]
    goes_on = 2 - signalled
    train(world, run, processes=goes_on, devices=4 // goes_on, resume=True)
    require_same(run, one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "by"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)]
)
def test_a_lost_process_is_named_and_ends_the_others(world, one, lost, by, tmp_path):
    """Nothing is half written, and one process alone goes on to the result of the unbroken run."""
    run = tmp_path / "run"
    started = start(world, run, processes=2, devices=2, fault=f"{lost}:3:{by.value}")
    try:
        _, error = started[1 - lost].communicate(timeout=TIMEOUT)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert started[1 - lost].returncode == PEER_LOST, error
    assert f"error: process {lost} of 2 ({socket.gethostname()}, pid {started[lost].pid})" in error
    assert "--resume goes on from there, also with fewer processes" in error
    assert "1" in steps(run)
    train(world, run, processes=1, devices=4, resume=True)
    assert remains(run) == []
    require_same(run, one)


@pytest.mark.slow
def test_what_one_process_has_wrong_ends_all_with_its_name(world, tmp_path):
    """Whose options differ is said, and both end at once."""
    found = ended(start(world, tmp_path / "run", processes=2, devices=1, last="--seed=1"))
    assert all(status in (2, PEER_LOST) for status in found.statuses)
    for error in found.errors:
        assert "option seed is 1 in process 1 of 2" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"strategy": "layerwise", "mesh": MeshConfig(stage=2), "stage_form": "programs"},
            "--stage-form programs does",
        ),
        ({"mesh": MeshConfig(fsdp=1)}, "the mesh has 0 devices of process 1 of 2"),
        ({"lora": {"rank": 4, "initialization": "pissa"}}, "--lora.initialization pissa does not go with 2 processes"),
    ],
)
def test_what_processes_cannot_share_is_refused_before_any_work(world, tmp_path, options, message):
    found = ended(start(world, tmp_path / "run", processes=2, devices=1, **options))
    assert all(status in (2, PEER_LOST) for status in found.statuses)
    assert any(message in error for error in found.errors), found.errors
    assert not (tmp_path / "run" / "checkpoints").exists()
