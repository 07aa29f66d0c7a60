"""Rotary position embedding (arXiv:2104.09864) and its context extensions, as Hugging Face's Llama computes them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# What each rope type must find in config.json beside its name.
REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True)
class RopeConfig:
    """How positions become rotation angles. Hashable, so it can be static under jit.

    Attributes:
        rope_type: a key of REQUIRED.
        head_dim: size of a head; head_dim/2 pairs of dimensions are rotated.
        theta: base of the wavelengths.
        factor: how many times the context is extended.
        context: positions that the model was made for before the extension.
        low_freq_factor, high_freq_factor: llama3's borders, as `context` / wavelength.
        beta_slow, beta_fast: yarn's borders, in rotations within `context`.
        truncate: whether yarn rounds its borders to whole dimensions.
        attention_scaling: factor on cosines and sines.
    """

    rope_type: str
    head_dim: int
    theta: float = 10000.0
    factor: float = 1.0
    context: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    truncate: bool = True
    attention_scaling: float = 1.0

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any], head_dim: int, max_positions: int) -> "RopeConfig":
        """Read the rotary settings of a config.json.

        Takes `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters`. A null counts as absent.

        Args:
            hf_config: the content of config.json.
            head_dim: size of a head.
            max_positions: the model's max_position_embeddings.

        Raises:
            ValueError: an unknown rope type, a missing, impossible or contradictory setting; names the field.
        """
        settings = _Settings(hf_config)
        rope_type = settings.rope_type()
        if head_dim % 2 or (rope_type == "dynamic" and head_dim < 4):
            raise ValueError(f"config.json: head_dim {head_dim} cannot be rotated by rope type {rope_type!r}")
        values: dict[str, Any] = {key: settings.number(key) for key in REQUIRED[rope_type]}
        values["theta"] = settings.number("rope_theta", 10000.0)
        values["context"] = max_positions
        if rope_type in ("llama3", "yarn"):
            values["context"] = int(settings.number("original_max_position_embeddings", max_positions))
        if rope_type == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
            raise ValueError(
                f"{settings.name('high_freq_factor')} must be greater than low_freq_factor "
                f"{values['low_freq_factor']}, found {values['high_freq_factor']}"
            )
        if rope_type == "yarn":
            values["beta_slow"] = settings.number("beta_slow", 1.0)
            values["beta_fast"] = settings.number("beta_fast", 32.0)
            values["truncate"] = settings.flag("truncate", True)
            values["attention_scaling"] = _yarn_attention_scaling(settings, values["factor"])
        return cls(rope_type, head_dim, **values)

    def inverse_frequencies(self) -> np.ndarray:
        """Return float32 [head_dim/2], radians a position; for "dynamic" those within its context.

        Formulas of transformers' `modeling_rope_utils`, in float32 as there. An angle is a position times a
        frequency, so an error of the last bit grows with the position: the power is rounded correctly, since
        NumPy's own float32 power is not.
        """
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        wavelengths = np.power(self.theta, exponents.astype(np.float64)).astype(np.float32)  # over 2 pi
        frequencies = np.float32(1) / wavelengths
        if self.rope_type == "linear":
            return frequencies / np.float32(self.factor)
        if self.rope_type == "llama3":
            return self._llama3(frequencies)
        if self.rope_type == "yarn":
            return self._yarn(wavelengths)
        return frequencies

    def _llama3(self, frequencies: np.ndarray) -> np.ndarray:
        """Divide long wavelengths by `factor`, keep short ones, and blend between (Llama 3.1)."""
        wavelengths = np.float32(2 * math.pi) / frequencies
        turns = np.float32(self.context) / wavelengths
        kept = (turns - np.float32(self.low_freq_factor)) / np.float32(self.high_freq_factor - self.low_freq_factor)
        divided = frequencies / np.float32(self.factor)
        blended = (1 - kept) * frequencies / np.float32(self.factor) + kept * frequencies
        long = wavelengths > self.context / self.low_freq_factor
        short = wavelengths < self.context / self.high_freq_factor
        return np.where(long, divided, np.where(short, frequencies, blended))

    def _yarn(self, wavelengths: np.ndarray) -> np.ndarray:
        """Interpolate slow dimensions, extrapolate fast ones, with a linear ramp between (arXiv:2309.00071)."""

        def dimension(rotations: float) -> float:
            turns = self.context / (rotations * 2 * math.pi)
            return self.head_dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        if low == high:
            high += 0.001  # as transformers does: no division by zero
        ramp = (np.arange(self.head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
        extrapolated = 1 - np.clip(ramp, 0, 1)
        interpolated = 1 / (np.float32(self.factor) * wavelengths)
        return interpolated * (1 - extrapolated) + 1 / wavelengths * extrapolated


def rope_tables(
    positions: jax.Array,
    rope: RopeConfig,
    segment_ids: jax.Array | None = None,
    length: jax.Array | int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines of the rotation angles, with the attention scaling in them.

    The "dynamic" type alone looks at lengths: beyond the model's context it lowers the frequencies, the more the
    longer the row is. A row's length is its greatest position + 1, so that a packed row is independent of its
    neighbours and gets what it would get alone; this is transformers' rule for a single sequence, decoding with a
    cache included (where the row's positions are those of the present tokens).

    Args:
        positions: int32 [B, S], from 0 in every row.
        rope: the settings.
        segment_ids: int32 [B, S], at most S, which row of the packed sequence a token belongs to; None where each
            sequence is one row (give padding at its end the position 0).
        length: int32 [B] or scalar, overrides the rows' own lengths for "dynamic", where the caller knows
            better: for example the final length of a generation, so that all keys in a cache agree.

    Returns:
        (cos, sin), float32 [B, S, head_dim/2].
    """
    frequencies = jnp.asarray(rope.inverse_frequencies())  # [D/2]
    if rope.rope_type == "dynamic":
        lengths = _row_lengths(positions, segment_ids) if length is None else jnp.reshape(length, (-1, 1))
        frequencies = _stretch(frequencies, lengths, rope)  # [B, S or 1, D/2]
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * rope.attention_scaling, jnp.sin(angles) * rope.attention_scaling


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [B, S, H, D] by the angles of cos and sin [B, S, D/2], computed in float32, returned in x.dtype.

    Dimension i turns with dimension i + D/2 (Hugging Face's half-split order, not the interleaved one of Meta's
    own files and of GGUF).
    """
    cos, sin = cos[:, :, None], sin[:, :, None]  # [B, S, 1, D/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _row_lengths(positions: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Return each token's row length, int32 [B, S], or [B, 1] where each sequence is one row."""
    if segment_ids is None:
        return positions.max(axis=1, keepdims=True) + 1

    def of_sequence(positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        last = jax.ops.segment_max(positions, segment_ids, num_segments=positions.size + 1)
        return last[segment_ids] + 1

    return jax.vmap(of_sequence)(positions, segment_ids)


def _stretch(frequencies: jax.Array, lengths: jax.Array, rope: RopeConfig) -> jax.Array:
    """Lower the frequencies [D/2] for rows of `lengths` [B, S] by "dynamic NTK" scaling.

    transformers scales the base, theta * scale^(d / (d - 2)), and takes base^(-2i / d). The scale's share
    in that, scale^(-2i / (d - 2)), is exactly 1 within the context.
    """
    beyond = jnp.maximum(lengths - rope.context, 0).astype(jnp.float32)
    scale = 1 + rope.factor * beyond / rope.context
    exponents = -jnp.arange(0, rope.head_dim, 2, dtype=jnp.float32) / (rope.head_dim - 2)
    return frequencies * scale[..., None] ** exponents


class _Settings:
    """The rotary settings of a config.json, from whichever of its three places, checked as they are read."""

    def __init__(self, hf_config: Mapping[str, Any]):
        self.block = "rope_scaling"  # where a missing setting belongs
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        for block in ("rope_parameters", "rope_scaling"):
            content = hf_config.get(block)
            if content is None:
                continue
            if not isinstance(content, Mapping):
                raise ValueError(f"config.json:{block} must be an object or null, found {content!r}")
            self.block = block
            for key, value in content.items():
                self._add("rope_type" if key == "type" else key, value, f"config.json:{block}.{key}")
        for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
            self._add(key, hf_config.get(key), f"config.json:{key}")
        if self.number("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"{self.name('partial_rotary_factor')} is not supported: whole heads are rotated")

    def _add(self, key: str, value: Any, place: str) -> None:
        if value is None:
            return
        if isinstance(value, Mapping):
            raise ValueError(f"{place} is an object: settings that differ between layers are not supported")
        if self.values.setdefault(key, value) != value:
            raise ValueError(
                f"{self.places[key]} is {self.values[key]!r}, but {place} is {value!r}: remove the wrong one"
            )
        self.places.setdefault(key, place)

    def name(self, key: str) -> str:
        """Return where `key` stands or, if it is absent, should stand."""
        return self.places.get(key, f"config.json:{self.block}.{key}")

    def rope_type(self) -> str:
        """Return the type, a key of REQUIRED."""
        rope_type = self.values.get("rope_type", "default")
        accepted = f"accepted values: {', '.join(REQUIRED)}"
        if not isinstance(rope_type, str) or rope_type not in REQUIRED:
            # The key is named rope_type also where an older file says type: it is what the reader looks up.
            raise ValueError(f"config.json:{self.block}.rope_type {rope_type!r} is not supported; {accepted}")
        if "rope_type" not in self.values and "factor" in self.values:
            raise ValueError(f"{self.name('factor')} is given without {self.name('rope_type')}; {accepted}")
        return rope_type

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self.values.get(key, default)
        if value is None:
            raise ValueError(f"{self.name(key)} is missing; rope type {self.rope_type()!r} needs it")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{self.name(key)} must be a positive number, found {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.name(key)} must be true or false, found {value!r}")
        return value


def _yarn_attention_scaling(settings: _Settings, factor: float) -> float:
    """Return the given attention_factor, or what YaRN derives from the context factor."""

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "attention_factor" in settings.values:
        return settings.number("attention_factor")
    if settings.values.get("mscale") and settings.values.get("mscale_all_dim"):
        return temperature(settings.number("mscale")) / temperature(settings.number("mscale_all_dim"))
    return temperature(1.0)
