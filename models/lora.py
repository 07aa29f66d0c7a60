"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), in the layout of PEFT."""

import math
import zlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from models.parameters import Adapter, Path, by_path
from models.placement import Placement


@dataclass(frozen=True)
class LoRAConfig:
    """Which modules carry an adapter, and of what kind.

    `targets` holds module paths without a layer number, e.g. "model.layers.self_attn.q_proj".
    """

    rank: int
    alpha: float
    dropout: float
    use_rslora: bool
    targets: frozenset[str]

    @property
    def scale(self) -> float:
        """Alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class LoRA(nnx.Module):
    """The update scale * B A x of one linear layer; A [r, in] and B [out, r] are float32."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        config: LoRAConfig,
        stack: tuple[int, ...],
        stream: int,
        axes: tuple[str, str] = ("out", "hidden"),
    ):
        """Declare the adapter of a matrix with the logical axes `axes`.

        `stream` separates its dropout from that of the layer's other adapters.
        """
        stack_axes = ("layers",) * len(stack)
        self.out_axis, self.in_axis = axes
        shape_a, shape_b = (*stack, config.rank, in_features), (*stack, out_features, config.rank)
        self.lora_A = Adapter(jax.ShapeDtypeStruct(shape_a, jnp.float32), axes=(*stack_axes, "rank", self.in_axis))
        self.lora_B = Adapter(jax.ShapeDtypeStruct(shape_b, jnp.float32), axes=(*stack_axes, self.out_axis, "rank"))
        self.in_features = in_features
        self.scale = config.scale
        self.dropout = config.dropout
        self.stream = stream

    def __call__(self, x: jax.Array, placement: Placement, dropout_keys: jax.Array | None) -> jax.Array:
        """Return the update for x [B, ..., in] as [B, ..., out] in x's dtype; no keys [B] means no dropout."""
        if dropout_keys is not None and self.dropout > 0:
            # Drawn for the whole width, so that what is dropped does not depend on how it is cut.
            keep = self._keep(dropout_keys, (*x.shape[1:-1], self.in_features))
            x = jnp.where(placement.part(keep, self.in_axis, -1), x / (1 - self.dropout), 0)
        a = placement.part(self._fetched(self.lora_A, placement, x.dtype), self.in_axis, 1)
        b = placement.part(self._fetched(self.lora_B, placement, x.dtype), self.out_axis, 0)
        low = jnp.einsum("...i,ri->...r", x, a)  # [..., r]
        return jnp.einsum("...r,or->...o", low, b * jnp.asarray(self.scale, x.dtype))

    def _keep(self, dropout_keys: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Draw what is kept of each row, whatever other rows are computed beside it: bool [B, *shape]."""

        def draw(key: jax.Array) -> jax.Array:
            return jax.random.bernoulli(jax.random.fold_in(key, self.stream), 1 - self.dropout, shape)

        return jax.vmap(draw)(dropout_keys)

    @staticmethod
    def _fetched(weight: Adapter, placement: Placement, dtype: jnp.dtype) -> jax.Array:
        # Cast before fetching: what travels between devices has the dtype of computation.
        return placement.fetch(jax.tree.map(lambda leaf: leaf.astype(dtype), weight.get_value()))


def initial_adapter(adapters: nnx.State, seed: int) -> nnx.State:
    """Draw initial weights for the declared `adapters`: A as PEFT does (Kaiming uniform, a = sqrt(5)), B zero.

    A's bound is 1 / sqrt(in). The draw of a weight depends on the seed and its path alone.
    """
    root = jax.random.key(seed)

    def draw(path: Path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if path[-1] != "lora_A":
            return jnp.zeros(leaf.shape, leaf.dtype)
        bound = 1 / math.sqrt(leaf.shape[-1])
        key = jax.random.fold_in(root, zlib.crc32(".".join(path).encode()))
        return jax.random.uniform(key, leaf.shape, leaf.dtype, -bound, bound)

    return nnx.from_flat_state(
        [(path, variable.replace(draw(path, variable.get_value()))) for path, variable in by_path(adapters).items()]
    )
