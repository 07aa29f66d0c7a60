"""The bar of a notebook, with a display that keeps what it is shown."""

import io
import re
import sys
from types import ModuleType
from xml.etree import ElementTree

import pytest
from rich.console import Console

from zagora_jax.reporting.notebook import NotebookBar
from zagora_jax.reporting.progress import Reporter

METRICS = {"learning_rate": 1e-4, "grad_norm": 1.0, "tokens_per_second": 1000.0, "peak_memory_gib": 2.0}


@pytest.fixture
def shown(monkeypatch):
    """What stands in the cell, one after the other."""
    pages = []

    class Handle:
        update = staticmethod(pages.append)

    def display(page, display_id):
        assert display_id is True
        pages.append(page)
        return Handle()

    module = ModuleType("IPython.display")
    module.HTML, module.display = str, display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return pages


def test_the_bar_tells_steps_time_and_numbers(shown):
    now = [0.0]
    bar = NotebookBar(10, 2, clock=lambda: now[0])
    assert "step 2 of 10" in shown[0]
    assert "compiling" in shown[0]
    for step in range(3, 8):
        now[0] += 3.0
        bar.update(step, 5.0 / step, f"loss <{step}>")
    page = ElementTree.fromstring(shown[-1].replace("<br>", "<br/>"))
    assert page.find("progress").attrib == {"value": "7", "max": "10", "style": "width:60%"}
    assert "step 7 of 10 9 s left" in " ".join(page.itertext())
    assert page.find("small").text == "loss <7>"
    assert page.find("{http://www.w3.org/2000/svg}svg") is not None


def test_quick_steps_are_not_all_shown(shown):
    now = [0.0]
    bar = NotebookBar(1000, 0, clock=lambda: now[0])
    for step in range(1, 1001):
        now[0] += 0.001
        bar.update(step, 1.0, "")
    assert len(shown) == 3  # the empty one, the first step, the one after half a second
    bar.show()
    assert "step 1,000 of 1,000" in shown[-1]


def test_a_training_in_a_notebook_has_a_bar_and_no_lines(shown):
    console = Console(file=io.StringIO(), force_jupyter=True)
    with Reporter(console).training(3, 0, log_every=2) as progress:
        for step in (1, 2, 3):
            progress.step({"step": step, "loss": 1.0 / step, **METRICS})
    assert re.search(r"step 3 of 3 .*loss 0\.3333  lr 1\.00e-04", shown[-1])
    assert console.file.getvalue() == ""


def test_a_training_that_breaks_off_shows_where(shown):
    def train():
        with Reporter(Console(file=io.StringIO(), force_jupyter=True)).training(9, 0, log_every=2) as progress:
            for step in (1, 2, 3):
                progress.step({"step": step, "loss": 1.0 / step, **METRICS})
            raise ValueError("broke")

    with pytest.raises(ValueError, match="broke"):
        train()
    assert "step 3 of 9" in shown[-1]
