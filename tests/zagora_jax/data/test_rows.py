import json

import pyarrow
import pyarrow.parquet
import pytest

from zagora_jax.data.files import read_rows
from zagora_jax.data.rows import Completion, Conversation, Instruction, PlainText, TokenRow, interpret
from zagora_jax.data.sources import Location, SourceRow
from zagora_jax.data.turns import Turn
from zagora_jax.errors import UserError

HI = Conversation((Turn("user", "Hi"), Turn("assistant", "Hello")))


def form_of(value: dict):
    return interpret(SourceRow(value, Location("train.jsonl", 7)))


@pytest.mark.parametrize(
    ("value", "form"),
    [
        ({"text": "a"}, PlainText("a")),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}, HI),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, HI),
        ({"messages": [{"from": "human", "value": "Hi"}, {"role": "assistant", "content": "Hello"}]}, HI),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
                       {"role": "bot", "content": "Hello"}]}, HI),
        ({"prompt": "p", "completion": "c"}, Completion("p", "c")),
        ({"instruction": "i", "output": "o"}, Instruction("i", "", "o")),
        ({"instruction": "i", "input": None, "output": "o"}, Instruction("i", "", "o")),
        ({"instruction": "i", "input": "x", "output": "o"}, Instruction("i", "x", "o")),
        ({"text": "a", "id": 3, "source": {"url": "b"}}, PlainText("a")),
        ({"text": "a", "messages": None}, PlainText("a")),
        ({"text": "a", "weight": 0.5}, PlainText("a", 0.5)),
        ({"text": "a", "weight": None}, PlainText("a")),
        ({"prompt": "p", "completion": "c", "weight": 2}, Completion("p", "c", 2.0)),
        ({"instruction": "i", "output": "o", "weight": 0}, Instruction("i", "", "o", 0.0)),
        ({"messages": [{"role": "user", "content": "Hi"},
                       {"role": "assistant", "content": "Hello", "weight": 0.5, "tool_calls": []}], "weight": 3},
         Conversation((Turn("user", "Hi", 3.0), Turn("assistant", "Hello", 1.5)))),
    ],
)  # fmt: skip
def test_shapes(value, form):
    assert form_of(value) == form


def test_system_key_belongs_to_its_row_alone():
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    assert form_of({"system": "S", "conversations": turns}) == Conversation((Turn("system", "S"), *HI.turns))
    assert form_of({"conversations": turns}) == HI
    assert form_of({"system": "", "conversations": turns}) == HI
    with pytest.raises(UserError, match="both the key system and a first system turn"):
        form_of({"system": "S", "conversations": [{"from": "system", "value": "T"}, *turns]})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, "found no keys"),
        ({"question": "q", "answer": "a"}, r"expected the keys of one shape, \{text\}.*found question, answer"),
        ({"text": "a", "messages": [{"role": "user", "content": "Hi"}]}, "found text, messages"),
        ({"text": "a", "history": []}, "found text, history"),
        ({"text": None}, "field text: expected a string, found null"),
        ({"text": None, "prompt": "p"}, r"found text \(null\), prompt"),
        ({"text": 3.5}, "field text: expected a string, found the number 3.5"),
        ({"text": True}, "field text: expected a string, found a boolean"),
        ({"prompt": [{"role": "user"}], "completion": "c"}, "field prompt: expected a string, found a list"),
        ({"instruction": "i", "output": None}, "field output: expected a string, found null"),
        ({"messages": "Hi"}, "field messages: expected a list of turns, found a string"),
        ({"messages": []}, "at least one turn, found an empty list"),
        ({"messages": ["Hi"]}, r"field messages\[0\]: expected a turn, an object, found a string"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\]\.content: expected a string, found null"),
        ({"messages": [{"role": "critic", "content": "a"}]}, "expected one of system, user, human.*found 'critic'"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "expected in a turn of assistant"),
        ({"messages": [{"role": "user", "value": "a"}]}, "expected the keys role and content, or from and value"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "u"}]}]}, "found a part of type 'image'"),
        ({"text": "a", "weight": -1}, "field weight: expected a number from 0 to 1,000,000, found the number -1"),
        ({"text": "a", "weight": "1"}, "field weight: expected a number from 0 .*, found a string"),
        ({"text": "a", "weight": True}, "field weight: expected a number from 0 .*, found a boolean"),
        ({"input_ids": None}, "expected the keys of one shape|expected a list of numbers, found null"),
        ({"input_ids": 5}, "field input_ids: expected a list of numbers, found the number 5"),
        ({"input_ids": [1, 2.5]}, r"field input_ids\[1\]: expected a whole number, found the number 2.5"),
        ({"input_ids": [1, True]}, r"field input_ids\[1\]: expected a whole number, found a boolean"),
        ({"input_ids": [1, 2], "labels": [1]}, "field labels: expected 2 numbers, one a token, found 1"),
        (
            {"input_ids": [1, 2], "labels": [2, -100]},
            r"field labels\[0\]: expected 1, as in input_ids, or -100, found 2; labels are not shifted",
        ),
        ({"input_ids": [1, 2], "weights": [1, -1]}, r"field weights\[1\]: expected a number from 0"),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 1e4}], "weight": 1e4},
            r"field messages\[0\]\.weight, times the row's weight: expected a number from 0 to",
        ),
        (
            {"input_ids": [1, 2], "weights": [0, 1e4], "weight": 1e4},
            "field weights, times the row's weight: expected a number from 0",
        ),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "attention_mask: expected zeros at the ends alone"),
        (
            {"conversations": [{"from": 1, "value": "a"}]},
            r"conversations\[0\]\.from: expected a string, found the number",
        ),
    ],
)
def test_bad_rows_are_refused_by_file_and_line(value, expected):
    with pytest.raises(UserError, match=rf"^train\.jsonl, line 7[:,].*{expected}"):
        form_of(value)


def test_first_thousand_inputs_null_do_not_fix_a_type(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"instruction": "i", "input": None, "output": "o"}] * 1000 + [
        {"instruction": "i", "input": "x", "output": "o"}
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    forms = [interpret(row) for row in read_rows(path)]
    assert forms == [Instruction("i", "", "o")] * 1000 + [Instruction("i", "x", "o")]


def test_parquet_table_with_several_shapes(tmp_path):
    path = tmp_path / "a.parquet"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "a", "messages": None}, {"messages": turns}]), path)
    assert [interpret(row) for row in read_rows(path)] == [PlainText("a"), HI]


def test_rows_of_tokens():
    row = form_of(
        {
            "input_ids": [0, 0, 5, 6, 7, 8],
            "attention_mask": [0, 0, 1, 1, 1, 1],
            "labels": [-100, -100, -100, 6, 7, 8],
            "weights": [1, 1, 1, 0.5, 1, 0],
            "weight": 2,
        }
    )
    assert isinstance(row, TokenRow)
    assert row.tokens.tolist() == [5, 6, 7, 8]
    assert row.weights.tolist() == [0, 1, 2, 0]
    assert form_of({"input_ids": [5, 6]}).weights.tolist() == [1, 1]
