"""One decoder layer: norms, attention and the feed-forward block."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.config import ModelConfig
from models.linear import Linear
from models.parameters import Adapter, Frozen, trained
from models.placement import LOCAL, Placement
from models.rope import apply_rope

# Attends to q [B, Q, H, D], k and v [B, Q, KV, D] of the present tokens. The second result is whatever the caller
# wants to keep of the layer, stacked over layers: nothing in training, the extended cache in generation.
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}


@dataclass(frozen=True)
class LayerContext:
    """What a layer is called with beside its input; cos and sin are those of no rotation where it does not rotate."""

    cos: jax.Array  # [B, S, D/2]
    sin: jax.Array  # [B, S, D/2]
    attend: Attend
    placement: Placement
    dropout_keys: jax.Array | None
    layer: jax.Array | int = 0

    def apply(self, linear: Linear, x: jax.Array) -> jax.Array:
        """Run one of the layer's linear modules."""
        return linear(x, self.placement, self.dropout_keys, self.layer)


class RMSNorm(nnx.Module):
    """Root mean square normalisation (arXiv:1910.07467); statistics are float32 whatever the dtype."""

    def __init__(
        self, size: int, eps: float, stack: tuple[int, ...] = (), *, of_heads: bool = False, offset: float = 0.0
    ):
        """Declare it.

        Args:
            size: of the last axis.
            eps: added to the mean square.
            stack: () for one norm, (L,) for L layers.
            of_heads: whether each device normalises its own heads alone, where several compute a layer.
            offset: added to the weight.
        """
        axes = (*("layers",) * len(stack), "hidden")
        self.weight: Frozen | Adapter = Frozen(jax.ShapeDtypeStruct((*stack, size), jnp.float32), axes=axes)
        self.size, self.eps, self.stack, self.of_heads, self.offset = size, eps, stack, of_heads, offset

    def train_in_full(self) -> None:
        """Declare the weight as trained; the last norm's is a stack of one."""
        shape = (*(self.stack or (1,)), self.size)
        self.weight = Adapter(jax.ShapeDtypeStruct(shape, jnp.float32), axes=("layers", "flat"), whole=True)

    def __call__(self, x: jax.Array, placement: Placement = LOCAL) -> jax.Array:
        """Normalise x [..., hidden] over its last axis."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return ((self._weight(placement) + self.offset) * wide).astype(x.dtype)

    def _weight(self, placement: Placement) -> jax.Array:
        if isinstance(self.weight, Frozen):
            return self.weight[...]
        if not self.stack:
            return placement.alike(trained(self.weight, placement, jnp.float32))
        weight = placement.fetch(self.weight.get_value())
        return weight if self.of_heads else placement.alike(weight)


class SelfAttention(nnx.Module):
    """Grouped-query self attention with rotary positions."""

    def __init__(self, config: ModelConfig, linear: Callable[..., Linear], stack: tuple[int, ...]):
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        if config.fused:
            joint = heads + 2 * kv_heads
            self.qkv_proj = linear(config.hidden_size, joint, bias=config.qkv_bias, axes=("qkv", "hidden"))
        else:
            self.q_proj = linear(config.hidden_size, heads, bias=config.qkv_bias, axes=("heads", "hidden"))
            self.k_proj = linear(config.hidden_size, kv_heads, bias=config.qkv_bias, axes=("kv_heads", "hidden"))
            self.v_proj = linear(config.hidden_size, kv_heads, bias=config.qkv_bias, axes=("kv_heads", "hidden"))
        self.o_proj = linear(heads, config.hidden_size, bias=config.o_bias, axes=("hidden", "heads"))
        offset = float(config.gemma)
        norm = partial(RMSNorm, config.head_dim, config.rms_norm_eps, stack, of_heads=True, offset=offset)
        self.q_norm = norm() if config.qk_norm else None
        self.k_norm = norm() if config.qk_norm else None
        self.head_dim, self.group = config.head_dim, config.num_heads // config.num_kv_heads
        self.query_scale = config.query_scale

    def __call__(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, Any]:
        """Attend from x [B, S, hidden]; returns the same shape and what `attend` keeps."""
        x = context.placement.enter(x)
        q, k, v = (y.reshape(*x.shape[:-1], -1, self.head_dim) for y in self._project(x, context))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, context.placement), self.k_norm(k, context.placement)
        q = q if self.query_scale == 1 else q * jnp.asarray(self.query_scale, q.dtype)
        q = checkpoint_name(apply_rope(q, context.cos, context.sin), "query")  # [B, S, H, D]
        k = checkpoint_name(apply_rope(k, context.cos, context.sin), "key")  # [B, S, KV, D]
        v = checkpoint_name(v, "value")  # [B, S, KV, D]
        out, kept = context.attend(q, k, v)
        return context.apply(self.o_proj, out.reshape(*x.shape[:-1], -1)), kept

    def _project(self, x: jax.Array, context: LayerContext) -> Sequence[jax.Array]:
        """Return queries, keys and values [B, S, heads * D]."""
        if hasattr(self, "qkv_proj"):
            joint = context.apply(self.qkv_proj, x)
            kv = joint.shape[-1] // (self.group + 2)
            return jnp.split(joint, (self.group * kv, (self.group + 1) * kv), axis=-1)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return [context.apply(projection, x) for projection in projections]


class MLP(nnx.Module):
    """The SwiGLU feed-forward block (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, linear: Callable[..., Linear]):
        hidden, ffn, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        if config.fused:
            self.gate_up_proj = linear(hidden, 2 * ffn, bias=bias, axes=("gate_up", "hidden"))
        else:
            self.gate_proj = linear(hidden, ffn, bias=bias, axes=("ffn", "hidden"))
            self.up_proj = linear(hidden, ffn, bias=bias, axes=("ffn", "hidden"))
        self.down_proj = linear(ffn, hidden, bias=bias, axes=("hidden", "ffn"))
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:
        """Apply to x [B, S, hidden]."""
        x = context.placement.enter(x)
        if hasattr(self, "gate_up_proj"):
            gate, up = jnp.split(context.apply(self.gate_up_proj, x), 2, axis=-1)
        else:
            gate = context.apply(self.gate_proj, x)
            up = context.apply(self.up_proj, x)
        gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
        return context.apply(self.down_proj, self.activation(gate) * up)


class DecoderLayer(nnx.Module):
    """Attention and feed-forward block, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, *, quantization: str, dtype: jnp.dtype, stack: tuple[int, ...]):
        linear = partial(Linear, quantization=quantization, dtype=dtype, stack=stack)
        self.self_attn = SelfAttention(config, linear, stack)
        self.mlp = MLP(config, linear)
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps, stack, offset=float(config.gemma))
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm = norm() if config.gemma else None
        self.post_feedforward_layernorm = norm() if config.gemma else None

    def __call__(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, Any]:
        """Map x [B, S, hidden] to the same shape; also returns what `attend` keeps."""
        placement = context.placement
        attended, kept = self.self_attn(self.input_layernorm(x, placement), context)
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            x = checkpoint_name(x + attended, "residual")
            return x + self.mlp(self.post_attention_layernorm(x, placement), context), kept
        x = checkpoint_name(x + self.post_attention_layernorm(attended, placement), "residual")
        fed = self.mlp(self.pre_feedforward_layernorm(x, placement), context)
        return x + self.post_feedforward_layernorm(fed, placement), kept
