"""Updates as they travel: compressed pseudo-gradients, and global adapters, in safetensors files that prove themselves.

A file says in its header what it is, whose, and the SHA-256 of its arrays. It is read into memory that the expected
shapes bound, and is used only when header, shapes, checksum and values are what they should be.
"""

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sharding.compression import Compression, decode, encode, message_bytes
from zagora_jax.checkpoints.safetensors_file import read_header, read_metadata, read_tensor
from zagora_jax.checkpoints.safetensors_writer import write_safetensors
from zagora_jax.errors import UserError
from zagora_jax.sites.outer import Global, Vectors, digest, minus, prefixed, without_prefix, zeros

FORMAT = "zagora-jax sites 1"

Shapes = Mapping[str, tuple[int, ...]]
Messages = dict[str, np.ndarray]
"""What is sent for each parameter: float32 in its shape, or with compression uint8[message_bytes]."""

_encode = jax.jit(encode, static_argnums=1)
_decode = jax.jit(decode, static_argnums=(1, 2))


@dataclass(frozen=True)
class Update:
    """One site's messages of a round, and how they are compressed."""

    messages: Messages
    compression: Compression

    def vectors(self, shapes: Shapes) -> Vectors:
        """Return the pseudo-gradient."""
        return expand(self.messages, shapes, self.compression)


def compress(vectors: Vectors, residual: Vectors, compression: Compression) -> tuple[Messages, Vectors]:
    """Compress the sum of both, and return what is to be sent and what was rounded off: the next call's residual."""
    corrected = {name: values + residual[name] for name, values in vectors.items()}
    if compression == "none":
        return corrected, {name: np.zeros_like(values) for name, values in corrected.items()}
    with _on_host():
        rows = {name: jnp.asarray(values.reshape(1, -1)) for name, values in corrected.items()}
        sent = {name: np.asarray(_encode(row, compression))[0] for name, row in rows.items()}
    shapes = {name: values.shape for name, values in corrected.items()}
    return sent, minus(corrected, expand(sent, shapes, compression))


def expand(messages: Messages, shapes: Shapes, compression: Compression) -> Vectors:
    """Return the vectors that messages stand for; the same bits wherever that is computed."""
    if compression == "none":
        return messages
    with _on_host():
        rows = {name: jnp.asarray(message)[None] for name, message in messages.items()}
        values = {name: _decode(row, math.prod(shapes[name]), compression) for name, row in rows.items()}
        return {name: np.asarray(row).reshape(shapes[name]) for name, row in values.items()}


def _on_host() -> Any:
    """Compute on the CPU: a card's memory is planned to the byte. Where JAX_PLATFORMS leaves it out, on the card."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return jax.default_device(None)


def message_specs(shapes: Shapes, compression: Compression) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shape and type of each message of an update."""
    if compression == "none":
        return {name: (tuple(shape), np.dtype(np.float32)) for name, shape in shapes.items()}
    size = partial(message_bytes, compression=compression)
    return {name: ((size(math.prod(shape)),), np.dtype(np.uint8)) for name, shape in shapes.items()}


def update_file(update: Update, *, site: str, round_number: int) -> bytes:
    """Return the content of an update's file."""
    facts = {"kind": "update", "site": site, "compression": update.compression, "round": str(round_number)}
    return _file(update.messages, facts)


def global_file(state: Global) -> bytes:
    """Return the content of a global adapter's file; before the first round the velocity is zero, and left out."""
    arrays = prefixed("adapter", state.adapter)
    if state.round:
        arrays |= prefixed("velocity", state.velocity)
    return _file(arrays, {"kind": "global", "round": str(state.round)})


def read_update(path: Path, name: str, shapes: Shapes, *, site: str, round_number: int) -> Update:
    """Read an update, and check all of it.

    Args:
        path: a local copy of the file.
        name: of the file in the folder, for errors.
        shapes: of the adapter.
        site: whose update it should be.
        round_number: of which round.

    Raises:
        UserError: it is not that, is damaged, does not fit the adapter, or holds numbers that are not finite.
    """
    facts = _facts(path, name, {"kind": "update", "site": site, "round": str(round_number)})
    compression = facts.get("compression")
    if compression not in ("none", "int8", "int4"):
        raise UserError(f"{name}: compression: expected none, int8 or int4, found {compression}")
    messages = _arrays(path, name, message_specs(shapes, compression), facts)  # type: ignore[arg-type]
    update = Update(messages, compression)  # type: ignore[arg-type]
    _require_finite(update.vectors(shapes), name)
    return update


def read_global(path: Path, name: str, shapes: Shapes, round_number: int) -> Global:
    """Read a global adapter, checked, as `read_update`."""
    facts = _facts(path, name, {"kind": "global", "round": str(round_number)})
    of_each = {parameter: (tuple(shape), np.dtype(np.float32)) for parameter, shape in shapes.items()}
    parts = ("adapter", "velocity") if round_number else ("adapter",)
    specs = {f"{part}.{key}": value for part in parts for key, value in of_each.items()}
    arrays = _arrays(path, name, specs, facts)
    _require_finite(arrays, name)
    adapter = without_prefix("adapter", arrays)
    return Global(round_number, adapter, without_prefix("velocity", arrays) or zeros(adapter))


def _require_finite(arrays: Vectors, name: str) -> None:
    for parameter, values in arrays.items():
        if not np.isfinite(values).all():
            raise UserError(f"{name}: {parameter} holds numbers that are not finite")


def _file(arrays: Mapping[str, np.ndarray], facts: Mapping[str, str]) -> bytes:
    file = io.BytesIO()
    specs = {name: (values.shape, values.dtype) for name, values in arrays.items()}
    write_safetensors(file, specs, arrays.__getitem__, {"format": FORMAT, **facts, "sha256": digest(arrays)})
    return file.getvalue()


def _facts(path: Path, name: str, expected: Mapping[str, str]) -> dict[str, str]:
    try:
        facts = read_metadata(path)
    except UserError as error:
        raise UserError(str(error).replace(str(path), name)) from error
    for key, value in {"format": FORMAT, **expected}.items():
        if facts.get(key) != value:
            raise UserError(f"{name}: {key}: expected {value!r}, found {facts.get(key)!r}")
    return facts


def _arrays(
    path: Path, name: str, specs: Mapping[str, tuple[tuple[int, ...], np.dtype]], facts: Mapping[str, str]
) -> Vectors:
    header = read_header(path)
    for tensor in sorted(header.keys() | specs.keys()):
        info, spec = header.get(tensor), specs.get(tensor)
        found = None if info is None else (info.shape, info.dtype)
        if found != spec:
            raise UserError(f"{name}: tensor {tensor}: expected {_written(spec)}, found {_written(found)}")
    arrays = {tensor: read_tensor(info) for tensor, info in header.items()}
    if digest(arrays) != facts.get("sha256"):
        raise UserError(f"{name}: the arrays have not the checksum that the header gives")
    return arrays


def _written(spec: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "nothing" if spec is None else f"{spec[1].name}{list(spec[0])}"
