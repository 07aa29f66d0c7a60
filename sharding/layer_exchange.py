"""How the adapters of a layer come together, and how their gradients are summed in its backward pass.

For use under shard_map.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from sharding.exchange import Exchange, ExchangeErrors
from sharding.flat import FlatShard, unflatten
from sharding.overlap import begin_deferred, exchange_deferred, exchange_in_backward


class Exchanged(NamedTuple):
    """What goes into the exchange beside gradients, stacked over layers.

    Attributes:
        errors: the residuals [L, ...]; their gradient is the new residuals.
        earlier: gradients of earlier micro-batches, shaped as the adapters; None where they are exchanged otherwise.
    """

    errors: ExchangeErrors
    earlier: Any = None


@dataclass(frozen=True)
class LayerExchange:
    """Fulfils the protocol `AdapterExchange` of the models, for adapters that are FlatShards.

    Attributes:
        exchange: over which axes, and how.
        deferred: whether a layer's exchange stands under the backward pass of the layer below.
    """

    exchange: Exchange
    deferred: bool

    def begin(self, adapters: Any, exchanged: Exchanged) -> tuple[Any, Any, Any]:
        """Prepare stacked adapters [L, ...] for the loop over layers."""
        errors, earlier = exchanged
        if earlier is not None:
            earlier = jax.vmap(self.exchange.join_chunks)(earlier)  # [L, n]
        if not self.deferred:
            return adapters, (errors, earlier), None
        adapters, errors, earlier, waiting = begin_deferred(adapters, errors, earlier, self.exchange)
        return adapters, (errors, earlier), waiting

    def layer(self, adapters: Any, inputs: Any, waiting: Any) -> tuple[Any, Any]:
        """Bring a layer's adapters together."""
        if self.deferred:
            whole, waiting = exchange_deferred(adapters, *inputs, waiting, self.exchange)
        else:
            whole = exchange_in_backward(adapters, *inputs, self.exchange)
        if self.exchange.shards is None:
            return whole, waiting  # still to be fetched
        return jax.tree.map(unflatten, whole, is_leaf=lambda leaf: isinstance(leaf, FlatShard)), waiting
