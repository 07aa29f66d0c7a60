"""Causal grouped-query attention: a portable flash attention, cuDNN's, and the plain formula.

Shapes, throughout: B sequences of S tokens, H query heads, KV key/value heads, G = H / KV query heads a key/value
head, D dimensions a head. Every kernel scales by 1/sqrt(D), and keeps scores and softmax statistics in float32.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

Arrays = tuple[jax.Array, ...]

KERNELS = ("reference", "chunked", "cudnn")

# Tokens a block of the chunked kernel: as many as keep a block's scores within bounds, whatever the batch.
LARGEST_BLOCK = 512
SMALLEST_BLOCK = 128
BLOCK_SCORES = 2**23  # 32 MiB of float32, of which a few exist at a time
BLOCK_MULTIPLE = 16  # suits the matrix units of GPUs

# A masked score. Finite, since (-inf) - (-inf) is NaN; below any score whose exponential matters.
MASKED = -1e30


@dataclass(frozen=True)
class Window:
    """How far back a layer's queries see; the layers of a scan may differ.

    Attributes:
        sizes: the windows that the model's layers have: tokens that a query sees, itself included; None is all.
        index: which of them this layer has, int32 [].
    """

    sizes: tuple[int | None, ...] = (None,)
    index: jax.Array | int = 0

    def limit(self, length: int) -> jax.Array | None:
        """Return the window, int32 [], for sequences of `length` tokens; None where no layer's window is shorter."""
        limits = [length if size is None else min(size, length) for size in self.sizes]
        return jnp.asarray(limits, jnp.int32)[self.index] if min(limits) < length else None


EVERYTHING = Window()


def choose_kernel(
    requested: str,
    platform: str,
    packing: bool,
    dtype: jax.typing.DTypeLike,
    head_dim: int,
    softcap: float | None = None,
) -> str:
    """Return the kernel to use: what was requested, or the fastest that applies where that is "auto".

    Args:
        requested: "auto" or one of KERNELS.
        platform: as `jax.Device.platform` names it: "cpu", "gpu" or "cuda".
        packing: whether a sequence holds several rows.
        dtype: of queries, keys and values.
        head_dim: size of a head.
        softcap: see `attention`.

    Raises:
        ValueError: an unknown kernel, or one that cannot do what is asked; says why.
    """
    if requested not in ("auto", *KERNELS):
        raise ValueError(f"attention {requested!r} is not known; accepted values: auto, {', '.join(KERNELS)}")
    obstacle = _cudnn_obstacle(platform, packing, dtype, head_dim)
    if softcap is not None and obstacle is None:
        obstacle = "it does not cap scores, as this model does"
    if requested == "auto":
        return "cudnn" if obstacle is None else "chunked"
    if requested == "cudnn" and obstacle is not None:
        raise ValueError(f"attention 'cudnn' cannot be used: {obstacle}; choose 'auto' or 'chunked'")
    return requested


def _cudnn_obstacle(platform: str, packing: bool, dtype: jax.typing.DTypeLike, head_dim: int) -> str | None:
    """Return why cuDNN's attention cannot be used, None if it can."""
    if platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, and the platform is {platform!r}"
    if packing:
        return "JAX's interface to it takes no segment ids, so packed rows would see each other"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, and the dtype is {jnp.dtype(dtype).name}"
    if head_dim % 8 or head_dim > 128:
        return f"it takes a head_dim that is a multiple of 8 and at most 128, and the model's is {head_dim}"
    return None


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segment_ids: jax.Array | None,
    kernel: str,
    window: Window = EVERYTHING,
    softcap: float | None = None,
) -> jax.Array:
    """Attend causally, each row of a packed sequence by itself.

    The chunked kernel gives its output and its softmax statistics the checkpoint names "attention_output" and
    "attention_statistics": a remat policy that saves both spares the backward pass a second forward pass.

    Args:
        q: [B, S, H, D].
        k: [B, S, KV, D].
        v: [B, S, KV, D].
        segment_ids: int32 [B, S]: a token sees the earlier tokens of its own segment, and itself. Padding is a
            segment like any other. None where each sequence is one row (padding at its end is then unseen).
        kernel: one of KERNELS.
        window: how far back a token sees.
        softcap: scaled scores s become softcap * tanh(s / softcap), as in Gemma 2.

    Returns:
        [B, S, H, D] in q.dtype.

    Raises:
        ValueError: segment ids with a kernel that takes none, or an unknown kernel.
    """
    if kernel == "chunked":
        return _chunked(q, k, v, segment_ids, window.limit(q.shape[1]), softcap)
    if kernel == "reference":
        return _reference(q, k, v, segment_ids, window.limit(q.shape[1]), softcap)
    if kernel == "cudnn":
        if segment_ids is not None:
            raise ValueError("attention kernel 'cudnn' takes no segment_ids; use 'chunked' for packed rows")
        if softcap is not None:
            raise ValueError("attention kernel 'cudnn' does not cap scores; use 'chunked'")
        return jax.lax.switch(window.index, [functools.partial(_cudnn, size) for size in window.sizes], q, k, v)
    raise ValueError(f"attention kernel {kernel!r} is not known; accepted values: {', '.join(KERNELS)}")


