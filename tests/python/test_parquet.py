"""Parquet files as numbered rows: any range of them, across row groups and files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pybackend.core.data import parquet
from pybackend.core.data.files import open_file
from pybackend.core.data.parquet import ParquetFiles, find_partitions
from pybackend.core.errors import InputError


def write(folder: Path, sizes: list[int], group: int) -> None:
    first = 0
    for number, size in enumerate(sizes):
        rows = range(first, first + size)
        texts = pa.array([f"row {n}" for n in rows], pa.string())
        table = pa.table({"a": pa.array(rows, pa.int64()), "b": texts})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=group)
        first += size


def numbers(files: ParquetFiles, first: int, last: int) -> list[int]:
    found = files.pieces([(first, last)], ["a"])
    return [n for _, batch in found for n in batch.column(0).to_pylist()]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.integers(1, 7),
    st.integers(1, 5),
    st.data(),
)
def test_a_range_of_rows_is_just_those(
    sizes: list[int], group: int, at_once: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "_MOST_ROWS", at_once)
        write(Path(folder), sizes, group)
        files = ParquetFiles.at(folder)
        assert files.rows == sum(sizes)
        assert list(files.counts) == sizes
        first = data.draw(st.integers(0, sum(sizes)))
        last = data.draw(st.integers(first, sum(sizes)))
        assert numbers(files, first, last) == list(range(first, last))
        cuts = sorted(data.draw(st.lists(st.integers(0, sum(sizes)), max_size=6)))
        ranges = list(zip(cuts[::2], cuts[1::2], strict=False))
        for place, batch in files.pieces(ranges, ["a"]):
            assert batch.column(0)[0].as_py() == place
        together = [n for _, b in files.pieces(ranges, ["a"]) for n in b.column(0).to_pylist()]
        assert together == [n for first, last in ranges for n in range(first, last)]


def test_only_the_columns_asked_for_are_read_in_their_order(tmp_path: Path) -> None:
    write(tmp_path, [3], 10)
    ((place, batch),) = ParquetFiles.at(str(tmp_path)).pieces([(1, 3)], ["b", "a"])
    assert place == 1
    assert batch.to_pydict() == {"b": ["row 1", "row 2"], "a": [1, 2]}


def test_files_may_lie_elsewhere() -> None:
    with open_file("memory://test_parquet/x.parquet", "wb") as file:
        pq.write_table(pa.table({"a": [1, 2, 3]}), file)
    assert numbers(ParquetFiles.at("memory://test_parquet"), 1, 3) == [2, 3]


def test_wide_rows_come_a_few_at_a_time(tmp_path: Path) -> None:
    image = np.zeros(100_000, np.uint8).tobytes()
    rng = np.random.default_rng(0)
    images = [rng.bytes(100_000) for _ in range(99)] + [image]
    pq.write_table(pa.table({"a": images}), tmp_path / "x.parquet")
    found = ParquetFiles.at(str(tmp_path)).pieces([(0, 100)], ["a"])
    assert max(batch.nbytes for _, batch in found) < 3e6


def test_each_row_group_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [100], 50)
    files = ParquetFiles.at(str(tmp_path))
    read: list[Any] = []
    original = pq.ParquetFile.iter_batches

    def counted(self: Any, size: int, groups: Any, **options: Any) -> Any:
        read.extend(groups)
        return original(self, size, groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    assert len(list(files.pieces([(n, n + 1) for n in range(0, 100, 3)], ["a"]))) == 34
    assert read == [0, 1]


def test_a_file_that_was_replaced_is_told(tmp_path: Path) -> None:
    write(tmp_path, [10], 5)
    files = ParquetFiles.at(str(tmp_path))
    write(tmp_path, [6], 5)
    with pytest.raises(InputError, match="has 6 rows here, but had 10 when"):
        numbers(files, 0, 10)


def test_what_is_no_parquet_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match=r"x\.parquet is not a readable Parquet file"):
        ParquetFiles.at(str(tmp_path))


def test_files_of_other_columns_are_told(tmp_path: Path) -> None:
    """Only the first difference is shown, as there may be thousands of columns."""
    many = {f"c{n}": [n] for n in range(1000)}
    pq.write_table(pa.table({**many, "a": [1]}), tmp_path / "1.parquet")
    for other, said in (
        ({**many, "a": [1.5]}, r"column 1001 is 'a' \(double\), expected 'a' \(int64"),
        (many, r"column 1001 is missing, expected 'a' \(int64\)"),
        ({**many, "a": [1], "b": [1]}, r"column 1002 is 'b' \(int64\), expected no more columns"),
    ):
        pq.write_table(pa.table(other), tmp_path / "2.parquet")
        with pytest.raises(InputError, match=f"2.parquet differ from those of .*1.parquet: {said}"):
            ParquetFiles.at(str(tmp_path))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["1", "-02"], (1, -2)),
        (["1", "0.5", "2e3"], (1.0, 0.5, 2000.0)),
        (["2026_01", "1"], ("2026_01", "1")),
        (["nan", "1"], ("nan", "1")),
        (["9" * 18, "9" * 19], (999999999999999999.0, 1e19)),
        (["a%2Fb%3D", "__HIVE_DEFAULT_PARTITION__"], ("a/b=", None)),
    ],
)
def test_what_folders_are_called_is_read_as_hive_does(written: Any, read: Any) -> None:
    files = [f"/data/k={value}/x.parquet" for value in written]
    found = find_partitions("/data", files)["k"]
    assert found == read
    assert list(map(type, found)) == list(map(type, read))


@pytest.mark.parametrize("noted", [b"no JSON", b"[]", b'{"index_columns": 3}', b'{"columns": []}'])
def test_what_other_programs_note_of_an_index_is_left_alone(tmp_path: Path, noted: bytes) -> None:
    table = pa.table({"a": [1.0]}).replace_schema_metadata({"pandas": noted})
    pq.write_table(table, tmp_path / "rows.parquet")
    assert ParquetFiles.at(str(tmp_path)).index == ()
