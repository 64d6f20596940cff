"""Files that workers read themselves: each row once, mixed classes, and errors with a location."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from pybackend.core.api.call_data import narrow_columns, note_index
from pybackend.core.api.scoring import barrier_evaluate
from pybackend.core.data import sources
from pybackend.core.data.columns import ColumnSpec
from pybackend.core.data.files import find_files, open_file
from pybackend.core.data.frames import FrameRows
from pybackend.core.data.rows import StoredRows
from pybackend.core.data.sharding import count_sharded
from pybackend.core.data.sources import FileRows, ParquetFiles, find_partitions, open_row_files
from pybackend.core.errors import InputError


def test_files_for_another_reader_are_named_without_pyarrow(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    program = (
        "import sys; sys.modules['pyarrow'] = None; "
        "import importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'pyarrow' else find(name, *rest); "
        "from pybackend.core.data.sources import open_row_files; "
        f"open_row_files({str(path)!r}, None, 'data')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "is neither a Parquet nor a TFRecord file. Read it first" in done.stderr


def write(folder: Path, rows: int, **columns: Any) -> str:
    table = pa.table({"a": pa.array(np.arange(rows, dtype="float32")), **columns})
    path = folder / "rows.parquet"
    pq.write_table(table, path, row_group_size=50)
    return str(path)


def rows_of_worker(source: FileRows, workers: int, rank: int, everything: bool = False) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        source.spool(Path(folder) / "train", workers, rank, everything)
        spool = StoredRows(Path(folder) / "train")
        return spool.take(np.arange(len(spool)))


def open_parquet(path: str) -> ParquetFiles:
    return ParquetFiles.at(path, "data", find_files(path))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 300), st.integers(1, 9), st.booleans())
def test_every_row_is_one_workers(rows: int, workers: int, repartition: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), rows, label=pa.array(np.arange(rows)))
        source = FileRows.at(path, ColumnSpec(repartition=repartition), "float32", "data")
        counts = count_sharded(source.rows, workers)
        assert sum(counts) == rows
        assert max(counts) - min(counts) <= 1
        found = [
            rows_of_worker(source, workers, rank).get("y", np.array([])) for rank in range(workers)
        ]
        assert [len(part) for part in found] == counts
        assert sorted(np.concatenate(found).tolist()) == list(range(rows))


def test_workers_have_all_classes_of_sorted_rows_unless_told_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path, 1000, label=pa.array(np.arange(1000) // 100))
    mixed = FileRows.at(path, ColumnSpec(), "float32", "data")
    for rank in range(4):
        classes = Counter(rows_of_worker(mixed, 4, rank)["y"].tolist())
        assert min(classes[label] for label in range(10)) >= 20
    kept = FileRows.at(path, ColumnSpec(repartition=False), "float32", "data")
    assert set(rows_of_worker(kept, 4, 0)["y"].tolist()) == {0, 1, 2}


def test_all_rows_may_go_to_every_worker(tmp_path: Path) -> None:
    path = write(tmp_path, 70, label=pa.array(np.arange(70)))
    source = FileRows.at(path, ColumnSpec(), "float32", "data")
    assert count_sharded(source.rows, 4) == [18, 18, 17, 17]
    assert rows_of_worker(source, 4, 2, everything=True)["y"].tolist() == list(range(70))


def test_a_label_of_text_becomes_codes_in_sorted_order(tmp_path: Path) -> None:
    path = write(tmp_path, 3, label=pa.array(["b", "a", "c"]))
    source = FileRows.at(path, ColumnSpec(), "float32", "data")
    assert rows_of_worker(source, 1, 0)["y"].tolist() == [1, 0, 2]
    assert source.spec.categories == {"label": ["a", "b", "c"]}


def test_the_codes_of_text_are_those_of_the_training(tmp_path: Path) -> None:
    path = write(tmp_path, 2, label=pa.array(["b", "c"]))
    trained = FileRows.at(
        path, ColumnSpec(categories={"label": ["a", "b", "c"]}), "float32", "data"
    )
    validation = FileRows.at(
        path, narrow_columns(ColumnSpec(), trained), "float32", "validation_data"
    )
    assert rows_of_worker(validation, 1, 0)["y"].tolist() == [1, 2]
    with pytest.raises(InputError, match="needs the same codes as in training: list its values"):
        FileRows.at(path, narrow_columns(ColumnSpec(), {}), "float32", "validation_data")
    with pytest.raises(InputError, match="list its values in order, DataOptions"):
        barrier_evaluate(None, lambda: None, path)


def test_an_error_names_the_file_and_the_row(tmp_path: Path) -> None:
    labels = [*range(80), None]
    write(tmp_path, 81, label=pa.array(labels))
    (tmp_path / "rows.parquet").rename(tmp_path / "b.parquet")
    pq.write_table(
        pa.table({"a": pa.array([0.0] * 7, pa.float32()), "label": pa.array([0] * 7)}),
        tmp_path / "a.parquet",
    )
    named = r"'label' has 1 null.*row 80 \(counting.*b.parquet"
    with pytest.raises(InputError, match=named):
        FileRows.at(tmp_path, ColumnSpec(), "float32", "data")
    # Its writer need not have stored it.
    table = pq.read_table(tmp_path / "b.parquet")
    pq.write_table(table, tmp_path / "b.parquet", write_statistics=False)
    source = FileRows.at(tmp_path, ColumnSpec(), "float32", "data")
    with pytest.raises(InputError, match=named):
        rows_of_worker(source, 1, 0)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (ColumnSpec(label="zz"), "`data` has no column 'zz' (the label): its columns are a, label"),
        (ColumnSpec(tfrecord_spec={"a": "int64"}), "`tfrecord_spec` is given, but"),
    ],
)
def test_what_does_not_fit_the_files_is_told_before_they_are_read(
    choice: ColumnSpec, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, 3, label=pa.array([0, 1, 2]))
    with pytest.raises(InputError) as caught:
        FileRows.at(path, choice, "float32", "data")
    assert message in str(caught.value)


def test_columns_in_the_names_of_folders_are_read(tmp_path: Path) -> None:
    """Use the folder names of Hive and Spark: whole numbers, other numbers or text, escaped."""
    folders = ["label=1/size=0.5/town=a%20b", "label=0/size=2/town=__HIVE_DEFAULT_PARTITION__"]
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        write(tmp_path / folder, 3)
    source = FileRows.at(tmp_path, ColumnSpec(features=["a", "size"]), "float32", "data")
    found = rows_of_worker(source, 1, 0)
    assert found["y"].tolist() == [0, 0, 0, 1, 1, 1]
    assert found["x"][:, 1].tolist() == [2.0] * 3 + [0.5] * 3
    assert source.files.schema.names[-3:] == ["label", "size", "town"]
    alone = FileRows.at(tmp_path, ColumnSpec(features=["size"]), "float32", "data")
    assert rows_of_worker(alone, 1, 0)["x"].tolist() == [[2.0]] * 3 + [[0.5]] * 3
    with pytest.raises(InputError, match=r"'town' has 3 null.*row 0 .*town=__HIVE"):
        FileRows.at(tmp_path, ColumnSpec(), "float32", "data")
    # Below a path that names such a folder itself there is no such column.
    inner = FileRows.at(tmp_path / "label=1", ColumnSpec(label=None), "float32", "data")
    assert inner.files.schema.names == ["a", "size", "town"]
    of_pattern = FileRows.at(
        f"{tmp_path}/label=*/size=0*", ColumnSpec(features=["a"]), "float32", "data"
    )
    assert rows_of_worker(of_pattern, 1, 0)["y"].tolist() == [1, 1, 1]


def test_the_files_of_several_paths_are_read_in_their_order(tmp_path: Path) -> None:
    paths = []
    for label in (3, 1, 2):
        (tmp_path / str(label)).mkdir()
        paths.append(write(tmp_path / str(label), 2, label=pa.array([label] * 2)))
    spec = ColumnSpec(repartition=False)
    found = rows_of_worker(FileRows.at(paths, spec, "float32", "data"), 1, 0)
    assert found["y"].tolist() == [3, 3, 1, 1, 2, 2]
    with pytest.raises(InputError, match=r"`data` lists the file .*1/.* 2 times"):
        FileRows.at([paths[1], tmp_path / "1"], spec, "float32", "data")


def test_two_columns_of_one_name_are_told(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(InputError, match="`data` has two columns named 'a'"):
        FileRows.at(tmp_path, ColumnSpec(label="a"), "float32", "data")


def test_text_without_rows_is_told_as_such(tmp_path: Path) -> None:
    """The error is not about text that is not a number."""
    schema = pa.schema({"a": pa.float32(), "town": pa.string(), "label": pa.string()})
    pq.write_table(schema.empty_table(), tmp_path / "rows.parquet")
    for spec, what in (
        (ColumnSpec(), "the label column 'label'"),
        (ColumnSpec(features=["a", "town"], label=None), "column 'town'"),
    ):
        with pytest.raises(InputError, match=f"^{what} has no values to encode: the data has no"):
            FileRows.at(tmp_path, spec, "float32", "data")


def test_text_of_too_many_values_is_no_label(tmp_path: Path) -> None:
    texts = pa.array([f"id {n}" for n in range(20_000)])
    path = write(tmp_path, 20_000, label=texts)
    with pytest.raises(InputError, match="has more than 10,000 distinct strings"):
        FileRows.at(path, ColumnSpec(), "float32", "data")


FRAME = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0], "label": [0, 1, 0]})


INDEXED = {
    "a counting index": (FRAME, ["a", "b"], []),
    "a shuffled one": (FRAME.sample(frac=1, random_state=1), ["a", "b"], ["__index_level_0__"]),
    "a named one": (FRAME.set_index("b"), ["a"], ["b"]),
    "of two levels": (FRAME.assign(c=1.0).set_index(["b", "a"]), ["c"], ["b", "a"]),
    "of dask": (FRAME.rename_axis("__null_dask_index__")[1:], ["a", "b"], ["__null_dask_index__"]),
}


@pytest.mark.parametrize("name", INDEXED)
def test_a_pandas_index_is_no_feature(tmp_path: Path, name: str) -> None:
    frame, features, left_out = INDEXED[name]
    path = str(tmp_path / "rows.parquet")
    frame.to_parquet(path, index=None if name == "a counting index" else True)
    source = FileRows.at(path, ColumnSpec(), "float32", "data")
    assert list(source.column_groups[0].columns) == features
    assert [c for c in pd.read_parquet(path) if c != "label"] == features
    assert list(source.left_out) == left_out
    for column in left_out:
        named = FileRows.at(path, ColumnSpec(features=[column]), "float32", "data")
        assert named.column_groups[0].columns == (column,)
        assert column not in named.left_out


def test_what_pandas_calls_its_index_is_no_feature_of_a_frame() -> None:
    # As Spark, polars and DuckDB read such files.
    frame = FRAME.assign(__index_level_0__=[2, 0, 1])
    rows = FrameRows.of(frame, ColumnSpec(), "float32", "data")
    assert rows.left_out == ("__index_level_0__",)
    assert rows.columns["x"].shape == (3, 2)
    assert "`features`" in next(note_index({"train": rows})).text


@pytest.mark.parametrize("kind", ["parquet", "tfrecord"])
def test_a_folder_is_listed_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "parquet":
        pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    else:
        with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
            writer.write(tf.train.Example().SerializeToString())
    walk, walked = os.walk, []

    def note(path: str) -> Any:
        walked.append(path)
        return walk(path)

    monkeypatch.setattr(os, "walk", note)
    spec = {"x": "int64[]"} if kind == "tfrecord" else None
    assert open_row_files(str(tmp_path), spec, "data").rows == 1
    assert walked == [str(tmp_path)]


def write_parts(folder: Path, sizes: list[int], group: int) -> None:
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
        patch.setattr(sources, "_MOST_ROWS", at_once)
        write_parts(Path(folder), sizes, group)
        files = open_parquet(folder)
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
    write_parts(tmp_path, [3], 10)
    ((place, batch),) = open_parquet(str(tmp_path)).pieces([(1, 3)], ["b", "a"])
    assert place == 1
    assert batch.to_pydict() == {"b": ["row 1", "row 2"], "a": [1, 2]}


def test_files_may_lie_elsewhere() -> None:
    with open_file("memory://test_sources/x.parquet", "wb") as file:
        pq.write_table(pa.table({"a": [1, 2, 3]}), file)
    assert numbers(open_parquet("memory://test_sources"), 1, 3) == [2, 3]


def test_wide_rows_come_a_few_at_a_time(tmp_path: Path) -> None:
    image = np.zeros(100_000, np.uint8).tobytes()
    rng = np.random.default_rng(0)
    images = [rng.bytes(100_000) for _ in range(99)] + [image]
    pq.write_table(pa.table({"a": images}), tmp_path / "x.parquet")
    found = open_parquet(str(tmp_path)).pieces([(0, 100)], ["a"])
    assert max(batch.nbytes for _, batch in found) < 3e6


def test_each_row_group_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parts(tmp_path, [100], 50)
    files = open_parquet(str(tmp_path))
    read: list[Any] = []
    original = pq.ParquetFile.iter_batches

    def counted(self: Any, size: int, groups: Any, **options: Any) -> Any:
        read.extend(groups)
        return original(self, size, groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    assert len(list(files.pieces([(n, n + 1) for n in range(0, 100, 3)], ["a"]))) == 34
    assert read == [0, 1]


def test_a_file_that_was_replaced_is_told(tmp_path: Path) -> None:
    write_parts(tmp_path, [10], 5)
    files = open_parquet(str(tmp_path))
    write_parts(tmp_path, [6], 5)
    with pytest.raises(InputError, match="has 6 rows here, but had 10 when"):
        numbers(files, 0, 10)


def test_what_is_no_parquet_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match=r"x\.parquet is not a readable Parquet file"):
        open_parquet(str(tmp_path))


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
            open_parquet(str(tmp_path))


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
    assert open_parquet(str(tmp_path)).index == ()
