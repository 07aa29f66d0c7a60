"""From a checkpoint's tensors to the model's frozen parameters, a tensor at a time."""

import difflib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.llama import Llama
from models.parameters import Adapter, Frozen, Path, by_path
from models.quantization import is_quantized
from models.tables import QuantizedTable
from zagora_jax import processes
from zagora_jax.checkpoints.checkpoint import Checkpoint, TensorInfo
from zagora_jax.checkpoints.huggingface import describe_unexpected
from zagora_jax.checkpoints.read_ahead import read_ahead
from zagora_jax.checkpoints.reading import DamagedCacheError, Prepare, Reading, SourceReading, TableReading
from zagora_jax.errors import UserError
from zagora_jax.hanging import watched

if TYPE_CHECKING:
    from zagora_jax.checkpoints.cache_writer import CacheWriter
    from zagora_jax.checkpoints.quantized_cache import QuantizedCache

logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMPARED_ROWS = 4096  # of head and embedding, held in memory at a time
NO_DISK = "The disk that the model lies on does not answer; nothing was begun yet"


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
    for path, variable in (by_path(nnx.state(model, Frozen)) | trained_in_full(model)).items():
        stored = variable.get_value()
        if is_stacked(path):
            shape = stored.shape if is_quantized(stored) else stored.shape[1:]
            for layer in range(model.config.num_layers):
                name = ".".join(("model", "layers", str(layer), *path[2:]))
                expected[name] = ExpectedTensor(path, layer, tuple(shape))
        else:
            is_norm = isinstance(variable, Adapter) and variable.get_metadata("axes")[0] == "layers"  # a stack of one
            expected[".".join(path)] = ExpectedTensor(path, None, tuple(stored.shape[is_norm:]))
    return expected


def trained_in_full(model: Llama) -> dict[Path, nnx.Variable]:
    """Return the trained parameters that take the place of weights of the base model."""
    declared = by_path(nnx.state(model, Adapter))
    return {path: variable for path, variable in declared.items() if "whole" in variable.get_metadata()}


def read_originals(
    checkpoint: Checkpoint, model: Llama, on_tensor: Callable[[int], None] = lambda _: None
) -> dict[Path, np.ndarray]:
    """Read what is trained in full as the base model has it, float32 and as declared, by path.

    Raises:
        UserError: a tensor holds a number that is not finite.
    """
    whole = trained_in_full(model)
    originals = {path: np.zeros(variable.get_value().shape, np.float32) for path, variable in whole.items()}
    for name, tensor in expected_tensors(model).items():
        if tensor.path in whole:
            values = checkpoint.read(name).astype(np.float32)
            require_finite(checkpoint, name, np.isfinite(values).all())
            originals[tensor.path].reshape(-1, *values.shape)[tensor.layer or 0] = values
            on_tensor(values.size)
    return originals


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
        return jax.tree.map(jnp.asarray, value)


ONE_DEVICE = OneDevice()


def load_frozen(
    checkpoint: Checkpoint,
    model: Llama,
    quantization: str,
    on_tensor: Callable[[int], None],
    destination: Destination,
    cache: "QuantizedCache | None" = None,
    *,
    fill_cache: bool = False,
    prepare: Prepare | None = None,
) -> nnx.State:
    """Read, quantise and stack the frozen parameters.

    Threads read ahead, in pieces, while what was read before is quantised on the device. The host's memory holds a few
    pieces at a time, and layers that wait for being written to the cache; the device a tensor in its original dtype.

    Args:
        checkpoint: checked by `check_tensors`.
        model: the declared model.
        quantization: the format of the linear layers' weights, a key of FORMATS, or "none".
        on_tensor: called after every tensor with the number of its elements.
        destination: where the parameters go.
        cache: what was quantised before comes from there, and what is quantised now goes there too.
        fill_cache: whether all layers are to be in the cache in the end.
        prepare: makes what is held of each tensor of what is read; without a cache.

    Raises:
        UserError: a tensor holds a number that is not finite, or the cache cannot be filled.
    """
    kind: type[Loading] = Loading
    if not processes.present().alone:
        from zagora_jax.checkpoints.shared_load import SharedLoading

        kind = SharedLoading
    loading = kind(checkpoint, model, quantization, on_tensor, destination, cache, prepare)
    if cache is None:
        return loading.run(None)
    from zagora_jax.checkpoints.cache_writer import writing

    with writing(cache, all_layers=fill_cache) as writer:
        return loading.run(writer)


