"""Lossless conversion of lists of Python objects to Arrow data and back.

It preserves types, nesting and order. Items of the same structure, such as the rows of a table,
become columns: those of the parts into which `pybackend.core.job.value_codec` takes a value apart.
Other items are encoded one by one, as there. Nothing is pickled. Each Arrow array is accompanied by
its kind as JSON, e.g. ``["list", ["float"]]``.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from operator import countOf
from typing import Any

import numpy as np
import pyarrow as pa

from pybackend.core.errors import InputError
from pybackend.core.job.value_codec import (
    KINDS,
    REFUSALS,
    decode_value,
    encode_value,
    naming_damage,
)
from pybackend.core.words import show, term

_KIND = b"tfdist.kind"
_FLAT: dict[type, tuple[str, Any]] = {
    int: ("int", pa.int64()),
    float: ("float", pa.float64()),
    bool: ("bool", pa.bool_()),
    str: ("text", pa.large_string()),
    bytes: ("bytes", pa.large_binary()),
    type(None): ("none", pa.null()),
}
_MAKERS = {kind.tag: kind.make for kind in KINDS}
_MOST_TYPES = 8
_RECEIVED = "a batch of rows"


def encode_items(items: Sequence[Any]) -> pa.RecordBatch:
    """Return one batch with the items. Raises `SerializationError`, which names the item's type."""
    return _batch(*_encode(list(items)))


def frame_items(batch: pa.RecordBatch, *, gives_arrays: bool = False) -> pa.RecordBatch:
    """Convert an Arrow batch of a DataFrame to a batch of items, each a ``pyspark.sql.Row``.

    With ``gives_arrays``, `stack_columns` converts the columns to arrays.
    """
    struct = pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
    return _batch(["frame", batch.schema.names, gives_arrays], struct)


def decode_items(batch: pa.RecordBatch) -> list[Any]:
    """Return the items of a batch; `SerializationError` if it is damaged."""
    with naming_damage(_RECEIVED):
        return _decode(_kind_of(batch), batch.column(0))


def stack_columns(batches: Sequence[pa.RecordBatch], width: int) -> list[Any] | None:
    """Return the first columns of batches as numpy arrays; None unless all batches request arrays.

    Raises `InputError` if a column has nulls, or lists of different lengths or types.
    """
    kinds = [_kind_of(batch) for batch in batches]
    if not all(kind[0] == "frame" and kind[2] for kind in kinds):
        return None
    names = kinds[0][1]
    if len(names) < width:
        raise InputError(f"`input_mapping` has {width} columns, but the rows have {len(names)}")
    tables = [batch.column(0).flatten() for batch in batches]
    return [_stack(names[n], [table[n] for table in tables]) for n in range(width)]


