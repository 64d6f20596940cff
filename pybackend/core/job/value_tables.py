"""Kinds of values of pandas and Arrow that workers send."""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import Any

from pybackend.core.job.value_kinds import UnfitError, ValueKind, is_of
from pybackend.core.words import show

# Fields of Arrow's format: a message's header type and header; the rows in a dictionary's header;
# the compression in the header of rows.
_HEADER_TYPE, _HEADER, _ROWS_OF_DICTIONARY, _COMPRESSION = 1, 2, 1, 3
_DICTIONARY, _ROWS = 2, 3


def _pandas() -> Any:
    import pandas

    return pandas


def _take_table(table: Any) -> Sequence[Any]:
    import pyarrow as pa

    if table.num_rows and not table.num_columns:
        raise UnfitError(f"it has {table.num_rows} rows, but no columns")
    table.validate(full=True)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    return [sink.getvalue().to_pybytes(), list(map(str, _types(table)))]


def _make_table(content: bytes, types: list[str]) -> Any:
    import pyarrow as pa

    for message in pa.ipc.MessageReader.open_stream(content):
        if _is_compressed(message.metadata.to_pybytes()):  # a few bytes could become gigabytes
            raise ValueError("an Arrow table is compressed")
    with pa.ipc.open_stream(content) as reader:
        table = reader.read_all()
    # Arrow trusts offsets and lengths otherwise, and reads outside its buffers.
    table.validate(full=True)
    # An extension type that is not registered here arrives as its storage type.
    if list(map(str, _types(table))) != types:
        raise ValueError("a table has types that are unknown here")
    return table


def _types(table: Any) -> list[Any]:
    return [field.type for field in table.schema]


def _is_compressed(message: bytes) -> bool:
    """Return whether a message's rows are compressed; `pyarrow` must expand them to find out."""
    (root,) = struct.unpack_from("<I", message, 0)
    at = _find_field(message, root, _HEADER_TYPE)
    kind = message[at] if at else 0
    if kind not in (_DICTIONARY, _ROWS):
        return False
    rows = _follow(message, _find_field(message, root, _HEADER))
    if kind == _DICTIONARY:
        rows = _follow(message, _find_field(message, rows, _ROWS_OF_DICTIONARY))
    return bool(_find_field(message, rows, _COMPRESSION))


def _find_field(message: bytes, table: int, number: int) -> int:
    """Return the offset of a field in a Flatbuffers table, or 0 if it is absent."""
    (distance,) = struct.unpack_from("<i", message, table)
    (size,) = struct.unpack_from("<H", message, table - distance)
    at = 4 + 2 * number
    if at + 2 > size:
        return 0
    (offset,) = struct.unpack_from("<H", message, table - distance + at)
    return table + offset if offset else 0


def _follow(message: bytes, at: int) -> int:
    (offset,) = struct.unpack_from("<I", message, at)
    return int(at + offset)


def _take_batch(batch: Any) -> Sequence[Any]:
    import pyarrow as pa

    return [pa.Table.from_batches([batch])]


def _make_batch(table: Any) -> Any:
    import pyarrow as pa

    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _take_frame(frame: Any) -> Sequence[Any]:
    _check_flags(frame)
    columns = [
        _take_column(frame.iloc[:, number], f"[{show(label)}]")
        for number, label in enumerate(frame.columns)
    ]
    return [frame.columns, frame.index, frame.attrs, *columns]


def _make_frame(labels: Any, index: Any, attrs: Any, *parts: Any) -> Any:
    pd = _pandas()
    columns = list(map(_make_column, parts))
    if any(len(column) != len(index) for column in columns):
        raise ValueError("a data frame's columns differ from its length")
    # By number, as two columns may have the same label.
    frame = pd.DataFrame(dict(enumerate(columns))) if columns else pd.DataFrame(index=index)
    frame.index, frame.columns = index, labels
    frame.attrs.update(attrs)
    return frame


def _name_in_frame(frame: Any, index: int) -> str:
    own = (".columns", ".index", ".attrs")
    return own[index] if index < len(own) else f"[{show(frame.columns[index - len(own)])}]"


def _take_series(series: Any) -> Sequence[Any]:
    _check_flags(series)
    return [series.name, series.index, series.attrs, _take_column(series)]


def _make_series(name: Any, index: Any, attrs: Any, column: Any) -> Any:
    series = _make_column(column)
    series.index = index
    series.attrs.update(attrs)
    return series.rename(name)


def _name_in_series(series: Any, index: int) -> str:
    return (".name", ".index", ".attrs", "")[index]


def _check_flags(value: Any) -> None:
    if not value.flags.allows_duplicate_labels:
        raise UnfitError(f"its flag `allows_duplicate_labels` is {show(False)}")


def _take_column(column: Any, where: str = "") -> Any:
    """Return the values of a series: an array, or a table and its type of pandas."""
    import numpy as np
    import pyarrow as pa

    if isinstance(column.dtype, np.dtype):
        return column.to_numpy()
    column = column.reset_index(drop=True)
    table = pa.Table.from_pandas(column.to_frame("values"), preserve_index=False)
    parts = [table, str(column.dtype)]
    if not _is_same(column, _make_column(parts)):
        raise UnfitError(f"Arrow's format would change its values{where} of type {column.dtype}")
    return parts


