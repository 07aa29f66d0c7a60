import json
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.ipc
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from zagora_jax.data import hub
from zagora_jax.data.files import read_rows
from zagora_jax.data.locate import absolute, locate, locate_all
from zagora_jax.data.splits import split_of
from zagora_jax.errors import UserError


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "a"}\n')
    return folder


def located(source: Path | str, folder: Path) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in locate(str(source))]


def save_to_disk(folder: Path, rows: list[dict], shards: int = 2) -> Path:
    """As `datasets.Dataset.save_to_disk` of datasets 5.2: Arrow streams, named in state.json."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]
    for number, name in enumerate(names):
        table = pyarrow.Table.from_pylist(rows[number * len(rows) // shards : (number + 1) * len(rows) // shards])
        with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_files_and_patterns(tmp_path):
    touch(tmp_path, "b.jsonl", "a.jsonl", "deep/er/c.jsonl", "notes.txt")
    assert located(tmp_path / "b.jsonl", tmp_path) == ["b.jsonl"]
    assert located(tmp_path / "*.jsonl", tmp_path) == ["a.jsonl", "b.jsonl"]
    assert located(tmp_path / "**" / "[bc].jsonl", tmp_path) == ["b.jsonl", "deep/er/c.jsonl"]
    with pytest.raises(UserError, match=r"\*\.parquet: no file matches this pattern"):
        locate(str(tmp_path / "*.parquet"))
    with pytest.raises(UserError, match=r"no such file; did you mean .*a\.jsonl\?"):
        locate(str(tmp_path / "aa.jsonl"))
    with pytest.raises(UserError, match=r"a split .test. is part of a folder or of a data set on the hub"):
        locate(f"{tmp_path / 'a.jsonl'}:test")


def test_a_file_named_like_a_pattern_or_with_a_colon_is_itself(tmp_path):
    touch(tmp_path, "[a].jsonl", "a:b.jsonl", "a.jsonl:test")
    for name in ("[a].jsonl", "a:b.jsonl", "a.jsonl:test"):
        assert located(tmp_path / name, tmp_path) == [name]


def test_a_folder_gives_its_data_files_of_the_train_split(tmp_path):
    touch(tmp_path / "plain", "b.jsonl", "sub/a.parquet", ".cache/c.jsonl", "README.md")
    assert located(tmp_path / "plain", tmp_path / "plain") == ["b.jsonl", "sub/a.parquet"]
    split = touch(tmp_path / "split", "data/train-1.jsonl", "data/train-2.jsonl", "data/test.jsonl")
    assert located(split, split) == ["data/train-1.jsonl", "data/train-2.jsonl"]
    assert located(f"{split}:test", split) == ["data/test.jsonl"]
    with pytest.raises(UserError, match="has no split validation, found test, train; name one behind a colon"):
        locate(f"{split}:validation")
    with pytest.raises(UserError, match="has no split train, found test"):
        locate(str(touch(tmp_path / "tests", "test.jsonl")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is a directory without data files"):
        locate(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"),
        ("data/train-00000-of-00002.parquet", "train"),
        ("my_dataset_dev.jsonl", "validation"),
        ("validation/part.parquet", "validation"),
        ("eval/test_train.jsonl", "train"),  # the last word
        ("strain.jsonl", None),
        ("latest.jsonl", None),
        ("rows.jsonl", None),
    ],
)
def test_splits_are_told_by_whole_words(name, split):
    assert split_of(name) == split


def test_a_link_to_nothing_is_named_as_one(tmp_path):
    (tmp_path / "rows.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(UserError, match=r"no such file: it is a link to .*gone\.jsonl, which is not there"):
        locate(str(tmp_path / "rows.jsonl"))


def test_files_that_tell_no_split_are_not_left_out_in_silence(tmp_path, caplog):
    folder = touch(tmp_path, "train.jsonl", "more.jsonl", "other.jsonl")
    assert [file.name for file in locate(str(folder))] == ["train.jsonl"]
    assert caplog.messages == [f"{folder}: 2 files, whose names tell no split, are left out of train: more.jsonl, ..."]


def test_a_numbered_set_must_be_whole(tmp_path):
    touch(tmp_path, *(f"train-{number:05d}-of-00004.jsonl" for number in (0, 1, 3)))
    message = r"1 of the 4 files train-\*-of-00004\.jsonl are missing, first train-00002-of-00004\.jsonl"
    for source in (tmp_path, tmp_path / "train-*.jsonl"):
        with pytest.raises(UserError, match=message):
            locate(str(source))
    assert len(locate(str(tmp_path / "train-00003-of-00004.jsonl"))) == 1  # named by itself, it is meant


def test_what_the_datasets_library_saved(tmp_path):
    rows = [{"text": f"row {number}"} for number in range(5)]
    folder = save_to_disk(tmp_path / "one", rows)
    touch(folder, "data-stale.arrow")  # of an earlier save; state.json says which files count
    assert [row.value for file in locate(str(folder)) for row in read_rows(file)] == rows
    with pytest.raises(UserError, match="holds one data set without splits; leave :test out"):
        locate(f"{folder}:test")
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"names 1 of 2 files that are not there, first data-00001-of-00002\.arrow"):
        locate(str(folder))


def test_splits_that_the_datasets_library_saved(tmp_path):
    for name in ("train", "test"):
        save_to_disk(tmp_path / name, [{"text": name}] * 2)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert {file.parent.name for file in locate(str(tmp_path))} == {"train"}
    assert {file.parent.name for file in locate(f"{tmp_path}:test")} == {"test"}
    with pytest.raises(UserError, match="has no split dev, but train, test: name one"):
        locate(f"{tmp_path}:dev")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("state.json", '{"_data_files": [{"filename": "../a.arrow"}]}', r"something inside the folder, found '\.\./a"),
        ("state.json", '{"_data_files": [{"filename": "/etc/passwd"}]}', "something inside the folder"),
        ("state.json", '{"_data_files": ["a.arrow"]}', r"_data_files: expected a list of \{filename\}"),
        ("state.json", '{"_data_files": []}', "_data_files: expected a list"),
        ("state.json", "[", "is not valid JSON"),
        ("state.json", '{"_data_files": [{"filename": "a"}], "_indices_files": ["b"]}', "flatten_indices"),
        ("dataset_dict.json", '{"splits": ["train/.."]}', "has no split train, but train/"),
        ("dataset_dict.json", '{"splits": "train"}', "splits: expected a list of names"),
    ],
)
def test_folders_that_the_library_would_not_write(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        locate(str(tmp_path))


def test_no_file_is_read_twice(tmp_path):
    touch(tmp_path, "a.jsonl", "b.jsonl")
    with pytest.raises(UserError, match=r"a\.jsonl: is named twice, by .*a\.jsonl and by .*\*\.jsonl; data_weights"):
        locate_all([f"{tmp_path}/a.jsonl", f"{tmp_path}/*.jsonl"])
    assert [len(files) for _, files in locate_all([f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"])] == [1, 1]


def test_absolute_names(tmp_path, monkeypatch):
    monkeypatch.chdir(touch(tmp_path, "owner/name/a.jsonl", "a.jsonl"))
    for name in ("a.jsonl", "missing.jsonl", "*.jsonl", "owner/name", "owner/name:test", "owner/rows.jsonl"):
        assert absolute(name) == f"{tmp_path}/{name}"
    for name in ("owner/other", "owner/other:test", "hf://datasets/o/n@main/data/*.parquet", "/x/a.jsonl"):
        assert absolute(name) == name


class Hub:
    """Data sets of the hub in local folders, and a record of what was fetched from them."""

    def __init__(self, remote: Path, cache: Path, reachable: bool = True):
        self.remote, self.cache, self.reachable = remote, cache, reachable
        self.fetched: set[str] = set()

    def dataset_info(self, repo_id, *, revision):
        if not self.reachable:
            raise LocalEntryNotFoundError("outgoing traffic has been disabled")
        folder = self.remote / repo_id
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])

    def snapshot_download(self, repo_id, *, repo_type, revision, allow_patterns=("*",), local_files_only=False):
        assert repo_type == "dataset"
        snapshot = self.cache / repo_id / (revision or "main")
        if (local_files_only or not self.reachable) and not snapshot.exists():
            raise LocalEntryNotFoundError("not in the cache")
        if not local_files_only and self.reachable:
            for file in self.dataset_info(repo_id, revision=revision).siblings:
                name = file.rfilename
                if any(fnmatch(name, pattern) for pattern in allow_patterns):
                    self.fetched.add(name)
                    touch(snapshot, name)
                    (snapshot / name).write_bytes((self.remote / repo_id / name).read_bytes())
        return str(snapshot)


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    fake = Hub(tmp_path / "remote", tmp_path / "cache")
    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(hub.huggingface_hub.HfApi, "dataset_info", lambda _self, *a, **b: fake.dataset_info(*a, **b))
    monkeypatch.chdir(tmp_path)
    return fake


def names(source: str) -> list[str]:
    return [file.name for file in locate(source)]


def test_a_data_set_of_the_hub_by_the_names_of_its_files(fake_hub):
    touch(fake_hub.remote / "o/n", "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test.jsonl", "x.py")
    assert names("o/n") == ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    assert fake_hub.fetched == {"train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"}
    assert names("o/n:test") == ["test.jsonl"]
    assert names("hf://datasets/o/n@v1/t*t.jsonl") == ["test.jsonl"]
    assert "x.py" not in fake_hub.fetched
    with pytest.raises(UserError, match=r"o/n: has no split validation, found .*train"):
        locate("o/n:validation")
    with pytest.raises(UserError, match=r"none of the data set's 4 files match \*\.parquet"):
        locate("hf://datasets/o/n/*.parquet")
    with pytest.raises(UserError, match="give a pattern of files or a split, not both"):
        locate("hf://datasets/o/n/*.jsonl:test")
    with pytest.raises(UserError, match="expected hf://datasets/OWNER/NAME"):
        locate("hf://datasets/o")


CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/part-*.parquet
  - split: held
    path: [held/a.jsonl, held/b.jsonl]
{more}---
# A data set
"""


