"""A Llama model in a GGUF file, as the Hugging Face checkpoint that it was made from."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zagora_jax.checkpoints.checkpoint import Checkpoint, TensorInfo, plan_shards
from zagora_jax.checkpoints.gguf_file import GGUFFile, read_gguf
from zagora_jax.checkpoints.gguf_metadata import Metadata
from zagora_jax.checkpoints.gguf_rope import rope_scaling
from zagora_jax.checkpoints.gguf_tokenizer import tokenizer_assets
from zagora_jax.errors import UserError

# Bytes of tensors in one file of an export; Hugging Face's own habit.
_SHARD_BYTES = 5 * 10**9

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Rotary frequencies, which the config says: divisors of the frequencies, and old files' table for each layer.
_ROPE_FACTORS = "rope_freqs.weight"
_IGNORED = re.compile(r"blk\.\d+\.attn_rot_embd\.weight|rope_freqs\.weight")


@dataclass(kw_only=True)
class GGUFCheckpoint(Checkpoint):
    """A checkpoint in a GGUF file.

    Quantised tensors are read as bfloat16 (dequantised in float32, rounded once); float32, float16 and bfloat16
    tensors as they are stored, so norms are float32 in most files. The rows of q_proj and k_proj, which llama.cpp
    interleaves within each head, come back in Hugging Face's half-split order.

    Attributes:
        file: The opened file.
        stored_names: Name in the file by Hugging Face name.
        row_orders: Stored row by Hugging Face row, int64[out], for the tensors whose rows are interleaved.
    """

    file: GGUFFile
    stored_names: dict[str, str]
    row_orders: dict[str, np.ndarray]

    @classmethod
    def open(cls, path: Path, name: str) -> "GGUFCheckpoint":
        """Open the GGUF file at `path`, which the user named `name`.

        Raises:
            UserError: The file is damaged, or holds what cannot be translated faithfully.
        """
        file = read_gguf(path)
        metadata = Metadata(path, file.metadata)
        metadata.require_llama()
        stored_names, ignored = _translate_names(file)
        tensors = {
            name: TensorInfo((stored := file.tensors[key]).shape, stored.dtype, path, stored.offset)
            for name, key in stored_names.items()
        }
        config = build_config(metadata, tensors, _rope_factors(file))
        assets = {"config.json": _to_json(config), **tokenizer_assets(metadata, config)}
        return cls(
            name=name,
            path=path,
            config=config,
            tensors=tensors,
            assets=assets,
            ignored=ignored,
            file=file,
            stored_names=stored_names,
            row_orders=_row_orders(tensors, config),
        )

    def read(self, name: str) -> np.ndarray:
        """Return the tensor `name`, dequantised to bfloat16 where it is quantised."""
        return self.read_rows(name, 0, self.tensors[name].shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return the rows [start, stop) of the tensor `name`; of q_proj and k_proj, whole heads are read."""
        stored = self.stored_names[name]
        order = self.row_orders.get(name)
        if order is None or start == stop:
            return self.file.read_rows(stored, start, stop)
        wanted = order[start:stop]
        first, last = int(wanted.min()), int(wanted.max()) + 1
        return self.file.read_rows(stored, first, last)[wanted - first]

    @property
    def layout(self) -> dict[str, str]:
        """Files of at most 5 GB, in the order of the tensors."""
        return plan_shards({name: info.nbytes for name, info in self.tensors.items()}, _SHARD_BYTES)


def build_config(metadata: Metadata, tensors: dict[str, TensorInfo], rope_factors: np.ndarray | None) -> dict[str, Any]:
    """Translate the metadata into the content of config.json.

    Args:
        metadata: Of a Llama model.
        tensors: The model's tensors by Hugging Face name.
        rope_factors: Divisors of the rotary frequencies, float32[head_dim / 2], where the file has them.

    Raises:
        UserError: An entry is missing, contradicts another or has no counterpart.
    """
    if "model.embed_tokens.weight" not in tensors:
        raise UserError(f"{metadata.path} has no tensor token_embd.weight.")
    embedding = tensors["model.embed_tokens.weight"]
    hidden_size = metadata.integer("embedding_length")
    heads = metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", metadata.integer("rope.dimension_count", hidden_size // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(key, head_dim) != head_dim:
            raise UserError(
                f"{metadata.path}: {metadata.full_key(key)} is {metadata.integer(key)}, but a head has {head_dim} "
                "dimensions: such a model has no Hugging Face Llama counterpart."
            )
    theta = metadata.number("rope.freq_base", 10000.0)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": any(name.endswith("self_attn.q_proj.bias") for name in tensors),
        "attention_dropout": 0.0,
        "bos_token_id": metadata.token_id("bos"),
        "dtype": embedding.dtype.name,
        "eos_token_id": metadata.token_id("eos"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "max_position_embeddings": metadata.integer("context_length"),
        "mlp_bias": any(name.endswith("mlp.up_proj.bias") for name in tensors),
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": metadata.integer("block_count"),
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "pad_token_id": metadata.token_id("padding"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_scaling": rope_scaling(metadata, head_dim, theta, rope_factors),
        "rope_theta": theta,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": embedding.dtype.name,
        # The rows of the embedding count, which can be more than the tokenizer's tokens.
        "vocab_size": embedding.shape[0],
    }
    metadata.refuse_unread()
    return config


def _translate_names(file: GGUFFile) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return stored name by Hugging Face name, and the names that are not needed."""
    stored_names, ignored = {}, []
    for stored in file.tensors:
        if _IGNORED.fullmatch(stored):
            ignored.append(stored)
            continue
        match = re.fullmatch(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)", stored)
        module = match and (_PER_LAYER if match["layer"] else _TOP_LEVEL).get(match["part"])
        if not match or not module:
            raise UserError(f"{file.path}: tensor {stored!r} belongs to no Llama model that can be read.")
        prefix = f"model.layers.{int(match['layer'])}." if match["layer"] else ""
        stored_names[f"{prefix}{module}.{match['kind']}"] = stored
    return stored_names, tuple(ignored)


def _rope_factors(file: GGUFFile) -> np.ndarray | None:
    if _ROPE_FACTORS not in file.tensors:
        return None
    return file.read_rows(_ROPE_FACTORS, 0, file.tensors[_ROPE_FACTORS].shape[0])


def _row_orders(tensors: dict[str, TensorInfo], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Say where llama.cpp stores each row of q_proj and k_proj.

    Within a head it puts the rows that rotate together side by side: Hugging Face's row half * D/2 + i is stored as
    row 2 * i + half (`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py).
    """
    head_dim = config["head_dim"]
    if head_dim % 2:
        raise UserError(f"the head dimension is {head_dim}; rotary embeddings need an even one.")
    orders = {}
    for name, info in tensors.items():
        if re.search(r"self_attn\.(q|k)_proj\.", name):
            heads, rest = divmod(info.shape[0], head_dim)
            if rest:
                raise UserError(f"{info.file}: {name} has {info.shape[0]} rows, no multiple of the head's {head_dim}.")
            within_head = np.arange(head_dim).reshape(head_dim // 2, 2).T.ravel()  # [D]
            orders[name] = (np.arange(heads)[:, None] * head_dim + within_head).ravel()  # [heads * D]
    return orders


def _to_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
