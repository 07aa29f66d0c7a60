"""Prints what a train step needs of each GPU and sends to the others, without any GPU: read from the compiled program.

    JAX_PLATFORMS=cpu python benchmarks/memory.py --gpu rtx4090 --mesh.fsdp 4 --model synthetic:llama-3-70b \
        --optimizer adamw_8bit --offload.activations true

needs `pip install 'zagora-jax[plan]'`. Options of `python -m zagora_jax.train` are given as there; a step is one
micro-batch unless --gradient-accumulation-steps says otherwise. Memory is arguments and temporaries, of which 1 GiB is
2**30 bytes; the CUDA context, NCCL's buffers and the allocator's fragments come on top. Traffic is what a device sends
in a ring, in GB of 1e9 bytes. With --strategy layerwise, what each stage's programs need together.
"""

import argparse
import math
import sys
import time
from collections import Counter

import jax

from sharding.mesh import AXES
from sharding.program import Collective, MemoryPlan, collectives, memory
from sharding.targets import absent_devices
from zagora_jax.command_line import parse
from zagora_jax.config import TrainConfig
from zagora_jax.devices import choose_mesh
from zagora_jax.distribution import SpreadStep
from zagora_jax.errors import UserError
from zagora_jax.option_groups import BalanceConfig
from zagora_jax.pipeline_step import PipelineStep
from zagora_jax.planning import compile_planned

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpu", required=True, help="a name that sharding.targets.gpu knows")
    known, options = parser.parse_known_args()
    defaults = ["--gradient-accumulation-steps", "1"] if "--gradient-accumulation-steps" not in options else []
    config = parse(TrainConfig, options + defaults)
    config = config.model_copy(update={"balance": BalanceConfig(threshold=0)})  # nothing runs that could be watched
    count = math.prod(getattr(config.mesh, axis, None) or 1 for axis in AXES)
    try:
        devices = absent_devices(known.gpu, count)
    except (ModuleNotFoundError, ValueError) as error:  # no compiler, or no such card
        raise UserError(f"--gpu {known.gpu}: {error}") from error
    mesh = choose_mesh(config, devices)
    started = time.perf_counter()
    step = compile_planned(config, mesh)
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    print(
        f"{config.model} on {mesh.size} x {mesh.devices.flat[0].device_kind} ({shape}), jax {jax.__version__}, ", end=""
    )
    print(f"compiled in {time.perf_counter() - started:.0f} s\n")
    if isinstance(step, PipelineStep):
        print(stages_table(step))
        return
    assert isinstance(step, SpreadStep)
    print(memory_table(memory(step.compiled)))
    if mesh.size > 1:
        print(f"\n{traffic_table(collectives(step.compiled, mesh.shape))}")


def memory_table(plan: MemoryPlan) -> str:
    """Memory of a device, and of the host for each device."""
    sizes = {
        "arguments": plan.arguments,
        "temporaries": plan.temporaries,
        "peak": plan.peak,
        "pinned host memory": plan.host_peak,
    }
    return _table(["GiB a device", ""], [[name, f"{size / GIB:.2f}"] for name, size in sizes.items()])


def stages_table(step: PipelineStep) -> str:
    """Memory of a device of each stage, and of the host for it."""
    devices, host = step.planned_memory(), step.planned_host_memory()
    rows = []
    for index, programs in enumerate(step.programs):
        device = programs.stage.distribution.mesh.devices.flat[0]
        sizes = (f"{size / GIB:.2f}" for size in (devices[device], host[device]))
        rows.append([str(index), str(programs.stage.num_layers), *sizes])
    return _table(["stage", "layers", "GiB a device", "GiB pinned on the host"], rows)


def traffic_table(found: list[Collective]) -> str:
    """What a device sends in a step, by kind, axes, dtype, and whether computation is scheduled under it."""
    sent: Counter[tuple[str, str, str, str]] = Counter()
    for collective in found:
        if collective.group_size > 1:
            hidden = "yes" if collective.overlapped else "no"
            key = collective.kind, "+".join(collective.axes or ()), collective.dtype, hidden
            sent[key] += collective.wire_bytes  # type: ignore[assignment]
    rows = [[*key, f"{size / 1e9:.3f}"] for key, size in sent.most_common()]
    return _table(["kind", "axes", "dtype", "overlapped", "GB a step"], rows)


def _table(names: list[str], rows: list[list[str]]) -> str:
    """Lay rows out as a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [names, ["---"] * len(names), *rows])


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
