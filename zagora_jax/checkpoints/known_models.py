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
    "mistral-large-2-123b": _llama(12288, 88, 96, 8, 28672, 32768, 131072, rope_theta=1000000.0),
}
