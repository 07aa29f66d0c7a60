"""Reading of config.json: what old and new files leave out, and what no model can be made of."""

import pytest
from transformers import AutoConfig, LlamaConfig

from models.config import ModelConfig
from models.families import FAMILIES

LLAMA_1 = {
    "architectures": ["LLaMAForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
}


def test_a_modern_config():
    hf = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
    ).to_dict()
    config = ModelConfig.from_hf(hf)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (320, 64, 160)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 24)
    assert (config.rms_norm_eps, config.max_positions) == (1e-5, 4096)
    assert config.tie_embeddings
    assert config.qkv_bias
    assert config.o_bias
    assert config.mlp_bias
    assert (config.rope.rope_type, config.rope.theta, config.rope.factor, config.rope.head_dim) == (
        "linear",
        5e5,
        2,
        24,
    )


@pytest.mark.parametrize(
    ("extra", "positions"), [({}, 2048), ({"max_sequence_length": 1024}, 1024), ({"max_position_embeddings": 512}, 512)]
)
def test_a_llama_1_config(extra, positions):
    config = ModelConfig.from_hf(LLAMA_1 | extra)
    assert (config.num_kv_heads, config.head_dim, config.max_positions) == (4, 16, positions)
    assert (config.rope.rope_type, config.rope.theta, config.rope.context) == ("default", 10000.0, positions)
    assert not config.tie_embeddings
    assert not config.qkv_bias
    assert not config.mlp_bias


@pytest.mark.parametrize(
    "key",
    [
        "num_key_value_heads",
        "head_dim",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "max_position_embeddings",
        "hidden_act",
        "attention_dropout",
    ],
)
def test_null_counts_as_absent(key):
    assert ModelConfig.from_hf(LLAMA_1 | {key: None}) == ModelConfig.from_hf(LLAMA_1)


def test_the_defaults_are_those_of_transformers():
    ours, theirs = ModelConfig.from_hf({k: v for k, v in LLAMA_1.items() if k != "rms_norm_eps"}), LlamaConfig()
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_positions == theirs.max_position_embeddings
    rope = theirs.rope_parameters
    assert ours.rope.theta == rope.get("full_attention", rope)["rope_theta"]
    assert (ours.local_rope and ours.local_rope.theta) == rope.get("sliding_attention", {}).get("rope_theta")
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert (ours.qkv_bias, ours.mlp_bias) == (theirs.attention_bias, theirs.mlp_bias)


def test_the_name_of_a_model_proves_nothing():
    # As in a published file: named Llama 3.1, without its rope scaling, with six more words than Llama 3.
    config = ModelConfig.from_hf(
        LLAMA_1
        | {
            "_name_or_path": "meta-llama/Meta-Llama-3.1-70B-Instruct",
            "rope_scaling": None,
            "rope_theta": 500000.0,
            "max_position_embeddings": 8192,
            "vocab_size": 128262,
            "torch_dtype": "float32",
        }
    )
    assert (config.rope.rope_type, config.max_positions, config.vocab_size) == ("default", 8192, 128262)


def test_configs_are_hashable_values():
    assert {ModelConfig.from_hf(LLAMA_1), ModelConfig.from_hf(dict(LLAMA_1))} == {ModelConfig.from_hf(LLAMA_1)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "no model_type; known families: llama"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not a known family"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected 10000 at most"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, found 0"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers must be a positive integer, found 2.0"),
        ({"intermediate_size": "160"}, "intermediate_size must be a positive integer, found '160'"),
        ({"vocab_size": True}, "vocab_size must be a positive integer, found True"),
        ({"num_attention_heads": 5}, "hidden_size 64 is not a multiple of num_attention_heads 5"),
        ({"num_attention_heads": 5, "head_dim": 12, "num_key_value_heads": 2}, "5 is not a multiple of num_key_value"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; expected 'silu'"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1 is not supported"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, found 1"),
        ({"attention_bias": "false"}, "attention_bias must be true or false, found 'false'"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a positive number, found '1e-6'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, found 0"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is not a known family"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number, found 1000"),
        ({"rope_scaling": 1}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "foo"}}, "config.json:rope_scaling.rope_type 'foo' is not supported"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(LLAMA_1 | change)


# The smallest config of each family says nothing that transformers would fill in.
SILENT = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_fills_in(family):
    ours = ModelConfig.from_hf({"model_type": family, **SILENT})
    theirs = AutoConfig.for_model(family, **SILENT, pad_token_id=0)
    assert (ours.num_kv_heads, ours.max_positions) == (theirs.num_key_value_heads, theirs.max_position_embeddings)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 2)
    assert (ours.rms_norm_eps, ours.tie_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    rope = theirs.rope_parameters
    assert ours.rope.theta == rope.get("full_attention", rope)["rope_theta"]
    assert (ours.local_rope and ours.local_rope.theta) == rope.get("sliding_attention", {}).get("rope_theta")
    assert ours == ModelConfig.from_hf(theirs.to_dict())
    windowed = [kind == "sliding_attention" for kind in getattr(theirs, "layer_types", [])]
    window = getattr(theirs, "sliding_window", None)
    assert ours.windows == (tuple(window if w else None for w in windowed) if windowed else (window,) * 4)
    assert ours.rotated == tuple(map(bool, getattr(theirs, "no_rope_layers", [1] * 4)))


def test_a_null_window_is_none():
    # Mistral 7B from version 0.2 on; where the field is absent, as in no published file, transformers assumes 4096.
    assert ModelConfig.from_hf({"model_type": "mistral", **SILENT, "sliding_window": None}).windows == (None,) * 4
    assert ModelConfig.from_hf({"model_type": "mistral", **SILENT}).windows == (4096,) * 4


def test_a_yi_config():
    # The fields of 01-ai/Yi-6B that say what it is, with sizes cut.
    yi = {
        **SILENT,
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 4,
        "rope_theta": 5e6,
        "pretraining_tp": 1,
    }
    config = ModelConfig.from_hf({"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **yi})
    assert (config.num_kv_heads, config.rope.theta, config.qkv_bias) == (4, 5e6, False)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window must be a positive integer or null, found 0"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window must be true or false, found 1"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "2"}, "max_window_layers must be a whole number"),
        (
            "qwen3",
            {"use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types must be a list of 4 of",
        ),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers must be a list of 4 numbers 0 or 1"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be a positive integer, found 0"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn' of a phi3 model is not supported"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop 0.1 is not supported"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "whole heads are rotated"),
    ],
)
def test_impossible_fields_of_a_family_are_refused(family, change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({"model_type": family, **SILENT, **change})
