"""What a layer costs on each stage's devices: a short measurement, or an estimate from sizes where none can be made."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from sharding.balance import StageCost
from zagora_jax.arrangement import Recipe
from zagora_jax.checkpoints.synthetic import synthetic_frozen
from zagora_jax.data.batches import Batch
from zagora_jax.devices import memory_limit
from zagora_jax.stage import Place, Stage
from zagora_jax.stage_programs import StagePrograms
from zagora_jax.step import TrainState

REPETITIONS = 3

# A stage with so many layers in the place of another.
Resized = Callable[[Stage, int], Stage]


def measure_costs(
    stages: Sequence[Stage],
    resized: Resized,
    activations: Sequence[tuple[int, int]],
    recipe: Recipe,
    whole: TrainState,
    batch: Batch,
) -> list[StageCost]:
    """Time one layer, and what stands at the ends, on the devices of each stage; one stage after the other.

    Stages of two and of three layers are compiled, with random weights: from two on, time and memory are linear in the
    layers. (A single layer is no loop: XLA keeps it on the device whole, whatever waits on the host otherwise. Of a
    model that gives no stage three layers, one and two are compiled.)

    Args:
        stages: one a group of devices.
        resized: gives a stage another number of layers.
        activations: how many inputs each stage has at most, and how many activations are on their way.
        recipe: what the step computes.
        whole: shapes of the training state.
        batch: shapes of a batch.
    """
    most = max(2, min(3, *(stage.num_layers for stage in stages)))
    small, large = ([resized(stage, count) for stage in stages] for count in (most - 1, most))

    def compiled(stage: Stage) -> StagePrograms:
        return StagePrograms(stage, recipe, stage.part_of(whole), batch)

    with ThreadPoolExecutor() as threads:
        of_small, of_large = list(threads.map(compiled, small)), list(threads.map(compiled, large))
    costs = []
    for fewer, more, held in zip(of_small, of_large, activations, strict=True):
        seconds, more_seconds = _seconds(fewer, batch), _seconds(more, batch)
        layer = max(more_seconds - seconds, 0.05 * more_seconds)  # never nothing, however noisy the clock is
        planned, more_planned = fewer.planned_memory(*held), more.planned_memory(*held)
        fixed = max(seconds - (most - 1) * layer, 0.0)
        costs.append(StageCost(layer, fixed, _most_layers(more.stage, most, more_planned, more_planned - planned)))
    return costs


def _most_layers(stage: Stage, layers: int, needed: int, of_each_more: int) -> int | None:
    limits = [memory_limit(device) for device in stage.distribution.mesh.devices.flat]
    if any(limit is None for limit in limits):
        return None
    room = min(limits) - needed  # type: ignore[type-var, operator]
    return max(0, layers + int(room // of_each_more))


def _seconds(programs: StagePrograms, batch: Batch) -> float:
    """Time one micro-batch, forward and backward."""
    stage = programs.stage
    distribution = stage.distribution
    frozen = distribution.load(partial(synthetic_frozen, distribution.model, 0))
    adapters = jax.tree.map(lambda spread: spread.zeros(), distribution.adapters)
    zeros = distribution.put_batch(Batch(*(np.zeros(array.shape, array.dtype) for array in batch)))
    place = Place(np.int32(0), np.int32(0), np.int32(0))
    activation = None if stage.is_first else _zeros(stage.abstract_activation(batch))
    cotangent: Any = np.float32(1) if stage.is_last else _zeros(stage.abstract_activation(batch))
    gradients = programs.zeros()
    times = []
    for _ in range(1 + REPETITIONS):  # the first one warms up
        started = time.perf_counter()
        inputs: Any = activation
        if programs.forward is not None:
            out = programs.forward(adapters, frozen, zeros, place, activation)
            inputs = activation if programs.kept is None else out[1]
        gradients, _, loss = programs.backward(gradients, adapters, frozen, zeros, place, inputs, cotangent)
        jax.block_until_ready((gradients, loss))
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _zeros(abstract: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(jnp.zeros(abstract.shape, abstract.dtype), abstract.sharding)


def estimated_costs(config: ModelConfig, stages: int) -> list[StageCost]:
    """Return costs in the unit of one layer's time, by the products that are computed.

    A frozen weight is used three times: forward, forward again, and for the gradient of its input. The head's logits
    and their gradient are computed once each.
    """
    heads = (config.num_heads + config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (2 * heads + 3 * config.intermediate_size)
    head = config.hidden_size * config.vocab_size * 2 / 3
    costs = [StageCost(1.0) for _ in range(stages)]
    costs[-1] = replace(costs[-1], fixed_seconds=head / layer)
    return costs
