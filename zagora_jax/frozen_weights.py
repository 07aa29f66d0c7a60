"""The frozen weights of a run: brought to where its arrangement has them, be it devices, host memory or the disk."""

from collections.abc import Callable
from functools import partial
from typing import Any

from zagora_jax.arrangement import Arrangement, Say
from zagora_jax.base import BaseModel
from zagora_jax.checkpoints.load import Destination
from zagora_jax.errors import UserError


def load_weights(
    base: BaseModel,
    arrangement: Arrangement,
    on_tensor: Callable[[int], None],
    say: Say,
    through: Callable[[Destination], Destination] = lambda destination: destination,
) -> Any:
    """Read the weights, and begin to read ahead where layers come from the disk while programs run.

    Args:
        base: the model.
        arrangement: of it.
        on_tensor: called after every tensor read with the number of its elements.
        say: told what the cache of quantised layers is used for.
        through: wraps the destination.

    Returns:
        What the arrangement's programs take.

    Raises:
        UserError: what is wrong with the weights, or with the cache where layers come from there.
    """
    feed = arrangement.feed
    load = partial(base.load, on_tensor, say=say, fill_cache=feed is not None)
    frozen = arrangement.load(lambda destination: load(destination=through(destination)))
    if feed is not None:
        cache = base.open_cache(say)
        if cache is None:
            raise UserError("--offload.weights-from disk reads the cache of quantised layers, and there is none")
        feed.open(cache, frozen.waiting)
    return frozen
