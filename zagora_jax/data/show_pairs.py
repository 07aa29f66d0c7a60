"""Pairs of texts for a person to read, as an embedder sees them."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from zagora_jax.data.examples import Example
from zagora_jax.data.pairs import PairBatches
from zagora_jax.data.show import bracketed, coloured, pieces
from zagora_jax.reporting.terminal import visible


def show(batches: PairBatches, tokenizer: PreTrainedTokenizerBase, count: int, console: Console) -> None:
    """Prints the texts of the first `count` pairs of the first epoch; on a terminal, their tokens are told apart."""
    for number, pair in enumerate(islice(_pairs(batches), count), start=1):
        location = next(iter(pair.values())).location
        console.rule(f"pair {number}", align="left")
        console.print(Text(visible(str(location)), "bold"), soft_wrap=True)
        for name, example in pair.items():
            parts = list(pieces(example, tokenizer))
            text = coloured(parts) if console.is_terminal else bracketed(parts)
            console.print(Text(f"{name}, {len(example.tokens):,} tokens: "), text, sep="", soft_wrap=True)
    console.rule()
    pairs, steps = len(batches.examples) // batches.group, batches.steps_per_epoch(0)
    console.print(f"optimizer steps: {steps:,} an epoch, of {-(-pairs // steps):,} pairs at most")


def to_json(batches: PairBatches, tokenizer: PreTrainedTokenizerBase, count: int) -> dict[str, Any]:
    """The same for a program."""
    return {
        "pairs": [
            {
                name: {
                    "location": example.location._asdict(),
                    "tokens": example.tokens.tolist(),
                    "text": "".join(piece.text for piece in pieces(example, tokenizer)),
                }
                for name, example in pair.items()
            }
            for pair in islice(_pairs(batches), count)
        ],
        "pairs_per_epoch": len(batches.examples) // batches.group,
        "steps_per_epoch": batches.steps_per_epoch(0),
    }


def _pairs(batches: PairBatches) -> Iterator[dict[str, Example]]:
    """Yields the texts of each pair of the first epoch by the row's fields."""
    names = ["query", "positive", *(f"negatives[{index}]" for index in range(batches.group - 2))]
    for step in range(batches.steps_per_epoch(0)):
        rows = [int(row) for sequence in batches.rows_of_step(step) for row in sequence]
        for start in range(0, len(rows), batches.group):
            of_pair = (batches.examples[row] for row in rows[start : start + batches.group])
            yield dict(zip(names, of_pair, strict=True))
