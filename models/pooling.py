"""One vector for a whole sequence, from a decoder's last hidden states."""

from typing import Literal

import jax
import jax.numpy as jnp

Pooling = Literal["last", "mean"]
SMALLEST = 1e-12  # of a squared length, so that an empty sequence has the vector 0 and the gradient 0


def pooled(hidden: jax.Array, lengths: jax.Array, pooling: Pooling) -> jax.Array:
    """Return unit vectors, float32 [B, D], of hidden states [B, S, D] of which the first `lengths` [B] are real.

    Args:
        hidden: normalised last hidden states; sequences are padded at their ends.
        lengths: int32 [B]; a sequence of length 0 gets the vector 0.
        pooling: the last real token's, or the mean over all real ones.
    """
    real = jnp.arange(hidden.shape[1]) < lengths[:, None]  # [B, S]
    chosen = real if pooling == "mean" else real & (jnp.arange(hidden.shape[1]) == lengths[:, None] - 1)
    total = jnp.einsum("bs,bsd->bd", chosen.astype(jnp.float32), hidden.astype(jnp.float32))
    return total * jax.lax.rsqrt(jnp.maximum(jnp.sum(total * total, axis=-1, keepdims=True), SMALLEST))
