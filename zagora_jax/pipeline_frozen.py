"""The frozen parameters of a pipeline: how they come to its stages, and what each stage has of them.

The value of a parameter is a tuple: what each stage has of it, or None.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import tables
from models.parameters import Path, by_path
from models.tables import QuantizedTable
from zagora_jax.checkpoints.load import is_stacked
from zagora_jax.stage import Stage
from zagora_jax.streaming import StreamedDestination, StreamedFrozen

EMBEDDING: Path = ("model", "embed_tokens", "weight")
NO_TABLE: Any = np.zeros((0, 0))


class PipelineDestination:
    """Where parameters go: each layer to its stage, be it onto the devices or into host memory.

    Attributes:
        embedding: the table [vocab, hidden] on the host, once it came, where words are looked up there.
    """

    def __init__(self, stages: Sequence[Stage], host_embedding: bool):
        """Make room."""
        self._stages = stages
        self._destinations = [stage.distribution.destination() for stage in stages]
        self._host_embedding, self.embedding = host_embedding, NO_TABLE

    def empty(self, path: Path, declared: Any) -> Any:
        """Return every stage's stack of layers of a frozen parameter, without values yet."""
        return tuple(destination.empty(path, declared) for destination in self._destinations)

    def set_layer(self, path: Path, stack: Any, value: Any, layer: int) -> Any:
        """Put one layer's value into the stack of its stage."""
        return tuple(
            destination.set_layer(path, own, value, layer - stage.first_layer)
            if layer in range(stage.layers.start, stage.layers.stop)
            else own
            for stage, destination, own in zip(self._stages, self._destinations, stack, strict=True)
        )

    def whole(self, path: Path, value: Any) -> Any:
        """Lay out a frozen parameter that is not stacked, or a whole stack."""

        def of_stage(stage: Stage, destination: Any) -> Any:
            if path not in stage.paths:
                return None
            part = jax.tree.map(lambda array: array[stage.layers], value) if is_stacked(path) else value
            return destination.whole(path, part)

        if self._host_embedding and path == EMBEDDING:
            self.embedding = jax.tree.map(np.asarray, value)
        return tuple(map(of_stage, self._stages, self._destinations))

    def loaded(self, parameters: nnx.State) -> Any:
        """Return the frozen parameters, with the layers that wait in host memory where there are any."""
        waiting = [
            destination.waiting if isinstance(destination, StreamedDestination) else None
            for destination in self._destinations
        ]
        return parameters if all(own is None for own in waiting) else StreamedFrozen(parameters, waiting)


def look_up_on_host(table: Any, tokens: np.ndarray, dtype: jnp.dtype) -> np.ndarray | jax.Array:
    """Return the rows of a table on the host for tokens [M, S]; of a quantised one they come from the device."""
    rows = jax.tree.map(lambda leaf: np.take(leaf, tokens.reshape(-1), axis=0), table)
    if isinstance(rows, QuantizedTable):
        rows = _dequantize(rows, dtype)
    return rows.reshape(*tokens.shape, -1)


_dequantize = jax.jit(tables.dequantize, static_argnums=1)


def frozen_of_stages(frozen: Any, stages: Sequence[Stage]) -> list[Any]:
    """Part the frozen parameters into what each stage's programs take."""
    parameters = frozen.parameters if isinstance(frozen, StreamedFrozen) else frozen
    waiting = frozen.waiting if isinstance(frozen, StreamedFrozen) else [None] * len(stages)
    variables = by_path(parameters)

    def of_stage(index: int, stage: Stage) -> Any:
        own = nnx.from_flat_state(
            [
                (path, variable.replace(variable.get_value()[index]))
                for path, variable in variables.items()
                if path in stage.paths
            ]
        )
        return own if waiting[index] is None else StreamedFrozen(own, waiting[index])

    return [of_stage(index, stage) for index, stage in enumerate(stages)]
