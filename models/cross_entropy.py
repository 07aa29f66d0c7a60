"""Cross entropy of a language model's head, a few tokens at a time: logits [T, V] never exist."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from models import tables
from models.tables import Table
from models.vocabulary import WHOLE_VOCABULARY, Vocabulary

CHUNK_TOKENS = 256  # float32 logits of 256 tokens over 128,256 words take 125 MiB


Hidden = jax.Array | Sequence[jax.Array]
Heads = Table | Sequence[Table]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def cross_entropy_sum(
    hidden: Hidden,
    head: Heads,
    targets: jax.Array,
    weights: jax.Array,
    chunk_tokens: int = CHUNK_TOKENS,
    vocabulary: Vocabulary = WHOLE_VOCABULARY,
    trained: tuple[bool, ...] = (False,),
    softcap: float | None = None,
) -> jax.Array:
    """Return the weighted sum over tokens of -log softmax(logits)[target], where logits are hidden @ head.T.

    Hidden gets a gradient, a head only where it is trained, the other arguments get zeros. Where the call is
    differentiated, each chunk's gradient is computed beside its loss, so that no logits are computed twice; it is
    kept in hidden.dtype, a head's in float32. Matrix products take operands in hidden.dtype and accumulate in float32,
    in which the logits and all statistics are.

    Args:
        hidden: [T, D]; or several such arrays, for logits that are the sum of their products with as many heads.
        head: [V, D], or the rows of it that this device holds; or several.
        targets: int32 [T], below V also where the weight is 0.
        weights: float32 [T], 0 for a token that is not supervised.
        chunk_tokens: most tokens of a device whose logits exist at a time.
        vocabulary: reaches the other devices that hold rows of the head; T is the same on all of them.
        trained: for each head whether it gets a gradient, which is summed over the tokens of those devices.
        softcap: logits become softcap * tanh(logits / softcap), as in Gemma 2.

    Returns:
        The sum over this device's tokens, float32; 0 where all weights are. The caller divides by the sum of weights.
    """
    return _over_chunks(hidden, head, targets, weights, chunk_tokens, vocabulary, trained, softcap, False)[0]


def _forward(
    hidden: Hidden,
    head: Heads,
    targets: jax.Array,
    weights: jax.Array,
    chunk_tokens: int,
    vocabulary: Vocabulary,
    trained: tuple[bool, ...],
    softcap: float | None,
) -> tuple[jax.Array, tuple[Any, Any]]:
    loss, *gradients = _over_chunks(hidden, head, targets, weights, chunk_tokens, vocabulary, trained, softcap, True)
    d_hidden, d_head = gradients
    return loss, (_like(hidden, d_hidden), _like(head, d_head))


def _like(arguments: Any, gradients: Any) -> Any:
    """Make the gradients of several arguments a sequence of their type."""
    return type(arguments)(gradients) if isinstance(gradients, list) else gradients


def _backward(
    chunk_tokens: int,
    vocabulary: Vocabulary,
    trained: tuple[bool, ...],
    softcap: float | None,
    gradients: tuple[Any, Any],
    d_loss: jax.Array,
) -> tuple[Any, Any, None, None]:
    d_hidden, d_head = jax.tree.map(lambda gradient: (gradient * d_loss).astype(gradient.dtype), gradients)
    return d_hidden, d_head, None, None


cross_entropy_sum.defvjp(_forward, _backward)


def _over_chunks(
    hidden: Hidden,
    head: Heads,
    targets: jax.Array,
    weights: jax.Array,
    chunk_tokens: int,
    vocabulary: Vocabulary,
    trained: tuple[bool, ...],
    softcap: float | None,
    differentiate: bool,
) -> tuple[jax.Array, Any, Any]:
    """Return the loss, and its gradients for `hidden` and `head`, shaped as these, if asked for."""
    several = isinstance(hidden, list | tuple)
    inputs: list[jax.Array] = list(hidden) if several else [hidden]  # type: ignore[list-item]
    heads: list[Table] = list(head) if several else [head]  # type: ignore[list-item, arg-type]
    tokens = len(targets)
    words = vocabulary.words(heads[0].shape[0])
    count = max(1, math.ceil(tokens / chunk_tokens))
    size = math.ceil(tokens / count)

    def chunked(x: jax.Array) -> jax.Array:
        padding = [(0, count * size - tokens), *[(0, 0)] * (x.ndim - 1)]  # padded tokens have weight 0
        return jnp.pad(x, padding).reshape(count, size, *x.shape[1:])

    def step(carry: tuple, chunk: tuple) -> tuple[tuple, list[jax.Array] | None]:
        loss, d_heads = carry
        inputs, targets, weights = jax.tree.map(vocabulary.gather, chunk)
        logits = functools.reduce(operator.add, map(tables.logits, inputs, heads))
        bent = None
        if softcap is not None:
            bent = jnp.tanh(logits / softcap)
            logits = softcap * bent
        logits = jnp.where(words >= 0, logits, -jnp.inf)
        largest = vocabulary.maximum(logits.max(axis=-1))
        log_total = largest + jnp.log(vocabulary.total(jnp.exp(logits - largest[:, None]).sum(axis=-1)))
        is_target = targets[:, None] == words
        target_logit = vocabulary.total(jnp.where(is_target, logits, 0.0).sum(axis=-1))
        loss += vocabulary.own(weights * (log_total - target_logit)).sum()
        if not differentiate:
            return (loss, d_heads), None
        d_logits = weights[:, None] * (jnp.exp(logits - log_total[:, None]) - is_target)
        d_logits = d_logits if bent is None else d_logits * (1 - bent * bent)
        d_heads = [
            d_head if d_head is None else d_head + _head_gradient(d_logits, x)
            for d_head, x in zip(d_heads, inputs, strict=True)
        ]
        d_inputs = [
            vocabulary.scatter_sum(tables.input_gradient(d_logits.astype(x.dtype), table)).astype(x.dtype)
            for x, table in zip(inputs, heads, strict=True)
        ]
        return (loss, d_heads), d_inputs

    d_heads = [
        jnp.zeros(table.shape, jnp.float32) if differentiate and is_trained else None
        for table, is_trained in zip(heads, trained, strict=True)
    ]
    chunks = ([chunked(x) for x in inputs], chunked(targets), chunked(weights))
    (loss, d_heads), d_inputs = jax.lax.scan(step, (jnp.float32(0), d_heads), chunks)
    if d_inputs is None:
        return loss, None, None
    d_inputs = [d.reshape(-1, d.shape[-1])[:tokens] for d in d_inputs]
    return (loss, d_inputs, d_heads) if several else (loss, d_inputs[0], d_heads[0])


def _head_gradient(d_logits: jax.Array, hidden: jax.Array) -> jax.Array:
    """Return the gradient float32 [V, D] of a head."""
    return jnp.einsum("tv,td->vd", d_logits.astype(hidden.dtype), hidden, preferred_element_type=jnp.float32)
