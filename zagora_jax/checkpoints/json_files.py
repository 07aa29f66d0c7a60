"""JSON read strictly: what cannot be meant is an error that names the file."""

import codecs
import json
from pathlib import Path
from typing import Any

from zagora_jax.errors import UserError
from zagora_jax.git_lfs import STUB

# A Llama tokenizer.json has about 17 MB; no JSON file of a checkpoint comes near this size.
MAX_JSON_BYTES = 512 * 1024**2
MAX_DIGITS = 300


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {duplicate!r} stands twice in one object")
    return result


def _number(digits: str) -> int:
    """Read a whole number that a float can hold: sizes and rates are reckoned with, and no file has longer ones."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def parse_json_object(data: bytes, source: str) -> dict[str, Any]:
    """Parse `data` as a JSON object without duplicate keys; `source` names it in errors."""
    if data.startswith(STUB):
        raise UserError(f"{source} is a Git LFS pointer, not the file itself. Fetch it with `git lfs pull`.")
    if data.startswith(codecs.BOM_UTF8):
        raise UserError(f"{source} begins with a byte-order mark, which JSON must not. Save it as UTF-8 without one.")
    if data.lstrip()[:1] == b"<":
        raise UserError(f"{source} is no JSON but a web page or XML: {data.lstrip()[:40]!r}. Download it again.")
    try:
        content = json.loads(data.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_int=_number)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{source}: expected a JSON object, found {type(content).__name__}.")
    return content


def read_regular_file(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file of at most `limit` bytes."""
    try:
        if not path.is_file():
            raise UserError(f"{path} is not a file.")
        size = path.stat().st_size
        if size > limit:
            raise UserError(f"{path}: {size:,} bytes, more than the {limit:,} that such a file can have.")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object that the file at `path` holds."""
    return parse_json_object(read_regular_file(path), str(path))
