from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpus import needs_plugin
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sharding import targets
from sharding.mesh import make_mesh
from sharding.program import memory
from sharding.targets import GPUS, absent

# Fused multiply-adds of bfloat16 that the tensor cores of one multiprocessor finish in a clock, accumulated in float32:
# GeForce cards do half of what the same chip does on a workstation card.
FMA = {"rtx": 256, "a4": 512, "a5": 512, "a6": 512, "l4": 512, "a1": 1024, "h1": 2048, "h2": 2048}
SOLD_GB = (8, 10, 12, 16, 20, 24, 32, 40, 48, 80, 141)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("rtx4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("rtx-a5000", "a5000"),
        ("NVIDIA RTX A5000", "a5000"),
        ("RTX 4070 Ti SUPER", "rtx4070tisuper"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("rtx5060ti-16", "rtx5060ti-16"),
        ("L40S", "l40s"),
    ],
)
def test_a_gpu_has_many_spellings(name: str, kind: str) -> None:
    assert targets.gpu(name).kind == kind


def test_every_short_name_finds_its_own_gpu() -> None:
    assert [targets.gpu(kind).kind for kind in GPUS] == list(GPUS)


def test_an_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'RTX 4095' is not known; the nearest are .*rtx4090"):
        targets.gpu("RTX 4095")


# Two columns of the table and a third, published apart, hold each other: a wrong digit in one breaks the product.
@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_the_published_rate_is_that_of_cores_and_clock(gpu: targets.Gpu) -> None:
    per_clock = next(fma for prefix, fma in FMA.items() if gpu.kind.startswith(prefix))
    derived = gpu.cores * gpu.clock_ghz * per_clock * 2 / 1e3
    # Hopper's tensor cores run 8 % below the boost clock; else the figures are rounded.
    assert gpu.bf16_tflop_s == pytest.approx(derived * (0.924 if gpu.capability == (9, 0) else 1), rel=0.015)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_the_memory_is_a_little_less_than_what_is_sold(gpu: targets.Gpu) -> None:
    sold = next(size for size in SOLD_GB if size * 1024 >= gpu.memory_mib)
    assert 0.91 < gpu.memory_mib / (sold * 1024) < 0.995


def test_without_the_plugin_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"CUDA plugin: install it with .*zagora-jax\[plan\]"):
        targets.absent_devices("rtx4090", 2)


@needs_plugin
def test_without_an_assembler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nvidia" else found(name))
    monkeypatch.setattr(absent.shutil, "which", lambda name: None)
    monkeypatch.setattr(absent.Path, "exists", lambda path: False)
    with pytest.raises(ModuleNotFoundError, match=r"ptxas: install it with"):
        targets.absent_devices("rtx4090", 2)


@needs_plugin
def test_a_plugin_that_did_not_start_names_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(absent.topologies, "get_topology_desc", refuse)
    with pytest.raises(ModuleNotFoundError, match="JAX_PLATFORMS=cpu"):
        targets.absent_devices("rtx4090", 2)


def test_no_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 GPU"):
        targets.absent_devices("rtx4090", 0)


def absent_mesh(kind: str, count: int) -> Mesh:
    return Mesh(np.array(targets.absent_devices(kind, count)), ("fsdp",), axis_types=(AxisType.Auto,))


def test_a_device_that_is_there_is_not_absent() -> None:
    assert not targets.is_absent(make_mesh({}, jax.devices()[:1]))


# One GPU of each compute capability.
@needs_plugin
@pytest.mark.parametrize("kind", ["a100", "rtx3090", "rtx4090", "h100", "rtx5070ti"])
def test_a_program_compiles_for_absent_gpus(kind: str) -> None:
    mesh = absent_mesh(kind, 3)
    assert [device.device_kind for device in mesh.devices] == [GPUS[kind].name] * 3
    assert targets.is_absent(mesh)
    rows = NamedSharding(mesh.abstract_mesh, PartitionSpec("fsdp"))
    whole = NamedSharding(mesh.abstract_mesh, PartitionSpec())
    product = jax.jit(lambda x, w: jnp.tanh(x @ w), in_shardings=(rows, whole), out_shardings=rows)
    x = jax.ShapeDtypeStruct((96, 64), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)
    plan = memory(targets.compile_for(mesh, product, x, w))
    assert plan.arguments == 2 * (96 // 3 * 64 + 64 * 32)
    assert plan.outputs == 2 * (96 // 3 * 32)


@needs_plugin
@pytest.mark.parametrize("kind", ["pinned_host", "device"])
def test_arguments_lie_in_the_memory_that_their_sharding_names(kind: str) -> None:
    mesh = absent_mesh("rtx4090", 2)
    stack = NamedSharding(mesh.abstract_mesh, PartitionSpec(None, "fsdp"), memory_kind=kind)
    whole = NamedSharding(mesh.abstract_mesh, PartitionSpec())
    table = jnp.arange(256, dtype=jnp.float32)  # an array that lies on this machine's own device

    def apply(codes: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, codes: jax.Array) -> tuple[jax.Array, None]:
            codes = jax.device_put(codes, jax.memory.Space.Device)
            codes = jax.lax.with_sharding_constraint(codes, whole)
            return jnp.tanh(x @ jnp.take(table, codes.astype(jnp.int32), mode="clip")), None

        return jax.lax.scan(layer, x, codes)[0]

    function = jax.jit(apply, in_shardings=(stack, whole), out_shardings=whole)
    codes = jax.ShapeDtypeStruct((8, 512, 512), jnp.uint8)
    x = jax.ShapeDtypeStruct((16, 512), jnp.float32)
    plan = memory(targets.compile_for(mesh, function, codes, x))
    of_codes, of_x = 8 * 512 * 512 // 2, 16 * 512 * 4
    on_host = kind == "pinned_host"
    assert (plan.host_arguments, plan.arguments) == ((of_codes, of_x) if on_host else (0, of_codes + of_x))
