"""Compares how frozen weights can be held: size, error and perplexity of a model, and the speed of its forward pass.

    python benchmarks/quantizers.py MODEL [--tokens 8192] [--format nf4 ...] [--text FILE ...]

The text is that of Python's own help topics (`pydoc_data.topics`) where no files are given, in rows of 1,024 tokens;
the perplexity is over all tokens of a row but the first. The error is that of all linear weights together: the norm of
the difference over the norm of the weights. The speed is that of the best of the rows, in float32 on a CPU.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.cross_entropy import cross_entropy_sum
from models.modules import linear_modules
from models.parameters import by_path, split
from models.quantization import bits_per_parameter, dequantize, is_quantized
from zagora_jax.base import BaseModel, open_base

WIDTH = 1024
FORMATS = ("nf4", "hqq", "int8", "none")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="as train takes it")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text, at most")
    parser.add_argument("--format", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--text", nargs="+", type=Path, help="text files in place of the help topics")
    known = parser.parse_args()
    text = _help_topics() if known.text is None else "\n\n".join(path.read_text("utf-8") for path in known.text)
    print(f"{known.model} on {jax.devices()[0].device_kind}, jax {jax.__version__}\n")
    print("| quantization | bits a weight | relative error | perplexity | tokens/s, forward |")
    print("| --- | --- | --- | --- | --- |")
    for name in known.format:
        base = open_base(known.model, quantization=name, dtype="float32", lora=None)
        tokens = np.array(base.tokenizer()(text, add_special_tokens=False)["input_ids"][: known.tokens], np.int32)
        rows = tokens[: len(tokens) // WIDTH * WIDTH].reshape(-1, WIDTH)
        frozen = base.load()
        perplexity, speed = _perplexity(base, frozen, rows)
        bits = f"{_bits(base):.3f}" if name != "none" else "16 (bfloat16), 32 (float32)"
        print(f"| {name} | {bits} | {_error(base, frozen):.4f} | {perplexity:.3f} | {speed:,.0f} |", flush=True)


def _help_topics() -> str:
    from pydoc_data import topics

    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def _bits(base: BaseModel) -> float:
    shapes = [(linear.out_features, linear.in_features) for linear in linear_modules(base.model).values()]
    bits = sum(math.prod(shape) * bits_per_parameter(base.quantization, shape, base.dtype) for shape in shapes)
    return bits / sum(map(math.prod, shapes))


def _error(base: BaseModel, frozen: nnx.State) -> float:
    """Compare every linear weight with what the files hold."""
    assert base.checkpoint is not None
    squares = np.zeros(2)
    whole = jax.jit(lambda stored: dequantize(stored, jnp.dtype(jnp.float32)))
    for path, variable in by_path(frozen).items():
        stored = variable.get_value()
        if is_quantized(stored):
            for layer in range(base.model.config.num_layers):
                name = ".".join(("model.layers", str(layer), *path[2:]))
                weight = base.checkpoint.read(name).astype(np.float32)
                found = np.asarray(whole(jax.tree.map(lambda leaf, layer=layer: leaf[layer], stored)))
                squares += np.sum((found - weight) ** 2), np.sum(weight**2)
    return math.sqrt(squares[0] / squares[1]) if squares[1] else 0.0


def _perplexity(base: BaseModel, frozen: nnx.State, rows: np.ndarray) -> tuple[float, float]:
    """Return the perplexity of rows [N, WIDTH], and tokens/s of the fastest row."""
    graph, _, adapters = split(base.model)

    @jax.jit
    def loss(frozen: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, frozen, adapters)
        positions = jnp.arange(WIDTH)[None]
        hidden = model.hidden_states(tokens[None], positions, None, kernel="chunked")[0]
        return cross_entropy_sum(
            hidden,
            model.head,
            jnp.roll(tokens, -1),
            (positions[0] < WIDTH - 1).astype(jnp.float32),
        )

    total, fastest = float(loss(frozen, rows[0])), math.inf  # compiles, so it is not timed
    for row in rows[1:]:
        started = time.perf_counter()
        total += float(loss(frozen, row))
        fastest = min(fastest, time.perf_counter() - started)
    return math.exp(total / (len(rows) * (WIDTH - 1))), WIDTH / fastest


if __name__ == "__main__":
    main()
