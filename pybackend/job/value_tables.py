"""Dates, times, Arrow tables and pandas frames as values that workers send."""

from __future__ import annotations

import base64
import datetime
import struct
import sys
import zoneinfo
from collections.abc import Callable, Iterator
from typing import Any

from pybackend.job.value_kind import (
    Fields,
    Pack,
    UnfitError,
    Unpack,
    ValueKind,
    is_exactly,
    is_of,
    to_text,
)
from pybackend.words import show


def _pack_clock(value: Any, pack: Pack) -> Fields:
    text = value.replace(tzinfo=None).isoformat()
    return {"text": text, "fold": value.fold, "zone": pack(value.tzinfo, ".tzinfo")}


def _unpack_clock(read: Callable[[str], Any]) -> Callable[[Fields, Unpack], Any]:
    def unpack_clock(fields: Fields, unpack: Unpack) -> Any:
        naive = read(fields["text"])
        return naive.replace(fold=fields["fold"], tzinfo=unpack(fields["zone"]))

    return unpack_clock


def _pack_offset(value: datetime.timezone, pack: Pack) -> Fields:
    offset, name = value.utcoffset(None), value.tzname(None)
    is_named = name != datetime.timezone(offset).tzname(None)
    return {"offset": pack(offset, " (its offset)"), "name": name if is_named else None}


def _unpack_offset(fields: Fields, unpack: Unpack) -> datetime.timezone:
    given = [unpack(fields["offset"]), *([] if fields["name"] is None else [fields["name"]])]
    return datetime.timezone(*given)


def _pack_zone(value: zoneinfo.ZoneInfo, _: Pack) -> Fields:
    if value.key is None or zoneinfo.ZoneInfo(value.key) is not value:
        raise UnfitError("it differs from the system's time zone with the same name")
    return {"key": value.key}


def _unpack_zone(fields: Fields, _: Unpack) -> zoneinfo.ZoneInfo:
    return zoneinfo.ZoneInfo(fields["key"])  # raises an error for paths outside its folder


def _pack_stamp(value: Any, pack: Pack) -> Fields:
    # pandas chooses the class of time zones that are given as names.
    zone, is_named = value.tzinfo, type(value.tzinfo).__module__.startswith("pytz")
    fields = {"instant": pack(value.to_datetime64(), ""), "by_name": is_named}
    fields["zone"] = str(zone) if is_named else pack(zone, ".tzinfo")
    again = _make_stamp(value.to_datetime64(), str(zone) if is_named else zone)
    if any(
        getattr(again, name) != getattr(value, name) for name in ("value", "unit", "fold", "tzinfo")
    ):
        raise UnfitError("pandas turns its instant and time zone into a different timestamp")
    return fields


def _unpack_stamp(fields: Fields, unpack: Unpack) -> Any:
    zone = str(fields["zone"]) if fields["by_name"] else unpack(fields["zone"])
    return _make_stamp(unpack(fields["instant"]), zone)


def _make_stamp(instant: Any, zone: Any) -> Any:
    import pandas as pd

    stamp = pd.Timestamp(instant)
    return stamp if zone is None else stamp.tz_localize("UTC").tz_convert(zone)


def _unpack_span(fields: Fields, unpack: Unpack) -> Any:
    import pandas as pd

    return pd.Timedelta(unpack(fields["span"]))


def _is_pandas(name: str) -> Callable[[Any], bool]:
    def matches(value: Any) -> bool:
        pandas = sys.modules.get("pandas")
        return pandas is not None and value is getattr(pandas, name, pandas)

    return matches


def _unpack_pandas(name: str) -> Callable[[Fields, Unpack], Any]:
    def unpack_pandas(_: Fields, __: Unpack) -> Any:
        import pandas as pd

        return getattr(pd, name)

    return unpack_pandas


TIMES: tuple[ValueKind, ...] = (
    ValueKind(
        "datetime",
        is_exactly(datetime.datetime),
        _pack_clock,
        _unpack_clock(datetime.datetime.fromisoformat),
    ),
    ValueKind(
        "time", is_exactly(datetime.time), _pack_clock, _unpack_clock(datetime.time.fromisoformat)
    ),
    ValueKind(
        "date",
        is_exactly(datetime.date),
        lambda v, _: {"text": v.isoformat()},
        lambda fields, _: datetime.date.fromisoformat(fields["text"]),
    ),
    ValueKind(
        "timedelta",
        is_exactly(datetime.timedelta),
        lambda v, _: {"parts": [v.days, v.seconds, v.microseconds]},
        lambda fields, _: datetime.timedelta(*fields["parts"]),
    ),
    ValueKind("offset", is_exactly(datetime.timezone), _pack_offset, _unpack_offset),
    ValueKind("time zone", is_exactly(zoneinfo.ZoneInfo), _pack_zone, _unpack_zone),
    *(
        ValueKind(tag, _is_pandas(tag), lambda _, __: {}, _unpack_pandas(tag))
        for tag in ("NaT", "NA")
    ),
    ValueKind("timestamp", is_of("pandas", "Timestamp"), _pack_stamp, _unpack_stamp),
    ValueKind(
        "span",
        is_of("pandas", "Timedelta"),
        lambda v, pack: {"span": pack(v.to_timedelta64(), "")},
        _unpack_span,
    ),
)


