import json

import chat_tokenizers as kinds
import pytest

from zagora_jax.data.tokenize import tokenize_rows
from zagora_jax.errors import UserError

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


@pytest.fixture(scope="module")
def tokenizer():
    return kinds.byte_level()


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_of_several_files_and_shapes(tokenizer, tmp_path):
    first = write(tmp_path / "a.jsonl", {"text": "abc"}, {"messages": [USER, ASSISTANT]})
    second = write(tmp_path / "b.jsonl", {"prompt": "Hi", "completion": "Hello"})
    data = tokenize_rows([first, second], tokenizer, 64)
    assert [str(example.location) for example in data.examples] == [
        f"{first}, line 1",
        f"{first}, line 2",
        f"{second}, line 1",
    ]
    assert data.examples[1].tokens.tolist() == data.examples[2].tokens.tolist()
    statistics = data.statistics
    assert (statistics.rows, statistics.kept) == (3, 3)
    assert statistics.tokens == sum(len(example.tokens) for example in data.examples)
    assert statistics.supervised_tokens == sum(example.supervised.sum() for example in data.examples)
    assert statistics.longest == max(len(example.tokens) for example in data.examples)
    assert str(statistics).startswith(f"3 of 3 rows, {statistics.tokens} tokens, longest row {statistics.longest}, ")


def test_rows_are_cut_and_left_out_with_an_account(tokenizer, tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        {"messages": [USER, ASSISTANT]},
        {"messages": [USER]},
        {"messages": [USER, ASSISTANT, USER]},
        {"text": "word " * 500},
        {"messages": [{"role": "user", "content": "long " * 500}, ASSISTANT]},
        {"text": ""},
    )
    data = tokenize_rows([path], tokenizer, 64)
    statistics = data.statistics
    assert [example.location.number for example in data.examples] == [1, 3, 4]
    assert [row.number for row in statistics.truncated.first] == [4]
    assert [row.number for row in statistics.cut_away.first] == [5]
    assert [row.number for row in statistics.unsupervised.first] == [2, 6]
    assert [row.number for row in statistics.ends_with_user.first] == [2, 3]
    assert statistics.longest == len(data.examples[2].tokens) == 64
    assert f"rows cut off at the sequence length: 1 ({path}, line 4)" in str(statistics)
    assert f"rows left out, no supervised token: 2 ({path}, line 2; {path}, line 6)" in str(statistics)
    # the trailing user turn teaches nothing
    assert data.examples[1].supervised.sum() == data.examples[0].supervised.sum()


def test_nothing_left_is_an_error_with_the_account(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [USER]})
    with pytest.raises(
        UserError, match=r"no row is left to train on\n0 of 1 rows.*\n.*no supervised token: 1 \(.*line 1\)"
    ):
        tokenize_rows([path], tokenizer, 64)


def test_long_row_is_cut_by_its_line_and_the_next_is_read(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "word " * 10_000_000}, {"text": "short"})
    data = tokenize_rows([path], tokenizer, 128)
    assert [len(example.tokens) for example in data.examples] == [128, len(tokenizer("short")["input_ids"]) + 1]
    assert [row.number for row in data.statistics.truncated.first] == [1]


def test_many_rows_keep_their_order(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", *({"text": f"row {number}"} for number in range(700)))
    data = tokenize_rows([path], tokenizer, 32)
    assert [example.location.number for example in data.examples] == list(range(1, 701))
    assert tokenizer.decode(data.examples[613].tokens) == "row 613<|im_end|>"
    assert data.statistics.truncated.count == 0


def test_counts_go_on_after_the_first_places(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "fine"}, *({"text": ""} for _ in range(9)))
    statistics = tokenize_rows([path], tokenizer, 32).statistics
    assert statistics.unsupervised.count == 9
    assert str(statistics).endswith(f"{path}, line 6; ...)")
