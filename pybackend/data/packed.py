"""Pack the driver's arrays into rows of bytes, so that Spark can send each shard to its worker."""

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

# Below the size of a task that Spark recommends; a task contains such a row.
BLOB_BYTES = 900_000
SCHEMA = "key long, dataset string, first_row long, content binary"
Layout = dict[str, Kinds]
Counts = Mapping[str, list[int]]


def describe_layout(datasets: Mapping[str, Columns]) -> Layout:
    """Return the kinds of each data set's columns.

    Raises
    ------
    InputError
        A column holds text, whose rows differ in width.
    """
    layout = {name: describe_columns(columns) for name, columns in datasets.items()}
    for name, kinds in layout.items():
        for key, kind in kinds.items():
            if kind.shape is None:
                raise InputError(
                    f"`{argument_of(name)}` has text in {key!r}, which Spark cannot send as "
                    "arrays: pass a Spark DataFrame, e.g. spark.createDataFrame(frame)"
                )
    return layout


def count_rows_to_send(
    datasets: Mapping[str, Columns], workers: int, to_all: Collection[str] = ()
) -> Counts:
    """Count the rows to send to each rank, by data set: its shard, or all rows for ``to_all``."""
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
    """Yield rows of `SCHEMA`; those for rank r have ``keys[r]``. See `count_rows_to_send`."""
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
    """Write a worker's shards from Arrow batches of `SCHEMA`, which may arrive in any order.

    Each data set becomes a folder with its name.
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
