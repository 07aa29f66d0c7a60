"""Exchanges of gradients that stand inside the backward pass of a loop over layers. For use under shard_map.

A layer's parameters go through `exchange_in_backward` before use, which gathers them where they are sharded. Their
gradient then comes out summed over the devices, and the new residuals come out as the "gradient" of the old ones, so
that both pass through `jax.grad`, `jax.checkpoint` and `lax.scan` as parameters do:

    def layer(x, inputs):
        chunks, errors = inputs
        parameters = exchange_in_backward(chunks, errors, None, exchange)
        ...

    gradients, errors = jax.grad(loss, argnums=(0, 1))(chunks, errors)

There the exchange comes last in a layer's backward pass, with little left to hide it under. `begin_deferred` and
`exchange_deferred` put it under the backward pass of the layer below: the gradient waits in the loop's carry and is
exchanged by the next iteration, whose computations do not depend on it:

    chunks, errors, waiting = begin_deferred(chunks, errors, exchange)

    def layer(carry, inputs):
        x, waiting = carry
        chunks, errors = inputs
        parameters, waiting = exchange_deferred(chunks, errors, None, waiting, exchange)
        ...

The gradients and residuals are the same. L layers take L + 1 exchanges, as the first iteration has none waiting. On
GPUs the compiler interleaves them with computation only under its latency-hiding scheduler, which has to be asked for:
`jax.jit(...).lower(...).compile(compiler_options={"xla_gpu_enable_latency_hiding_scheduler": True})`.

`jax.grad` stands inside the shard_map. With several micro-batches, either each exchanges and hands its residuals to the
next; or only the last one does, for all of them: `earlier` is the sum of the others' gradients as `Exchange.join` makes
them, which costs a float32 array of all the layers' whole parameters.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from sharding.compression import AxisName, Compression, ErrorFeedback, all_reduce, reduce_scatter


class ExchangeErrors(NamedTuple):
    """One device's residuals of an `Exchange`. Where an exchange has no such phase, or quantises nothing, it is None.

    Attributes:
        scattered: [n], of the reduce-scatter over the shards.
        reduced: ErrorFeedback of the all-reduce over the replicas.
    """

    scattered: Any
    reduced: Any


@dataclass(frozen=True)
class Exchange:
    """How the gradients of one layer's parameters are summed over the devices.

    The parameters are a pytree of float32 arrays. With shards, a device holds a chunk of each: an equal part along the
    first axis.

    Attributes:
        compression: how gradients travel.
        replicas: the mesh axis whose devices hold the same parameters, if any.
        shards: the mesh axis whose devices hold a chunk each, if any.
        dtype: what chunks travel as when they are gathered.
    """

    compression: Compression
    replicas: AxisName | None = None
    shards: AxisName | None = None
    dtype: DTypeLike = jnp.float32

    def no_errors(self, chunks: Any, replicas: int, shards: int, dtype: DTypeLike = jnp.bfloat16) -> ExchangeErrors:
        """Return one device's residuals of one layer before the first step.

        Args:
            chunks: one layer's parameters as a device holds them; shapes suffice.
            replicas: devices along the axis of that name, 1 without it.
            shards: devices along the axis of that name, 1 without it.
            dtype: of the residuals; see `ErrorFeedback.zeros`.
        """
        size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(chunks))
        # None, not empty arrays: XLA's CPU compiler (jaxlib 0.11.2) crashes on those in a loop.
        if self.compression == "none":
            return ExchangeErrors(None, None)
        scattered = None if self.shards is None else jnp.zeros(size * shards, dtype)
        reduced = None if self.replicas is None else ErrorFeedback.zeros(size, replicas, dtype)
        return ExchangeErrors(scattered, reduced)

    def gather(self, chunks: Any) -> Any:
        """Return the whole parameters."""
        if self.shards is None:
            return chunks
        vector = _join(chunks, 1)
        rows = lax.all_gather(vector.astype(self.dtype), self.shards)  # [shards, c]
        return _split(rows, chunks)

    def join(self, gradients: Any) -> jax.Array:
        """Return one device's gradients of the whole parameters as a vector float32[n]: chunk by chunk."""
        return _join(gradients, self.shard_count()).astype(jnp.float32)

    def sum(self, vector: jax.Array, errors: ExchangeErrors) -> tuple[jax.Array, ExchangeErrors]:
        """Sum the devices' vectors float32[n]; returns this device's chunk [n / shards] and the new residuals."""
        scattered, reduced = errors
        if self.shards is not None:
            vector, scattered = reduce_scatter(vector, scattered, self.shards, self.compression)
        if self.replicas is not None:
            vector, reduced = all_reduce(vector, reduced, self.replicas, self.compression)
        return vector, ExchangeErrors(scattered, reduced)

    def split(self, chunk: jax.Array, whole: Any) -> Any:
        """Cut a vector [n / shards] into chunks of arrays shaped as `whole`."""
        shards = self.shard_count()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // shards, *x.shape[1:]), x.dtype), whole)
        return _split(chunk[None], shapes)

    def shard_count(self) -> int:
        """Return over how many devices the parameters are sharded."""
        return 1 if self.shards is None else lax.axis_size(self.shards)


