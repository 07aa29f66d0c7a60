"""Rotary scaling of a GGUF file, as Hugging Face's rope_scaling."""

import math
from typing import Any

import numpy as np

from zagora_jax.checkpoints.gguf_metadata import Metadata
from zagora_jax.errors import UserError

# Llama 3.1 to 3.3: the one set of published values. GGUF keeps only the frequencies' divisors that follow from it.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# The divisors are stored as float32 of a computation in float32 or float64.
_RELATIVE_TOLERANCE = 1e-5


def rope_scaling(metadata: Metadata, head_dim: int, theta: float, factors: np.ndarray | None) -> dict[str, Any] | None:
    """Return the content of rope_scaling, None for plain rotary embeddings.

    Args:
        metadata: Of a Llama model.
        head_dim: Dimensions of a head.
        theta: Base of the rotary frequencies.
        factors: Divisors of the frequencies (tensor rope_freqs.weight), float32[head_dim / 2], or None.

    Raises:
        UserError: The scaling has no counterpart; it is never left out.
    """
    scaled_by_metadata = _from_metadata(metadata)
    if factors is None or np.all(factors == 1):
        return scaled_by_metadata
    if scaled_by_metadata is not None:
        raise UserError(
            f"{metadata.path} scales rotary frequencies twice: by {metadata.full_key('rope.scaling.type')} and by "
            "rope_freqs.weight."
        )
    return _from_factors(metadata, head_dim, theta, factors)


def llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """Compute the divisors of the rotary frequencies of Llama 3.1 to 3.3, float64[head_dim / 2].

    The formula is `_compute_llama3_parameters` of transformers' modeling_rope_utils.
    """
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] / wavelengths  # within the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _from_factors(metadata: Metadata, head_dim: int, theta: float, factors: np.ndarray) -> dict[str, Any]:
    factor = float(str(np.float32(factors.max()))) if factors.size else 0.0
    if factors.shape != (head_dim // 2,) or not np.allclose(
        factors.astype(np.float64), llama3_factors(head_dim, theta, factor), rtol=_RELATIVE_TOLERANCE, atol=0
    ):
        raise UserError(
            f"{metadata.path}: rope_freqs.weight is not the scaling of Llama 3.1 to 3.3 (rope_type llama3 with "
            f"{_LLAMA3}), and other scalings cannot be told from it. Use the model's safetensors files."
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _from_metadata(metadata: Metadata) -> dict[str, Any] | None:
    kind = metadata.get("rope.scaling.type", str, "none")
    if "rope.scale_linear" in metadata:  # before rope.scaling.type existed
        kind = "linear"
    if "rope.scaling.finetuned" in metadata:
        metadata.get("rope.scaling.finetuned", bool)
    if kind == "none":
        return None
    if kind == "linear":
        key = "rope.scale_linear" if "rope.scale_linear" in metadata else "rope.scaling.factor"
        factor = metadata.number(key)
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": metadata.number("rope.scaling.factor"),
            "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
        }
        for key in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{key}" in metadata:
                scaling[key] = metadata.number(f"rope.scaling.yarn_{key}")
        return scaling
    raise UserError(f"{metadata.path}: {metadata.full_key('rope.scaling.type')} {kind!r} is not supported.")
