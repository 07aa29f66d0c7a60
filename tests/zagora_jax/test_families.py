"""Every family against transformers and PEFT: logits, the adapter's gradients, generation and export."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracles
import pytest
import safetensors.numpy
from subjects import Subject, assert_gradients_equal, assert_logits_equal

from models.parameters import split
from zagora_jax.base import open_base
from zagora_jax.checkpoints.merge import Merge
from zagora_jax.checkpoints.merge_checks import Update
from zagora_jax.errors import UserError
from zagora_jax.generation import Generator, Sampling
from zagora_jax.option_groups import LoraConfig

pytest.importorskip("torch")


@dataclass(frozen=True)
class Case:
    """A model_type, what its config says beside the sizes, and the layers' windows and rotation that come of it."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    windows: tuple[int | None, ...] = (None, None, None)
    rotated: tuple[bool, ...] = (True, True, True)


CASES = {
    "mistral": Case("mistral", {"sliding_window": 4}, windows=(4, 4, 4)),
    "qwen2": Case("qwen2", {"sliding_window": 4, "max_window_layers": 1}),
    "qwen2 with windows": Case(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        windows=(None, 4, 4),
    ),
    "qwen3": Case("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "smollm3": Case(
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5},
        windows=(None, 5, None),
        rotated=(True, False, True),
    ),
    "phi3": Case("phi3", {"sliding_window": 7}, windows=(7, 7, 7)),
    "gemma2": Case(
        "gemma2",
        {
            "sliding_window": 5,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            # So small that they bend what the tiny model computes.
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        windows=(5, None, 5),
    ),
    "gemma3": Case(
        "gemma3_text",
        {
            "sliding_window": 5,
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
        windows=(5, None, 5),
    ),
}
# One of a kind is enough where a second would compile nothing new.
GRADIENT_CASES = (
    pytest.param("mistral", marks=pytest.mark.slow),
    "qwen2 with windows",
    "qwen3",
    "smollm3",
    "phi3",
    "gemma2",
    "gemma3",
)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(tmp_path, name):
    case = CASES[name]
    directory = oracles.tiny_model(tmp_path / "model", case.model_type, **case.config)
    subject = Subject(directory)
    config = subject.base.model.config
    assert (config.windows, config.rotated) == (case.windows, case.rotated)
    tokens = np.random.default_rng(0).integers(0, 320, (1, 120))
    assert_logits_equal(subject.logits(tokens), oracles.transformers_logits(directory, tokens))


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_equal_those_of_peft(tmp_path, monkeypatch, name):
    monkeypatch.setattr("models.attention.LARGEST_BLOCK", 16)  # so that windows end within, and beyond, a block
    case = CASES[name]
    directory = oracles.tiny_model(tmp_path / "model", case.model_type, **case.config)
    lora = LoraConfig(rank=2, alpha=4)
    targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if case.model_type == "phi3" else oracles.PROJECTIONS
    tensors = oracles.random_adapter(directory, rank=2, targets=targets)
    adapter = oracles.write_adapter(tmp_path / "adapter", tensors, alpha=4, targets=targets)
    batch = oracles.random_batch(0, (1, 2, 40))
    ours = Subject(directory, adapter, lora).gradients(batch)
    theirs = oracles.peft_bnb_gradients(directory, adapter, batch, quantization="none", masked=False)
    assert_gradients_equal(ours, theirs)


@pytest.mark.parametrize("name", ["mistral", "smollm3", "gemma2", "gemma3"])
def test_greedy_generation_equals_that_of_transformers(tmp_path, name):
    from transformers import AutoModelForCausalLM

    case = CASES[name]
    directory = oracles.tiny_model(tmp_path / "model", case.model_type, tokenizer=True, **case.config)
    base = open_base(str(directory), quantization="none", dtype="float32", lora=None)
    graph, _, adapters = split(base.model)
    generator = Generator(graph, base.load(), adapters, base.tokenizer(), frozenset())
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, length).tolist() for length in (3, 11)]  # one below, one beyond the window
    ours = generator.generate(prompts, Sampling(max_new_tokens=8))
    network = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    import torch

    for prompt, answer in zip(prompts, ours, strict=True):
        theirs = network.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert answer == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", [name for name in CASES if name != "qwen2 with windows"])
def test_a_merged_export_is_the_adapted_model(tmp_path, name):
    case = CASES[name]
    directory = oracles.tiny_model(tmp_path / "model", case.model_type, **case.config)
    targets = ["qkv_proj", "down_proj"] if name == "phi3" else ["q_proj", "down_proj"]
    tensors = oracles.random_adapter(directory, rank=2, targets=targets)
    adapter = oracles.write_adapter(tmp_path / "adapter", tensors, alpha=4, targets=targets)
    lora = LoraConfig(rank=2, alpha=4, targets=targets)
    base = open_base(str(directory), quantization="none", dtype="float32", lora=lora)
    assert base.checkpoint is not None
    prefix = "base_model.model."
    updates = {
        key.removeprefix(prefix).replace(".lora_A.weight", ".weight"): Update(
            a, tensors[key.replace("_A.", "_B.")], 2.0
        )
        for key, a in tensors.items()
        if ".lora_A." in key
    }
    merged = tmp_path / "merged"
    merged.mkdir()
    Merge(base.checkpoint, base.model, updates).write(merged)
    (merged / "config.json").write_bytes(base.checkpoint.assets["config.json"])
    tokens = np.random.default_rng(1).integers(0, 320, (1, 40))
    theirs = oracles.transformers_logits(directory, tokens, adapter=adapter)
    found = oracles.transformers_logits(merged, tokens)
    assert np.abs(found - theirs).max() <= 2e-4 * np.abs(theirs).max()


def test_biases_that_the_config_does_not_mention_are_needed(tmp_path):
    directory = oracles.tiny_model(tmp_path / "model", "qwen2")
    assert "attention_bias" not in json.loads((directory / "config.json").read_text())
    weights = safetensors.numpy.load_file(directory / "model.safetensors")
    assert open_base(str(directory), quantization="none", dtype="float32", lora=None).model.config.qkv_bias
    del weights["model.layers.1.self_attn.k_proj.bias"]
    safetensors.numpy.save_file(weights, directory / "model.safetensors")
    with pytest.raises(UserError, match=r"1 of \d+ tensors are missing, first 'model.layers.1.self_attn.k_proj.bias'"):
        open_base(str(directory), quantization="none", dtype="float32", lora=None)