def decode_attention(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, valid: jax.Array, softcap: float | None = None
) -> jax.Array:
    """Attend from a few new tokens to a cache. Scores [B, H, Q, T] are materialised.

    Args:
        q: [B, Q, H, D].
        k_cache: [B, T, KV, D].
        v_cache: [B, T, KV, D].
        valid: bool [B, T], the cache entries that all queries see, or [B, Q, T], those that each sees. A query
            that sees none gets zeros.
        softcap: see `attention`.

    Returns:
        [B, Q, H, D] in q.dtype.
    """
    mask = valid[:, None, :] if valid.ndim == 2 else valid
    return _materialised(q, k_cache, v_cache, mask, softcap)


def _cudnn(window: int | None, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    seen = None if window is None else (window - 1, 0)  # tokens before and after, without itself
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=seen, implementation="cudnn")


def _reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    window: jax.Array | None,
    softcap: float | None,
) -> jax.Array:
    order = jnp.arange(q.shape[1])
    mask = (order[:, None] >= order)[None]  # [1, S, S]
    if window is not None:
        mask &= order[:, None] - order < window
    if segment_ids is not None:
        mask &= segment_ids[:, :, None] == segment_ids[:, None, :]
    return _materialised(q, k, v, mask, softcap)


def _materialised(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, softcap: float | None) -> jax.Array:
    """Softmax attention of q [B, Q, H, D] over k and v [B, T, KV, D] where mask [B, Q, T] is true."""
    mask = mask[:, None, :, None, :]
    scores = jnp.where(mask, _capped(_scores(_group_heads(q, k), k), softcap), MASKED)  # [B, KV, Q, G, T]
    weights = jnp.where(mask, jax.nn.softmax(scores, axis=-1), 0.0).astype(v.dtype)
    return _einsum("bkqgt,btkd->bqkgd", weights, v).astype(q.dtype).reshape(q.shape)


def _group_heads(x: jax.Array, k: jax.Array) -> jax.Array:
    """[B, S, H, D] -> [B, S, KV, G, D]: G consecutive query heads share a key/value head, which is never repeated."""
    return x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[-1])


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """Scaled scores, float32 [B, KV, Q, G, T], of q [B, Q, KV, G, D] and k [B, T, KV, D]."""
    return _einsum("bqkgd,btkd->bkqgt", q, k) / math.sqrt(q.shape[-1])


def _capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


# Flash attention (arXiv:2205.14135, arXiv:2307.08691): one loop over pairs of a query block and a key block.


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    window: jax.Array | None,
    softcap: float | None,
) -> jax.Array:
    return _chunked_forward(q, k, v, segment_ids, window, softcap)[0]


