"""Moves layers between the stages of a pipeline, from devices to devices."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from sharding.rules import PINNED


def bounds(cut: Sequence[int]) -> list[range]:
    """Return which layers each stage has."""
    ends = np.cumsum([0, *cut]).tolist()
    return [range(start, end) for start, end in pairwise(ends)]


def moved_layers(old: Sequence[int], new: Sequence[int]) -> int:
    """Return how many layers change their stage."""
    kept = sum(len(_common(before, after)) for before, after in zip(bounds(old), bounds(new), strict=True))
    return sum(new) - kept


def recut(arrays: Sequence[jax.Array], old: Sequence[int], new: Sequence[int]) -> list[jax.Array]:
    """Cut stacks of layers anew.

    Args:
        arrays: each stage's [layers of the stage, ...], with its sharding, which is not over the first axis.
        old: how many layers each stage has.
        new: how many it shall have.

    Returns:
        The stages' new stacks; a stage whose layers stay the same keeps its array.
    """
    result = []
    for stage, wanted in enumerate(bounds(new)):
        if wanted == bounds(old)[stage]:
            result.append(arrays[stage])
            continue
        sharding = arrays[stage].sharding
        on_host = sharding.memory_kind == PINNED
        pieces: list[Any] = []
        for source, had in enumerate(bounds(old)):
            common = _common(had, wanted)
            if common:
                own = slice(common.start - had.start, common.stop - had.start)
                piece = np.asarray(arrays[source])[own] if on_host else arrays[source][own]
                pieces.append(piece if on_host else jax.device_put(piece, sharding))
        result.append(jax.device_put(np.concatenate(pieces), sharding) if on_host else _joined(sharding)(pieces))
    return result


def recut_trees(trees: Sequence[Any], old: Sequence[int], new: Sequence[int]) -> list[Any]:
    """Cut each stage's tree of stacks anew; numbers [] stay as they are."""
    leaves, structures = zip(*map(jax.tree.flatten, trees), strict=True)
    moved = [
        list(of_stages) if not of_stages[0].ndim else recut(of_stages, old, new)
        for of_stages in zip(*leaves, strict=True)
    ]
    return [
        jax.tree.unflatten(structure, own) for structure, own in zip(structures, zip(*moved, strict=True), strict=True)
    ]


def _common(some: range, others: range) -> range:
    return range(max(some.start, others.start), min(some.stop, others.stop))


def _joined(sharding: Sharding) -> Any:
    return jax.jit(partial(jnp.concatenate, axis=0), out_shardings=sharding)
