"""The loop that continues sequences token by token, on one device or on several that hold parts of the weights."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from models import tables
from models.cache import KVCache
from models.llama import Llama
from models.placement import LOCAL, Placement
from sharding.group import ALONE, DeviceGroup

# What is carried from token to token: the index of the next one, int32 [B, max_new_tokens] of those chosen, the cache,
# bool [B], which sequences have ended, and whether any has not, on any device.
Carry = tuple[jax.Array, jax.Array, KVCache, jax.Array, jax.Array]


def decode(
    model: Llama,
    ends: tuple[int, ...],
    max_new_tokens: int,
    choose: Callable[[jax.Array, jax.Array | int], jax.Array],
    tokens: jax.Array,
    lengths: jax.Array,
    placement: Placement = LOCAL,
    group: DeviceGroup = ALONE,
) -> jax.Array:
    """Continue the prompts tokens [B, P], int32, of which the first `lengths` [B] are real.

    The prompt's tokens take the slots 0 to P - 1 (with unused ones behind short prompts), the new ones those from P
    on, so that all sequences write to the same slot.

    Args:
        model: with its parameters.
        ends: the tokens that end a sequence.
        max_new_tokens: tokens to add at most.
        choose: gives the next tokens int32 [B] for hidden states [B, hidden] and the index of the token.
        tokens: see above.
        lengths: see above.
        placement: reaches parameters that are spread over devices, each of which computes whole layers.
        group: the devices that have sequences of their own; all go on until the last of them is done.

    Returns:
        int32 [B, max_new_tokens]; what follows a sequence's end token is filled with end tokens.
    """
    batch, width = tokens.shape
    slots = jnp.arange(width + max_new_tokens)[None, :]  # [1, T]
    new_positions = lengths[:, None] + slots - width
    slot_positions = jnp.where(slots < lengths[:, None], slots, jnp.where(slots < width, -1, new_positions))  # [B, T]
    end_ids = jnp.array(ends, jnp.int32)

    def is_open(done: jax.Array) -> jax.Array:
        return group.total((~done).sum()) > 0

    def begin() -> Carry:
        cache = KVCache.empty(model.config, batch, width + max_new_tokens, model.dtype)
        positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
        hidden, cache = model.extend(tokens, positions, cache, 0, slot_positions, placement)
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]  # [B, hidden]
        first = choose(last, 0)
        out = jnp.full((batch, max_new_tokens), ends[0] if ends else 0, jnp.int32).at[:, 0].set(first)
        done = jnp.isin(first, end_ids)
        return jnp.int32(1), out, cache, done, is_open(done)

    def unfinished(carry: Carry) -> jax.Array:
        index, *_, goes_on = carry
        return (index < max_new_tokens) & goes_on

    def extend(carry: Carry) -> Carry:
        index, out, cache, done, _ = carry
        slot = width + index - 1
        last = jax.lax.dynamic_slice_in_dim(out, index - 1, 1, axis=1)  # [B, 1]
        positions = (lengths + index - 1)[:, None]
        hidden, cache = model.extend(last, positions, cache, slot, slot_positions, placement)
        chosen = jnp.where(done, out[:, index], choose(hidden[:, 0], index))
        done |= jnp.isin(chosen, end_ids)
        return index + 1, out.at[:, index].set(chosen), cache, done, is_open(done)

    return jax.lax.while_loop(unfinished, extend, begin())[1]


def next_tokens(model: Llama, hidden: jax.Array, weights: jax.Array, placement: Placement) -> jax.Array:
    """Return the likeliest tokens int32 [B] behind those of hidden [B, S, D] whose weight is 1 in weights [B, S]."""
    last = jnp.take_along_axis(hidden, weights.argmax(axis=1)[:, None, None], axis=1)[:, 0]  # [B, D]
    return likeliest(model, last, placement)


def likeliest(model: Llama, hidden: jax.Array, placement: Placement) -> jax.Array:
    """Return the words int32 [B] with the largest logits of hidden [B, D]; of equal ones the first."""
    vocabulary, terms = placement.vocabulary, model.head_terms(hidden, placement)
    words = vocabulary.words(terms[0].table.shape[0])
    logits = sum((tables.logits(vocabulary.gather(term.hidden), term.table) for term in terms), jnp.float32(0))
    logits = jnp.where(words >= 0, logits, -jnp.inf)
    largest, word = logits.max(axis=-1), words[logits.argmax(axis=-1)]
    best = vocabulary.maximum(largest)
    chosen = -vocabulary.maximum(jnp.where(largest == best, -word, -jnp.iinfo(jnp.int32).max))
    return vocabulary.own(chosen).astype(jnp.int32)