def _make_column(parts: Any) -> Any:
    if not isinstance(parts, list):
        return _pandas().Series(parts, dtype=parts.dtype)
    table, dtype = parts
    if any(_takes_no_space(kind) for kind in _types(table)):
        raise ValueError("a column has values that take no space")
    series = table.to_pandas()["values"]
    if str(series.dtype) != dtype:
        raise ValueError(f"a column is of type {series.dtype}, not {dtype}")
    return series.rename(None)


def _takes_no_space(kind: Any) -> bool:
    """Return whether a few bytes can encode a column of any length."""
    import pyarrow as pa

    inner = [kind.field(number).type for number in range(kind.num_fields)]
    if (storage := getattr(kind, "storage_type", None)) is not None:
        inner.append(storage)
    has_no_items = pa.types.is_fixed_size_list(kind) and not kind.list_size
    has_no_bytes = pa.types.is_fixed_size_binary(kind) and not kind.byte_width
    is_implied = pa.types.is_null(kind) or pa.types.is_run_end_encoded(kind)
    return has_no_items or has_no_bytes or is_implied or any(map(_takes_no_space, inner))


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two columns, or two indexes, have the same type and values."""
    if type(one) is not type(other) or one.dtype != other.dtype or not one.equals(other):
        return False
    if one.dtype == object:
        return [type(item) for item in one] == [type(item) for item in other]
    categories = getattr(one.dtype, "categories", None)
    return categories is None or _is_same(categories, other.dtype.categories)


def _take_index(index: Any) -> Sequence[Any]:
    freq = getattr(index, "freqstr", None) if hasattr(index, "inferred_freq") else None
    parts = [index.name, freq, _take_column(_pandas().Series(index))]
    again = _make_index(*parts)
    # Objects are compared where they are equal to themselves, which those in an array need not be.
    is_same = index.dtype == object or _is_same(index, again)
    if not is_same or getattr(index, "freq", None) != getattr(again, "freq", None):
        raise UnfitError("it would be changed")
    return parts


def _make_index(name: Any, freq: str | None, parts: Any) -> Any:
    column = _make_column(parts)
    index = _pandas().Index(column, dtype=column.dtype, tupleize_cols=False, name=name)
    if freq is not None:
        index.freq = freq
    return index


def _take_levels(index: Any) -> Sequence[Any]:
    return [list(map(index.get_level_values, range(index.nlevels)))]


def _make_multi_index(levels: list[Any]) -> Any:
    return _pandas().MultiIndex.from_arrays(levels, names=[level.name for level in levels])


def _is_index(value: Any) -> bool:
    is_own = type(value).__module__.partition(".")[0] == "pandas"
    return is_own and isinstance(value, getattr(sys.modules.get("pandas"), "Index", ()))


def _take_stamp(value: Any) -> Sequence[Any]:
    # pandas chooses the class of time zones that are given as names.
    zone = value.tzinfo
    parts = [value.to_datetime64(), str(zone) if type(zone).__module__.startswith("pytz") else zone]
    again = _make_stamp(*parts)
    names = ("value", "unit", "fold", "tzinfo")
    if any(getattr(again, name) != getattr(value, name) for name in names):
        raise UnfitError("pandas turns its instant and time zone into a different timestamp")
    return parts


def _make_stamp(instant: Any, zone: Any) -> Any:
    stamp = _pandas().Timestamp(instant)
    return stamp if zone is None else stamp.tz_localize("UTC").tz_convert(zone)


def _missing(name: str) -> ValueKind:
    """Return the kind of one of pandas's missing values."""

    def matches(value: Any) -> bool:
        pandas = sys.modules.get("pandas")
        return pandas is not None and value is getattr(pandas, name, pandas)

    return ValueKind(name, matches, lambda _: [], lambda: getattr(_pandas(), name))


TABLES: tuple[ValueKind, ...] = (
    ValueKind("data frame", is_of("pandas", "DataFrame"), _take_frame, _make_frame, _name_in_frame),
    ValueKind("series", is_of("pandas", "Series"), _take_series, _make_series, _name_in_series),
    ValueKind(
        "range index",
        is_of("pandas", "RangeIndex"),
        lambda v: [v.start, v.stop, v.step, v.name],
        lambda start, stop, step, name: _pandas().RangeIndex(start, stop, step, name=name),
        lambda _, __: ".name",
    ),
    ValueKind("multi-index", is_of("pandas", "MultiIndex"), _take_levels, _make_multi_index),
    # After its two derived classes: the first kind that matches is taken.
    ValueKind(
        "index", _is_index, _take_index, _make_index, lambda _, index: "" if index else ".name"
    ),
    ValueKind("table", is_of("pyarrow", "Table"), _take_table, _make_table),
    ValueKind("batch", is_of("pyarrow", "RecordBatch"), _take_batch, _make_batch),
    _missing("NaT"),
    _missing("NA"),
    ValueKind(
        "timestamp", is_of("pandas", "Timestamp"), _take_stamp, _make_stamp, lambda _, __: ".tzinfo"
    ),
    ValueKind(
        "span",
        is_of("pandas", "Timedelta"),
        lambda v: [v.to_timedelta64()],
        lambda span: _pandas().Timedelta(span),
    ),
)
