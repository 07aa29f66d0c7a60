"""Small checkpoints of every format, written by other programs' libraries."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of the model that CONFIG describes."""
    generator = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (128, 64), "model.norm.weight": (64,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (64, 64),
            f"{prefix}self_attn.k_proj.weight": (32, 64),
            f"{prefix}self_attn.v_proj.weight": (32, 64),
            f"{prefix}self_attn.o_proj.weight": (64, 64),
            f"{prefix}mlp.gate_proj.weight": (96, 64),
            f"{prefix}mlp.up_proj.weight": (96, 64),
            f"{prefix}mlp.down_proj.weight": (64, 96),
            f"{prefix}input_layernorm.weight": (64,),
            f"{prefix}post_attention_layernorm.weight": (64,),
        }
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_folder(
    folder: Path, tensors: dict[str, np.ndarray] | None = None, shards: list[str] | None = None, **config: object
) -> Path:
    """Write a Hugging Face directory; tensors go to `shards` in turn, with an index, where given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    tensors = llama_tensors() if tensors is None else tensors
    if shards is None:
        save_file(tensors, folder / "model.safetensors")
        return folder
    placed = {name: shards[number % len(shards)] for number, name in enumerate(tensors)}
    for shard in shards:
        save_file({name: tensors[name] for name in tensors if placed[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def raw_safetensors(header: object, data: bytes = b"") -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's own permutation of q_proj and k_proj (LlamaModel.permute of convert_hf_to_gguf.py)."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


TINY_TOKENS = ["<unk>", "<s>", "</s>", *(chr(code) for code in range(0x21, 0x7F)), "th", "he", "the"]


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    edit: Callable[[GGUFWriter], None] = lambda writer: None,
    architecture: str = "llama",
    tokenizer: Callable[[GGUFWriter], None] | None = None,
    **numbers: int | float,
) -> Path:
    """Write the model of CONFIG as llama.cpp's converter would; `numbers` override metadata by its last part."""
    tensors = llama_tensors() if tensors is None else tensors
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(numbers.get("block_count", 2))
    writer.add_context_length(256)
    writer.add_vocab_size(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(numbers.get("freq_base", 10000.0))
    writer.add_rope_dimension_count(numbers.get("dimension_count", 16))
    (tokenizer or tiny_gguf_tokenizer)(writer)
    for name, tensor in tensors.items():
        parts = name.split(".")
        layer = f"blk.{parts[2]}." if parts[1] == "layers" else ""
        module = ".".join(parts[3:-1] if layer else parts[:-1])
        if "q_proj" in name or "k_proj" in name:
            tensor = interleave(tensor, 4 if "q_proj" in name else 2)
        stored = kind if tensor.ndim == 2 and kind != GGMLQuantizationType.F32 else GGMLQuantizationType.F32
        writer.add_tensor(f"{layer}{GGUF_NAMES[module]}.{parts[-1]}", quantize(tensor, stored), raw_dtype=stored)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_gguf_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TINY_TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TINY_TOKENS) - 3))
    writer.add_token_merges(["t h", "h e", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
