"""The lengths of frozen weights' rows, measured while the weights are read: what DoRA's magnitudes begin with."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.llama import Llama
from models.modules import linear_modules
from models.parameters import Path
from models.quantization import dequantize
from zagora_jax.checkpoints.load import Destination


class RowLengths:
    """A `Destination` that passes everything on to another, and measures the weights that have DoRA adapters.

    Attributes:
        of_modules: float32 [L, out] by the path of the linear module.
    """

    def __init__(self, destination: Destination, model: Llama):
        """Prepare to measure the adapted weights of `model`."""
        self._destination = destination
        self.of_modules: dict[Path, np.ndarray] = {
            tuple(path.split(".")): np.zeros((model.config.num_layers, linear.out_features), np.float32)
            for path, linear in linear_modules(model).items()
            if linear.adapter is not None and linear.adapter.lora_magnitude_vector is not None
        }

    def empty(self, path: Path, declared: Any) -> Any:
        """See `Destination`."""
        return self._destination.empty(path, declared)

    def set_layer(self, path: Path, stack: Any, value: Any, layer: int) -> Any:
        """See `Destination`; the lengths are those of what is held, as quantised."""
        if path[-1] == "weight" and path[:-1] in self.of_modules:
            self.of_modules[path[:-1]][layer] = _row_lengths(value)
        return self._destination.set_layer(path, stack, value, layer)

    def whole(self, path: Path, value: Any) -> Any:
        """See `Destination`."""
        return self._destination.whole(path, value)


@jax.jit
def _row_lengths(stored: Any) -> jax.Array:
    weight = partial(dequantize, dtype=jnp.dtype(jnp.float32))(stored)
    return jnp.sqrt(jnp.sum(weight * weight, axis=1))
