"""What a spread train step may send and hold: read from the program compiled for RTX 4090s that are not there.

Each contract is also tried on a program that breaks it, so that no checker passes everything.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from absent_gpus import needs_cudnn, needs_plugin
from jax import lax

import models.decoder_layer
import models.linear
import models.remat
import zagora_jax.distribution
import zagora_jax.step
from models.cross_entropy import CHUNK_TOKENS, cross_entropy_sum
from sharding.flat import FlatShard, gather, unflatten
from sharding.mesh import SHARD_AXES
from sharding.program import Buffer, Collective, buffers, collectives, memory
from sharding.targets import absent_devices
from zagora_jax.checkpoints.known_models import KNOWN_MODELS
from zagora_jax.command_line import parse
from zagora_jax.config import TrainConfig
from zagora_jax.devices import choose_mesh
from zagora_jax.planning import compile_planned_step

pytestmark = needs_plugin

SIZES = KNOWN_MODELS["tinyllama-1.1b"]
HIDDEN, VOCABULARY = SIZES["hidden_size"], SIZES["vocab_size"]
# So many layers that a stack of the smallest weight is larger than any one array of a right program.
LAYERS, TOKENS, RANK = 24, 480, 16
DEVICES = 4
WEIGHTS = {(2048, 2048), (256, 2048), (5632, 2048), (2048, 5632)}
ADAPTED = {(2048, 2048), (2048, 5632)}  # q_proj and down_proj alone, which compile in a third of the time
CODES = {math.prod(shape) // 2 for shape in WEIGHTS}  # bytes of a layer's arrays
SCALES = {math.prod(shape) // 64 for shape in WEIGHTS}
ADAPTERS = {RANK * side for shape in ADAPTED for side in shape}  # elements
ADAPTER_ELEMENTS = RANK * sum(map(sum, ADAPTED))  # of a layer
SPREAD = ("--mesh.data", "2", "--mesh.fsdp", "2")
FLOATS = ("f32", "bf16", "f16")


class Program:
    """A compiled train step, and what is read from it."""

    def __init__(self, *options: str, offload: bool = True, micro_batches: int = 1):
        config = parse(
            TrainConfig,
            [
                *("--model", f"synthetic:tinyllama-1.1b?layers={LAYERS}", "--lora.targets", "[q_proj, down_proj]"),
                *("--sequence-length", str(TOKENS), "--gradient-accumulation-steps", str(micro_batches)),
                *("--attention", "chunked"),
                *("--lora.rank", str(RANK), "--offload.activations", str(offload).lower(), *options),
            ],
        )
        self.mesh = choose_mesh(config, absent_devices("rtx4090", DEVICES))
        self.compiled = compile_planned_step(config, self.mesh)

    @functools.cached_property
    def exchanges(self) -> list[Collective]:
        return [c for c in collectives(self.compiled, self.mesh.shape) if c.group_size > 1]

    @property
    def in_layers(self) -> list[Collective]:
        """Those of the loops over layers, of which the compiler may have taken the first and last iterations out."""
        return [c for c in self.exchanges if c.loop_trips and c.loop_trips >= LAYERS - 2]


@pytest.fixture(scope="module")
def fsdp() -> Program:
    return Program("--mesh.fsdp", "4")


@pytest.fixture(scope="module")
def int8() -> Program:
    return Program(*SPREAD, "--gradient-compression", "int8")


@pytest.fixture(scope="module")
def int4() -> Program:
    return Program(*SPREAD, "--gradient-compression", "int4")


@pytest.fixture(scope="module")
def broken() -> Program:
    """The same step with every constraint taken out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zagora_jax.distribution, "gather", gather_as_floats)
        patch.setattr(models.linear, "frozen_matmul", matmul_that_keeps_its_weight)
        patch.setattr(models.linear, "tuned_matmul", tuned_matmul_that_keeps_its_weight)
        patch.setattr(models.remat, "_checkpoint", lambda function, policy: function)
        patch.setattr(models.decoder_layer.MLP, "__call__", mlp_of_gathered_activations)
        patch.setattr(
            zagora_jax.step, "cross_entropy_sum", functools.partial(cross_entropy_sum, chunk_tokens=2 * TOKENS)
        )
        patch.setattr(zagora_jax.distribution, "compiler_options", lambda mesh, **_: {})
        return Program("--mesh.fsdp", "4", "--remat", "none", offload=False)


