import json

import ml_dtypes
import numpy as np
import pytest
from checkpoint_builders import CONFIG, llama_tensors, write_gguf
from gguf import GGMLQuantizationType, RopeScalingType, dequantize, quantize

from zagora_jax.checkpoints.gguf import GGUFCheckpoint
from zagora_jax.checkpoints.gguf_rope import llama3_factors
from zagora_jax.errors import UserError

# Values that the metadata holds or implies.
IMPLIED = {
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "dtype": "float32",
    "torch_dtype": "float32",
}


def open_gguf(path):
    return GGUFCheckpoint.open(path, "given")


def test_config_comes_back(tmp_path):
    checkpoint = open_gguf(write_gguf(tmp_path / "x.gguf"))
    assert {key: checkpoint.config[key] for key in CONFIG | IMPLIED} == CONFIG | IMPLIED
    assert json.loads(checkpoint.assets["config.json"]) == checkpoint.config


def test_tensors_come_back_in_hugging_faces_order(tmp_path):
    tensors = llama_tensors() | {"lm_head.weight": np.ones((128, 64), np.float32)}
    checkpoint = open_gguf(write_gguf(tmp_path / "x.gguf", tensors))
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor, err_msg=name)
        np.testing.assert_array_equal(checkpoint.read_rows(name, 5, 23), tensor[5:23], err_msg=name)
        assert checkpoint.read_rows(name, 4, 4).shape == (0, *tensor.shape[1:])
    assert checkpoint.config["tie_word_embeddings"] is False


def test_biases_of_q_and_k_are_reordered_too(tmp_path):
    biases = {
        f"model.layers.{layer}.self_attn.{part}_proj.bias": np.arange(size, dtype=np.float32)
        for layer in range(2)
        for part, size in {"q": 64, "k": 32, "v": 32, "o": 64}.items()
    }
    checkpoint = open_gguf(write_gguf(tmp_path / "x.gguf", llama_tensors() | biases))
    for name, bias in biases.items():
        np.testing.assert_array_equal(checkpoint.read(name), bias, err_msg=name)
    assert checkpoint.config["attention_bias"] is True


