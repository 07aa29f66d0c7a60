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

from models.cache import KVCache
from models.llama import Llama
from models.parameters import split
from zagora_jax.base import open_base
from zagora_jax.data.template_limits import require_harmless, within_limits
from zagora_jax.end_tokens import end_tokens
from zagora_jax.errors import UserError
from zagora_jax.run_directory import RunDirectory
from zagora_jax.tuned import open_tuned

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_WIDTH_MULTIPLE = 32  # prompts are padded to this, so that few shapes are compiled
PROMPTS_AT_A_TIME = 32

# What generation carries from token to token: the index of the next one, int32 [B, max_new_tokens] of those chosen,
# the cache, and bool [B], which sequences have ended.
Carry = tuple[jax.Array, jax.Array, KVCache, jax.Array]


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
        if not self._tokenizer.chat_template:
            raise UserError(
                f"{self._tokenizer.name_or_path}: has no chat template; give --chat false to continue a prompt as it is"
            )
        prompts = []
        for question in questions:
            turns = [{"role": "user", "content": question}]
            try:
                require_harmless(self._tokenizer.get_chat_template())
                render = partial(self._tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False)
                text = within_limits(partial(render, turns))
            except Exception as error:  # a template is a program: it may raise anything
                name = self._tokenizer.name_or_path
                raise UserError(f"{name}: its chat template refuses the prompt {question:.40}: {error}") from error
            prompts.append(self._tokenizer.encode(text, add_special_tokens=False))
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
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        width = -(-int(lengths.max()) // PROMPT_WIDTH_MULTIPLE) * PROMPT_WIDTH_MULTIPLE
        tokens = np.zeros((len(prompts), width), np.int32)  # [B, P]
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
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
        return [_until(row, self._end_tokens) for row in np.asarray(generated)]

    def _decode(self, generated: list[list[int]]) -> list[str]:
        return self._tokenizer.batch_decode(generated, skip_special_tokens=True)


def _until(row: np.ndarray, end_tokens: frozenset[int]) -> list[int]:
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
    """Return int32 [B, max_new_tokens]; what follows a sequence's end token is filled with end tokens.

    The prompt's tokens take the slots 0 to P - 1 (with unused ones behind short prompts), the new ones those from P
    on, so that all sequences write to the same slot.
    """
    model: Llama = nnx.merge(graph, frozen, adapters)
    batch, width = tokens.shape
    slots = jnp.arange(width + max_new_tokens)[None, :]  # [1, T]
    new_positions = lengths[:, None] + slots - width
    slot_positions = jnp.where(slots < lengths[:, None], slots, jnp.where(slots < width, -1, new_positions))  # [B, T]
    end_ids = jnp.array(ends, jnp.int32)

    def choose(hidden: jax.Array, index: jax.Array | int) -> jax.Array:
        logits = model.logits(hidden)  # [B, V]
        if greedy:
            return logits.argmax(-1).astype(jnp.int32)
        return jax.random.categorical(jax.random.fold_in(key, index), logits / temperature).astype(jnp.int32)

    def begin() -> Carry:
        cache = KVCache.empty(model.config, batch, width + max_new_tokens, model.dtype)
        positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
        hidden, cache = model.extend(tokens, positions, cache, 0, slot_positions)
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]  # [B, hidden]
        first = choose(last, 0)
        out = jnp.full((batch, max_new_tokens), ends[0] if ends else 0, jnp.int32).at[:, 0].set(first)
        return jnp.int32(1), out, cache, jnp.isin(first, end_ids)

    def unfinished(carry: Carry) -> jax.Array:
        index, _, _, done = carry
        return (index < max_new_tokens) & ~done.all()

    def extend(carry: Carry) -> Carry:
        index, out, cache, done = carry
        slot = width + index - 1
        last = jax.lax.dynamic_slice_in_dim(out, index - 1, 1, axis=1)  # [B, 1]
        hidden, cache = model.extend(last, (lengths + index - 1)[:, None], cache, slot, slot_positions)
        chosen = jnp.where(done, out[:, index], choose(hidden[:, 0], index))
        return index + 1, out.at[:, index].set(chosen), cache, done | jnp.isin(chosen, end_ids)

    return jax.lax.while_loop(unfinished, extend, begin())[1]