def _chunked_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    window: jax.Array | None,
    softcap: float | None,
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    """Return the output, and what the backward pass needs: the inputs, the output and log(sum(exp(scores)))."""
    blocks = _Blocks.of(q, segment_ids, window, softcap)
    queries, keys, values = blocks.pad(_group_heads(q, k)), blocks.pad(k), blocks.pad(v)

    def attend(i: jax.Array, j: jax.Array, carry: Arrays) -> Arrays:
        out, maximum, total = carry  # [B, S, KV, G, D], [B, KV, S, G] twice
        scores, _, _ = blocks.scores(queries, keys, i, j)  # [B, KV, Q, G, T]
        old_maximum = blocks.take(maximum, i, axis=2)
        new_maximum = jnp.maximum(old_maximum, scores.max(axis=-1))
        # While a query has met masked keys alone, these are ones of no meaning. The first key that it does see,
        # itself at the latest, multiplies what they summed up to by an exact 0.
        weights = jnp.exp(scores - new_maximum[..., None])
        shrink = jnp.exp(old_maximum - new_maximum)  # [B, KV, Q, G]
        attended = _einsum("bkqgt,btkd->bqkgd", weights.astype(v.dtype), blocks.take(values, j))
        out_i = blocks.take(out, i) * shrink.swapaxes(1, 2)[..., None] + attended
        total_i = blocks.take(total, i, axis=2) * shrink + weights.sum(axis=-1)
        return blocks.put(out, out_i, i), blocks.put(maximum, new_maximum, i, axis=2), blocks.put(total, total_i, i, 2)

    b, s, kv, g, d = queries.shape
    start = jnp.zeros((b, s, kv, g, d)), jnp.full((b, kv, s, g), MASKED), jnp.zeros((b, kv, s, g))
    out, maximum, total = blocks.for_each_pair(attend, start)
    out = (out / total.swapaxes(1, 2)[..., None]).astype(q.dtype)[:, : q.shape[1]].reshape(q.shape)
    out = checkpoint_name(out, "attention_output")
    log_total = checkpoint_name(maximum + jnp.log(total), "attention_statistics")
    return out, (q, k, v, segment_ids, window, out, log_total)


