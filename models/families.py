"""The families of decoders that are known, each by what sets it apart from Llama.

A family is an entry of FAMILIES: what `config.json` leaves unsaid, which biases and norms there are, and which layers
rotate positions or look back over a window only. Everything else is read from the configuration in the same way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = Mapping[str, Any]
Windows = tuple[int | None, ...]


def _no_windows(config: Fields, layers: int) -> Windows:
    return (None,) * layers


def _rotate_all(config: Fields, layers: int) -> tuple[bool, ...]:
    return (True,) * layers


@dataclass(frozen=True)
class Family:
    """What a `model_type` means beside the sizes in config.json.

    Attributes:
        defaults: fields that transformers fills in where config.json lacks them, and how, where not as for Llama.
        qkv_bias, o_bias, mlp_bias: whether these projections have biases; a text names the field that says so.
        qk_norm: whether each head's queries and keys are normalised before they are rotated.
        fused: whether q, k and v are one projection, and gate and up another.
        windows: for each layer, how many tokens a query sees, itself included; None is all before it.
        rotated: for each layer, whether queries and keys are rotated.
        rope_types: those that mean what they mean for Llama; None is all.
        activations: of the feed-forward block; the first is that of a config that names none.
        gemma: whether norms multiply by 1 + weight and stand behind attention and feed-forward block too, embeddings
            are multiplied by the root of their size, and scores and logits are capped where config.json says so.
        local_rope: whether layers with a window have a rotary embedding of their own.
    """

    defaults: Fields = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    fused: bool = False
    windows: Callable[[Fields, int], Windows] = _no_windows
    rotated: Callable[[Fields, int], tuple[bool, ...]] = _rotate_all
    rope_types: tuple[str, ...] | None = None
    activations: tuple[str, ...] = ("silu",)
    gemma: bool = False
    local_rope: bool = False


def _same_window(config: Fields, layers: int) -> Windows:
    """Every layer has the window that `sliding_window` gives, if it does."""
    return (_window(config),) * layers


def _qwen_windows(config: Fields, layers: int) -> Windows:
    """Layers from `max_window_layers` on have the window, where `use_sliding_window`; or as `layer_types` says."""
    if not _uses_windows(config):
        return (None,) * layers
    window, first = _window(config), config["max_window_layers"]
    if type(first) is not int:
        raise ValueError(f"config.json: max_window_layers must be a whole number, found {first!r}")
    return _by_type(config, layers, window, lambda layer: layer >= first)


def _smollm3_windows(config: Fields, layers: int) -> Windows:
    """Layers that are not rotated have the window, where `use_sliding_window`; or as `layer_types` says."""
    if not _uses_windows(config):
        return (None,) * layers
    rotated = _smollm3_rotated(config, layers)
    return _by_type(config, layers, _window(config), lambda layer: not rotated[layer])


def _smollm3_rotated(config: Fields, layers: int) -> tuple[bool, ...]:
    """`no_rope_layers` holds 1 for a layer that is rotated, and 0 for one that is not."""
    marks = config.get("no_rope_layers")
    if marks is None:
        interval = config["no_rope_layer_interval"]
        if type(interval) is not int or interval < 1:
            raise ValueError(f"config.json: no_rope_layer_interval must be a positive integer, found {interval!r}")
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(marks, list) or len(marks) < layers or any(mark not in (0, 1) for mark in marks):
        raise ValueError(f"config.json: no_rope_layers must be a list of {layers} numbers 0 or 1, found {marks!r}")
    return tuple(bool(mark) for mark in marks[:layers])


def _uses_windows(config: Fields) -> bool:
    used = config.get("use_sliding_window", False)
    if not isinstance(used, bool):
        raise ValueError(f"config.json: use_sliding_window must be true or false, found {used!r}")
    return used


def _window(config: Fields) -> int | None:
    window = config.get("sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"config.json: sliding_window must be a positive integer or null, found {window!r}")
    return window


def _by_type(config: Fields, layers: int, window: int | None, is_windowed: Callable[[int], bool]) -> Windows:
    """Give the window to the layers that `layer_types` names, or, without it, to those that `is_windowed` chooses."""
    kinds = {"sliding_attention": window, "full_attention": None}
    types = config.get("layer_types")
    if types is None:
        return tuple(window if is_windowed(layer) else None for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers or any(kind not in kinds for kind in types):
        raise ValueError(f"config.json: layer_types must be a list of {layers} of {', '.join(kinds)}, found {types!r}")
    return tuple(kinds[kind] for kind in types)


def _gemma_windows(config: Fields, layers: int) -> Windows:
    """All but every n-th layer have the window, or as `layer_types` says."""
    interval = config["sliding_window_pattern"]
    if type(interval) is not int or interval < 1:
        raise ValueError(f"config.json: sliding_window_pattern must be a positive integer, found {interval!r}")
    return _by_type(config, layers, _window(config), lambda layer: (layer + 1) % interval != 0)


_GEMMA = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GELU = ("gelu_pytorch_tanh",)
_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}

# By model_type. Yi's published files are llama.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        windows=_same_window,
    ),
    "phi3": Family(
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        fused=True,
        windows=_same_window,
        rope_types=("default",),  # by "yarn" an older Phi-3 means another one, with factors of its own
    ),
    "gemma2": Family(
        defaults={
            **_GEMMA,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows=_gemma_windows,
        activations=_GELU,
        gemma=True,
    ),
    "gemma3_text": Family(
        defaults={
            **_GEMMA,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows=_gemma_windows,
        activations=_GELU,
        gemma=True,
        local_rope=True,
    ),
    "qwen2": Family(defaults={"num_key_value_heads": 32, **_QWEN}, qkv_bias=True, windows=_qwen_windows),
    "qwen3": Family(
        defaults={"num_key_value_heads": 32, "head_dim": 128, **_QWEN},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows=_qwen_windows,
    ),
    "smollm3": Family(
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows=_smollm3_windows,
        rotated=_smollm3_rotated,
    ),
}
