"""Arrow batches as lines of text, for programs through which bytes do not pass.

A line is a checksum (CRC-32, 8 hexadecimal digits) and the base64 of an Arrow stream.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pybackend.errors import ClusterError

TEXT_SCHEMA = "text string"
# Spark holds a line in one row, and the program it goes through reads it as one string.
_LINE_BYTES = 4 << 20
_DIGITS = 8


def encode_lines(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches with one column ``text``: each row a line.

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
            content = sink.getvalue().to_pybytes()
            yield _build_batch([f"{zlib.crc32(content):08x}{base64.b64encode(content).decode()}"])


def decode_lines(path: Path) -> Iterator[Any]:
    """The batches of a file of such lines.

    Raises
    ------
    ClusterError
        Names the line that was damaged on its way.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    batches = _decode_line(line.strip())
                except Exception as error:  # damage ends in errors of all kinds
                    raise ClusterError(
                        f"line {number} of {path} is damaged ({error}): these are rows that Spark "
                        "has brought to this worker. Run the job again"
                    ) from error
                yield from batches


def _decode_line(line: bytes) -> list[Any]:
    import pyarrow as pa

    content = base64.b64decode(line[_DIGITS:], validate=True)
    if line[:_DIGITS] != b"%08x" % zlib.crc32(content):
        raise ValueError("its checksum is wrong")
    with pa.ipc.open_stream(content) as stream:
        stream.schema.names  # noqa: B018 (fails if one is no text, which Arrow looks at only now)
        batches = list(stream)
    for batch in batches:
        # A row takes a bit at least, but without columns a batch may claim any number of them.
        if batch.num_rows > 8 * len(content):
            raise ValueError(f"it claims {batch.num_rows} rows")
        # Arrow itself follows offsets without a look at where they lead.
        batch.validate(full=True)
    return batches


def _build_batch(texts: list[str]) -> Any:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.array(texts, pa.string())], names=["text"])
