"""Sequences for a person to read: each token's text, marked by whether the model learns to write it."""

from collections.abc import Iterator
from itertools import chain, groupby, islice
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from zagora_jax.data.batches import Batches
from zagora_jax.data.examples import Example
from zagora_jax.reporting.terminal import visible

# Neighbouring tokens get different shades, so that their borders are seen.
SUPERVISED_STYLES = ("bold green", "bold cyan")
OTHER_STYLES = ("dim", "none")


class Piece(NamedTuple):
    """The text of one token, or of the few that share a character."""

    text: str
    supervised: bool


def pieces(example: Example, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """Yields the text of a row, token by token."""
    # What a token stands for can depend on the one before it (a space at the start), so each is decoded after that one.
    before: list[int] = []
    pending: list[int] = []
    for number, (token, supervised) in enumerate(
        zip(example.tokens.tolist(), example.supervised.tolist(), strict=True)
    ):
        pending.append(token)
        text = _decode(tokenizer, before + pending).removeprefix(_decode(tokenizer, before))
        last = number + 1 == len(example.tokens)
        if last or not text.endswith("\ufffd") or supervised != example.supervised[number + 1]:
            yield Piece(text, supervised)
            before, pending = pending, []


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def coloured(parts: list[Piece]) -> Text:
    """The pieces, supervised ones in colour."""
    text = Text()
    for number, (piece, supervised) in enumerate(parts):
        styles = SUPERVISED_STYLES if supervised else OTHER_STYLES
        text.append(visible(piece), styles[number % 2])
    return text


def bracketed(parts: list[Piece]) -> Text:
    """The pieces, supervised ones between [[ and ]]."""
    text = Text()
    for supervised, run in groupby(parts, key=lambda piece: piece.supervised):
        joined = visible("".join(piece.text for piece in run))
        text.append(f"[[{joined}]]" if supervised else joined)
    return text


def show(batches: Batches, tokenizer: PreTrainedTokenizerBase, count: int, console: Console) -> None:
    """Prints the first `count` sequences of the first epoch, with colours on a terminal and with brackets elsewhere."""
    colours = console.is_terminal
    supervised = Text("coloured" if colours else "[[between brackets]]", SUPERVISED_STYLES[0] if colours else "")
    console.print(Text("Supervised tokens are "), supervised, Text(": the model learns to write them."), sep="")
    for number, rows in enumerate(islice(_sequences(batches), count), start=1):
        _show_sequence(number, [batches.examples[row] for row in rows], batches.width, tokenizer, console)
    console.rule()
    steps_per_epoch, sequences_per_epoch = batches.steps_per_epoch(0), batches.sequences_per_epoch(0)
    lengths = batches.examples.lengths
    tokens = sum(int(lengths[rows].sum()) for rows in _sequences(batches))
    filled = tokens / (sequences_per_epoch * batches.width)
    console.print(
        f"sequences of {batches.width:,} tokens: {sequences_per_epoch:,} an epoch, {filled:.1%} filled with rows"
    )
    console.print(f"optimizer steps: {steps_per_epoch:,} an epoch")


def to_json(batches: Batches, tokenizer: PreTrainedTokenizerBase, count: int) -> dict[str, Any]:
    """The same for a program: the sequences with their rows, each in runs of text of equal weight."""
    return {
        "sequences": [
            {"width": batches.width, "rows": [_row_json(batches.examples[row], tokenizer) for row in rows]}
            for rows in islice(_sequences(batches), count)
        ],
        "sequences_per_epoch": batches.sequences_per_epoch(0),
        "steps_per_epoch": batches.steps_per_epoch(0),
    }


def _row_json(example: Example, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "location": example.location._asdict(),
        "tokens": example.tokens.tolist(),
        "weights": example.weights.tolist(),
        "text": [
            {"supervised": supervised, "text": "".join(piece.text for piece in run)}
            for supervised, run in groupby(pieces(example, tokenizer), key=lambda piece: piece.supervised)
        ],
    }


def _sequences(batches: Batches) -> Iterator[np.ndarray]:
    """The rows of each sequence of the first epoch."""
    return chain.from_iterable(map(batches.rows_of_step, range(batches.steps_per_epoch(0))))


def _show_sequence(
    number: int, examples: list[Example], width: int, tokenizer: PreTrainedTokenizerBase, console: Console
) -> None:
    tokens = sum(len(example.tokens) for example in examples)
    console.rule(Text(f"sequence {number}: {tokens:,} of {width:,} tokens"), align="left")
    for example in examples:
        parts = list(pieces(example, tokenizer))
        supervised = int(np.count_nonzero(example.weights))
        title = f"{example.location}: {len(example.tokens):,} tokens, {supervised:,} supervised"
        console.print(Text(visible(title), "bold"), soft_wrap=True)
        console.print(coloured(parts) if console.is_terminal else bracketed(parts), soft_wrap=True)
