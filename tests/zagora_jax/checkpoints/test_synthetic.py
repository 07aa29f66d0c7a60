"""Random weights of known sizes: what they are, that a model computes with them, and what making them takes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import tables
from models.config import FAMILIES, ModelConfig
from models.parameters import by_path, split
from models.quantization import dequantize
from zagora_jax.base import open_base
from zagora_jax.checkpoints import synthetic
from zagora_jax.checkpoints.known_models import KNOWN_MODELS
from zagora_jax.checkpoints.load import is_stacked
from zagora_jax.checkpoints.synthetic import synthetic_config
from zagora_jax.data.batches import Batch
from zagora_jax.errors import UserError
from zagora_jax.step import ForwardOptions, loss_sum

# Parameters as the models' cards give them, in billions.
PUBLISHED = {
    "smollm2-135m": 0.1345,
    "tinyllama-1.1b": 1.100,
    "llama-1-65b": 65.286,
    "llama-2-7b": 6.738,
    "llama-2-70b": 68.977,
    "llama-3-8b": 8.030,
    "llama-3.1-405b": 405.853,
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213,
    "llama-3.3-70b": 70.554,
    "codellama-34b": 33.744,
    "yi-6b": 6.061,
    "yi-34b": 34.389,
    "mistral-7b": 7.248,
    "mistral-nemo-12b": 12.248,
    "mistral-small-22b": 22.247,
    "mistral-small-24b": 23.572,
    "mistral-large-2-123b": 122.610,
    "qwen2-0.5b": 0.494,
    "qwen2-1.5b": 1.544,
    "qwen2-7b": 7.616,
    "qwen2-72b": 72.706,
    "qwen2.5-3b": 3.086,
    "qwen2.5-14b": 14.770,
    "qwen2.5-32b": 32.764,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.768,
    "qwen3-32b": 32.762,
}
# Of the families that are read.
READ = [name for name, config in KNOWN_MODELS.items() if config["model_type"] in FAMILIES]


TINY = KNOWN_MODELS["llama-3-8b"] | {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch):
    monkeypatch.setitem(KNOWN_MODELS, "tiny", TINY)


def base_of(name, quantization="nf4", dtype="bfloat16", seed=0):
    return open_base(f"synthetic:{name}", quantization=quantization, dtype=dtype, lora=None, seed=seed)


def matrices(value):
    """The dequantised matrices of a stack, float32 [L, out, in]."""
    return np.asarray(jax.vmap(lambda one: dequantize(one, jnp.float32))(value))


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() & set(READ)))
def test_known_models_have_the_published_number_of_parameters(name):
    assert base_of(name).parameter_count() / 1e9 == pytest.approx(PUBLISHED[name], abs=6e-4)


@pytest.mark.parametrize("name", READ)
def test_every_known_model_has_a_valid_config(name):
    ModelConfig.from_hf(synthetic_config(f"synthetic:{name}"))


def test_the_number_of_layers_can_be_chosen():
    assert synthetic_config("synthetic:llama-3-8b?layers=3") == KNOWN_MODELS["llama-3-8b"] | {"num_hidden_layers": 3}
    assert KNOWN_MODELS["llama-3-8b"]["num_hidden_layers"] == 32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-3-8", "no known size 'llama-3-8'; nearest: llama-3-8b"),
        ("", "Known: smollm2-135m, "),
        ("llama-3-8b?layers=0", "expected \\?layers=N after the size, found layers=0"),
        ("llama-3-8b?layers=", "found layers="),
        ("llama-3-8b?heads=2", "found heads=2"),
    ],
)
def test_unknown_names_are_refused(name, message):
    with pytest.raises(UserError, match=message):
        synthetic_config(f"synthetic:{name}")


@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_weights_have_the_spread_of_trained_ones(quantization):
    for path, variable in by_path(base_of("tiny?layers=2", quantization).load()).items():
        value = variable.get_value()
        if "norm" in path[-2]:
            assert (np.asarray(value) == 1).all()
            continue
        weights = matrices(value) if path[1] == "layers" else np.asarray(value, np.float32)[None]
        # Six standard errors; the signs of 64 weights are drawn together.
        error = 6 / math.sqrt(weights[0].size / 64)
        for layer in weights:
            assert layer.std() == pytest.approx(synthetic.STANDARD_DEVIATION, rel=error)
            assert abs(layer.mean()) < synthetic.STANDARD_DEVIATION * error
            assert abs(correlation(layer[:-1], layer[1:])) < error
        assert len(weights) == 1 or abs(correlation(*weights)) < error


def correlation(one, other):
    return np.corrcoef(one.ravel(), other.ravel())[0, 1]


def test_weights_depend_on_the_seed_alone():
    first, again, other = (jax.tree.leaves(base_of("tiny?layers=1", seed=seed).load()) for seed in (0, 0, 1))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_activations_stay_finite_through_many_layers(dtype):
    base = base_of("tiny?layers=40", dtype=dtype)
    graph, _, adapters = split(base.model)
    tokens, targets = jnp.asarray(np.random.default_rng(0).integers(0, 2048, (2, 1, 16)), jnp.int32)
    ones = jnp.ones_like(tokens)
    batch = Batch(tokens, targets, ones.astype(jnp.float32), ones, jnp.arange(16)[None])
    options = ForwardOptions(kernel="chunked", remat="none", segmented=False)

    @jax.jit
    def loss(frozen):
        return loss_sum(nnx.merge(graph, frozen, adapters), batch, options, None) / batch.tokens.size

    # Nothing is known, so the loss is that of equally likely words, and as much more as the logits' spread makes it.
    assert math.log(2048) - 0.5 < loss(base.load()) < math.log(2048) + 2


@pytest.mark.parametrize("embeddings", tables.FORMATS)
def test_quantised_tables_are_drawn_as_plain_ones_are(embeddings):
    base = base_of("tiny?layers=1").with_embeddings(embeddings)
    for path, variable in by_path(base.load()).items():
        if path[-2] in ("embed_tokens", "lm_head"):
            weights = np.asarray(tables.dequantize(variable.get_value(), jnp.float32))
            assert weights.std() == pytest.approx(synthetic.STANDARD_DEVIATION, rel=0.03)  # NF4 loses 1 % of it
            assert abs(correlation(weights[:-1], weights[1:])) < 6 / math.sqrt(weights.size)
    declared = base_of("llama-3-70b").with_embeddings(embeddings).model.lm_head.weight.get_value()
    made = jax.jit(lambda key: synthetic._draw(declared, ("lm_head", "weight"), key, embeddings))
    memory = made.lower(jax.random.key(0)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2**26


@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_making_the_weights_takes_little_more_memory_than_they_do(quantization):
    declared = {
        path: v.get_value() for path, v in by_path(split(base_of("llama-3-70b", quantization).model)[1]).items()
    }
    matrices = {value.shape[-2:]: (path, value) for path, value in declared.items() if "norm" not in path[-2]}
    layer = 2 * sum(math.prod(value.shape[-2:]) for path, value in declared.items() if path[-2].endswith("proj"))
    for path, value in matrices.values():
        if is_stacked(path):  # drawn layer by layer
            value = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), value)
        made = jax.jit(lambda key, path=path, value=value: synthetic._draw(value, path, key, quantization))
        memory = made.lower(jax.random.key(0)).compile().memory_analysis()
        stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(value))
        assert stored <= memory.output_size_in_bytes <= stored + 1024
        assert memory.temp_size_in_bytes < layer, path
