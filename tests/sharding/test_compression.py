from __future__ import annotations

import functools
import math

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, PartitionSpec

from sharding import compression
from sharding.compression import BLOCK, Compression, ErrorFeedback
from sharding.program import collectives

LARGEST = {"int8": 127, "int4": 7}
# A scale is rounded to bfloat16: it may exceed the block's largest magnitude / L by one part in 256.
SCALE_ROUNDING = 1 + 2.0**-8
# Of a residual kept in bfloat16, one part in 256 may be lost.
RESIDUAL_ROUNDING = {jnp.float32: 0.0, jnp.bfloat16: 2.0**-8}


pytestmark = pytest.mark.eight_devices


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


def on_devices(function, devices: int):
    """Map a function over the first axis of its arguments and results, one device each."""
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    def local(*args):
        results = function(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], results)

    spec = PartitionSpec("data")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def all_reduce(vectors, errors, kind: Compression):
    """The sum as each device sees it, [devices, n], and the residuals of all."""
    reduce = functools.partial(compression.all_reduce, axis_name="data", compression=kind)
    return on_devices(reduce, len(vectors))(vectors, errors)


def no_errors(n: int, devices: int, dtype=jnp.bfloat16) -> ErrorFeedback:
    zeros = ErrorFeedback.zeros(n, devices, dtype)
    return jax.tree.map(lambda x: jnp.zeros((devices, *x.shape), x.dtype), zeros)


