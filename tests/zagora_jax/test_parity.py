"""The model against transformers and PEFT: logits, LoRA gradients, and what training sees of packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import oracles
from zagora_jax.adapter import load_adapter, peft_names
from zagora_jax.base import open_base
from zagora_jax.checkpoints.load import split
from zagora_jax.config import LoraConfig
from zagora_jax.data.batches import Batch
from zagora_jax.step import ForwardOptions, loss_sum

pytest.importorskip("torch")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# What differs from the tiny model of the oracles: one case for each thing that goes wrong silently.
VARIANTS = {
    "grouped_queries": {},
    "one_head_a_group": {"num_key_value_heads": 4},
    "tied_head": {"tie_word_embeddings": True},
    "explicit_head_dim": {"head_dim": 24},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "rows_across_blocks": {"hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 2},
    "rope_linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "rope_dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    "rope_llama3": {"rope_parameters": LLAMA3_ROPE},
    "rope_yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}

# Both sides compute in float32 and differ in the order of sums alone: a dot product of n <= 160 terms is off by about
# sqrt(n) * 2^-24 of its scale, some 10^-6, and a model of two layers adds up about twenty such steps.
LOGIT_TOLERANCE = 2e-4
GRADIENT_TOLERANCE = 1e-4


# bitsandbytes' CPU kernel dequantises a width that is no multiple of the block row by row, unlike its own quantiser (and
# unlike its GPU kernels); where it is the oracle, all widths are multiples of 64.
NF4_WIDTHS = {"intermediate_size": 192}


def logits(directory, tokens, adapter=None, quantization="none"):
    lora = LoraConfig(rank=4, alpha=8) if adapter else None
    base = open_base(str(directory), quantization=quantization, dtype="float32", lora=lora)
    graph, _, declared = split(base.model)
    adapters = load_adapter(adapter, base.model) if adapter else declared
    model = nnx.merge(graph, base.load(), adapters)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = model.hidden_states(jnp.asarray(tokens), positions, None, kernel="chunked")
    return np.asarray(jnp.einsum("bsd,vd->bsv", hidden, model.head))


def assert_logits_equal(ours, theirs):
    scale = np.abs(theirs).max()
    for position in (0, 1, 7, 100, ours.shape[1] - 1):
        worst = np.abs(ours[:, position] - theirs[:, position]).max() / scale
        assert worst <= LOGIT_TOLERANCE, (position, worst)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(tmp_path, variant):
    config = {"max_position_embeddings": 64, **VARIANTS[variant]}
    directory = oracles.tiny_llama(tmp_path / "model", **config)
    tokens = np.random.default_rng(0).integers(0, 320, (2, 120))
    assert_logits_equal(logits(directory, tokens), oracles.transformers_logits(directory, tokens))


def test_logits_under_an_nf4_base_and_an_adapter_equal_those_of_peft(tmp_path):
    directory = oracles.tiny_llama(tmp_path / "model", **NF4_WIDTHS)
    adapter = oracles.write_adapter(tmp_path / "adapter", oracles.random_adapter(directory, rank=4), alpha=8)
    tokens = np.random.default_rng(0).integers(0, 320, (2, 120))
    theirs = oracles.transformers_logits(directory, tokens, adapter=adapter, quantization="nf4")
    assert_logits_equal(logits(directory, tokens, adapter, "nf4"), theirs)


def gradients(directory, adapter, batch, lora, remat="full", kernel="chunked"):
    base = open_base(str(directory), quantization="nf4", dtype="float32", lora=lora)
    graph, _, _ = split(base.model)
    frozen, adapters = base.load(), load_adapter(adapter, base.model)
    options = ForwardOptions(kernel=kernel, remat=remat, segmented=True)

    def loss(adapters):
        model = nnx.merge(graph, frozen, adapters)
        micro_batches = [Batch(*(a[i] for a in batch)) for i in range(batch.tokens.shape[0])]
        return sum(loss_sum(model, micro, options, None) for micro in micro_batches) / batch.weights.sum()

    value, gradient = jax.value_and_grad(loss)(adapters)
    stacks = dict(nnx.to_flat_state(gradient))
    names = peft_names(base.model)
    return float(value), {name: np.asarray(stacks[path].get_value()[layer]) for name, (path, layer) in names.items()}


@pytest.mark.parametrize("remat", ["none", "attention", "full"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_lora_gradients_equal_those_of_peft_over_bitsandbytes(tmp_path, use_rslora, remat):
    directory = oracles.tiny_llama(tmp_path / "model", **NF4_WIDTHS)
    tensors = oracles.random_adapter(directory, rank=4)
    adapter = oracles.write_adapter(tmp_path / "adapter", tensors, alpha=8, use_rslora=use_rslora)
    theirs = oracles.random_batch(0, (2, 2, 40), packed=True)
    batch = Batch(theirs.tokens, theirs.targets, theirs.weights, theirs.segment_ids, theirs.positions)
    expected = oracles.peft_bnb_gradients(directory, adapter, theirs)
    value, found = gradients(directory, adapter, batch, LoraConfig(rank=4, alpha=8, use_rslora=use_rslora), remat)
    assert value == pytest.approx(expected.loss, rel=GRADIENT_TOLERANCE)
    assert found.keys() == expected.tensors.keys()
    for name, gradient in expected.tensors.items():
        difference = np.linalg.norm(found[name] - gradient) / np.linalg.norm(gradient)
        assert difference <= GRADIENT_TOLERANCE, (name, difference)
