"""Keys and values that generation keeps of the tokens it has seen."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values [L, B, T, KV, D] of T slots a sequence; [B, T, KV, D] in the hands of a layer."""

    keys: jax.Array
    values: jax.Array

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, slots: int, dtype: jnp.dtype) -> "KVCache":
        """Return a cache of zeros for `batch` sequences of up to `slots` tokens."""
        shape = (config.num_layers, batch, slots, config.num_kv_heads, config.head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def write(self, keys: jax.Array, values: jax.Array, slot: jax.Array | int) -> "KVCache":
        """Put keys and values [B, Q, KV, D] of one layer into the Q slots from `slot` on."""
        return KVCache(
            jax.lax.dynamic_update_slice_in_dim(self.keys, keys.astype(self.keys.dtype), slot, axis=1),
            jax.lax.dynamic_update_slice_in_dim(self.values, values.astype(self.values.dtype), slot, axis=1),
        )
