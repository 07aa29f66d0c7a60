"""What a step with streamed layers does, read from the program compiled for RTX 4090s that are not there."""

from __future__ import annotations

import re

import jax
from absent_gpus import needs_plugin

from sharding.compiler import compiler_options
from sharding.program import memory
from sharding.targets import absent_devices
from zagora_jax import distribution
from zagora_jax.command_line import parse
from zagora_jax.config import TrainConfig
from zagora_jax.devices import choose_mesh
from zagora_jax.layer_feed import GPU_CALLBACK
from zagora_jax.planning import compile_planned_step

pytestmark = needs_plugin

LAYERS = 24
LAYER_CODES = (2 * 2048 * 2048 + 2 * 256 * 2048 + 3 * 5632 * 2048) // 2  # bytes, of TinyLlama
# Float32, two of each of q_proj's and down_proj's matrices, of rank 16.
MOMENTS = 2 * 4 * 16 * LAYERS * (2 * 2048 + 5632 + 2048)
# With attention's tables and norms, a layer is some 100 instructions; all that computes stands between the two ends.
COMPUTING = re.compile(r" (fusion|custom-call|while)\(")


def waits(compiled: jax.stages.Compiled) -> list[int]:
    """For each copy of a waiting layer out of host memory in a loop: the computations scheduled under it."""
    found = []
    for computation in re.split(r"\n(?=%|ENTRY)", compiled.as_text()):
        if computation.startswith("ENTRY"):
            continue
        lines = computation.splitlines()
        for start, line in enumerate(lines):
            copy = re.match(r"\s+%(dynamic-slice-start\S*) = \(\(u8\[\d+,\d+\]\{1,0:S\(5\)\}", line)
            if copy:
                end = next(n for n, other in enumerate(lines) if re.search(rf"-done\(%{re.escape(copy[1])}\)", other))
                found.append(sum(bool(COMPUTING.search(between)) for between in lines[start:end]))
    return found


def asks_before_copies(compiled: jax.stages.Compiled) -> list[bool]:
    """For each copy of a waiting layer: whether the host was asked for it, behind the copy before it."""
    found = []
    for computation in re.split(r"\n(?=%|ENTRY)", compiled.as_text()):
        asked = False
        for line in computation.splitlines():
            if f'custom_call_target="{GPU_CALLBACK}"' in line:
                asked = True
            elif re.match(r"\s+%dynamic-slice-start\S* = \(\(u8\[\d+,\d+\]\{1,0:S\(5\)\}", line):
                found.append(asked)
                asked = False
    return found


def compiled(*options: str) -> jax.stages.Compiled:
    config = parse(
        TrainConfig,
        [
            *("--model", f"synthetic:tinyllama-1.1b?layers={LAYERS}", "--lora.targets", "[q_proj, down_proj]"),
            *("--sequence-length", "480", "--gradient-accumulation-steps", "1", "--attention", "chunked"),
            *("--offload.activations", "true", "--mesh.data", "4", *options),
        ],
    )
    return compile_planned_step(config, choose_mesh(config, absent_devices("rtx4090", 4)))


def test_layers_and_moments_are_copied_by_dma(tmp_path, monkeypatch):
    # A kernel that reads host memory would fill the device, so that no computation could run beside it.
    def dumping(*arguments, **keywords):
        return compiler_options(*arguments, **keywords) | {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}

    monkeypatch.setattr(distribution, "compiler_options", dumping)
    program = compiled("--offload.weights", "12", "--offload.optimizer", "true")
    (listing,) = tmp_path.glob("*thunk_sequence.txt")
    under = re.findall(r"kAsyncStart.*\n\s*\d+: (\w+)", listing.read_text())
    # Layers' inputs go and come back, four a turn of the loop; one streamed layer comes, forwards and backwards; two
    # moments of four matrices come and go, a layer a turn. What is brought ahead of the loop is read by a kernel, once.
    assert under.count("kDynamicSliceFusion") >= 2 * 4 + 2 + 2 * 2 * 4
    assert under.count("kCustomKernel") == 1
    # The moments are changed in place: host memory holds them once.
    assert memory(program).host_aliased == MOMENTS


def test_a_streamed_layer_is_copied_under_the_computation_of_the_one_before():
    program, resident = compiled("--offload.weights", "all"), compiled()
    # Two layers a turn of the loop, forwards and backwards.
    assert len(waits(program)) == 4
    assert min(waits(program)) >= 10
    assert not waits(resident)
    # Of LAYERS, two layers' codes stay on the device, and what is cut out of one of them to be dequantised.
    freed = memory(resident).peak - memory(program).peak
    assert freed > (LAYERS - 4) * LAYER_CODES
    assert memory(program).host_peak > LAYERS * LAYER_CODES


def test_a_layer_from_the_disk_is_asked_for_and_then_copied_under_the_computation_of_the_one_before():
    program = compiled("--offload.weights", "all", "--offload.weights-from", "6")
    assert waits(program)
    assert min(waits(program)) >= 10
    # Two in each turn of both loops; the copies that loops begin with stand outside of them.
    assert asks_before_copies(program).count(True) >= 4
    assert all(asks_before_copies(program))
    # Host memory holds six layers' codes and scales, and layer inputs.
    inputs = LAYERS * 480 * 2048 * 2
    assert 6 * LAYER_CODES < memory(program).host_peak - inputs < 7 * LAYER_CODES
