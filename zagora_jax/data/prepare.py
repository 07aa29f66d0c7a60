"""The batches that a command's options ask for: files to tokens to batches, and what is said of them on the way."""

import math
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from zagora_jax.base import BaseModel
from zagora_jax.config import TrainConfig
from zagora_jax.data.batches import Batches, Share
from zagora_jax.data.examples import Example, Examples
from zagora_jax.data.held_out import is_held_out, is_in_part
from zagora_jax.data.pairs import PairStatistics, pair_batches
from zagora_jax.data.sources import Location
from zagora_jax.data.statistics import Statistics
from zagora_jax.data.tokenize import Preparation, TokenizedData, tokenize_rows
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
    if config.retrieval.pooling != "none":
        batches, statistics = pair_batches(config, base.tokenizer(), replicas)
        _report(statistics, reporter, "data")
        return batches
    if base.synthetic:
        return lay_out(config, _random_examples(config, base.model.config.vocab_size, replicas), replicas)
    data = training_rows(config, base.tokenizer())
    _report(data.statistics, reporter, "data")
    return lay_out(config, data.examples, replicas, mixture(config, data))


def evaluation_batches(
    config: TrainConfig, base: BaseModel, replicas: int, reporter: Reporter, sources: Sequence[str] | None = None
) -> Batches | None:
    """Tokenise the rows of `sources`, or else those held out, in their own order; None where there are none."""
    if not sources and not config.eval_data and not config.eval_fraction:
        return None
    data = held_out_rows(config, base.tokenizer(), sources)
    _report(data.statistics, reporter, "eval data")
    return Batches(
        data.examples,
        sequence_length=config.sequence_length,
        packing=config.packing,
        micro_batch_size=config.micro_batch_size * replicas,
        shuffle=False,
    )


def training_rows(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, first_rows: int | None = None
) -> TokenizedData:
    """Tokenise the rows of data, without those that eval_fraction holds out, or that other sites have.

    Raises:
        UserError: there is no data, or something is wrong with it.
    """
    if config.data is None:
        raise UserError("data is required: give --data on the command line, or data: in the YAML file")
    fraction, (part, parts) = config.eval_fraction, config.sites.part
    return tokenize_rows(
        config.data,
        tokenizer,
        _preparation(config, first_rows),
        lambda form: not is_held_out(form, fraction) and is_in_part(form, part, parts),
        config.data_weights,
    )


def held_out_rows(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str] | None = None,
    first_rows: int | None = None,
) -> TokenizedData:
    """Tokenise the rows of `sources`, or else of eval_data, or else those of data that eval_fraction holds out.

    Raises:
        UserError: something is wrong with them, or there are none.
    """
    preparation = _preparation(config, first_rows)
    if chosen := sources or config.eval_data:
        return tokenize_rows(chosen, tokenizer, preparation)
    fraction = config.eval_fraction
    return tokenize_rows(config.data or [], tokenizer, preparation, lambda form: is_held_out(form, fraction))


def lay_out(config: TrainConfig, examples: Examples, replicas: int, shares: Sequence[Share] = ()) -> Batches:
    """Lay rows out in the batches of a training."""
    return Batches(
        examples,
        sequence_length=config.sequence_length,
        packing=config.packing,
        micro_batch_size=config.micro_batch_size * replicas,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        seed=config.seed,
        mixture=shares,
    )


def mixture(config: TrainConfig, data: TokenizedData) -> list[Share]:
    """How often an epoch goes through the rows of each source.

    Raises:
        UserError: data_weights leaves an epoch without rows.
    """
    weights = config.data_weights or [1.0] * len(data.sources)
    shares = [Share(rows, passes) for rows, passes in zip(data.sources, weights, strict=True)]
    if not any(round(share.passes * len(share.rows)) for share in shares):
        raise UserError(f"data_weights {weights}: leaves no row in an epoch; raise them")
    return shares


def _preparation(config: TrainConfig, first_rows: int | None) -> Preparation:
    return Preparation(config.sequence_length, config.long_rows, config.overlap, config.max_left_out, first_rows)


def _report(statistics: Statistics | PairStatistics, reporter: Reporter, name: str) -> None:
    for line in str(statistics).splitlines():
        reporter.say(f"{name}: {line}")


def _random_examples(config: TrainConfig, vocab_size: int, replicas: int) -> Examples:
    """Draw rows of random tokens, all supervised and of full length, so many that a run reads them `epochs` times."""
    if config.data is not None or config.eval_data is not None or config.eval_fraction:
        raise UserError(
            f"--model {config.model}: synthetic weights have no tokenizer and train on random tokens; leave data, "
            "eval_data and eval_fraction out"
        )
    if config.max_steps is None:
        raise UserError(f"--model {config.model}: random tokens have no end; give --max-steps")
    rng = np.random.default_rng(config.seed)
    rows_of_run = config.max_steps * config.micro_batch_size * replicas * config.gradient_accumulation_steps
    rows = math.ceil(rows_of_run / config.epochs)
    width = config.sequence_length
    return Examples.of(
        Example(
            rng.integers(0, vocab_size, width, dtype=np.int32),
            np.ones(width, np.float32),
            Location("synthetic", row + 1, "row"),
        )
        for row in range(rows)
    )
