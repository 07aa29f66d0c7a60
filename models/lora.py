"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), in the layout of PEFT.

Layers are stacked, so that the adapters of a module have one shape: where ranks differ between layers it is that of the
largest, and what lies beyond a layer's own rank is masked out, wherever it is used. A layer of rank 0 has no adapter.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.parameters import Adapter, Path, by_path
from models.placement import Placement

MAGNITUDE = "lora_magnitude_vector"


@dataclass(frozen=True)
class LayerRanks:
    """Rank and scale of one module's adapter in each layer of the model; one of each where all layers are alike."""

    ranks: tuple[int, ...]
    scales: tuple[float, ...]

    @property
    def uniform(self) -> bool:
        """Whether all layers are alike."""
        return len(self.ranks) == 1

    def rank(self, layer: int) -> int:
        """Return the rank in a layer, 0 for no adapter."""
        return self.ranks[0 if self.uniform else layer]

    def scale(self, layer: int) -> float:
        """Return the scale in a layer."""
        return self.scales[0 if self.uniform else layer]


@dataclass(frozen=True)
class LoRAConfig:
    """Which modules carry an adapter, and of what kind.

    `targets` holds module paths without a layer number, e.g. "model.layers.self_attn.q_proj"; `exceptions` those of
    them that do not have `rank` and `alpha` in every layer. `use_dora`: magnitudes are trained apart from directions.
    `trained` holds the paths of tables and norms that are trained in full.
    """

    rank: int
    alpha: float
    dropout: float
    use_rslora: bool
    targets: frozenset[str]
    use_dora: bool = False
    exceptions: tuple[tuple[str, LayerRanks], ...] = ()
    trained: frozenset[str] = frozenset()

    @property
    def scale(self) -> float:
        """The scale of a module that is no exception."""
        return self.scale_of(self.rank, self.alpha)

    def scale_of(self, rank: int, alpha: float) -> float:
        """Alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (arXiv:2312.03732)."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def of_module(self, path: str) -> LayerRanks:
        """Return the ranks and scales of a module."""
        return dict(self.exceptions).get(path, LayerRanks((self.rank,), (self.scale,)))


class LoRA(nnx.Module):
    """The update scale * B A x of one linear layer; A [r, in] and B [out, r] are float32.

    With DoRA (arXiv:2402.09353), the magnitudes m [out, 1] too: each row of W + scale * B A is brought to the length m.
    As in the paper and in PEFT, no gradient goes through the length that it had. Unlike in PEFT, dropout acts on the
    input of A alone.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        config: LoRAConfig,
        stack: tuple[int, ...],
        stream: int,
        axes: tuple[str, str] = ("out", "hidden"),
        layer_ranks: LayerRanks | None = None,
    ):
        """Declare the adapter of a matrix with the logical axes `axes`.

        `stream` separates its dropout from that of the layer's other adapters; `layer_ranks` is by default that of the
        configuration in every layer.
        """
        self.layer_ranks = layer_ranks or LayerRanks((config.rank,), (config.scale,))
        ranks, rank = self.layer_ranks.ranks, max(self.layer_ranks.ranks)
        stack_axes = ("layers",) * len(stack)
        self.out_axis, self.in_axis = axes
        shape_a, shape_b = (*stack, rank, in_features), (*stack, out_features, rank)
        axes_a, axes_b = (*stack_axes, "rank", self.in_axis), (*stack_axes, self.out_axis, "rank")
        self.lora_A = Adapter(jax.ShapeDtypeStruct(shape_a, jnp.float32), axes=axes_a, ranks=ranks)
        self.lora_B = Adapter(jax.ShapeDtypeStruct(shape_b, jnp.float32), axes=axes_b)
        self.lora_magnitude_vector = (
            Adapter(jax.ShapeDtypeStruct((*stack, out_features, 1), jnp.float32), axes=axes_b)
            if config.use_dora
            else None
        )
        self.in_features = in_features
        self.dropout = config.dropout
        self.stream = stream

    def __call__(
        self, x: jax.Array, placement: Placement, dropout_keys: jax.Array | None, layer: jax.Array | int = 0
    ) -> jax.Array:
        """Return the update for x [B, ..., in] as [B, ..., out] in x's dtype; no keys [B] means no dropout.

        `layer` is the layer's number in the whole model.
        """
        if dropout_keys is not None and self.drops(dropout_keys):
            # Drawn for the whole width, so that what is dropped does not depend on how it is cut.
            keep = keep_mask(dropout_keys, self.stream, 1 - self.dropout, (*x.shape[1:-1], self.in_features))
            x = jnp.where(placement.part(keep, self.in_axis, -1), x / (1 - self.dropout), 0)
        a, b = self.factors(placement, x.dtype, layer)
        low = jnp.einsum("...i,ri->...r", x, a)  # [..., r]
        return jnp.einsum("...r,or->...o", low, b)

    def drops(self, dropout_keys: jax.Array | None) -> bool:
        """Whether a part of the input is dropped."""
        return dropout_keys is not None and self.dropout > 0

    def magnitude_factors(
        self, weight: jax.Array, placement: Placement, dtype: jax.typing.DTypeLike, layer: jax.Array | int = 0
    ) -> jax.Array:
        """Return m / |W + scale * B A|, [out] of `dtype`, for the dequantised weight [out, in]; 1 at rank 0."""
        assert self.lora_magnitude_vector is not None
        a, b = (jax.lax.stop_gradient(x).astype(jnp.float32) for x in self.factors(placement, dtype, layer))
        tuned = weight.astype(jnp.float32) + jnp.einsum("or,ri->oi", b, a)
        squares = jnp.sum(tuned * tuned, axis=1)
        lengths = jnp.sqrt(squares if self.in_axis == "hidden" else placement.leave(squares))
        magnitudes = placement.part(self._fetched(self.lora_magnitude_vector, placement, jnp.float32), self.out_axis, 0)
        # A row of padding, or of zeros, has no direction.
        factors = jnp.where(lengths > 0, magnitudes[:, 0] / jnp.where(lengths > 0, lengths, 1), 0)
        if not self.layer_ranks.uniform:
            factors = jnp.where(jnp.asarray(self.layer_ranks.ranks)[layer] > 0, factors, 1)
        return factors.astype(dtype)

    def factors(
        self, placement: Placement, dtype: jax.typing.DTypeLike, layer: jax.Array | int
    ) -> tuple[jax.Array, jax.Array]:
        """Return this device's parts of A, masked, and of B, scaled."""
        a = placement.part(self._fetched(self.lora_A, placement, dtype), self.in_axis, 1)
        b = placement.part(self._fetched(self.lora_B, placement, dtype), self.out_axis, 0)
        if self.layer_ranks.uniform:
            return a, b * jnp.asarray(self.layer_ranks.scales[0], dtype)
        rank = jnp.asarray(self.layer_ranks.ranks)[layer]
        scale = jnp.asarray(self.layer_ranks.scales, dtype)[layer]
        # The mask is on both: beyond the rank nothing has an effect, nor a gradient.
        mask = (jnp.arange(a.shape[0]) < rank).astype(dtype)
        return a * mask[:, None], b * (mask * scale)

    @staticmethod
    def _fetched(weight: Adapter, placement: Placement, dtype: jax.typing.DTypeLike) -> jax.Array:
        # Cast before fetching: what travels between devices has the dtype of computation.
        return placement.fetch(jax.tree.map(lambda leaf: leaf.astype(dtype), weight.get_value()))