def test_a_data_set_of_the_hub_by_its_card(fake_hub):
    folder = touch(
        fake_hub.remote / "o/n", "data/part-1.parquet", "data/part-2.parquet", "held/a.jsonl", "held/b.jsonl"
    )
    (folder / "README.md").write_text(CARD.format(more=""))
    assert names("o/n") == ["part-1.parquet", "part-2.parquet"]
    assert names("o/n:held") == ["a.jsonl", "b.jsonl"]
    with pytest.raises(
        UserError, match="o/n: has no split test, but train, held; name one behind a colon, as o/n:train"
    ):
        locate("o/n:test")
    other = "- config_name: other\n  data_files: other/*.jsonl\n"
    (folder / "README.md").write_text(CARD.format(more=other))
    with pytest.raises(UserError, match=r"several data sets in one \(default, other\).*hf://datasets/o/n/data/part-\*"):
        locate("o/n")
    (folder / "README.md").write_text(CARD.format(more=other + "  default: true\n"))
    touch(folder, "other/c.jsonl")
    assert names("o/n") == ["c.jsonl"]
    bomb = "\n".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" if n else "a0: &a0 [x]" for n in range(40))
    for card in ("configs: [", f"configs: {'[' * 5000}", f"{bomb}\nconfigs: [data_files: *a39]"):
        (folder / "README.md").write_text(f"---\n{card}\n---\n")
        with pytest.raises(UserError, match=r"o/n: README\.md: its metadata is no YAML"):
            locate("o/n")


