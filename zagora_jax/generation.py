"""Text from a model: batched sampling with a key-value cache."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.llama import Llama
from models.parameters import split
from zagora_jax.base import open_base
from zagora_jax.data.template_limits import require_harmless, within_limits
from zagora_jax.decoding import decode
from zagora_jax.end_tokens import end_tokens
from zagora_jax.errors import UserError
from zagora_jax.run_directory import RunDirectory
from zagora_jax.tuned import open_tuned

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_WIDTH_MULTIPLE = 32  # prompts are padded to this, so that few shapes are compiled
PROMPTS_AT_A_TIME = 32


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: the likeliest at temperature 0, drawn at higher ones."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


def open_generator(model: str, step: int | None = None, quantized_cache: Path | None = None) -> "Generator":
    """Load a run's tuned model, of the checkpoint at `step` or the newest adapter, or a base model in NF4.

    Args:
        model: the run directory or base model.
        step: the checkpoint's.
        quantized_cache: the folder of quantised models for a base model; a run has its own.

    Raises:
        UserError: there is no such model or checkpoint, or it has no tokenizer.
    """
    if RunDirectory(model).is_run():
        tuned = open_tuned(Path(model), step)
        base, adapters = tuned.base, tuned.adapters
        graph, _, _ = split(base.model)
    else:
        if step is not None:
            raise UserError(f"--checkpoint {step}: {model} is no run directory, so it has no checkpoints")
        base = open_base(model, quantization="nf4", dtype=default_dtype(), lora=None, quantized_cache=quantized_cache)
        graph, _, adapters = split(base.model)
    tokenizer = base.tokenizer()  # before the weights are read: there may be none
    return Generator(graph, base.load(), adapters, tokenizer, end_tokens(base))


def default_dtype() -> str:
    """Return the dtype that is fastest here: float32 on a CPU, bfloat16 elsewhere."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def chat_prompts(tokenizer: "PreTrainedTokenizerBase", questions: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each question as a user's turn, in the chat template.

    Raises:
        UserError: the tokenizer has no chat template, or one that refuses the question.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"{tokenizer.name_or_path}: has no chat template; give --chat false to continue a prompt as it is"
        )
    prompts = []
    for question in questions:
        turns = [{"role": "user", "content": question}]
        try:
            require_harmless(tokenizer.get_chat_template())
            render = partial(tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False)
            text = within_limits(partial(render, turns))
        except Exception as error:  # a template is a program: it may raise anything
            name = tokenizer.name_or_path
            raise UserError(f"{name}: its chat template refuses the prompt {question:.40}: {error}") from error
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    return prompts


class Generator:
    """Generates from a model whose parameters are on the device."""

    def __init__(
        self,
        graph: nnx.GraphDef,
        frozen: nnx.State,
        adapters: nnx.State,
        tokenizer: "PreTrainedTokenizerBase",
        end_tokens: frozenset[int],
    ):
        """`end_tokens` are the ids that end a generation."""
        self._graph, self._frozen, self._adapters = graph, frozen, adapters
        self._tokenizer, self._end_tokens = tokenizer, end_tokens

    def answer(self, questions: Sequence[str], sampling: Sampling) -> list[str]:
        """Ask each question as a user's turn of its own, in the tokenizer's chat template.

        Raises:
            UserError: the tokenizer has no chat template, or one that refuses the question.
        """
        prompts = chat_prompts(self._tokenizer, questions)
        return [text.strip() for text in self._decode(self.generate(prompts, sampling))]

    def complete(self, texts: Sequence[str], sampling: Sampling) -> list[str]:
        """Continue each text."""
        return self._decode(self.generate([self._tokenizer.encode(text) for text in texts], sampling))

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Continue each of the token sequences `prompts`, up to an end token, which is left out."""
        if not all(prompts):
            raise ValueError("a prompt without tokens cannot be continued")
        generated = []
        for start in range(0, len(prompts), PROMPTS_AT_A_TIME):
            key = jax.random.fold_in(jax.random.key(sampling.seed), start)
            generated += self._generate_together(prompts[start : start + PROMPTS_AT_A_TIME], sampling, key)
        return generated

    def _generate_together(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, key: jax.Array
    ) -> list[list[int]]:
        tokens, lengths = padded(prompts)
        generated = _generate(
            self._graph,
            tuple(sorted(self._end_tokens)),
            sampling.max_new_tokens,
            sampling.temperature == 0,
            self._frozen,
            self._adapters,
            tokens,
            lengths,
            jnp.float32(sampling.temperature),
            key,
        )
        return [until_end(row, self._end_tokens) for row in np.asarray(generated)]

    def _decode(self, generated: list[list[int]]) -> list[str]:
        return self._tokenizer.batch_decode(generated, skip_special_tokens=True)


def padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens int32 [B, P] of prompts, padded at their ends, and their lengths int32 [B]."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    width = -(-int(lengths.max()) // PROMPT_WIDTH_MULTIPLE) * PROMPT_WIDTH_MULTIPLE
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def until_end(row: np.ndarray, end_tokens: frozenset[int]) -> list[int]:
    """Return the tokens before the first end token."""
    return list(itertools.takewhile(lambda token: token not in end_tokens, row.tolist()))


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _generate(
    graph: nnx.GraphDef,
    ends: tuple[int, ...],
    max_new_tokens: int,
    greedy: bool,
    frozen: nnx.State,
    adapters: nnx.State,
    tokens: jax.Array,  # int32 [B, P]
    lengths: jax.Array,  # int32 [B]
    temperature: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """Return int32 [B, max_new_tokens]; what follows a sequence's end token is filled with end tokens."""
    model: Llama = nnx.merge(graph, frozen, adapters)

    def choose(hidden: jax.Array, index: jax.Array | int) -> jax.Array:
        logits = model.logits(hidden)  # [B, V]
        if greedy:
            return logits.argmax(-1).astype(jnp.int32)
        return jax.random.categorical(jax.random.fold_in(key, index), logits / temperature).astype(jnp.int32)

    return decode(model, ends, max_new_tokens, choose, tokens, lengths)
