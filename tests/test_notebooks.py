"""Notebooks run from the first cell to the last, and are kept with what they showed, in step with their scripts."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from oracles import tiny_llama

jupytext = pytest.importorskip("jupytext")
for package in ("nbclient", "ipykernel"):
    pytest.importorskip(package)

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
QUICK = ("quick_start", "rag", "sweep")  # the others take minutes on two busy cores
NEEDS = {"export_and_transformers": "torch"}
MOST_BYTES = 300_000  # of a notebook in the repository


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
    assert not outputs or "image/svg+xml" in kinds(notebook)  # kept whole, or not at all
    text = (FOLDER / f"{name}.ipynb").read_text()
    assert len(text) < MOST_BYTES
    assert not re.findall(r"/(?:home|root|tmp|work|usr)/[^\s\"]*", text), "paths of a machine"


def run(name, execute, monkeypatch, **settings):
    """Execute a notebook, and return it; sees to it that it shows pictures."""
    if needed := NEEDS.get(name):
        pytest.importorskip(needed)
    for variable, value in {**settings, "JAX_PLATFORMS": "cpu", "PYTHONPATH": FOLDER.parent}.items():
        monkeypatch.setenv(variable, str(value))
    notebook = execute.execute(FOLDER / f"{name}.py")
    assert "image/svg+xml" in kinds(notebook)
    assert sys.modules.keys().isdisjoint({"ipykernel.kernelapp"})  # in processes of their own
    return notebook


def kinds(notebook):
    return {kind for cell in notebook.cells for output in cell.get("outputs", ()) for kind in output.get("data", ())}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_a_notebook_runs(name, execute, model, tmp_path, monkeypatch):
    small = {"EPOCHS": 1, "RANKS": "2", "ROWS": 16, "JAX_DISABLE_MOST_OPTIMIZATIONS": 1}
    notebook = run(name, execute, monkeypatch, MODEL=model, RUNS=tmp_path, **small)
    if name == "quick_start":
        shown = "".join(str(output) for cell in notebook.cells for output in cell.get("outputs", ()))
        assert "<progress" in shown  # the bar of a real notebook
        assert "report.html" in shown


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_on_the_real_model(name, execute, smollm2, tmp_path, monkeypatch):
    run(name, execute, monkeypatch, MODEL=smollm2, RUNS=tmp_path)
