from __future__ import annotations

import types
from collections import Counter
from functools import partial

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpus import needs_plugin
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sharding.program import buffers, collectives, memory, mesh_axes, traffic
from sharding.targets import absent_devices, compile_for

MESH = {"data": 2, "fsdp": 4}
P = PartitionSpec


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


@pytest.fixture(params=["cpu", pytest.param("rtx4090", marks=needs_plugin)])
def devices(request: pytest.FixtureRequest) -> list[jax.Device]:
    """Eight devices to compile for."""
    if (request.param == "cpu") != eight_devices.available():
        pytest.skip("run by test_on_eight_devices" if request.param == "cpu" else "run outside it")
    return jax.devices() if request.param == "cpu" else absent_devices(request.param, 8)


def compile_sharded(devices: list[jax.Device], function, specs, *arguments, **options) -> jax.stages.Compiled:
    """Compile a function that each device runs on its shard; the options are those of jax.jit."""
    mesh = Mesh(np.array(devices).reshape(tuple(MESH.values())), tuple(MESH), axis_types=(AxisType.Auto,) * 2)
    over = mesh.abstract_mesh
    in_specs, out_specs = specs
    mapped = jax.shard_map(function, mesh=over, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    shardings = jax.tree.map(partial(NamedSharding, over), in_specs, is_leaf=lambda spec: isinstance(spec, P))
    jitted = jax.jit(mapped, in_shardings=shardings, **options)
    return compile_for(mesh, jitted, *arguments)


def exchange_all(x, codes, gradients, quantised):
    """One collective of each kind: two of them in loops, one of these in a loop inside a loop."""

    def layer(x, codes):
        weight = lax.all_gather(codes, "fsdp", axis=0, tiled=True)  # [128, 128]
        x = jnp.tanh(x @ weight.astype(jnp.float32))
        step = lambda x, _: (jnp.sin(lax.ppermute(x, "data", [(0, 1), (1, 0)])), None)  # noqa: E731
        return lax.scan(step, x, length=3)[0], None

    x, _ = lax.scan(layer, x, codes)
    scattered = lax.psum_scatter(gradients, "data", scatter_dimension=0, tiled=True)
    mixed = lax.all_to_all(quantised, ("data", "fsdp"), split_axis=0, concat_axis=0, tiled=True)
    return x, lax.psum(x, ("data", "fsdp")), scattered, mixed


def test_each_kind_is_counted_where_it_runs(devices: list[jax.Device]) -> None:
    rows = P(("data", "fsdp"))
    compiled = compile_sharded(
        devices,
        exchange_all,
        ((rows, P(None, "fsdp"), P("fsdp"), rows), (rows, P(), P(("fsdp", "data")), rows)),
        jax.ShapeDtypeStruct((64, 128), jnp.float32),  # 8 rows a device
        jax.ShapeDtypeStruct((6, 128, 128), jnp.uint8),
        jax.ShapeDtypeStruct((128, 16), jnp.float32),  # 32 rows a device
        jax.ShapeDtypeStruct((128, 64), jnp.int8),  # 16 rows a device
    )
    found = collectives(compiled, MESH)
    sizes: Counter = Counter()
    for c in found:
        sizes[c.kind, c.dtype, c.axes, c.group_size, c.loop_trips] += c.bytes
    assert sizes == {
        ("all-gather", "u8", ("fsdp",), 4, 6): 128 * 128,
        ("collective-permute", "f32", ("data",), 2, 6 * 3): 8 * 128 * 4,
        ("reduce-scatter", "f32", ("data",), 2, 1): 32 * 16 * 4,
        ("all-to-all", "s8", ("data", "fsdp"), 8, 1): 16 * 64,
        ("all-reduce", "f32", ("data", "fsdp"), 8, 1): 8 * 128 * 4,
    }
    assert traffic(found) == {
        ("all-gather", "fsdp"): 3 / 4 * 128 * 128 * 6,
        ("collective-permute", "data"): 8 * 128 * 4 * 18,
        ("reduce-scatter", "data"): 1 / 2 * 32 * 16 * 4,
        ("all-to-all", "data+fsdp"): 7 / 8 * 16 * 64,
        ("all-reduce", "data+fsdp"): 2 * 7 / 8 * 8 * 128 * 4,
    }
    gathered = next(c for c in found if c.kind == "all-gather")
    assert gathered.shape == (128, 128)
    assert set(gathered.groups) == {(0, 1, 2, 3), (4, 5, 6, 7)}


def dequantise_in_loop(x, codes, *, early: bool):
    """Layers whose codes become weights on the way: in the layer, or, too early, before their gather."""

    def layer(x, codes):
        if early:
            weight = lax.all_gather(jnp.sin(codes.astype(jnp.float32)), "fsdp", axis=0, tiled=True)
        else:
            weight = jnp.sin(lax.all_gather(codes, "fsdp", axis=0, tiled=True).astype(jnp.float32))
        return jnp.tanh(x @ weight), None

    return lax.scan(layer, x, codes)[0]


@pytest.mark.parametrize("early", [False, True])
def test_a_gather_of_weights_shows(devices: list[jax.Device], early: bool) -> None:
    compiled = compile_sharded(
        devices,
        partial(dequantise_in_loop, early=early),
        ((P(("data", "fsdp")), P(None, "fsdp")), P(("data", "fsdp"))),
        jax.ShapeDtypeStruct((64, 128), jnp.float32),
        jax.ShapeDtypeStruct((6, 128, 128), jnp.uint8),
    )
    in_loop = {(c.kind, c.dtype, c.shape) for c in collectives(compiled) if c.loop_trips == 6}
    assert in_loop == {("all-gather", "f32" if early else "u8", (128, 128))}


def apply_stack(x, codes, *, whole: bool):
    """Layers whose codes become weights one layer at a time, or all at once."""

    def layer(x, codes):
        return jnp.tanh(x @ jnp.sin(codes.astype(jnp.float32))), None

    if whole:
        codes = lax.optimization_barrier(jnp.sin(codes.astype(jnp.float32)))
    return lax.scan(layer, x, codes)[0]


@pytest.mark.parametrize("whole", [False, True])
def test_a_stack_of_weights_shows(devices: list[jax.Device], whole: bool) -> None:
    compiled = compile_sharded(
        devices,
        partial(apply_stack, whole=whole),
        ((P(("data", "fsdp")), P()), P(("data", "fsdp"))),
        jax.ShapeDtypeStruct((64, 128), jnp.float32),
        jax.ShapeDtypeStruct((6, 128, 128), jnp.uint8),
    )
    stored = buffers(compiled)
    assert (("f32", (6, 128, 128)) in {(b.dtype, b.shape) for b in stored}) == whole
    assert [(b.dtype, b.shape) for b in stored if b.opcode == "parameter" and b.dtype == "u8"] == [
        ("u8", (6, 128, 128))
    ]
    assert stored[0].bytes == max(b.bytes for b in stored) == (6 * 128 * 128 * (4 if whole else 1))
    assert (memory(compiled).temporaries > 6 * 128 * 128 * 4) == whole


def test_what_a_fusion_computes_inside_is_not_stored(devices: list[jax.Device]) -> None:
    compiled = compile_sharded(
        devices,
        lambda x: (x.astype(jnp.float32) * 1.5 + 2).astype(jnp.uint8),
        (P(), P()),
        jax.ShapeDtypeStruct((512, 512), jnp.uint8),
    )
    assert "f32[512,512]" in compiled.as_text()
    assert {b.dtype for b in buffers(compiled) if b.shape == (512, 512)} == {"u8"}


@pytest.mark.parametrize("donate", [False, True])
def test_the_peak_counts_outputs_that_replace_no_argument(devices: list[jax.Device], donate: bool) -> None:
    size = 512 * 256 * 4
    plan = memory(
        compile_sharded(
            devices,
            lambda x: x + 1,
            (P(), P()),
            jax.ShapeDtypeStruct((512, 256), jnp.float32),
            donate_argnums=(0,) if donate else (),
        )
    )
    assert (plan.arguments, plan.outputs, plan.aliased) == (size, size, size if donate else 0)
    assert plan.peak == plan.temporaries + (size if donate else 2 * size)
    assert plan.host_peak == 0


@needs_plugin
@pytest.mark.skipif(eight_devices.available(), reason="run outside")
def test_what_an_exchange_hides_under_is_told() -> None:
    def independent(x, y):
        return lax.psum(x, "data"), jnp.tanh(y @ y) @ y

    def dependent(x, y):
        y = lax.psum(y, "data")
        return x, jnp.tanh(y @ y) @ y

    found = []
    for function in (independent, dependent):
        compiled = compile_sharded(
            absent_devices("rtx4090", 8),
            function,
            ((P(), P()), (P(), P())),
            *(jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16),) * 2,
            compiler_options={"xla_gpu_enable_latency_hiding_scheduler": True},
        )
        (exchange,) = collectives(compiled, MESH)
        assert exchange.axes == ("data",)
        found.append((exchange.asynchronous, any("gemm" in i.name or "dot" in i.name for i in exchange.overlapped)))
    assert found == [(True, True), (False, False)]