def draw(devices: int, n: int, seed: int = 0) -> np.ndarray:
    """Gradients whose magnitude varies over the vector by a factor of a million, with a block of zeros."""
    rng = np.random.default_rng(seed)
    magnitudes = np.repeat(10.0 ** rng.uniform(-7, -1, -(-n // 50)), 50)[:n]
    values = (rng.standard_normal((devices, n)) * magnitudes).astype(np.float32)
    values[:, : min(n, 64) // 2] = 0
    return values


def half_steps(rows: np.ndarray, kind: Compression) -> np.ndarray:
    """The most that rounding can change each value of rows [r, n] by: half a scale."""
    block = BLOCK[kind]
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % block)))
    absmax = np.abs(padded).reshape(len(rows), -1, block).max(axis=-1)
    return np.repeat(absmax / LARGEST[kind] / 2 * SCALE_ROUNDING, block, axis=1)[:, : rows.shape[1]]


def error_bound(vectors: np.ndarray, kind: Compression) -> np.ndarray:
    """The most that the sum of vectors [devices, n] can be off by: each term's rounding, and the sum's own."""
    devices, n = vectors.shape
    chunk = -(-n // devices)
    chunks = np.pad(vectors.astype(np.float64), ((0, 0), (0, chunk * devices - n))).reshape(devices, devices, chunk)
    terms = sum(half_steps(sender, kind) for sender in chunks)  # [owner, chunk]
    # The owner quantises a sum that is itself off by up to `terms`.
    sums = half_steps(np.abs(chunks.sum(axis=0)) + terms, kind)
    return (terms + sums).reshape(-1)[:n] + 1e-6 * np.abs(vectors).sum(axis=0)


@pytest.mark.parametrize(
    ("devices", "n", "kind"),
    [
        *[(1, 100, "int4"), (2, 64, "int8"), (3, 1000, "int4"), (4, 1, "int4"), (4, 1000, "int8"), (5, 4099, "int4")],
        *[(6, 50, "int8"), (7, 33, "int4"), (8, 5000, "int4"), (8, 5000, "int8"), (3, 100, "none")],
    ],
)
def test_sum_is_the_true_sum_within_half_a_step_of_each_rounding(devices: int, n: int, kind: Compression) -> None:
    vectors = draw(devices, n)
    total, _ = all_reduce(vectors, no_errors(n, devices), kind)
    total = np.asarray(total)
    assert np.array_equal(total, np.broadcast_to(total[:1], total.shape)), "replicas differ"
    true = vectors.astype(np.float64).sum(axis=0)
    if kind == "none" or devices == 1:
        # A float32 sum of at most 8 terms rounds 7 times.
        assert np.all(np.abs(total[0] - true) <= 7 * 2.0**-24 * np.abs(vectors).sum(axis=0))
    else:
        assert np.all(np.abs(total[0] - true) <= error_bound(vectors, kind))
        if n >= 1000:
            assert np.any(total[0] != true.astype(np.float32)), "nothing was quantised"


@pytest.mark.parametrize(("devices", "kind"), [(3, "none"), (1, "int8"), (3, "int8"), (8, "int4")])
def test_reduce_scatter_leaves_each_device_its_chunk(devices: int, kind: Compression) -> None:
    n = 1003
    vectors = draw(devices, n)
    scatter = functools.partial(compression.reduce_scatter, axis_name="data", compression=kind)
    chunks, residuals = on_devices(scatter, devices)(vectors, jnp.zeros((devices, n)))
    assert chunks.shape == (devices, compression.chunk_size(n, devices))
    total = np.asarray(chunks).reshape(-1)
    true = vectors.astype(np.float64).sum(axis=0)
    bound = 1e-6 * np.abs(vectors).sum(axis=0) + (0 if kind == "none" else error_bound(vectors, kind))
    assert np.all(np.abs(total[:n] - true) <= bound)
    assert np.all(total[n:] == 0)
    # What did not arrive is in the residuals, but for the roundings of float32.
    assert np.allclose(total[:n] + np.asarray(residuals, np.float64).sum(axis=0), true, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "dtype"), [("int8", jnp.bfloat16), ("int4", jnp.float32), ("int4", jnp.bfloat16)])
def test_error_feedback_loses_nothing_over_time(kind: Compression, dtype) -> None:
    """Summed over the steps, what arrived is what was sent, but for the residuals that are still held back."""
    devices, n, steps = 4, 700, 200
    vectors = draw(devices, n)
    reduce = functools.partial(compression.all_reduce, axis_name="data", compression=kind)

    def run(vector, errors):
        def step(carry, _):
            errors, applied, lost = carry
            total, errors = reduce(vector, errors)
            # In two parts, so that the sum of 200 terms is not rounded to float32 200 times.
            high = applied + total
            return (errors, high, lost + (total - (high - applied))), None

        (errors, applied, lost), _ = jax.lax.scan(step, (errors, jnp.zeros(n), jnp.zeros(n)), None, steps)
        return applied, lost, errors

    applied, lost, errors = on_devices(run, devices)(vectors, no_errors(n, devices, dtype))
    drift = np.abs(np.asarray(applied[0], np.float64) + np.asarray(lost[0]) - steps * vectors.sum(0, np.float64))

    # A residual is at most half a step of what was quantised, vector and residual: x + x / (2 L) + ... Each step may
    # add what a bfloat16 residual loses.
    growth = 1 / (1 - SCALE_ROUNDING / (2 * LARGEST[kind]))
    once = error_bound(vectors * growth, kind)
    assert np.all(drift <= once * (1 + steps * RESIDUAL_ROUNDING[dtype]) + steps * 2e-7 * np.abs(vectors).sum(axis=0))
    assert all(leaf.dtype == dtype for leaf in errors)

    # Without feedback the same step errs the same way each time, and some values never arrive.
    single, _ = all_reduce(vectors, no_errors(n, devices), kind)
    drift_without = steps * np.abs(np.asarray(single[0], np.float64) - vectors.sum(axis=0, dtype=np.float64))
    assert drift_without.max() > 20 * drift.max()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_zero_tiny_and_huge_values(kind: Compression) -> None:
    devices, block = 2, BLOCK[kind]
    values = np.zeros((devices, 6 * block), np.float32)
    values[:, block : 2 * block] = 1e-44  # subnormal
    values[:, 2 * block : 3 * block] = 1e-35
    values[:, 3 * block : 4 * block] = 1e37
    values[:, 4 * block] = 3e30
    values[:, 4 * block + 1] = 1e-3  # beside the huge value less than half a step
    total, errors = all_reduce(values, no_errors(values.shape[1], devices, jnp.float32), kind)
    total = np.asarray(total[0])
    assert np.all(np.isfinite(total))
    assert np.all(total[: 2 * block] == 0)
    np.testing.assert_allclose(total[2 * block : 4 * block], 2 * values[0, 2 * block : 4 * block], rtol=2 * 2.0**-8)
    np.testing.assert_allclose(total[4 * block], 6e30, rtol=2 * 2.0**-8)
    assert total[4 * block + 1] == 0
    assert np.all(np.asarray(errors.sent[:, 4 * block + 1]) == np.float32(1e-3))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_value_that_is_not_finite_arrives_everywhere_and_a_skipped_step_keeps_the_residuals(
    kind: Compression,
) -> None:
    devices, n = 4, 1000
    vectors = draw(devices, n)

    def guarded(vector, errors):
        total, new = compression.all_reduce(vector, errors, "data", kind)
        finite = jnp.all(jnp.isfinite(total))
        return total, jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, errors)

    step = on_devices(guarded, devices)
    _, errors = step(vectors, no_errors(n, devices))
    for bad in (np.nan, np.inf, -np.inf):
        spoilt = vectors.copy()
        spoilt[2, 777] = bad
        total, after_skip = step(spoilt, errors)
        assert not np.any(np.isfinite(total[:, 777]))
        assert np.sum(np.isfinite(total[0])) >= n - BLOCK[kind]  # its block alone
        jax.tree.map(np.testing.assert_array_equal, after_skip, errors)
    total, _ = step(vectors, after_skip)
    assert np.all(np.isfinite(total))


