"""A worker's rows on disk: written and read, in any pieces, under any name, by row number."""

from __future__ import annotations

import json
import re
import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pybackend.core.data import rows as rows_module
from pybackend.core.data.arrays import (
    Ragged,
    concatenate,
    count_rows,
    join_texts,
    pack_lists,
    shard,
    to_dense,
)
from pybackend.core.data.row_store import (
    Kind,
    RowStoreWriter,
    check_layouts,
    link_columns,
    read_layouts,
    unify_layout,
    write_columns,
)
from pybackend.core.data.rows import StoredRows, make_zero_row
from pybackend.core.data.spark_rows import (
    BLOB_BYTES,
    SCHEMA,
    describe_layout,
    pack_blobs,
    store_blobs,
)
from pybackend.core.errors import ClusterError, InputError

dtypes = st.sampled_from(["float16", "float32", "float64", "int32", "int64", "uint8", "bool"])


def arrays(rows: int) -> Any:
    shapes = hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4)
    return st.tuples(dtypes, shapes).flatmap(lambda kind: hnp.arrays(kind[0], (rows, *kind[1])))


def everything(folder: Path) -> Any:
    spool = StoredRows(folder)
    return spool.take(np.arange(len(spool)))


def ragged(*rows: Any, dtype: str = "int32") -> Ragged:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return Ragged(np.concatenate([*map(np.asarray, rows), []]).astype(dtype), offsets)


def texts(*rows: str) -> Ragged:
    return Ragged(
        np.frombuffer("".join(rows).encode(), np.uint8),
        np.concatenate([[0], np.cumsum([len(row.encode()) for row in rows])]).astype(np.int64),
        is_text=True,
    )


