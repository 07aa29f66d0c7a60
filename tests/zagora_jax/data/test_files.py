import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zagora_jax.data import json_rows
from zagora_jax.data.files import read_rows
from zagora_jax.errors import UserError

TWO_ROWS = [{"text": "one"}, {"text": "two"}]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def zstandard(content: bytes) -> bytes:
    """In two frames, as tools that append or work in parallel write."""
    half = len(content) // 2
    return b"".join(pyarrow.Codec("zstd").compress(part, asbytes=True) for part in (content[:half], content[half:]))


def values(path: Path) -> list[dict]:
    return [row.value for row in read_rows(path)]


@pytest.mark.parametrize(
    "suffix", [kind + ending for kind in (".jsonl", ".json", ".parquet", ".arrow") for ending in ("", ".gz", ".zst")]
)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, suffix):
    path = tmp_path / f"train{suffix}"
    if ".parquet" in suffix or ".arrow" in suffix:
        plain = tmp_path / "plain"
        table = pyarrow.Table.from_pylist(TWO_ROWS)
        if ".parquet" in suffix:
            pyarrow.parquet.write_table(table, plain)
        else:
            with pyarrow.ipc.new_stream(plain, table.schema) as stream:
                stream.write_table(table, max_chunksize=1)
        content = plain.read_bytes()
    else:
        content = lines(TWO_ROWS) if ".jsonl" in suffix else json.dumps(TWO_ROWS, indent=1).encode()
    compress = {"gz": gzip.compress, "zst": zstandard}.get(suffix.rpartition(".")[2], bytes)
    write(path, compress(content))
    assert values(path) == TWO_ROWS
    unit = "line" if ".jsonl" in suffix else "row"
    assert [str(row.location) for row in read_rows(path)] == [f"{path}, {unit} 1", f"{path}, {unit} 2"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_byte_order_mark_is_no_part_of_the_first_row(tmp_path, suffix):
    content = lines(TWO_ROWS) if suffix == ".jsonl" else json.dumps(TWO_ROWS).encode()
    assert values(write(tmp_path / f"a{suffix}", b"\xef\xbb\xbf" + content)) == TWO_ROWS


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\v", "\f", "\x1c", "\r"])
def test_only_a_line_feed_ends_a_row(tmp_path, separator):
    text = f"a{separator}b"
    path = write(tmp_path / "a.jsonl", '{"text":"' + text + '"}\r\n')
    assert values(path) == [{"text": text}]


def test_blank_lines_are_skipped_and_counted(tmp_path):
    path = write(tmp_path / "a.jsonl", b'\n \r\n{"text": "a"}\n\n{"text": "b"}')
    assert [row.location.number for row in read_rows(path)] == [3, 5]


def test_a_row_of_50_megabytes_is_read(tmp_path):
    path = write(tmp_path / "a.jsonl", lines([{"text": "word " * 10_000_000}, {"text": "short"}]))
    assert [len(value["text"]) for value in values(path)] == [50_000_000, 5]


def test_surrogate_pair_is_one_character(tmp_path):
    assert values(write(tmp_path / "a.jsonl", rb'{"text": "\ud83d\ude00"}')) == [{"text": "😀"}]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"text": NaN}', "field text: expected text, found the number nan"),
        (b'{"text": [{"a": -Infinity}]}', r"field text\[0\].a: expected text, found the number -inf"),
        (b'{"text": 1e999}', "found the number inf"),
        (rb'{"text": "bad \ud83d end"}', r"field text: expected Unicode text, found \\ud83d.*at character 5"),
        (rb'{"\udc00": "a"}', r"found \\udc00"),
        (b'{"text": "a", "text": "b"}', "each key once, found 'text' twice"),
        (b'{"text": "a"} {"text": "b"}', "expected the end of the line after the object"),
        (b'[{"text": "a"}]', "expected an object, found a list; a list of objects belongs in a .json file"),
        (b'"text"', "expected an object, found a string"),
        (b"text", "not JSON at column 1"),
        (b'{"text": "a"', "not JSON at column 13.*found the end"),
        (b'{"text": "\xff"}', "expected UTF-8, found 0xff at byte 11"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"text": ' + b"9" * 5000 + b"}", "digits"),
    ],
)
def test_bad_line_is_refused_by_its_number(tmp_path, line, expected):
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(UserError, match=rf"a\.jsonl, line 2[:,].*{expected}"):
        values(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"text": "a"}\n{"text": "b"}', r"a\.json: expected a list of objects.*one object a line is named \.jsonl"),
        ('[{"text": "a"}, {"text": ]', r"row 2: not JSON at line 1, column 26"),
        ('[{"text": "a"}, 7]', "row 2: expected an object, found the number 7"),
        ('[{"text": "a"} {"text": "b"}]', "row 1: expected a comma"),
        ('[{"text": "a"}', "row 1: expected a comma or the end of the list.*found the end of the file"),
        ('[{"text": "a"}] x', "expected the end of the file after the list, found 'x'"),
        ("[]", "found an empty file"),
        ('[{"text": "a"}, {"text": NaN}]', "row 2, field text: expected text, found the number nan"),
    ],
)
def test_bad_json_is_refused_by_its_row(tmp_path, content, expected):
    with pytest.raises(UserError, match=expected):
        values(write(tmp_path / "a.json", content))


