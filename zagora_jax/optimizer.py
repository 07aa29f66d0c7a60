"""AdamW with float32 or 8-bit moments, and learning-rate schedules, as optax transformations.

The 8-bit form stores what bitsandbytes' AdamW8bit stores for each layer's own tensor (Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", arXiv:2110.02861): moments in blocks of 256 on the dynamic maps.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from models.quantization import dynamic
from zagora_jax.errors import UserError

OPTIMIZERS = ("adamw", "adamw_8bit")
SCHEDULES = ("constant", "linear", "cosine")

# bitsandbytes keeps the moments of smaller tensors in float32 (its `min_8bit_size`).
SMALLEST_QUANTIZED = 4096


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "absmax"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class QuantizedMoment:
    """One moment of a stacked parameter [L, ...], each layer's slice flattened and padded to blocks of 256.

    Attributes:
        codes: uint8[L, blocks * 256], indices into the dynamic map.
        absmax: float32[L, blocks], the largest magnitude of each block.
    """

    codes: jax.Array
    absmax: jax.Array


class ScaleByAdam8bitState(NamedTuple):
    """State of `scale_by_adam_8bit`: for each parameter a QuantizedMoment, or a float32 array where it is small."""

    steps: jax.Array  # int32[], taken so far
    mu: Any
    nu: Any


def make_optimizer(
    name: str,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Return the optimizer `name`, one of OPTIMIZERS.

    Raises:
        UserError: There is no optimizer of that name.
    """
    makers = {"adamw": adamw, "adamw_8bit": adamw_8bit}
    if name not in makers:
        raise UserError(f"optimizer: expected one of {', '.join(OPTIMIZERS)}, found {name!r}")
    return makers[name](learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)


def make_schedule(name: str, learning_rate: float, warmup_steps: int, total_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the steps taken, the same as transformers' schedules of these names.

    The rate rises linearly from 0 to `learning_rate` over `warmup_steps` (so the first step of a warm-up changes
    nothing), then stays, or falls to 0 at `total_steps` along a line or half a cosine.

    Raises:
        UserError: There is no schedule of that name, or the warm-up does not fit in the run.
    """
    if name not in SCHEDULES:
        raise UserError(f"schedule: expected one of {', '.join(SCHEDULES)}, found {name!r}")
    if not 0 <= warmup_steps <= total_steps:
        raise UserError(
            f"warmup-steps: expected 0 to the run's {total_steps} optimizer steps, found {warmup_steps}; "
            "lower warmup-steps or train for longer"
        )
    decay_steps = max(1, total_steps - warmup_steps)
    main = {
        "constant": lambda: optax.constant_schedule(learning_rate),
        "linear": lambda: optax.linear_schedule(learning_rate, 0.0, decay_steps),
        "cosine": lambda: optax.cosine_decay_schedule(learning_rate, decay_steps),
    }[name]()
    if warmup_steps == 0:
        return main
    warmup = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules([warmup, main], [warmup_steps])


def adamw(
    learning_rate: optax.ScalarOrSchedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float
) -> optax.GradientTransformation:
    """Return AdamW (Loshchilov and Hutter, arXiv:1711.05101) with float32 moments."""
    return optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mu_dtype=jnp.float32)


def adamw_8bit(
    learning_rate: optax.ScalarOrSchedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float
) -> optax.GradientTransformation:
    """Return AdamW with 8-bit moments, equal to bitsandbytes' AdamW8bit on a CPU up to float32 rounding.

    The first axis of every parameter is the layer axis; each layer's slice has its own blocks, and slices of fewer
    than 4,096 elements keep float32 moments.
    """
    return optax.chain(
        scale_by_adam_8bit(b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def scale_by_adam_8bit(*, b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Return Adam's rescaling of the gradient, with 8-bit moments. Its state is a ScaleByAdam8bitState."""

    def zeros(params: optax.Params, *, signed: bool) -> Any:
        def zero(parameter: jax.Array) -> Any:
            moment = jnp.zeros(parameter.shape, jnp.float32)
            return _quantize(moment, signed=signed) if _is_large(parameter.shape) else moment

        return jax.tree.map(zero, params)

    def init(params: optax.Params) -> ScaleByAdam8bitState:
        return ScaleByAdam8bitState(jnp.zeros([], jnp.int32), zeros(params, signed=True), zeros(params, signed=False))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdam8bitState]:
        del params
        assert isinstance(state, ScaleByAdam8bitState)
        steps = optax.safe_increment(state.steps)
        correction1 = _one_minus_power(b1, steps)
        correction2 = jnp.sqrt(_one_minus_power(b2, steps))

        def first_moment(gradient: jax.Array, stored: Any) -> jax.Array:
            gradient = gradient.astype(jnp.float32)
            return b1 * _load(stored, gradient.shape, signed=True) + (1 - b1) * gradient

        def second_moment(gradient: jax.Array, stored: Any) -> jax.Array:
            gradient = gradient.astype(jnp.float32)
            return b2 * _load(stored, gradient.shape, signed=False) + (1 - b2) * gradient * gradient

        def direction(gradient: jax.Array, mu: jax.Array, nu: jax.Array) -> jax.Array:
            return (mu / (jnp.sqrt(nu) / correction2 + eps) / correction1).astype(gradient.dtype)

        mu = jax.tree.map(first_moment, updates, state.mu)
        nu = jax.tree.map(second_moment, updates, state.nu)
        # The parameters move by the exact moments; only what is kept for the next step is rounded.
        directions = jax.tree.map(direction, updates, mu, nu)
        stored_mu = jax.tree.map(functools.partial(_store, signed=True), mu, state.mu)
        stored_nu = jax.tree.map(functools.partial(_store, signed=False), nu, state.nu)
        return directions, ScaleByAdam8bitState(steps, stored_mu, stored_nu)

    return optax.GradientTransformation(init, update)


def _store(moment: jax.Array, before: QuantizedMoment | jax.Array, *, signed: bool) -> QuantizedMoment | jax.Array:
    """Store a moment [L, ...] as it was stored `before`."""
    return _quantize(moment, signed=signed) if isinstance(before, QuantizedMoment) else moment


def _quantize(moment: jax.Array, *, signed: bool) -> QuantizedMoment:
    """Quantise a moment [L, ...] layer by layer."""
    codes, absmax = dynamic.quantize(dynamic.pad_to_blocks(moment.reshape(moment.shape[0], -1)), signed=signed)
    return QuantizedMoment(codes, absmax)


def _load(stored: QuantizedMoment | jax.Array, shape: chex.Shape, *, signed: bool) -> jax.Array:
    """Return a stored moment as float32 of `shape` [L, ...]."""
    if not isinstance(stored, QuantizedMoment):
        return stored
    moment = dynamic.dequantize(stored.codes, stored.absmax, signed=signed)
    return moment[:, : math.prod(shape[1:])].reshape(shape)


def _is_large(shape: chex.Shape) -> bool:
    return math.prod(shape[1:]) >= SMALLEST_QUANTIZED


def _one_minus_power(base: float, count: jax.Array) -> jax.Array:
    """Return 1 - base**count; in float32 that difference itself would be wrong by 1e-5 for 0.999 and small counts."""
    return -jnp.expm1(count.astype(jnp.float32) * (math.log(base) if base else -math.inf))