def test_overflow_of_the_sum_arrives_as_infinite() -> None:
    values = np.full((4, 100), 3e38, np.float32)
    total, _ = all_reduce(values, no_errors(100, 4), "int8")
    assert not np.any(np.isfinite(total))


@pytest.mark.parametrize(
    ("devices", "n", "kind", "operation"),
    [
        *[
            (2, 4096, "int8", "all_reduce"),
            (4, 100_000, "int4", "all_reduce"),
            (8, 100_001, "int8", "all_reduce"),
        ],
        *[(3, 10_000, "int8", "reduce_scatter"), (8, 100_001, "int4", "reduce_scatter")],
        *[(3, 10_000, "none", "all_reduce"), (4, 10_001, "none", "reduce_scatter")],
    ],
)
def test_bytes_on_the_wire_are_those_of_the_compiled_program(
    devices: int, n: int, kind: Compression, operation: str
) -> None:
    vectors = jax.ShapeDtypeStruct((devices, n), jnp.float32)
    errors = jax.eval_shape(lambda: no_errors(n, devices))
    state = errors if operation == "all_reduce" else errors.sent
    function = functools.partial(getattr(compression, operation), axis_name="data", compression=kind)
    found = collectives(on_devices(function, devices).lower(vectors, state).compile())
    sent = math.ceil(sum(collective.wire_bytes for collective in found))
    assert sent == compression.wire_bytes(n, devices, kind, operation)
    if kind == "none":
        assert {c.dtype for c in found} == {"f32"}
        return
    assert {c.dtype for c in found} == {"u8"}
    phases = {"all_reduce": {"all-to-all", "all-gather"}, "reduce_scatter": {"all-to-all"}}
    assert {c.kind for c in found} == phases[operation]
    limit = {"int8": 0.27, "int4": 0.15}[kind]
    assert sent <= limit * compression.wire_bytes(n, devices, "none", operation)


def test_wire_bytes_leave_room_for_the_extra_exchange_of_overlapping() -> None:
    """Overlapped, 30 layers take 31 exchanges (sharding/overlap.py)."""
    n, devices = 162_816, 4  # LoRA of rank 8 on SmolLM2's layers
    for kind, limit in (("int8", 0.27), ("int4", 0.15)):
        assert 31 * compression.wire_bytes(n, devices, kind) < limit * 30 * compression.wire_bytes(n, devices, "none")


def test_one_device_sends_nothing() -> None:
    assert compression.wire_bytes(1000, 1, "int8") == compression.wire_bytes(1000, 1, "none") == 0


def _distance_after_descent(kind: Compression, feedback: bool) -> float:
    """Distance to the least squares' solution after gradient descent with a constant step size.

    The replicas' data disagree, so that at the solution their gradients cancel without being small.
    """
    devices, rows, size = 4, 64, 64
    rng = np.random.default_rng(1)
    features = (rng.standard_normal((devices, rows, size)) * 10.0 ** rng.uniform(-0.5, 0, size)).astype(np.float32)
    targets = np.einsum("drs,ds->dr", features, rng.standard_normal((devices, size))).astype(np.float32)
    solution = np.linalg.lstsq(features.reshape(-1, size), targets.reshape(-1), rcond=None)[0]

    def descend(x, y, errors):
        def step(carry, _):
            weights, errors = carry
            gradient = x.T @ (x @ weights - y) / (devices * rows)
            total, new = compression.all_reduce(gradient, errors, "data", kind)
            return (weights - 0.1 * total, new if feedback else errors), None

        return jax.lax.scan(step, (jnp.zeros(size), errors), None, 1500)[0][0]

    weights = on_devices(descend, devices)(features, targets, no_errors(size, devices))
    return float(np.linalg.norm(np.asarray(weights[0]) - solution) / np.linalg.norm(solution))


def test_descent_converges_with_feedback_and_not_without() -> None:
    exact, compressed = (_distance_after_descent(kind, feedback=True) for kind in ("none", "int4"))
    without = _distance_after_descent("int4", feedback=False)
    # With feedback the weights stay within the learning rate times the residuals of what exact sums would give.
    assert compressed < exact + 1e-2
    assert without > 10 * (exact + 1e-2)


def test_trees_travel_as_one_vector() -> None:
    trees = {"a": np.float32([[[1, 2], [3, 4]]] * 2), "b": np.float32([[-5], [7]])}

    def reduce(tree, errors):
        vector, unravel = ravel_pytree(tree)
        total, errors = compression.all_reduce(vector, errors, "data", "int8")
        return unravel(total), errors

    total, _ = on_devices(reduce, 2)(trees, no_errors(5, 2, jnp.float32))
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got[0], want.sum(0), atol=0.1), total, trees)