def _chunked_backward(
    softcap: float | None, residuals: tuple[jax.Array, ...], d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    """Compute each pair's weights again, and the gradients from them."""
    q, k, v, segment_ids, window, out, log_total = residuals
    blocks = _Blocks.of(q, segment_ids, window, softcap)
    queries, keys, values = blocks.pad(_group_heads(q, k)), blocks.pad(k), blocks.pad(v)
    # With p = softmax(s): ds = p (dp - shift), shift = sum_t p_t dp_t = d_out . out.
    shift = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    shift = blocks.pad(_group_heads(shift, k))[..., 0].swapaxes(1, 2)  # [B, KV, S, G]
    d_out = blocks.pad(_group_heads(d_out, k))

    def differentiate(i: jax.Array, j: jax.Array, carry: Arrays) -> Arrays:
        dq, dk, dv = carry
        scores, q_i, k_j = blocks.scores(queries, keys, i, j)
        weights = jnp.exp(scores - blocks.take(log_total, i, axis=2)[..., None])  # [B, KV, Q, G, T]
        d_out_i = blocks.take(d_out, i)
        d_weights = _einsum("bqkgd,btkd->bkqgt", d_out_i, blocks.take(values, j))
        d_scores = weights * (d_weights - blocks.take(shift, i, axis=2)[..., None]) / math.sqrt(q.shape[-1])
        if softcap is not None:  # masked scores, whose weights are zeros, lie far below
            d_scores = d_scores * (1 - jnp.square(jnp.maximum(scores / softcap, -1)))
        d_scores = d_scores.astype(q.dtype)
        dq = blocks.put(dq, blocks.take(dq, i) + _einsum("bkqgt,btkd->bqkgd", d_scores, k_j), i)
        dk = blocks.put(dk, blocks.take(dk, j) + _einsum("bkqgt,bqkgd->btkd", d_scores, q_i), j)
        dv = blocks.put(dv, blocks.take(dv, j) + _einsum("bkqgt,bqkgd->btkd", weights.astype(v.dtype), d_out_i), j)
        return dq, dk, dv

    start = jnp.zeros(queries.shape), jnp.zeros(keys.shape), jnp.zeros(values.shape)
    dq, dk, dv = (gradient[:, : q.shape[1]] for gradient in blocks.for_each_pair(differentiate, start))
    return dq.astype(q.dtype).reshape(q.shape), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


@dataclass(frozen=True)
class _Blocks:
    """A sequence cut into `count` blocks of `size` tokens, the last one padded."""

    size: int
    count: int
    segment_ids: jax.Array | None  # [B, count * size]
    window: jax.Array | None  # []
    softcap: float | None = None

    @classmethod
    def of(
        cls, q: jax.Array, segment_ids: jax.Array | None, window: jax.Array | None, softcap: float | None = None
    ) -> "_Blocks":
        batch, length, heads, _ = q.shape
        largest = LARGEST_BLOCK
        while largest > SMALLEST_BLOCK and batch * heads * largest**2 > BLOCK_SCORES:
            largest //= 2
        count = math.ceil(length / largest)
        size = length if count == 1 else BLOCK_MULTIPLE * math.ceil(length / count / BLOCK_MULTIPLE)
        unpadded = cls(size, count, segment_ids, window, softcap)
        return cls(size, count, None if segment_ids is None else unpadded.pad(segment_ids), window, softcap)

    def pad(self, x: jax.Array) -> jax.Array:
        """Pad [B, S, ...] with zeros. What a padded query gives is cut off, and causality hides a padded key."""
        missing = self.count * self.size - x.shape[1]
        return jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)]) if missing else x

    def take(self, x: jax.Array, i: jax.Array, axis: int = 1) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, i * self.size, self.size, axis)

    def put(self, x: jax.Array, block: jax.Array, i: jax.Array, axis: int = 1) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, block, i * self.size, axis)

    def for_each_pair(self, step: Callable[[jax.Array, jax.Array, Arrays], Arrays], carry: Arrays) -> Arrays:
        """Run `step` on each pair (query block i, key block j) that has anything to attend to, row by row.

        Above the diagonal nothing has. With segments, the pairs that hold no common one are left out too, and with a
        window those that lie too far apart.
        """
        i, j = (jnp.asarray(index) for index in np.tril_indices(self.count))
        number: int | jax.Array = len(i)
        needed: jax.Array | None = None
        if self.window is not None and self.count > 1:
            needed = (i - j) * self.size - (self.size - 1) < self.window
        if self.segment_ids is not None and self.count > 1:
            # Padding, segment 0 at the end, is renumbered so that a block's segments lie close together.
            ids = jnp.where(self.segment_ids == 0, jnp.iinfo(jnp.int32).max, self.segment_ids)
            ids = ids.reshape(-1, self.count, self.size)
            first, last = ids.min(axis=-1), ids.max(axis=-1)  # [B, count]
            shared = jnp.any((first[:, i] <= last[:, j]) & (first[:, j] <= last[:, i]), axis=0)
            needed = shared if needed is None else needed & shared
        if needed is not None:
            order = jnp.argsort(~needed, stable=True)
            i, j, number = i[order], j[order], needed.sum()
        return lax.fori_loop(0, number, lambda n, carry: step(i[n], j[n], carry), carry)

    def scores(
        self, queries: jax.Array, keys: jax.Array, i: jax.Array, j: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the masked scores [B, KV, Q, G, T] of a pair, and its queries and keys."""
        # Without the barrier the mask depends on nothing but the loop's counter, and JAX's partial evaluation
        # would compute the masks of all pairs ahead of the loop and keep them: the S x S mask after all.
        i, j, q_i, k_j = lax.optimization_barrier((i, j, self.take(queries, i), self.take(keys, j)))
        order = jnp.arange(self.size)
        distance = (i * self.size + order)[:, None] - (j * self.size + order)  # [Q, T]
        mask = (distance >= 0)[None]
        if self.window is not None:
            mask &= distance < self.window
        if self.segment_ids is not None:
            mask &= self.take(self.segment_ids, i)[:, :, None] == self.take(self.segment_ids, j)[:, None, :]
        return jnp.where(mask[:, None, :, None, :], _capped(_scores(q_i, k_j), self.softcap), MASKED), q_i, k_j
