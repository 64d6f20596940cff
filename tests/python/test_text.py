"""Arrow batches as lines of base64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from pybackend.data.text import decode_lines, encode_lines


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
