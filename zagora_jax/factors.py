"""Adapters that begin as a part of the weights: PiSSA (arXiv:2404.02948) and LoftQ (arXiv:2310.08659).

PiSSA takes the principal part s B0 A0 of rank r out of a weight W: what is quantised and frozen is W - s B0 A0, and the
adapter begins as B0 and A0. LoftQ (one iteration, as PEFT's `replace_lora_weights_loftq`) leaves W as it is, and the
adapter begins as the principal part of what quantisation lost. Here s is the adapter's scale.
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models.llama import Llama
from models.modules import linear_modules
from models.parameters import Path
from models.quantization import dequantize, quantize
from zagora_jax.adapter import PEFT_PREFIX

# Of the subspace that is sought: directions beside those that are kept, and how often it is multiplied by the weight.
# The error falls with (s[r + SPARE] / s[r]) ** (2 * ITERATIONS + 1) (Halko et al. 2011, arXiv:0909.4061, section 4.5).
SPARE, ITERATIONS = 32, 16


class InitialFactors:
    """What the adapters of linear layers begin with, found while the weights are read.

    Attributes:
        of_parameters: float32 stacks [L, ...], by the path of the adapter's parameter.
    """

    def __init__(
        self,
        model: Llama,
        kind: Literal["pissa", "loftq"],
        quantization: str,
        seed: int = 0,
        known: Mapping[str, np.ndarray] | None = None,
    ):
        """Prepare to factor the adapted weights of `model`.

        Args:
            model: declared with its adapters.
            kind: see above.
            quantization: how weights will be held.
            seed: of the subspaces that the search begins with.
            known: factors that were found before, by PEFT's names: only what they take out of the weights is done.
        """
        self.kind, self.quantization, self.seed, self.known = kind, quantization, seed, known
        self.of_parameters: dict[Path, np.ndarray] = {}
        self._places: dict[str, tuple[Path, int, int, float]] = {}
        for path, linear in linear_modules(model).items():
            if linear.adapter is None:
                continue
            for name, weight in (("lora_A", linear.adapter.lora_A), ("lora_B", linear.adapter.lora_B)):
                parameter = (*path.split("."), "adapter", name)
                self.of_parameters[parameter] = np.zeros(weight.get_value().shape, np.float32)
            for layer in range(model.config.num_layers):
                if rank := linear.adapter.layer_ranks.rank(layer):
                    name = path.replace("model.layers.", f"model.layers.{layer}.")
                    adapter = (*path.split("."), "adapter")
                    self._places[f"{name}.weight"] = adapter, layer, rank, linear.adapter.layer_ranks.scale(layer)

    def __call__(self, name: str, weight: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        """Return what is to be held in the place of the weight [out, in] `name`."""
        if name not in self._places:
            return weight
        (path, layer, rank, scale), wide = self._places[name], jnp.asarray(weight, jnp.float32)
        if self.known is not None:
            stem = f"{PEFT_PREFIX}.{name.removesuffix('.weight')}.lora_"
            a, b = (jnp.asarray(self.known[f"{stem}{side}.weight"], jnp.float32) for side in "AB")
        else:
            lost = wide if self.kind == "pissa" else _lost(wide, self.quantization)
            number = list(self._places).index(name)
            b, a = principal_factors(lost, jax.random.fold_in(jax.random.key(self.seed), number), rank)
            b, a = b / scale**0.5, a / scale**0.5
            self.of_parameters[*path, "lora_A"][layer, :rank] = a
            self.of_parameters[*path, "lora_B"][layer, :, :rank] = b
        return _without(wide, b, a, scale) if self.kind == "pissa" else weight


@partial(jax.jit, static_argnames="rank")
def principal_factors(weight: jax.Array, key: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
    """Return B [out, r] and A [r, in], B A the best approximation of a float32 weight [out, in] of that rank.

    With W = U S V, they are U S^(1/2) and S^(1/2) V of the largest singular values.
    """
    with jax.default_matmul_precision("highest"):
        width = min(rank + SPARE, *weight.shape)

        def multiplied(_: jax.Array, basis: jax.Array) -> jax.Array:
            other, _ = jnp.linalg.qr(weight.T @ basis)
            return jnp.linalg.qr(weight @ other)[0]

        start, _ = jnp.linalg.qr(weight @ jax.random.normal(key, (weight.shape[1], width)))
        basis = lax.fori_loop(0, ITERATIONS, multiplied, start)  # [out, width]
        u, s, v = jnp.linalg.svd(basis.T @ weight, full_matrices=False)
        root = jnp.sqrt(s[:rank])
        return (basis @ u[:, :rank]) * root, root[:, None] * v[:rank]


@partial(jax.jit, static_argnames="quantization")
def _lost(weight: jax.Array, quantization: str) -> jax.Array:
    return weight - dequantize(quantize(quantization, weight), jnp.dtype(jnp.float32))


@jax.jit
def _without(weight: jax.Array, b: jax.Array, a: jax.Array, scale: float) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        return weight - scale * (b @ a)


def converted(trained: Mapping[str, np.ndarray], initial: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return B A - B0 A0 as one adapter of twice the rank, as PEFT does: [A; A0] and [B, -B0].

    Both are by PEFT's names; what `initial` lacks is taken as it is.
    """
    tensors = {}
    for name, tensor in trained.items():
        if name in initial and name.endswith(".lora_A.weight"):
            tensors[name] = np.concatenate([tensor, initial[name]], axis=0)
        elif name in initial and name.endswith(".lora_B.weight"):
            tensors[name] = np.concatenate([tensor, -initial[name]], axis=1)
        else:
            tensors[name] = tensor
    return tensors
