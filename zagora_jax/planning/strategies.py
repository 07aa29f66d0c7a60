"""The ways to share a model out over devices: one table, which the search goes through.

A new strategy is an entry of STRATEGIES. What it keeps on a device follows from its mesh axes (`planning.shapes`,
exactly); an axis that is new also needs its terms in `planning.analytic` and `planning.time_model`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from models.config import ModelConfig

# Options of train that differ from its defaults, by name ("mesh.fsdp").
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Strategy:
    """One way.

    Attributes:
        name: as the option `strategy` of configure takes it.
        text: what it does, in a few words.
        layouts: the settings that make it up for a number of devices and a model; none where it needs others.
        streams: whether frozen layers wait in host memory, so that `offload.weights` is searched too.
    """

    name: str
    text: str
    layouts: Callable[[int, ModelConfig], Iterable[Settings]]
    streams: bool = False


def _mesh(strategy: str, *, data: int = 1, fsdp: int = 1, **axes: int) -> Settings:
    return {
        "strategy": strategy,
        "mesh.data": data,
        "mesh.fsdp": fsdp,
        **{f"mesh.{axis}": size for axis, size in axes.items()},
    }


def _one_device(count: int, model: ModelConfig) -> Iterable[Settings]:
    if count == 1:
        yield _mesh("fsdp")


def _fsdp(count: int, model: ModelConfig) -> Iterable[Settings]:
    if count > 1:
        yield _mesh("fsdp", fsdp=count)


def _replicas(count: int, model: ModelConfig) -> Iterable[Settings]:
    if count > 1:
        yield _mesh("replicas", data=count)


def _layerwise(count: int, model: ModelConfig) -> Iterable[Settings]:
    if 1 < count <= model.num_layers:
        yield _mesh("layerwise", stage=count)


def _replicated_layerwise(count: int, model: ModelConfig) -> Iterable[Settings]:
    for stages in _proper_divisors(count):
        if stages <= model.num_layers:
            yield _mesh("layerwise", data=count // stages, stage=stages)


def _replicated_fsdp(count: int, model: ModelConfig) -> Iterable[Settings]:
    for shards in _proper_divisors(count):
        yield _mesh("fsdp", data=count // shards, fsdp=shards)


def _tensor(count: int, model: ModelConfig) -> Iterable[Settings]:
    if 1 < count <= model.num_kv_heads:  # each has whole key/value heads
        yield _mesh("tensor", tensor=count)


def _tensor_fsdp(count: int, model: ModelConfig) -> Iterable[Settings]:
    for parts in _proper_divisors(count):
        if parts <= model.num_kv_heads:
            yield _mesh("tensor", fsdp=count // parts, tensor=parts)


def _replicated_tensor(count: int, model: ModelConfig) -> Iterable[Settings]:
    for parts in _proper_divisors(count):
        if parts <= model.num_kv_heads:
            yield _mesh("tensor", data=count // parts, tensor=parts)


def _streaming(count: int, model: ModelConfig) -> Iterable[Settings]:
    yield _mesh("streaming", data=count)


def _proper_divisors(count: int) -> Iterable[int]:
    return (size for size in range(2, count) if count % size == 0)


STRATEGIES = (
    Strategy("one-device", "everything on the one card", _one_device),
    Strategy("fsdp", "each card holds a part of the 4-bit weights and gathers a layer at a time", _fsdp),
    Strategy("replicas", "each card holds all weights; gradients are exchanged", _replicas),
    Strategy("layerwise", "each card keeps its own layers, and micro-batches flow through", _layerwise),
    Strategy("replicated-layerwise", "several such pipelines; gradients travel between them", _replicated_layerwise),
    Strategy("replicated-fsdp", "groups of cards share the weights; gradients travel between groups", _replicated_fsdp),
    Strategy("tensor", "each card computes a part of every layer; activations are summed", _tensor),
    Strategy("tensor-fsdp", "fsdp of groups of cards that compute each layer together", _tensor_fsdp),
    Strategy("replicated-tensor", "replicas of groups of cards that compute each layer together", _replicated_tensor),
    Strategy("streaming", "layers wait in host memory; each card brings its own", _streaming, streams=True),
    Strategy("streamed-fsdp", "as fsdp, with layers waiting in host memory", _fsdp, streams=True),
    Strategy("streamed-layerwise", "as layerwise, with layers waiting in host memory", _layerwise, streams=True),
)