@pytest.fixture(scope="module")
def tensor() -> Program:
    return Program("--mesh.fsdp", "2", "--mesh.tensor", "2")


@pytest.fixture(scope="module")
def broken_tensor() -> Program:
    """The same step, but weights come from all devices, the head too, and each projection has a gradient to sum."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zagora_jax.distribution, "gather", gather_from_all)
        patch.setattr(models.decoder_layer.SelfAttention, "_project", project_one_by_one)
        patch.setattr(zagora_jax.step, "cross_entropy_sum", cross_entropy_of_a_gathered_head)
        return Program("--mesh.fsdp", "2", "--mesh.tensor", "2")


def gather_from_all(parameters):
    """`sharding.flat.gather`, but the parts of other devices along tensor come too."""

    def whole(leaf):
        if not isinstance(leaf, FlatShard) or "tensor" in leaf.axes:
            return gather(leaf)
        parts = lax.all_gather(leaf.array, ("tensor", *leaf.axes), tiled=True).reshape(lax.axis_size("tensor"), -1)
        return unflatten(replace(leaf, array=parts[lax.axis_index("tensor")]))

    return jax.tree.map(whole, parameters, is_leaf=lambda leaf: isinstance(leaf, FlatShard))


def project_one_by_one(self, x, context):
    enter, keys = context.placement.enter, context.dropout_keys
    return [projection(enter(x), context.placement, keys) for projection in (self.q_proj, self.k_proj, self.v_proj)]


def cross_entropy_of_a_gathered_head(hidden, heads, targets, weights, vocabulary, **of_heads):
    whole = [lax.all_gather(head, SHARD_AXES, tiled=True) for head in heads]
    return cross_entropy_sum(hidden, whole, targets, weights, **of_heads)


def gather_as_floats(parameters):
    """`sharding.flat.gather`, but what travels is as wide as a weight."""

    def whole(leaf):
        if not isinstance(leaf, FlatShard):
            return leaf
        # The sines stand for dequantisation: past them, the compiler cannot move the gather to where it is narrow.
        wide = jnp.sin(leaf.array.astype(jnp.bfloat16))
        gathered = jnp.sin(lax.all_gather(wide, leaf.axes, tiled=True))
        return unflatten(replace(leaf, array=gathered.astype(leaf.array.dtype)))

    return jax.tree.map(whole, parameters, is_leaf=lambda leaf: isinstance(leaf, FlatShard))


def matmul_that_keeps_its_weight(x, weight, fetch):
    """`frozen_matmul` without its rule for the backward pass."""
    return jnp.einsum("...i,oi->...o", x, models.linear.dequantize(fetch(weight), x.dtype))


def tuned_matmul_that_keeps_its_weight(x, weight, b, a, fetch):
    """`tuned_matmul` without its rule for the backward pass."""
    return jnp.einsum("...i,oi->...o", x, models.linear.dequantize(fetch(weight), x.dtype) + b @ a)


_mlp = models.decoder_layer.MLP.__call__


def mlp_of_gathered_activations(self, x, context):
    everywhere = lax.all_gather(x, "fsdp")
    return _mlp(self, jnp.roll(everywhere, 1, axis=0)[lax.axis_index("fsdp")], context)


def foreign_to_layers(program: Program) -> set[tuple]:
    """Kind, dtype and elements of what crosses in a layer and is neither codes nor scales nor of an adapter."""
    allowed = {("all-gather", "u8", size) for size in CODES | SCALES}
    allowed |= {("all-gather", "f32", size // 256) for size in SCALES}
    allowed |= {(kind, "bf16", size) for kind in ("all-gather", "reduce-scatter") for size in ADAPTERS}
    return {(c.kind, c.dtype, math.prod(c.shape)) for c in program.in_layers} - allowed


def test_only_codes_scales_and_adapters_cross_in_a_layer(fsdp: Program, broken: Program) -> None:
    assert not foreign_to_layers(fsdp)
    assert {math.prod(c.shape) for c in fsdp.in_layers if c.dtype == "u8"} == CODES | SCALES  # all are found
    foreign = foreign_to_layers(broken)
    assert {("all-gather", "bf16", size) for size in CODES} <= foreign
    assert ("all-gather", "bf16", DEVICES * TOKENS * HIDDEN) in foreign


def across_tensor(program: Program) -> Counter[tuple]:
    """What crosses in layers between devices that differ along tensor: kind, dtype, and shape or elements."""
    return Counter(
        (c.kind, c.dtype, c.shape if c.kind == "all-reduce" else math.prod(c.shape))
        for c in program.in_layers
        if "tensor" in (c.axes or ())
    )


def test_tensor_parallel_layers_exchange_sums_of_activations_and_no_weights(
    tensor: Program, broken_tensor: Program
) -> None:
    # Forward a sum behind attention's output and one behind down; backward attention's again, which the feed-forward
    # block is computed from again, and one of the gradient of each block's input.
    sums = ("all-reduce", "bf16", (1, TOKENS, HIDDEN))
    of_adapters = {(kind, "bf16", size) for kind in ("all-gather", "reduce-scatter") for size in ADAPTERS}
    found, broken = across_tensor(tensor), across_tensor(broken_tensor)
    assert found[sums] == 5
    assert found.keys() - {sums} == of_adapters
    of_parts = {math.prod(c.shape) for c in tensor.in_layers if c.axes == ("fsdp",) and c.dtype == "u8"}
    assert of_parts == {size // 2 for size in CODES | SCALES}
    assert broken[sums] > 5
    assert {("all-gather", "u8", size) for size in CODES} <= broken.keys()


def unbounded_activations(program: Program) -> list[Collective]:
    """Exchanges of more activations than the loss's chunk, but for the input embeddings' one."""
    chunk = DEVICES * CHUNK_TOKENS
    activations = [c for c in program.exchanges if c.dtype in FLOATS and len(c.shape) > 1 and c.shape[-1] == HIDDEN]
    embedding = next(c for c in activations if c.kind == "reduce-scatter" and c.loop_trips == 1)
    return [c for c in activations if math.prod(c.shape[:-1]) > chunk and c is not embedding]


def test_every_micro_batch_gathers_codes_once_more(fsdp: Program) -> None:
    # XLA pipelines the gathers over the loop of micro-batches, takes some of it out, and loses the rest's trip count.
    times = 8
    several = Program("--mesh.fsdp", "4", micro_batches=times)
    once, all_times = (sent(program, ("fsdp",), ("all-gather",), ("u8",)) for program in (fsdp, several))
    assert all_times == times * once


def test_activations_cross_in_the_loss_alone_and_a_chunk_at_a_time(fsdp: Program, broken: Program) -> None:
    assert not unbounded_activations(fsdp)
    assert any(c.loop_trips == 1 and c.shape == (DEVICES * TOKENS, HIDDEN) for c in unbounded_activations(broken))
    assert any(c.loop_trips != 1 for c in unbounded_activations(broken))


def whole_heads(program: Program) -> list[Buffer]:
    """Floating-point arrays as large as the head."""
    return [b for b in buffers(program.compiled) if b.dtype in FLOATS and math.prod(b.shape) >= VOCABULARY * HIDDEN]


def unbounded_logits(program: Program) -> list[Buffer]:
    """Logits, of the words of one device or of all, of more tokens than the loss's chunk."""
    words = {VOCABULARY, VOCABULARY // DEVICES}
    logits = [b for b in buffers(program.compiled) if b.dtype in FLOATS and b.shape and b.shape[-1] in words]
    chunk = DEVICES * CHUNK_TOKENS
    return [b for b in logits if math.prod(b.shape[:-1]) > chunk and HIDDEN not in b.shape]


def test_the_loss_holds_its_part_of_the_head_and_a_chunk_of_logits(
    fsdp: Program, tensor: Program, broken: Program, broken_tensor: Program
) -> None:
    assert not whole_heads(fsdp) + whole_heads(tensor)
    assert not unbounded_logits(fsdp) + unbounded_logits(tensor)
    assert (VOCABULARY, HIDDEN) in {b.shape for b in whole_heads(broken_tensor)}
    assert (DEVICES * TOKENS, VOCABULARY // DEVICES) in {b.shape for b in unbounded_logits(broken)}


def stacks_of_weights(program: Program) -> list[Buffer]:
    """Floating-point arrays on the device with as many elements as all layers have of the smallest weight."""
    smallest = LAYERS * min(map(math.prod, WEIGHTS))
    return [
        buffer
        for buffer in buffers(program.compiled)
        if buffer.dtype in FLOATS
        and buffer.opcode != "parameter"
        and not buffer.host
        and math.prod(buffer.shape) >= smallest
        and not {VOCABULARY, VOCABULARY // DEVICES} & set(buffer.shape)
    ]


def test_no_weight_outlives_its_layer(fsdp: Program, broken: Program) -> None:
    assert not stacks_of_weights(fsdp)
    assert {math.prod(b.shape) for b in stacks_of_weights(broken)} >= {LAYERS * math.prod(w) for w in WEIGHTS}


def test_layer_inputs_wait_on_the_host(fsdp: Program, broken: Program) -> None:
    stack = (LAYERS, 1, TOKENS, HIDDEN)
    assert {b.host for b in buffers(fsdp.compiled) if b.shape == stack} == {True}
    assert memory(fsdp.compiled).host_temporaries == 2 * math.prod(stack)
    assert memory(broken.compiled).host_temporaries == 0


def code_gathers(program: Program) -> list[Collective]:
    """The gathers of codes in layers, as whatever they travel."""
    return [c for c in program.in_layers if c.kind == "all-gather" and math.prod(c.shape) in CODES]


def hidden_share(program: Program) -> float:
    """Of the bytes that layers gather, the share that travels while matrices are multiplied."""
    gathers = code_gathers(program)
    hidden = [c for c in gathers if any("gemm" in i.name or "dot" in i.name for i in c.overlapped)]
    return sum(c.wire_bytes for c in hidden) / sum(c.wire_bytes for c in gathers)


def test_the_next_layer_is_gathered_under_the_present_one(fsdp: Program, broken: Program) -> None:
    # The first layer is gathered ahead of a loop, whose iterations each gather for the next.
    assert max(c.loop_trips or 0 for c in code_gathers(fsdp)) == LAYERS - 1
    assert max(c.loop_trips or 0 for c in code_gathers(broken)) == LAYERS
    assert hidden_share(fsdp) > 0.9
    assert hidden_share(broken) == 0


def sent(program: Program, axes: tuple[str, ...], kinds: tuple[str, ...], dtypes: tuple[str, ...]) -> float:
    return sum(c.wire_bytes for c in program.exchanges if c.axes == axes and c.kind in kinds and c.dtype in dtypes)


@pytest.mark.parametrize(("compression", "largest"), [("int8", 0.27), ("int4", 0.15)])
def test_gradients_cross_as_small_integers(request: pytest.FixtureRequest, compression: str, largest: float) -> None:
    program: Program = request.getfixturevalue(compression)
    n = 2  # along either axis
    # Between replicas: an all-reduce of this device's shards, once a step.
    as_float32 = 2 * (n - 1) / n * 4 * LAYERS * ADAPTER_ELEMENTS / n
    assert 0 < sent(program, ("data",), ("all-to-all", "all-gather"), ("u8",)) <= largest * as_float32
    # Between shards: a reduce-scatter in the backward pass of each layer.
    as_float32 = (n - 1) / n * 4 * LAYERS * ADAPTER_ELEMENTS
    assert 0 < sent(program, ("fsdp",), ("all-to-all",), ("u8",)) <= largest * as_float32
    assert not wide_gradients(program)


def wide_gradients(program: Program) -> list[Collective]:
    """Sums of more than single numbers in a layer or between replicas, as floating-point numbers."""
    of_gradients = [c for c in program.exchanges if "data" in (c.axes or ())] + program.in_layers
    return [c for c in of_gradients if c.kind != "all-gather" and c.dtype in FLOATS and c.bytes > 64]


def test_uncompressed_gradients_would_be_seen(fsdp: Program) -> None:
    assert {math.prod(c.shape) for c in wide_gradients(fsdp)} == ADAPTERS
    as_float32 = (DEVICES - 1) / DEVICES * 4 * LAYERS * ADAPTER_ELEMENTS
    assert sum(c.wire_bytes for c in wide_gradients(fsdp)) > 0.27 * as_float32


def gradient_messages(program: Program, axis: str) -> list[Collective]:
    """What crosses of compressed gradients along a mesh axis: all that is u8, but for codes, gathered over fsdp."""
    kinds = ("all-to-all",) if axis == "fsdp" else ("all-to-all", "all-gather")
    return [c for c in program.exchanges if c.axes == (axis,) and c.kind in kinds and c.dtype == "u8"]


def products_beside(message: Collective) -> int:
    """How many matrix products run between its start and its end, those of whole loops counted as one each."""
    is_product = [i.opcode == "while" or "gemm" in i.name or "dot" in i.name for i in message.overlapped]
    return sum(is_product) if message.asynchronous else 0


@pytest.fixture(scope="module")
def overlapped() -> Program:
    return Program(*SPREAD, "--gradient-compression", "int8", "--gradient-exchange", "overlapped")


@pytest.fixture(scope="module")
def delayed() -> Program:
    return Program(*SPREAD, "--gradient-compression", "int8", "--gradient-exchange", "delayed")


def test_overlapped_gradients_cross_under_the_backward_pass_of_other_layers(int8: Program, overlapped: Program) -> None:
    for axis in ("data", "fsdp"):
        # What has no layer below follows behind the loop: of the bottom layers, as many as there are phases.
        in_loop = [c for c in gradient_messages(overlapped, axis) if c.loop_trips != 1]
        assert {c.kind for c in in_loop} == {c.kind for c in gradient_messages(overlapped, axis)}
        assert min(c.loop_trips or 0 for c in in_loop) >= LAYERS - 1
        synchronous = gradient_messages(int8, axis)
        # Over fsdp, what is left of a layer's backward pass behind the gradients of its adapters is little.
        most = max(map(products_beside, synchronous))
        assert min(map(products_beside, in_loop)) >= max(3 * most, 10)
        assert axis == "fsdp" or most == 0
    assert memory(overlapped.compiled).peak < 1.1 * memory(int8.compiled).peak


def test_delayed_gradients_cross_under_the_whole_next_step(int8: Program, delayed: Program) -> None:
    messages = gradient_messages(delayed, "data")
    assert {c.kind for c in messages} == {"all-to-all", "all-gather"}  # two phases
    for message in messages:
        assert message.loop_trips == 1
        assert message.asynchronous
        loops = [i for i in message.overlapped if i.opcode == "while"]
        assert any(LAYERS - 2 <= (i.trip_count or 0) <= LAYERS for i in loops)  # over layers
    assert not any(map(products_beside, gradient_messages(int8, "data")))
    assert hidden_share(delayed) > 0.9  # the gathers of weights are not in their way
    assert memory(delayed.compiled).peak < 1.1 * memory(int8.compiled).peak


# What a step needs of each of four cards at one row a device, in GiB: compiled whole, so half a minute a case.
@needs_cudnn
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "offload", "tokens", "most"),
    [
        ("llama-3-70b", True, 2048, 12.3),
        ("llama-3-70b", True, 4096, 13.0),
        ("llama-3-70b", True, 8192, 14.7),
        ("llama-3-70b", False, 2048, 13.7),
        ("llama-3-70b", False, 4096, 14.9),
        ("mistral-large-2-123b", True, 2048, 21.0),
    ],
)
def test_memory_of_large_models_on_four_cards(model: str, offload: bool, tokens: int, most: float) -> None:
    place = {"offload.activations": "true"} if offload else {"remat": "nested"}
    options = {"model": f"synthetic:{model}", "sequence-length": tokens, "mesh.fsdp": 4, **place}
    fixed = {"optimizer": "adamw_8bit", "attention": "cudnn", "gradient-accumulation-steps": 1}
    config = parse(TrainConfig, [f"--{name}={value}" for name, value in (options | fixed).items()])
    plan = memory(compile_planned_step(config, choose_mesh(config, absent_devices("rtx4090", 4))))
    assert plan.peak / 2**30 <= most
    assert (plan.host_peak > 0) == offload
