"""A worker's rows on disk or packed as bytes, read back by row number in bounded memory.

Fixed-width columns are stored row by row in one ``.npy`` file with a structured type, so that one
read returns a whole row. For a ragged column, this file has the position and length of each row's
values; the values are in a separate ``.npy`` file.

All but the first rows are read with ``pread``, not through a memory map: reading shuffled rows from
a memory map makes the whole file resident, which counts towards the memory limits of containers and
resource managers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.core.data.arrays import Columns, count_rows, shard
from pybackend.core.data.disk import naming_full_disk
from pybackend.core.data.layout import (
    LAYOUT,
    PLACE,
    Kind,
    Kinds,
    build_header,
    describe_columns,
    pack_rows,
    read_kinds,
    read_layout,
    row_dtype,
    write_layout,
)
from pybackend.core.data.ragged import Ragged
from pybackend.core.errors import InputError
from pybackend.core.job.job import argument_of
from pybackend.core.words import show, term

Array = npt.NDArray[Any]

_ROWS = "rows.npy"
_CHUNK_BYTES = 4 << 20


class RowStoreWriter:
    """Writer of rows into a new folder.

    Parameters
    ----------
    kinds
        Kinds of the columns; None: those of the first rows.
    """

    def __init__(self, folder: Path, kinds: Kinds | None = None) -> None:
        folder.mkdir()
        self.rows = 0
        self.kinds = kinds
        self._folder = folder
        self._file = (folder / _ROWS).open("wb")
        self._values: dict[str, Any] = {}
        self._written: dict[str, int] = {}
        self._build_header = 0
        if kinds is not None:
            self._begin(kinds)

    def __enter__(self) -> RowStoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def append(self, columns: Mapping[str, Array | Ragged]) -> None:
        """Write rows, whose kinds must be those of the first rows."""
        if self.kinds is None:
            self._begin(describe_columns(columns))
        assert self.kinds is not None
        for key, column in columns.items():
            own, known = Kind.of(column), self.kinds[key]
            if replace(own, longest=known.longest) != known:
                raise InputError(
                    f"rows of {show(key)} {own.describe()}, but earlier rows {known.describe()}: "
                    "all rows must match (pad them to the same length)"
                )
        fields: dict[str, Array] = {}
        with naming_full_disk(self._folder, "rows"):
            for key, column in columns.items():
                if isinstance(column, Ragged):
                    fields[key] = self._write_ragged(key, column)
                else:
                    fields[key] = column
            self._file.write(pack_rows(fields, self.kinds).data)
        self.rows += len(next(iter(fields.values())))

    def place(self, first_row: int, content: bytes) -> None:
        """Write packed rows at a row number; rows with lower numbers may be written later."""
        assert self.kinds is not None
        size = row_dtype(self.kinds).itemsize
        with naming_full_disk(self._folder, "rows"):
            os.pwrite(self._file.fileno(), content, self._build_header + first_row * size)
        self.rows = max(self.rows, first_row + len(content) // max(1, size))

    def close(self) -> None:
        """Write the headers with the final number of rows, and close the files."""
        if not self._file.closed:
            with naming_full_disk(self._folder, "rows"):
                self._complete()

    def _complete(self) -> None:
        self._file.flush()
        if self.kinds is not None:
            os.pwrite(self._file.fileno(), build_header(row_dtype(self.kinds), self.rows), 0)
        self._file.close()
        for key, file in self._values.items():
            file.seek(0)
            assert self.kinds is not None
            file.write(build_header(self.kinds[key].item, self._written[key]))
            file.close()
        write_layout(self._folder, self.rows, self.kinds or {})

    def _begin(self, kinds: Kinds) -> None:
        self.kinds = kinds
        header = build_header(row_dtype(kinds), 0)
        self._build_header = len(header)
        self._file.write(header)
        for place, (key, kind) in enumerate(kinds.items()):
            if kind.shape is None:
                self._values[key] = (self._folder / f"values{place}.npy").open("wb")
                self._values[key].write(build_header(kind.item, 0))
                self._written[key] = 0
        self._file.flush()

    def _write_ragged(self, key: str, column: Ragged) -> Array:
        assert self.kinds is not None
        first, last = int(column.offsets[0]), int(column.offsets[-1])
        places = np.empty(len(column), PLACE)
        places["start"] = column.offsets[:-1] - first + self._written[key]
        places["length"] = column.lengths
        self._values[key].write(np.ascontiguousarray(column.values[first:last]).data)
        self._written[key] += last - first
        known = self.kinds[key]
        longest = max(known.longest, Kind.of(column).longest)
        self.kinds[key] = replace(known, longest=longest)
        return places


def unify_layout(folder: Path, layouts: Sequence[Mapping[str, Any]]) -> None:
    """Set a folder's layout to the common layout of all workers' rows.

    A worker without rows gets the other workers' columns, and all workers pad ragged rows to the
    same length.
    """
    own, _ = read_layout(folder)
    every = [read_kinds(layout["columns"]) for layout in layouts if layout["columns"]]
    common = {
        key: replace(kind, longest=max(kinds[key].longest for kinds in every))
        for key, kind in every[0].items()
    }
    if not own:
        shutil.rmtree(folder)
        RowStoreWriter(folder, common).close()
    write_layout(folder, own, common)


def digest_rows(folder: Path) -> str:
    """Return a digest of a folder's files; it is the same for the same rows in the same order."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            while block := file.read(_CHUNK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def write_columns(folder: Path, columns: Columns) -> None:
    """Write columns of equal length into a new folder, a few rows at a time."""
    with RowStoreWriter(folder, describe_columns(columns)) as writer:
        rows = count_rows(columns) if columns else 0
        step = max(1, _CHUNK_BYTES // max(1, row_dtype(describe_columns(columns)).itemsize))
        for first in range(0, rows, step):
            writer.append({key: array[first : first + step] for key, array in columns.items()})


def link_columns(folder: Path, source: Path) -> None:
    """Create a folder with the same rows using hard links, without copying them."""
    folder.mkdir()
    for file in source.iterdir():
        # Each worker writes the layout again.
        copy = shutil.copyfile if file.name == LAYOUT else os.link
        copy(file, folder / file.name)


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
        A column holds text, whose rows have different widths.
    """
    layout = {name: describe_columns(columns) for name, columns in datasets.items()}
    for name, kinds in layout.items():
        for key, kind in kinds.items():
            if kind.shape is None:
                raise InputError(
                    f"`{argument_of(name)}` has text in {show(key)}, which Spark cannot send as "
                    f"arrays: pass a {term('Spark DataFrame')}, e.g. spark.createDataFrame(frame)"
                )
    return layout


def count_rows_to_send(
    datasets: Mapping[str, Columns], workers: int, to_all: Collection[str] = ()
) -> Counts:
    """Count the rows to send to each rank, by data set: its shard, or with ``to_all`` all rows."""
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


def store_blobs(
    batches: Iterable[Any], layout: Layout, counts: Counts, rank: int, folder: Path
) -> None:
    """Write a worker's shards from Arrow batches of `SCHEMA`, which may arrive in any order.

    Each data set becomes a folder with its name.
    """
    missing = sum(counts[name][rank] * row_dtype(layout[name]).itemsize for name in layout)
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(RowStoreWriter(folder / name, kinds))
            for name, kinds in layout.items()
        }
        for batch in batches:
            for row in batch.to_pylist():
                writers[row["dataset"]].place(row["first_row"], row["content"])
                missing -= len(row["content"])
        for name, writer in writers.items():
            writer.rows = counts[name][rank]
    if missing:
        kind = "few" if missing > 0 else "many"
        raise RuntimeError(f"Spark delivered {abs(missing)} bytes too {kind} to worker {rank}")
