"""Training runs on several devices that are broken off and go on, on the same devices or on others."""

import json
import shutil
from collections import Counter

import eight_devices
import jax
import numpy as np
import pytest
from oracles import tiny_llama
from runs import numbers, recorder, tiny_config, write_rows

from zagora_jax import trainer
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig, MeshConfig
from zagora_jax.trainer import train

# Two replicas of two shards whose gradients are delayed and compressed; 8-bit moments and dropout beside.
EVERYTHING = {
    "mesh": MeshConfig(data=2, fsdp=2),
    "gradient_exchange": "delayed",
    "gradient_compression": "int8",
    "optimizer": "adamw_8bit",
    "lora": LoraConfig(rank=32, targets=["q_proj", "down_proj"], dropout=0.1),
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "schedule": "constant",
    "max_steps": 4,
    "save_every": 2,
    "keep_checkpoints": 5,
}


pytestmark = pytest.mark.eight_devices


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spread")
    tiny_llama(folder / "model")
    write_rows(folder / "rows.jsonl", 24)
    return folder


def configure(folder, run, **options):
    return tiny_config(folder / "model", run, folder / "rows.jsonl", **EVERYTHING | options)


@pytest.fixture(scope="module")
def unbroken(folder):
    reporter, printed = recorder()
    train(configure(folder, folder / "unbroken"), reporter)
    return folder / "unbroken", printed()


def test_delayed_gradients_are_announced_and_counted(unbroken):
    run, printed = unbroken
    assert "the first applies none; the last one's are applied at the end" in printed
    lines = numbers(run)
    assert [line["applied"] for line in lines] == [False, True, True, True]
    assert lines[0]["grad_norm"] == 0
    assert ["flushed_applied" in line for line in lines] == [False, False, False, True]
    assert lines[-1]["flushed_grad_norm"] > 0


def test_devices_hold_what_layout_json_says(folder, unbroken, tmp_path):
    layout = json.loads((unbroken[0] / "layout.json").read_text())
    assert layout["mesh"] == {"stage": 1, "data": 2, "fsdp": 2, "tensor": 1}
    run = trainer._Run(configure(folder, tmp_path / "run"), recorder()[0])
    held: Counter[str] = Counter()
    for array in jax.tree.leaves((run._load(), run._initial_state())):
        for shard in array.addressable_shards:
            held[f"{shard.device.platform}:{shard.device.id}"] += shard.data.nbytes
    assert held.keys() == layout["bytes_a_device"].keys() == {f"cpu:{number}" for number in range(4)}
    for name, kinds in layout["bytes_a_device"].items():
        assert min(kinds[kind] for kind in ("codes", "scales", "embeddings", "LoRA", "optimizer", "residuals")) > 0
        assert 0 <= held[name] - sum(kinds.values()) <= 64  # counters, and the like, are of no kind


def test_the_bytes_on_the_wire_are_said_and_written(unbroken):
    run, printed = unbroken
    wire = json.loads((run / "layout.json").read_text())["wire_bytes_a_step"]
    # Weights and gradients cross between shards; gradients in two phases between replicas; sums between all.
    assert {"all-gather over fsdp", "all-to-all over fsdp", "all-to-all over data", "all-gather over data"} <= set(wire)
    for name, size in wire.items():
        assert f"on the wire a step and device: {name}: {size / 1e6:,.1f} MB" in printed


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(folder, unbroken, tmp_path):
    """With residuals, pending gradients, 8-bit moments and dropout."""
    expected, _ = unbroken
    run = shutil.copytree(expected, tmp_path / "run")
    train(configure(folder, run, resume=run / "checkpoints" / "2"), recorder()[0])
    assert numbers(run) == numbers(expected)
    weights = "adapter/adapter_model.safetensors"
    assert (run / weights).read_bytes() == (expected / weights).read_bytes()


def handed_over(config):
    """The whole state that a run goes on from, without what belongs to an exchange; that; and what is said of it."""
    reporter, printed = recorder()
    run = trainer._Run(config, reporter)
    whole = run.arrangement.whole_state(run._initial_state(), run.state_shapes)
    return whole._replace(residuals=None, pending=None), (whole.residuals, whole.pending), printed()


def is_zero(tree):
    return not any(np.asarray(leaf, np.float32).any() for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("exchange", ["overlapped", "delayed"])
def test_other_devices_go_on_with_the_same_parameters(folder, tmp_path, exchange):
    """From two devices to three to one: residuals and pending gradients are begun anew, which is said."""
    options = {"gradient_accumulation_steps": 1, "gradient_exchange": exchange, "max_steps": 2}
    run = tmp_path / "run"
    two = configure(folder, run, **options, save_every=1, micro_batch_size=6, mesh=MeshConfig(data=2, fsdp=1))
    train(two, recorder()[0])
    options |= {"save_every": 1, "resume": run / "checkpoints" / "1"}
    saved, kept, printed = handed_over(two.model_copy(update={"resume": options["resume"]}))
    assert not is_zero(kept)
    assert "left behind" not in printed
    for mesh, rows, changed in (
        (MeshConfig(data=3, fsdp=1), 4, {}),
        (MeshConfig(data=1, fsdp=1), 12, {"gradient_exchange": "synchronous", "gradient_compression": "none"}),
    ):
        found, kept, printed = handed_over(
            configure(folder, run, **options | changed, micro_batch_size=rows, mesh=mesh)
        )
        jax.tree.map(np.testing.assert_array_equal, found, saved)
        assert is_zero(kept)
        assert "left behind: what compression had rounded off" in printed
        assert ("the gradients of step 1, which no step has applied" in printed) == (exchange == "delayed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mesh": MeshConfig(fsdp=1)},
            "--gradient-compression int8 --gradient-exchange delayed: one device has nobody",
        ),
        ({"mesh": MeshConfig(fsdp=2)}, "--gradient-exchange delayed: is between replicas, .* overlapped"),
        ({"compute_dtype": "float16"}, "--gradient-compression int8 in the backward pass, .* float16"),
    ],
)
def test_exchanges_that_cannot_be_are_refused(folder, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        train(configure(folder, tmp_path / "run", **options), recorder()[0])
    assert not (tmp_path / "run").exists()


def test_an_odd_number_of_packed_sequences_ends_with_a_masked_one(tmp_path):
    """Five on two devices: three steps for both, each row once, and the numbers of one device."""
    tiny_llama(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", 7)
    packed = {"packing": True, "epochs": 1, "gradient_accumulation_steps": 1}
    losses = {}
    for devices in (1, 2):
        mesh = MeshConfig(data=devices, fsdp=1)
        options = {"mesh": mesh, "micro_batch_size": 2 // devices, "schedule": "constant", **packed}
        run = trainer._Run(tiny_config(tmp_path / "model", tmp_path / str(devices), rows, **options), recorder()[0])
        assert run.batches.sequences_per_epoch(0) == 5
        assert run.total_steps == 3
        assert [len(run.batches.rows_of_step(step)) for step in range(3)] == [2, 2, 1]
        taken = np.concatenate([row for step in range(3) for row in run.batches.rows_of_step(step)])
        assert sorted(taken) == list(range(7))
        run.train()
        lines = numbers(tmp_path / str(devices))
        assert sum(line["supervised_tokens"] for line in lines) == run.batches.examples.supervised_tokens
        losses[devices] = [line["loss"] for line in lines]
    # Both compute in float32, and differ in the order of sums over rows.
    np.testing.assert_allclose(losses[2], losses[1], rtol=2e-5)
