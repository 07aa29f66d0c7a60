from __future__ import annotations

import functools

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpus import needs_plugin
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sharding.compiler import compiler_options
from sharding.exchange import Exchange
from sharding.overlap import begin_deferred, exchange_deferred, exchange_in_backward
from sharding.program import collectives
from sharding.targets import absent_devices, compile_for

LAYERS, ROWS, WIDTH = 3, 12, 5
BATCH = 4

# The devices that the axes of a mesh (replicas, shards) have, and what the exchange makes of them.
MESHES = {
    "replicas": (4, 1, Exchange("none", replicas="data")),
    "shards": (1, 4, Exchange("none", shards="fsdp")),
    "both": (2, 3, Exchange("none", replicas="data", shards="fsdp")),
}


@pytest.fixture(autouse=True)
def _devices(request: pytest.FixtureRequest) -> None:
    outside = request.function in (test_on_eight_devices, test_on_gpus_a_deferred_exchange_runs_under_computations)
    if outside == eight_devices.available():
        pytest.skip("run outside" if outside else "run by test_on_eight_devices")


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


def with_compression(layout: str, kind: str) -> tuple[int, int, Exchange]:
    replicas, shards, exchange = MESHES[layout]
    return replicas, shards, Exchange(kind, exchange.replicas, exchange.shards)


def run_layers(layer, x, chunks, errors, earlier, exchange: Exchange, form: str):
    """Run `layer(x, parameters)` over the stack, with the exchange in its backward pass."""

    def body(x, inputs):
        return layer(x, exchange_in_backward(*inputs, exchange)), None

    def deferring_body(carry, inputs):
        x, waiting = carry
        parameters, waiting = exchange_deferred(*inputs, waiting, exchange)
        return (layer(x, parameters), waiting), None

    policy = jax.checkpoint_policies.nothing_saveable
    remat = functools.partial(jax.checkpoint, policy=policy, prevent_cse=False) if "remat" in form else lambda f: f
    if "deferred" in form:
        chunks, errors, earlier, waiting = begin_deferred(chunks, errors, earlier, exchange)
        return jax.lax.scan(remat(deferring_body), (x, waiting), (chunks, errors, earlier))[0][0]
    return jax.lax.scan(remat(body), x, (chunks, errors, earlier))[0]


def make_mesh(devices, replicas: int, shards: int) -> Mesh:
    grid = np.array(devices[: replicas * shards]).reshape(replicas, shards)
    return Mesh(grid, ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto))


def on_mesh(function, replicas: int, shards: int, in_specs, out_specs):
    mesh = make_mesh(jax.devices(), replicas, shards)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


# Specs: of parameters [L, rows, ...], sharded by rows; of what each device has its own of.
CHUNKS, OWN = PartitionSpec(None, "fsdp"), PartitionSpec(("data", "fsdp"))


def stacked_no_errors(parameters, replicas: int, shards: int, exchange: Exchange, dtype=jnp.float32):
    """Residuals of all devices and layers, [devices * L, ...], each device's L together."""
    chunk = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[1] // shards, *x.shape[2:]), x.dtype), parameters)
    zeros = exchange.no_errors(chunk, replicas, shards, dtype)
    return jax.tree.map(lambda e: jnp.zeros((replicas * shards * LAYERS, *e.shape), e.dtype), zeros)


