import os
import subprocess
import sys

import pytest

from zagora_jax.checkpoints.export_directory import export_directory
from zagora_jax.errors import UserError


def write(path, text, *, overwrite=False):
    with export_directory(path, overwrite=overwrite) as directory:
        (directory / "config.json").write_text(text)
        (directory / "sub").mkdir()
        (directory / "sub" / "file").write_text(text)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_it_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "new" / "out"
    with export_directory(path, overwrite=False) as directory:
        assert not path.exists()
        assert directory.parent == path.parent  # so that the rename stays on one disk
        (directory / "config.json").write_text("1")
    assert (path / "config.json").read_text() == "1"
    assert names(path.parent) == ["out"]


def test_an_empty_directory_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "1")
    assert names(tmp_path / "out") == ["config.json", "sub"]


def test_only_an_earlier_export_is_replaced_and_only_on_demand(tmp_path):
    path = tmp_path / "out"
    write(path, "1")
    with pytest.raises(UserError, match=r"out: is not empty \(it holds config.json\). Give --overwrite"):
        write(path, "2")
    assert (path / "config.json").read_text() == "1"
    (path / "model-00003-of-00003.safetensors").write_text("stale")
    write(path, "2", overwrite=True)
    assert names(path) == ["config.json", "sub"]
    assert (path / "config.json").read_text() == "2"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_files_are_never_replaced(tmp_path, overwrite):
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        write(tmp_path, "1", overwrite=overwrite)
    with pytest.raises(UserError, match="is a file"):
        write(tmp_path / "thesis.tex", "1", overwrite=overwrite)
    assert (tmp_path / "thesis.tex").read_text() == "years"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_everything_as_it_was(tmp_path, error):
    path = tmp_path / "out"
    write(path, "1")

    def fail():
        with export_directory(path, overwrite=True) as directory:
            (directory / "config.json").write_text("2")
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == ["out"]
    assert (path / "config.json").read_text() == "1"


def test_a_full_disk_is_told_in_one_line(tmp_path):
    def fail():
        with export_directory(tmp_path / "out", overwrite=False):
            raise OSError(28, "No space left on device", "model.safetensors")

    with pytest.raises(UserError, match=r"model.safetensors: No space left on device"):
        fail()
    assert names(tmp_path) == []


def test_what_a_killed_export_left_is_removed(tmp_path):
    kill = "import os, sys; from pathlib import Path\n"
    kill += "from zagora_jax.checkpoints.export_directory import export_directory\n"
    kill += "with export_directory(Path(sys.argv[1]), overwrite=False) as directory:\n"
    kill += "    (directory / 'junk').mkdir(); (directory / 'junk' / 'x').write_text('x'); os.kill(os.getpid(), 9)\n"
    done = subprocess.run([sys.executable, "-c", kill, tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert names(tmp_path) == [".out.exporting"]
    write(tmp_path / "out", "1")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["config.json", "sub"]


@pytest.mark.parametrize("moment", ["old one moved away", "new one in place"])
def test_a_broken_replacement_is_undone_or_finished(tmp_path, moment):
    path = tmp_path / "out"
    write(path, "old")
    os.rename(path, tmp_path / ".out.replaced")
    if moment == "new one in place":
        write(tmp_path / "other", "new")
        os.rename(tmp_path / "other", path)
        present = "new"
    else:
        present = "old"

    def fail():
        with export_directory(path, overwrite=True):
            assert (path / "config.json").read_text() == present
            raise RuntimeError

    if moment == "new one in place":
        with pytest.raises(RuntimeError):
            fail()
    else:
        # Without --overwrite, the old export that comes back must not be replaced either.
        with pytest.raises(UserError, match="is not empty"):
            write(path, "2")
        with pytest.raises(RuntimeError):
            fail()
    assert names(tmp_path) == ["out"]
    assert (path / "config.json").read_text() == present


def test_two_exports_do_not_share_a_directory(tmp_path):
    path = tmp_path / "out"
    with export_directory(path, overwrite=False) as directory:
        (directory / "config.json").write_text("1")
        with pytest.raises(UserError, match="another export is writing there now"):
            write(path, "2")
    assert (path / "config.json").read_text() == "1"
    assert names(tmp_path) == ["out"]
