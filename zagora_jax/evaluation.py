"""The loss of a model on held-out rows."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
from flax import nnx

from zagora_jax.config import EvaluateConfig
from zagora_jax.data.batches import Batch, Batches
from zagora_jax.data.prepare import evaluation_batches
from zagora_jax.errors import UserError
from zagora_jax.kernels import forward_options
from zagora_jax.reporting.progress import Reporter
from zagora_jax.step import ForwardOptions, make_evaluation_step
from zagora_jax.tuned import open_tuned


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over supervised tokens, and their number."""

    loss: float
    supervised_tokens: int


EvaluationStep = Callable[[nnx.State, nnx.State, Batch], tuple[jax.Array, jax.Array]]


def compile_evaluation(
    graph: nnx.GraphDef, options: ForwardOptions, adapters: nnx.State, frozen: nnx.State, batches: Batches
) -> EvaluationStep:
    """Compile the evaluation of batches of one shape."""
    step = make_evaluation_step(graph, options)
    return jax.jit(step).lower(adapters, frozen, batches.abstract()).compile()


def evaluate(step: EvaluationStep, adapters: nnx.State, frozen: nnx.State, batches: Iterable[Batch]) -> Evaluation:
    """Sum the loss over all batches and divide by all supervised tokens, so that the split into batches is nothing.

    Raises:
        ValueError: no token is supervised (rows without one never become batches).
    """
    total, count = 0.0, 0
    for batch in batches:
        batch_total, batch_count = step(adapters, frozen, batch)
        total, count = total + float(batch_total), count + int(batch_count)
    if not count:
        raise ValueError("no supervised token in the evaluation data")
    return Evaluation(total / count, count)


def evaluate_run(config: EvaluateConfig, reporter: Reporter) -> Evaluation:
    """Measure a run's tuned model on rows: those given, or else the run's eval_data."""
    tuned = open_tuned(config.run, config.checkpoint)
    options = {"micro_batch_size": config.micro_batch_size, "sequence_length": config.sequence_length}
    run_config = tuned.config.model_copy(update={name: value for name, value in options.items() if value is not None})
    batches = evaluation_batches(run_config, tuned.base, reporter, config.data)
    if batches is None:
        raise UserError(f"{config.run}: the run has no eval_data; give --data")
    frozen = tuned.base.load()
    step = compile_evaluation(tuned.graph, forward_options(run_config, tuned.base), tuned.adapters, frozen, batches)
    return evaluate(step, tuned.adapters, frozen, batches.epoch(0))
