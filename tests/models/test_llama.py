from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from flax import nnx

from models.cache import KVCache
from models.config import ModelConfig
from models.decoder_layer import RMSNorm
from models.layer_kinds import LayerKinds
from models.llama import Ends, Llama
from models.lora import LoRAConfig
from models.modules import linear_modules
from models.parameters import by_path, split
from models.remat import OFFLOADABLE, REMATS

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
    }
)
TARGETS = frozenset({"model.layers.self_attn.q_proj", "model.layers.mlp.down_proj"})


def declare(quantization="none", dtype=jnp.float32, lora=False):
    adapter = LoRAConfig(rank=2, alpha=4, dropout=0.0, use_rslora=False, targets=TARGETS) if lora else None
    return Llama(CONFIG, quantization=quantization, dtype=jnp.dtype(dtype), lora=adapter)


def with_values(declared):
    """The model's graph and its two trees of parameters, all random."""
    graph, *states = split(declared)
    rng = np.random.default_rng(0)

    def draw(leaf):
        width = leaf.shape[-1] if leaf.ndim > 1 else 1
        return jnp.asarray(rng.standard_normal(leaf.shape) * width**-0.5, leaf.dtype)

    return graph, *jax.tree.map(draw, states)


def tokens_and_positions(batch=2, length=12):
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (batch, length), np.int32)
    return jnp.asarray(tokens), jnp.broadcast_to(jnp.arange(length), tokens.shape)


def hidden_states(model, tokens, positions, remat="none", offload=False):
    return model.hidden_states(tokens, positions, None, kernel="chunked", remat=remat, offload=offload)


def test_parameters_have_the_names_and_shapes_of_hugging_face():
    _, frozen, adapters = split(declare(lora=True))
    shapes = {".".join(path): variable.get_value().shape for path, variable in by_path(frozen).items()}
    layer = "model.layers"
    assert shapes == {
        "model.embed_tokens.weight": (97, 32),
        f"{layer}.input_layernorm.weight": (4, 32),
        f"{layer}.self_attn.q_proj.weight": (4, 32, 32),
        f"{layer}.self_attn.k_proj.weight": (4, 16, 32),
        f"{layer}.self_attn.v_proj.weight": (4, 16, 32),
        f"{layer}.self_attn.o_proj.weight": (4, 32, 32),
        f"{layer}.post_attention_layernorm.weight": (4, 32),
        f"{layer}.mlp.gate_proj.weight": (4, 48, 32),
        f"{layer}.mlp.up_proj.weight": (4, 48, 32),
        f"{layer}.mlp.down_proj.weight": (4, 32, 48),
        "model.norm.weight": (32,),
        "lm_head.weight": (97, 32),
    }
    assert {".".join(path): variable.get_value().shape for path, variable in by_path(adapters).items()} == {
        f"{layer}.self_attn.q_proj.adapter.lora_A": (4, 2, 32),
        f"{layer}.self_attn.q_proj.adapter.lora_B": (4, 32, 2),
        f"{layer}.mlp.down_proj.adapter.lora_A": (4, 2, 48),
        f"{layer}.mlp.down_proj.adapter.lora_B": (4, 32, 2),
    }


def test_linear_modules_are_those_of_the_layers():
    names = {name.rpartition(".")[2] for name in linear_modules(declare())}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_hidden_states_have_the_dtype_of_computation(dtype):
    graph, frozen, adapters = with_values(declare(dtype=dtype, lora=True))
    tokens, positions = tokens_and_positions()
    hidden = hidden_states(nnx.merge(graph, frozen, adapters), tokens, positions)
    chex.assert_shape(hidden, (2, 12, 32))
    chex.assert_type(hidden, dtype)
    chex.assert_tree_all_finite(hidden)


def test_the_layers_are_traced_once():
    graph, frozen, adapters = with_values(declare())
    arguments = tokens_and_positions()
    model = nnx.merge(graph, frozen, adapters)
    products = programs.count("dot_general", lambda *a: hidden_states(model, *a), *arguments)
    assert 7 <= products < 14  # seven linear layers and attention, not four times as many


def test_a_token_sees_no_later_one_and_no_padding():
    graph, frozen, adapters = with_values(declare())
    tokens, positions = tokens_and_positions()
    run = jax.jit(lambda tokens: hidden_states(nnx.merge(graph, frozen, adapters), tokens, positions))
    changed = tokens.at[:, 7:].set(5)
    np.testing.assert_array_equal(run(tokens)[:, :7], run(changed)[:, :7])
    assert (run(tokens)[:, 7] != run(changed)[:, 7]).any()


def test_remat_changes_neither_loss_nor_gradient():
    graph, frozen, adapters = with_values(declare("none", lora=True))
    tokens, positions = tokens_and_positions()

    def gradient(remat, offload=False):
        def loss(adapters):
            hidden = hidden_states(nnx.merge(graph, frozen, adapters), tokens, positions, remat, offload)
            return jnp.square(hidden).mean(axis=-1).sum() + hidden.sum()

        # Less optimised machine code is made in less time.
        options = {"xla_backend_optimization_level": 0}
        return jax.jit(jax.value_and_grad(loss), compiler_options=options)(adapters)

    plain = gradient("none")
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(plain[1])) > 0.1
    for remat, offload in [*((remat, False) for remat in REMATS), *((remat, True) for remat in OFFLOADABLE)]:
        chex.assert_trees_all_close(gradient(remat, offload), plain, rtol=1e-5, atol=1e-4)