def test_git_lfs_pointer_is_recognised(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    for name in ("a.jsonl", "a.parquet", "a.json.gz"):
        with pytest.raises(UserError, match="Git LFS pointer; fetch the file itself"):
            values(write(tmp_path / name, pointer))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_empty_file_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="found an empty file"):
        values(write(tmp_path / name, b""))
    with pytest.raises(UserError, match="found an empty file"):
        values(write(tmp_path / name, gzip.compress(b"\n\n") if name.endswith("gz") else b"\n\n"))


@pytest.mark.parametrize(
    ("suffix", "compress", "name"), [(".gz", gzip.compress, "gzip"), (".zst", zstandard, "Zstandard")]
)
def test_truncated_data_is_refused_after_its_whole_rows(tmp_path, suffix, compress, name):
    content = compress(lines([{"text": str(number) * 50} for number in range(20_000)]))
    path = write(tmp_path / f"a.jsonl{suffix}", content[: len(content) * 3 // 4])
    read = []
    with pytest.raises(UserError, match=rf"damaged {name} data after row \d+"):
        read.extend(read_rows(path))
    assert 0 < len(read) < 20_000
    assert read[-1].value["text"] == str(len(read) - 1) * 50


def test_frames_of_zstandard_that_readers_skip(tmp_path):
    """As pzstd writes them: a magic number, the length of what is skipped, and that."""
    skipped = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + bytes(4)
    parts = [skipped + zstandard(lines([{"text": text}])) for text in "ab"]
    assert values(write(tmp_path / "a.jsonl.zst", b"".join(parts))) == [{"text": "a"}, {"text": "b"}]
    with pytest.raises(UserError, match=r"the content is Zstandard data; give the file a name that ends in \.zst"):
        values(write(tmp_path / "a.jsonl", parts[0]))


def test_a_date_that_python_does_not_know_is_refused(tmp_path):
    far = pyarrow.array([10**15], pyarrow.timestamp("ms"))  # the year 33658
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"], "timestamp": far}), path)
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as Parquet after row 0 .*out of range"):
        values(path)


def test_names_and_content_must_agree(tmp_path):
    with pytest.raises(UserError, match="content is gzip data"):
        values(write(tmp_path / "a.jsonl", gzip.compress(b"{}")))
    with pytest.raises(UserError, match="content is Zstandard data; give the file a name that ends in"):
        values(write(tmp_path / "a.jsonl", zstandard(b"{}")))
    with pytest.raises(UserError, match="cannot be read as Arrow"):
        values(write(tmp_path / "a.arrow", b"ARROW1 but nothing else"))
    with pytest.raises(UserError, match="content is not gzip data"):
        values(write(tmp_path / "a.jsonl.gz", b"{}"))
    with pytest.raises(UserError, match="byte-order mark of UTF-16"):
        values(write(tmp_path / "a.jsonl", '{"text": "a"}'.encode("utf-16")))
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        values(write(tmp_path / "a.parquet", b"PAR1 but nothing else PAR1"))


def test_unknown_kind_and_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"ends in one of \.jsonl, \.json, \.parquet, \.arrow, also with \.gz or \.zst"):
        values(tmp_path / "train.csv")
    write(tmp_path / "training.jsonl", b"{}")
    with pytest.raises(UserError, match=r"no such file; did you mean .*training\.jsonl\?"):
        values(tmp_path / "trainig.jsonl")
    with pytest.raises(UserError, match="there is no directory"):
        values(tmp_path / "nowhere" / "a.jsonl")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UserError, match="expected a file, found a directory"):
        values(tmp_path / "folder.json")


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), JSON_VALUES), min_size=1, max_size=5
    ),
    escaped=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\n\n"]),
)
def test_what_is_written_is_read(tmp_path_factory, rows, escaped, end):
    # st.text in nested keys may hold lone surrogates, which JSON text cannot
    rows = [json.loads(json.dumps(row).encode("utf-8", "replace")) for row in rows if _is_text(row)] or TWO_ROWS
    text = end.join(json.dumps(row, ensure_ascii=escaped) for row in rows)
    path = write(tmp_path_factory.mktemp("fuzz") / "a.jsonl", text)
    assert values(path) == rows


