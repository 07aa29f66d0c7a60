"""Rows of Parquet files, and of the Arrow files that Hugging Face's datasets library saves."""

from collections.abc import Iterator
from typing import BinaryIO

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from zagora_jax.data.sources import Location, SourceRow
from zagora_jax.errors import UserError

BATCH_ROWS = 256
BUFFER_BYTES = 2**20  # of each column; without one, a whole row group is read at once

# What Arrow raises: its own errors, and Python's, such as for a date past the year 9999 or a length beyond all memory.
_ERRORS = (pyarrow.ArrowException, ValueError, OverflowError, OSError, MemoryError)


def read_parquet(stream: BinaryIO, name: str) -> Iterator[SourceRow]:
    """Yields the rows of a Parquet file."""
    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(stream, buffer_size=BUFFER_BYTES)
        for batch in file.iter_batches(batch_size=BATCH_ROWS):
            for value in batch.to_pylist():
                number += 1
                yield SourceRow(value, Location(name, number, "row"))
    except _ERRORS as error:
        raise UserError(f"{name}: cannot be read as Parquet after row {number} ({error})") from error


def read_arrow(stream: BinaryIO, name: str) -> Iterator[SourceRow]:
    """Yields the rows of an Arrow file, in the streaming format or the random-access one."""
    number = 0
    try:
        for batch in _batches(stream):
            batch.validate(full=True)  # offsets of a damaged file could lead outside of its memory
            for start in range(0, batch.num_rows, BATCH_ROWS):
                for value in batch.slice(start, BATCH_ROWS).to_pylist():
                    number += 1
                    yield SourceRow(value, Location(name, number, "row"))
    except _ERRORS as error:
        raise UserError(f"{name}: cannot be read as Arrow after row {number} ({error})") from error


def _batches(stream: BinaryIO) -> Iterator[pyarrow.RecordBatch]:
    random_access = stream.read(6) == b"ARROW1"
    stream.seek(0)
    if random_access:
        file = pyarrow.ipc.open_file(stream)
        yield from (file.get_batch(index) for index in range(file.num_record_batches))
    else:
        yield from pyarrow.ipc.open_stream(stream)
