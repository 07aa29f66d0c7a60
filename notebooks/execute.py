"""Execute notebooks from their paired scripts, and write them with what they showed.

    python notebooks/execute.py [SCRIPT.py ...]

Each SCRIPT.py, in jupytext's percent format, is the text of SCRIPT.ipynb beside it; all of this folder where none is
named. Needs the extra notebook, and export_and_transformers the extra oracle. Each notebook reads its settings from
environment variables: MODEL, RUNS, EPOCHS, and some ROWS or RANKS.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import jupytext
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
TIMEOUT = 3600  # seconds a cell


def main() -> None:
    """Execute, and write beside the scripts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scripts", nargs="*", type=Path)
    for script in parser.parse_args().scripts or scripts():
        print(script.stem)
        jupytext.write(execute(script), script.with_suffix(".ipynb"))


def scripts() -> list[Path]:
    """Return the scripts that are notebooks."""
    return sorted(path for path in FOLDER.glob("*.py") if path.name != Path(__file__).name)


def execute(script: Path) -> NotebookNode:
    """Run every cell in a new kernel, in this folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    notebook = jupytext.read(script)
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata.pop("jupytext", None)
    client = NotebookClient(notebook, timeout=TIMEOUT, resources={"metadata": {"path": str(FOLDER)}})
    client.execute()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # so that the same cells make the same file
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [of_any_machine(output) for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.pop("language_info", None)
    return notebook


def of_any_machine(output: NotebookNode) -> NotebookNode:
    """Write folders of this machine as a reader would."""

    def shown(value: Any) -> Any:
        if isinstance(value, dict):
            return type(value)({key: shown(item) for key, item in value.items()})
        if isinstance(value, list):
            return [shown(item) for item in value]
        if isinstance(value, str):
            return re.sub(
                r" at 0x[0-9a-f]+", "", value.replace(str(FOLDER.parent), "..").replace(str(Path.home()), "~")
            )
        return value

    return shown(output)


if __name__ == "__main__":
    main()
