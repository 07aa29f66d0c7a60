"""Whichever folder a command is started in, `models` and `sharding` are this distribution's."""

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = ["-m", "zagora_jax.errors"]  # the lightest module to run as a command
REPOSITORY = Path(__file__).resolve().parents[2]


def python(arguments: list[str], directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("hiding", ["models/__init__.py", "models.py", "sharding/__init__.py", "sharding.py"])
def test_a_foreign_package_is_named_in_one_line(tmp_path, hiding):
    foreign = tmp_path / hiding
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("raise SystemExit('the foreign package was run')")
    name = hiding.partition("/")[0].removesuffix(".py")

    ended = python(COMMAND, tmp_path)
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"zagora_jax: {foreign} hides the package {name!r} of zagora-jax (")

    imported = python(["-c", "import zagora_jax"], tmp_path)
    assert imported.returncode == 1
    assert f"ImportError: {line}" in imported.stderr

    for advised in (python(["-P", *COMMAND], tmp_path), python(COMMAND, tmp_path.parent)):
        assert (advised.returncode, advised.stderr) == (0, "")


def test_a_foreign_package_that_is_imported_already(tmp_path):
    (tmp_path / "models.py").write_text("")
    program = "import models, sys; sys.path.pop(0); import zagora_jax"
    assert f"ImportError: zagora_jax: {tmp_path / 'models.py'} hides" in python(["-c", program], tmp_path).stderr


def test_a_folder_of_weights_is_no_package(tmp_path):
    for folder in ("models", "sharding"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(b"")
    program = "import zagora_jax, models, sharding; print(models.__file__, sharding.__file__)"
    ended = python(["-c", program], tmp_path)
    assert ended.stdout.split() == [str(REPOSITORY / name / "__init__.py") for name in ("models", "sharding")]
    assert python(COMMAND, tmp_path).returncode == 0


def test_missing_siblings(tmp_path):
    (tmp_path / "zagora_jax").mkdir()
    (tmp_path / "zagora_jax" / "__init__.py").write_bytes((REPOSITORY / "zagora_jax" / "__init__.py").read_bytes())
    ended = python(["-S", "-c", "import zagora_jax"], tmp_path, PYTHONPATH="")
    assert "ImportError: zagora_jax: its package 'models' is missing" in ended.stderr


def test_importing_the_package_is_cheap(tmp_path):
    program = "import zagora_jax, sys; print(sorted({'jax', 'numpy', 'pydantic', 'models'} & set(sys.modules)))"
    assert python(["-c", program], tmp_path).stdout.strip() == "[]"