@settings(deadline=None)
@given(st.integers(0, 9).flatmap(lambda n: st.dictionaries(st.text(), arrays(n), min_size=1)))
def test_columns_come_back_in_their_order(columns: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_columns(Path(folder) / "train", columns)
        again = everything(Path(folder) / "train")
        assert list(again) == list(columns)
        for key, array in columns.items():
            assert again[key].dtype == array.dtype
            np.testing.assert_array_equal(again[key], array)


@pytest.mark.parametrize("kept", [0, 100, 1 << 20])
@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.randoms())
def test_any_rows_are_found_whatever_is_kept_in_memory(
    kept: int, rows: int, piece: int, random: Any
) -> None:
    x = np.arange(rows * 3, dtype="float32").reshape(rows, 3)
    y = np.arange(rows)
    places = np.array([random.randrange(rows) for _ in range(17)])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_MAPPED_BYTES", kept)
        with RowStoreWriter(Path(folder) / "train") as writer:
            for first in range(0, rows, piece):
                part = slice(first, first + piece)
                writer.append({"x": x[part], "y": y[part]})
        found = StoredRows(Path(folder) / "train").take(places)
        np.testing.assert_array_equal(found["x"], x[places])
        np.testing.assert_array_equal(found["y"], y[places])


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_ragged_rows_are_padded_to_the_longest_of_all(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_MAPPED_BYTES", kept)
    with RowStoreWriter(tmp_path / "train") as writer:
        writer.append({"x": ragged([1, 2], []), "y": np.array([0, 1])})
        writer.append({"x": ragged([3], [4, 5, 6]), "y": np.array([2, 3])})
    spool = StoredRows(tmp_path / "train")
    assert spool.spec["x"] == (np.dtype("int32"), (3,))
    found = spool.take(np.array([3, 1, 0, 2]))
    assert found["x"].tolist() == [[4, 5, 6], [0, 0, 0], [1, 2, 0], [3, 0, 0]]
    assert found["y"].tolist() == [3, 1, 0, 2]


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_rows_of_vectors_are_padded_with_vectors_of_zeros(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_MAPPED_BYTES", kept)
    vectors = Ragged(np.arange(6, dtype="float32").reshape(3, 2), np.array([0, 2, 2, 3]))
    write_columns(tmp_path / "train", {"x": vectors, "y": np.arange(3)})
    write_columns(tmp_path / "none", {"x": vectors[:0], "y": np.arange(0)})
    layouts = [read_layouts(tmp_path)[name] for name in ("train", "none")]
    check_layouts([{"train": layout} for layout in layouts])
    unify_layout(tmp_path / "none", layouts)
    assert StoredRows(tmp_path / "none").spec["x"] == (np.dtype("float32"), (2, 2))
    found = StoredRows(tmp_path / "train").take(np.array([2, 0, 1]))["x"]
    assert found.tolist() == [[[4, 5], [0, 0]], [[0, 1], [2, 3]], [[0, 0], [0, 0]]]


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_strings_come_back_as_bytes(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_MAPPED_BYTES", kept)
    with RowStoreWriter(tmp_path / "train") as writer:
        writer.append({"x": texts("größe", "", "b\0c")})
    found = StoredRows(tmp_path / "train").take(np.array([2, 0, 1]))["x"]
    assert found.tolist() == [[b"b\0c"], ["größe".encode()], [b""]]


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_lists_of_strings_are_padded_with_empty_strings(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_MAPPED_BYTES", kept)
    tags = pack_lists(texts("größe", "", "b\0c", "d" * 300), np.array([2, 0, 1, 1]))
    with RowStoreWriter(tmp_path / "train") as writer:
        writer.append({"x": tags[:1], "y": np.array([0])})
        writer.append({"x": concatenate([tags[1:3], tags[3:]]), "y": np.array([1, 2, 3])})
    rows = StoredRows(tmp_path / "train")
    assert rows.spec["x"] == (np.dtype(object), (2,))
    found = rows.take(np.array([2, 0, 1, 3]))["x"]
    assert found.tolist() == [[b"b\0c", b""], ["größe".encode(), b""], [b""] * 2, [b"d" * 300, b""]]
    assert to_dense(tags[2:]).tolist() == [[b"b\0c"], [b"d" * 300]]
    assert make_zero_row(rows)["x"].tolist() == [[b"", b""]]


def test_a_worker_without_rows_learns_what_the_others_have(tmp_path: Path) -> None:
    for name, rows in {"a": [[1, 2, 3]], "b": [[1]], "c": []}.items():
        (tmp_path / name).mkdir()
        with RowStoreWriter(tmp_path / name / "train") as writer:
            if rows:
                writer.append({"x": ragged(*rows), "y": np.array([1.5])})
    layouts = [read_layouts(tmp_path / name) for name in "abc"]
    check_layouts(layouts)
    for name in "abc":
        unify_layout(tmp_path / name / "train", [layout["train"] for layout in layouts])
    spools = {name: StoredRows(tmp_path / name / "train") for name in "abc"}
    assert [len(spool) for spool in spools.values()] == [1, 1, 0]
    assert everything(tmp_path / "b" / "train")["x"].tolist() == [[1, 0, 0]]
    zeros = make_zero_row(spools["c"])
    assert zeros["x"].shape == (1, 3)
    assert zeros["y"].dtype == "float64"


def test_rows_that_differ_between_workers_are_rejected(tmp_path: Path) -> None:
    for name, width in {"a": 2, "b": 3}.items():
        (tmp_path / name).mkdir()
        write_columns(tmp_path / name / "train", {"x": np.ones((1, width))})
    with pytest.raises(InputError, match="rows of `data` differ in width or type"):
        check_layouts([read_layouts(tmp_path / name) for name in "ab"])


def test_no_rows_at_all_are_rejected(tmp_path: Path) -> None:
    write_columns(tmp_path / "validation", {"x": np.ones((0, 2))})
    with pytest.raises(InputError, match="`validation_data` has no rows"):
        check_layouts([read_layouts(tmp_path)])


def test_rows_of_another_width_are_rejected(tmp_path: Path) -> None:
    with RowStoreWriter(tmp_path / "train") as writer:
        writer.append({"x": np.ones((2, 3))})
        with pytest.raises(InputError, match=r"shape \(1,\) .* but earlier rows have shape \(3,\)"):
            writer.append({"x": np.ones((2, 1))})


def test_the_file_of_rows_is_one_that_numpy_reads(tmp_path: Path) -> None:
    write_columns(tmp_path / "train", {"x": np.arange(6).reshape(3, 2), "y": np.ones(3)})
    stored = np.load(tmp_path / "train" / "rows.npy", mmap_mode="r", allow_pickle=False)
    assert stored["f0"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_rows_may_be_written_at_their_places_in_any_order(tmp_path: Path) -> None:
    kinds = {"x": Kind("<i8", ())}
    with RowStoreWriter(tmp_path / "train", kinds) as writer:
        for place in (2, 0, 1):
            writer.write_at(place, np.array([place * 10]).tobytes())
    assert everything(tmp_path / "train")["x"].tolist() == [0, 10, 20]


def test_linked_rows_are_the_same_rows(tmp_path: Path) -> None:
    write_columns(tmp_path / "one", {"x": np.arange(5)})
    link_columns(tmp_path / "other", tmp_path / "one")
    assert everything(tmp_path / "other")["x"].tolist() == [0, 1, 2, 3, 4]
    assert (tmp_path / "other" / "rows.npy").stat().st_nlink == 2


def test_no_name_leaves_the_folder(tmp_path: Path) -> None:
    write_columns(tmp_path / "train", {"../../etc/passwd": np.ones(2), "/root": np.ones(2)})
    assert [path.name for path in tmp_path.iterdir()] == ["train"]
    assert sorted(p.name for p in (tmp_path / "train").iterdir()) == ["layout.json", "rows.npy"]
    assert json.loads((tmp_path / "train" / "layout.json").read_text())["rows"] == 2


def test_the_folder_must_be_new(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        write_columns(tmp_path, {"x": np.ones(1)})


ARROW = pa.schema(
    [
        ("key", pa.int64()),
        ("dataset", pa.string()),
        ("first_row", pa.int64()),
        ("content", pa.binary()),
    ]
)


def batches_of(rows: list[Any]) -> list[Any]:
    """Return Arrow batches of two rows each, as Spark passes them to a task."""
    return pa.Table.from_pylist(
        [dict(zip(ARROW.names, row, strict=True)) for row in rows], schema=ARROW
    ).to_batches(max_chunksize=2)


def received(rows: list[Any], datasets: Any, workers: int, rank: int) -> Any:
    """Return the columns that a worker then has on its disk, by data set."""
    with tempfile.TemporaryDirectory() as folder:
        counts = counts_of(datasets, workers)
        store_blobs(batches_of(rows), describe_layout(datasets), counts, rank, Path(folder))
        spools = {name: StoredRows(Path(folder) / name) for name in datasets}
        return {name: spool.take(np.arange(len(spool))) for name, spool in spools.items()}


def counts_of(datasets: Any, workers: int) -> dict[str, list[int]]:
    return {
        name: [count_rows(shard(columns, workers, rank)) for rank in range(workers)]
        for name, columns in datasets.items()
    }


def test_the_schema_is_that_of_the_rows() -> None:
    assert [field.split()[0] for field in SCHEMA.split(", ")] == ARROW.names


@pytest.mark.full
@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 6), st.randoms())
def test_every_worker_gets_its_shard(rows: int, validation: int, workers: int, random: Any) -> None:
    rng = np.random.default_rng(rows)
    datasets = {
        "train": {
            "x": np.asfortranarray(rng.random((rows, 3, 2), "float32")),
            "y": rng.integers(0, 9, rows),
        },
        "validation": {
            "x": rng.random((validation, 3, 2), "float32"),
            "y": np.arange(validation) > 3,
        },
    }
    keys = [1000 + 7 * rank for rank in range(workers)]
    everything = list(pack_blobs(datasets, keys))
    for rank, key in enumerate(keys):
        mine = [row for row in everything if row[0] == key]
        random.shuffle(mine)
        found = received(mine, datasets, workers, rank)
        for name, columns in datasets.items():
            for column, array in shard(columns, workers, rank).items():
                assert found[name][column].dtype == array.dtype
                np.testing.assert_array_equal(found[name][column], array)


def test_large_columns_travel_in_pieces_that_spark_can_carry() -> None:
    columns = {
        "x": np.arange(4 * 1_000_000, dtype="float32").reshape(-1, 10),
        "y": np.arange(400_000),
    }
    datasets = {"train": columns}
    rows = list(pack_blobs(datasets, [5, 6]))
    assert max(len(row[3]) for row in rows) <= BLOB_BYTES
    found = received([row for row in rows if row[0] == 6], datasets, 2, 1)
    np.testing.assert_array_equal(found["train"]["x"], columns["x"][1::2])
    np.testing.assert_array_equal(found["train"]["y"], columns["y"][1::2])


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_240_000, before[1]))  # `ulimit -f 10000`
    named = (
        f"{tmp_path}/train/rows.npy reached the size limit for files of this process, 10.2 MB, "
        "and the rows need more: raise the limit before the process starts (`ulimit -f unlimited`)"
    )
    try:
        with pytest.raises(ClusterError, match=f"^{re.escape(named)}$"):
            write_columns(tmp_path / "train", {"x": np.zeros((3_000_000, 1), "float32")})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_row_larger_than_a_piece_travels_alone() -> None:
    columns = {"x": np.ones((3, BLOB_BYTES // 4 + 1), "float32")}
    assert [row[2] for row in pack_blobs({"train": columns}, [0])] == [0, 1, 2]


@pytest.mark.parametrize("lost", [0, 1])
def test_missing_rows_are_noticed(lost: int) -> None:
    datasets = {
        "train": {"x": np.ones((4, 2)), "y": np.ones(4)},
        "validation": {"x": np.ones((4, 2))},
    }
    rows = list(pack_blobs(datasets, [0]))
    size = len(rows.pop(lost)[3])
    with pytest.raises(RuntimeError, match=f"delivered {size} bytes too few to worker 0"):
        received(rows, datasets, 1, 0)


def test_strings_and_lists_of_strings_do_not_mix(tmp_path: Path) -> None:
    single, lists = join_texts([b"ab", b"cd"], 2), join_texts([b"ab", b"c", b"d", b"e"], 2)
    with RowStoreWriter(tmp_path / "rows") as writer:
        writer.append({"x": single})
        with pytest.raises(InputError, match="'x' are lists of strings, but earlier rows are sing"):
            writer.append({"x": lists})
    for number, column in enumerate((single, lists)):
        (tmp_path / str(number)).mkdir()
        with RowStoreWriter(tmp_path / str(number) / "train") as writer:
            writer.append({"x": column})
    with pytest.raises(InputError, match="differ in width or type"):
        check_layouts([read_layouts(tmp_path / str(number)) for number in range(2)])
