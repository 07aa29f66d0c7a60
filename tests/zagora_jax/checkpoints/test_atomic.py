import errno
import os

import pytest

from zagora_jax.checkpoints.atomic import atomic_directory, atomic_file, write_bytes
from zagora_jax.errors import UserError


def test_a_file_appears_whole(tmp_path):
    path = tmp_path / "x"
    with atomic_file(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["x"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    write_bytes(path, b"old")

    def fail():
        with atomic_file(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_failed_write_names_its_file(tmp_path):
    def fail():
        with atomic_file(tmp_path / "x"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device") as failed:
        fail()
    assert failed.value.filename == str(tmp_path / "x")


def test_an_error_without_a_number_keeps_its_text(tmp_path):
    def fail():
        with atomic_file(tmp_path / "x"):
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match=r"^the disk is gone$"):
        fail()
    assert os.listdir(tmp_path) == []


def test_files_have_the_usual_permissions(tmp_path):
    write_bytes(tmp_path / "x", b"")
    (tmp_path / "y").touch()
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "y").stat().st_mode


def test_a_directory_appears_whole(tmp_path):
    path = tmp_path / "parent" / "folder"
    with atomic_directory(path) as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "a").write_text("a")
        assert not path.exists()
    assert (path / "inner" / "a").read_text() == "a"
    assert os.listdir(tmp_path / "parent") == ["folder"]


def test_a_failed_directory_leaves_nothing(tmp_path):
    def fail():
        with atomic_directory(tmp_path / "folder") as temporary:
            (temporary / "a").write_text("a")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert os.listdir(tmp_path) == []


def test_an_existing_directory_is_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    with atomic_directory(tmp_path / "folder") as temporary:
        (temporary / "a").write_text("a")
    with pytest.raises(UserError, match="exists already"), atomic_directory(tmp_path / "folder"):
        pass
    assert (tmp_path / "folder" / "a").exists()
