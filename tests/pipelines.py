"""A step in stages, to be held against the same step on one device."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import jax
import numpy as np
import oracles
from flax import nnx

from models.lora import initial_adapter
from models.parameters import split
from sharding.mesh import make_mesh
from zagora_jax.arrangement import Recipe, silent
from zagora_jax.base import BaseModel, open_base
from zagora_jax.data.batches import Batch
from zagora_jax.distribution import Distribution
from zagora_jax.optimizer import make_optimizer, make_schedule
from zagora_jax.option_groups import LoraConfig
from zagora_jax.step import ForwardOptions
from zagora_jax.train_state import initial_state

# Both sides compute in float32, and differ in the order of sums over rows and devices alone.
TOLERANCE = 2e-4


class Subject(NamedTuple):
    base: BaseModel
    frozen: nnx.State
    adapters: nnx.State


def make_subject(folder, quantization="nf4", model="llama", **config):
    lora = LoraConfig(rank=4, alpha=8, dropout=0.1, targets=["q_proj", "down_proj"])
    if model == "llama":
        directory = oracles.tiny_llama(folder / "m", vocab_size=323, **config)
    else:
        directory = oracles.tiny_model(folder / "m", model, vocab_size=323, **config)
    base = open_base(str(directory), quantization=quantization, dtype="float32", lora=lora)
    return Subject(base, base.load(), initial_adapter(split(base.model)[2], seed=0))


@cache
def batches(count, accumulation, packed=True):
    drawn = [oracles.random_batch(seed, (accumulation, 4, 40), packed=packed) for seed in range(count)]
    made = [Batch(*(np.array(getattr(batch, name)) for name in Batch._fields)) for batch in drawn]
    made[-1].weights[-1] = 0  # a short last window: nothing in its last micro-batch, nor in many rows
    made[-1].weights[0, 2:] = 0
    return made


def trained(
    arrangement,
    subject,
    batches,
    optimizer="adamw",
    packed=True,
    dtype="float32",
    observe=lambda step: None,
    say=silent,
    offload=False,
    remat="full",
):
    """Losses and gradient norms [steps, 2], and the whole state at the end."""
    schedule = make_schedule("cosine", 1e-3, 0, 22)
    made = make_optimizer(optimizer, schedule, 0.01)
    options = ForwardOptions(kernel="reference", remat=remat, segmented=packed, offload_activations=offload)
    whole = arrangement.begin(initial_state(subject.adapters, made, "float32"))
    recipe = Recipe(made, schedule, options, 1.0, dropout_seed=0, total_steps=22)
    step = arrangement.compile_training(recipe, whole, batches[0], say)
    state, frozen = arrangement.put_state(whole), laid_out(arrangement, subject.frozen)
    numbers = []
    for batch in batches:
        state, metrics = step(state, frozen, batch)
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        observe(step)
    return np.array(numbers), arrangement.whole_state(state, whole)


def laid_out(arrangement, frozen):
    flat = nnx.to_flat_state(frozen)

    def read(destination):
        return nnx.from_flat_state([(path, v.replace(destination.whole(path, v.get_value()))) for path, v in flat])

    return arrangement.load(read)


_alone: dict = {}


def alone(subject, steps, accumulation, optimizer="adamw", packed=True):
    key = (id(subject), steps, accumulation, optimizer, packed)
    if key not in _alone:
        one = Distribution(make_mesh({}, jax.devices()[:1]), subject.base.model)
        _alone[key] = trained(one, subject, batches(steps, accumulation, packed), optimizer, packed)
    return _alone[key]


def furthest(state, other):
    leaves = zip(jax.tree.leaves(state.adapters), jax.tree.leaves(other.adapters), strict=True)
    return max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in leaves)
