"""Runs of every strategy: broken off and gone on with on the same devices they are the same bit for bit; nothing grows.

With dropout, packing and accumulation, over epochs that are packed anew, under a learning rate that falls.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

import eight_devices
import jax
import numpy as np
import psutil
import pytest
from oracles import tiny_llama
from runs import numbers, recorder, tiny_config, write_rows

from zagora_jax import trainer
from zagora_jax.config import TrainConfig
from zagora_jax.option_groups import LoraConfig, MeshConfig, OffloadConfig
from zagora_jax.trainer import train

pytestmark = pytest.mark.eight_devices

STEPS = 4
LONG = 160  # steps in which something could grow
COMPILATION = "/jax/core/compile/backend_compile_duration"

STRATEGIES = {
    "one device": {"mesh": MeshConfig(data=1, fsdp=1)},
    "fsdp": {"strategy": "fsdp", "mesh": MeshConfig(fsdp=4)},
    "replicas": {"strategy": "replicas", "mesh": MeshConfig(data=2)},
    "replicas int8": {"strategy": "replicas", "mesh": MeshConfig(data=2), "gradient_compression": "int8"},
    "replicas int4 overlapped": {
        "strategy": "replicas",
        "mesh": MeshConfig(data=2),
        "gradient_compression": "int4",
        "gradient_exchange": "overlapped",
    },
    "fsdp and replicas int8 delayed": {
        "mesh": MeshConfig(data=2, fsdp=2),
        "gradient_compression": "int8",
        "gradient_exchange": "delayed",
    },
    "streaming": {"strategy": "streaming", "mesh": MeshConfig(data=2), "remat": "full"},
    "moments on the host": {"mesh": MeshConfig(data=1, fsdp=2), "offload": OffloadConfig(optimizer=True)},
    "tensor": {"strategy": "tensor", "mesh": MeshConfig(tensor=2)},
    "layerwise": {"strategy": "layerwise", "mesh": MeshConfig(stage=2), "stage_layers": [1, 1], "remat": "full"},
    "layerwise replicas int8": {
        "strategy": "layerwise",
        "mesh": MeshConfig(stage=2, data=2),
        "stage_layers": [1, 1],
        "gradient_compression": "int8",
        "remat": "full",
    },
}
# Resumed from one step in every run of the tests; all cells, from every step, in the slow ones.
QUICK = [("streaming", "adamw"), ("layerwise replicas int8", "adamw_8bit")]


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


class World(NamedTuple):
    folder: Path

    def configure(self, run: Path, strategy: str, optimizer: str, **options) -> TrainConfig:
        settings = {
            "optimizer": optimizer,
            # down_proj's A is large enough for 8-bit moments.
            "lora": LoraConfig(rank=32, targets=["q_proj", "down_proj"], dropout=0.1),
            "packing": True,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "warmup_steps": 1,
            "save_every": 1,
            "keep_checkpoints": STEPS,
        }
        options = settings | STRATEGIES[strategy] | options
        return tiny_config(self.folder / "model", run, self.folder / "rows.jsonl", **options)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model and rows; programs that are compiled once for the runs that share them."""
    folder = tmp_path_factory.mktemp("exact")
    tiny_llama(folder / "model")
    write_rows(folder / "rows.jsonl", 20)
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(folder / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield World(folder)
    for name, value in before.items():
        jax.config.update(name, value)


def saved_state(config: TrainConfig) -> list[np.ndarray]:
    """All arrays of the newest state of a run, read as for going on."""
    run = trainer._Run(config.model_copy(update={"resume": True}), recorder()[0])
    assert run.saved is not None
    assert run.saved.step == STEPS
    return [np.asarray(leaf) for leaf in jax.tree.leaves(run._saved_state(run.saved))]


def cells():
    for strategy in STRATEGIES:
        for optimizer in ("adamw", "adamw_8bit"):
            yield pytest.param(strategy, optimizer, range(1, STEPS), marks=pytest.mark.slow)
    for strategy, optimizer in QUICK:
        yield strategy, optimizer, [2]


@pytest.mark.parametrize(("strategy", "optimizer", "steps"), cells())
def test_a_resumed_run_is_the_unbroken_one(world, tmp_path, strategy, optimizer, steps):
    """Losses, learning rates, order of rows, adapter, moments, what compression keeps: everything that is saved."""
    expected = world.configure(tmp_path / "unbroken", strategy, optimizer)
    train(expected, recorder()[0])
    state = saved_state(expected)
    for step in steps:
        run = shutil.copytree(expected.output, tmp_path / f"from {step}")
        resumed = world.configure(run, strategy, optimizer, resume=run / "checkpoints" / str(step))
        reporter, printed = recorder()
        train(resumed, reporter)
        assert f"{STEPS}, going on from {step}" in printed()
        assert numbers(run) == numbers(expected.output)
        weights = "adapter/adapter_model.safetensors"
        assert (run / weights).read_bytes() == (expected.output / weights).read_bytes()
        for one, other in zip(saved_state(resumed), state, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert one.tobytes() == other.tobytes()
    losses = [line["loss"] for line in numbers(expected.output)]
    assert len(set(losses)) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_grows(world, tmp_path, monkeypatch, strategy):
    """Bytes on the devices, open files and compilations, over saves and epochs."""
    process, seen, compilations, listening = psutil.Process(), [], [], [True]
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **__: compilations.append(name) if name == COMPILATION and listening else None
    )
    take_step = trainer._Run._step

    def observed(self, step, state, number):
        held = sum(array.nbytes for array in jax.live_arrays())
        seen.append((held, process.num_fds(), len(compilations)))
        return take_step(self, step, state, number)

    monkeypatch.setattr(trainer._Run, "_step", observed)
    long = {"max_steps": LONG, "save_every": LONG // 16, "keep_checkpoints": 1}
    train(world.configure(tmp_path / "run", strategy, "adamw_8bit", **long), recorder()[0])
    listening.clear()
    # The first steps compile what follows a step and what copies a state; amid a save there is a copy, and open files.
    early, late = seen[LONG // 8 : LONG // 2], seen[LONG // 2 :]
    for held_then, held_now in zip(*(map(min, zip(*part, strict=True)) for part in (early, late)), strict=True):
        assert held_now <= held_then
