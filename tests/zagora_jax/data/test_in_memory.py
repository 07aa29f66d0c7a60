"""Rows at hand, as files."""

from pathlib import Path

import numpy as np
import pytest

from zagora_jax.data.files import read_rows
from zagora_jax.data.in_memory import sources_of
from zagora_jax.errors import UserError

ROWS = [{"text": "one"}, {"text": "zwei ü", "weight": 0.5}]


def test_files_stay_files(tmp_path):
    assert sources_of("a.jsonl", tmp_path, "data") == ["a.jsonl"]
    assert sources_of([Path("a.jsonl"), "org/name:train"], tmp_path, "data") == ["a.jsonl", "org/name:train"]
    assert not list(tmp_path.iterdir())


def test_rows_are_written_once_and_read_back_equal(tmp_path):
    (file,) = sources_of(ROWS, tmp_path / "data", "data")
    assert [row.value for row in read_rows(file)] == ROWS
    assert sources_of(iter(ROWS), tmp_path / "data", "data") == [file]
    (other,) = sources_of(ROWS[:1], tmp_path / "data", "data")
    assert other != file
    assert [row.value for row in read_rows(file)] == ROWS


def test_arrays_become_lists(tmp_path):
    (file,) = sources_of([{"input_ids": np.array([1, 2])}], tmp_path, "data")
    assert next(read_rows(file)).value == {"input_ids": [1, 2]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "data: expected at least one row, found none"),
        (3, "data: expected files, rows or a data set, found int"),
        ([{"text": "a"}, "b"], "data, row 2: expected a mapping such as a dict, found str"),
        (["a.jsonl", {"text": "b"}], "data, item 2: expected a file, as before it, found dict"),
        ([{"text": object()}], "data, row 1: expected text, numbers and lists: a value of type object"),
        ([{"weight": float("nan")}], "data, row 1: expected text, numbers"),
        ({"text": ["a", "b"]}, "expected rows, or a data set with the split 'train', found dict with text"),
    ],
)
def test_what_is_no_rows_is_refused(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        sources_of(rows, tmp_path, "data")


def test_data_sets_of_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    for given in (rows, rows.with_format("numpy"), datasets.DatasetDict(train=rows, test=rows.select([0]))):
        (file,) = sources_of(given, tmp_path, "data")
        assert [row.value for row in read_rows(file)] == [{"text": "one"}, {"text": "two"}]
    (file,) = sources_of(datasets.DatasetDict(test=rows.select([1])), tmp_path, "eval_data", "test")
    assert [row.value for row in read_rows(file)] == [{"text": "two"}]
