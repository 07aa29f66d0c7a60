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
from typing import Any

import jax
import jax.numpy as jnp

from sharding.exchange import Exchange, ExchangeErrors, Waiting, split_rows


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
        sums.append(split_rows(vector[None], jax.tree.map(lambda stack: stack[0], above)))
        residuals.append(errors)

    def below(stack: jax.Array, delay: int, *of_bottom: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.stack(of_bottom[:delay]), stack[: max(layers - delay, 0)]])

    chunks = jax.tree.map(lambda stack, *of_bottom: below(stack, len(waiting), *of_bottom), above, *sums)
    return chunks, jax.tree.map(below, errors_above, exchange.delays, *residuals), None


begin_deferred.defvjp(_begin_forward, _begin_backward)
