"""What stages may send and hold: read from their programs, compiled for RTX 4090s that are not there."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from absent_gpus import needs_cudnn, needs_plugin

from sharding.program import Collective, buffers, collectives, memory
from sharding.targets import absent_devices
from zagora_jax.arrangement import CompiledStep
from zagora_jax.checkpoints.known_models import KNOWN_MODELS
from zagora_jax.command_line import parse
from zagora_jax.config import TrainConfig
from zagora_jax.devices import choose_mesh
from zagora_jax.distribution import SpreadStep
from zagora_jax.pipeline_step import PipelineStep
from zagora_jax.planning import compile_planned

pytestmark = needs_plugin

TOKENS, MICRO_BATCHES, REPLICAS, RANK = 256, 3, 2, 16
SIZES = KNOWN_MODELS["tinyllama-1.1b"]


SMALL = {
    "lora.targets": "[q_proj, down_proj]",
    "lora.rank": RANK,
    "sequence-length": TOKENS,
    "gradient-accumulation-steps": MICRO_BATCHES,
    "attention": "chunked",
    "mesh.stage": 2,
    "mesh.data": REPLICAS,
    "gradient-compression": "int8",
    "offload.optimizer": "true",
}


def compiled(count: int, **options: object) -> CompiledStep:
    config = parse(TrainConfig, ["--strategy=layerwise", *(f"--{name}={value}" for name, value in options.items())])
    return compile_planned(config, choose_mesh(config, absent_devices("rtx4090", count)))


@pytest.fixture(scope="module")
def step() -> PipelineStep:
    made = compiled(4, **SMALL, **{"model": "synthetic:tinyllama-1.1b?layers=3", "stage-layers": "[1, 2]"})
    assert isinstance(made, PipelineStep)
    return made


@pytest.fixture(scope="module")
def one_program() -> SpreadStep:
    made = compiled(4, **SMALL, **{"model": "synthetic:tinyllama-1.1b?layers=4", "balance.threshold": 0})
    assert isinstance(made, SpreadStep)
    return made


def test_equal_stages_send_activations_and_small_integers(one_program: SpreadStep) -> None:
    """No weight travels: between stages activations, the loss's statistics and sums; between replicas gradients."""
    mesh = one_program.distribution.mesh
    found = [c for c in collectives(one_program.compiled, mesh.shape) if c.group_size > 1]
    activation = 2 * TOKENS * SIZES["hidden_size"]
    border = {(c.dtype, c.bytes, c.axes) for c in found if c.kind == "collective-permute"}
    assert border == {("bf16", activation, ("stage",))}
    summed: Counter[str] = Counter()
    for c in found:
        if c.axes == ("stage",) and c.kind == "all-reduce":
            summed[c.dtype] += c.bytes * (c.loop_trips or 0)
    # Words looked up, once ahead of the first tick and in each that has a forward half; the last stage's results.
    assert summed["bf16"] == activation * (1 + (MICRO_BATCHES + 1) + MICRO_BATCHES)
    # The gradients of those, in float32; of each token the largest logit, their sum and the target's.
    assert summed["f32"] == pytest.approx(MICRO_BATCHES * (2 * activation + 3 * 4 * TOKENS), abs=64)
    assert not summed.keys() - {"bf16", "f32"}
    large = [c for c in found if "data" in c.axes and c.bytes > 64]
    assert {(c.dtype, c.axes) for c in large} == {("u8", ("data",))}


def test_equal_stages_hold_their_share(one_program: SpreadStep) -> None:
    """Two of four layers, half of the tables, the inputs of at most three micro-batches."""
    held = [b for b in buffers(one_program.compiled) if b.opcode == "parameter"]
    codes = SIZES["hidden_size"] * SIZES["intermediate_size"] // 2
    assert max(b.bytes for b in held if b.dtype == "u8") == 2 * codes
    table = SIZES["vocab_size"] * SIZES["hidden_size"]
    assert [b.bytes for b in held if b.dtype == "bf16"][:2] == [table, table]  # the residuals are small
    plan = memory(one_program.compiled)
    elements = RANK * 2 * (3 * SIZES["hidden_size"] + SIZES["intermediate_size"])
    assert plan.host_arguments == plan.host_aliased == 2 * 4 * elements  # two moments, float32, in host memory


