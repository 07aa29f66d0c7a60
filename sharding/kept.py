"""What a forward task leaves for the backward task that comes later, maybe in another program: as arrays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Pullback:
    """How gradients come of the arrays that a forward task kept.

    Attributes:
        structure: of the function that `jax.vjp` returned.
        places: for each of its arrays the place among those that the backward task holds anyway; None for a kept one.
    """

    structure: Any
    places: tuple[int | None, ...]

    def __call__(self, kept: Sequence[jax.Array], held: Any, cotangent: Any) -> tuple:
        """Return the gradients of the arguments that `keeping` had; `held` has the structure that it had there."""
        at_hand, rest = jax.tree.leaves(held), iter(kept)
        leaves = [next(rest) if place is None else at_hand[place] for place in self.places]
        return jax.tree.unflatten(self.structure, leaves)(cotangent)


def keeping(function: Callable[..., Any], arguments: tuple, held: Any) -> tuple[Any, list[jax.Array], Pullback]:
    """Call a function, and keep what its gradients need.

    Args:
        function: which `jax.checkpoint` policies inside may tell what to keep, and in which memory.
        arguments: pytrees of arrays, which the gradients are those of.
        held: pytrees of arrays that the backward task has at hand, and that are not kept: weights, say. Found by
            identity: a reshaped one would be kept.

    Returns:
        What the function returns; the arrays to be kept; and how the gradients come of them.
    """
    out, pull_back = jax.vjp(function, *arguments)
    leaves, structure = jax.tree.flatten(pull_back)
    at_hand = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(held))}
    places = tuple(at_hand.get(id(leaf)) for leaf in leaves)
    kept = [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]
    return out, kept, Pullback(structure, places)