def write_batch(batch: pa.RecordBatch) -> pa.Buffer:
    """Return the bytes of a batch, including its types."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def read_batch(content: Any) -> pa.RecordBatch:
    """Return the batch that `write_batch` wrote; `SerializationError` if it is damaged."""
    with naming_damage(_RECEIVED), pa.ipc.open_stream(content) as reader:
        batch = reader.read_next_batch()
        batch.validate(full=True)
        return batch


def _kind_of(batch: pa.RecordBatch) -> list[Any]:
    return list(json.loads(batch.schema.metadata[_KIND]))


def _batch(kind: list[Any], array: Any) -> pa.RecordBatch:
    field = pa.field("items", array.type)
    schema = pa.schema([field], {_KIND: json.dumps(kind).encode()})
    return pa.RecordBatch.from_arrays([array], schema=schema)


def _encode(values: list[Any]) -> tuple[list[Any], Any]:
    types = _types(values)
    if len(types) == 1:
        found = _encode_alike(types[0], values)
        if found is not None:
            return found
    elif 1 < len(types) <= _MOST_TYPES:
        return _encode_mixed(types, values)
    texts = [encode_value(value, name="a row") for value in values]
    return ["value"], pa.array(texts, pa.large_string())


def _types(values: list[Any]) -> list[type]:
    # Most lists have values of one type, and counting is faster than building a set.
    if values and countOf(map(type, values), type(values[0])) == len(values):
        return [type(values[0])]
    return list(dict.fromkeys(map(type, values)))


def _encode_mixed(types: list[type], values: list[Any]) -> tuple[list[Any], Any]:
    """Encode the values of each type as a column of lists: a row has a value in one of them.

    A union would be Arrow's own form, but pyarrow 25 does not apply a slice to its type codes.
    """
    columns, children = [], []
    for kind in types:
        if kind is not type(None):
            child, array = _encode([value for value in values if type(value) is kind])
            children.append(child)
            columns.append(_ragged((type(value) is kind for value in values), array))
    names = [str(index) for index in range(len(columns))]
    return ["mixed", children], pa.StructArray.from_arrays(columns, names)


def _encode_alike(kind: type, values: list[Any]) -> tuple[list[Any], Any] | None:
    """Encode values of one type as a column; None if that would change a value."""
    if kind in _FLAT:
        name, arrow = _FLAT[kind]
        try:
            return [name], pa.array(values, arrow)
        except (OverflowError, UnicodeEncodeError, pa.ArrowException):
            return None  # a number beyond 64 bits, or text that UTF-8 cannot encode
    if kind is datetime.datetime and not any(v.fold or v.tzinfo is not None for v in values):
        return ["datetime"], pa.array(values, pa.timestamp("us"))
    if kind is list:
        child, array = _encode(list(chain.from_iterable(values)))
        return ["list", child], _ragged(map(len, values), array)
    if kind is dict:
        keys = list(values[0])
        if not all(type(key) is str for key in keys) or any(list(v) != keys for v in values):
            return None
        return _encode_columns(["dict", keys], [[v[key] for v in values] for key in keys])
    if kind is tuple:
        return _encode_rows(["tuple"], values)
    if kind is np.ndarray or issubclass(kind, np.generic):
        return _encode_arrays(values, is_scalar=kind is not np.ndarray)
    if kind.__name__ == "Row" and kind.__module__.startswith("pyspark.sql"):
        names = getattr(values[0], "__fields__", None)
        if names and all(getattr(value, "__fields__", None) == names for value in values):
            return _encode_rows(["row", list(names)], values)
    found = next((one for one in KINDS if one.matches(values[0])), None)
    if found is None:
        return None
    try:
        return _encode_rows(["made", found.tag], list(map(found.take, values)))
    except REFUSALS:
        return None  # the error of `encode_value` names the row


def _encode_rows(kind: list[Any], rows: Sequence[Sequence[Any]]) -> tuple[list[Any], Any] | None:
    if len(set(map(len, rows))) > 1:
        return None
    return _encode_columns(kind, [list(column) for column in zip(*rows, strict=True)])


def _encode_columns(kind: list[Any], columns: list[list[Any]]) -> tuple[list[Any], Any] | None:
    if not columns:
        return None
    encoded = [_encode(column) for column in columns]
    names = [str(index) for index in range(len(encoded))]
    array = pa.StructArray.from_arrays([array for _, array in encoded], names)
    return [*kind, [child for child, _ in encoded]], array


def _encode_arrays(values: list[Any], is_scalar: bool) -> tuple[list[Any], Any] | None:
    dtype, shapes = values[0].dtype, {value.shape for value in values}
    if dtype.kind not in "biufc" or any(v.dtype is not dtype and v.dtype != dtype for v in values):
        return None
    if len(shapes) > 1:
        if any(len(shape) != 1 for shape in shapes):
            return None
        flat = np.concatenate(values).astype(dtype, copy=False)
        parts = pa.binary(dtype.itemsize), len(flat), [None, pa.py_buffer(flat)]
        return ["ragged", dtype.str], _ragged(map(len, values), pa.Array.from_buffers(*parts))
    (shape,) = shapes
    width = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if not width:
        return None
    stacked = np.empty((len(values), *shape), dtype)  # which preserves the byte order, too
    np.stack(values, out=stacked)
    content = pa.py_buffer(stacked)
    array = pa.Array.from_buffers(pa.binary(width), len(values), [None, content])
    return ["scalar" if is_scalar else "array", dtype.str, list(shape)], array


def _ragged(lengths: Iterable[int], array: Any) -> Any:
    offsets = np.concatenate([[0], np.cumsum(np.fromiter(lengths, np.int64))])
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), array)


def _decode(kind: list[Any], array: Any) -> list[Any]:
    name = kind[0]
    if name in ("int", "float", "datetime"):
        return list(array.to_numpy(zero_copy_only=False).tolist())
    if name in ("bool", "text", "bytes", "none"):
        return list(array.to_pylist())
    if name == "value":
        return [decode_value(text) for text in array.to_pylist()]
    if name == "list":
        return _cut(array, _decode(kind[1], array.flatten()))
    if name == "mixed":
        values: list[Any] = [None] * len(array)
        for child, column in zip(kind[1], array.flatten(), strict=True):
            rows = np.flatnonzero(np.diff(column.offsets.to_numpy()))
            for row, value in zip(rows, _decode(child, column.flatten()), strict=True):
                values[row] = value
        return values
    if name == "ragged":
        flat = _stacked(["array", kind[1], []], array.flatten())
        return [part.copy() for part in _cut(array, flat)]
    if name in ("array", "scalar"):
        stacked = _stacked(kind, array)
        return list(stacked.copy()) if name == "array" else list(stacked)
    return _decode_columns(kind, array)


def _decode_columns(kind: list[Any], array: Any) -> list[Any]:
    name = kind[0]
    if name == "frame":
        columns = [_plain(column) for column in array.flatten()]
    else:
        parts = zip(kind[-1], array.flatten(), strict=True)
        columns = [_decode(child, column) for child, column in parts]
    if name == "dict":
        return [dict(zip(kind[1], row, strict=True)) for row in zip(*columns, strict=True)]
    if name == "tuple":
        return list(zip(*columns, strict=True))
    if name == "made":
        return list(map(_MAKERS[kind[1]], *columns))
    from pyspark.sql import Row

    make = Row(*kind[1])
    return [make(*row) for row in zip(*columns, strict=True)]


def _cut(array: Any, flat: Any) -> list[Any]:
    ends = array.offsets.to_numpy()
    bounds = (ends - ends[0]).tolist()
    return [flat[start:end] for start, end in pairwise(bounds)]


def _stacked(kind: list[Any], array: Any) -> Any:
    dtype, shape = np.dtype(kind[1]), kind[2]
    width = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    content = memoryview(array.buffers()[1])[array.offset * width :][: len(array) * width]
    return np.frombuffer(content, dtype).reshape(len(array), *shape)


def _plain(array: Any) -> list[Any]:
    """Return a column of a DataFrame with the values of Spark's own rows."""
    is_number = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
    if is_number and not array.null_count:
        return list(array.to_numpy(zero_copy_only=False).tolist())
    if pa.types.is_list(array.type) and not array.null_count:
        return _cut(array, _plain(array.flatten()))
    return list(array.to_pylist())


def _stack(name: str, parts: Sequence[Any]) -> Any:
    arrays = [_to_numpy(name, part) for part in parts]
    layouts = list(dict.fromkeys((array.dtype, array.shape[1:]) for array in arrays))
    if len(layouts) > 1:
        first, other = (f"{dtype} of shape {list(shape)} per row" for dtype, shape in layouts[:2])
        raise _no_array(name, f"{first} and {other} in one batch")
    return np.concatenate(arrays)


def _to_numpy(name: str, array: Any) -> Any:
    if array.null_count:
        raise _no_array(name, "nulls")
    if pa.types.is_list(array.type) and len(array):
        lengths = np.diff(array.offsets.to_numpy())
        if (lengths != lengths[0]).any():
            raise _no_array(name, "lists of different lengths")
        inner = _to_numpy(name, array.flatten())
        return inner.reshape(len(array), int(lengths[0]), *inner.shape[1:])
    return array.to_numpy(zero_copy_only=False)


def _no_array(name: str, reason: str) -> InputError:
    return InputError(
        f"next_batch() with `input_mapping` converts the columns of a {term('DataFrame')} to "
        f"arrays, but column {show(name)} has {reason}: fill or drop such rows first, or feed "
        "df.rdd, whose values are not converted"
    )
