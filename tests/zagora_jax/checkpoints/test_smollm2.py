"""A real model: SmolLM2-135M-Instruct as a GGUF file of Q4_1 and Q8_0 tensors."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from zagora_jax.checkpoints import load_tokenizer, open_checkpoint


@pytest.fixture(scope="module")
def checkpoint(smollm2):
    return open_checkpoint(str(smollm2))


def test_config(checkpoint):
    published = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: checkpoint.config[key] for key in published} == published
    assert len(checkpoint.tensors) == 272


def test_tokenizer(checkpoint):
    tokenizer = load_tokenizer(checkpoint)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    # Digits stand alone; a text begins without BOS.
    assert tokenizer("in 1969").tokens() == ["in", "Ġ", "1", "9", "6", "9"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(chat).tokens().count("<|im_end|>") == 2
    for text in ("  Two  spaces\n\n\tand a tab", "naïve 日本語 🦙", "it's 'quoted'"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_peak_memory_is_a_fraction_of_the_model(smollm2):
    # 270 MB in bfloat16; its largest tensor, the embedding, has 57 MB.
    program = """
import resource, sys
from zagora_jax.checkpoints import open_checkpoint
checkpoint = open_checkpoint(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in checkpoint.tensors:
    checkpoint.read(name)
largest = max(info.nbytes for info in checkpoint.tensors.values())
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / largest)
"""
    done = subprocess.run([sys.executable, "-c", program, smollm2], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2.5


@pytest.mark.slow  # transformers takes most of a minute; test_gguf.py compares with it on a tiny model
def test_every_weight_equals_transformers_reading(checkpoint, smollm2_directory):
    theirs = open_checkpoint(str(smollm2_directory))
    assert set(theirs.tensors) == set(checkpoint.tensors)
    for name in theirs.tensors:
        ours = checkpoint.read(name)
        assert theirs.tensors[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(ours.astype(ml_dtypes.bfloat16), theirs.read(name), err_msg=name)


def test_assets_are_what_a_hugging_face_folder_holds(checkpoint):
    assert set(checkpoint.assets) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads(checkpoint.assets["generation_config.json"]) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
