"""How XLA's GPU compiler is asked to treat a step that is spread over devices."""

import functools
from typing import Any

import jax
import jaxlib
from jax.sharding import Mesh

_OPTIONS = {
    # Starts an exchange early and waits for it late, with computation between.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # By itself it lets one exchange run at a time, and leaves most gathers of a backward pass to the end of a layer.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    # By itself it lets two copies to or from host memory run at a time, and has a streamed layer wait for layer inputs.
    "xla_gpu_experimental_parallel_async_compute_limit": 8,
    # In percent. XLA counts what waits in host memory as the device's, and near the limit schedules without overlap, or
    # computes again (so gathers again) what it holds: the step would change with the card that it is compiled for.
    "xla_gpu_memory_limit_slop_factor": 1000,
    # Products with one operand in common are not merged into one. The merger concatenates the other operands: a copy of
    # each dequantised weight with the adapter's few rows below it.
    "xla_gpu_dot_merger_threshold_mb": 0,
}

# Moves the gathers of a loop's next iteration into the present one. Its name differs between versions of XLA.
_PIPELINED_GATHERS: tuple[dict[str, Any], ...] = (
    {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"},  # jaxlib 0.11
    {"xla_gpu_enable_pipelined_all_gather": True},  # jaxlib 0.10
)


# A loop counts for as many exchanges as its body has: so many that one beside it is always allowed.
_BESIDE_LOOPS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 64}

# No CUDA graphs: what one holds runs on one stream, a copy to the host and the products that it should be hidden under.
_BESIDE_COPIES = {"xla_gpu_enable_command_buffer": ""}


def uses_host_memory(program: jax.stages.Lowered) -> bool:
    """Whether a program reads or writes pinned host memory."""
    return "pinned_host" in program.as_text()


def compiler_options(mesh: Mesh, *, beside_loops: bool = False, beside_copies: bool = False) -> dict[str, Any]:
    """Return the options to compile a spread step for a mesh with, as `sharding.targets.compile_for` takes them.

    Args:
        mesh: the devices.
        beside_loops: whether exchanges are to run beside whole loops with exchanges of their own.
        beside_copies: whether copies to and from host memory are to run beside computation.

    Raises:
        RuntimeError: this jaxlib knows no option that pipelines gathers.
    """
    if mesh.devices.flat[0].platform == "cpu":
        return {}
    options = {**_OPTIONS, **(_BESIDE_LOOPS if beside_loops else {}), **(_BESIDE_COPIES if beside_copies else {})}
    return {**options, **(_pipelined_gathers() if mesh.size > 1 else {})}


@functools.cache
def _pipelined_gathers() -> dict[str, Any]:
    trivial = jax.jit(lambda: 0).lower()
    for options in _PIPELINED_GATHERS:
        try:
            trivial.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
        else:
            return options
    names = " nor ".join(name for options in _PIPELINED_GATHERS for name in options)
    raise RuntimeError(f"jaxlib {jaxlib.__version__} knows neither {names}: this version of zagora-jax needs one")