def two_matrices(seed: int = 0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: (rng.standard_normal((LAYERS, *shape)) / np.sqrt(shape[0])).astype(np.float32)  # noqa: E731
    return {"a": draw(ROWS, WIDTH), "b": draw(ROWS, WIDTH), "bias": draw(ROWS)}


def mlp(x, p):
    """x [B, WIDTH] -> [B, WIDTH]."""
    return x + jnp.tanh(x @ p["a"].T + p["bias"]) @ p["b"]


@pytest.mark.parametrize("form", ["plain", "deferred", "plain remat", "deferred remat"])
@pytest.mark.parametrize("layout", MESHES)
def test_gradients_are_those_of_one_device(layout: str, form: str) -> None:
    replicas, shards, exchange = MESHES[layout]
    devices = replicas * shards
    parameters = two_matrices()
    x = np.random.default_rng(1).standard_normal((devices * BATCH, WIDTH)).astype(np.float32)

    def whole_loss(parameters):
        out = jax.lax.scan(lambda x, p: (mlp(x, p), None), x, parameters)[0]
        return jnp.sum(out**2)

    def local(chunks, errors, x):
        def loss(chunks, errors):
            return jnp.sum(run_layers(mlp, x, chunks, errors, None, exchange, form) ** 2)

        return jax.grad(loss, argnums=(0, 1))(chunks, errors)

    errors = stacked_no_errors(parameters, replicas, shards, exchange)
    step = on_mesh(local, replicas, shards, (CHUNKS, OWN, OWN), (CHUNKS, OWN))
    gradients, _ = step(parameters, errors, x)
    # Sums over the batch are split by device; float32 rounds each of some 30 additions.
    for name, want in jax.grad(whole_loss)(parameters).items():
        np.testing.assert_allclose(gradients[name], want, rtol=1e-5, atol=1e-5 * np.abs(want).max(), err_msg=name)


def weighted_sum_layers(layout: str, kind: str, form: str, weights, errors, steps: int = 1, earlier=None):
    """Exchange gradients that are exactly the devices' `weights` [devices, L, n]: the loss is linear in the parameters.

    Returns the gradients [L, n], the new residuals, and the loss of each device's last step.
    """
    replicas, shards, exchange = with_compression(layout, kind)

    def local(chunks, errors, weights, earlier):
        def loss(chunks, errors):
            def layer(carry, parameters):
                total, index = carry
                return total + jnp.sum(parameters * weights[0, index]), index + 1

            return run_layers(layer, (jnp.float32(0), 0), chunks, errors, earlier, exchange, form)[0]

        for _ in range(steps):
            value, (gradients, errors) = jax.value_and_grad(loss, argnums=(0, 1))(chunks, errors)
        return gradients, errors, value[None]

    parameters = np.ones((LAYERS, weights.shape[-1]), np.float32)
    if errors is None:
        errors = stacked_no_errors(parameters, replicas, shards, exchange)
    step = on_mesh(local, replicas, shards, (CHUNKS, OWN, OWN, OWN), (CHUNKS, OWN, OWN))
    return step(parameters, errors, weights, earlier)


def exchanged_layer_by_layer(layout: str, kind: str, weights, steps: int, earlier=None):
    """What the exchange itself makes of the devices' gradients [devices, L, n]."""
    replicas, shards, exchange = with_compression(layout, kind)

    def local(weights, errors, earlier):
        for _ in range(steps):
            sums, new = [], []
            for layer in range(LAYERS):
                of_layer = jax.tree.map(lambda e, layer=layer: e[layer], (errors, earlier))
                total, left = exchange.sum(weights[0, layer], *of_layer)
                sums.append(total)
                new.append(left)
            errors = jax.tree.map(lambda *e: jnp.stack(e), *new)
        return jnp.stack(sums), errors

    parameters = np.ones((LAYERS, weights.shape[-1]), np.float32)
    errors = stacked_no_errors(parameters, replicas, shards, exchange)
    return on_mesh(local, replicas, shards, (OWN, OWN, OWN), (CHUNKS, OWN))(weights, errors, earlier)


def draw_weights(layout: str, n: int = 600, seed: int = 0) -> np.ndarray:
    replicas, shards, _ = MESHES[layout]
    return np.random.default_rng(seed).standard_normal((replicas * shards, LAYERS, n)).astype(np.float32)


@pytest.mark.parametrize("form", ["plain", "deferred remat"])
@pytest.mark.parametrize(("layout", "kind"), [("replicas", "int4"), ("shards", "int8"), ("both", "int4")])
def test_compressed_gradients_and_residuals_come_out_of_the_backward_pass(layout: str, kind: str, form: str) -> None:
    """Two steps, so that the second one starts from residuals."""
    weights = draw_weights(layout)
    gradients, errors, loss = weighted_sum_layers(layout, kind, form, weights, None, steps=2)
    want, want_errors = exchanged_layer_by_layer(layout, kind, weights, steps=2)
    np.testing.assert_array_equal(gradients, want)
    jax.tree.map(np.testing.assert_array_equal, errors, want_errors)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(errors)), "nothing was quantised"
    # Forward, the parameters (ones) are whole; a float32 sum of 1800 terms.
    np.testing.assert_allclose(loss, weights.sum(axis=(1, 2), dtype=np.float64), atol=1e-2)


