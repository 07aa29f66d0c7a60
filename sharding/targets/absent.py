"""Compilation for GPUs that this machine does not have.

XLA's CUDA compiler needs a description of the GPU, not the GPU: with jax's CUDA plugin installed it compiles for any
kind and number of them, and the compiled program tells its memory and its traffic exactly. Such a program cannot run.
"""

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from sharding.targets.gpus import Gpu, gpu

INSTALL = "install it with `pip install 'zagora-jax[plan]'`"

# What a multiprocessor of each compute capability holds: threads, bytes of shared memory, bytes that one block may ask
# for, float32 units. From the CUDA C++ Programming Guide and the architecture whitepapers.
_LIMITS = {
    (8, 0): (2048, 167936, 166912, 64),
    (8, 6): (1536, 102400, 101376, 128),
    (8, 9): (1536, 102400, 101376, 128),
    (9, 0): (2048, 233472, 232448, 128),
    (12, 0): (1536, 102400, 101376, 128),
}


def target_description(target: Gpu) -> str:
    """Describe a GPU to XLA's compiler: a GpuTargetConfigProto in protobuf's text format."""
    threads, shared_memory, shared_memory_of_block, float32_units = _LIMITS[target.capability]
    major, minor = target.capability
    # Code for the wgmma instructions of Hopper is compiled for "sm_90a", as it is where such a GPU is present.
    feature = "feature_extension: ACCELERATED_FEATURES" if target.capability == (9, 0) else ""
    return f"""
gpu_device_info {{
  name: "{target.name}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
  core_count: {target.cores}
  clock_rate_ghz: {target.clock_ghz}
  fpus_per_core: {float32_units}
  device_memory_size: {target.memory_bytes}
  memory_bandwidth: {round(target.bandwidth_gb_s * 1e9)}
  l2_cache_size: {round(target.l2_mib * 2**20)}
  shared_memory_per_core: {shared_memory}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_memory_of_block}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_core_limit: {threads}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{target.name}"
"""


def absent_devices(kind: str, count: int) -> list[jax.Device]:
    """Return devices to compile for: `count` GPUs of one kind in one host. They hold no arrays and run nothing.

    Args:
        kind: a name that `sharding.targets.gpu` knows.
        count: how many.

    Raises:
        ValueError: an unknown kind, or a count below 1.
        ModuleNotFoundError: the CUDA plugin or its assembler is missing; the message says what to install.
    """
    if count < 1:
        raise ValueError(f"expected at least 1 GPU to compile for, found {count}")
    description = target_description(gpu(kind))
    _require_compiler()
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="absent", topology=f"1x1x{count}", target_config=description
        )
    except NotImplementedError as error:
        # Without a driver the plugin only registers itself where CUDA is not among the platforms asked for.
        raise ModuleNotFoundError(
            "jax's CUDA plugin is installed but did not start: on a machine without a GPU, "
            "set JAX_PLATFORMS=cpu before Python starts"
        ) from error
    return list(topology.devices)


def is_absent(mesh: Mesh) -> bool:
    """Whether programs can only be compiled for these devices, not run."""
    return not mesh.devices.flat[0].addressable_memories()


def _require_compiler() -> None:
    """Refuse early what XLA would refuse late, and in words about something else."""
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(plugin) for plugin in plugins):
        raise ModuleNotFoundError(f"compiling for absent GPUs needs jax's CUDA plugin: {INSTALL}")
    wheels = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (wheels.submodule_search_locations or ())] if wheels else []
    found = (
        shutil.which("ptxas")
        or Path("/usr/local/cuda/bin/ptxas").exists()
        or any(list(folder.glob("*/bin/ptxas")) for folder in folders)
        or "xla_gpu_cuda_data_dir" in os.environ.get("XLA_FLAGS", "")
    )
    if not found:
        raise ModuleNotFoundError(f"compiling for absent GPUs needs CUDA's assembler, ptxas: {INSTALL}")


def lower_for(mesh: Mesh, function: Any, *arguments: Any) -> jax.stages.Lowered:
    """Lower a jitted function for a mesh of devices that may be absent, arguments in host memory included.

    Absent devices have no memories, so that a NamedSharding over a Mesh of them silently drops its memory kind: an
    argument meant for pinned host memory would be planned on the device. Over `mesh.abstract_mesh` it keeps the kind,
    and the mesh that is set here tells which devices are meant.

    Args:
        mesh: the devices.
        function: what jax.jit returned. Its shardings, and those of the arguments, are over `mesh.abstract_mesh`.
        *arguments: arrays or jax.ShapeDtypeStructs.
    """
    with jax.set_mesh(mesh):
        return function.lower(*arguments)


def compile_for(
    mesh: Mesh, function: Any, *arguments: Any, options: Mapping[str, Any] | None = None
) -> jax.stages.Compiled:
    """Lower a jitted function as `lower_for` does, and compile it; `options` are XLA's, by name."""
    return lower_for(mesh, function, *arguments).compile(compiler_options=dict(options or {}))
