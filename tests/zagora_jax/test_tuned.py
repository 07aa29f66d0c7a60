"""Bringing a run's tuned model back."""

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
from zagora_jax.errors import UserError
from zagora_jax.train_state import initial_state
from zagora_jax.tuned import open_tuned


@pytest.fixture
def run(tmp_path):
    model = tiny_llama(tmp_path / "model")
    return finished_run(tmp_path / "run", tiny_config(model, tmp_path / "run", tmp_path / "rows.jsonl"))


def values(adapters):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(adapters)]


def test_the_newest_adapter_is_loaded(run):
    tuned = open_tuned(run.path)
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
    state = initial_state(other, optax.identity(), "float32")._replace(step=jnp.int32(5))
    StateWriter(run.checkpoints, keep=1, after_step=0).save(state, {})
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
    with pytest.raises(UserError, match="has shape"):
        open_tuned(run.path)


@pytest.mark.parametrize("change", [{"alpha": 64}, {"use_rslora": True}])
def test_another_scale_than_the_adapter_was_trained_with_is_refused(run, change):
    config = run.read_config()
    run.write_config(config.model_copy(update={"lora": config.lora.model_copy(update=change)}))
    with pytest.raises(UserError, match=r"was trained with rank 4, alpha 32, .* Set its lora options back"):
        open_tuned(run.path)


def test_an_adapter_of_a_diverged_training_is_refused(run):
    tensors, config = read_adapter(run.adapter)
    name = min(tensors)
    tensors[name][0, 0] = np.nan
    write_adapter(run.adapter, tensors, config)
    with pytest.raises(UserError, match=rf"tensor {name} holds numbers that are not finite"):
        open_tuned(run.path)
