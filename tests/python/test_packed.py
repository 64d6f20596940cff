"""Arrays as rows of bytes: every worker gets exactly its shard, in any order of arrival."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pybackend.data.arrays import count_rows, shard
from pybackend.data.packed import (
    BLOB_BYTES,
    SCHEMA,
    describe_layout,
    pack_blobs,
    spool_blobs,
)
from pybackend.data.rows import SpooledRows

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
        spool_blobs(batches_of(rows), describe_layout(datasets), counts, rank, Path(folder))
        spools = {name: SpooledRows(Path(folder) / name) for name in datasets}
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
def test_every_worker_gets_its_shard(rows: int, held_out: int, workers: int, random: Any) -> None:
    rng = np.random.default_rng(rows)
    datasets = {
        "train": {
            "x": np.asfortranarray(rng.random((rows, 3, 2), "float32")),
            "y": rng.integers(0, 9, rows),
        },
        "validation": {"x": rng.random((held_out, 3, 2), "float32"), "y": np.arange(held_out) > 3},
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
