"""The model against transformers and PEFT: logits, LoRA gradients, and what training sees of packed rows."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import safetensors.numpy
from flax import nnx
from subjects import LOGIT_TOLERANCE, Subject, as_batch, assert_gradients_equal, assert_logits_equal

from models.quantization import nf4
from zagora_jax.adapter import peft_shapes
from zagora_jax.base import open_base
from zagora_jax.data.batches import Batch
from zagora_jax.option_groups import LoraConfig
from zagora_jax.step import ForwardOptions, loss_sum, make_evaluation_step

pytest.importorskip("torch")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
BIASES = {"attention_bias": True, "mlp_bias": True}
# bitsandbytes' CPU kernel dequantises such widths wrongly, so it cannot be the oracle for them; see oracles.load_base.
ODD_WIDTHS = {"hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 2}

# What differs from the tiny model of the oracles: one case for each thing that goes wrong silently.
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped_queries": {},
    "one_head_a_group": {"num_key_value_heads": 4},
    "tied_head": {"tie_word_embeddings": True},
    "explicit_head_dim": {"head_dim": 24},
    "biases": BIASES,
    "odd_widths": ODD_WIDTHS,
    "rope_linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "rope_dynamic": {"rope_parameters": DYNAMIC_ROPE},
    "rope_llama3": {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 512},
    "rope_yarn": {"rope_parameters": YARN_ROPE, "max_position_embeddings": 256},
}


def with_adapter(tmp_path, config=None, lora=None, quantization="nf4"):
    """A tiny model under a random adapter on what `lora` targets."""
    lora = lora or LoraConfig(rank=4, alpha=8)
    directory = oracles.tiny_llama(tmp_path / "model", **(config or {}))
    base = open_base(str(directory), quantization="none", dtype="float32", lora=lora)
    tensors = {
        name: tensor
        for name, tensor in oracles.random_adapter(directory, rank=lora.rank).items()
        if name in peft_shapes(base.model)
    }
    targets = oracles.PROJECTIONS if lora.targets == "all-linear" else lora.targets
    adapter = oracles.write_adapter(
        tmp_path / "adapter", tensors, alpha=lora.alpha, use_rslora=lora.use_rslora, targets=targets
    )
    return Subject(directory, adapter, lora, quantization)


def dequantized_copy(directory, target):
    """The model with every linear layer's weight quantised to NF4 and back."""
    target.mkdir()
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("proj.weight"):
            tensors[name] = np.asarray(nf4.dequantize(nf4.quantize(weight), jnp.float32))
    safetensors.numpy.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((directory / "config.json").read_bytes())
    return target


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(tmp_path, variant):
    config = {"max_position_embeddings": 64, **VARIANTS[variant]}
    directory = oracles.tiny_llama(tmp_path / "model", **config)
    tokens = np.random.default_rng(0).integers(0, 320, (2, 120))
    assert_logits_equal(Subject(directory).logits(tokens), oracles.transformers_logits(directory, tokens))


def test_logits_under_an_nf4_base_and_an_adapter_equal_those_of_peft(tmp_path):
    subject = with_adapter(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 320, (2, 120))
    theirs = oracles.transformers_logits(subject.directory, tokens, adapter=subject.adapter, quantization="nf4")
    assert_logits_equal(subject.logits(tokens), theirs)


@pytest.mark.parametrize("use_rslora", [False, True], ids=["alpha / r", "rsLoRA"])
def test_gradients_over_nf4_equal_those_of_peft_over_bitsandbytes(tmp_path, use_rslora):
    subject = with_adapter(tmp_path, lora=LoraConfig(rank=4, alpha=8, use_rslora=use_rslora))
    batch = oracles.random_batch(0, (2, 2, 40), packed=True)
    theirs = oracles.peft_bnb_gradients(subject.directory, subject.adapter, batch)
    assert_gradients_equal(subject.gradients(batch), theirs)


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        ({}, ["q_proj", "down_proj"]),
        ({"tie_word_embeddings": True}, r".*\.layers\.\d+\.(self_attn\.[kv]|mlp\.up)_proj"),
        (BIASES, "all-linear"),
    ],
    ids=["a list of targets", "an expression, and a tied head", "biases"],
)
def test_gradients_over_a_plain_base_equal_those_of_peft(tmp_path, config, targets):
    subject = with_adapter(tmp_path, config, LoraConfig(rank=4, alpha=8, targets=targets), quantization="none")
    batch = oracles.random_batch(0, (1, 2, 40), packed=True)
    theirs = oracles.peft_bnb_gradients(subject.directory, subject.adapter, batch, quantization="none")
    assert_gradients_equal(subject.gradients(batch), theirs)


