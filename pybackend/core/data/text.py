"""Arrow batches as lines of text, for programs that cannot transfer bytes.

A line is a checksum (CRC-32, 8 hexadecimal digits) and the base64 of an Arrow stream.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pybackend.core.errors import ClusterError

TEXT_SCHEMA = "text string"
# Spark stores a line in one row, and the program that transfers it reads it as one string.
_LINE_BYTES = 4 << 20
_DIGITS = 8


def encode_lines(batches: Iterable[Any]) -> Iterator[Any]:
    """Encode batches as batches with a single column, ``text``, in which each row is a line.

    There is always at least one row: sparklyr does not run R for a partition without rows.
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
    """Decode the batches in a file of lines that `encode_lines` wrote.

    Raises
    ------
    ClusterError
        A line is damaged; the message has its number.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    batches = _decode_line(line.strip())
                except Exception as error:  # damage ends in errors of all kinds
                    raise ClusterError(
                        f"line {number} of {path} is damaged ({error}): it contains rows that "
                        "Spark sent to this worker. Run the job again"
                    ) from error
                yield from batches


def _decode_line(line: bytes) -> list[Any]:
    import pyarrow as pa

    content = base64.b64decode(line[_DIGITS:], validate=True)
    if line[:_DIGITS] != b"%08x" % zlib.crc32(content):
        raise ValueError("its checksum is wrong")
    with pa.ipc.open_stream(content) as stream:
        stream.schema.names  # noqa: B018 (fails if a name is not valid text)
        batches = list(stream)
    for batch in batches:
        # A row takes at least a bit, but a batch without columns may claim any number of rows.
        if batch.num_rows > 8 * len(content):
            raise ValueError(f"it claims {batch.num_rows} rows")
        # Arrow does not check offsets when it follows them.
        batch.validate(full=True)
    return batches


def _build_batch(texts: list[str]) -> Any:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.array(texts, pa.string())], names=["text"])
