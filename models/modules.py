"""The modules of a declared model by their paths, which are Hugging Face's names without the layer's number."""

from typing import TypeVar

from flax import nnx

from models.decoder_layer import RMSNorm
from models.embedding import Embedding
from models.linear import Linear

Module = TypeVar("Module", bound=nnx.Module)

HEAD = "lm_head"


def linear_modules(model: nnx.Module) -> dict[str, Linear]:
    """Return the decoder's linear layers by path, e.g. "model.layers.self_attn.q_proj"; the output head is none."""
    return _modules(model, Linear)


def table_modules(model: nnx.Module) -> dict[str, Embedding]:
    """Return the embedding and the output head, where it is another, by path."""
    return _modules(model, Embedding)


def norm_modules(model: nnx.Module) -> dict[str, RMSNorm]:
    """Return the norms by path, e.g. "model.layers.input_layernorm"."""
    return _modules(model, RMSNorm)


def _modules(model: nnx.Module, kind: type[Module]) -> dict[str, Module]:
    return {".".join(map(str, path)): module for path, module in nnx.iter_modules(model) if isinstance(module, kind)}
