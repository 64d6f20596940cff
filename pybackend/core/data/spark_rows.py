"""Rows that reach the workers through Spark: DataFrames, arrays, and batches as lines of text.

A DataFrame is checked on the driver, using only its schema. Arrays are sent as `SCHEMA`: packed
rows, in pieces of `BLOB_BYTES`. Programs that cannot transfer bytes get Arrow batches as lines: a
checksum (CRC-32, 8 hexadecimal digits) and the base64 of an Arrow stream.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pybackend.core.data.arrays import Columns, count_rows, shard
from pybackend.core.data.column_groups import group_columns
from pybackend.core.data.columns import (
    MOST_CATEGORIES,
    ColumnKind,
    ColumnSpec,
    TableRows,
    find_categories,
    find_index,
    list_columns,
    reject_duplicate_columns,
)
from pybackend.core.data.row_store import (
    Kinds,
    RowStoreWriter,
    describe_columns,
    pack_rows,
    row_dtype,
)
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.job import argument_of
from pybackend.core.words import show, term

_WHOLE = {"boolean": "bool", "byte": "int8", "short": "int16", "integer": "int32", "long": "int64"}
_NUMBERS = {**_WHOLE, "float": "float32", "double": "float64", "decimal": "float64"}
# Below the size of a task that Spark recommends; a task contains such a row.
BLOB_BYTES = 900_000
SCHEMA = "key long, dataset string, first_row long, content binary"
Layout = dict[str, Kinds]
Counts = Mapping[str, list[int]]
TEXT_SCHEMA = "text string"
# Spark stores a line in one row, and the program that transfers it reads it as one string.
_LINE_BYTES = 4 << 20
_DIGITS = 8


@dataclass(frozen=True)
class DataFrameRows(TableRows):
    """The columns used from a Spark DataFrame, and the tensors made from them."""

    # A ``pyspark.sql.DataFrame`` of these columns, renamed to ``c0``, ``c1``, ..., so that dots and
    # backticks in names need no quoting.
    frame: Any

    @classmethod
    def of(cls, frame: Any, spec: ColumnSpec, floatx: str, name: str) -> DataFrameRows:
        """Check names and types against the schema.

        A Spark job runs for each encoded column (text label or feature) without `categories`: its
        sorted values become the codes 0, 1, 2, ... An `InputError` names the column and what is
        expected.
        """
        reject_duplicate_columns([one.name for one in frame.schema.fields], name, ignores_case=True)
        types = column_types(frame.schema, spec)
        frame = add_fields(frame, types)
        left_out = find_index(spec, types)
        kinds = {c: describe_type(kind) for c, kind in types.items() if c not in left_out}
        spec = find_categories(spec, kinds, lambda column: _collect_distinct(frame, column))
        column_groups = group_columns(spec, kinds, floatx, name)
        columns = [
            _narrow(frame, column, types[column], kinds[column], floatx).alias(f"c{index}")
            for index, column in enumerate(list_columns(column_groups))
        ]
        return cls(tuple(column_groups), spec, frame.select(*columns), left_out=tuple(left_out))


def column_types(schema: Any, spec: ColumnSpec) -> dict[str, Any]:
    """Return the types of a schema's columns and of the fields that a spec names (``"s.a"``)."""
    types = {field.name: field.dataType for field in schema.fields}
    for name in spec.named_columns:
        if name not in types and (kind := _find_field(schema, name)) is not None:
            types[name] = kind
    return types


def _find_field(schema: Any, name: str) -> Any:
    kind = schema
    for part in name.split("."):
        if kind.typeName() != "struct" or part not in kind.fieldNames():
            return None
        kind = kind[part].dataType
    return kind


def add_fields(frame: Any, types: Iterable[str]) -> Any:
    """Add the fields of structs among names of `column_types` to a DataFrame, as last columns."""
    own = set(frame.columns)  # a request to the server, with Spark Connect 3.5
    added = [name for name in types if name not in own]
    fields = [frame[".".join(map(_quote, name.split(".")))].alias(name) for name in added]
    return frame.select("*", *fields) if fields else frame


def describe_type(kind: Any) -> ColumnKind:
    depth, inner = 0, kind
    while inner.typeName() == "array":
        depth, inner = depth + 1, inner.elementType
    type_name = inner.typeName()
    shown = kind.simpleString()
    if type_name in _NUMBERS:
        return ColumnKind("number", _NUMBERS[type_name], depth, shown)
    if type(inner).__name__ == "VectorUDT" and not depth:
        return ColumnKind("number", "float64", 1, "vector")
    holds = {"binary": "binary", "string": "text", "char": "text", "varchar": "text"}
    return ColumnKind(holds.get(type_name, "other"), None, depth, shown)