# Fields of Arrow's format: a message's header type and header; the rows in a dictionary's header;
# the compression in the header of rows.
_HEADER_TYPE, _HEADER, _ROWS_OF_DICTIONARY, _COMPRESSION = 1, 2, 1, 3
_DICTIONARY, _ROWS = 2, 3


def _pack_table(value: Any, _: Pack) -> Fields:
    fields = _write_table(value)
    again = _read_table(fields)
    if again.num_rows != value.num_rows:
        raise UnfitError(f"it has {value.num_rows} rows, but no columns")
    return fields


def _write_table(table: Any) -> Fields:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    return {"data": to_text(sink.getvalue().to_pybytes()), "types": list(map(str, _types(table)))}


def _read_table(fields: Fields) -> Any:
    import pyarrow as pa

    content = base64.b64decode(fields["data"])
    for message in pa.ipc.MessageReader.open_stream(content):
        if _is_compressed(message.metadata.to_pybytes()):  # a few bytes could become gigabytes
            raise ValueError("an Arrow table is compressed")
    with pa.ipc.open_stream(content) as reader:
        table = reader.read_all()
    table.validate(full=True)
    if list(map(str, _types(table))) != fields["types"]:
        raise ValueError("a table has types that are unknown here")
    return table


def _types(table: Any) -> list[Any]:
    return [field.type for field in table.schema]


def _is_compressed(message: bytes) -> bool:
    """Return whether a message's rows are compressed; `pyarrow` must expand them to tell."""
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
    place = 4 + 2 * number
    if place + 2 > size:
        return 0
    (offset,) = struct.unpack_from("<H", message, table - distance + place)
    return table + offset if offset else 0


def _follow(message: bytes, place: int) -> int:
    (offset,) = struct.unpack_from("<I", message, place)
    return int(place + offset)


def _pack_batch(value: Any, pack: Pack) -> Fields:
    import pyarrow as pa

    return _pack_table(pa.Table.from_batches([value]), pack)


def _unpack_batch(fields: Fields, _: Unpack) -> Any:
    import pyarrow as pa

    table = _read_table(fields).combine_chunks()
    batches = table.to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _pack_frame(value: Any, pack: Pack) -> Fields:
    _check_flags(value)
    labels = list(value.columns)
    columns = [
        _pack_column(value.iloc[:, place], pack, f"[{show(label)}]")
        for place, label in enumerate(labels)
    ]
    return {
        "columns": columns,
        "labels": _pack_index(value.columns, pack, ".columns"),
        "index": _pack_index(value.index, pack, ".index"),
        "attrs": pack(value.attrs, ".attrs"),
    }


def _unpack_frame(fields: Fields, unpack: Unpack) -> Any:
    import pandas as pd

    index, labels = (_unpack_index(fields[name], unpack) for name in ("index", "labels"))
    columns = [_unpack_column(column, unpack) for column in fields["columns"]]
    if any(len(column) != len(index) for column in columns):
        raise ValueError("a data frame's columns differ from its length")
    frame = pd.DataFrame(dict(enumerate(columns))) if columns else pd.DataFrame(index=index)
    frame.index, frame.columns = index, labels
    frame.attrs.update(unpack(fields["attrs"]))
    return frame


def _pack_series(value: Any, pack: Pack) -> Fields:
    _check_flags(value)
    return {
        "name": pack(value.name, ".name"),
        "column": _pack_column(value, pack, ""),
        "index": _pack_index(value.index, pack, ".index"),
        "attrs": pack(value.attrs, ".attrs"),
    }


def _unpack_series(fields: Fields, unpack: Unpack) -> Any:
    series = _unpack_column(fields["column"], unpack)
    series.index = _unpack_index(fields["index"], unpack)
    series.attrs.update(unpack(fields["attrs"]))
    return series.rename(unpack(fields["name"]))


def _check_flags(value: Any) -> None:
    if not value.flags.allows_duplicate_labels:
        raise UnfitError(f"its flag `allows_duplicate_labels` is {show(False)}")


