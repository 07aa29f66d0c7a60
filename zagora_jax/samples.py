"""What the model in training answers to some prompts, so that one can read what it has learned."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zagora_jax.base import BaseModel
from zagora_jax.callbacks import Sample
from zagora_jax.checkpoints.atomic import write_bytes
from zagora_jax.distribution import Distribution
from zagora_jax.end_tokens import end_tokens
from zagora_jax.errors import UserError
from zagora_jax.generation import chat_prompts, padded, until_end
from zagora_jax.option_groups import SamplesConfig
from zagora_jax.run_directory import read_metrics


def record(path: Path, step: int, samples: Sequence[Sample]) -> None:
    """Put a step's samples into samples.jsonl, and forget those of later steps, which a broken run has left."""
    lines = [line for line in read_metrics(path) if line["step"] < step]
    lines += [{"step": step, "prompt": sample.prompt, "text": sample.text} for sample in samples]
    write_bytes(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())


class Sampler:
    """Answers the prompts of a run with adapters as they are on its devices."""

    def __init__(self, options: SamplesConfig, base: BaseModel, arrangement: Distribution):
        """Tokenise the prompts.

        Raises:
            UserError: the tokenizer has no chat template, or one that refuses a prompt.
        """
        assert options.prompts is not None, "there is nothing to answer"
        self._prompts, self._tokenizer, self._arrangement = options.prompts, base.tokenizer(), arrangement
        if options.chat:
            prompts = chat_prompts(self._tokenizer, options.prompts)
        else:
            prompts = [self._tokenizer.encode(text) for text in options.prompts]
        if empty := [text for text, tokens in zip(options.prompts, prompts, strict=True) if not tokens]:
            raise UserError(f"samples.prompts: {empty[0]!r} has no tokens to continue")
        rows = -len(prompts) % arrangement.rows_divisor  # each device has as many
        self._tokens, self._lengths = padded([*prompts, *[prompts[0]] * rows])
        self._ends, self._max_new_tokens = end_tokens(base), options.max_new_tokens
        self._answers: Callable[..., np.ndarray] | None = None

    def __call__(self, adapters: Any, frozen: Any) -> list[Sample]:
        """Answer, compiling at the first call."""
        if self._answers is None:
            shape = jax.ShapeDtypeStruct(self._tokens.shape, self._tokens.dtype)
            self._answers = self._arrangement.compile_answers(tuple(sorted(self._ends)), self._max_new_tokens, shape)
        rows = self._answers(adapters, frozen, self._tokens, self._lengths)
        texts = self._tokenizer.batch_decode(
            [until_end(row, self._ends) for row in rows[: len(self._prompts)]], skip_special_tokens=True
        )
        return [Sample(prompt, text.strip()) for prompt, text in zip(self._prompts, texts, strict=True)]
