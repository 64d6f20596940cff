"""Arrow batches as lines of text, for programs through which bytes do not pass."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TEXT_SCHEMA = "text string"
# Spark holds a line in one row, and the program it goes through reads it as one string.
_LINE_BYTES = 4 << 20


def encode_lines(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches with one column ``text``: each row the base64 of an Arrow stream.

    There is always one row at least, as sparklyr runs no R for a partition without rows.
    """
    import pyarrow as pa

    yield _build_batch([""])
    for batch in batches:
        rows = max(1, batch.num_rows * _LINE_BYTES // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, rows):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as stream:
                stream.write_batch(batch.slice(start, rows))
            yield _build_batch([base64.b64encode(sink.getvalue()).decode()])


def decode_lines(path: Path) -> Iterator[Any]:
    """The batches of a file of such lines."""
    import pyarrow as pa

    with path.open() as lines:
        for line in lines:
            if line.strip():
                with pa.ipc.open_stream(base64.b64decode(line)) as stream:
                    yield from stream


def _build_batch(texts: list[str]) -> Any:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.array(texts, pa.string())], names=["text"])
