"""From a checkpoint's tensors to the model's frozen parameters, a tensor at a time."""

import difflib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from models.llama import Llama
from models.parameters import Adapter, Frozen
from models.quantization import FORMATS, is_quantized
from zagora_jax.checkpoints.checkpoint import Checkpoint
from zagora_jax.errors import UserError

logger = logging.getLogger(__name__)

READABLE_DTYPES = {np.dtype(dtype) for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)}

Path = tuple[str, ...]


@dataclass(frozen=True)
class ExpectedTensor:
    """Where a checkpoint's tensor goes: a parameter's path, the layer of its stack (None: no stack), its shape."""

    path: Path
    layer: int | None
    shape: tuple[int, ...]


def expected_tensors(model: Llama) -> dict[str, ExpectedTensor]:
    """List the tensors that a Hugging Face checkpoint of `model` holds, by name."""
    expected = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, Frozen)):
        stored = variable.get_value()
        if path[:2] == ("model", "layers"):
            shape = stored.shape if is_quantized(stored) else stored.shape[1:]
            for layer in range(model.config.num_layers):
                name = ".".join(("model", "layers", str(layer), *path[2:]))
                expected[name] = ExpectedTensor(path, layer, tuple(shape))
        else:
            expected[".".join(path)] = ExpectedTensor(path, None, tuple(stored.shape))
    return expected


def check_tensors(checkpoint: Checkpoint, model: Llama) -> None:
    """Compare what the checkpoint holds with what the model needs, before any weight is read.

    Raises:
        UserError: tensors missing, unexpected, of another shape or of a dtype that is not read.
    """
    expected, found = expected_tensors(model), checkpoint.tensors
    ignored = sorted(name for name in found if name.endswith("rotary_emb.inv_freq") or name == "rope_freqs.weight")
    if ignored:
        logger.info("%d rotary tables in the checkpoint are not read: the config decides", len(ignored))
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected and name not in ignored]
    if model.config.tie_embeddings and "lm_head.weight" in extra:
        _check_tied_head(checkpoint)
        extra.remove("lm_head.weight")
    if missing:
        raise UserError(_describe_missing(checkpoint, expected, missing, extra))
    if extra:
        raise UserError(
            f"{checkpoint.name}: {len(extra)} of {len(found)} tensors have no place in the model that config.json "
            f"describes, first {extra[0]!r} in {found[extra[0]].file.name}. Nothing is dropped silently: "
            "check that config.json belongs to these weights"
        )
    for name, tensor in expected.items():
        _check_tensor(checkpoint, name, tensor)


def _check_tensor(checkpoint: Checkpoint, name: str, expected: ExpectedTensor) -> None:
    found = checkpoint.tensors[name]
    if tuple(found.shape) != expected.shape:
        raise UserError(
            f"{found.file}: tensor {name} has shape {tuple(found.shape)}, but config.json asks for {expected.shape}"
        )
    if found.dtype not in READABLE_DTYPES:
        raise UserError(
            f"{found.file}: tensor {name} has dtype {found.dtype}; weights are read from float32, float16 or bfloat16"
        )


def _describe_missing(
    checkpoint: Checkpoint, expected: Mapping[str, ExpectedTensor], missing: list[str], extra: list[str]
) -> str:
    text = f"{checkpoint.name}: {len(missing)} of {len(expected)} tensors are missing, first {missing[0]!r}"
    if extra:
        nearest = difflib.get_close_matches(missing[0], extra, n=1, cutoff=0) or extra[:1]
        text += f"; {len(extra)} unexpected ones are there, such as {nearest[0]!r}"
    if any(name.startswith("base_model.") or ".lora_" in name for name in extra):
        text += ". This looks like an unmerged PEFT dump: merge it with PEFT's merge_and_unload() and save it again"
    return text + ". Weights are never made up in place of missing ones"


def _check_tied_head(checkpoint: Checkpoint) -> None:
    head, embedding = checkpoint.read("lm_head.weight"), checkpoint.read("model.embed_tokens.weight")
    if head.shape != embedding.shape:
        raise UserError(
            f"{checkpoint.name}: config.json says tie_word_embeddings, but lm_head.weight has shape {head.shape} and "
            f"model.embed_tokens.weight {embedding.shape}"
        )
    difference = max(
        float(np.abs(head[i : i + 4096].astype(np.float32) - embedding[i : i + 4096].astype(np.float32)).max())
        for i in range(0, len(head), 4096)
    )
    if difference:
        raise UserError(
            f"{checkpoint.name}: config.json says tie_word_embeddings, but lm_head.weight and "
            f"model.embed_tokens.weight differ (largest difference {difference:.3g}). Set tie_word_embeddings to "
            "false to keep both, or remove lm_head.weight"
        )


def load_frozen(checkpoint: Checkpoint, model: Llama, quantization: str, on_tensor: Callable[[], None]) -> nnx.State:
    """Read, quantise and stack the frozen parameters.

    One tensor is in host memory at a time, and one in its original dtype on the device.

    Args:
        checkpoint: checked by `check_tensors`.
        model: the declared model.
        quantization: the format of the linear layers' weights, a key of FORMATS.
        on_tensor: called after every tensor.
    """
    declared = dict(nnx.to_flat_state(nnx.state(model, Frozen)))
    arrays: dict[Path, Any] = {}
    by_place = sorted(
        expected_tensors(model).items(), key=lambda item: (str(checkpoint.tensors[item[0]].file), item[0])
    )
    for name, expected in by_place:
        stored = declared[expected.path].get_value()
        value = _store(jnp.asarray(checkpoint.read(name)), stored, quantization)
        if expected.layer is None:
            arrays[expected.path] = value
        else:
            if expected.path not in arrays:
                arrays[expected.path] = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), stored)
            arrays[expected.path] = _set_layer(arrays[expected.path], value, expected.layer)
        on_tensor()
    return nnx.from_flat_state([(path, variable.replace(arrays[path])) for path, variable in declared.items()])


def _store(weight: jax.Array, declared: Any, quantization: str) -> Any:
    if is_quantized(declared):
        return FORMATS[quantization].quantize(weight)
    return weight.astype(declared.dtype)


@partial(jax.jit, donate_argnums=0)
def _set_layer(stacked: Any, value: Any, layer: jax.Array) -> Any:
    return jax.tree.map(lambda stack, one: stack.at[layer].set(one), stacked, value)


def split(model: Llama) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Split a declared model into its graph, its frozen and its adapter parameters (without values)."""
    return nnx.split(model, Frozen, Adapter)
