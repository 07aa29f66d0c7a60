"""Layers move between stages of which some stream theirs from host memory: each is read where it is and laid out anew.

A layer that was streamed may be resident in its new stage, and the other way round. Beside the arrays of a stage that
changes, its new ones are there for a moment.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from models.parameters import Path, by_path
from sharding.flat import FlatShard
from zagora_jax.checkpoints.load import is_stacked
from zagora_jax.distribution import Distribution
from zagora_jax.stage import Stage
from zagora_jax.streaming import StreamedDestination, StreamedFrozen, StreamedSpread


def streamed_after(old: Sequence[Stage], layers: Sequence[int]) -> list[int]:
    """Return how many layers of each stage wait in host memory once it has so many: as many stay on its devices."""

    def of_stage(stage: Stage, count: int) -> int:
        order = stage.distribution.stream
        return 0 if order is None else max(0, count - (stage.num_layers - order.streamed_layers))

    return [of_stage(stage, count) for stage, count in zip(old, layers, strict=True)]


def move_streamed(old: Sequence[Stage], new: Sequence[Stage], frozen: StreamedFrozen) -> None:
    """Lay the frozen parameters of `old` stages out for `new` ones, in place."""
    variables = {path: v for path, v in by_path(frozen.parameters).items() if is_stacked(path)}
    values = {path: list(variable.get_value()) for path, variable in variables.items()}
    waiting = list(frozen.waiting)
    for index, (before, after) in enumerate(zip(old, new, strict=True)):
        if before.layers == after.layers and before.distribution.stream == after.distribution.stream:
            continue
        destination = after.distribution.destination()
        stacks = {path: destination.empty(path, None) for path in values}
        for layer in range(after.layers.start, after.layers.stop):
            source = next(at for at, stage in enumerate(old) if layer in range(stage.layers.start, stage.layers.stop))
            read = _Layer(old[source].distribution, layer - old[source].first_layer, frozen.waiting[source])
            for path, variable in variables.items():
                value = read.value(path, variable.get_value()[source])
                stacks[path] = destination.set_layer(path, stacks[path], value, layer - after.first_layer)
        for path, stack in stacks.items():
            values[path][index] = stack
        waiting[index] = destination.waiting if isinstance(destination, StreamedDestination) else None
    for path, variable in variables.items():
        variable.set_value(tuple(values[path]))
    frozen.waiting[:] = waiting


class _Layer:
    """One layer of a stage, its number there."""

    def __init__(self, distribution: Distribution, layer: int, waiting: jax.Array | None):
        self._spreads = {path: variable.get_value() for path, variable in by_path(distribution.frozen).items()}
        self._layer, self._brought = layer, None
        order = distribution.stream
        if order is not None and (place := order.place(layer))[0]:
            assert distribution.waiting is not None
            assert waiting is not None
            self._brought = distribution.waiting.bring(waiting, place[1])

    def value(self, path: Path, stack: Any) -> Any:
        """Return a parameter's value in this layer, as a checkpoint has it."""
        return jax.tree.map(partial(_of_layer, layer=self._layer, brought=self._brought), self._spreads[path], stack)


def _of_layer(spread: Any, stored: Any, *, layer: int, brought: jax.Array | None) -> jax.Array:
    if isinstance(spread, StreamedSpread):
        return spread.one.whole_layer(spread.of_layer(stored, layer, brought))
    return spread.whole_layer((stored.array if isinstance(stored, FlatShard) else stored)[layer])
