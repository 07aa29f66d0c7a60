"""The estimate of memory against compiled programs: recorded ones everywhere, new ones where the plugin is.

compiled_peaks.jsonl holds what jax 0.10.2 planned for absent GPUs: bytes of a device, and of its pinned host memory;
for stages with programs of their own, of each stage.
`pytest -m slow` compiles all of them again.
"""

import functools
import json
from pathlib import Path

import jax
import pytest
from absent_gpus import needs_cudnn, needs_plugin
from jax.sharding import AbstractMesh

from models.stream_order import stream_order
from sharding.mesh import make_mesh
from sharding.program import memory
from sharding.targets import GPUS, absent_devices
from zagora_jax.base import open_base
from zagora_jax.distribution import Distribution
from zagora_jax.option_groups import LoraConfig
from zagora_jax.planning.analytic import ERROR, estimate_memory
from zagora_jax.planning.candidates import train_config
from zagora_jax.planning.compiled import compile_planned, compile_planned_step
from zagora_jax.planning.memory import read_memory
from zagora_jax.planning.shapes import Shapes, mesh_shape

RECORDED = [json.loads(line) for line in Path(__file__).with_name("compiled_peaks.jsonl").read_text().splitlines()]
NAMES = [
    f"{case['count']} x {case['gpu']} " + " ".join(f"{name}={value}" for name, value in case["settings"].items())
    for case in RECORDED
]
# What takes seconds to compile: one card, two of which share a small model's weights.
FEW = [
    ("rtx4090", 1, {"model": "synthetic:llama-3.2-1b", "sequence_length": 1024, "remat": "attention"}),
    ("rtx3060", 2, {"model": "synthetic:tinyllama-1.1b", "sequence_length": 1024, "mesh.fsdp": 2, "mesh.data": 1}),
]


@functools.cache
def _shapes(model, lora):
    own = LoraConfig.model_validate_json(lora)
    return Shapes(open_base(model, quantization="nf4", dtype="bfloat16", lora=own))


def shapes(config):
    return _shapes(config.model, config.lora.model_dump_json())


def estimates(gpu, settings):
    config = train_config(settings)
    kernel = "chunked" if config.packing or config.attention == "chunked" else "cudnn"
    return estimate_memory(config, shapes(config), kernel, GPUS[gpu].memory_bytes)


def estimated(gpu, settings):
    (memory,) = estimates(gpu, settings)
    return memory


def of_stages(recorded):
    return recorded if isinstance(recorded, list) else [recorded]


@pytest.mark.parametrize("case", RECORDED, ids=NAMES)
def test_recorded_programs_are_estimated_within_the_stated_error(case):
    found = estimates(case["gpu"], case["settings"])
    assert [memory.peak for memory in found] == pytest.approx(of_stages(case["peak"]), rel=ERROR)
    assert [memory.host for memory in found] == of_stages(case["host"])


@pytest.mark.parametrize("mesh", [{"mesh.fsdp": 1, "mesh.data": 1}, {"mesh.fsdp": 3, "mesh.data": 1}])
def test_arguments_with_some_layers_streamed_are_those_of_their_arrays(mesh):
    model = "synthetic:llama-3.2-1b?layers=7"
    config = train_config({"model": model, "offload.weights": 4, **mesh})
    own = shapes(config)
    devices = AbstractMesh(tuple(mesh_shape(config).values()), tuple(mesh_shape(config)))
    spreads = Distribution(devices, own.base.model, stream=stream_order(7, 4)).frozen
    (arguments,) = own.arguments(config)
    assert arguments.weights == sum(spread.device_bytes for spread in jax.tree.leaves(spreads))
    every = own.arguments(train_config({"model": "x", "offload.weights": "all", **mesh}))[0]
    assert arguments.weights > every.weights


def compiled(gpu, count, settings):
    config = train_config({"gradient_accumulation_steps": 1, **settings})
    mesh = make_mesh(mesh_shape(config), absent_devices(gpu, count))
    own = shapes(config)
    program = compile_planned_step(config, mesh, own.base)
    return program, read_memory(program, mesh.shape, own.arguments(config)[0], own.base.model.config)


@needs_plugin
@pytest.mark.parametrize(("gpu", "count", "settings"), FEW)
def test_programs_are_estimated_within_the_stated_error(gpu, count, settings):
    settings = {"gradient_accumulation_steps": 1, "attention": "chunked", **settings}
    program, read = compiled(gpu, count, settings)
    estimate = estimated(gpu, settings)
    assert estimate.peak == pytest.approx(read.peak, rel=ERROR)
    # The parts are parts of what XLA planned, and those of the arguments are exact.
    plan = memory(program)
    assert read.peak == plan.peak
    arguments = read.weights + read.lora + read.optimizer + read.error_feedback
    assert arguments == pytest.approx(plan.arguments, abs=64 * settings["sequence_length"])  # the batch
    assert (read.gathered > 0) == (count > 1)
    assert read.activations == estimate.activations


@needs_plugin
@pytest.mark.parametrize("form", ["one-jit", "programs"])
def test_stages_are_estimated_within_the_stated_error(form):
    settings = {
        "model": "synthetic:tinyllama-1.1b?layers=8",
        "strategy": "layerwise",
        "mesh.stage": 2,
        "stage_form": form,
        "gradient_accumulation_steps": 4,
        "attention": "chunked",
    }
    config = train_config(settings)
    mesh = make_mesh(mesh_shape(config), absent_devices("rtx4090", 2))
    own = shapes(config)
    planned = compile_planned(config, mesh, own.base).planned_memory()
    estimates = estimate_memory(config, own, "chunked", GPUS["rtx4090"].memory_bytes)
    assert [estimate.peak for estimate in estimates] == pytest.approx(list(planned.values()), rel=ERROR)


@needs_plugin
@needs_cudnn
@pytest.mark.slow
@pytest.mark.parametrize("case", RECORDED, ids=NAMES)
def test_recorded_programs_still_compile_to_what_is_estimated(case):
    config = train_config({"gradient_accumulation_steps": 1, **case["settings"]})
    mesh = make_mesh(mesh_shape(config), absent_devices(case["gpu"], case["count"]))
    step = compile_planned(config, mesh, shapes(config).base)
    found = estimates(case["gpu"], case["settings"])
    peaks = list(step.planned_memory().values())[:: case["count"] // len(found)]
    assert peaks == pytest.approx(of_stages(case["peak"]), rel=0.05)
    assert [memory.peak for memory in found] == pytest.approx(peaks, rel=ERROR)
