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
`exchange_deferred` put each of its phases under the backward pass of another layer below: gradients wait in the loop's
carry and go through a phase an iteration, whose computations do not depend on it:

    chunks, errors, earlier, waiting = begin_deferred(chunks, errors, None, exchange)

    def layer(carry, inputs):
        x, waiting = carry
        chunks, errors, earlier = inputs
        parameters, waiting = exchange_deferred(chunks, errors, earlier, waiting, exchange)
        ...

The gradients and residuals are the same. Phases run a few times more than there are layers, since the first iterations
have nothing waiting. On GPUs the compiler interleaves them with computation only under its latency-hiding scheduler,
which has to be asked for:
`jax.jit(...).lower(...).compile(compiler_options={"xla_gpu_enable_latency_hiding_scheduler": True})`.

`jax.grad` stands inside the shard_map. With several micro-batches, each sums its gradients over the shards and hands
its residuals to the next; the last one alone sums over the replicas, for all: `earlier` is what the others came to.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from sharding.compression import AxisName, Compression, ErrorFeedback, all_gather, chunk_size, reduce_scatter


class ExchangeErrors(NamedTuple):
    """One device's residuals of an `Exchange`. Where an exchange has no such phase, or quantises nothing, it is None.

    Attributes:
        scattered: [n], of the reduce-scatter over the shards.
        reduced: ErrorFeedback of the all-reduce over the replicas.
    """

    scattered: Any = None
    reduced: Any = None


# What each phase takes next.
Waiting = tuple[jax.Array, ...]

