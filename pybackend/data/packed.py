"""Arrays of the driver as rows of bytes, so that Spark can carry each shard to its worker."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pybackend.data.arrays import Columns, count_rows, shard
from pybackend.data.layout import Kinds, describe_columns, pack_rows, row_dtype
from pybackend.data.spool import SpoolWriter
from pybackend.errors import InputError
from pybackend.job.job import argument_of

# Below Spark's own advice for the size of a task, in which such a row travels.
BLOB_BYTES = 900_000
SCHEMA = "key long, dataset string, first_row long, content binary"
Layout = dict[str, Kinds]
Counts = Mapping[str, list[int]]


def describe_layout(datasets: Mapping[str, Columns]) -> Layout:
    """What the columns of each data set hold.

    Raises
    ------
    InputError
        One holds text, whose rows have no common width.
    """
    layout = {name: describe_columns(columns) for name, columns in datasets.items()}
    for name, kinds in layout.items():
        for key, kind in kinds.items():
            if kind.shape is None:
                raise InputError(
                    f"`{argument_of(name)}` has text in {key!r}, which Spark does not carry as "
                    "arrays: pass a Spark DataFrame, e.g. spark.createDataFrame(frame)"
                )
    return layout


def count_rows_to_send(
    datasets: Mapping[str, Columns], workers: int, to_all: Collection[str] = ()
) -> Counts:
    """Rows that each rank is sent, by data set: its shard, or all if named in ``to_all``."""
    return {
        name: [
            count_rows(columns if name in to_all else shard(columns, workers, rank))
            for rank in range(workers)
        ]
        for name, columns in datasets.items()
    }


def pack_blobs(
    datasets: Mapping[str, Columns], keys: list[int], to_all: Collection[str] = ()
) -> Iterator[tuple[int, str, int, bytes]]:
    """Rows of `SCHEMA`: what `count_rows_to_send` says for rank r under ``keys[r]``."""
    layout = describe_layout(datasets)
    for rank, key in enumerate(keys):
        for name, columns in datasets.items():
            sent = columns if name in to_all else shard(columns, len(keys), rank)
            step = max(1, BLOB_BYTES // max(1, row_dtype(layout[name]).itemsize))
            for first in range(0, count_rows(sent), step):
                part = {column: array[first : first + step] for column, array in sent.items()}
                yield key, name, first, pack_rows(part, layout[name]).tobytes()


def spool_blobs(
    batches: Iterable[Any], layout: Layout, counts: Counts, rank: int, folder: Path
) -> None:
    """Write a worker's shards from Arrow batches of `SCHEMA`, in whatever order they arrive.

    Each data set becomes a folder of its name.
    """
    missing = sum(counts[name][rank] * row_dtype(layout[name]).itemsize for name in layout)
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(SpoolWriter(folder / name, kinds))
            for name, kinds in layout.items()
        }
        for batch in batches:
            for row in batch.to_pylist():
                writers[row["dataset"]].place(row["first_row"], row["content"])
                missing -= len(row["content"])
        for name, writer in writers.items():
            writer.rows = counts[name][rank]
    if missing:
        raise RuntimeError(f"Spark delivered {missing} bytes too few to worker {rank}")
