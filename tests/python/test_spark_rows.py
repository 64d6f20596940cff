"""Arrow batches as lines of base64."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pybackend import ClusterError
from pybackend.core.data.spark_rows import add_fields, decode_lines, encode_lines


def written(path: Path, batches: list[pa.RecordBatch]) -> list[str]:
    lines = [text for batch in encode_lines(batches) for text in batch.column(0).to_pylist()]
    path.write_text("\n".join(lines) + "\n")
    return lines


def test_batches_come_back_as_they_were(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_pydict(
        {"a": [1.5, None, float("nan")], "b": [[1], [], [2, 3]], "c": [b"\0\n", b"", None]}
    )
    path = tmp_path / "rows"
    written(path, [batch, batch.slice(0, 0), batch.slice(1)])
    found = pa.Table.from_batches(decode_lines(path))
    expected = pa.Table.from_batches([batch, batch.slice(1)])
    assert str(found.to_pydict()) == str(expected.to_pydict())
    assert found.schema == expected.schema


def test_a_large_batch_becomes_several_lines(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=2_000_000)
    path = tmp_path / "rows"
    lines = written(path, [pa.RecordBatch.from_pydict({"a": numbers})])
    assert max(map(len, lines)) < 6 << 20
    found = pa.Table.from_batches(decode_lines(path))
    assert (found.column("a").to_numpy() == numbers).all()


def test_no_rows_are_still_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    assert written(path, []) == [""]
    assert list(decode_lines(path)) == []


def seal(content: bytes) -> str:
    """Return a line with a valid checksum and any content."""
    return f"{zlib.crc32(content):08x}{base64.b64encode(content).decode()}"


def stream_of(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue().to_pybytes()


def test_damaged_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    _, line = written(path, [pa.RecordBatch.from_pydict({"name": ["x" * 50, "y"]})])
    content = base64.b64decode(line[8:])
    # The second offset of the text: Arrow alone would read far beyond the buffer.
    offset = content.index((50).to_bytes(4, "little") + (51).to_bytes(4, "little"))
    hostile = content[:offset] + b"\xff\xff\xff\x7f" + content[offset + 4 :]
    damaged = {
        "its checksum is wrong": line[:300] + ("A" if line[300] != "A" else "B") + line[301:],
        "": line[:-6],
        "Only base64 data is allowed": line[:50] + "?" + line[51:],
        "Offset invariant failure": seal(hostile),
        "can't decode byte 0xff": seal(content.replace(b"name", b"na\xffe")),
        "it claims 1000000 rows": seal(stream_of(pa.record_batch([pa.nulls(1_000_000)], ["a"]))),
        "Tried reading schema message": seal(b""),
    }
    for expected, wrong in damaged.items():
        path.write_text(f"\n{wrong}\n")
        with pytest.raises(ClusterError, match=rf"line 2 of .*rows is damaged \(.*{expected}"):
            list(decode_lines(path))


class Frame:
    """A DataFrame of Spark Connect 3.5, which asks the server for its columns each time."""

    requests = 0

    @property
    def columns(self) -> list[str]:
        self.requests += 1
        return ["a", "b", "c"]


def test_the_columns_are_asked_for_once() -> None:
    frame = Frame()
    assert add_fields(frame, ["a", "b", "c"]) is frame
    assert frame.requests == 1
