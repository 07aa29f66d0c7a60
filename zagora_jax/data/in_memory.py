"""Rows that a program has at hand, as a file that the data reader reads like any other."""

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from zagora_jax.checkpoints.atomic import fsync_directory
from zagora_jax.data.splits import TRAIN
from zagora_jax.errors import UserError

# A file or several, rows as mappings, or a data set of the Hugging Face library `datasets`, also one in splits.
Dataset = str | Path | Iterable[Any]


def sources_of(dataset: Dataset, folder: Path, name: str, split: str = TRAIN) -> list[str]:
    """Return the sources that hold the rows of `dataset`; rows in memory are written to a file in `folder`.

    Args:
        dataset: the rows.
        folder: made where it is needed.
        name: what the data set is called in errors, and how the file's name begins.
        split: of a data set in splits.

    Raises:
        UserError: these are no rows.
    """
    if isinstance(dataset, str | Path):
        return [str(dataset)]
    if isinstance(dataset, Mapping):
        if split not in dataset:
            raise UserError(
                f"{name}: expected rows, or a data set with the split {split!r}, found {type(dataset).__name__} with "
                f"{', '.join(map(str, dataset)) or 'nothing'}"
            )
        dataset = dataset[split]
    if not isinstance(dataset, Iterable):
        raise UserError(f"{name}: expected files, rows or a data set, found {type(dataset).__name__}")
    items: Iterator[Any] = iter(_unformatted(dataset))
    first = next(items, None)
    if first is None:
        raise UserError(f"{name}: expected at least one row, found none")
    items = chain([first], items)
    if isinstance(first, str | Path):
        return [_source(item, number, name) for number, item in enumerate(items, start=1)]
    return [str(_written(items, folder, name))]


def texts_of(given: Any, name: str) -> list[str]:
    """Return the texts of a list.

    Raises:
        UserError: it is one text, or holds anything else.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise UserError(f"{name}: expected a list of texts, found {type(given).__name__}; put it into a list")
    texts = list(given)
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise UserError(f"{name}, item {number}: expected a text, found {type(text).__name__}")
    return texts


def _written(rows: Iterator[Any], folder: Path, name: str) -> Path:
    """Write rows to a file whose name is a hash of them, so that no other rows' file is overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    digest, temporary = hashlib.sha256(), folder / f".{name}.{secrets.token_hex(6)}.tmp"
    try:
        with temporary.open("xb") as file:
            for line in _lines(rows, name):
                file.write(line)
                digest.update(line)
            file.flush()
            os.fsync(file.fileno())
        final = folder / f"{name}-{digest.hexdigest()[:16]}.jsonl"
        os.replace(temporary, final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(folder)
    return final


def _unformatted(dataset: Any) -> Any:
    """Let a data set of `datasets` give its rows as Python's own values."""
    return dataset.with_format(None) if hasattr(dataset, "with_format") else dataset


def _source(item: Any, number: int, name: str) -> str:
    if not isinstance(item, str | Path):
        raise UserError(f"{name}, item {number}: expected a file, as before it, found {type(item).__name__}")
    return str(item)


def _lines(rows: Iterator[Any], name: str) -> Iterator[bytes]:
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise UserError(f"{name}, row {number}: expected a mapping such as a dict, found {type(row).__name__}")
        try:
            yield json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_plain).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise UserError(f"{name}, row {number}: expected text, numbers and lists: {error}") from error


def _plain(value: Any) -> Any:
    """Return arrays of any library as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} has no place in a row")
