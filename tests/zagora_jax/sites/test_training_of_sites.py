"""Runs of the trainer as sites: in threads, killed and resumed, and as processes that die and join."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from oracles import tiny_llama
from runs import Listener, compiled_once, numbers, recorder, tiny_config, write_rows
from several_sites import together

from zagora_jax.errors import UserError
from zagora_jax.option_groups import SitesConfig
from zagora_jax.run_directory import RunDirectory, read_metrics
from zagora_jax.trainer import train


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, rows, and one place for compiled programs."""
    folder = tmp_path_factory.mktemp("training_of_sites")
    tiny_llama(folder / "model")
    write_rows(folder / "rows.jsonl", 24)
    write_rows(folder / "held_out.jsonl", 2, first=40)
    with compiled_once(folder / "compiled"):
        yield folder


def configure(world, run, folder, **options):
    sites = {"folder": str(folder), "name": run.name, "every": 2, "compression": "int4", "wait": 60.0}
    sites |= options.pop("sites", {})
    options = {"max_steps": 6, "save_every": 1, "packing": True, **options}
    return tiny_config(world / "model", run, world / "rows.jsonl", sites=SitesConfig(**sites), **options)


def exchanges(run):
    return {line["step"]: line["sites"] for line in read_metrics(run / "metrics.jsonl") if "sites" in line}


def let_join(folder, *names):
    """Have the first round wait for all of them, whoever begins first."""
    (folder / "rounds" / "000001").mkdir(parents=True)
    for name in names:
        (folder / "rounds" / "000001" / f"{name}.joins").write_text("1")


class Break(Listener):
    """Ends a run behind a step, as an error would."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_step(self, event):
        if event.step == self.step:
            raise RuntimeError("broken off")


@pytest.mark.slow
def test_a_run_that_is_broken_off_and_resumed_is_the_unbroken_one(world, tmp_path):
    """Behind an exchange, and between two of them, with one under way."""
    train(configure(world, tmp_path / "a" / "home", tmp_path / "shared-a"), recorder()[0])
    run, folder = tmp_path / "b" / "home", tmp_path / "shared-b"
    for step, resume in ((2, False), (5, True)):
        with pytest.raises(RuntimeError, match="broken off"):
            train(configure(world, run, folder, resume=resume), recorder()[0], [Break(step)])
    train(configure(world, run, folder, resume=True), recorder()[0])
    whole, broken = ([line.get("loss") for line in numbers(one)] for one in (tmp_path / "a" / "home", run))
    assert broken == whole
    adapter = Path("adapter") / "adapter_model.safetensors"
    assert (run / adapter).read_bytes() == (tmp_path / "a" / "home" / adapter).read_bytes()
    assert exchanges(run)[6]["round"] == 3
    with pytest.raises(UserError, match=r"sites\.every 2 -> 3"):
        train(configure(world, run, folder, sites={"every": 3}, resume=True), recorder()[0])


def test_two_sites_end_with_one_adapter(world, tmp_path):
    folder = tmp_path / "shared"
    let_join(folder, "home", "office")
    shares = {"home": "1/2", "office": "2/2"}
    held_out = {"eval_data": [world / "held_out.jsonl"]}
    runs = {
        name: configure(world, tmp_path / name, folder, sites={"share": shares[name]}, **held_out) for name in shares
    }
    results = together(*(lambda one=one: train(one, recorder()[0]) for one in runs.values()))
    assert results[0].loss_after == results[1].loss_after < results[0].loss_before
    adapters = [(tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in shares]
    assert adapters[0] == adapters[1]
    first, second = (read_metrics(tmp_path / name / "metrics.jsonl") for name in shares)
    assert first[0]["loss"] != second[0]["loss"]  # each has rows of its own
    for name in shares:
        found = exchanges(tmp_path / name)
        assert {step: one["counted"] for step, one in found.items()} == {
            2: [],
            4: ["home", "office"],
            6: ["home", "office"],
        }
        assert [one["round"] for one in found.values()] == [0, 1, 3]
        assert not (tmp_path / name / ".sites").exists()
    assert sorted(path.name for path in (folder / "rounds" / "000004").iterdir()) == ["home.leaves", "office.leaves"]


# A run whose steps take so long that one can be killed amid them, and another one join.
SLOW_RUN = """
import sys, time
sys.path[:0] = {tests!r}
from runs import recorder
from zagora_jax.callbacks import Callback
from zagora_jax.run_directory import RunDirectory
from zagora_jax.trainer import train

class Slow(Callback):
    def on_step(self, event):
        time.sleep({seconds})

train(RunDirectory(sys.argv[1]).read_config(), recorder()[0], [Slow()])
"""


def start(config, seconds, compiled):
    script = SLOW_RUN.format(tests=[str(Path(__file__).parents[2])], seconds=seconds)
    options = RunDirectory(config.output.with_suffix(".options"))
    options.create()
    options.write_config(config)
    caching = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen([sys.executable, "-c", script, str(options.path)], env=os.environ | caching)


def until(condition):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.1)
    raise TimeoutError


@pytest.mark.slow
def test_of_four_sites_one_is_killed_and_one_joins_late_and_the_rest_finish(world, tmp_path):
    folder, names = tmp_path / "shared", ["one", "two", "three", "late"]
    let_join(folder, *names[:3])
    options = {"max_steps": 20, "sites": {"wait": 15.0}}
    runs = {name: configure(world, tmp_path / name, folder, **options) for name in names}
    runs["late"] = configure(world, tmp_path / "late", folder, **{**options, "max_steps": 8})
    processes = {name: start(runs[name], 0.5, world / "compiled") for name in names[:3]}
    try:
        until((folder / "rounds" / "000002" / "closed.json").exists)
        processes["three"].send_signal(signal.SIGKILL)
        processes["late"] = start(runs["late"], 0.5, world / "compiled")
        assert {name: process.wait(600) for name, process in processes.items()} == {
            "one": 0,
            "two": 0,
            "three": -signal.SIGKILL,
            "late": 0,
        }
    finally:
        for process in processes.values():
            process.kill()
    closings = [json.loads(path.read_text()) for path in sorted(folder.glob("rounds/*/closed.json"))]
    counted = [sorted(one["counted"]) for one in closings]
    assert counted[0] == ["one", "three", "two"]
    assert any("late" in one for one in counted)
    assert not any("three" in one for one in counted[4:])
    for name in ("one", "two", "late"):
        assert (tmp_path / name / "adapter").is_dir()
        assert RunDirectory(tmp_path / name).read_report()["stopped"] is None
    # The late one did not begin at the beginning.
    assert (
        read_metrics(tmp_path / "late" / "metrics.jsonl")[0]["loss"]
        < read_metrics(tmp_path / "one" / "metrics.jsonl")[0]["loss"]
    )
