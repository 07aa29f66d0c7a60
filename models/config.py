"""What a model is made of, read from a Hugging Face configuration."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.rope import RopeConfig

# model_type of config.json -> what is known of the family. A family is a line here plus what really differs.
FAMILIES = ("llama",)

DEFAULT_MAX_POSITIONS = 2048  # what transformers' LlamaConfig assumes where config.json is silent


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder: sizes, switches and rotary embedding. Hashable, so it can be static under jit."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read the content of a config.json; a key that is null counts as absent.

        Raises:
            ValueError: an unknown family, a missing or impossible field; the message names the field.
        """
        config = {key: value for key, value in config.items() if value is not None}
        _check_family(config)
        hidden_size, num_heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
        num_kv_heads = _positive(config, "num_key_value_heads", num_heads)
        if "head_dim" not in config and hidden_size % num_heads:
            raise ValueError(
                f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
                "and no head_dim is given"
            )
        head_dim = _positive(config, "head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise ValueError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs an even one")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        # Llama 1 conversions name the context length max_sequence_length.
        max_positions = _positive(
            config, "max_position_embeddings", config.get("max_sequence_length", DEFAULT_MAX_POSITIONS)
        )
        return cls(
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=_positive(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive_number(config, "rms_norm_eps", 1e-6),
            max_positions=max_positions,
            rope=RopeConfig.from_hf(config, head_dim, max_positions),
            tie_embeddings=_flag(config, "tie_word_embeddings"),
            attention_bias=_flag(config, "attention_bias"),
            mlp_bias=_flag(config, "mlp_bias"),
        )


def _check_family(config: Mapping[str, Any]) -> None:
    family = config.get("model_type")
    known = ", ".join(FAMILIES)
    if family is None:
        raise ValueError(f"config.json: no model_type; known families: {known}")
    if family not in FAMILIES:
        raise ValueError(f"config.json: model_type {family!r} is not a known family; known families: {known}")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"config.json: hidden_act {activation!r} is not supported; expected 'silu'")
    if dropout := config.get("attention_dropout", 0.0):
        raise ValueError(f"config.json: attention_dropout {dropout} is not supported; expected 0")


def _positive(config: Mapping[str, Any], key: str, default: Any = None) -> int:
    value = config.get(key, default)
    if value is None:
        raise ValueError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {key} must be a positive integer, found {value!r}")
    return value


def _positive_number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {key} must be a positive number, found {value!r}")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key} must be true or false, found {value!r}")
    return value