def test_what_is_not_kept_is_not_offloaded():
    graph, frozen, adapters = with_values(declare("none"))
    with pytest.raises(ValueError, match="remat 'nested' keeps nothing that could be offloaded; use none or mlp or"):
        hidden_states(nnx.merge(graph, frozen, adapters), *tokens_and_positions(), "nested", offload=True)


def test_an_unknown_remat_is_refused():
    graph, frozen, adapters = with_values(declare("none"))
    with pytest.raises(ValueError, match="remat 'some' is not known; accepted values: none, mlp, attention, full"):
        hidden_states(nnx.merge(graph, frozen, adapters), *tokens_and_positions(), "some")


def test_remat_says_which_products_are_computed_again():
    graph, frozen, adapters = with_values(declare("none"))
    tokens, positions = tokens_and_positions()

    def products(remat):
        def of_inputs(x):
            model = nnx.merge(graph, frozen, adapters)
            return model.hidden_states(tokens, positions, None, kernel="chunked", remat=remat, inputs=x).sum()

        return programs.count("dot_general", jax.grad(of_inputs), jnp.ones((*tokens.shape, CONFIG.hidden_size)))

    none, mlp, attention, full = map(products, ("none", "mlp", "attention", "full"))
    assert mlp - none == 2  # gate and up
    assert attention - mlp == 4  # queries, keys, values and the output's projection
    assert full - attention == 2  # scores, and what they weight


@pytest.mark.parametrize("sizes", [(12,), (7, 1, 1, 3), (1,) * 12])
def test_extending_a_cache_gives_the_same_hidden_states(sizes):
    graph, frozen, adapters = with_values(declare(lora=True))
    model = nnx.merge(graph, frozen, adapters)
    tokens, positions = tokens_and_positions()
    cache, parts, slot = KVCache.empty(CONFIG, batch=2, slots=16, dtype=jnp.dtype(jnp.float32)), [], 0
    chex.assert_shape([cache.keys, cache.values], (4, 2, 16, 2, 8))
    extend = jax.jit(lambda *arguments: model.extend(*arguments))
    for size in sizes:
        part = slice(slot, slot + size)
        slot_positions = jnp.broadcast_to(jnp.arange(16), (2, 16))
        hidden, cache = extend(tokens[:, part], positions[:, part], cache, slot, slot_positions)
        parts.append(hidden)
        slot += size
    whole = hidden_states(model, tokens, positions)
    chex.assert_trees_all_close(jnp.concatenate(parts, axis=1), whole, rtol=1e-4, atol=1e-4)
    assert not cache.keys[:, :, 12:].any()


def test_norm_statistics_are_float32():
    x = jax.random.normal(jax.random.key(0), (3, 512)).astype(jnp.bfloat16) * 300  # bfloat16 sums would be off by 1 %
    graph, declared = nnx.split(RMSNorm(512, 1e-5))
    y = nnx.merge(graph, jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), declared))(x)
    chex.assert_type(y, jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8)  # one rounding to 8 bits


def test_layers_that_are_all_alike_add_nothing_to_the_loop():
    def adds(windows, rotated):
        config = replace(CONFIG, windows=windows, rotated=rotated)
        return "dynamic_slice" in str(
            jax.make_jaxpr(lambda layer: LayerKinds.of(config).of_layer(layer).window.limit(9))(0)
        )

    assert not adds((4,) * 4, (True,) * 4)
    assert adds((4, None, 4, None), (True,) * 4)


def test_a_part_of_the_layers_has_the_windows_of_its_own_layers():
    config = replace(CONFIG, windows=(None, 2, None, 3), rotated=(True, False, True, True))
    declared = Llama(config, quantization="none", dtype=jnp.dtype(jnp.float32))
    graph, frozen, adapters = with_values(declared)
    tokens, positions = tokens_and_positions()
    whole = hidden_states(nnx.merge(graph, frozen, adapters), tokens, positions)
    values, x = {path: variable.get_value() for path, variable in by_path(frozen).items()}, None
    for first, ends in ((0, Ends(last=False)), (2, Ends(first=False))):
        part_graph, part_frozen, _ = split(declared.part(2, ends))
        part = nnx.from_flat_state(
            [
                (path, variable.replace(values[path][first : first + 2] if "layers" in path else values[path]))
                for path, variable in by_path(part_frozen).items()
            ]
        )
        model = nnx.merge(part_graph, part, nnx.State({}))
        x = model.hidden_states(tokens, positions, None, kernel="reference", inputs=x, first_layer=jnp.int32(first))
    chex.assert_trees_all_close(x, whole, rtol=1e-4, atol=1e-4)
