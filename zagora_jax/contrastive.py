"""The loss of an embedder: each query's passage against all other passages of the optimizer step, on all devices.

InfoNCE (arXiv:1807.03748): for query q with passage p among candidates c, -log exp(q.p / t) / sum exp(q.c / t). All
candidates have to be there at once, but not what computed them: vectors are computed first, without gradients; the
loss gives each vector's gradient; then a micro-batch at a time is computed once more, with gradients (GradCache,
arXiv:2101.06983). So the step may have more pairs than fit in memory at a time.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.llama import Llama
from models.placement import Placement
from models.pooling import Pooling, pooled
from sharding.group import DeviceGroup
from sharding.layer_exchange import Exchanged
from zagora_jax.data.batches import Batch
from zagora_jax.step import ForwardOptions, hidden_states

_HASH = (0x01000193, 0x9E3779B1)  # odd multipliers: of FNV-1a, and of Knuth's multiplicative hashing


def embed(
    model: Llama,
    batch: Batch,
    pooling: Pooling,
    options: ForwardOptions,
    dropout_keys: jax.Array | None,
    placement: Placement,
    exchanged: Exchanged | None = None,
) -> jax.Array:
    """Return the unit vectors of a micro-batch's sequences [M, S], float32 [M, D]."""
    hidden = hidden_states(model, batch, options, dropout_keys, placement, exchanged)
    return pooled(hidden, (batch.segment_ids > 0).sum(axis=-1), pooling)


@dataclass(frozen=True)
class Contrastive:
    """An `Objective`. Sequences come in groups: a query, its passage, and passages that are wrong for it.

    Attributes:
        pooling: how a sequence becomes a vector.
        temperature: t above.
        group: sequences in a group.
    """

    pooling: Pooling
    temperature: float
    group: int

    def prepare(
        self,
        model: Llama,
        batch: Batch,
        options: ForwardOptions,
        dropout_keys: jax.Array | None,
        placement: Placement,
        group: DeviceGroup,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the gradient of the step's summed loss for each vector [A, M, D], and each micro-batch's loss [A]."""

        def of_micro_batch(given: tuple[Batch, jax.Array | None]) -> jax.Array:
            return embed(model, given[0], self.pooling, options, given[1], placement)

        vectors = jax.lax.map(of_micro_batch, (batch, dropout_keys))  # [A, M, D]

        def total(vectors: jax.Array) -> tuple[jax.Array, jax.Array]:
            losses = self.losses(vectors.reshape(-1, vectors.shape[-1]), batch, group)
            return losses.sum(), losses.reshape(len(batch.tokens), -1).sum(axis=-1)

        gradients, losses = jax.grad(total, has_aux=True)(vectors)
        return gradients, losses

    def loss(
        self,
        model: Llama,
        batch: Batch,
        prepared: tuple[jax.Array, jax.Array],
        options: ForwardOptions,
        dropout_keys: jax.Array | None,
        placement: Placement,
        exchanged: Exchanged,
    ) -> tuple[jax.Array, jax.Array]:
        """Return a number whose gradient is that of a micro-batch's part of the loss, and the loss of its queries."""
        gradients, loss = prepared
        vectors = embed(model, batch, self.pooling, options, dropout_keys, placement, exchanged)
        return (vectors * gradients).sum(), loss

    def losses(self, vectors: jax.Array, batch: Batch, group: DeviceGroup) -> jax.Array:
        """Return the loss of each of this device's queries, [A * M / group]; 0 for a group that is empty.

        A candidate does not count where it is empty, or is no wrong answer: it is the same passage, or the passage of
        the same question.

        Args:
            vectors: [A * M, D] of this device's sequences.
            batch: the sequences [A, M, S].
            group: reaches the other devices' passages.
        """
        width = batch.tokens.shape[-1]
        names = _names(batch.tokens.reshape(-1, width), batch.segment_ids.reshape(-1, width))
        names = names.reshape(-1, self.group, names.shape[-1])  # [Q, G, 2]
        vectors = vectors.reshape(-1, self.group, vectors.shape[-1])  # [Q, G, D]
        there = (batch.segment_ids.reshape(-1, self.group, width) > 0).any(axis=-1)  # [Q, G]
        is_answer = jnp.broadcast_to(jnp.arange(self.group - 1) == 0, there[:, 1:].shape)

        def of_all(x: jax.Array) -> jax.Array:
            """Bring the passages of all devices together: [P, ...]."""
            return group.gather(x.reshape(-1, *x.shape[2:]))

        passages, passage_names = of_all(vectors[:, 1:]), of_all(names[:, 1:])
        asked = of_all(jnp.broadcast_to(names[:, :1], names[:, 1:].shape))
        own = group.first_row(is_answer.size) + (self.group - 1) * jnp.arange(len(names))  # [Q]
        is_own = jnp.arange(len(passages)) == own[:, None]  # [Q, P]
        same_passage = (passage_names == names[:, 1, None]).all(axis=-1)
        same_question = (asked == names[:, 0, None]).all(axis=-1) & of_all(is_answer)
        counts = is_own | (of_all(there[:, 1:]) & ~same_passage & ~same_question)
        scores = jnp.einsum("qd,pd->qp", vectors[:, 0], passages, precision="highest") / self.temperature
        scores = jnp.where(counts, scores, -jnp.inf)
        right = jnp.where(is_own, scores, 0).sum(axis=-1)
        return jnp.where(there[:, 0], jax.nn.logsumexp(scores, axis=-1) - right, 0)


def _names(tokens: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Return two hashes uint32 [N, 2] of each sequence [N, S] that are the same where its real tokens are."""
    values = jnp.where(segment_ids > 0, tokens + 1, 0).astype(jnp.uint32)
    places = jnp.arange(tokens.shape[-1])
    powers = [jnp.cumprod(jnp.full(places.shape, factor, jnp.uint32)) for factor in _HASH]
    return jnp.stack([(values * power).sum(axis=-1, dtype=jnp.uint32) for power in powers], axis=-1)
