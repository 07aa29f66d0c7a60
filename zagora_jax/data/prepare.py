"""The batches that a command's options ask for: files to tokens to batches, and what is said of them on the way."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zagora_jax.base import BaseModel
from zagora_jax.config import TrainConfig
from zagora_jax.data.batches import Batches
from zagora_jax.data.examples import Example, Examples
from zagora_jax.data.sources import Location
from zagora_jax.data.tokenize import tokenize_rows
from zagora_jax.errors import UserError
from zagora_jax.reporting.progress import Reporter


def training_batches(config: TrainConfig, base: BaseModel, replicas: int, reporter: Reporter) -> Batches:
    """Tokenise the training rows, or draw random ones for a synthetic model, and lay them out in batches.

    Args:
        config: the options.
        base: whose tokenizer reads the rows.
        replicas: how many devices have rows of their own; each has micro_batch_size of them.
        reporter: told what became of the rows.
    """
    if base.synthetic:
        examples = _random_examples(config, base.model.config.vocab_size, replicas)
    elif config.data is None:
        raise UserError("data is required: give --data on the command line, or data: in the YAML file")
    else:
        examples = _tokenize(config.data, config, base, reporter, "data")
    return Batches(
        examples,
        sequence_length=config.sequence_length,
        packing=config.packing,
        micro_batch_size=config.micro_batch_size * replicas,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        seed=config.seed,
    )


def evaluation_batches(
    config: TrainConfig, base: BaseModel, replicas: int, reporter: Reporter, files: Sequence[Path] | None = None
) -> Batches | None:
    """Tokenise the rows of `files`, or else of eval_data, in their own order; None where there are none."""
    files = files or config.eval_data
    if not files:
        return None
    return Batches(
        _tokenize(files, config, base, reporter, "eval data"),
        sequence_length=config.sequence_length,
        packing=config.packing,
        micro_batch_size=config.micro_batch_size * replicas,
        shuffle=False,
    )


def _tokenize(files: Sequence[Path], config: TrainConfig, base: BaseModel, reporter: Reporter, name: str) -> Examples:
    data = tokenize_rows(files, base.tokenizer(), config.sequence_length)
    for line in str(data.statistics).splitlines():
        reporter.say(f"{name}: {line}")
    return data.examples


def _random_examples(config: TrainConfig, vocab_size: int, replicas: int) -> Examples:
    """Draw rows of random tokens, one for every sequence of a run, all supervised and of full length."""
    if config.data is not None or config.eval_data is not None:
        raise UserError(
            f"--model {config.model}: synthetic weights have no tokenizer and train on random tokens; leave data and "
            "eval_data out"
        )
    if config.max_steps is None:
        raise UserError(f"--model {config.model}: random tokens have no epochs; give --max-steps")
    rng = np.random.default_rng(config.seed)
    rows = config.max_steps * config.micro_batch_size * replicas * config.gradient_accumulation_steps
    width = config.sequence_length
    return Examples.of(
        Example(
            rng.integers(0, vocab_size, width, dtype=np.int32),
            np.ones(width, bool),
            Location("synthetic", row + 1, "row"),
        )
        for row in range(rows)
    )