class Loading:
    """The state of one call of `load_frozen`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: Llama,
        quantization: str,
        on_tensor: Callable[[int], None],
        destination: Destination,
        cache: "QuantizedCache | None",
        prepare: Prepare | None,
    ):
        self.checkpoint, self.on_tensor = checkpoint, on_tensor
        self.quantization, self.embeddings = quantization, model.embeddings
        self.destination, self.cache, self.prepare = destination, cache, prepare
        self.declared = by_path(nnx.state(model, Frozen))
        expected = expected_tensors(model)
        self.expected = {name: tensor for name, tensor in expected.items() if tensor.path in self.declared}
        self.values: dict[Path, Any] = {}
        self.unsettled: tuple[Reading, Any, jax.Array | None] | None = None

    def run(self, writer: "CacheWriter | None") -> nnx.State:
        """Read everything."""
        left = deque((self.cache and self.cache.reading(name)) or self._from_source(name) for name in self._order())
        while left:
            try:
                self._read(left, writer)
            except DamagedCacheError as damage:
                assert self.cache is not None
                lost = self.cache.discard(damage)
                others = [reading for reading in left if reading.name not in lost]
                left = deque([*(self._from_source(name) for name in self._order() if name in lost), *others])
        return self.loaded()

    def loaded(self) -> nnx.State:
        """Return what was read."""
        return nnx.from_flat_state([(path, v.replace(self.values[path])) for path, v in self.declared.items()])

    def _order(self) -> list[str]:
        """Return the tensors' names: layer by layer as the files have them, and so within each layer."""
        places = {name: _place(self.checkpoint.tensors[name]) for name in self.expected}
        first: dict[int | str, tuple[str, int]] = {}
        for name, tensor in self.expected.items():
            group = name if tensor.layer is None else tensor.layer
            first[group] = min(first.get(group, places[name]), places[name])

        def place(name: str) -> tuple:
            layer = self.expected[name].layer
            return first[name if layer is None else layer], places[name]

        return sorted(self.expected, key=place)

    def _from_source(self, name: str) -> Reading:
        stored = self.declared[self.expected[name].path].get_value()
        if isinstance(stored, QuantizedTable):
            return TableReading(self.checkpoint, name, self.embeddings)
        form = self.quantization if is_quantized(stored) else stored.dtype
        return SourceReading(self.checkpoint, name, form, hashes=self.cache is not None, prepare=self.prepare)

    def _read(self, left: "deque[Reading]", writer: "CacheWriter | None") -> None:
        """Read one tensor after the other, and take each that is in its place out of `left`."""
        with read_ahead([job for reading in left for job in reading.jobs]) as results:
            while left:
                reading = left[0]
                value, is_finite = reading.finish(self._in_time(reading, results))
                self._put(reading.name, value)
                if writer is not None and isinstance(reading, SourceReading):
                    writer.expect(reading.name, value)
                self._settle(writer)
                self.unsettled = (reading, value, is_finite)
                left.popleft()
        self._settle(writer)

    def _in_time(self, reading: Reading, results: Iterator[Any]) -> Iterator[Any]:
        """Yield the results of a tensor's jobs, and name a disk that gives none."""
        for _ in reading.jobs:
            file = self.checkpoint.tensors[reading.name].file
            with watched(f"reading tensor {reading.name} of {file}, or of what was quantised of it", advice=NO_DISK):
                result = next(results)
            yield result

    def _put(self, name: str, value: Any) -> None:
        """Put a tensor in its place."""
        path, layer = self.expected[name].path, self.expected[name].layer
        if layer is None:
            self.values[path] = self.destination.whole(path, value)
            return
        if path not in self.values:
            self.values[path] = self.destination.empty(path, self.declared[path].get_value())
        self.values[path] = self.destination.set_layer(path, self.values[path], value, layer)

    def _settle(self, writer: "CacheWriter | None") -> None:
        """Wait for the tensor before the present one: no more of them than that are on the way at a time."""
        if self.unsettled is None:
            return
        reading, value, is_finite = self.unsettled
        self.unsettled = None
        if is_finite is not None:
            require_finite(self.checkpoint, reading.name, is_finite)
        if writer is not None and isinstance(reading, SourceReading):
            writer.add(reading.name, value, reading.digests)
        self.on_tensor(math.prod(self.expected[reading.name].shape))


def _place(tensor: TensorInfo) -> tuple[str, int]:
    return str(tensor.file), tensor.offset


@partial(jax.jit, donate_argnums=0)
def set_layer(stack: Any, value: Any, layer: int | jax.Array) -> Any:
    """Put one layer's value into its place in the stack, which is donated."""
    return jax.tree.map(lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, layer, 0), stack, value)


def require_finite(checkpoint: Checkpoint, name: str, is_finite: jax.Array | np.bool_) -> None:
    """Refuse a tensor that holds an infinity or NaN."""
    if not is_finite:
        raise UserError(
            f"{checkpoint.tensors[name].file}: tensor {name} holds numbers that are not finite in the dtype it is kept "
            "in. The file is damaged, or was saved after a training that diverged"
        )
