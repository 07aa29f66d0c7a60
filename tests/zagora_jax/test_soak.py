"""Long runs: memory, open files and compilations stay what they are after the beginning."""

import json
import runpy
from pathlib import Path

import jax
import psutil
import pytest
from oracles import tiny_llama
from runs import recorder, tiny_config, write_rows

from zagora_jax import trainer
from zagora_jax.config import TrainConfig
from zagora_jax.trainer import train

MIB = 2**20
COMPILATION = "/jax/core/compile/backend_compile_duration"
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "saving.py"


@pytest.mark.parametrize("steps", [80, pytest.param(4000, marks=pytest.mark.slow)])
def test_nothing_grows(tmp_path, monkeypatch, steps):
    """Over steps, epochs, saves and evaluations. A batch that is kept of every step would be 8 KiB a step.

    The allocator's own growth in the first quarter is not counted; 16 MiB are what it may come to after that.
    """
    process = psutil.Process()
    seen, compilations = [], []
    take_step = trainer._Run._step

    def observed(self, step, state, number):
        if number % (steps // 8) == 0:
            held = sum(array.nbytes for array in jax.live_arrays())
            seen.append((number, process.memory_info().rss / MIB, process.num_fds(), len(compilations), held))
        return take_step(self, step, state, number)

    listening = [True]
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **__: compilations.append(name) if name == COMPILATION and listening else None
    )
    monkeypatch.setattr(trainer._Run, "_step", observed)
    rows = write_rows(tmp_path / "rows.jsonl", 40)
    config = tiny_config(
        tiny_llama(tmp_path / "model"),
        tmp_path / "run",
        rows,
        quantization="none",
        max_steps=steps,
        save_every=steps // 16,
        eval_data=[rows],
        eval_every=steps // 4,
    )
    train(config, recorder()[0])
    listening.clear()
    print(json.dumps(seen))
    first, last = seen[1], seen[-1]
    assert last[1] - first[1] < 16
    # Halves lie 8 saves apart, so that a file kept of every save would make 8. While a save goes on it has files open:
    # so the fewest of either half, and half of that 8.
    assert min(line[2] for line in seen[4:]) - min(line[2] for line in seen[:4]) < 4
    assert last[3] == first[3]
    # On the device; while a save goes on there is a copy.
    assert min(line[4] for line in seen[4:]) <= min(line[4] for line in seen[:4])


@pytest.mark.gpu
def test_saving_does_not_hold_up_a_gpu(tmp_path):
    benchmark = runpy.run_path(str(BENCHMARK))
    config = TrainConfig(
        model="synthetic:llama-3-8b?layers=8",
        output=tmp_path / "run",
        max_steps=benchmark["STEPS"],
        save_every=benchmark["SAVE_EVERY"],
        sequence_length=512,
        gradient_accumulation_steps=1,
    )
    assert benchmark["measure"](config)["stall_ms"] <= 50