def keep_mask(dropout_keys: jax.Array, stream: int, probability: float, shape: tuple[int, ...]) -> jax.Array:
    """Draw what is kept of each row, whatever other rows are computed beside it: bool [B, *shape]."""

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, stream), probability, shape)

    return jax.vmap(draw)(dropout_keys)


def initial_adapter(
    adapters: nnx.State,
    seed: int,
    magnitudes: Mapping[Path, np.ndarray] | None = None,
    originals: Mapping[Path, np.ndarray] | None = None,
) -> nnx.State:
    """Draw initial weights for the declared `adapters`: A as PEFT does (Kaiming uniform, a = sqrt(5)), B zero.

    A's bound is 1 / sqrt(in). The draw of a weight depends on the seed and its path alone.

    Args:
        adapters: shapes, as the model declares them.
        seed: of the draws.
        magnitudes: for DoRA, the lengths of the base weights' rows [L, out] by the path of the linear module; ones
            where they are not given.
        originals: what the weights that are trained in full are in the base model, by their paths; zeros where they are
            not given.
    """
    root = jax.random.key(seed)

    def draw(path: Path, variable: nnx.Variable) -> jax.Array:
        leaf = variable.get_value()
        if path[-1] == MAGNITUDE:
            lengths = (magnitudes or {}).get(path[:-2])
            return jnp.ones(leaf.shape, leaf.dtype) if lengths is None else jnp.asarray(lengths)[..., None]
        if originals and path in originals:
            return jnp.asarray(originals[path], leaf.dtype).reshape(leaf.shape)
        if path[-1] not in ("lora_A", "columns"):
            return jnp.zeros(leaf.shape, leaf.dtype)
        bound = 1 / math.sqrt(leaf.shape[-1])
        key = jax.random.fold_in(root, zlib.crc32(".".join(path).encode()))
        if path[-1] == "columns":
            normal = variable.get_metadata("initial") == "normal"
            return (
                jax.random.normal(key, leaf.shape)
                if normal
                else jax.random.uniform(key, leaf.shape, minval=-bound, maxval=bound)
            )
        drawn = jax.random.uniform(key, leaf.shape, leaf.dtype, -bound, bound)
        ranks = variable.get_metadata("ranks")
        if len(ranks) == 1:
            return drawn
        return jnp.where(jnp.arange(leaf.shape[-2])[:, None] < jnp.asarray(ranks)[:, None, None], drawn, 0)

    return nnx.from_flat_state(
        [(path, variable.replace(draw(path, variable))) for path, variable in by_path(adapters).items()]
    )
