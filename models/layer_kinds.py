"""What differs between the layers of one scan: each finds by its number of which kind it is.

Where all layers are alike, nothing is added to the program.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.attention import Window
from models.config import ModelConfig


@dataclass(frozen=True)
class LayerKind:
    """How one layer attends.

    Attributes:
        window: how far back it sees.
        rotated: whether it rotates queries and keys, bool [].
        windowed: whether it has a window, bool [].
    """

    window: Window
    rotated: jax.Array | bool
    windowed: jax.Array | bool = False

    def rotation(
        self, cos: jax.Array, sin: jax.Array, local: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return the tables of the rotary embedding, or those of no rotation; `local` are those of a windowed layer."""
        if local is not None:
            cos, sin = (jnp.where(self.windowed, own, all_) for own, all_ in zip(local, (cos, sin), strict=True))
        if isinstance(self.rotated, bool):
            return (cos, sin) if self.rotated else (jnp.ones_like(cos), jnp.zeros_like(sin))
        return jnp.where(self.rotated, cos, 1), jnp.where(self.rotated, sin, 0)


@dataclass(frozen=True)
class LayerKinds:
    """The distinct pairs of (window, whether rotated) of a model's layers, and which of them each layer has.

    Attributes:
        kinds: the distinct pairs.
        of_layers: a place in `kinds` for each layer of the model.
    """

    kinds: tuple[tuple[int | None, bool], ...]
    of_layers: tuple[int, ...]

    @classmethod
    def of(cls, config: ModelConfig) -> "LayerKinds":
        """Find the kinds of a model's layers."""
        pairs = list(zip(config.windows, config.rotated, strict=True))
        kinds = tuple(dict.fromkeys(pairs))
        return cls(kinds, tuple(kinds.index(pair) for pair in pairs))

    def of_layer(self, layer: jax.Array) -> LayerKind:
        """Return the kind of a layer, whose number in the whole model is an int32 [] of the loop."""
        windows, marks = [window for window, _ in self.kinds], [rotated for _, rotated in self.kinds]
        if len(self.kinds) == 1:
            return LayerKind(Window(tuple(windows)), marks[0], windows[0] is not None)
        index = jnp.asarray(self.of_layers, jnp.int32)[layer]
        rotated = marks[0] if len(set(marks)) == 1 else jnp.asarray(marks)[index]
        windowed = jnp.asarray([window is not None for window in windows])[index]
        return LayerKind(Window(tuple(windows), index), rotated, windowed)
