"""Notebooks run from the first cell to the last on a tiny model, and are paired with their scripts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from oracles import tiny_llama

jupytext = pytest.importorskip("jupytext")
for package in ("nbclient", "ipykernel"):
    pytest.importorskip(package)

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
NEEDS = {"export_and_transformers": "torch"}


@pytest.fixture(scope="module")
def execute():
    spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("notebooks") / "model", num_hidden_layers=4, max_position_embeddings=512)


def test_every_script_is_a_notebook(execute):
    assert [path.stem for path in execute.scripts()] == NAMES
    assert NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_its_script(name):
    """Changed one and not the other? `python notebooks/execute.py notebooks/NAME.py` writes the notebook anew."""
    script, notebook = (jupytext.read(FOLDER / f"{name}.{ending}") for ending in ("py", "ipynb"))
    cells = [[(cell.cell_type, cell.source) for cell in of.cells] for of in (script, notebook)]
    assert cells[0] == cells[1]
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]
    text = (FOLDER / f"{name}.ipynb").read_text()
    assert not [path for path in (str(FOLDER.parent), str(Path.home()) + "/") if path in text]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name != "quick_start" else name for name in NAMES]
)
def test_a_notebook_runs(name, execute, model, tmp_path, monkeypatch):
    if needed := NEEDS.get(name):
        pytest.importorskip(needed)
    settings = {"MODEL": model, "RUNS": tmp_path, "EPOCHS": 1, "RANKS": "2,4", "ROWS": 24}
    for variable, value in {**settings, "JAX_PLATFORMS": "cpu", "PYTHONPATH": FOLDER.parent}.items():
        monkeypatch.setenv(variable, str(value))
    notebook = execute.execute(FOLDER / f"{name}.py")
    kinds = {kind for cell in notebook.cells for output in cell.get("outputs", ()) for kind in output.get("data", ())}
    assert {"image/svg+xml", "text/html"} & kinds or name == "export_and_transformers"
    if name == "quick_start":
        shown = "".join(str(output) for cell in notebook.cells for output in cell.get("outputs", ()))
        assert "<progress" in shown  # the bar of a real notebook
        assert "report.html" in shown
    assert sys.modules.keys().isdisjoint({"ipykernel.kernelapp"})  # in processes of their own