def test_a_hub_out_of_reach_leaves_what_is_in_the_cache(fake_hub, caplog):
    touch(fake_hub.remote / "o/n", "train.jsonl")
    assert names("o/n") == ["train.jsonl"]
    fake_hub.reachable = False
    assert names("o/n") == ["train.jsonl"]
    assert "o/n: the hub cannot be reached; the 1 files that are in its local cache are taken" in caplog.text
    with pytest.raises(UserError, match=r"o/other: is not a local file or folder, and the hub cannot be reached"):
        locate("o/other")


def test_a_download_that_is_not_complete_is_noticed_without_the_hub(fake_hub):
    touch(fake_hub.remote / "o/n", "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl")
    fake_hub.snapshot_download("o/n", repo_type="dataset", revision=None, allow_patterns=["*-00001-*"])
    fake_hub.reachable = False
    with pytest.raises(UserError, match=r"1 of the 2 files train-.* are missing, first train-00000-of-00002\.jsonl"):
        locate("o/n")


COMMIT = "0123456789" * 4
# Where nobody listens, in a process of its own: the client reads these settings once, and its errors are its own.
LOCATE = """
import sys, time
from zagora_jax.data.locate import locate
from zagora_jax.errors import UserError
for source in sys.argv[1:]:
    try:
        print(*locate(source), sep="\\n")
    except UserError as error:
        print(error)
"""


def test_the_clients_own_errors_and_cache_without_a_network(tmp_path):
    cache = tmp_path / "hub" / "datasets--o--n"
    touch(cache, f"snapshots/{COMMIT}/data/train-00000-of-00001.jsonl", "refs/main")
    (cache / "refs/main").write_text(COMMIT)
    # What newer clients keep of the whole data set, of which only a part was fetched.
    listed = {name: {"size": 14, "blob_id": COMMIT} for name in ("data/train-00000-of-00001.jsonl", "data/test.jsonl")}
    tree = touch(cache, f"trees/{COMMIT}.json") / f"trees/{COMMIT}.json"
    tree.write_text(json.dumps({"format_version": 1, "files": listed}))
    settings = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", LOCATE, "o/n", "o/other", "hf://datasets/o/other@main/*.jsonl"]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True, timeout=60)
    first, *refused = done.stdout.splitlines()
    assert first == str(cache / f"snapshots/{COMMIT}/data/train-00000-of-00001.jsonl")
    assert len(refused) == 2
    for line in refused:
        assert line.startswith("o/other: is not a local file or folder, and the hub cannot be reached to download it (")
    assert "Retry" not in done.stderr
    assert "o/n: the hub cannot be reached; the 1 files that are in its local cache are taken" in done.stderr
