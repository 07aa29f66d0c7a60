"""Residuals of a stage's compressed exchange by layers, so that layers can move between stages and devices may change.

A stage's gradients travel as one vector: its adapters' arrays [L, w] one after the other, each flattened. By layers,
the same numbers are an array [L, sum of all w].
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sharding.compression import ErrorFeedback, chunk_size


def vector_to_layers(vectors: np.ndarray, widths: Sequence[int]) -> np.ndarray:
    """Return vectors [R, L * sum(widths)] by layers, [R, L, sum(widths)]."""
    layers = vectors.shape[1] // sum(widths)
    ends = np.cumsum([layers * width for width in widths])[:-1]
    parts = [part.reshape(len(vectors), layers, -1) for part in np.split(vectors, ends, axis=1)]
    return np.concatenate(parts, axis=2)


def layers_to_vector(by_layer: np.ndarray, widths: Sequence[int]) -> np.ndarray:
    """Undo `vector_to_layers`."""
    parts = np.split(by_layer, np.cumsum(widths)[:-1], axis=2)
    return np.concatenate([part.reshape(len(by_layer), -1) for part in parts], axis=1)


def to_layers(errors: ErrorFeedback, widths: Sequence[int]) -> ErrorFeedback:
    """Return the residuals of a stage's replicas, sent [R, n] and owned [R, chunk], by layers.

    Returns:
        sent [R, L, w], and owned [L, w]: the owners' chunks one after the other, which belong to no replica.
    """
    sent = np.asarray(errors.sent)
    owned = np.asarray(errors.owned).reshape(1, -1)[:, : sent.shape[1]]
    return ErrorFeedback(vector_to_layers(sent, widths), vector_to_layers(owned, widths)[0])  # type: ignore[arg-type]


def from_layers(by_layer: Any, widths: Sequence[int]) -> ErrorFeedback:
    """Undo `to_layers`."""
    sent = layers_to_vector(np.asarray(by_layer.sent), widths)
    owned = layers_to_vector(np.asarray(by_layer.owned)[None], widths)
    replicas, n = sent.shape
    padded = np.pad(owned, ((0, 0), (0, chunk_size(n, replicas) * replicas - n)))
    return ErrorFeedback(sent, padded.reshape(replicas, -1))  # type: ignore[arg-type]