def _collect_distinct(frame: Any, column: str) -> list[Any]:
    found = frame.select(frame[_quote(column)]).distinct().limit(MOST_CATEGORIES + 1)
    return [row[0] for row in found.collect()]


def _quote(name: str) -> str:
    """Quote a name, dots included, to take its column from a DataFrame.

    PySpark's functions are not used: they assume that a process has only one kind of session.
    """
    return "`" + name.replace("`", "``") + "`"


def column_as_array(frame: Any, column: str, kind: Any, dtype: str = "float64") -> Any:
    """Return a column by name; ML vectors, dense or sparse, become arrays of numbers."""
    quoted = frame[_quote(column)]
    if type(kind).__name__ != "VectorUDT":
        return quoted
    from pyspark.ml.functions import vector_to_array

    return vector_to_array(quoted, dtype)


def _narrow(frame: Any, column: str, kind: Any, holds: ColumnKind, floatx: str) -> Any:
    """Return a column as it is sent: floats in the precision of training, vectors as arrays."""
    is_double = floatx == "float64"
    sent = column_as_array(frame, column, kind, "float64" if is_double else "float32")
    if holds.dtype != "float64" or holds.depth > 1 or type(kind).__name__ == "VectorUDT":
        return sent
    name = "double" if is_double else "float"
    return sent.cast(f"array<{name}>" if holds.depth else name)


def describe_layout(datasets: Mapping[str, Columns]) -> Layout:
    """Raise `InputError` for a column of text, whose rows have different widths."""
    layout = {name: describe_columns(columns) for name, columns in datasets.items()}
    for name, kinds in layout.items():
        if text := [key for key, kind in kinds.items() if kind.shape is None]:
            raise InputError(
                f"`{argument_of(name)}` has text in {show(text[0])}, which Spark cannot send as "
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
    """Write a worker's shards, a folder per data set; batches of `SCHEMA` arrive in any order."""
    missing = sum(counts[name][rank] * row_dtype(layout[name]).itemsize for name in layout)
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(RowStoreWriter(folder / name, kinds))
            for name, kinds in layout.items()
        }
        for batch in batches:
            for row in batch.to_pylist():
                writers[row["dataset"]].write_at(row["first_row"], row["content"])
                missing -= len(row["content"])
        for name, writer in writers.items():
            writer.rows = counts[name][rank]
    if missing:
        kind = "few" if missing > 0 else "many"
        raise RuntimeError(f"Spark delivered {abs(missing)} bytes too {kind} to worker {rank}")


def encode_lines(batches: Iterable[Any]) -> Iterator[Any]:
    """Encode batches as batches with a single column, ``text``, in which each row is a line.

    There is always at least one row: sparklyr does not run R for a partition without rows.
    """
    import pyarrow as pa

    yield _build_batch([""])
    for batch in batches:
        rows = max(1, batch.num_rows * _LINE_BYTES // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, rows):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as stream:
                stream.write_batch(batch.slice(start, rows))
            content = sink.getvalue().to_pybytes()
            yield _build_batch([f"{zlib.crc32(content):08x}{base64.b64encode(content).decode()}"])


def decode_lines(path: Path) -> Iterator[Any]:
    """Decode the batches in a file of lines; a `ClusterError` has the number of a damaged one."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    batches = _decode_line(line.strip())
                except Exception as error:  # damage ends in errors of all kinds
                    raise ClusterError(
                        f"line {number} of {path} is damaged ({error}): it contains rows that "
                        "Spark sent to this worker. Run the job again"
                    ) from error
                yield from batches


def _decode_line(line: bytes) -> list[Any]:
    import pyarrow as pa

    content = base64.b64decode(line[_DIGITS:], validate=True)
    if line[:_DIGITS] != b"%08x" % zlib.crc32(content):
        raise ValueError("its checksum is wrong")
    with pa.ipc.open_stream(content) as stream:
        stream.schema.names  # noqa: B018 (fails if a name is not valid text)
        batches = list(stream)
    for batch in batches:
        # A row takes at least a bit, but a batch without columns may claim any number of rows.
        if batch.num_rows > 8 * len(content):
            raise ValueError(f"it claims {batch.num_rows} rows")
        # Arrow does not check offsets when it follows them.
        batch.validate(full=True)
    return batches


def _build_batch(texts: list[str]) -> Any:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.array(texts, pa.string())], names=["text"])
