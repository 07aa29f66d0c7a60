"""Bringing a run's tuned model back."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from oracles import tiny_llama
from runs import finished_run, tiny_config

from zagora_jax.checkpoints.peft import read_adapter, write_adapter
from zagora_jax.checkpoints.run_state import StateWriter
from zagora_jax.config_file import save_config
from zagora_jax.errors import UserError
from zagora_jax.train_state import initial_state
from zagora_jax.tuned import open_tuned


@pytest.fixture
def run(tmp_path):
    model = tiny_llama(tmp_path / "model")
    config = tiny_config(model, tmp_path / "run", tmp_path / "rows.jsonl", embeddings="int8")
    return finished_run(tmp_path / "run", config)


def values(adapters):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(adapters)]


def test_the_newest_adapter_is_loaded(run):
    tuned = open_tuned(run.path)
    assert tuned.base.model.embeddings == "int8"
    tensors, _ = read_adapter(run.adapter)
    (stack,) = (
        variable.get_value()
        for path, variable in nnx.to_flat_state(tuned.adapters)
        if path[-3:] == ("q_proj", "adapter", "lora_B")
    )
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_B.weight"
        assert np.array_equal(stack[layer], tensors[name])


def test_the_adapter_of_a_checkpoint_is_loaded(run):
    tuned = open_tuned(run.path)
    other = jax.tree.map(lambda leaf: leaf + 1, tuned.adapters)
    save_state(run, other, 5)
    found = values(open_tuned(run.path, step=5).adapters)
    assert all(np.array_equal(a, b) for a, b in zip(found, values(other), strict=True))
    with pytest.raises(UserError, match=r"no checkpoint of step 4; the steps saved are 5"):
        open_tuned(run.path, step=4)


def test_a_step_of_a_run_without_checkpoints(run):
    with pytest.raises(UserError, match=r"no checkpoint of step 4; the steps saved are none"):
        open_tuned(run.path, step=4)


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"not a run directory \(no config.yaml\)"):
        open_tuned(tmp_path)


def test_a_run_without_an_adapter_yet_is_refused(run):
    shutil.rmtree(run.adapter)
    with pytest.raises(UserError, match="no adapter is saved yet"):
        open_tuned(run.path)


def test_a_base_model_that_is_gone_is_named(run, tmp_path):
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(UserError, match=rf"{run.path}: the base model that it was trained on: .*{tmp_path}/model"):
        open_tuned(run.path)


def test_a_base_model_that_has_changed_is_refused(run, tmp_path):
    tiny_llama(tmp_path / "model", seed=1)
    with pytest.raises(UserError, match=rf"{tmp_path}/model: is not the model that {run.path} was trained on any more"):
        open_tuned(run.path)


def test_a_report_that_is_gone_is_named(run):
    run.report.unlink()
    with pytest.raises(UserError, match=r"report.json: no model_fingerprint"):
        open_tuned(run.path)


def test_an_adapter_of_other_modules_is_refused(run):
    """config.yaml and adapter/ belong together."""
    other = run.read_config().model_copy(update={"lora": run.read_config().lora.model_copy(update={"rank": 8})})
    run.write_config(other)
    run.update_report({"options": other.model_dump(mode="json")})
    with pytest.raises(UserError, match="has shape"):
        open_tuned(run.path)


@pytest.mark.parametrize("change", [{"lora_alpha": 64}, {"use_rslora": True}])
def test_another_scale_than_the_adapter_was_trained_with_is_refused(run, change):
    path = run.adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=r"was trained with rank 4, alpha (32|64), .* Set its lora options back"):
        open_tuned(run.path)


def save_state(run, adapters, step):
    state = initial_state(adapters, optax.identity(), "float32")._replace(step=jnp.int32(step))
    progress = {"options": run.read_config().model_dump(mode="json")}
    StateWriter(run.checkpoints, keep=3, after_step=step).save(state, progress)


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [
        ("quantization", "quantization: nf4", "quantization: none"),
        ("embeddings", "embeddings: int8", "embeddings: none"),
        ("lora", "alpha: 32", "alpha: 64"),
    ],
)
@pytest.mark.parametrize("step", [None, 5])
def test_a_config_that_was_edited_by_hand_is_refused(run, step, name, before, now):
    save_state(run, open_tuned(run.path).adapters, 5)
    text = run.config.read_text()
    assert before in text
    run.config.write_text(text.replace(before, now))
    with pytest.raises(UserError, match=rf"{run.config}: {name} is .*, but the adapter was .* Set it back"):
        open_tuned(run.path, step)


def test_options_that_an_old_run_does_not_mention_are_their_defaults(run):
    """config.yaml and the report, as if they had been written before those options existed."""
    config = run.read_config()
    save_config(config, run.config, defaults=False)
    run.update_report({"options": config.model_dump(mode="json", exclude_defaults=True)})
    assert "use_dora" not in run.config.read_text() + run.report.read_text()
    assert open_tuned(run.path).config == config
    run.update_report({"options": {"lora": config.lora.model_dump(mode="json")}})
    with pytest.raises(UserError, match="embeddings is int8, but the adapter was trained with none"):
        open_tuned(run.path)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)


def test_a_damaged_adapter_gives_way_to_the_newest_checkpoint_that_is_not(run, caplog):
    adapters = open_tuned(run.path).adapters
    other = jax.tree.map(lambda leaf: leaf + 1, adapters)
    save_state(run, other, 5)
    save_state(run, adapters, 6)
    flip(run.checkpoints / "6" / "progress.json")
    write_adapter(run.adapter, *read_adapter(run.adapter))
    flip(run.adapter / "adapter_model.safetensors")
    found = values(open_tuned(run.path).adapters)
    assert all(np.array_equal(a, b) for a, b in zip(found, values(other), strict=True))
    assert f"{run.checkpoints}/6: the checkpoint is damaged (progress.json" in caplog.text
    assert "adapter_model.safetensors: is damaged" in caplog.text
    assert "The adapter of checkpoint 5 is used" in caplog.text
    with pytest.raises(UserError, match=r"6: the checkpoint is damaged"):
        open_tuned(run.path, step=6)
    flip(run.checkpoints / "5" / "progress.json")
    with pytest.raises(UserError, match="every checkpoint is damaged: 5, 6"):
        open_tuned(run.path)


def test_a_damaged_adapter_without_checkpoints_is_named(run):
    write_adapter(run.adapter, *read_adapter(run.adapter))
    flip(run.adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"adapter_model.safetensors: is damaged: .* \(checksum\)"):
        open_tuned(run.path)


def test_an_adapter_of_a_diverged_training_is_refused(run):
    tensors, config = read_adapter(run.adapter)
    name = min(tensors)
    tensors[name][0, 0] = np.nan
    write_adapter(run.adapter, tensors, config)
    with pytest.raises(UserError, match=rf"tensor {name} holds numbers that are not finite"):
        open_tuned(run.path)