def _pack_column(column: Any, pack: Pack, where: str) -> Fields:
    """Pack Python objects one by one, and other values as an Arrow column."""
    import pyarrow as pa

    column = column.reset_index(drop=True)
    if column.dtype == object:
        return {"items": [pack(item, f"{where}[{row}]") for row, item in enumerate(column)]}
    table = pa.Table.from_pandas(column.to_frame("values"), preserve_index=False)
    fields = {**_write_table(table), "dtype": str(column.dtype)}
    again = _unpack_column(fields, lambda part: part)
    if not _is_same(column, again):
        raise UnfitError(f"Arrow's format would change its values{where} of type {column.dtype}")
    return fields


def _unpack_column(fields: Fields, unpack: Unpack) -> Any:
    import pandas as pd

    if "items" in fields:
        return pd.Series([unpack(item) for item in fields["items"]], dtype=object)
    table = _read_table(fields)
    if any(_takes_no_space(kind) for kind in _types(table)):
        raise ValueError("a column has values that take no space")
    series = table.to_pandas()["values"]
    if str(series.dtype) != fields["dtype"]:
        raise ValueError(f"a column is of type {series.dtype}, not {fields['dtype']}")
    return series.rename(None)


def _takes_no_space(kind: Any) -> bool:
    """Return whether a few bytes can encode a column of any length."""
    import pyarrow as pa

    if pa.types.is_null(kind) or pa.types.is_run_end_encoded(kind):
        return True
    if pa.types.is_fixed_size_list(kind) and not kind.list_size:
        return True
    if pa.types.is_fixed_size_binary(kind) and not kind.byte_width:
        return True
    return any(_takes_no_space(child) for child in _children(kind))


def _children(kind: Any) -> Iterator[Any]:
    storage = getattr(kind, "storage_type", None)
    if storage is not None:
        yield storage
    for place in range(kind.num_fields):
        yield kind.field(place).type


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two columns, or two indexes, have the same type and values."""
    if type(one) is not type(other) or one.dtype != other.dtype or not one.equals(other):
        return False
    if one.dtype == object:
        return [type(item) for item in one] == [type(item) for item in other]
    categories = getattr(one.dtype, "categories", None)
    return categories is None or _is_same(categories, other.dtype.categories)


def _pack_index(index: Any, pack: Pack, where: str) -> Fields:
    import pandas as pd

    if isinstance(index, pd.MultiIndex):
        levels = [index.get_level_values(level) for level in range(index.nlevels)]
        return {"levels": [_pack_index(level, pack, where) for level in levels]}
    name = pack(index.name, f"{where}.name")
    if isinstance(index, pd.RangeIndex):
        return {"range": [index.start, index.stop, index.step], "name": name}
    freq = getattr(index, "freqstr", None) if hasattr(index, "inferred_freq") else None
    column = _pack_column(pd.Series(index), pack, where)
    if "items" not in column:
        again = _make_index(_unpack_column(column, lambda part: part), freq)
        if not _is_same(index, again) or getattr(index, "freq", None) != getattr(
            again, "freq", None
        ):
            raise UnfitError(f"its {where} of type {type(index).__name__} would be changed")
    return {"column": column, "freq": freq, "name": name}


def _unpack_index(fields: Fields, unpack: Unpack) -> Any:
    import pandas as pd

    if "levels" in fields:
        levels = [_unpack_index(level, unpack) for level in fields["levels"]]
        return pd.MultiIndex.from_arrays(levels, names=[level.name for level in levels])
    name = unpack(fields["name"])
    if "range" in fields:
        return pd.RangeIndex(*fields["range"], name=name)
    return _make_index(_unpack_column(fields["column"], unpack), fields["freq"]).rename(name)


def _is_index(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return isinstance(value, getattr(pandas, "Index", ())) and (
        type(value).__module__.partition(".")[0] == "pandas"
    )


def _make_index(column: Any, freq: str | None) -> Any:
    import pandas as pd

    index = pd.Index(column, dtype=column.dtype, tupleize_cols=False)
    if freq is not None:
        index.freq = freq
    return index


# Arrow's errors are these, or derived from them.
_ARROW = (UnfitError, ValueError, TypeError, NotImplementedError, OverflowError, KeyError)
TABLES: tuple[ValueKind, ...] = (
    ValueKind("data frame", is_of("pandas", "DataFrame"), _pack_frame, _unpack_frame, _ARROW),
    ValueKind("series", is_of("pandas", "Series"), _pack_series, _unpack_series, _ARROW),
    ValueKind("index", _is_index, lambda v, pack: _pack_index(v, pack, ""), _unpack_index, _ARROW),
    ValueKind(
        "table",
        is_of("pyarrow", "Table"),
        _pack_table,
        lambda fields, _: _read_table(fields),
        _ARROW,
    ),
    ValueKind("batch", is_of("pyarrow", "RecordBatch"), _pack_batch, _unpack_batch, _ARROW),
)
