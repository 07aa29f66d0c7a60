"""Files in, files out: Hugging Face directories, GGUF files, PEFT adapters, a tensor at a time."""

from zagora_jax.checkpoints.checkpoint import Checkpoint, TensorInfo
from zagora_jax.checkpoints.peft import AdapterConfig, read_adapter, write_adapter
from zagora_jax.checkpoints.source import open_checkpoint
from zagora_jax.checkpoints.tokenizer import check_tokenizer, load_tokenizer

__all__ = [
    "AdapterConfig",
    "Checkpoint",
    "TensorInfo",
    "check_tokenizer",
    "load_tokenizer",
    "open_checkpoint",
    "read_adapter",
    "write_adapter",
]
