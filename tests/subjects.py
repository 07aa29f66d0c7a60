"""Our model of a directory, to be held against transformers and PEFT: its logits and its adapter's gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.parameters import split
from zagora_jax.adapter import open_adapter, peft_tensors
from zagora_jax.base import open_base
from zagora_jax.data.batches import Batch
from zagora_jax.option_groups import LoraConfig
from zagora_jax.step import ForwardOptions, loss_sum

# Both sides compute in float32 and differ in the order of sums alone: a dot product of n <= 192 terms is off by about
# sqrt(n) * 2^-24 of its scale, some 10^-6, and a model of two layers adds up about twenty such steps.
LOGIT_TOLERANCE = 2e-4
GRADIENT_TOLERANCE = 1e-4


@dataclass
class Subject:
    """Our model of a directory, under the adapter of another if there is one."""

    directory: Path
    adapter: Path | None = None
    lora: LoraConfig = field(default_factory=lambda: LoraConfig(rank=4, alpha=8))
    quantization: str = "none"
    dtype: str = "float32"

    @cached_property
    def base(self):
        lora = self.lora if self.adapter else None
        return open_base(str(self.directory), quantization=self.quantization, dtype=self.dtype, lora=lora)

    @cached_property
    def frozen(self):
        return self.base.load()

    @cached_property
    def parts(self):
        graph, _, declared = split(self.base.model)
        return graph, open_adapter(self.adapter, self.base.model) if self.adapter else declared

    @cached_property
    def logits_function(self):
        """Computes logits [B, S, V] from tokens, positions, segment ids; the same program whatever their values."""
        graph, adapters = self.parts

        @jax.jit
        def logits(frozen, tokens, positions, segment_ids):
            model = nnx.merge(graph, frozen, adapters)
            hidden = model.hidden_states(tokens, positions, segment_ids, kernel="chunked")
            return model.logits(hidden)

        return lambda *arguments: np.asarray(logits(self.frozen, *arguments))

    def logits(self, tokens):
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        return self.logits_function(tokens, positions, None)

    def gradients(self, batch):
        """The loss of an optimizer step and its gradients under PEFT's names."""
        graph, adapters = self.parts
        options = ForwardOptions(kernel="chunked", remat="full", segmented=True)

        # Less optimised machine code is made in less time.
        @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
        @jax.value_and_grad
        def loss(adapters, frozen, batch):
            model = nnx.merge(graph, frozen, adapters)
            total, _ = jax.lax.scan(
                lambda total, micro: (total + loss_sum(model, micro, options, None), None), jnp.float32(0), batch
            )
            return total / batch.weights.sum()

        value, gradient = loss(adapters, self.frozen, as_batch(batch))
        return float(value), peft_tensors(self.base.model, gradient)


def as_batch(batch):
    return Batch(*(getattr(batch, name) for name in Batch._fields))


def assert_logits_equal(ours, theirs):
    for position in (0, 1, 7, 100, ours.shape[1] - 1):
        scale = np.abs(theirs[:, position]).max()
        worst = np.abs(ours[:, position] - theirs[:, position]).max() / scale
        assert worst <= LOGIT_TOLERANCE, (position, worst)


def assert_gradients_equal(ours, theirs):
    (loss, found), expected = ours, theirs
    assert loss == pytest.approx(expected.loss, rel=GRADIENT_TOLERANCE)
    assert found.keys() == expected.tensors.keys()
    for name, gradient in expected.tensors.items():
        difference = np.linalg.norm(found[name] - gradient) / np.linalg.norm(gradient)
        assert difference <= GRADIENT_TOLERANCE, (name, difference)
