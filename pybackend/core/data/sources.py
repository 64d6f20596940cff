"""Data that every worker reads itself: files, or the data set that a user's function returns."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pybackend.core.data.arrow import TensorReader, describe_schema, require_values
from pybackend.core.data.column_groups import group_columns
from pybackend.core.data.columns import (
    ColumnSpec,
    TableRows,
    find_index,
    list_columns,
    reject_duplicate_columns,
)
from pybackend.core.data.encoding import MOST_CATEGORIES, find_categories, keep_categories
from pybackend.core.data.files import Places, as_places, find_files, open_file
from pybackend.core.data.parquet import ParquetFiles
from pybackend.core.data.row_store import RowStoreWriter
from pybackend.core.data.sharding import cut_ranges
from pybackend.core.errors import InputError
from pybackend.core.words import either, row_number, show

_PARQUET = b"PAR1"
# pandas' functions for files that are neither Parquet nor TFRecord.
_READERS = {
    ".arrow": "read_feather",
    ".dta": "read_stata",
    ".feather": "read_feather",
    ".json": "read_json",
    ".orc": "read_orc",
    ".pickle": "read_pickle",
    ".pkl": "read_pickle",
    ".sas7bdat": "read_sas",
    ".sav": "read_spss",
    ".tsv": "read_table",
    ".xlsx": "read_excel",
}


class RowFiles(Protocol):
    """Files whose rows are numbered."""

    @property
    def files(self) -> tuple[str, ...]: ...
    @property
    def counts(self) -> tuple[int, ...]: ...
    @property
    def rows(self) -> int: ...
    @property
    def schema(self) -> Any: ...
    @property
    def index(self) -> tuple[str, ...]: ...
    @property
    def nulls(self) -> Mapping[str, int]: ...

    def pieces(
        self, ranges: Sequence[tuple[int, int]], columns: Sequence[str]
    ) -> Iterator[tuple[int, Any]]:
        """Yield Arrow batches for ranges of rows, with the number of each batch's first row."""


@dataclass(frozen=True)
class FileRows(TableRows):
    """Rows in files; each worker reads its share."""

    files: RowFiles

    @classmethod
    def at(cls, path: Any, spec: ColumnSpec, floatx: str, name: str) -> FileRows:
        """Open the files at a path or URI, or at several, and check their schema.

        Raises
        ------
        InputError
            Names the file, or the column, and what is expected.
        """
        files, left_out = _open(path, spec, name)
        kinds = describe_schema(files.schema)
        kinds = {column: kind for column, kind in kinds.items() if column not in left_out}

        def distinct(column: str) -> Iterable[Any]:
            import pyarrow.compute as pc

            values: set[Any] = set()
            for _, batch in files.pieces([(0, files.rows)], [column]):
                values.update(pc.unique(batch.column(0)).to_pylist())
                if len(values) > MOST_CATEGORIES + 1:
                    break
            return values

        spec = keep_categories(spec, kinds, partial(_read_dictionary, files))
        spec = find_categories(spec, kinds, distinct)
        column_groups, _ = group_columns(spec, kinds, floatx, name)
        rows = cls(tuple(column_groups), spec, files, left_out=tuple(left_out))
        rows.reject_nulls()
        return rows

    @property
    def rows(self) -> int:
        """Number of rows in all files."""
        return self.files.rows

    def counts(self, workers: int) -> list[int]:
        """Return the number of rows that each rank uses in an epoch."""
        return [len(range(rank, self.rows, workers)) for rank in range(workers)]

    def spool(
        self, folder: Path, workers: int, rank: int, everything: bool, in_order: bool = False
    ) -> None:
        """Write one worker's rows, or all of them, into a new folder.

        Parameters
        ----------
        in_order
            True if the worker gets every ``workers``-th row, as of an array, instead of ranges. It
            then reads all of them.
        """
        reader = TensorReader(self.column_groups)
        columns = list_columns(self.column_groups)
        step = workers if in_order and self.spec.repartition and not everything else 1
        ranges = [(0, self.rows)]
        if step == 1 and not everything:
            ranges = cut_ranges(self.rows, workers, self.spec.repartition)[rank]
        with RowStoreWriter(folder) as writer:
            for place, batch in self.files.pieces(ranges, columns):
                first = (rank - place) % step
                if step > 1 and first >= batch.num_rows:
                    continue
                chosen = batch.take(list(range(first, batch.num_rows, step))) if step > 1 else batch
                name = lambda row, place=place + first: self._name_row(place, row * step)  # noqa: E731
                writer.append(reader.read(chosen, name))

    def reject_nulls(self) -> None:
        """Raise `InputError` for the first null in the columns whose statistics report nulls."""
        ends = [0, *itertools.accumulate(self.files.counts)]
        nulls = self.files.nulls
        for column in filter(nulls.__contains__, list_columns(self.column_groups)):
            number = nulls[column]
            for place, batch in self.files.pieces([(ends[number], ends[number + 1])], [column]):
                require_values(batch.column(0), column, partial(self._name_row, place))

    def _name_row(self, place: int, row: int) -> str:
        """Return a row's name, which includes its file; ``place`` is the first row of the batch."""
        ends = list(itertools.accumulate(self.files.counts))
        file = bisect.bisect_right(ends, place + row)
        inside = place + row - (ends[file - 1] if file else 0)
        return f"{row_number(inside)} of {self.files.files[file]}"


