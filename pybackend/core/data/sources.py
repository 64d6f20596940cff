"""Data that every worker reads itself: Parquet and TFRecord files, or a user's function.

Rows of files are numbered across the files, in file order; row groups and columns of Parquet are
read only when needed.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union
from urllib.parse import unquote

from pybackend.core.data import arrow
from pybackend.core.data.column_groups import group_columns
from pybackend.core.data.columns import (
    MOST_CATEGORIES,
    ColumnSpec,
    TableRows,
    find_categories,
    find_index,
    keep_categories,
    list_columns,
    reject_duplicate_columns,
)
from pybackend.core.data.files import Paths, as_paths, find_files, find_root, open_file
from pybackend.core.data.row_store import RowStoreWriter
from pybackend.core.data.sharding import Ranges, cut_ranges
from pybackend.core.data.tfrecord.framing import HEAD, check_head
from pybackend.core.errors import InputError
from pybackend.core.words import either, row_number, show

if TYPE_CHECKING:
    from pybackend.core.data.tfrecord.record_files import RecordFiles

RowFiles = Union["ParquetFiles", "RecordFiles"]
_PARQUET = b"PAR1"
# pandas' functions for files that are neither Parquet nor TFRecord.
_READERS = {f".{kind}": f"read_{kind}" for kind in ("feather", "json", "orc", "pickle")}
_READERS |= {".arrow": "read_feather", ".dta": "read_stata", ".pkl": "read_pickle"}
_READERS |= {".sas7bdat": "read_sas", ".sav": "read_spss", ".tsv": "read_table"}
_READERS |= {".xlsx": "read_excel"}
# Hive's and Spark's name of a partition without a value.
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
# int() and float() accept more: "2026_01", "nan".
_NUMBERS = {int: r"-?[0-9]{1,18}", float: r"-?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?"}
_BATCH_BYTES = 2 << 20
_MOST_ROWS = 8192
# Column chunks of a file whose null counts are read: 5 ms.
_MOST_NOTES = 1000
# Threads that read footers: a remote one takes a round trip or two.
_THREADS = 16


@dataclass(frozen=True)
class FileRows(TableRows):
    """Rows in files; each worker reads its share."""

    files: RowFiles

    @classmethod
    def at(cls, path: Any, spec: ColumnSpec, floatx: str, name: str) -> FileRows:
        """Open the files at a path or URI, or at several, and check their schema.

        An `InputError` names the file, or the column, and what is expected.
        """
        files, left_out = _open(path, spec, name)
        kinds = arrow.describe_schema(files.schema)
        kinds = {column: kind for column, kind in kinds.items() if column not in left_out}
        spec = keep_categories(spec, kinds, partial(_read_dictionary, files))
        distinct = partial(_read_distinct, files, lambda part: part.unique())
        spec = find_categories(spec, kinds, distinct)
        column_groups = group_columns(spec, kinds, floatx, name)
        rows = cls(tuple(column_groups), spec, files, left_out=tuple(left_out))
        rows.reject_nulls()
        return rows

    @property
    def rows(self) -> int:
        return self.files.rows

    def spool(
        self, folder: Path, workers: int, rank: int, everything: bool, in_order: bool = False
    ) -> None:
        """Write one worker's rows, or all of them, into a new folder.

        With ``in_order``, the worker gets every ``workers``-th row, as of an array, instead of
        ranges. It then reads all of them.
        """
        reader = arrow.TensorReader(self.column_groups)
        columns = list_columns(self.column_groups)
        step = workers if in_order and self.spec.repartition and not everything else 1
        ranges = [(0, self.rows)]
        if step == 1 and not everything:
            ranges = cut_ranges(self.rows, workers, self.spec.repartition)[rank]
        with RowStoreWriter(folder) as writer:
            for start, batch in self.files.pieces(ranges, columns):
                first = (rank - start) % step
                if step > 1 and first >= batch.num_rows:
                    continue
                chosen = batch.take(list(range(first, batch.num_rows, step))) if step > 1 else batch
                name = lambda row, start=start + first: self._name_row(start, row * step)  # noqa: E731
                writer.append(reader.read(chosen, name))

    def reject_nulls(self) -> None:
        """Raise `InputError` for the first null in the columns whose statistics report nulls."""
        ends = [0, *itertools.accumulate(self.files.counts)]
        nulls = self.files.nulls
        for column in filter(nulls.__contains__, list_columns(self.column_groups)):
            number = nulls[column]
            for start, batch in self.files.pieces([(ends[number], ends[number + 1])], [column]):
                arrow.require_values(batch.column(0), column, partial(self._name_row, start))

    def _name_row(self, start: int, row: int) -> str:
        """The name includes the file; ``start`` is the number of the batch's first row."""
        ends = list(itertools.accumulate(self.files.counts))
        file = bisect.bisect_right(ends, start + row)
        inside = start + row - (ends[file - 1] if file else 0)
        return f"{row_number(inside)} of {self.files.files[file]}"