# Takes what the phase before made, the residuals, and what `Exchange.sum` calls `earlier`.
Phase = Callable[[jax.Array, ExchangeErrors, jax.Array | None], tuple[jax.Array, ExchangeErrors]]


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
            return ExchangeErrors()
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

    def join_chunks(self, chunks: Any) -> jax.Array:
        """Return gradients shaped as this device's chunks as a vector float32[n / shards]."""
        return _join(chunks, 1).astype(jnp.float32)

    def sum(
        self, vector: jax.Array, errors: ExchangeErrors, earlier: jax.Array | None = None
    ) -> tuple[jax.Array, ExchangeErrors]:
        """Sum the devices' vectors.

        Args:
            vector: float32[n].
            errors: the residuals.
            earlier: float32[n / shards], summed over the shards already, to be summed over the replicas too.

        Returns:
            This device's chunk float32[n / shards], at times with padding behind it, and the new residuals.
        """
        for phase in self.phases:
            vector, errors = phase(vector, errors, earlier)
        return vector, errors

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The exchanges that `sum` is made of, each of which reads and renews a residual of its own."""
        over_shards = () if self.shards is None else (self._scatter_over_shards,)
        if self.replicas is None:
            return over_shards
        if self.compression == "none":
            return (*over_shards, self._reduce_over_replicas)
        return (*over_shards, self._scatter_over_replicas, self._gather_over_replicas)

    @property
    def delays(self) -> ExchangeErrors:
        """By how many layers the phase of each residual is behind the backward pass, where exchanges are deferred."""
        if self.compression == "none":
            return ExchangeErrors()
        delay = self.earlier_delay
        return ExchangeErrors(
            None if self.shards is None else 1,
            None if self.replicas is None else ErrorFeedback(delay, delay + 1),  # type: ignore[arg-type]
        )

    @property
    def earlier_delay(self) -> int:
        """The same of the phase that adds earlier gradients."""
        return 1 if self.shards is None else 2

    def nothing_waiting(self, chunks: Any) -> Waiting:
        """Return zeros as each phase takes them; `chunks` are those of one layer."""
        size = sum(leaf.size for leaf in jax.tree.leaves(chunks))
        sizes = [] if self.shards is None else [size * self.shard_count()]
        if self.replicas is not None:
            sizes += [size] if self.compression == "none" else [size, chunk_size(size, lax.axis_size(self.replicas))]
        return tuple(jnp.zeros(n, jnp.float32) for n in sizes)

    def _scatter_over_shards(
        self, vector: jax.Array, errors: ExchangeErrors, earlier: jax.Array | None
    ) -> tuple[jax.Array, ExchangeErrors]:
        assert self.shards is not None
        vector, residual = reduce_scatter(vector, errors.scattered, self.shards, self.compression)
        return vector, errors._replace(scattered=residual)

    def _reduce_over_replicas(
        self, vector: jax.Array, errors: ExchangeErrors, earlier: jax.Array | None
    ) -> tuple[jax.Array, ExchangeErrors]:
        return lax.psum(_added(earlier, vector), self.replicas), errors

    def _scatter_over_replicas(
        self, vector: jax.Array, errors: ExchangeErrors, earlier: jax.Array | None
    ) -> tuple[jax.Array, ExchangeErrors]:
        assert self.replicas is not None
        vector, residual = reduce_scatter(_added(earlier, vector), errors.reduced.sent, self.replicas, self.compression)
        return vector, errors._replace(reduced=errors.reduced._replace(sent=residual))

    def _gather_over_replicas(
        self, vector: jax.Array, errors: ExchangeErrors, earlier: jax.Array | None
    ) -> tuple[jax.Array, ExchangeErrors]:
        assert self.replicas is not None
        vector, residual = all_gather(vector, errors.reduced.owned, self.replicas, self.compression)
        return vector, errors._replace(reduced=errors.reduced._replace(owned=residual))

    def split(self, chunk: jax.Array, whole: Any) -> Any:
        """Cut a vector [n / shards], whatever is behind it, into chunks of arrays shaped as `whole`."""
        shards = self.shard_count()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // shards, *x.shape[1:]), x.dtype), whole)
        return _split(chunk[None], shapes)

    def shard_count(self) -> int:
        """Return over how many devices the parameters are sharded."""
        return 1 if self.shards is None else lax.axis_size(self.shards)


def _added(earlier: jax.Array | None, vector: jax.Array) -> jax.Array:
    return vector if earlier is None else earlier + vector


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
        earlier: see `Exchange.sum`.
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
    chunk, errors = exchange.sum(exchange.join(gradients), errors, earlier)
    return exchange.split(chunk, gradients), errors, None


exchange_in_backward.defvjp(_exchange_forward, _exchange_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def exchange_deferred(
    chunks: Any, errors: ExchangeErrors, earlier: jax.Array | None, waiting: Waiting, exchange: Exchange
) -> tuple[Any, Waiting]:
    """Return a layer's whole parameters, and `waiting` for the next layer.

    Backwards, this layer's gradient is left waiting for the layer below, and those of layers above go through a phase
    each: the next one through the first phase, the one above it through the second. So what arrives as gradients of
    `chunks` and `errors` belongs to layers above; `begin_deferred` sets that right.

    Args:
        chunks: as in `exchange_in_backward`.
        errors: the residuals, each of the layer that its phase is about.
        earlier: as in `exchange_in_backward`, likewise.
        waiting: what `begin_deferred`, or the layer before, returned.
        exchange: how to sum.
    """
    return exchange.gather(chunks), waiting


def _deferred_forward(
    chunks: Any, errors: ExchangeErrors, earlier: jax.Array | None, waiting: Waiting, exchange: Exchange
) -> tuple[tuple[Any, Waiting], tuple[ExchangeErrors, jax.Array | None]]:
    return (exchange.gather(chunks), waiting), (errors, earlier)


def _deferred_backward(
    exchange: Exchange, kept: tuple[ExchangeErrors, jax.Array | None], gradients: tuple[Any, Waiting]
) -> tuple[Any, ExchangeErrors, None, Waiting]:
    errors, earlier = kept
    own, above = gradients
    passed = [exchange.join(own)]
    for phase, vector in zip(exchange.phases, above, strict=True):
        vector, errors = phase(vector, errors, earlier)
        passed.append(vector)
    return exchange.split(passed[-1], own), errors, None, tuple(passed[:-1])


exchange_deferred.defvjp(_deferred_forward, _deferred_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def begin_deferred(
    chunks: Any, errors: ExchangeErrors, earlier: jax.Array | None, exchange: Exchange
) -> tuple[Any, ExchangeErrors, jax.Array | None, Waiting]:
    """Prepare stacked parameters, residuals and earlier gradients [L, ...] for a loop of `exchange_deferred`.

    Returns:
        What to loop over in their places, and what is waiting at first.
    """
    errors = jax.tree.map(_of_layers_above, errors, exchange.delays)
    earlier = jax.tree.map(functools.partial(_of_layers_above, layers=exchange.earlier_delay), earlier)
    return chunks, errors, earlier, exchange.nothing_waiting(jax.tree.map(lambda chunk: chunk[0], chunks))


def _of_layers_above(stack: jax.Array, layers: int) -> jax.Array:
    """Give each layer what belongs to that so many layers above it, and zeros to the topmost."""
    return jnp.concatenate([stack[layers:], jnp.zeros_like(stack[:layers])])


def _begin_forward(chunks: Any, errors: ExchangeErrors, earlier: jax.Array | None, exchange: Exchange) -> tuple:
    bottom = jax.tree.map(lambda stack: stack[: len(exchange.phases)], (errors, earlier))
    return begin_deferred(chunks, errors, earlier, exchange), bottom


def _begin_backward(
    exchange: Exchange,
    bottom: tuple[ExchangeErrors, jax.Array | None],
    gradients: tuple[Any, ExchangeErrors, Any, Waiting],
) -> tuple[Any, ExchangeErrors, None]:
    """Take what the loop left waiting through its remaining phases, and move all results to their layers."""
    above, errors_above, _, waiting = gradients
    layers = len(jax.tree.leaves(above)[0])
    sums, residuals = [], []
    for layer, vector in enumerate(waiting[:layers]):
        errors, earlier = jax.tree.map(lambda stack, layer=layer: stack[layer], bottom)
        for phase in exchange.phases[layer:]:
            vector, errors = phase(vector, errors, earlier)
        sums.append(_split(vector[None], jax.tree.map(lambda stack: stack[0], above)))
        residuals.append(errors)

    def below(stack: jax.Array, delay: int, *of_bottom: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.stack(of_bottom[:delay]), stack[: max(layers - delay, 0)]])

    chunks = jax.tree.map(lambda stack, *of_bottom: below(stack, len(waiting), *of_bottom), above, *sums)
    return chunks, jax.tree.map(below, errors_above, exchange.delays, *residuals), None


begin_deferred.defvjp(_begin_forward, _begin_backward)