# The rest reads texts.

# An exchange wrapped whole in an asynchronous computation, one that combines two arrays, and two loops.
TEXT = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: s8[64]) -> s8[64] {
  %p = s8[64]{0} parameter(0)
  ROOT %mixed = s8[64]{0} all-to-all(%p), channel_id=1, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
}

%condition (c: (s32[], bf16[16,8])) -> pred[] {
  %c = (s32[], bf16[16,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%body (b.1: (s32[], bf16[16,8])) -> (s32[], bf16[16,8]) {
  %b.1 = (s32[], bf16[16,8]{1,0:T(8,128)S(5)}) parameter(0)
  %j = s32[] get-tuple-element(%b.1), index=0
  %x = bf16[16,8]{1,0} get-tuple-element(%b.1), index=1
  %start = (bf16[16,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%x), replica_groups={}, dimensions={1}
  %done = bf16[16,32]{1,0} all-gather-done(%start)
  %cut = bf16[16,8]{1,0} slice(%done), slice={[0:16], [0:8]}
  ROOT %next = (s32[], bf16[16,8]{1,0}) tuple(%j, %cut)
}

ENTRY %main (q: s8[64], g: f32[6], h: u8[3,2], x.1: bf16[16,8]) -> bf16[16,8] {
  %q = s8[64]{0} parameter(0)
  %g = f32[6]{0} parameter(1)
  %h = u8[3,2]{1,0:S(5)} parameter(2)
  %x.1 = bf16[16,8]{1,0} parameter(3)
  %zero = s32[] constant(0)
  %async = ((s8[64]{0}), s8[64]{0}, u32[]) async-start(%q), calls=%wrapped
  %both = (f32[6]{0}, u8[3,2]{1,0}) all-reduce(%g, /*index=1*/%h), replica_groups={{0,1},{2,3}}, to_apply=%add
  %work = bf16[16,8]{1,0} negate(%x.1), metadata={op_name="jit(f)/all-gather(fake)" source_file="f(x).py"}
  %async.1 = ((s8[64]{0}), s8[64]{0}, u32[]) async-update(%async), calls=%wrapped
  %more = bf16[16,8]{1,0} exponential(%work)
  %async.2 = s8[64]{0} async-done(%async.1), calls=%wrapped
  %carry = (s32[], bf16[16,8]{1,0}) tuple(%zero, %more)
  %loop = (s32[], bf16[16,8]{1,0}) while(%carry), condition=%condition, body=%body KNOWN
  ROOT %result = bf16[16,8]{1,0} get-tuple-element(%loop), index=1
}
"""
KNOWN = ', backend_config={"known_trip_count":{"n":"5"}}'


def as_compiled(text: str) -> jax.stages.Compiled:
    return types.SimpleNamespace(as_text=lambda: text)  # type: ignore[return-value]


def test_asynchronous_and_combined_exchanges() -> None:
    found = collectives(as_compiled(TEXT.replace(" KNOWN", KNOWN)), {"data": 2, "fsdp": 2})
    assert [(c.kind, c.dtype, c.shape, c.axes, c.loop_trips, c.asynchronous) for c in found] == [
        ("all-to-all", "s8", (64,), ("data",), 1, True),
        ("all-reduce", "f32", (6,), ("fsdp",), 1, False),
        ("all-reduce", "u8", (3, 2), ("fsdp",), 1, False),
        ("all-gather", "bf16", (16, 32), ("data", "fsdp"), 5, True),
    ]
    assert [[i.name for i in c.overlapped] for c in found] == [["work", "more"], [], [], []]
    assert found[-1].wire_bytes == 3 / 4 * 16 * 32 * 2 * 5


def test_a_loop_of_unknown_length_is_not_guessed() -> None:
    found = collectives(as_compiled(TEXT.replace(" KNOWN", "")))
    assert [c.loop_trips for c in found] == [1, 1, 1, None]
    with pytest.raises(ValueError, match="all-gather start runs in a loop whose trip count is not known"):
        traffic(found)


def test_buffers_in_host_memory_are_told_apart() -> None:
    stored = {b.name: b for b in buffers(as_compiled(TEXT.replace(" KNOWN", KNOWN)))}
    assert (stored["h"].host, stored["h"].bytes) == (True, 6)
    assert (stored["g"].host, stored["g"].bytes) == (False, 24)
    assert stored["done"].loop_trips == 5
    assert {"loop", "carry", "async", "start"}.isdisjoint(stored)


def test_a_send_between_devices_is_not_left_out() -> None:
    send = "%sent = (f32[6]{0}, u32[], token[]) send(%g, %token), channel_id=3"
    with pytest.raises(ValueError, match="sent is a send, whose traffic is not counted"):
        collectives(as_compiled(TEXT.replace("  %zero", f"  {send}\n  %zero")))
    to_host = send + ", is_host_transfer=true"
    assert len(collectives(as_compiled(TEXT.replace("  %zero", f"  {to_host}\n  %zero")))) == 4


def test_axes_of_groups() -> None:
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    assert mesh_axes(((0, 4), (1, 5), (2, 6), (3, 7)), mesh) == ("data",)
    assert mesh_axes(((0, 1, 2, 3), (4, 5, 6, 7)), mesh) == ("fsdp", "tensor")
    assert mesh_axes(((0, 7),), mesh) == ("data", "fsdp", "tensor")
