"""What the model in training answers to some prompts, so that one can read what it has learned."""

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.parameters import split
from sharding.rules import named_sharding
from sharding.spanning import on_host, place
from zagora_jax import interruption, processes
from zagora_jax.arrangement import Arrangement, CompiledNextTokens
from zagora_jax.base import BaseModel
from zagora_jax.callbacks import Sample, Sampled
from zagora_jax.checkpoints.atomic import write_bytes
from zagora_jax.data.batches import Batch
from zagora_jax.decoding import decode, likeliest
from zagora_jax.distribution import Distribution
from zagora_jax.end_tokens import end_tokens
from zagora_jax.errors import UserError
from zagora_jax.generation import PROMPT_WIDTH_MULTIPLE, chat_prompts, padded, until_end
from zagora_jax.option_groups import SamplesConfig
from zagora_jax.run_directory import read_metrics
from zagora_jax.step import ForwardOptions


class RunSamples:
    """Answers a run's prompts at some of its steps, once at each, also where the run is resumed."""

    def __init__(
        self,
        options: SamplesConfig,
        base: BaseModel,
        arrangement: Arrangement,
        forward: ForwardOptions,
        path: Path,
        first_step: int,
        tell: Callable[[Sampled], None],
    ):
        """Tokenise the prompts.

        Args:
            options: which prompts, if any.
            base: whose tokenizer reads them.
            arrangement: of the model.
            forward: how the forward pass is computed.
            path: of samples.jsonl.
            first_step: the step that the run goes on from.
            tell: is told of samples.

        Raises:
            UserError: the tokenizer has no chat template, or one that refuses a prompt.
        """
        self._path, self._tell = path, tell
        self._sampler = None if options.prompts is None else Sampler(options, base, arrangement, forward)
        recorded = [line["step"] for line in read_metrics(path) if line["step"] <= first_step]
        self._recorded = set(processes.present().from_first(recorded))

    def take(self, step: int, adapters: Any, frozen: Any) -> None:
        """Answer after `step` finished steps, and tell, and write it down; unless that was done already."""
        if self._sampler is None or step in self._recorded:
            return
        samples = self._sampler(adapters, frozen)
        record(self._path, step, samples)
        self._recorded.add(step)
        self._tell(Sampled(step, samples))


def record(path: Path, step: int, samples: Sequence[Sample]) -> None:
    """Put a step's samples into samples.jsonl, and forget those of later steps, which a broken run has left."""
    lines = [line for line in read_metrics(path) if line["step"] < step]
    lines += [{"step": step, "prompt": sample.prompt, "text": sample.text} for sample in samples]
    write_bytes(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())


class Sampler:
    """Answers prompts with adapters as they are on the devices of a run, by the likeliest tokens."""

    def __init__(self, options: SamplesConfig, base: BaseModel, arrangement: Arrangement, forward: ForwardOptions):
        """Tokenise the prompts; see `RunSamples`."""
        assert options.prompts is not None, "there is nothing to answer"
        self._prompts, self._tokenizer = options.prompts, base.tokenizer()
        if options.chat:
            prompts = chat_prompts(self._tokenizer, options.prompts)
        else:
            prompts = [self._tokenizer.encode(text) for text in options.prompts]
        if empty := [text for text, tokens in zip(options.prompts, prompts, strict=True) if not tokens]:
            raise UserError(f"samples.prompts: {empty[0]!r} has no tokens to continue")
        rows = -len(prompts) % arrangement.rows_divisor  # each device has as many
        tokens, lengths = padded([*prompts, *[prompts[0]] * rows])
        self._ends = end_tokens(base)
        given = (self._ends, options.max_new_tokens, tokens, lengths)
        self._continue: Continue
        if isinstance(arrangement, Distribution) and arrangement.stream is None and not arrangement.segments:
            self._continue = Cached(arrangement, *given)
        else:
            self._continue = Recomputing(arrangement, forward, *given)

    def __call__(self, adapters: Any, frozen: Any) -> list[Sample]:
        """Answer, compiling at the first call."""
        answers = self._continue(adapters, frozen)[: len(self._prompts)]
        texts = self._tokenizer.batch_decode([until_end(row, self._ends) for row in answers], skip_special_tokens=True)
        return [Sample(prompt, text.strip()) for prompt, text in zip(self._prompts, texts, strict=True)]


