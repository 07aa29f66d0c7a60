"""DiLoCo's outer step (Douillard et al., arXiv:2311.08105), on the host.

Every site trains by itself for some optimizer steps (its inner optimizer is AdamW). How far its adapter has come, the
old one minus the new one, is a pseudo-gradient. The mean over the sites goes into SGD with Nesterov momentum, which
makes the next global adapter: with velocity v, mean g, momentum m and learning rate r

    v' = m v + g,    adapter' = adapter - r (g + m v').

All of it is element-wise float32 in a fixed order, each operation rounded by itself as IEEE 754 says, so that all sites
that read the same updates get the same bits.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

Vectors = dict[str, np.ndarray]
"""float32 arrays by the path of an adapter's parameter, "model.layers.self_attn.q_proj.adapter.lora_A"."""


@dataclass(frozen=True)
class OuterRule:
    """The outer optimizer: SGD with Nesterov momentum."""

    learning_rate: float
    momentum: float


@dataclass(frozen=True)
class Global:
    """What all sites have in common after a round.

    Attributes:
        round: how many rounds are closed.
        adapter: the global adapter.
        velocity: the outer optimizer's momentum.
    """

    round: int
    adapter: Vectors
    velocity: Vectors

    @classmethod
    def begin(cls, adapter: Vectors) -> "Global":
        """Return what stands before the first round."""
        return cls(0, adapter, zeros(adapter))

    def after(self, pseudo_gradients: Iterable[Vectors], rule: OuterRule) -> "Global":
        """Close a round with the updates of some sites; with none of them, nothing but the round's number changes.

        Args:
            pseudo_gradients: one a site, in an order on which all agree; one at a time is in memory.
            rule: the outer optimizer.
        """
        total, count = zeros(self.adapter), 0
        for one in pseudo_gradients:
            count += 1
            for name, values in one.items():
                total[name] += values
        if not count:
            return Global(self.round + 1, self.adapter, self.velocity)
        momentum, rate = np.float32(rule.momentum), np.float32(rule.learning_rate)
        adapter, velocity = {}, {}
        for name, values in self.adapter.items():
            mean = total[name] / np.float32(count)
            velocity[name] = momentum * self.velocity[name] + mean
            adapter[name] = values - rate * (mean + momentum * velocity[name])
        return Global(self.round + 1, adapter, velocity)

    def digest(self) -> str:
        """Return a text that two sites have in common if, and only if, they have the same adapter and velocity."""
        return digest({**prefixed("adapter", self.adapter), **prefixed("velocity", self.velocity)})


def zeros(like: Vectors) -> Vectors:
    """Return zeros of the same shapes."""
    return {name: np.zeros_like(values) for name, values in like.items()}


def minus(a: Vectors, b: Vectors) -> Vectors:
    """Return a - b."""
    return {name: values - b[name] for name, values in a.items()}


def prefixed(prefix: str, arrays: Mapping[str, np.ndarray]) -> Vectors:
    """Put `prefix.` before each name."""
    return {f"{prefix}.{name}": values for name, values in arrays.items()}


def without_prefix(prefix: str, arrays: Mapping[str, np.ndarray]) -> Vectors:
    """Take the arrays whose names begin with `prefix.`, under the rest of their names."""
    start = f"{prefix}."
    return {name.removeprefix(start): values for name, values in arrays.items() if name.startswith(start)}


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of names, types, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        values = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {values.dtype.str} {values.shape} ".encode())
        found.update(values.reshape(-1).view(np.uint8).data)
    return found.hexdigest()
