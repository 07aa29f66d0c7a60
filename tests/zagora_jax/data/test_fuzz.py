"""Whatever is wrong with a data file, reading it ends in a UserError and nothing else."""

import gzip
import io
import json

import chat_tokenizers as kinds
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from fuzzing import JSON, accepts_or_refuses, changed_json, damaged, profile
from hypothesis import given
from hypothesis import strategies as st

from zagora_jax.data.files import read_rows
from zagora_jax.data.locate import locate
from zagora_jax.data.rows import interpret
from zagora_jax.data.sources import Location, SourceRow
from zagora_jax.data.tokenize import Preparation, tokenize_rows

QUICK = profile(80)

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
ROWS = [
    {"text": "Sofia é 😀", "weight": 0.5},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "tool_calls": [CALL]}]},
    {"messages": [{"role": "tool", "content": [{"type": "text", "text": "a"}]}], "tools": [{"name": "f"}]},
    {"system": "S", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        ],
        "tools": '[{"name": "f"}]',
    },
    {"prompt": "p", "completion": "c"},
    {"instruction": "i", "input": None, "output": "o"},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1], "weights": [1, 1.5, 0]},
]


def table() -> pyarrow.Table:
    return pyarrow.Table.from_pylist([{"text": f"row {number}", "id": number} for number in range(50)])


def parquet() -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(table(), stream)
    return stream.getvalue()


def arrow(new) -> bytes:
    stream = io.BytesIO()
    with new(stream, table().schema) as writer:
        writer.write_table(table())
    return stream.getvalue()


LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
FILES = {
    "a.jsonl": LINES,
    "a.json": json.dumps(ROWS, indent=1).encode(),
    "a.jsonl.gz": gzip.compress(LINES),
    "a.jsonl.zst": pyarrow.Codec("zstd").compress(LINES, asbytes=True),
    "a.parquet": parquet(),
    "a.arrow": arrow(pyarrow.ipc.new_stream),
    "b.arrow": arrow(pyarrow.ipc.new_file),
}


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path, name):
    path = tmp_path / name

    @QUICK
    @given(damaged(FILES[name]))
    def read(content):
        path.write_bytes(content)
        accepts_or_refuses(lambda: [interpret(row) for row in read_rows(path)], tmp_path)

    read()


@QUICK
@given(st.sampled_from(ROWS).flatmap(changed_json))
def test_rows(value):
    if isinstance(value, dict):
        accepts_or_refuses(lambda: interpret(SourceRow(value, Location("a", 1))))


TOKENIZER = kinds.byte_level(kinds.TOOLS)


@profile(40)
@given(st.lists(st.sampled_from(ROWS).flatmap(changed_json), min_size=1, max_size=3))
def test_rows_become_tokens(tmp_path, values):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    data = accepts_or_refuses(lambda: tokenize_rows([path], TOKENIZER, Preparation(64)), tmp_path)
    if data:
        assert data.statistics.kept == len(data.examples) > 0
        assert all(example.supervised.any() for example in data.examples)


STATE = {"_data_files": [{"filename": "a.arrow"}], "_fingerprint": "0", "_split": None}
NAMES = st.sampled_from(["../b.arrow", "/etc/passwd", "a.arrow", "sub/../../b.arrow", "~", "\0", "", ".", ".."])


@QUICK
@given(st.data())
def test_saved_data_sets(tmp_path, data):
    folder = tmp_path / "saved"
    if not folder.exists():
        folder.mkdir()
        for file in (folder / "a.arrow", tmp_path / "b.arrow"):
            file.write_bytes(FILES["a.arrow"])
    escaping = st.just(STATE | {"_data_files": [{"filename": data.draw(NAMES)}]})
    state = data.draw(changed_json(STATE) | escaping)
    (folder / "state.json").write_bytes(
        data.draw(st.just(json.dumps(state).encode()) | damaged(json.dumps(STATE).encode()))
    )
    splits = data.draw(st.none() | JSON | st.just(["train"]) | st.lists(NAMES, max_size=2))
    (folder / "dataset_dict.json").unlink(missing_ok=True)
    if splits is not None:
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    for split in ("", ":train", f":{data.draw(NAMES)}"):
        accepts_or_refuses(lambda split=split: [list(read_rows(file)) for file in locate(f"{folder}{split}")], folder)
