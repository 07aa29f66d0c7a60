"""Sizes of released models by name, from their published config.json."""

from typing import Any

_LLAMA_31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_32_ROPE = {**_LLAMA_31_ROPE, "factor": 32.0}


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, positions: int, **other: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 500000.0 if vocab == 128256 else 10000.0,
        **other,
    }


def _mistral(
    hidden: int, layers: int, heads: int, intermediate: int, vocab: int, positions: int, **other: Any
) -> dict[str, Any]:
    sizes = _llama(hidden, layers, heads, 8, intermediate, vocab, positions)
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "head_dim": 128}
    return {**sizes, **mistral, "sliding_window": None, "rope_theta": 1000000.0, **other}


def _qwen(
    family: str, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, *, tied: bool, **other: Any
) -> dict[str, Any]:
    sizes = _llama(hidden, layers, heads, kv_heads, intermediate, 151936, 32768)
    qwen = {"model_type": family, "architectures": [f"{family.capitalize()}ForCausalLM"], "rms_norm_eps": 1e-6}
    return {**sizes, **qwen, "rope_theta": 1000000.0, "tie_word_embeddings": tied, **other}


# The larger Qwen2 models have a few rows of the vocabulary more.
_QWEN2_LARGE: dict[str, Any] = {"tied": False, "vocab_size": 152064}
_QWEN3: dict[str, Any] = {"head_dim": 128, "attention_bias": False, "max_position_embeddings": 40960}

KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "smollm2-135m": _llama(576, 30, 9, 3, 1536, 49152, 8192, rope_theta=100000.0, tie_word_embeddings=True),
    "smollm2-1.7b": _llama(2048, 24, 32, 32, 8192, 49152, 8192, rope_theta=130000.0, tie_word_embeddings=True),
    "tinyllama-1.1b": _llama(2048, 22, 32, 4, 5632, 32000, 2048),
    "llama-1-7b": _llama(4096, 32, 32, 32, 11008, 32000, 2048, rms_norm_eps=1e-6),
    "llama-1-13b": _llama(5120, 40, 40, 40, 13824, 32000, 2048, rms_norm_eps=1e-6),
    "llama-1-65b": _llama(8192, 80, 64, 64, 22016, 32000, 2048),
    "llama-2-7b": _llama(4096, 32, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": _llama(5120, 40, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": _llama(8192, 80, 64, 8, 28672, 32000, 4096),
    "llama-3-8b": _llama(4096, 32, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": _llama(8192, 80, 64, 8, 28672, 128256, 8192),
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 14336, 128256, 131072, rope_scaling=_LLAMA_31_ROPE),
    "llama-3.1-70b": _llama(8192, 80, 64, 8, 28672, 128256, 131072, rope_scaling=_LLAMA_31_ROPE),
    "llama-3.1-405b": _llama(16384, 126, 128, 8, 53248, 128256, 131072, rope_scaling=_LLAMA_31_ROPE),
    "llama-3.2-1b": _llama(
        2048, 16, 32, 8, 8192, 128256, 131072, rope_scaling=_LLAMA_32_ROPE, tie_word_embeddings=True, head_dim=64
    ),
    "llama-3.2-3b": _llama(
        3072, 28, 24, 8, 8192, 128256, 131072, rope_scaling=_LLAMA_32_ROPE, tie_word_embeddings=True, head_dim=128
    ),
    "llama-3.3-70b": _llama(8192, 80, 64, 8, 28672, 128256, 131072, rope_scaling=_LLAMA_31_ROPE),
    "codellama-34b": _llama(8192, 48, 64, 8, 22016, 32000, 16384, rope_theta=1000000.0),
    "yi-6b": _llama(4096, 32, 32, 4, 11008, 64000, 4096, rope_theta=5000000.0),
    "yi-34b": _llama(7168, 60, 56, 8, 20480, 64000, 4096, rope_theta=5000000.0),
    "mistral-7b": _mistral(4096, 32, 32, 14336, 32768, 32768),
    "mistral-nemo-12b": _mistral(5120, 40, 32, 14336, 131072, 131072),
    "mistral-small-22b": _mistral(6144, 56, 48, 16384, 32768, 32768),
    "mistral-small-24b": _mistral(5120, 40, 32, 32768, 131072, 32768, rope_theta=100000000.0),
    "mistral-large-2-123b": _llama(12288, 88, 96, 8, 28672, 32768, 131072, rope_theta=1000000.0),
    "qwen2-0.5b": _qwen("qwen2", 896, 24, 14, 2, 4864, tied=True),
    "qwen2-1.5b": _qwen("qwen2", 1536, 28, 12, 2, 8960, tied=True),
    "qwen2-7b": _qwen("qwen2", 3584, 28, 28, 4, 18944, **_QWEN2_LARGE),
    "qwen2-72b": _qwen("qwen2", 8192, 80, 64, 8, 29568, **_QWEN2_LARGE),
    "qwen2.5-0.5b": _qwen("qwen2", 896, 24, 14, 2, 4864, tied=True),
    "qwen2.5-1.5b": _qwen("qwen2", 1536, 28, 12, 2, 8960, tied=True),
    "qwen2.5-3b": _qwen("qwen2", 2048, 36, 16, 2, 11008, tied=True),
    "qwen2.5-7b": _qwen("qwen2", 3584, 28, 28, 4, 18944, **_QWEN2_LARGE),
    "qwen2.5-14b": _qwen("qwen2", 5120, 48, 40, 8, 13824, **_QWEN2_LARGE),
    "qwen2.5-32b": _qwen("qwen2", 5120, 64, 40, 8, 27648, **_QWEN2_LARGE),
    "qwen2.5-72b": _qwen("qwen2", 8192, 80, 64, 8, 29568, **_QWEN2_LARGE),
    "qwen3-0.6b": _qwen("qwen3", 1024, 28, 16, 8, 3072, tied=True, **_QWEN3),
    "qwen3-1.7b": _qwen("qwen3", 2048, 28, 16, 8, 6144, tied=True, **_QWEN3),
    "qwen3-4b": _qwen("qwen3", 2560, 36, 32, 8, 9728, tied=True, **_QWEN3),
    "qwen3-8b": _qwen("qwen3", 4096, 36, 32, 8, 12288, tied=False, **_QWEN3),
    "qwen3-14b": _qwen("qwen3", 5120, 40, 40, 8, 17408, tied=False, **_QWEN3),
    "qwen3-32b": _qwen("qwen3", 5120, 64, 64, 8, 25600, tied=False, **_QWEN3),
}
