"""Random weights of a known size, made in place on the device: for planning and benchmarks, never for use."""

import difflib
import re
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import jax
import jax.numpy as jnp
from flax import nnx

from models.llama import Llama
from models.parameters import Frozen, by_path
from models.quantization import is_quantized
from zagora_jax.checkpoints.known_models import KNOWN_MODELS
from zagora_jax.checkpoints.load import ONE_DEVICE, Destination
from zagora_jax.errors import UserError

PREFIX = "synthetic:"

# Of the weights made: near what trained checkpoints have, so that activations stay finite.
STANDARD_DEVIATION = 0.02


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
    """Draw every frozen parameter of the declared `model` on the device, in its stored form."""
    root = jax.random.key(seed)
    declared = by_path(nnx.state(model, Frozen))
    return nnx.from_flat_state(
        [
            (path, variable.replace(destination.whole(path, _draw(variable.get_value(), path, key))))
            for (path, variable), key in zip(declared.items(), jax.random.split(root, len(declared)), strict=True)
        ]
    )


def _draw(declared: Any, path: tuple, key: jax.Array) -> Any:
    if "norm" in path[-2]:
        return jnp.ones(declared.shape, declared.dtype)
    if not is_quantized(declared):
        return _normal(key, declared.shape, declared.dtype)
    # Second-level scales of one absmax everywhere: codes of the table have a standard deviation near 0.55.
    absmax = STANDARD_DEVIATION / 0.55
    return jax.tree_util.tree_map_with_path(
        lambda leaf_path, leaf: _draw_quantized(leaf_path[-1].name, leaf, key, absmax), declared
    )


def _draw_quantized(field: str, leaf: jax.ShapeDtypeStruct, key: jax.Array, absmax: float) -> jax.Array:
    match field:
        case "codes" | "absmax":
            return _bytes(jax.random.fold_in(key, len(field)), leaf.shape)
        case "offset":
            return jnp.full(leaf.shape, absmax, leaf.dtype)
        case _:
            return jnp.full(leaf.shape, absmax / 8, leaf.dtype)


@partial(jax.jit, static_argnums=1)
def _bytes(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.map(lambda k: jax.random.bits(k, shape[1:], jnp.uint8), jax.random.split(key, shape[0]))


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    def row(k: jax.Array) -> jax.Array:
        return (jax.random.normal(k, shape[1:]) * STANDARD_DEVIATION).astype(dtype)

    return jax.lax.map(row, jax.random.split(key, shape[0]), batch_size=1024)