def _is_text(row: dict) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(
    content=st.binary(max_size=60)
    | st.text('{}[]",:\\ueE+-.019 \n\r\tantrufls\u2028é', max_size=60).map(lambda text: text.encode())
)
def test_any_bytes_give_rows_or_a_user_error(tmp_path_factory, content):
    for name in ("a.jsonl", "a.json"):
        path = write(tmp_path_factory.mktemp("fuzz") / name, content)
        try:
            rows = list(read_rows(path))
        except UserError:
            continue
        assert rows
        assert all(isinstance(row.value, dict) for row in rows)


LONG_LIST = (
    "["
    + ",\n".join(json.dumps({"text": "é😀" * number, "n": [number] * 9}, ensure_ascii=False) for number in range(40))
    + "]\n"
)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_a_json_list_is_read_in_pieces(tmp_path, monkeypatch, size):
    path = write(tmp_path / "a.json", b"\xef\xbb\xbf" + LONG_LIST.encode())
    monkeypatch.setattr(json_rows, "READ_BYTES", size)
    assert values(path) == json.loads(LONG_LIST)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (LONG_LIST.replace("[5, 5", "[5 5"), r"row 6: not JSON at line 6, column 32: Expecting ',' delimiter"),
        (LONG_LIST[:-3], r"row 40: not JSON at line 40, column \d+: .* found the end of the text"),
        (LONG_LIST.encode()[:1000] + b"\xc3", "expected UTF-8, found 0xc3 at byte 1001"),
    ],
)
def test_a_fault_of_a_json_list_is_placed_however_it_is_read(tmp_path, monkeypatch, size, content, expected):
    path = write(tmp_path / "a.json", content)
    monkeypatch.setattr(json_rows, "READ_BYTES", size)
    with pytest.raises(UserError, match=expected):
        values(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_row_without_end_does_not_fill_the_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(json_rows, "MAX_ROW_BYTES", 2**20)
    monkeypatch.setattr(json_rows, "READ_BYTES", 2**16)
    content = b'[{"text": "' + b"a" * 30_000_000
    content = content.removeprefix(b"[") if "jsonl" in name else content
    compress = {"gz": gzip.compress, "zst": zstandard}.get(name.rpartition(".")[2], bytes)
    path = write(tmp_path / name, compress(content))

    def refuse() -> None:
        with pytest.raises(UserError, match="has more than 1 MiB; cut it"):
            values(path)

    assert traced_peak(refuse) < 12 * 2**20


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow", "a.jsonl.zst"])
def test_a_file_is_never_held_in_memory(tmp_path, name):
    """Of 16 MB in rows of 4 kB, a few buffers are held: those of 256 rows for Parquet and Arrow, and a MiB of text."""
    rows = [{"text": f"{number:04}" * 1000} for number in range(4000)]
    path = tmp_path / name
    if "json" in name:
        content = lines(rows) if "jsonl" in name else json.dumps(rows).encode()
        write(path, zstandard(content) if name.endswith("zst") else content)
    elif name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, use_dictionary=False)
    else:
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=1000)
    del rows

    before = pyarrow.total_allocated_bytes()
    allocated = []

    def read() -> None:
        for row in read_rows(path):
            if row.location.number % 100 == 0:
                allocated.append(pyarrow.total_allocated_bytes() - before)

    assert traced_peak(read) + max(allocated) < 10 * 2**20
    assert len(allocated) == 40


def traced_peak(action) -> int:
    """Bytes that Python and numpy held at most while `action` ran, beyond those held before."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_arrow_data_that_leads_outside_of_its_memory_is_refused(tmp_path):
    """Offsets of strings beyond their bytes: unchecked, reading them would end the process."""
    table = pyarrow.Table.from_pylist([{"text": "a" * 100}])
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    content = sink.getvalue().to_pybytes()
    path = tmp_path / "a.arrow"
    path.write_bytes(content.replace((100).to_bytes(4, "little"), (2**30).to_bytes(4, "little")))
    with pytest.raises(UserError, match=r"a\.arrow: cannot be read as Arrow after row 0"):
        values(path)