# (adapters, frozen) -> int32 [B, max_new_tokens], what continues the prompts; what follows an end token means nothing.
Continue = Callable[[Any, Any], np.ndarray]


class Cached:
    """Continues prompts in one program that keeps keys and values, where each device computes whole layers."""

    def __init__(
        self,
        arrangement: Distribution,
        ends: frozenset[int],
        max_new_tokens: int,
        tokens: np.ndarray,
        lengths: np.ndarray,
    ):
        """Take the prompts tokens int32 [B, P], of which the first `lengths` [B] are real."""
        self._arrangement, self._ends, self._max_new_tokens = arrangement, ends, max_new_tokens
        self._tokens, self._lengths = tokens, lengths

    def __call__(self, adapters: Any, frozen: Any) -> np.ndarray:
        """Continue; see `Continue`."""
        rows = self._sharding
        given = (place(self._tokens, rows), place(self._lengths[:, None], rows))
        return on_host(self._compiled(adapters, frozen, *given))

    @cached_property
    def _sharding(self) -> jax.sharding.NamedSharding:
        return named_sharding(self._arrangement.mesh, ("rows", "tokens"))

    @cached_property
    def _compiled(self) -> jax.stages.Compiled:
        """Compile (adapters, frozen, tokens [B, P], lengths [B, 1]) -> int32 [B, max_new_tokens]."""
        spread, graph, ends = self._arrangement, split(self._arrangement.model)[0], tuple(sorted(self._ends))

        def answer(adapters: nnx.State, frozen: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
            model = nnx.merge(graph, frozen, adapters)

            def choose(hidden: jax.Array, _: jax.Array | int) -> jax.Array:
                return likeliest(model, hidden, spread.placement)

            arguments = (ends, self._max_new_tokens, choose, tokens, lengths[:, 0])
            return decode(model, *arguments, spread.placement, spread.group)

        shapes = [
            jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._sharding)
            for shape in (self._tokens.shape, (len(self._tokens), 1))
        ]
        return spread.compile(
            answer, (spread.abstract_adapters(), spread.abstract_frozen(), *shapes), self._sharding.spec
        )


class Recomputing:
    """Continues prompts by a forward pass over the whole sequences for each token, as any arrangement can.

    Where weights stream, or stages wait for each other, a token costs a pass through all layers in any case.
    """

    def __init__(
        self,
        arrangement: Arrangement,
        forward: ForwardOptions,
        ends: frozenset[int],
        max_new_tokens: int,
        tokens: np.ndarray,
        lengths: np.ndarray,
    ):
        """Take the prompts, as `Cached` does."""
        self._arrangement, self._forward = arrangement, forward
        self._ends, self._max_new_tokens, self._lengths = sorted(ends), max_new_tokens, lengths
        more = -(-max_new_tokens // PROMPT_WIDTH_MULTIPLE) * PROMPT_WIDTH_MULTIPLE
        self._tokens = np.pad(tokens, ((0, 0), (0, more)))

    @cached_property
    def _compiled(self) -> CompiledNextTokens:
        return self._arrangement.compile_next_tokens(self._forward, self._batch(self._tokens, self._lengths))

    def __call__(self, adapters: Any, frozen: Any) -> np.ndarray:
        """Continue; see `Continue`.

        Raises:
            Interrupted: a signal asked the process to end.
        """
        tokens, rows = self._tokens.copy(), np.arange(len(self._tokens))
        is_open = np.full(len(rows), True)
        for length in range(self._max_new_tokens):
            if processes.present().is_to_stop():
                interruption.check()
            lengths = self._lengths + length
            chosen = on_host(self._compiled(adapters, frozen, self._batch(tokens, lengths)))
            tokens[rows, lengths] = chosen
            is_open &= ~np.isin(chosen, self._ends)
            if not is_open.any():
                break
        places = self._lengths[:, None] + np.arange(self._max_new_tokens)
        return np.take_along_axis(tokens, places, axis=1)

    @staticmethod
    def _batch(tokens: np.ndarray, lengths: np.ndarray) -> Batch:
        """Return sequences [B, S] as a batch that asks for the token behind the first `lengths` of each."""
        places = np.arange(tokens.shape[1], dtype=np.int32)
        is_real, is_last = places < lengths[:, None], places == lengths[:, None] - 1
        arrays = (tokens, np.zeros_like(tokens), is_last.astype(np.float32), is_real.astype(np.int32), is_real * places)
        return Batch(*(array[None] for array in arrays))
