"""What a state in stages keeps of compressed exchanges: by layers, whatever the stages."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from sharding.compression import Compression, ErrorFeedback
from sharding.exchange import ExchangeErrors
from zagora_jax.distribution import Distribution
from zagora_jax.train_state import TrainState


def exchange_state(mesh: Mesh, compression: Compression) -> dict[str, Any]:
    """Say what the residuals of a whole state belong to: not to a cut into stages."""
    return {"compression": compression, "exchange": "layerwise", "mesh": {"data": mesh.shape["data"]}}


def first_residuals(state: TrainState, distribution: Distribution, layers: int) -> TrainState:
    """Add the residuals before the first step to a whole state.

    Args:
        state: without residuals.
        distribution: of any stage, or of all.
        layers: of the model.
    """
    reduced = distribution.residuals().reduced
    if reduced is None:
        return state
    width, dtype = sum(stored_widths(distribution)), reduced.sent.whole.dtype
    sent = np.zeros((distribution.mesh.shape["data"], layers, width), dtype)
    by_layer = ErrorFeedback(sent, np.zeros((layers, width), dtype))  # type: ignore[arg-type]
    return state._replace(residuals=ExchangeErrors(reduced=by_layer))


def stored_widths(distribution: Distribution) -> list[int]:
    """Return the elements that a layer has of each adapter array, as they are stored."""
    return [spread.stored[1] for spread in jax.tree.leaves(distribution.adapters)]