@dataclass(frozen=True)
class FunctionRows:
    """Rows from a user's function, which is called on each worker.

    ``fn(context)``, with a `WorkerContext`, returns a ``tf.data.Dataset`` whose elements are local
    batches: ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.
    """

    fn: Callable[[Any], Any]


def _read_dictionary(files: RowFiles, column: str) -> list[Any] | None:
    """Return the categories of a column that pandas wrote as Categorical, in order."""
    import pyarrow as pa

    if not isinstance(files.schema.field(column).type, pa.DictionaryType):
        return None
    return _read_distinct(files, lambda part: part.dictionary, column)


def _read_distinct(files: RowFiles, select: Callable[[Any], Any], column: str) -> list[Any]:
    """Return the distinct values of a column in order; ``select`` finds those of a batch."""
    values: dict[Any, None] = {}
    for _, batch in files.pieces([(0, files.rows)], [column]):
        values.update(dict.fromkeys(select(batch.column(0)).to_pylist()))
        if len(values) > MOST_CATEGORIES + 1:  # too many, even if one is null
            break
    return list(values)


def read_table(path: Any, spec: ColumnSpec, name: str) -> Any:
    """Return a ``pyarrow.Table`` of the files' columns that a spec uses, as in `FileRows.at`."""
    import pyarrow as pa

    files, left_out = _open(path, spec, name)
    used = set(files.schema.names if spec.features is None else spec.named_columns)
    columns = [column for column in files.schema.names if column in used - set(left_out)]
    batches = [batch for _, batch in files.pieces([(0, files.rows)], columns)]
    schema = pa.schema([files.schema.field(column) for column in columns])
    return pa.Table.from_batches(batches) if batches else schema.empty_table()


def _open(path: Any, spec: ColumnSpec, name: str) -> tuple[RowFiles, list[str]]:
    files = open_row_files(as_paths(path), spec.tfrecord_spec, name)
    reject_duplicate_columns(files.schema.names, name)
    return files, find_index(spec, files.schema.names, files.index)


def open_row_files(uri: Paths, tfrecord_spec: Mapping[str, str] | None, name: str) -> RowFiles:
    """Open Parquet files, recognized by the first bytes, or else TFRecord files."""
    found = find_files(uri, name)
    first = next((file for file in found if not file.endswith(".crc")), found[0])
    try:
        with open_file(first) as file:
            head = file.read(HEAD)
    except OSError as error:
        raise InputError(f"`{name}`: {first} cannot be read: {error}") from error
    if head.startswith(_PARQUET):
        # `tfrecord_spec` also applies to validation data, but they may have another format.
        if tfrecord_spec is not None and name == "data":
            raise InputError(f"`tfrecord_spec` is given, but {first} is a Parquet file")
        return ParquetFiles.at(uri, name, found)
    try:
        if find_spec("pyarrow") is None:  # other files need another reader, not pyarrow
            check_head(head, first)
        from pybackend.core.data.tfrecord.record_files import RecordFiles

        return RecordFiles.at(uri, tfrecord_spec, name, found)
    except InputError as error:
        if tfrecord_spec is not None or "is not a TFRecord file" not in str(error):
            raise
        reader = _READERS.get(os.path.splitext(first)[1].lower(), "read_csv")
        csv = either(
            f", or spark.read.csv({first!r}, header=True)",
            f", or sparklyr::spark_read_csv(sc, path = {show(first)})",
        )
        raise InputError(
            f"`{name}`: {first} is neither a Parquet nor a TFRecord file. Read it first, and pass "
            f"the data frame: {either(f'pandas.{reader}', 'utils::read.csv')}({show(first)})"
            f"{csv * (reader == 'read_csv')} ({error})"
        ) from error


