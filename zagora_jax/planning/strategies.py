"""The ways to share a model out over devices: one table, which the search goes through.

A new strategy is an entry of STRATEGIES. What it keeps on a device follows from its mesh axes (`planning.shapes`,
exactly); an axis that is new also needs its terms in `planning.analytic` and `planning.time_model`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Options of train that differ from its defaults, by name ("mesh.fsdp").
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Strategy:
    """One way.

    Attributes:
        name: as the option `strategy` of configure takes it.
        text: what it does, in a few words.
        layouts: the settings that make it up for a number of devices; none where it needs another number.
    """

    name: str
    text: str
    layouts: Callable[[int], Iterable[Settings]]


def _one_device(count: int) -> Iterable[Settings]:
    if count == 1:
        yield {"strategy": "fsdp", "mesh.data": 1, "mesh.fsdp": 1}


def _fsdp(count: int) -> Iterable[Settings]:
    if count > 1:
        yield {"strategy": "fsdp", "mesh.data": 1, "mesh.fsdp": count}


def _replicas(count: int) -> Iterable[Settings]:
    if count > 1:
        yield {"strategy": "replicas", "mesh.data": count, "mesh.fsdp": 1}


def _layerwise(count: int) -> Iterable[Settings]:
    if count > 1:
        yield {"strategy": "layerwise", "mesh.stage": count, "mesh.data": 1, "mesh.fsdp": 1}


def _replicated_fsdp(count: int) -> Iterable[Settings]:
    for shards in range(2, count):
        if count % shards == 0:
            yield {"strategy": "fsdp", "mesh.data": count // shards, "mesh.fsdp": shards}


STRATEGIES = (
    Strategy("one-device", "everything on the one card", _one_device),
    Strategy("fsdp", "each card holds a part of the 4-bit weights and gathers a layer at a time", _fsdp),
    Strategy("replicas", "each card holds all weights; gradients are exchanged", _replicas),
    Strategy("layerwise", "each card keeps its own layers, and micro-batches flow through", _layerwise),
    Strategy("replicated-fsdp", "groups of cards share the weights; gradients travel between groups", _replicated_fsdp),
)
