"""Residuals of a stage's compressed exchange by layers, so that layers can move between stages, and devices change."""

import numpy as np

from sharding.compression import ErrorFeedback, chunk_size


def to_layers(errors: ErrorFeedback) -> ErrorFeedback:
    """Return the residuals of a stage's replicas, sent [R, L, n] and owned [R, L, chunk], by layers.

    Returns:
        sent [R, L, n], and owned [L, n]: the owners' chunks one after the other, which belong to no replica.
    """
    sent, owned = np.asarray(errors.sent), np.asarray(errors.owned)
    whole = owned.swapaxes(0, 1).reshape(owned.shape[1], -1)[:, : sent.shape[2]]
    return ErrorFeedback(sent, whole)  # type: ignore[arg-type]


def from_layers(by_layer: ErrorFeedback) -> ErrorFeedback:
    """Undo `to_layers`."""
    sent, owned = np.asarray(by_layer.sent), np.asarray(by_layer.owned)
    replicas, layers, n = sent.shape
    padded = np.pad(owned, ((0, 0), (0, chunk_size(n, replicas) * replicas - n)))
    return ErrorFeedback(sent, padded.reshape(layers, replicas, -1).swapaxes(0, 1))  # type: ignore[arg-type]