def test_nf4_of_widths_that_are_no_multiple_of_the_block(tmp_path):
    subject = with_adapter(tmp_path, ODD_WIDTHS)
    copy = dequantized_copy(subject.directory, tmp_path / "copy")
    tokens = np.random.default_rng(0).integers(0, 320, (2, 120))
    assert_logits_equal(subject.logits(tokens), oracles.transformers_logits(copy, tokens, adapter=subject.adapter))
    batch = oracles.random_batch(0, (1, 2, 40), packed=True)
    theirs = oracles.peft_bnb_gradients(copy, subject.adapter, batch, quantization="none")
    assert_gradients_equal(subject.gradients(batch), theirs)


@pytest.mark.parametrize(("dtype", "rope"), [("bfloat16", None), ("float32", DYNAMIC_ROPE)])
def test_a_packed_row_does_not_change_by_a_bit_when_its_neighbours_change(tmp_path, monkeypatch, dtype, rope):
    monkeypatch.setattr("models.attention.LARGEST_BLOCK", 16)  # so that rows begin and end within blocks
    config = {"max_position_embeddings": 16} | ({"rope_parameters": rope} if rope else {})
    subject = dataclasses.replace(with_adapter(tmp_path, config), dtype=dtype)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 320, (1, 64))
    segments = np.repeat([[1, 2, 3, 0]], [20, 24, 15, 5], axis=1)
    positions = np.concatenate([np.arange(n) for n in (20, 24, 15, 5)])[None]
    row = segments == 2
    packed = subject.logits_function(tokens, positions, segments)[row]

    others = np.where(row, tokens, rng.integers(0, 320, tokens.shape))
    np.testing.assert_array_equal(subject.logits_function(others, positions, segments)[row], packed)
    # Nor when its neighbours are cut otherwise, or are none at all.
    cut = np.where(np.arange(64) < 9, 1, np.where(row, 2, np.where(np.arange(64) < 20, 3, 4)))
    starts = np.maximum.accumulate(np.where(np.diff(cut, prepend=-1) != 0, np.arange(64), 0), axis=-1)
    np.testing.assert_array_equal(subject.logits_function(others, np.arange(64) - starts, cut)[row], packed)
    # It has the logits that it has alone, up to the rounding of another order of sums.
    alone = subject.logits_function(tokens[row][None], positions[row][None], None)[0]
    tolerance = LOGIT_TOLERANCE if dtype == "float32" else 2**-8 * 8
    assert np.abs(alone - packed).max() <= tolerance * np.abs(alone).max()


def test_dropout_acts_where_it_is_asked_for_alone(tmp_path):
    micro_batch = Batch(*(a[0] for a in as_batch(oracles.random_batch(0, (1, 2, 40)))))
    plain = with_adapter(tmp_path, quantization="none")
    dropping = dataclasses.replace(plain, lora=plain.lora.model_copy(update={"dropout": 0.5}))
    options = ForwardOptions(kernel="chunked", remat="none", segmented=False)

    @partial(jax.jit, static_argnums=0)
    def loss(graph, adapters, frozen, keys):
        return loss_sum(nnx.merge(graph, frozen, adapters), micro_batch, options, keys)

    def keys(seed):
        return jax.random.split(jax.random.key(seed), len(micro_batch.tokens))

    without = loss(*plain.parts, plain.frozen, None)
    assert loss(*plain.parts, plain.frozen, keys(0)) == without
    assert loss(*dropping.parts, dropping.frozen, None) == without
    with_dropout = [float(loss(*dropping.parts, dropping.frozen, keys(seed))) for seed in (0, 0, 1)]
    assert with_dropout[0] == with_dropout[1] != with_dropout[2]
    assert without not in with_dropout

    graph, adapters = dropping.parts  # evaluation drops nothing, whatever the adapter's options say
    batch = Batch(*(a[None] for a in micro_batch))
    evaluated, _ = jax.jit(make_evaluation_step(graph, options))(adapters, dropping.frozen, batch)
    assert evaluated == pytest.approx(float(without), rel=1e-6)
