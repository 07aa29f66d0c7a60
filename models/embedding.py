"""Tables of words [vocab, hidden]: the input embedding and the output head, frozen, adapted, or trained in full.

An adapted table is W + scale * R C, with R [vocab, r] and C [r, hidden]. Of the head that is PEFT's B A; of the
embedding, the transposes of its `lora_embedding_A` [r, vocab] and `lora_embedding_B` [hidden, r]. R lies as W does, in
ranges of rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models import tables
from models.lora import LayerRanks, LoRAConfig, keep_mask
from models.parameters import Adapter, Frozen, trained
from models.placement import Placement
from models.tables import Table
from models.vocabulary import look_up


class HeadTerm(NamedTuple):
    """One of the products whose sum the logits are: hidden [..., D] times the transpose of table [V, D]."""

    hidden: jax.Array
    table: Table
    trained: bool


class EmbeddingLoRA(nnx.Module):
    """The update scale * R C of a table; both float32."""

    def __init__(self, shape: tuple[int, int], config: LoRAConfig, ranks: LayerRanks, stream: int, *, of_head: bool):
        """Declare R and C as PEFT begins them: of the head C is uniform and R zero, of the embedding C normal."""
        vocab, hidden = shape
        self.rank, self.scale = ranks.ranks[0], ranks.scales[0]
        self.rows = Adapter(jax.ShapeDtypeStruct((vocab, self.rank), jnp.float32), axes=("vocab", "rank"))
        self.columns = Adapter(
            jax.ShapeDtypeStruct((1, self.rank, hidden), jnp.float32),
            axes=("layers", "rank", "hidden"),
            initial="uniform" if of_head else "normal",
        )
        self.dropout, self.stream, self.of_head = config.dropout, stream, of_head

    def of_tokens(self, tokens: jax.Array, placement: Placement, dtype: jnp.dtype) -> jax.Array:
        """Return the update of the embeddings of tokens [B, S], as [B, S, hidden]."""
        low = look_up(self.rows.get_value(), tokens, placement.vocabulary, dtype)  # [B, S, r]
        return jnp.einsum("...r,ri->...i", low, self._columns(placement, dtype)) * jnp.asarray(self.scale, dtype)

    def of_hidden(self, x: jax.Array, placement: Placement, dropout_keys: jax.Array | None) -> HeadTerm:
        """Return the update of the logits of x [B, ..., hidden]; no keys [B] means no dropout."""
        if dropout_keys is not None and self.dropout > 0:
            keep = keep_mask(dropout_keys, self.stream, 1 - self.dropout, x.shape[1:])
            x = jnp.where(keep, x / (1 - self.dropout), 0)
        low = jnp.einsum("...i,ri->...r", x, self._columns(placement, x.dtype))
        return HeadTerm(low, self.rows.get_value() * self.scale, trained=True)

    def _columns(self, placement: Placement, dtype: jnp.dtype) -> jax.Array:
        return placement.alike(trained(self.columns, placement, dtype))


class Embedding(nnx.Module):
    """A table [vocab, hidden]: of input embeddings, or of the output head."""

    def __init__(self, shape: tuple[int, int], quantization: str, dtype: jnp.dtype):
        """Declare it; `quantization` is how it is held while it is frozen, see `models.tables`."""
        self.weight: Frozen | Adapter = Frozen(
            tables.abstract(quantization, shape, dtype), axes=tables.axes(quantization, shape)
        )
        self.adapter: EmbeddingLoRA | None = None
        self.shape = shape

    def train_in_full(self) -> None:
        """Declare the table itself as trained."""
        self.weight = Adapter(jax.ShapeDtypeStruct(self.shape, jnp.float32), axes=("vocab", "hidden"), whole=True)

    def add_adapter(self, config: LoRAConfig, ranks: LayerRanks, stream: int, *, of_head: bool) -> None:
        """Declare an adapter beside the frozen table; `stream` separates its dropout from that of other adapters."""
        self.adapter = nnx.data(EmbeddingLoRA(self.shape, config, ranks, stream, of_head=of_head))

    def embed(self, tokens: jax.Array, placement: Placement, dtype: jnp.dtype) -> jax.Array:
        """Return the embeddings of tokens [B, S], as [B, S, hidden]."""
        x = look_up(self.weight.get_value(), tokens, placement.vocabulary, dtype)
        return x if self.adapter is None else x + self.adapter.of_tokens(tokens, placement, dtype)

    def head_terms(self, x: jax.Array, placement: Placement, dropout_keys: jax.Array | None) -> list[HeadTerm]:
        """Return what the logits of x [B, ..., hidden] are the sum of."""
        terms = [HeadTerm(x, self.weight.get_value(), isinstance(self.weight, Adapter))]
        return terms if self.adapter is None else [*terms, self.adapter.of_hidden(x, placement, dropout_keys)]