def _join(arrays: Any, parts: int) -> jax.Array:
    """Concatenate arrays [parts * size, ...] to a vector: the first part of each array, then the second, ..."""
    return jnp.concatenate([x.reshape(parts, -1) for x in jax.tree.leaves(arrays)], axis=1).reshape(-1)


def _split(rows: jax.Array, chunks: Any) -> Any:
    """Undo `_join` for rows [parts, c]: return arrays [parts * size, ...] for chunks of shape [size, ...]."""
    leaves, structure = jax.tree.flatten(chunks)
    arrays, start = [], 0
    for leaf in leaves:
        end = start + math.prod(leaf.shape)
        arrays.append(rows[:, start:end].reshape(len(rows) * leaf.shape[0], *leaf.shape[1:]))
        start = end
    return jax.tree.unflatten(structure, arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def exchange_in_backward(chunks: Any, errors: ExchangeErrors, earlier: jax.Array | None, exchange: Exchange) -> Any:
    """Return a layer's whole parameters, whose gradient is exchanged.

    Args:
        chunks: the parameters as this device holds them; their gradient is the sum over the devices.
        errors: the residuals; their gradient is the new residuals.
        earlier: float32[n], gradients of earlier micro-batches to exchange together with this one's, if any.
        exchange: how to sum.
    """
    return exchange.gather(chunks)


def _exchange_forward(
    chunks: Any, errors: ExchangeErrors, earlier: jax.Array | None, exchange: Exchange
) -> tuple[Any, tuple[ExchangeErrors, jax.Array | None]]:
    return exchange.gather(chunks), (errors, earlier)


def _exchange_backward(
    exchange: Exchange, kept: tuple[ExchangeErrors, jax.Array | None], gradients: Any
) -> tuple[Any, ExchangeErrors, None]:
    errors, earlier = kept
    chunk, errors = exchange.sum(_accumulated(earlier, gradients, exchange), errors)
    return exchange.split(chunk, gradients), errors, None


exchange_in_backward.defvjp(_exchange_forward, _exchange_backward)


def _accumulated(earlier: jax.Array | None, gradients: Any, exchange: Exchange) -> jax.Array:
    vector = exchange.join(gradients)
    return vector if earlier is None else earlier + vector


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def exchange_deferred(
    chunks: Any, errors: ExchangeErrors, earlier: jax.Array | None, waiting: jax.Array, exchange: Exchange
) -> tuple[Any, jax.Array]:
    """Return a layer's whole parameters, and `waiting` for the next layer.

    Backwards, this layer's gradient is left waiting for the layer below, and that of the layer above is exchanged. So
    what arrives as gradients of `chunks` and `errors` belongs to the layer above; `begin_deferred` sets that right.

    Args:
        chunks: as in `exchange_in_backward`.
        errors: the residuals of the layer above.
        earlier: as in `exchange_in_backward`, of this layer.
        waiting: float32[n].
        exchange: how to sum.
    """
    return exchange.gather(chunks), waiting


def _deferred_forward(
    chunks: Any, errors: ExchangeErrors, earlier: jax.Array | None, waiting: jax.Array, exchange: Exchange
) -> tuple[tuple[Any, jax.Array], tuple[ExchangeErrors, jax.Array | None]]:
    return (exchange.gather(chunks), waiting), (errors, earlier)


def _deferred_backward(
    exchange: Exchange, kept: tuple[ExchangeErrors, jax.Array | None], gradients: tuple[Any, jax.Array]
) -> tuple[Any, ExchangeErrors, None, jax.Array]:
    errors, earlier = kept
    own, above = gradients
    chunk, errors = exchange.sum(above, errors)
    return exchange.split(chunk, own), errors, None, _accumulated(earlier, own, exchange)


exchange_deferred.defvjp(_deferred_forward, _deferred_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def begin_deferred(chunks: Any, errors: ExchangeErrors, exchange: Exchange) -> tuple[Any, ExchangeErrors, jax.Array]:
    """Prepare stacked parameters and residuals [L, ...] for a loop of `exchange_deferred`.

    Returns:
        The parameters and residuals to loop over, and what is waiting at first, float32[n].
    """
    # In the loop a layer's exchange is that of the layer above: the last one has nothing to exchange.
    shifted = jax.tree.map(lambda e: jnp.concatenate([e[1:], jnp.zeros_like(e[:1])]), errors)
    size = sum(leaf[0].size for leaf in jax.tree.leaves(chunks)) * exchange.shard_count()
    return chunks, shifted, jnp.zeros(size, jnp.float32)


def _begin_forward(
    chunks: Any, errors: ExchangeErrors, exchange: Exchange
) -> tuple[tuple[Any, ExchangeErrors, jax.Array], ExchangeErrors]:
    return begin_deferred(chunks, errors, exchange), jax.tree.map(lambda e: e[0], errors)


def _begin_backward(
    exchange: Exchange, first_errors: ExchangeErrors, gradients: tuple[Any, ExchangeErrors, jax.Array]
) -> tuple[Any, ExchangeErrors]:
    above, errors_above, waiting = gradients
    first, first_errors = exchange.sum(waiting, first_errors)
    leaves = jax.tree.map(lambda x: x[0], above)
    bottom = (_split(first[None], leaves), first_errors)
    return jax.tree.map(lambda own, rest: jnp.concatenate([own[None], rest[:-1]]), bottom, (above, errors_above))


begin_deferred.defvjp(_begin_forward, _begin_backward)
