import itertools
import json

import chat_tokenizers as kinds
import pytest

from zagora_jax.data.tokenize import Preparation, tokenize_rows
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
    data = tokenize_rows([first, second], tokenizer, Preparation(64))
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
    data = tokenize_rows([path], tokenizer, Preparation(64))
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
        tokenize_rows([path], tokenizer, Preparation(64))


def test_long_row_is_cut_by_its_line_and_the_next_is_read(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "word " * 10_000_000}, {"text": "short"})
    data = tokenize_rows([path], tokenizer, Preparation(128))
    assert [len(example.tokens) for example in data.examples] == [128, len(tokenizer("short")["input_ids"]) + 1]
    assert [row.number for row in data.statistics.truncated.first] == [1]


def test_many_rows_keep_their_order(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", *({"text": f"row {number}"} for number in range(700)))
    data = tokenize_rows([path], tokenizer, Preparation(32))
    assert [example.location.number for example in data.examples] == list(range(1, 701))
    assert tokenizer.decode(data.examples[613].tokens) == "row 613<|im_end|>"
    assert data.statistics.truncated.count == 0


def test_counts_go_on_after_the_first_places(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "fine"}, *({"text": ""} for _ in range(9)))
    statistics = tokenize_rows([path], tokenizer, Preparation(32)).statistics
    assert statistics.unsupervised.count == 9
    assert str(statistics).endswith(f"{path}, line 6; ...)")


LONG = "The river Arda rises in the Rhodope mountains. " * 20


@pytest.mark.parametrize("overlap", [1, 5, 31])
def test_long_text_is_split_so_that_each_token_is_learned_once(tokenizer, tmp_path, overlap):
    path = write(tmp_path / "a.jsonl", {"text": LONG}, {"text": "short"})
    data = tokenize_rows([path], tokenizer, Preparation(32, "split", overlap))
    *parts, short = data.examples
    whole = [*tokenizer(LONG)["input_ids"], tokenizer.eos_token_id]
    assert {part.location.number for part in parts} == {1}
    assert short.location.number == 2
    learned = [token for part in parts for token in part.tokens[part.supervised].tolist()]
    assert learned == whole[1:]  # nothing stands before the first
    for before, after in itertools.pairwise(parts):
        assert len(before.tokens) == 32
        assert after.tokens[:overlap].tolist() == before.tokens[-overlap:].tolist()
    assert [row.number for row in data.statistics.split.first] == [1]
    assert "rows longer than the sequence length, split: 1" in str(data.statistics)
    assert data.statistics.kept == len(data.examples) > 3


def test_chats_are_never_split(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [USER, {"role": "assistant", "content": LONG}]})
    data = tokenize_rows([path], tokenizer, Preparation(32, "split", 4))
    assert [len(example.tokens) for example in data.examples] == [32]
    assert data.statistics.truncated.count == 1


def test_rows_of_tokens_are_split_where_all_of_them_are_learned(tokenizer, tmp_path):
    tokens = list(range(100, 200))
    path = write(tmp_path / "a.jsonl", {"input_ids": tokens}, {"input_ids": tokens, "labels": [-100] * 9 + tokens[9:]})
    data = tokenize_rows([path], tokenizer, Preparation(40, "split", 1))
    assert [len(example.tokens) for example in data.examples] == [40, 40, 22, 40]
    assert (data.statistics.split.count, data.statistics.truncated.count) == (1, 1)


def test_long_rows_are_refused_where_that_was_asked_for(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "short"}, {"text": LONG})
    with pytest.raises(
        UserError, match=r"line 2: has [\d,]+ tokens, more than sequence_length 32, and long_rows is refu"
    ):
        tokenize_rows([path], tokenizer, Preparation(32, "refuse"))


def test_too_many_rows_without_supervised_tokens_are_an_error(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", *[{"messages": [USER, ASSISTANT]}] * 3, {"messages": [USER]})
    assert tokenize_rows([path], tokenizer, Preparation(64, max_left_out=0.25)).statistics.kept == 3
    message = r"1 of 4 rows \(25.0%\) have no supervised token .*more than max_left_out \(24.0%\)[^$]*line 4"
    with pytest.raises(UserError, match=message):
        tokenize_rows([path], tokenizer, Preparation(64, max_left_out=0.24))


def test_weights_are_accounted_for(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "abc", "weight": 0.5}, {"text": "abc"}, {"text": "abc", "weight": 0})
    statistics = tokenize_rows([path], tokenizer, Preparation(64)).statistics
    assert statistics.kept == 2
    assert statistics.weight == statistics.supervised_tokens * 0.75
    assert f"weighing {statistics.weight:,.1f} in the loss" in str(statistics)
    assert [row.number for row in statistics.unsupervised.first] == [3]


def test_each_source_has_its_rows_and_its_share(tokenizer, tmp_path):
    for name, count in (("a1", 1), ("a2", 2), ("b", 4)):
        write(tmp_path / f"{name}.jsonl", *[{"text": f"{name} {number}"} for number in range(count)])
    data = tokenize_rows([f"{tmp_path}/a*.jsonl", tmp_path / "b.jsonl"], tokenizer, Preparation(64), passes=[2.0, 0.5])
    assert data.sources == (range(3), range(3, 7))
    assert [example.location.file for example in data.examples][:3] == [
        str(tmp_path / name) for name in ("a1.jsonl", "a2.jsonl", "a2.jsonl")
    ]
    a, b = data.statistics.sources
    assert (a.files, a.kept, b.kept) == (2, 3, 4)
    share = 2 * a.tokens / (2 * a.tokens + 0.5 * b.tokens)
    assert f"a*.jsonl: 3 rows, {a.tokens} tokens, 2 passes an epoch, {share:.1%} of its tokens" in str(data.statistics)


def test_the_first_rows_of_each_source_alone(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", *[{"text": f"row {number}"} for number in range(9)], {"nonsense": 1})
    statistics = tokenize_rows([path], tokenizer, Preparation(64, first_rows=4)).statistics
    assert (statistics.rows, statistics.complete) == (4, False)
    with pytest.raises(UserError, match="line 10"):
        tokenize_rows([path], tokenizer, Preparation(64, first_rows=10))
    short = write(tmp_path / "b.jsonl", {"text": "a"})
    assert tokenize_rows([short], tokenizer, Preparation(64, first_rows=1)).statistics.complete


def test_statistics_as_json(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "abc"}, {"text": ""})
    content = json.loads(json.dumps(tokenize_rows([path], tokenizer, Preparation(64)).statistics.to_json()))
    assert content["rows"] == 2
    assert content["unsupervised"] == {"count": 1, "first": [{"file": str(path), "number": 2, "unit": "line"}]}
    assert content["sources"][0]["name"] == str(path)