@dataclass(frozen=True)
class ParquetFiles:
    """Files with one schema; rows are numbered across the files, in file order."""

    files: tuple[str, ...]
    row_groups: tuple[tuple[int, ...], ...]  # their rows, by file
    schema: Any  # a ``pyarrow.Schema``
    index: tuple[str, ...] = ()  # the index of the pandas data frame that was written
    # Columns encoded in folder names (``day=1/``): one value per file. They come last in the
    # schema.
    partitions: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # For each column that has nulls according to the statistics, the number of the first file that
    # has any.
    nulls: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def at(cls, uri: Paths, name: str, listed: Sequence[str]) -> ParquetFiles:
        """Open the files at paths or URIs, reading only their footers.

        ``listed`` is what `find_files` returned for the path. Raises `InputError`
        if a file does not exist or is not a Parquet file, or the schemas differ.
        """
        try:
            import pyarrow as pa
        except ImportError as error:
            raise InputError("reading Parquet files needs the Python package pyarrow") from error
        files = [file for file in listed if not file.endswith(".crc")]
        with ThreadPoolExecutor(_THREADS) as pool:
            footers = list(pool.map(lambda file: _read_footer(file, name), files))
        groups, schemas, columns_with_nulls = zip(*footers, strict=True)
        schema = schemas[0]
        for file, other in zip(files, schemas, strict=True):
            if not other.equals(schema):
                raise InputError(f"`{name}`: {_tell_difference(files[0], schema, file, other)}")
        index = _read_index(schema.metadata)
        found = find_partitions(uri, files)
        partitions = {name: found[name] for name in found if name not in schema.names}
        for column, values in partitions.items():
            schema = schema.append(pa.field(column, pa.array(values).type))
        nulls: dict[str, int] = {}
        for number, found_nulls in enumerate(columns_with_nulls):
            unnamed = {column for column, values in partitions.items() if values[number] is None}
            nulls = {**dict.fromkeys(found_nulls | unnamed, number), **nulls}
        return cls(tuple(files), groups, schema.remove_metadata(), index, partitions, nulls)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(map(sum, self.row_groups))

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def pieces(self, ranges: Ranges, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield Arrow batches for ranges of rows, with the number of each batch's first row.

        The ranges must be in order. Each row group is read once for all of its ranges. Raises
        `InputError` if a file has changed since its footer was read.
        """
        own = [column for column in columns if column not in self.partitions]
        own = own or self.schema.names[:1]  # gives the number of rows of partition columns
        begin = 0
        for number, (file, groups) in enumerate(zip(self.files, self.row_groups, strict=True)):
            end = begin + sum(groups)
            if any(a < end and begin < b for a, b in ranges):
                for start, batch in _read_ranges(file, groups, begin, ranges, own):
                    yield start, self._add_partitions(batch, number, columns)
            begin = end

    def _add_partitions(self, batch: Any, number: int, columns: Sequence[str]) -> Any:
        if not self.partitions:
            return batch
        import pyarrow as pa

        def column_of(name: str) -> Any:
            if name not in self.partitions:
                return batch.column(name)
            kind = self.schema.field(name).type
            return pa.repeat(pa.scalar(self.partitions[name][number], kind), batch.num_rows)

        return pa.RecordBatch.from_arrays([column_of(name) for name in columns], list(columns))


def find_partitions(uri: Paths, files: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return the columns encoded in folder names (Hive partitions), with one value per file.

    A column becomes integers, or else floats, if all of its values can be parsed as such; otherwise
    it is text.
    """
    roots = [find_root(one) for one in ([uri] if isinstance(uri, str) else uri)]
    found: list[dict[str, str]] = []
    for file in files:
        root = max((root for root in roots if file.startswith(root)), key=len, default=file)
        folders = file.rpartition("/")[0][len(root) :].split("/")
        pairs = [folder.split("=", 1) for folder in folders if "=" in folder]
        found.append({unquote(column): unquote(value) for column, value in pairs})
    columns = dict.fromkeys(column for pairs in found for column in pairs)
    return {column: _parse([pairs.get(column) for pairs in found]) for column in columns}


def _parse(values: Sequence[str | None]) -> tuple[Any, ...]:
    known = [None if value == _NO_VALUE else value for value in values]
    for kind, pattern in _NUMBERS.items():
        if all(value is None or re.fullmatch(pattern, value) for value in known):
            return tuple(None if value is None else kind(value) for value in known)
    return tuple(known)


def _read_footer(file: str, name: str) -> tuple[tuple[int, ...], Any, frozenset[str]]:
    """Return the rows of each row group, the schema, and the columns with nulls."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_file(file) as source, pq.ParquetFile(source) as parquet:
            metadata = parquet.metadata
            groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
            rows = tuple(group.num_rows for group in groups)
            return rows, parquet.schema_arrow, _find_nulls(groups)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"`{name}`: {file} is not a readable Parquet file: {error}") from error


def _find_nulls(groups: Sequence[Any]) -> frozenset[str]:
    """Return the columns, except nested ones, that have nulls according to the statistics."""
    some = groups[: max(1, _MOST_NOTES // max(1, groups[0].num_columns))] if groups else ()
    columns = (group.column(number) for group in some for number in range(group.num_columns))
    noted = ((column.path_in_schema, column.statistics) for column in columns)
    return frozenset(name for name, values in noted if values is not None and values.null_count)


def _read_index(metadata: Mapping[bytes, bytes] | None) -> tuple[str, ...]:
    """Return the index columns in pandas' metadata; a RangeIndex has no column."""
    try:
        noted = json.loads((metadata or {}).get(b"pandas", b"{}"))
        return tuple(name for name in noted.get("index_columns", []) if isinstance(name, str))
    except (ValueError, AttributeError, TypeError):  # written by another program
        return ()


def _read_ranges(
    file: str, groups: Sequence[int], begin: int, ranges: Ranges, own: list[str]
) -> Iterator[tuple[int, Any]]:
    """Yield batches of a file, whose first row has the number ``begin``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # No pre-buffering: a column of a row group may be larger than the memory for it.
    with open_file(file) as source, pq.ParquetFile(source, buffer_size=1 << 20) as parquet:
        metadata = parquet.metadata
        here = tuple(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups))
        if here != tuple(groups):
            raise InputError(
                f"{file} has {metadata.num_rows} rows here, but had {sum(groups)} when training "
                "began: it was replaced, or is a different file on this host"
            )
        viewed = any(map(arrow.has_views, parquet.schema_arrow.types))
        for number, rows in enumerate(groups):
            if any(a < begin + rows and begin < b for a, b in ranges):
                group_bytes = max(1, metadata.row_group(number).total_byte_size)
                size = max(1, min(_MOST_ROWS, _BATCH_BYTES * rows // group_bytes))
                start = begin
                for batch in parquet.iter_batches(size, [number], columns=own):
                    batch = batch.select(own)  # in this order
                    if viewed:
                        plain = list(map(arrow.drop_views, batch.columns))
                        batch = pa.RecordBatch.from_arrays(plain, own)
                    yield from _cut_ranges(batch, start, ranges)
                    start += batch.num_rows
            begin += rows


def _cut_ranges(batch: Any, start: int, ranges: Ranges) -> Iterator[tuple[int, Any]]:
    """Yield the parts of a batch in the ranges; ``start`` is the number of its first row."""
    for first, last in ranges:
        begin, end = max(first, start), min(last, start + batch.num_rows)
        if begin < end:
            yield begin, batch.slice(begin - start, end - begin)


def _tell_difference(first: str, schema: Any, file: str, other: Any) -> str:
    pairs = enumerate(zip_longest(schema, other), 1)
    number, (one, two) = next((n, p) for n, p in pairs if not (all(p) and p[0].equals(p[1])))
    there = "no more columns" if one is None else f"{show(one.name)} ({one.type})"
    here = "missing" if two is None else f"{show(two.name)} ({two.type})"
    return (
        f"the columns of {file} differ from those of {first}: column {number} is {here}, "
        f"expected {there}"
    )
