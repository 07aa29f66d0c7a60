"""How the gradients of one layer are summed over the devices: phase by phase. For use under shard_map."""

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
        vector = join_rows(chunks, 1)
        rows = lax.all_gather(vector.astype(self.dtype), self.shards)  # [shards, c]
        return split_rows(rows, chunks)

    def join(self, gradients: Any) -> jax.Array:
        """Return one device's gradients of the whole parameters as a vector float32[n]: chunk by chunk."""
        return join_rows(gradients, self.shard_count()).astype(jnp.float32)

    def join_chunks(self, chunks: Any) -> jax.Array:
        """Return gradients shaped as this device's chunks as a vector float32[n / shards]."""
        return join_rows(chunks, 1).astype(jnp.float32)

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
        return split_rows(chunk[None], shapes)

    def shard_count(self) -> int:
        """Return over how many devices the parameters are sharded."""
        return 1 if self.shards is None else lax.axis_size(self.shards)


def _added(earlier: jax.Array | None, vector: jax.Array) -> jax.Array:
    return vector if earlier is None else earlier + vector


def join_rows(arrays: Any, parts: int) -> jax.Array:
    """Concatenate arrays [parts * size, ...] to a vector: the first part of each array, then the second, ..."""
    return jnp.concatenate([x.reshape(parts, -1) for x in jax.tree.leaves(arrays)], axis=1).reshape(-1)


def split_rows(rows: jax.Array, chunks: Any) -> Any:
    """Undo `join_rows` for rows [parts, c]: return arrays [parts * size, ...] for chunks of shape [size, ...]."""
    leaves, structure = jax.tree.flatten(chunks)
    arrays, start = [], 0
    for leaf in leaves:
        end = start + math.prod(leaf.shape)
        arrays.append(rows[:, start:end].reshape(len(rows) * leaf.shape[0], *leaf.shape[1:]))
        start = end
    return jax.tree.unflatten(structure, arrays)
