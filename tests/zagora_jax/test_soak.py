"""Long runs: memory, open files and compilations stay what they are after the beginning."""

import gc
import json
import runpy
from pathlib import Path

import jax
import psutil
import pytest
from oracles import tiny_llama
from runs import recorder, tiny_config, write_rows

from zagora_jax.config import TrainConfig
from zagora_jax.saving import Saver
from zagora_jax.trainer import train

KIB, MIB = 2**10, 2**20
COMPILATION = "/jax/core/compile/backend_compile_duration"
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "saving.py"


@pytest.mark.parametrize("steps", [80, pytest.param(4000, marks=pytest.mark.slow)])
def test_nothing_grows(tmp_path, monkeypatch, steps):
    """Over steps, epochs, saves and evaluations. A batch that is kept of every step would be 8 KiB a step.

    The allocator's own growth in the first quarter is not counted; 16 MiB are what it may come to after that. A save
    that is under way holds a copy of the state, files and event loops: it is waited for before anything is counted.
    """
    process = psutil.Process()
    seen, compilations = [], []
    after_step = Saver.after

    def observed(self, step, **kwargs):
        if step % (steps // 8) == 0:
            self._background.wait()
            gc.collect()
            held = sum(array.nbytes for array in jax.live_arrays())
            seen.append((step, process.memory_info().rss / MIB, process.num_fds(), len(compilations), held))
        return after_step(self, step, **kwargs)

    listening = [True]
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **__: compilations.append(name) if name == COMPILATION and listening else None
    )
    monkeypatch.setattr(Saver, "after", observed)
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
    # Between the two lie 12 saves and 3 evaluations: a file kept of each would make as many.
    assert last[2] - first[2] < 3
    assert last[3] == first[3]
    # Batches that are made ahead come and go, of 8 KiB each; 60 steps lie between the two.
    assert abs(last[4] - first[4]) < 10 * 8 * KIB


@pytest.mark.gpu
def test_saving_does_not_hold_up_a_gpu(tmp_path):
    benchmark = runpy.run_path(str(BENCHMARK))
    config = TrainConfig(
        model="synthetic:llama-3-8b?layers=8",
        output=tmp_path / "run",
        max_steps=100,
        save_every=benchmark["SAVE_EVERY"],
        sequence_length=512,
        gradient_accumulation_steps=1,
    )
    assert benchmark["measure"](config)["stall_ms"] <= 50