@pytest.mark.parametrize("form", ["plain", "deferred"])
def test_earlier_gradients_are_summed_over_the_replicas_with_the_last(form: str) -> None:
    layout, shards = "both", MESHES["both"][1]
    weights, earlier = draw_weights(layout), draw_weights(layout, 600 // shards, seed=1)
    earlier = earlier.reshape(-1, earlier.shape[-1])  # [devices * L, n / shards]
    gradients, errors, _ = weighted_sum_layers(layout, "int4", form, weights, None, earlier=earlier)
    want, want_errors = exchanged_layer_by_layer(layout, "int4", weights, steps=1, earlier=earlier)
    np.testing.assert_array_equal(gradients, want)
    jax.tree.map(np.testing.assert_array_equal, errors, want_errors)
    assert np.any(gradients != exchanged_layer_by_layer(layout, "int4", weights, steps=1)[0])


def mlp_gradient(form: str, kind: str):
    """The traced backward pass over an MLP stack on four replicas, and its arguments."""
    replicas, shards, exchange = with_compression("replicas", kind)
    parameters = two_matrices()

    def local(chunks, errors, x):
        def loss(chunks, errors):
            return jnp.sum(run_layers(mlp, x, chunks, errors, None, exchange, form) ** 2)

        return jax.grad(loss, argnums=(0, 1))(chunks, errors)

    errors = stacked_no_errors(parameters, replicas, shards, exchange)
    step = on_mesh(local, replicas, shards, (CHUNKS, OWN, OWN), (CHUNKS, OWN))
    return step, (parameters, errors, np.ones((replicas * BATCH, WIDTH), np.float32))


@pytest.mark.parametrize("form", ["plain", "deferred"])
def test_layers_exchange_one_compressed_message_a_phase_in_the_loop(form: str) -> None:
    step, arguments = mlp_gradient(form, "int4")
    found = collectives(step.lower(*arguments).compile())
    assert {c.dtype for c in found} == {"u8"}
    # A deferred phase is that of a layer above; what is left of the bottom layers follows behind the loop.
    exchanges = {"plain": {LAYERS}, "deferred": {LAYERS, 1}}[form]
    for kind in ("all-to-all", "all-gather"):
        assert {c.loop_trips for c in found if c.kind == kind} == exchanges
    assert {c.kind for c in found} == {"all-to-all", "all-gather"}


@pytest.mark.parametrize(("form", "waits_for_compute"), [("plain", True), ("deferred", False)])
def test_a_deferred_exchange_waits_for_no_computation_of_its_iteration(form: str, waits_for_compute: bool) -> None:
    step, arguments = mlp_gradient(form, "int4")
    bodies = [body for body in loop_bodies(jax.make_jaxpr(step)(*arguments).jaxpr) if holds(body, "all_to_all")]
    assert len(bodies) == 1
    assert holds(bodies[0], "dot_general")
    assert depends(bodies[0], "all_to_all", "dot_general") is waits_for_compute
    assert depends(bodies[0], "all_gather", "dot_general") is waits_for_compute


def subprograms(equation):
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
        if hasattr(value, "eqns"):
            yield getattr(value, "jaxpr", value)


def loop_bodies(program):
    for equation in program.eqns:
        for inner in subprograms(equation):
            if equation.primitive.name == "scan":
                yield inner
            yield from loop_bodies(inner)


def holds(program, primitive: str) -> bool:
    return any(
        equation.primitive.name == primitive or any(holds(inner, primitive) for inner in subprograms(equation))
        for equation in program.eqns
    )


def depends(program, operation: str, on: str) -> bool:
    """Whether an `operation` at the program's top level uses the result of an `on` in the same program."""
    tainted: set = set()
    found = []
    for equation in program.eqns:
        is_tainted = any(id(variable) in tainted for variable in equation.invars)
        if equation.primitive.name == operation:
            found.append(is_tainted)
        inside = equation.primitive.name == on or any(holds(inner, on) for inner in subprograms(equation))
        if is_tainted or inside:
            tainted.update(id(variable) for variable in equation.outvars)
    assert found, f"no {operation} at the top level"
    return any(found)


@needs_plugin
@pytest.mark.parametrize(("form", "hidden"), [("plain remat", False), ("deferred remat", True)])
def test_on_gpus_a_deferred_exchange_runs_under_computations(form: str, hidden: bool) -> None:
    """Read from the schedule compiled for four absent RTX 4090s, of layers [1024 -> 4096 -> 1024] on 2048 rows each."""
    width, inner, rank = 1024, 4096, 16
    mesh = make_mesh(absent_devices("rtx4090", 4), 4, 1)
    exchange = Exchange("int4", replicas="data")

    def local(lora, errors, frozen, x):
        def layer(carry, lora):
            x, index = carry
            up, down = (weight[index] for weight in frozen)
            return x + jax.nn.silu(x @ up + (x @ lora["a"]) @ lora["b"]) @ down, index + 1

        def loss(lora, errors):
            return jnp.sum(run_layers(layer, (x, jnp.int32(0)), lora, errors, None, exchange, form)[0] ** 2)

        return jax.grad(loss, argnums=(0, 1))(lora, errors)

    abstract = jax.ShapeDtypeStruct
    lora = {"a": abstract((LAYERS, width, rank), jnp.float32), "b": abstract((LAYERS, rank, inner), jnp.float32)}
    errors = jax.eval_shape(lambda: stacked_no_errors(lora, 4, 1, exchange))
    frozen = (abstract((LAYERS, width, inner), jnp.float32), abstract((LAYERS, inner, width), jnp.float32))
    specs = (PartitionSpec(), OWN, PartitionSpec(), OWN)
    over = mesh.abstract_mesh
    step = jax.jit(
        jax.shard_map(local, mesh=over, in_specs=specs, out_specs=(PartitionSpec(), OWN), check_vma=False),
        in_shardings=jax.tree.map(functools.partial(NamedSharding, over), specs),
    )
    arguments = (lora, errors, frozen, abstract((4 * 2048, width), jnp.float32))
    compiled = compile_for(mesh, step, *arguments, options=compiler_options(mesh))
    in_loop = [c for c in collectives(compiled) if c.loop_trips != 1]
    assert {c.dtype for c in in_loop} == {"u8"}
    under = {c.kind: any("gemm" in i.name or "dot" in i.name for i in c.overlapped) for c in in_loop}
    assert set(under) == {"all-to-all", "all-gather"}
    assert under["all-to-all"] is hidden
    assert under["all-gather"] or not hidden
