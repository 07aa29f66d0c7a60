"""Runs whose streamed layers are read from the cache of quantised models when they are needed."""

from __future__ import annotations

import os

import jax
import numpy as np
import oracles
import pytest
import runs

from zagora_jax import residency, trainer
from zagora_jax.checkpoints.peft import read_adapter
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig, OffloadConfig
from zagora_jax.trainer import train

LAYERS, STEPS = 6, 5


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """These tests compile far more than they compute."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    oracles.tiny_llama(folder / "model", num_hidden_layers=LAYERS, intermediate_size=64)
    runs.write_rows(folder / "rows.jsonl", 11)
    runs.write_rows(folder / "held_out.jsonl", 3, first=20)
    return folder


def configure(folder, name, source, **options):
    """A run of what has a state of its own: short last windows, dropout, an order of rows."""
    weights = {} if source is None else {"weights": "all", "weights_from": source}
    given = {
        "lora": LoraConfig(rank=4, targets=["down_proj"], dropout=0.1),
        "remat": "full",
        "epochs": 3,
        "max_steps": STEPS,
        "save_every": 2,
        "offload": OffloadConfig(**weights, activations=source is not None),
        "quantized_cache": folder / "cache",
    }
    return runs.tiny_config(folder / "model", folder / name, folder / "rows.jsonl", **(given | options))


def outcome(config):
    """Losses, norms and evaluations of each step, and the adapter."""
    adapter, _ = read_adapter(config.output / "adapter")
    names = ("step", "loss", "grad_norm", "eval_loss")
    lines = [{name: line.get(name) for name in names} for line in runs.numbers(config.output)]
    return lines, {name: np.asarray(tensor).tobytes() for name, tensor in adapter.items()}


@pytest.fixture(scope="module")
def resident(world):
    config = configure(world, "resident", None)
    train(config, runs.recorder()[0])
    return outcome(config)


@pytest.mark.slow
def test_evaluations_go_through_the_layers_once(world):
    evaluated = {"eval_data": [world / "held_out.jsonl"], "eval_every": 2, "attention": "chunked", "packing": True}
    resident, disk = (configure(world, f"evaluated-{source}", source, **evaluated) for source in (None, "disk"))
    for config in (resident, disk):
        train(config, runs.recorder()[0])
    assert outcome(disk) == outcome(resident)


def test_a_file_that_breaks_amid_the_run_ends_it_and_the_run_goes_on(world, resident, tmp_path, monkeypatch):
    config = configure(world, "broken", 3, quantized_cache=tmp_path / "cache")
    step = trainer._Run._step

    def breaking(self, function, state, number):
        if number == 4:
            (file,) = (tmp_path / "cache").glob("*/layer-00004.*.safetensors")
            os.truncate(file, file.stat().st_size // 2)
        return step(self, function, state, number)

    monkeypatch.setattr(trainer._Run, "_step", breaking)
    with pytest.raises(UserError, match=r"layer-00004\..*expected more .* --resume goes on from there"):
        train(config, runs.recorder()[0])
    assert [line["step"] for line in runs.numbers(config.output)] == [1, 2, 3]
    monkeypatch.setattr(trainer._Run, "_step", step)
    reporter, printed = runs.recorder()
    train(config.model_copy(update={"resume": True}), reporter)
    assert "layer-00004" in printed()
    assert "it is removed, and made anew" in printed()
    assert outcome(config) == resident
    assert all(line["disk_wait_seconds"] >= 0 for line in runs.numbers(config.output))


@pytest.mark.parametrize(("layers", "expected"), [(1, 4), (5, 5), (LAYERS, "host")])
def test_auto_reads_from_the_disk_what_host_memory_has_no_room_for(world, monkeypatch, layers, expected):
    config = configure(world, "auto", "auto", offload=OffloadConfig(weights="all"))
    reporter, printed = runs.recorder()
    run = trainer._Run(config, reporter)
    of_layer = trainer.arrange(config, run.base.model).waiting.device_bytes
    monkeypatch.setattr(residency, "room_to_pin", lambda platform: layers * of_layer)
    settled = residency.settle_source(config, run.base, run.arrangement.mesh, reporter.say)
    assert settled.offload.weights_from == expected
    said = f"has room for {layers}: they are read from the cache on the disk when they are needed"
    assert (said in " ".join(printed().split())) == (expected != "host")


def test_what_layers_cannot_be_read_from_is_refused(world, tmp_path):
    with pytest.raises(ValueError, match=r"offload.weights_from disk: no layer is streamed"):
        TrainConfig(model="m", offload=OffloadConfig(weights_from="disk"))
    with pytest.raises(ValueError, match=r"quantized_cache is off"):
        TrainConfig(model="m", quantized_cache="off", offload=OffloadConfig(weights="all", weights_from="disk"))
    layerwise = configure(world, "layerwise", "disk", strategy="layerwise")
    with pytest.raises(UserError, match=r"--offload.weights-from disk does not go with --strategy layerwise"):
        trainer._Run(layerwise, runs.recorder()[0])
    synthetic = TrainConfig(
        model="synthetic:tinyllama-1.1b?layers=2",
        output=tmp_path / "run",
        offload=OffloadConfig(weights="all", weights_from="disk"),
        max_steps=1,
    )
    with pytest.raises(UserError, match=r"--offload.weights-from disk: random weights are in no file"):
        train(synthetic, runs.recorder()[0])
    norms = configure(world, "norms", "disk", lora=LoraConfig(rank=4, modules_to_save=["input_layernorm"]))
    with pytest.raises(UserError, match=r"norms of layers are trained .* and the cache is not used"):
        train(norms, runs.recorder()[0])
    # Layers without their principal part are in no file either.
    pissa = configure(world, "pissa", "disk", lora=LoraConfig(rank=4, initialization="pissa"))
    with pytest.raises(UserError, match=r"with --lora.initialization pissa the cache is not used"):
        train(pissa, runs.recorder()[0])
