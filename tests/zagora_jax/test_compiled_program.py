"""What the compiled train step holds in memory: read from the program that XLA made, not inferred from the source.

Each contract is also tried on a program that breaks it, so that no checker passes everything.
"""

import functools
import math
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models.linear
import models.remat
import zagora_jax.step
from models.config import ModelConfig
from models.cross_entropy import CHUNK_TOKENS
from models.llama import Llama
from models.lora import LoRAConfig
from models.parameters import Adapter, Frozen
from models.quantization import dequantize, nf4
from zagora_jax.data.batches import Batch
from zagora_jax.optimizer import make_optimizer, make_schedule
from zagora_jax.step import ForwardOptions, make_train_step
from zagora_jax.train_state import initial_state

# Sizes with which an array tells what it is. Only arrays over the vocabulary have a dimension that 1009 divides. With
# few tokens, a stack of 16 of the smallest weights has more elements than any other array of a right program.
SIZES = {
    "model_type": "llama",
    "vocab_size": 1009,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODULES = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (128, 256),
    "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (640, 256),
    "mlp.up_proj": (640, 256),
    "mlp.down_proj": (256, 640),
}
SMALLEST_WEIGHT = min(map(math.prod, MODULES.values()))  # elements
CODE_BYTES = sum(math.prod(shape) // 2 for shape in MODULES.values())  # of a layer
FEW, LAYERS = 3, 16  # tokens whose activations are next to nothing; layers
# Makes worse machine code in less time; the program's operations and buffers stay the same.
FAST = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True)
class Program:
    """A compiled program: its text, and the bytes it needs beside arguments and results."""

    text: str
    temporary_bytes: int

    @property
    def loops(self) -> list[tuple[int, set[tuple[int, ...]]]]:
        """How often each loop runs, and the shapes of the floating-point arrays that go round in it."""
        lines = [line for line in self.text.splitlines() if " while(" in line]
        return [(int(TRIP_COUNT.search(line)[1]), float_shapes(line.split(" while(")[0])) for line in lines]

    @property
    def products(self) -> int:
        """How many matrix products stand in the text."""
        return self.text.count(" dot(")


TRIP_COUNT = re.compile(r'"known_trip_count":{"n":"(\d+)"}')


def float_shapes(text: str) -> set[tuple[int, ...]]:
    """The shapes of all floating-point arrays in a program's text, those inside fusions included."""
    found = re.findall(r"\b(?:f64|f32|bf16|f16)\[([\d,]+)\]", text)
    return {tuple(map(int, shape.split(","))) for shape in found}


def compile_step(*, layers: int = LAYERS, tokens: int = FEW, remat: str = "full", offload: bool = False) -> Program:
    """Compile the train step of a model that has no values yet, over one sequence of `tokens` tokens."""
    config = ModelConfig.from_hf(SIZES | {"num_hidden_layers": layers})
    targets = frozenset(f"model.layers.{module}" for module in MODULES)
    lora = LoRAConfig(rank=1, alpha=1, dropout=0.0, use_rslora=False, targets=targets)
    model = Llama(config, quantization="nf4", dtype=jnp.dtype(jnp.bfloat16), lora=lora)
    graph, frozen, adapters = nnx.split(model, Frozen, Adapter)
    schedule = make_schedule("constant", 1e-3, 0, 10)
    optimizer = make_optimizer("adamw", schedule, 0.0)
    options = ForwardOptions(kernel="chunked", remat=remat, segmented=True, offload_activations=offload)
    step = make_train_step(graph, optimizer, schedule, options, max_grad_norm=1.0, dropout_seed=None)
    state = jax.eval_shape(functools.partial(initial_state, optimizer=optimizer, compute_dtype="bfloat16"), adapters)
    numbers, weights = (jax.ShapeDtypeStruct((1, 1, tokens), dtype) for dtype in (jnp.int32, jnp.float32))
    batch = Batch(numbers, numbers, weights, numbers, numbers)
    compiled = jax.jit(step, donate_argnums=0).lower(state, frozen, batch).compile(FAST)
    return Program(compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes)


def stacks_of_weights(program: Program) -> set[tuple[int, ...]]:
    """The arrays that are as large as a stack of all layers' dequantised weights, of the smallest ones at least."""
    return {shape for shape in float_shapes(program.text) if math.prod(shape) >= LAYERS * SMALLEST_WEIGHT}


def carried_weights(program: Program) -> set[tuple[int, ...]]:
    """The arrays as large as a dequantised weight that go round in a loop, so that they outlive their use."""
    weights = set(map(math.prod, MODULES.values()))
    return {shape for _, carried in program.loops for shape in carried if math.prod(shape) in weights}