@dataclass(frozen=True)
class FunctionRows:
    """Rows from a user's function, which is called on each worker.

    ``fn(context)``, with a `WorkerContext`, returns a ``tf.data.Dataset`` whose
    elements are local batches: ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.
    """

    fn: Callable[[Any], Any]


def _read_dictionary(files: RowFiles, column: str) -> list[Any] | None:
    """Return the categories of a column that pandas wrote as Categorical, in order."""
    import pyarrow as pa

    if not isinstance(files.schema.field(column).type, pa.DictionaryType):
        return None
    values: dict[Any, None] = {}
    for _, batch in files.pieces([(0, files.rows)], [column]):
        values.update(dict.fromkeys(batch.column(0).dictionary.to_pylist()))
        if len(values) > MOST_CATEGORIES:
            break
    return list(values)


def read_table(path: Any, spec: ColumnSpec, name: str) -> Any:
    """Return a ``pyarrow.Table`` of the files' columns that a spec uses, as in `FileRows.at`."""
    import pyarrow as pa

    files, left_out = _open(path, spec, name)
    used = set(files.schema.names if spec.features is None else spec.named_columns)
    columns = [column for column in files.schema.names if column in used - set(left_out)]
    pieces = files.pieces([(0, files.rows)], columns) if files.rows else ()
    schema = pa.schema([files.schema.field(column) for column in columns])
    batches = [batch for _, batch in pieces]
    return pa.Table.from_batches(batches) if batches else schema.empty_table()


def _open(path: Any, spec: ColumnSpec, name: str) -> tuple[RowFiles, list[str]]:
    """Return the files and their index columns."""
    files = open_row_files(as_places(path), spec.tfrecord_spec, name)
    reject_duplicate_columns(files.schema.names, name)
    return files, find_index(spec, files.schema.names, files.index)


def open_row_files(uri: Places, tfrecord_spec: Mapping[str, str] | None, name: str) -> RowFiles:
    """Open Parquet files, recognized by the first bytes, or else TFRecord files."""
    found = find_files(uri, name)
    first = next((file for file in found if not file.endswith(".crc")), found[0])
    try:
        with open_file(first) as file:
            is_parquet = file.read(len(_PARQUET)) == _PARQUET
    except OSError as error:
        raise InputError(f"`{name}`: {first} cannot be read: {error}") from error
    if is_parquet:
        # `tfrecord_spec` also applies to validation data, but they may have another format.
        if tfrecord_spec is not None and name == "data":
            raise InputError(f"`tfrecord_spec` is given, but {first} is a Parquet file")
        return ParquetFiles.at(uri, name, found)
    from pybackend.core.data.tfrecord.files import RecordFiles

    try:
        records: RowFiles = RecordFiles.at(uri, tfrecord_spec, name, found)
    except InputError as error:
        if tfrecord_spec is not None or "is not a TFRecord file" not in str(error):
            raise
        reader = _READERS.get(os.path.splitext(first)[1].lower(), "read_csv")
        csv = (
            either(
                f", or spark.read.csv({first!r}, header=True)",
                f", or sparklyr::spark_read_csv(sc, path = {show(first)})",
            )
            if reader == "read_csv"
            else ""
        )
        raise InputError(
            f"`{name}`: {first} is neither a Parquet nor a TFRecord file. Read it first, and pass "
            f"the data frame: {either(f'pandas.{reader}', 'utils::read.csv')}({show(first)}){csv} "
            f"({error})"
        ) from error
    return records
