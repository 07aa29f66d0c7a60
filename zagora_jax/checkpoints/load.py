"""From a checkpoint's tensors to the model's frozen parameters, a tensor at a time."""

import difflib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.llama import Llama
from models.parameters import Frozen, Path, by_path
from models.quantization import is_quantized, quantize
from zagora_jax.checkpoints.checkpoint import Checkpoint, TensorInfo
from zagora_jax.checkpoints.huggingface import describe_unexpected
from zagora_jax.errors import UserError

logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMPARED_ROWS = 4096  # of head and embedding, held in memory at a time


@dataclass(frozen=True)
class ExpectedTensor:
    """Where a checkpoint's tensor goes: a parameter's path, the layer of its stack (None: no stack), its shape."""

    path: Path
    layer: int | None
    shape: tuple[int, ...]


def is_stacked(path: Path) -> bool:
    """Whether a parameter is a stack over layers."""
    return path[:2] == ("model", "layers")


def expected_tensors(model: Llama) -> dict[str, ExpectedTensor]:
    """List the tensors that a Hugging Face checkpoint of `model` holds, by name."""
    expected = {}
    for path, variable in by_path(nnx.state(model, Frozen)).items():
        stored = variable.get_value()
        if is_stacked(path):
            shape = stored.shape if is_quantized(stored) else stored.shape[1:]
            for layer in range(model.config.num_layers):
                name = ".".join(("model", "layers", str(layer), *path[2:]))
                expected[name] = ExpectedTensor(path, layer, tuple(shape))
        else:
            expected[".".join(path)] = ExpectedTensor(path, None, tuple(stored.shape))
    return expected


def check_tensors(checkpoint: Checkpoint, model: Llama) -> None:
    """Compare what the checkpoint holds with what the model needs, before any device memory is used.

    Raises:
        UserError: tensors missing, unexpected or of another shape; a tied head that differs from the embedding.
    """
    expected, found = expected_tensors(model), checkpoint.tensors
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    tied_head = model.config.tie_embeddings and HEAD in extra
    if tied_head:
        extra.remove(HEAD)
    if missing:
        raise UserError(_describe_missing(checkpoint, expected, missing, extra))
    if extra:
        raise UserError(
            f"{checkpoint.name}: {len(extra)} of {len(found)} tensors have no place in the model that config.json "
            f"describes, first {extra[0]!r} in {found[extra[0]].file.name}. Nothing is dropped silently: "
            "check that config.json belongs to these weights"
        )
    for name, tensor in expected.items():
        if tuple(found[name].shape) != tensor.shape:
            raise UserError(
                f"{found[name].file}: tensor {name} has shape {tuple(found[name].shape)}, but config.json asks for "
                f"{tensor.shape}"
            )
    if tied_head:
        _check_tied_head(checkpoint)
    if model.config.tie_embeddings:
        logger.info("%s: the output head is %s (tie_word_embeddings)", checkpoint.name, EMBEDDING)


def _describe_missing(
    checkpoint: Checkpoint, expected: Mapping[str, ExpectedTensor], missing: list[str], extra: list[str]
) -> str:
    text = f"{checkpoint.name}: {len(missing)} of {len(expected)} tensors are missing, first {missing[0]!r}"
    if extra:
        nearest = difflib.get_close_matches(missing[0], extra, n=1, cutoff=0)[0]
        text += f"; {len(extra)} unexpected ones are there, such as {nearest!r}"
    if missing == [HEAD]:
        text += ". If the embedding serves as output head, set tie_word_embeddings to true in config.json"
    if what := describe_unexpected(extra):
        return f"{text}. {what}"
    return f"{text}. Weights are never made up in place of missing ones"


def _check_tied_head(checkpoint: Checkpoint) -> None:
    head, embedding = checkpoint.tensors[HEAD], checkpoint.tensors[EMBEDDING]
    problem = f"{checkpoint.name}: config.json says tie_word_embeddings, but {HEAD} and {EMBEDDING}"
    if head.shape != embedding.shape:
        raise UserError(f"{problem} have shapes {head.shape} and {embedding.shape}")
    difference = np.float32(0)
    for start in range(0, head.shape[0], COMPARED_ROWS):
        rows = (start, min(start + COMPARED_ROWS, head.shape[0]))
        ours, theirs = (checkpoint.read_rows(name, *rows).astype(np.float32) for name in (HEAD, EMBEDDING))
        difference = np.maximum(difference, np.abs(ours - theirs).max())  # unlike max(), it keeps NaN
    if difference != 0:
        raise UserError(
            f"{problem} differ (largest difference {difference:.3g}). Set tie_word_embeddings to false to keep both, "
            f"or remove {HEAD}"
        )


