"""Models by name: spellings, sizes that were never released, and folders without weights."""

import json
from pathlib import Path

import pytest

from zagora_jax.checkpoints import hub
from zagora_jax.checkpoints.known_models import KNOWN_MODELS
from zagora_jax.checkpoints.released_sizes import find_size
from zagora_jax.commands import ConfigureConfig
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig
from zagora_jax.planning.model import find_model


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("70B", "llama-3.3-70b"),
        ("8b", "llama-3.1-8b"),
        ("32B", "qwen3-32b"),
        ("135M", "smollm2-135m"),
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("Llama 3.1 8B Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-3.2-3B", "llama-3.2-3b"),
        ("Llama3.3-70B", "llama-3.3-70b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("qwen 3 8b", "qwen3-8b"),
        ("mistral-7b", "mistral-7b"),
    ],
)
def test_a_size_has_many_spellings(text, name):
    assert find_size(text)[0] == name


def test_every_known_name_finds_itself():
    assert [find_size(name)[0] for name in KNOWN_MODELS] == list(KNOWN_MODELS)


def test_a_size_of_several_families_says_which_was_taken():
    assert find_size("70B")[1] == (
        "70B was taken for llama-3.3-70b; others of this size: llama-2-70b, llama-3-70b, llama-3.1-70b",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "llama-3.2-70b",
            r"no llama-3.2 of 70B was released; the nearest are llama-3.2-3b, llama-3.2-1b; 70B are llama-3",
        ),
        ("llama-2-8b", r"no llama-2 of 8B was released; the nearest are llama-2-7b, llama-2-13b"),
        ("50B", r"no known model has that size; the nearest are 65B \(llama-1-65b\), 34B"),
        ("falcon-40b", r"no model family 'falcon' is known; known: .*llama-3.3.*qwen3"),
        ("big", r"expected a size \(70B\) or a model \(llama-3.1-8b\); known: .*llama-2-7b"),
    ],
)
def test_what_was_never_released_names_the_nearest(text, message):
    with pytest.raises(UserError, match=message):
        find_size(text)


def folder_of_config(path: Path, **fields) -> Path:
    path.mkdir()
    config = KNOWN_MODELS["smollm2-135m"] | {"num_hidden_layers": 2} | fields
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_config_alone_will_do(tmp_path):
    folder = folder_of_config(tmp_path / "model")
    model = find_model(ConfigureConfig(model=str(folder)))
    assert model.base.model.config.num_layers == 2
    assert model.train_name == str(folder)
    assert model.notes == (f"{folder} holds no weights (*.safetensors): train needs them there",)


def test_a_hub_model_fetches_its_config_alone(tmp_path, monkeypatch):
    fetched = []
    folder = folder_of_config(tmp_path / "model")

    def snapshot(hub_id, patterns):
        fetched.append((hub_id, patterns))
        return folder

    monkeypatch.setattr(hub, "_snapshot", snapshot)
    model = find_model(ConfigureConfig(model="someone/some-model"))
    assert fetched == [("someone/some-model", ["config.json"])]
    assert (model.train_name, model.base.model.config.num_layers) == ("someone/some-model", 2)


def test_a_wrong_config_names_the_field(tmp_path):
    folder = folder_of_config(tmp_path / "model", hidden_size=None)
    with pytest.raises(UserError, match=r"config.json: hidden_size is missing"):
        find_model(ConfigureConfig(model=str(folder)))


def test_another_rank_declares_other_adapters():
    model = find_model(ConfigureConfig(model="synthetic:smollm2-135m?layers=2"))
    other = model.with_lora(LoraConfig(rank=4))
    assert other.base.model.model.layers.mlp.down_proj.adapter.lora_A.get_value().shape[1] == 4
