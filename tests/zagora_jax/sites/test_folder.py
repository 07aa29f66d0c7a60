"""The shared folder, on this machine's file system and in memory."""

import uuid
from itertools import count

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from several_sites import together

from zagora_jax.errors import UserError
from zagora_jax.sites.folder import Folder


@pytest.fixture(params=["path", "file", "memory", "renaming"])
def url(request, tmp_path):
    if request.param == "renaming":
        fsspec.register_implementation("renaming", RenamingFileSystem, clobber=True)
    local = {"path": str(tmp_path / "shared"), "file": f"file://{tmp_path / 'shared'}"}
    return local.get(request.param, f"{request.param}://{uuid.uuid4().hex}")


class RenamingFileSystem(MemoryFileSystem):
    """As SSH's: files are written bit by bit, so that they have to be renamed."""

    protocol = "renaming"


class ForgetfulFileSystem(MemoryFileSystem):
    """Writes over what is there, whatever it is asked."""

    protocol = "forgetful"

    def open(self, path, mode="rb", **options):
        return super().open(path, mode.replace("x", "w"), **options)


def test_what_is_written_is_read_and_listed(url):
    folder = Folder(url)
    assert folder.read("rounds/000001/home") is None
    assert folder.list("rounds/000001") == {}
    folder.write("rounds/000001/home", b"first")
    folder.write("rounds/000001/home", b"second")
    folder.write("rounds/000001/office", b"x")
    other = Folder(url)
    assert other.read("rounds/000001/home") == b"second"
    assert other.list("rounds/000001") == {"home": 6, "office": 1}
    assert (folder.sent, other.received) == (12, 6)
    other.remove("rounds/000001")
    other.remove("rounds/000001")
    assert folder.list("rounds") == {}


def test_a_file_can_be_fetched(url, tmp_path):
    folder = Folder(url)
    folder.write("globals/0", b"content")
    folder.fetch("globals/0", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"content"
    with pytest.raises(OSError):
        folder.fetch("globals/1", tmp_path / "copy")


def test_a_file_is_created_once(url):
    folder = Folder(url)
    folder.require_exclusive_creation("probe.home")
    assert folder.create("rounds/000001/closed.json", b"mine")
    assert not Folder(url).create("rounds/000001/closed.json", b"yours")
    assert folder.read("rounds/000001/closed.json") == b"mine"
    assert folder.list("rounds/000001") == {"closed.json": 4}


@pytest.mark.parametrize("links", [True, False])
def test_of_many_who_create_a_file_at_once_one_succeeds(tmp_path, monkeypatch, links):
    """Also where there are no hard links, as on exFAT."""
    if not links:
        monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "not here")))
    folder = Folder(str(tmp_path))
    for number in range(20):
        jobs = [lambda who=who, number=number: folder.create(f"{number}", b"%d" % who) for who in range(8)]
        made = together(*jobs)
        assert sorted(made) == [False] * 7 + [True]
        assert folder.read(f"{number}") == b"%d" % made.index(True)
    assert not list(tmp_path.glob(".*"))


def test_a_broken_write_leaves_what_was_there(tmp_path, monkeypatch):
    folder = Folder(str(tmp_path))
    folder.write("file", b"before")
    calls = count()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, f"disk full {next(calls)}")))
    with pytest.raises(OSError, match="disk full"):
        folder.write("file", b"after")
    with pytest.raises(OSError, match="disk full"):
        folder.create("new", b"content")
    assert folder.read("file") == b"before"
    assert folder.list("") == {"file": 6}


def test_a_storage_that_lets_a_file_be_created_twice_is_refused():
    fsspec.register_implementation("forgetful", ForgetfulFileSystem, clobber=True)
    folder = Folder(f"forgetful://{uuid.uuid4().hex}")
    with pytest.raises(UserError, match="created twice"):
        folder.require_exclusive_creation("probe.home")


def test_an_unknown_protocol_is_refused_by_name():
    with pytest.raises(UserError, match=r"--sites.folder nosuch://x: .*nosuch"):
        Folder("nosuch://x")


def test_what_a_librarys_own_error_says_is_kept(tmp_path, monkeypatch):
    folder = Folder(str(tmp_path))
    monkeypatch.setattr(folder._fs, "cat_file", lambda _: (_ for _ in ()).throw(RuntimeError("no credentials")))
    with pytest.raises(OSError, match="RuntimeError: no credentials"):
        folder.read("file")
