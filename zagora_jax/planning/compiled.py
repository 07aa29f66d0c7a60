"""The train step of a configuration, compiled from shapes alone: without weights, rows or the devices themselves."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models.lora import initial_adapter
from models.parameters import split
from zagora_jax.arrange import arrange
from zagora_jax.arrangement import Arrangement, CompiledStep, Recipe
from zagora_jax.base import BaseModel, open_base
from zagora_jax.config import TrainConfig
from zagora_jax.data.batches import Batch
from zagora_jax.distribution import SpreadStep
from zagora_jax.kernels import forward_options
from zagora_jax.optimizer import make_optimizer, make_schedule
from zagora_jax.train_state import TrainState, initial_state


def compile_planned(
    config: TrainConfig, mesh: Mesh, base: BaseModel | None = None, arrangement: Arrangement | None = None
) -> CompiledStep:
    """Compile the step that `config` would train with, its sequences of full length, for a mesh of any devices.

    With `sharding.targets.absent_devices` in the mesh it cannot run. Where offload.weights is auto,
    all layers are streamed. A step that reads layers from the disk runs with the `arrangement` whose feed is open.

    Raises:
        UserError: what the same configuration would be refused for in training, but for its data.
    """
    base = base or open_base(
        config.model, quantization=config.quantization, dtype=config.compute_dtype, lora=config.lora, seed=config.seed
    )
    base = base.with_embeddings(config.embeddings)
    arrangement = arrangement or arrange(config, base.model, mesh)
    # The number of steps is a constant of the program, whose size does not depend on it.
    steps = config.max_steps or config.warmup_steps + 1
    schedule = make_schedule(config.schedule, config.learning_rate, config.warmup_of(steps), steps)
    optimizer = make_optimizer(config.optimizer, schedule, config.weight_decay)

    def new_state() -> TrainState:
        state = initial_state(initial_adapter(split(base.model)[2], config.seed), optimizer, config.compute_dtype)
        return arrangement.begin(state)

    recipe = Recipe(
        optimizer,
        schedule,
        forward_options(config, base, mesh.devices.flat[0].platform),
        max_grad_norm=config.max_grad_norm,
        dropout_seed=config.seed if config.lora.dropout else None,
        total_steps=steps,
    )
    shape = (
        config.gradient_accumulation_steps,
        config.micro_batch_size * arrangement.rows_divisor,
        config.sequence_length,
    )
    integers, weights = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    batch = Batch(tokens=integers, targets=integers, weights=weights, segment_ids=integers, positions=integers)  # type: ignore[arg-type]
    return arrangement.compile_training(recipe, jax.eval_shape(new_state), batch)


def compile_planned_step(config: TrainConfig, mesh: Mesh, base: BaseModel | None = None) -> jax.stages.Compiled:
    """Compile it as `compile_planned` does and return the one program of a step that is spread over the mesh.

    `sharding.program` reads memory and traffic from the result.

    Raises:
        ValueError: the strategy has programs for each stage.
    """
    step = compile_planned(config, mesh, base)
    if not isinstance(step, SpreadStep):
        raise ValueError(f"--strategy {config.strategy} has several programs; compile_planned returns them")
    return step.compiled