def full_logits(program: Program, tokens: int) -> set[tuple[int, ...]]:
    """The arrays over the vocabulary that hold all tokens."""
    vocab = SIZES["vocab_size"]
    over_vocabulary = {shape for shape in float_shapes(program.text) if any(size % vocab == 0 for size in shape)}
    assert (vocab, SIZES["hidden_size"]) in over_vocabulary  # the head is found, so logits would be
    return {shape for shape in over_vocabulary if math.prod(shape) >= tokens * vocab}


# What programs are judged by, compiled once.
compiled_step = functools.cache(compile_step)


@pytest.mark.parametrize("remat", ["full", "none"])
def test_temporary_memory_does_not_grow_with_weights(remat):
    # So few activations, the adapter's gradients and what the optimizer makes of them are less than the 4-bit codes.
    few, many = (compiled_step(layers=layers, remat=remat).temporary_bytes for layers in (4, LAYERS))
    assert many - few < (LAYERS - 4) * CODE_BYTES / 2


@pytest.mark.parametrize(("remat", "offload"), [*((remat, False) for remat in models.remat.REMATS), ("full", True)])
def test_no_dequantised_weight_outlives_its_layer(remat, offload):
    program = compiled_step(layers=LAYERS, remat=remat, offload=offload)
    assert not stacks_of_weights(program)
    assert not carried_weights(program)


def test_layers_run_in_one_loop_forward_and_one_backward():
    few, many = compiled_step(layers=4, remat="full"), compiled_step(layers=LAYERS, remat="full")
    assert [count for count, _ in few.loops] == [4, 4]
    assert [count for count, _ in many.loops] == [LAYERS, LAYERS]
    assert few.products == many.products > 2 * len(MODULES)


def test_full_logits_are_never_materialised():
    tokens = 2 * CHUNK_TOKENS
    assert not full_logits(compiled_step(layers=1, tokens=tokens), tokens)


def naive_matmul(x, weight, b, a, fetch):
    """`tuned_matmul` without its rule for the backward pass."""
    return jnp.einsum("...i,oi->...o", x, dequantize(fetch(weight), x.dtype) + b @ a)


def test_plain_automatic_differentiation_would_be_caught(monkeypatch):
    ours = compiled_step(layers=LAYERS, remat="none")
    monkeypatch.setattr(models.linear, "tuned_matmul", naive_matmul)
    monkeypatch.setattr(models.remat, "_checkpoint", lambda function, policy: function)
    program = compile_step(remat="none")
    assert stacks_of_weights(program) >= {(LAYERS, *shape) for shape in MODULES.values()}
    added = program.temporary_bytes - ours.temporary_bytes
    assert added > 0.9 * LAYERS * 4 * CODE_BYTES  # 16 bits a weight


def selected(quantized, dtype):
    """The weights, but for their scales, by choices between constants instead of a look-up in a table."""
    codes = jnp.stack([quantized.codes >> 4, quantized.codes & 15], axis=-1).reshape(-1)

    def choose(bit, table):
        if bit < 0:
            return table[0]
        lower, upper = (choose(bit - 1, half) for half in np.split(table, 2))
        return jnp.where(codes >> bit & 1, upper, lower)

    return choose(3, nf4.TABLE).astype(dtype).reshape(quantized.shape)


def test_constants_hoisted_out_of_the_loop_would_be_caught(monkeypatch):
    monkeypatch.setattr(models.linear, "merge", lambda weight, b, a: selected(weight, a.dtype) + b @ a)
    assert carried_weights(compile_step())


def test_unrolled_layers_would_be_caught(monkeypatch):
    monkeypatch.setattr(jax.lax, "scan", functools.partial(jax.lax.scan, unroll=True))
    unrolled = compile_step(layers=2)
    assert not unrolled.loops
    assert unrolled.products > compiled_step(layers=LAYERS, remat="full").products


def test_a_loss_over_full_logits_would_be_caught(monkeypatch):
    def naive_cross_entropy(hidden, heads, targets, weights, vocabulary, trained, softcap):
        logits = jnp.einsum("td,vd->tv", hidden[0], heads[0]).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return jnp.sum(weights * (jax.nn.logsumexp(logits, axis=1) - chosen))

    monkeypatch.setattr(zagora_jax.step, "cross_entropy_sum", naive_cross_entropy)
    tokens = 2 * CHUNK_TOKENS
    assert full_logits(compile_step(layers=1, tokens=tokens), tokens)
