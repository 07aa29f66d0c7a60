"""Cross entropy of a language model's head, a few tokens at a time: logits [T, V] never exist."""

import functools
import math

import jax
import jax.numpy as jnp

from models import tables
from models.tables import Table
from models.vocabulary import WHOLE_VOCABULARY, Vocabulary

CHUNK_TOKENS = 256  # float32 logits of 256 tokens over 128,256 words take 125 MiB


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def cross_entropy_sum(
    hidden: jax.Array,
    head: Table,
    targets: jax.Array,
    weights: jax.Array,
    chunk_tokens: int = CHUNK_TOKENS,
    vocabulary: Vocabulary = WHOLE_VOCABULARY,
) -> jax.Array:
    """Return the weighted sum over tokens of -log softmax(hidden @ head.T)[target].

    The head is frozen: hidden alone gets a gradient, the other arguments get zeros. Where the call is
    differentiated, each chunk's gradient is computed beside its loss, so that no logits are computed twice; it is
    kept in hidden.dtype. Matrix products take operands in hidden.dtype and accumulate in float32, in which the
    logits and all statistics are.

    Args:
        hidden: [T, D].
        head: [V, D], or the rows of it that this device holds.
        targets: int32 [T], below V also where the weight is 0.
        weights: float32 [T], 0 for a token that is not supervised.
        chunk_tokens: most tokens of a device whose logits exist at a time.
        vocabulary: reaches the other devices that hold rows of the head; T is the same on all of them.

    Returns:
        The sum over this device's tokens, float32; 0 where all weights are. The caller divides by the sum of weights.
    """
    return _over_chunks(hidden, head, targets, weights, chunk_tokens, vocabulary, differentiate=False)[0]


def _forward(
    hidden: jax.Array,
    head: Table,
    targets: jax.Array,
    weights: jax.Array,
    chunk_tokens: int,
    vocabulary: Vocabulary,
) -> tuple[jax.Array, jax.Array | None]:
    return _over_chunks(hidden, head, targets, weights, chunk_tokens, vocabulary, differentiate=True)


def _backward(
    chunk_tokens: int, vocabulary: Vocabulary, d_hidden: jax.Array, d_loss: jax.Array
) -> tuple[jax.Array, None, None, None]:
    return (d_hidden * d_loss).astype(d_hidden.dtype), None, None, None


cross_entropy_sum.defvjp(_forward, _backward)


def _over_chunks(
    hidden: jax.Array,
    head: Table,
    targets: jax.Array,
    weights: jax.Array,
    chunk_tokens: int,
    vocabulary: Vocabulary,
    *,
    differentiate: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the loss, and its gradient [T, D] if asked for."""
    tokens, width = hidden.shape
    words = vocabulary.words(head.shape[0])
    count = max(1, math.ceil(tokens / chunk_tokens))
    size = math.ceil(tokens / count)

    def chunked(x: jax.Array) -> jax.Array:
        padding = [(0, count * size - tokens), *[(0, 0)] * (x.ndim - 1)]  # padded tokens have weight 0
        return jnp.pad(x, padding).reshape(count, size, *x.shape[1:])

    def step(loss: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array | None]:
        hidden, targets, weights = map(vocabulary.gather, chunk)
        logits = jnp.where(words >= 0, tables.logits(hidden, head), -jnp.inf)
        largest = vocabulary.maximum(logits.max(axis=-1))
        log_total = largest + jnp.log(vocabulary.total(jnp.exp(logits - largest[:, None]).sum(axis=-1)))
        is_target = targets[:, None] == words
        target_logit = vocabulary.total(jnp.where(is_target, logits, 0.0).sum(axis=-1))
        loss += vocabulary.own(weights * (log_total - target_logit)).sum()
        if not differentiate:
            return loss, None
        d_logits = weights[:, None] * (jnp.exp(logits - log_total[:, None]) - is_target)
        d_hidden = tables.input_gradient(d_logits.astype(hidden.dtype), head)
        return loss, vocabulary.scatter_sum(d_hidden).astype(hidden.dtype)

    loss, d_hidden = jax.lax.scan(step, jnp.float32(0), tuple(map(chunked, (hidden, targets, weights))))
    return loss, d_hidden if d_hidden is None else d_hidden.reshape(-1, width)[:tokens]