def test_quantised_tensors_are_bfloat16_and_norms_keep_float32(tmp_path):
    tensors = llama_tensors()
    checkpoint = open_gguf(write_gguf(tmp_path / "x.gguf", tensors, GGMLQuantizationType.Q8_0))
    name = "model.layers.1.mlp.down_proj.weight"
    expected = dequantize(quantize(tensors[name], GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(checkpoint.read(name), expected.astype(ml_dtypes.bfloat16))
    assert checkpoint.tensors[name].dtype == checkpoint.read(name).dtype == ml_dtypes.bfloat16
    assert checkpoint.tensors["model.norm.weight"].dtype == np.float32
    assert checkpoint.config["dtype"] == "bfloat16"


def test_agrees_with_transformers_reading_of_the_same_file(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    path = write_gguf(tmp_path / "x.gguf", kind=GGMLQuantizationType.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    checkpoint = open_gguf(path)
    state = theirs.state_dict()
    assert set(checkpoint.tensors) == set(state) - {"lm_head.weight"}
    for name in checkpoint.tensors:
        ours = checkpoint.read(name)
        np.testing.assert_array_equal(ours, state[name].numpy().astype(ours.dtype), err_msg=name)
    for key in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "vocab_size", "max_position_embeddings"):
        assert getattr(theirs.config, key) == pytest.approx(checkpoint.config[key])


def test_layout_is_one_small_file(tmp_path):
    checkpoint = open_gguf(write_gguf(tmp_path / "x.gguf"))
    assert set(checkpoint.layout.values()) == {"model.safetensors"}
    assert set(checkpoint.layout) == set(checkpoint.tensors)


def rope_freqs(factor):
    return lambda writer: writer.add_tensor(
        "rope_freqs.weight", llama3_factors(16, 500000.0, factor).astype(np.float32)
    )


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised(tmp_path, factor):
    path = write_gguf(tmp_path / "x.gguf", freq_base=500000.0, edit=rope_freqs(factor))
    checkpoint = open_gguf(path)
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert checkpoint.ignored == ("rope_freqs.weight",)


def test_llama3_factors_equal_transformers():
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_theta=500000.0, rope_scaling=scaling)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    # transformers computes in float32: a few units in the last place of 6e-8.
    np.testing.assert_allclose(plain / theirs.numpy(), llama3_factors(128, 500000.0, 8.0), rtol=2e-6)


def test_other_frequency_divisors_are_refused(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", freq_base=10000.0, edit=rope_freqs(8.0))
    with pytest.raises(UserError, match=r"rope_freqs\.weight is not the scaling of Llama 3\.1"):
        open_gguf(path)


def test_divisors_of_one_scale_nothing(tmp_path):
    ones = np.ones(8, np.float32)
    path = write_gguf(tmp_path / "x.gguf", edit=lambda writer: writer.add_tensor("rope_freqs.weight", ones))
    assert open_gguf(path).config["rope_scaling"] is None


def linear(writer):
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def yarn(writer):
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda writer: writer.add_rope_scaling_type(RopeScalingType.NONE), None),
        (linear, {"rope_type": "linear", "factor": 4.0}),
        (lambda writer: writer.add_float32("llama.rope.scale_linear", 2.0), {"rope_type": "linear", "factor": 2.0}),
        (yarn, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    ],
)
def test_scaling_in_the_metadata_is_translated(tmp_path, edit, expected):
    assert open_gguf(write_gguf(tmp_path / "x.gguf", edit=edit)).config["rope_scaling"] == expected


def both(writer):
    linear(writer)
    rope_freqs(8.0)(writer)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.add_rope_scaling_type(RopeScalingType.LONGROPE), "llama.rope.scaling.type 'longrope'"),
        (lambda w: (yarn(w), w.add_rope_scaling_attn_factors(2.0)), "llama.rope.scaling.attn_factor = 2.0"),
        (lambda w: w.add_rope_scaling_type(RopeScalingType.LINEAR), "no metadata entry llama.rope.scaling.factor"),
        (both, "scales rotary frequencies twice"),
        (lambda w: w.add_expert_count(8), "llama.expert_count = 8"),
        (lambda w: w.add_sliding_window(4096), "llama.attention.sliding_window = 4096"),
        (lambda w: w.add_float32("llama.unheard_of", 1.0), "llama.unheard_of = 1.0 is not supported"),
        (lambda w: w.add_key_length(32), "rope.dimension_count is 16, but a head has 32"),
        (
            lambda w: w.add_tensor("blk.0.ffn_gate_inp.weight", np.ones((2, 2), np.float32)),
            "'blk.0.ffn_gate_inp.weight'",
        ),
        (lambda w: w.add_tensor("odd", np.ones(2, np.float32)), "tensor 'odd' belongs to no Llama model"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(tmp_path, edit, message):
    with pytest.raises(UserError, match=message):
        open_gguf(write_gguf(tmp_path / "x.gguf", edit=edit))


def test_expert_count_zero_is_harmless(tmp_path):
    open_gguf(write_gguf(tmp_path / "x.gguf", edit=lambda writer: writer.add_expert_count(0)))


def test_explicit_head_dimension(tmp_path):
    tensors = {name: tensor for name, tensor in llama_tensors().items() if "_proj" not in name}
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.arange(128 * 64, dtype=np.float32).reshape(128, 64)
    edit = lambda w: (w.add_key_length(32), w.add_value_length(32))  # noqa: E731
    checkpoint = open_gguf(write_gguf(tmp_path / "x.gguf", tensors, dimension_count=32, edit=edit))
    assert checkpoint.config["head_dim"] == 32
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(checkpoint.read(name), tensors[name])


def test_other_architectures_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"general\.architecture is 'qwen2'"):
        open_gguf(write_gguf(tmp_path / "x.gguf", architecture="qwen2"))


def test_missing_embedding(tmp_path):
    tensors = llama_tensors()
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(UserError, match=r"no tensor token_embd\.weight"):
        open_gguf(write_gguf(tmp_path / "x.gguf", tensors))
