import errno
import tracemalloc

import numpy as np
import pytest

from zagora_jax.data import examples as module
from zagora_jax.data.examples import Example, Examples, ExamplesWriter
from zagora_jax.data.sources import Location
from zagora_jax.errors import UserError


def test_rows_come_back_with_their_places():
    rows = [
        Example(np.arange(size, dtype=np.int32), np.linspace(0, 1, size, dtype=np.float32), Location(file, size, unit))
        for file, size, unit in (("a.jsonl", 3, "line"), ("b.parquet", 5, "row"), ("a.jsonl", 1, "line"))
    ]
    examples = Examples.of(rows)
    assert len(examples) == 3
    for ours, theirs in zip(examples, rows, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.weights.tolist() == theirs.weights.tolist()
        assert ours.location == theirs.location
    assert [row.location.number for row in examples[1:]] == [5, 1]
    assert examples[-1].location.number == 1
    assert examples.supervised_tokens == 2 + 4
    with pytest.raises(IndexError):
        examples[3]


def test_no_rows():
    examples = Examples.of([])
    assert len(examples) == 0
    assert examples.supervised_tokens == 0
    assert len(examples.fingerprint) == 64


def test_rows_do_not_take_memory():
    """Of 32 MB of tokens and weights, 24 bytes a row are held, and a few buffers."""
    tokens, weights = np.ones(4096, np.int32), np.ones(4096, np.float32)
    tracemalloc.start()
    try:
        with ExamplesWriter() as writer:
            for number in range(1000):
                writer.add(Example(tokens, weights, Location("a", number)))
            examples = writer.finish()
        assert examples.supervised_tokens == 4_096_000
        assert len(examples.fingerprint) == 64
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_the_fingerprint_does_not_depend_on_how_much_is_looked_at_together(monkeypatch):
    rows = [Example(np.arange(50, dtype=np.int32), np.ones(50), Location("a", 1))] * 3
    whole = Examples.of(rows).fingerprint
    monkeypatch.setattr(module, "CHUNK", 7)
    assert Examples.of(rows).fingerprint == whole


def test_a_full_disk_names_the_folder_and_the_way_out(monkeypatch):
    class Full:
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            pass

    monkeypatch.setattr(module.tempfile, "TemporaryFile", Full)
    with (
        pytest.raises(UserError, match=r"cannot be written there .No space left.*set TMPDIR"),
        ExamplesWriter() as writer,
    ):
        writer.add(Example(np.ones(1, np.int32), np.ones(1, np.float32), Location("a", 1)))