def exchanged(program: jax.stages.Compiled, step: PipelineStep) -> list[Collective]:
    mesh = step.programs[0].stage.distribution.mesh
    return [c for c in collectives(program, mesh.shape) if c.group_size > 1]


def test_forward_and_backward_send_nothing_but_the_loss(step: PipelineStep) -> None:
    first, last = step.programs
    assert not exchanged(first.forward, step)
    assert not exchanged(first.backward, step)
    assert {(c.kind, c.dtype, c.bytes) for c in exchanged(last.backward, step)} == {("all-reduce", "f32", 4)}


def test_gradients_cross_between_replicas_as_small_integers(step: PipelineStep) -> None:
    for programs in step.programs:
        found = exchanged(programs.exchange, step)
        assert {c.dtype for c in found} == {"u8"}
        assert {c.axes for c in found} == {("data",)}
        assert not exchanged(programs.update, step)


def test_activations_cross_as_bfloat16(step: PipelineStep) -> None:
    first, last = step.programs
    activation = (REPLICAS, TOKENS, SIZES["hidden_size"])
    sent = [first.forward.out_info, last.backward.out_info[1]]
    assert [(info.shape, info.dtype) for info in sent] == [(activation, jnp.bfloat16)] * 2
    a_device = MICRO_BATCHES * 2 * TOKENS * SIZES["hidden_size"]
    assert step.wire_bytes()["activations over stage"] == a_device


def test_a_stage_holds_no_padding(step: PipelineStep) -> None:
    """Its layers' codes are the largest arguments, and as many as it has layers."""
    for programs, layers in zip(step.programs, (1, 2), strict=True):
        codes = [b for b in buffers(programs.backward) if b.opcode == "parameter" and b.dtype == "u8"]
        largest = SIZES["hidden_size"] * SIZES["intermediate_size"] // 2
        assert max(b.bytes for b in codes) == layers * largest


def test_moments_stay_in_host_memory_where_they_are(step: PipelineStep) -> None:
    for programs, layers in zip(step.programs, (1, 2), strict=True):
        plan = memory(programs.update)
        elements = RANK * layers * (3 * SIZES["hidden_size"] + SIZES["intermediate_size"])
        assert plan.host_arguments == plan.host_aliased == 2 * 4 * elements  # two moments, float32
        assert plan.host_temporaries == 0
        assert programs.planned_host_memory(inputs=1) == plan.host_arguments


# Compiled whole, so minutes a case.
@needs_cudnn
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cards", "most", "options"),
    [
        (4, 14.0, {"sequence-length": 4096}),
        (4, 16.0, {"sequence-length": 4096, "stage-layers": "[20, 21, 21, 18]"}),
        (
            2,
            21.0,
            {
                "sequence-length": 2048,
                "stage-layers": "[41, 39]",
                "offload.activations": "true",
                "offload.embedding": "true",
                "embeddings": "int8",
            },
        ),
        (
            2,
            7.5,
            {
                "sequence-length": 4096,
                "stage-layers": "[42, 38]",
                "offload.weights": "all",
                "offload.activations": "true",
                "offload.embedding": "true",
                "gradient-accumulation-steps": 8,
            },
        ),
    ],
    ids=["four in one program", "four", "two", "two that stream"],
)
def test_memory_of_70b(cards: int, most: float, options: dict[str, object]) -> None:
    fixed = {"model": "synthetic:llama-3-70b", "optimizer": "adamw_8bit", "attention": "cudnn"}
    step = compiled(cards, **fixed, **({"gradient-accumulation-steps": 16} | options))
    planned = max(step.planned_memory().values())
    assert planned / 2**30 <= most
    if isinstance(step, PipelineStep):
        assert planned >= max(memory(programs.backward).peak for programs in step.programs)
