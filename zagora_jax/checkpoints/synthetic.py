"""Random weights of a known size, made in place on the device: for planning and benchmarks, never for use."""

import difflib
import math
import re
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import tables
from models.llama import Llama
from models.parameters import Frozen, Path, by_path
from models.quantization import is_quantized, nf4, quantize
from models.quantization.nf4 import NF4Tensor
from models.tables import QuantizedTable
from zagora_jax.checkpoints.known_models import KNOWN_MODELS
from zagora_jax.checkpoints.load import ONE_DEVICE, Destination, is_stacked, trained_in_full
from zagora_jax.errors import UserError

PREFIX = "synthetic:"

# Of the weights made: near what trained checkpoints have, so that activations stay finite.
STANDARD_DEVIATION = 0.02
ROWS_DRAWN_TOGETHER = 256  # or the largest part of them that divides all rows


def synthetic_config(name: str) -> dict[str, Any]:
    """Return the config.json of a name such as "synthetic:llama-3-8b" or "synthetic:llama-3-8b?layers=4"."""
    size, _, query = name.removeprefix(PREFIX).partition("?")
    if size not in KNOWN_MODELS:
        nearest = difflib.get_close_matches(size, KNOWN_MODELS, n=3, cutoff=0.3)
        hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
        raise UserError(f"--model {name}: no known size {size!r}{hint}. Known: {', '.join(KNOWN_MODELS)}")
    config = dict(KNOWN_MODELS[size])
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key != "layers" or not re.fullmatch(r"[1-9]\d*", value):
            raise UserError(f"--model {name}: expected ?layers=N after the size, found {key}={value}")
        config["num_hidden_layers"] = int(value)
    return config


def synthetic_frozen(model: Llama, seed: int, destination: Destination = ONE_DEVICE) -> nnx.State:
    """Draw every frozen parameter of the declared `model`, a layer at a time, in its stored form."""
    root = jax.random.key(seed)
    declared = by_path(nnx.state(model, Frozen))
    drawn = []
    for (path, variable), key in zip(declared.items(), jax.random.split(root, len(declared)), strict=True):
        stored = variable.get_value()
        if is_stacked(path):
            value = _draw_stack(stored, path, key, model.quantization, destination)
        else:
            form = model.embeddings if isinstance(stored, QuantizedTable) else model.quantization
            value = destination.whole(path, _draw(stored, path, key, form))
        drawn.append((path, variable.replace(value)))
    return nnx.from_flat_state(drawn)


def synthetic_originals(model: Llama, seed: int) -> dict[Path, np.ndarray]:
    """Draw what is trained in full: norms of ones, and tables."""
    key = jax.random.fold_in(jax.random.key(seed), 1)
    return {
        path: np.asarray(_draw(variable.get_value(), path, key, "none"))
        for path, variable in trained_in_full(model).items()
    }


def _draw_stack(declared: Any, path: Path, key: jax.Array, quantization: str, destination: Destination) -> Any:
    stack = destination.empty(path, declared)
    layers = jax.tree.leaves(declared)[0].shape[0]
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), declared)
    for layer, layer_key in enumerate(jax.random.split(key, layers)):
        value = jax.tree.map(lambda leaf: leaf[0], _draw(one, path, layer_key, quantization))
        stack = destination.set_layer(path, stack, value, layer)
    return stack


def _draw(declared: Any, path: Path, key: jax.Array, quantization: str) -> Any:
    if "norm" in path[-2]:
        return jnp.ones(declared.shape, declared.dtype)
    if isinstance(declared, QuantizedTable):
        return _draw_table(key, declared.shape, quantization)
    if isinstance(declared, NF4Tensor):
        return _draw_nf4(declared, key)
    if is_quantized(declared):
        weight = _draw_normal(key, declared.shape, jnp.dtype(jnp.float32))
        return jax.tree.map(lambda leaf: leaf[None], quantize(quantization, weight))
    return _draw_normal(key, declared.shape, declared.dtype)


def _draw_nf4(declared: NF4Tensor, key: jax.Array) -> NF4Tensor:
    """Draw all codes alike, and scales of one magnitude but both signs: the mean of the table is not zero."""
    of_codes, of_signs = jax.random.split(key)
    scale = STANDARD_DEVIATION / float(np.sqrt(np.mean(nf4.TABLE**2)))
    return NF4Tensor(
        codes=_draw_bytes(of_codes, declared.codes.shape),
        absmax=_draw_bytes(of_signs, declared.absmax.shape) // 128 * 255,  # the map's ends, close to -1 and 1
        nested_absmax=jax.tree.map(lambda leaf: jnp.full(leaf.shape, scale, leaf.dtype), declared.nested_absmax),
        offset=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), declared.offset),
        shape=declared.shape,
    )


@partial(jax.jit, static_argnums=1)
def _draw_bytes(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Draw uint8 `shape`, four bytes together."""
    count = math.prod(shape)
    words = jax.random.bits(key, (-(-count // 4),), jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[:count].reshape(shape)


@partial(jax.jit, static_argnums=(1, 2))
def _draw_table(key: jax.Array, shape: tuple[int, int], quantization: str) -> QuantizedTable:
    """Draw a table of words, some rows at a time."""
    rows, width = shape
    together = math.gcd(rows, ROWS_DRAWN_TOGETHER)

    def block(key: jax.Array) -> QuantizedTable:
        return tables.quantize(quantization, jax.random.normal(key, (together, width)) * STANDARD_DEVIATION)

    drawn = jax.lax.map(block, jax.random.split(key, rows // together))
    return jax.tree.map(lambda leaf: leaf.reshape(rows, *leaf.shape[2:]), drawn)


@partial(jax.jit, static_argnums=(1, 2))
def _draw_normal(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Draw an array, some rows at a time, so that float32 copies stay small."""
    rows = math.prod(shape[:-1])
    together = math.gcd(rows, ROWS_DRAWN_TOGETHER)

    def block(key: jax.Array) -> jax.Array:
        return (jax.random.normal(key, (together, shape[-1])) * STANDARD_DEVIATION).astype(dtype)

    return jax.lax.map(block, jax.random.split(key, rows // together)).reshape(shape)
