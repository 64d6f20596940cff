"""Parquet files as rows by number: row groups are read as they are needed, by column."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pybackend.data.files import find_files, open_file
from pybackend.errors import InputError

_BATCH_BYTES = 2 << 20
_MOST_ROWS = 8192
# Footers of remote files: each takes a round trip or two.
_THREADS = 16


@dataclass(frozen=True)
class ParquetFiles:
    """Files of one schema; their rows are numbered in the files' order.

    Attributes
    ----------
    groups
        Rows of each row group, by file.
    schema
        A ``pyarrow.Schema``.
    index
        Columns that are the index of the pandas data frame that was written.
    """

    files: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    schema: Any
    index: tuple[str, ...] = ()

    @classmethod
    def at(cls, uri: str, name: str = "data") -> ParquetFiles:
        """The files at a path or URI; only their footers are read.

        Raises
        ------
        InputError
            There is no such file, one is not a Parquet file, or their schemas differ.
        """
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise InputError("reading Parquet files needs the Python package pyarrow") from error
        files = [file for file in find_files(uri, name) if not file.endswith(".crc")]
        with ThreadPoolExecutor(_THREADS) as pool:
            footers = list(pool.map(lambda file: _read_footer(file, name), files))
        schema = footers[0][1]
        for file, (_, other) in zip(files, footers, strict=True):
            if not other.equals(schema):
                raise InputError(
                    f"`{name}`: the columns of {file} are ({_list_fields(other)}), but those of "
                    f"{files[0]} are ({_list_fields(schema)})"
                )
        groups = tuple(groups for groups, _ in footers)
        return cls(tuple(files), groups, schema.remove_metadata(), _read_index(schema.metadata))

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each file."""
        return tuple(map(sum, self.groups))

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(self.counts)

    def pieces(
        self, ranges: Sequence[tuple[int, int]], columns: Sequence[str]
    ) -> Iterator[tuple[int, Any]]:
        """First row's number, and Arrow batch, of parts of ranges of rows, of these columns.

        Each row group is read once, however many of the ranges, which are in order, it holds.

        Raises
        ------
        InputError
            A file is not the one that was looked at before.
        """
        begin = 0
        for file, groups in zip(self.files, self.groups, strict=True):
            end = begin + sum(groups)
            inside = [(a - begin, b - begin) for a, b in ranges if a < end and begin < b]
            if inside:
                for place, batch in _read_ranges(file, groups, inside, columns):
                    yield begin + place, batch
            begin = end


def _read_footer(file: str, name: str) -> tuple[tuple[int, ...], Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_file(file) as source, pq.ParquetFile(source) as parquet:
            metadata = parquet.metadata
            groups = tuple(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups))
            return groups, parquet.schema_arrow
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"`{name}`: {file} is not a readable Parquet file: {error}") from error


def _read_index(metadata: Mapping[bytes, bytes] | None) -> tuple[str, ...]:
    """What pandas has noted in a file; an index that only counts has no column."""
    try:
        noted = json.loads((metadata or {}).get(b"pandas", b"{}"))
        return tuple(name for name in noted.get("index_columns", []) if isinstance(name, str))
    except (ValueError, AttributeError, TypeError):  # another program's
        return ()


def _read_ranges(
    file: str,
    groups: Sequence[int],
    ranges: Sequence[tuple[int, int]],
    columns: Sequence[str],
) -> Iterator[tuple[int, Any]]:
    import pyarrow.parquet as pq

    # Not buffered ahead: a column of a row group may be larger than the memory for it.
    with open_file(file) as source, pq.ParquetFile(source, buffer_size=1 << 20) as parquet:
        metadata = parquet.metadata
        if tuple(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)) != tuple(
            groups
        ):
            raise InputError(
                f"{file} has {metadata.num_rows} rows here, but had {sum(groups)} when the "
                "training began: it was replaced, or is another file on this host"
            )
        begin = 0
        for number, rows in enumerate(groups):
            if any(a < begin + rows and begin < b for a, b in ranges):
                size = _choose_batch_rows(metadata.row_group(number).total_byte_size, rows)
                place = begin
                for batch in parquet.iter_batches(size, [number], columns=list(columns)):
                    yield from _cut_ranges(batch.select(list(columns)), place, ranges)
                    place += batch.num_rows
            begin += rows


def _cut_ranges(
    batch: Any, place: int, ranges: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, Any]]:
    """The parts of a batch, whose first row has the number ``place``, that are in the ranges."""
    for first, last in ranges:
        begin, end = max(first, place), min(last, place + batch.num_rows)
        if begin < end:
            yield begin, batch.slice(begin - place, end - begin)


def _choose_batch_rows(group_bytes: int, rows: int) -> int:
    return max(1, min(_MOST_ROWS, _BATCH_BYTES * rows // max(1, group_bytes)))


def _list_fields(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