class Destination(Protocol):
    """Where the stored form of a parameter goes, an array or a quantised tensor at a time."""

    def empty(self, path: Path, declared: Any) -> Any:
        """Return the stack of layers of a parameter, without values yet."""

    def set_layer(self, path: Path, stack: Any, value: Any, layer: int) -> Any:
        """Return the stack with one layer's value in its place; the stack given is used up."""

    def whole(self, path: Path, value: Any) -> Any:
        """Bring a parameter that is not stacked, or a whole stack, into its form."""


class OneDevice:
    """Everything stays on the device that it was stored on, as it is."""

    def empty(self, path: Path, declared: Any) -> Any:
        """Return zeros."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), declared)

    def set_layer(self, path: Path, stack: Any, value: Any, layer: int) -> Any:
        """Put the value in."""
        return set_layer(stack, value, layer)

    def whole(self, path: Path, value: Any) -> Any:
        """Return the value."""
        return value


ONE_DEVICE = OneDevice()


def load_frozen(
    checkpoint: Checkpoint,
    model: Llama,
    quantization: str,
    on_tensor: Callable[[], None],
    destination: Destination,
) -> nnx.State:
    """Read, quantise and stack the frozen parameters.

    While one tensor is quantised on the device, the next is read: two are in host memory at a time, and one, in
    its original dtype, on the device.

    Args:
        checkpoint: checked by `check_tensors`.
        model: the declared model.
        quantization: the format of the linear layers' weights, a key of FORMATS, or "none".
        on_tensor: called after every tensor.
        destination: where the parameters go.

    Raises:
        UserError: a tensor holds a number that is not finite.
    """
    declared = by_path(nnx.state(model, Frozen))
    values: dict[Path, Any] = {}
    previous: tuple[str, jax.Array] | None = None
    expected = expected_tensors(model)
    for name in sorted(expected, key=lambda name: _place(checkpoint.tensors[name])):
        path, layer = expected[name].path, expected[name].layer
        stored = declared[path].get_value()
        value, is_finite = _stored(checkpoint, name, quantization if is_quantized(stored) else stored.dtype)
        if layer is None:
            values[path] = destination.whole(path, value)
        else:
            stack = values[path] if path in values else destination.empty(path, stored)
            values[path] = destination.set_layer(path, stack, value, layer)
        _require_finite(checkpoint, previous)
        previous = (name, is_finite)
        on_tensor()
    _require_finite(checkpoint, previous)
    return nnx.from_flat_state([(path, variable.replace(values[path])) for path, variable in declared.items()])


def _place(tensor: TensorInfo) -> tuple[str, int]:
    return str(tensor.file), tensor.offset


def _stored(checkpoint: Checkpoint, name: str, form: str | jnp.dtype) -> tuple[Any, jax.Array]:
    """Read a tensor in a quantised format or a dtype; what is stored in the format is taken as it is."""
    if isinstance(form, str) and checkpoint.format_of(name) == form:
        packed = jax.tree.map(jnp.asarray, checkpoint.read_packed(name))
        return packed, _all_finite([leaf for leaf in jax.tree.leaves(packed) if leaf.dtype == jnp.float32])
    return _store(checkpoint.read(name), form)


@jax.jit
def _all_finite(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(array).all() for array in arrays]).all()


@partial(jax.jit, static_argnums=1)
def _store(weight: jax.Array, form: str | jnp.dtype) -> tuple[Any, jax.Array]:
    """Bring a tensor into a quantised format or a dtype; also tell whether all of it is finite."""
    if isinstance(form, str):
        return quantize(form, weight), jnp.isfinite(weight).all()
    stored = weight.astype(form)
    return stored, jnp.isfinite(stored).all()


@partial(jax.jit, donate_argnums=0)
def set_layer(stack: Any, value: Any, layer: int | jax.Array) -> Any:
    """Put one layer's value into its place in the stack, which is donated."""
    return jax.tree.map(lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, layer, 0), stack, value)


def _require_finite(checkpoint: Checkpoint, tensor: tuple[str, jax.Array] | None) -> None:
    """Wait for a tensor to be stored, and refuse it if it holds an infinity or NaN."""
    if tensor is not None and not tensor[1]:
        name = tensor[0]
        raise UserError(
            f"{checkpoint.tensors[name].file}: tensor {name} holds numbers that are not finite in the dtype it is kept "
            "in. The file is damaged, or was saved after a training that diverged"
        )
