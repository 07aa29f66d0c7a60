"""What a model is made of, read from a Hugging Face configuration."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.families import FAMILIES, Family
from models.rope import RopeConfig

MOST_LAYERS = 10_000  # eighty times the deepest model's; to list more would take all memory
DEFAULT_MAX_POSITIONS = 2048  # what transformers' LlamaConfig assumes where config.json is silent


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder: sizes, switches and rotary embedding. Hashable, so it can be static under jit.

    Attributes:
        rope: of the layers that are rotated.
        num_layers: of the model, or of a part of it.
        rotated: for each layer of the whole model, whether its queries and keys are rotated.
        windows: likewise, how many tokens a query sees, itself included; None is all before it.
        qk_norm: whether each head's queries and keys are normalised.
        fused: whether q, k and v are one projection, and gate and up another.
        activation: of the feed-forward block: silu, or gelu_pytorch_tanh.
        gemma: whether norms multiply by 1 + weight, and stand behind attention and feed-forward block too.
        embedding_scale: what embeddings are multiplied by.
        query_scale: what queries are multiplied by beside 1 / sqrt(head_dim).
        attention_softcap, logit_softcap: scores and logits are capped at it, None: not.
        local_rope: of the layers that have a window, where it is another.
    """

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
    rotated: tuple[bool, ...]
    windows: tuple[int | None, ...]
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    fused: bool
    activation: str = "silu"
    gemma: bool = False
    embedding_scale: float = 1.0
    query_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    local_rope: RopeConfig | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read the content of a config.json; a key that is null counts as absent.

        Raises:
            ValueError: an unknown family, a missing or impossible field; the message names the field.
        """
        family = _family(config)
        config = _with_defaults(config, family)
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
        num_layers = _positive(config, "num_hidden_layers")
        if num_layers > MOST_LAYERS:
            raise ValueError(f"config.json: num_hidden_layers is {num_layers}; expected {MOST_LAYERS} at most")
        rope, local_rope = _ropes(config, family, head_dim, max_positions)
        query_size = _positive_number(config, "query_pre_attn_scalar", head_dim) if family.gemma else head_dim
        return cls(
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive_number(config, "rms_norm_eps", 1e-6),
            max_positions=max_positions,
            rope=rope,
            rotated=family.rotated(config, num_layers),
            windows=family.windows(config, num_layers),
            tie_embeddings=_flag(config, "tie_word_embeddings"),
            qkv_bias=_bias(config, family.qkv_bias),
            o_bias=_bias(config, family.o_bias),
            mlp_bias=_bias(config, family.mlp_bias),
            qk_norm=family.qk_norm,
            fused=family.fused,
            activation=config["hidden_act"],
            gemma=family.gemma,
            embedding_scale=hidden_size**0.5 if family.gemma else 1.0,
            query_scale=(head_dim / query_size) ** 0.5,
            attention_softcap=_softcap(config, family, "attn_logit_softcapping"),
            logit_softcap=_softcap(config, family, "final_logit_softcapping"),
            local_rope=local_rope,
        )


def _family(config: Mapping[str, Any]) -> Family:
    name = config.get("model_type")
    known = ", ".join(FAMILIES)
    if name is None:
        raise ValueError(f"config.json: no model_type; known families: {known}")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"config.json: model_type {name!r} is not a known family; known families: {known}")
    return FAMILIES[name]


def _with_defaults(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Fill in what the family assumes, leave out what is null, and refuse what no family has."""
    defaults = dict(family.defaults)
    blocks = (config.get(block) for block in ("rope_parameters", "rope_scaling"))
    if any(isinstance(block, Mapping) and "rope_theta" in block for block in blocks):
        defaults.pop("rope_theta", None)
    config = {key: value for key, value in {**defaults, **config}.items() if value is not None}
    if config.get("use_bidirectional_attention"):
        raise ValueError("config.json: use_bidirectional_attention is not supported; expected false")
    # Gemma's older files name another activation in hidden_act than what hidden_activation says is used.
    activation = config.get("hidden_activation") if family.gemma else config.get("hidden_act")
    config["hidden_act"] = activation or family.activations[0]
    if config["hidden_act"] not in family.activations:
        raise ValueError(f"config.json: hidden_act {activation!r} is not supported; expected {family.activations[0]!r}")
    for key in ("attention_dropout", "resid_pdrop", "embd_pdrop"):
        if dropout := config.get(key, 0.0):
            raise ValueError(f"config.json: {key} {dropout} is not supported; expected 0")
    return config


def _rope(config: Mapping[str, Any], family: Family, head_dim: int, max_positions: int) -> RopeConfig:
    rope = RopeConfig.from_hf(config, head_dim, max_positions)
    if family.rope_types is not None and rope.rope_type not in family.rope_types:
        raise ValueError(
            f"config.json: rope_type {rope.rope_type!r} of a {config['model_type']} model is not supported; "
            f"accepted values: {', '.join(family.rope_types)}"
        )
    return rope


def _ropes(
    config: Mapping[str, Any], family: Family, head_dim: int, max_positions: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """Read the rotary embedding, and that of layers with a window, where they have their own."""
    if not family.local_rope:
        return _rope(config, family, head_dim, max_positions), None
    plain = {
        key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling", "rope_theta")
    }
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping) and {"full_attention", "sliding_attention"} <= nested.keys():
        of_all, of_windows = ({**plain, "rope_parameters": nested[f"{kind}_attention"]} for kind in ("full", "sliding"))
    else:
        of_all, of_windows = config, {**plain, "rope_theta": config["rope_local_base_freq"]}  # type: ignore[assignment]
    return tuple(_rope(each, family, head_dim, max_positions) for each in (of_all, of_windows))  # type: ignore[return-value]


def _softcap(config: Mapping[str, Any], family: Family, key: str) -> float | None:
    return _positive_number(config, key, 1.0) if family.gemma and key in config else None


def _bias(config: Mapping[str, Any], bias: bool | str) -> bool:
    return _flag(config, bias) if isinstance(bias, str) else bias


def _positive(config: Mapping[str, Any], key: str, default: Any = None) -> int:
    value = config.get(key, default)
    if value is None:
        raise ValueError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {key} must be a positive integer, found {value!r}")
    return value


def _positive_number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"config.json: {key} must be a positive number, found {value!r:.40}")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key} must be true or false, found {value!r}")
    return value
