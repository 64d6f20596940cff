"""Arrays of the driver as rows of bytes, so that Spark can carry each shard to its worker."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from pybackend.data.arrays import Columns, rows_of, shard

# Below Spark's own advice for the size of a task, in which such a row travels.
BLOB_BYTES = 900_000
SCHEMA = "key long, dataset string, column_name string, first_row long, content binary"
Layout = dict[str, dict[str, tuple[str, tuple[int, ...]]]]
Counts = Mapping[str, list[int]]


def layout_of(datasets: Mapping[str, Columns]) -> Layout:
    """Element type and shape of a row, by data set and column."""
    return {
        name: {key: (array.dtype.str, array.shape[1:]) for key, array in columns.items()}
        for name, columns in datasets.items()
    }


def rows_to_send(
    datasets: Mapping[str, Columns], workers: int, to_all: Collection[str] = ()
) -> Counts:
    """Rows that each rank is sent, by data set: its shard, or all where named in ``to_all``."""
    return {
        name: [
            rows_of(columns if name in to_all else shard(columns, workers, rank))
            for rank in range(workers)
        ]
        for name, columns in datasets.items()
    }


def blobs(
    datasets: Mapping[str, Columns], keys: list[int], to_all: Collection[str] = ()
) -> Iterator[tuple[int, str, str, int, bytes]]:
    """Rows of `SCHEMA`: what `rows_to_send` says for rank r under ``keys[r]``."""
    for rank, key in enumerate(keys):
        for name, columns in datasets.items():
            sent = columns if name in to_all else shard(columns, len(keys), rank)
            for column, array in sent.items():
                row_bytes = max(1, array[:1].nbytes)
                step = max(1, BLOB_BYTES // row_bytes)
                for first in range(0, len(array), step):
                    part = np.ascontiguousarray(array[first : first + step])
                    yield key, name, column, first, part.tobytes()


def columns_from_blobs(
    batches: Iterable[Any], layout: Layout, counts: Counts, rank: int
) -> dict[str, Columns]:
    """A worker's shards from Arrow batches of `SCHEMA`, in whatever order they arrive."""
    datasets: dict[str, Columns] = {
        name: {
            key: np.empty((counts[name][rank], *shape), dtype)
            for key, (dtype, shape) in columns.items()
        }
        for name, columns in layout.items()
    }
    missing = sum(array.nbytes for columns in datasets.values() for array in columns.values())
    for batch in batches:
        for row in batch.to_pylist():
            array = datasets[row["dataset"]][row["column_name"]]
            part = np.frombuffer(row["content"], array.dtype).reshape(-1, *array.shape[1:])
            array[row["first_row"] : row["first_row"] + len(part)] = part
            missing -= part.nbytes
    if missing:
        raise RuntimeError(f"Spark delivered {missing} bytes too few to worker {rank}")
    return datasets
