import io
import json
import subprocess
import sys

import chat_tokenizers as kinds
import numpy as np
import oracles
import pytest
from rich.console import Console

from zagora_jax.data.batches import Batches
from zagora_jax.data.examples import Example, Examples
from zagora_jax.data.show import pieces, show
from zagora_jax.data.sources import Location

TEXT = "Sofia, é 😀.\n\nHi there"
SAID = "The river \x1b[31mA\x9b31mrda.<|im_end|>"  # with escape codes of two kinds
ANSWER = f"[[{SAID}]]".replace("\x1b", "␛").replace("\x9b", r"\x9b")


def example_of(tokens, supervised) -> Example:
    return Example(np.array(tokens, np.int32), np.array(supervised, bool), Location("train.jsonl", 3))


@pytest.mark.parametrize("make", [kinds.byte_level, kinds.llama3, kinds.llama2])
def test_pieces_join_to_the_text(make):
    tokenizer = make()
    tokens = tokenizer(TEXT)["input_ids"]
    parts = list(pieces(example_of(tokens, [False] * 3 + [True] * (len(tokens) - 3)), tokenizer))
    assert "".join(part.text for part in parts) == tokenizer.decode(tokens)
    assert "".join(part.text for part in parts).endswith(TEXT)
    assert "😀" in "".join(part.text for part in parts if part.supervised)
    assert len(parts) > 5


def shown(terminal: bool) -> str:
    tokenizer = kinds.byte_level()
    question, answer = (
        tokenizer("Which river?")["input_ids"],
        tokenizer(SAID)["input_ids"],
    )
    example = example_of(question + answer, [False] * len(question) + [True] * len(answer))
    batches = Batches(Examples.of([example] * 3), sequence_length=64, packing=False, micro_batch_size=1)
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=60, color_system="standard" if terminal else None
    )
    show(batches, tokenizer, 2, console)
    return console.file.getvalue()


def test_without_a_terminal_supervised_tokens_stand_in_brackets():
    text = shown(terminal=False)
    assert "\x1b" not in text
    assert f"Which river?{ANSWER}\n" in text
    assert text.count("sequence ") == 2
    assert "train.jsonl, line 3: " in text


def test_on_a_terminal_supervised_tokens_are_coloured():
    text = shown(terminal=True)
    assert "\x1b[1;32m" in text or "\x1b[1;36m" in text
    assert "[[The" not in text
    assert "\x1b[31m" not in text  # the row's own escape codes do not reach the terminal
    assert "\x9b" not in text


def test_command(tmp_path):
    model = oracles.tiny_llama(tmp_path / "model")
    rows = [
        {"messages": [{"role": "user", "content": "Which river?"}, {"role": "assistant", "content": "Arda."}]},
        {"messages": [{"role": "user", "content": "No answer"}]},
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "zagora_jax.preview", "--model", str(model), "--data", str(data)]
    result = subprocess.run([*command, "--rows", "1"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    expected = "<|im_start|>user\nWhich river?<|im_end|>\n<|im_start|>assistant\n[[Arda.<|im_end|>]]\n"
    assert expected in result.stdout
    assert "1 of 2 rows" in result.stdout
    assert f"rows left out, no supervised token: 1 ({data}, line 2)" in result.stdout
    result = subprocess.run([*command, "--rows", "1", "--json"], capture_output=True, text=True, check=True)
    content = json.loads(result.stdout)
    [[row]] = [sequence["rows"] for sequence in content["sequences"]]
    assert row["location"] == {"file": str(data), "number": 1, "unit": "line"}
    assert row["text"][1] == {"supervised": True, "text": "Arda.<|im_end|>"}
    assert sum(weight > 0 for weight in row["weights"]) == content["statistics"]["supervised_tokens"]
    assert content["statistics"]["unsupervised"]["count"] == 1
    data.write_text("[]")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert f"error: {data}, line 1: expected an object, found a list" in result.stderr


def test_pairs_for_an_embedder(tmp_path):
    model = oracles.tiny_llama(tmp_path / "model")
    data = tmp_path / "pairs.jsonl"
    row = {"query": "Which [b]river?", "positive": "The \x1b[31mArda.", "negatives": ["No river.", "unused"]}
    data.write_text(json.dumps(row) + "\n")
    command = [sys.executable, "-m", "zagora_jax.preview", "--model", str(model), "--data", str(data)]
    command += ["--retrieval.pooling", "last", "--retrieval.hard_negatives", "1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for line in (
        "query, 15 tokens: Which [b]river?",
        "positive, 14 tokens: The ␛[31mArda.",
        "negatives[0], 9 tokens: No r",
    ):
        assert line in result.stdout
    assert f"{data}, line 1\n" in result.stdout
    assert "1 pairs of 1 rows, 3 texts, 38 tokens, longest text 15" in result.stdout
    assert "unused" not in result.stdout
    content = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    (pair,) = content["pairs"]
    assert pair["query"]["text"] == row["query"]
    assert len(pair["negatives[0]"]["tokens"]) == 9
    assert content["statistics"]["texts"] == 3
