"""Linear layers over frozen weights, with an optional adapter."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import quantization as formats
from models.lora import LayerRanks, LoRA, LoRAConfig
from models.parameters import Frozen
from models.placement import Fetch, Placement
from models.quantization import StoredWeight, can_merge, dequantize, merge


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def frozen_matmul(x: jax.Array, weight: StoredWeight, fetch: Fetch) -> jax.Array:
    """Return x [..., in] times the transpose of weight [out, in], without a gradient for the weight.

    The stored weight, as it lies on the device before `fetch`, is all that the backward pass keeps: left to
    automatic differentiation, every layer's dequantised matrix would stay alive as a residual.
    """
    return jnp.einsum("...i,oi->...o", x, dequantize(fetch(weight), x.dtype))


def _frozen_forward(x: jax.Array, weight: StoredWeight, fetch: Fetch) -> tuple[jax.Array, StoredWeight]:
    return frozen_matmul(x, weight, fetch), weight


def _frozen_backward(fetch: Fetch, weight: StoredWeight, gradient: jax.Array) -> tuple[jax.Array, Any]:
    fetched, gradient = _in_turn(fetch(weight), gradient)
    grad_x = jnp.einsum("...o,oi->...i", gradient, dequantize(fetched, gradient.dtype))
    return grad_x, jax.tree.map(_no_gradient, weight)


frozen_matmul.defvjp(_frozen_forward, _frozen_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def tuned_matmul(x: jax.Array, weight: StoredWeight, b: jax.Array, a: jax.Array, fetch: Fetch) -> jax.Array:
    """Return x [..., in] times the transpose of weight + b a, of a weight that `can_merge`.

    The sum [out, in] is made where it is used, in x's dtype, and again in the backward pass: one product takes the
    place of those with the weight, with a [r, in] and with b [out, r], forward and backward.
    """
    fetched, x = _in_turn(fetch(weight), x)
    return jnp.einsum("...i,oi->...o", x, merge(fetched, b, a))


def _tuned_forward(x: jax.Array, weight: StoredWeight, b: jax.Array, a: jax.Array, fetch: Fetch) -> tuple:
    return tuned_matmul(x, weight, b, a, fetch), (x, weight, b, a)


def _tuned_backward(fetch: Fetch, residuals: tuple, gradient: jax.Array) -> tuple[Any, ...]:
    x, weight, b, a = residuals
    fetched, gradient = _in_turn(fetch(weight), gradient)
    grad_x = jnp.einsum("...o,oi->...i", gradient, merge(fetched, b, a))
    low = jnp.einsum("...i,ri->...r", x, a)
    grad_low = jnp.einsum("...o,or->...r", gradient, b)
    grad_b = jnp.einsum("...o,...r->or", gradient, low)
    grad_a = jnp.einsum("...r,...i->ri", grad_low, x)
    return grad_x, jax.tree.map(_no_gradient, weight), grad_b, grad_a


tuned_matmul.defvjp(_tuned_forward, _tuned_backward)


def _in_turn(fetched: StoredWeight, operand: jax.Array) -> tuple[StoredWeight, jax.Array]:
    """Let a weight be dequantised no sooner than what it is multiplied with is there.

    XLA would otherwise share a layer's matrices between the forward pass that is computed again and the backward pass,
    or make those of a whole layer ahead, and so keep all of them at once.
    """
    return jax.lax.optimization_barrier((fetched, operand))


def _no_gradient(leaf: jax.Array) -> Any:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.zeros_like(leaf)
    return np.zeros(leaf.shape, jax.dtypes.float0)


class Linear(nnx.Module):
    """y = W x + b (+ the adapter's update), with W and b frozen."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        quantization: str,
        dtype: jnp.dtype,
        stack: tuple[int, ...],
        axes: tuple[str, str] = ("out", "hidden"),
    ):
        """Declare the weights [*stack, out, in].

        Args:
            in_features: columns of the matrix.
            out_features: rows of the matrix.
            bias: whether there is one.
            quantization: how the matrix is stored, see `models.quantization`.
            dtype: of plain arrays.
            stack: () for one layer, (L,) for L layers on a leading axis.
            axes: the logical axes of the matrix. Only "hidden" is never cut as an input.
        """
        shape, stack_axes = (out_features, in_features), ("layers",) * len(stack)
        self.weight = Frozen(
            formats.abstract(quantization, shape, stack, dtype),
            axes=formats.axes(quantization, shape, stack_axes, axes),
            matrix_axes=axes,
        )
        self.bias = (
            Frozen(jax.ShapeDtypeStruct((*stack, out_features), dtype), axes=(*stack_axes, axes[0])) if bias else None
        )
        self.adapter: LoRA | None = None
        self.in_features, self.out_features, self.stack, self.axes = in_features, out_features, stack, axes

    def add_adapter(self, config: LoRAConfig, stream: int, layer_ranks: LayerRanks | None = None) -> None:
        """Declare an adapter beside the frozen weight."""
        sizes = (self.in_features, self.out_features)
        self.adapter = nnx.data(LoRA(*sizes, config, self.stack, stream, self.axes, layer_ranks))

    def __call__(
        self, x: jax.Array, placement: Placement, dropout_keys: jax.Array | None, layer: jax.Array | int = 0
    ) -> jax.Array:
        """Apply to x [..., in]; the result [..., out] has x's dtype. Where a device has a part, so have both.

        `layer` is the layer's number in the whole model, where its adapter differs from the others'.
        """
        out_axis, in_axis = self.axes
        y = self._product(x, placement, dropout_keys, layer)
        if self.adapter is not None and self.adapter.lora_magnitude_vector is not None:
            weight = dequantize(placement.fetch(self.weight.get_value()), x.dtype)
            y = y * self.adapter.magnitude_factors(weight, placement, y.dtype, layer)
        if in_axis != "hidden":
            y = placement.leave(y)
        if self.bias is not None:
            y = y + placement.part(self.bias[...], out_axis, 0).astype(y.dtype)
        return y

    def _product(
        self, x: jax.Array, placement: Placement, dropout_keys: jax.Array | None, layer: jax.Array | int
    ) -> jax.Array:
        """Return W x + scale * B A x, without magnitudes and bias."""
        weight = self.weight.get_value()
        if self.adapter is None:
            return frozen_matmul(x, weight, placement.fetch)
        if self.adapter.drops(dropout_keys) or not can_merge(weight):
            return frozen_matmul(x, weight, placement.fetch) + self.adapter(x, placement, dropout_keys, layer)
        a, b = self.adapter.factors(placement, x.dtype, layer)
        return tuned_matmul(x, weight, b, a, placement.fetch)
