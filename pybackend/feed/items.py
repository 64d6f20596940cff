"""Lossless conversion of lists of Python objects to Arrow data and back.

It preserves types, nesting and order. Items of the same structure, such as the rows of a table,
become columns; other items are encoded one by one, as in `pybackend.job.values`. Nothing is
pickled. Each Arrow array is accompanied by its kind as JSON, e.g. ``["list", ["float"]]``.
"""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from operator import countOf
from typing import Any

import numpy as np
import pyarrow as pa

from pybackend.errors import InputError, SerializationError
from pybackend.job.values import decode_value, encode_value
from pybackend.words import show, term

_KIND = b"tfdist.kind"
_FLAT: dict[type, tuple[str, Any]] = {
    int: ("int", pa.int64()),
    float: ("float", pa.float64()),
    bool: ("bool", pa.bool_()),
    str: ("text", pa.large_string()),
    bytes: ("bytes", pa.large_binary()),
}
# Encoded as text, in a format that Python itself reads.
_TEXTUAL: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    datetime.datetime: (
        "datetime",
        datetime.datetime.isoformat,
        datetime.datetime.fromisoformat,
    ),
    datetime.date: ("date", datetime.date.isoformat, datetime.date.fromisoformat),
    decimal.Decimal: ("decimal", str, decimal.Decimal),
}
_FROM_TEXT = {name: read for name, _, read in _TEXTUAL.values()}
_INT64 = 1 << 63


def encode_items(items: Sequence[Any]) -> pa.RecordBatch:
    """Return one batch with the items.

    Raises
    ------
    SerializationError
        An item cannot be sent; the message names its type.
    """
    kind, array = _encode(list(items))
    return _batch(kind, array)


def frame_items(batch: pa.RecordBatch, *, gives_arrays: bool = False) -> pa.RecordBatch:
    """Convert an Arrow batch of a DataFrame to a batch of items, each a ``pyspark.sql.Row``.

    With ``gives_arrays``, `stack_columns` converts the columns to arrays.
    """
    struct = pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
    return _batch(["frame", batch.schema.names, gives_arrays], struct)


def decode_items(batch: pa.RecordBatch) -> list[Any]:
    """Return the items of a batch."""
    return _decode(_kind_of(batch), batch.column(0))


def stack_columns(batches: Sequence[pa.RecordBatch], width: int) -> list[Any] | None:
    """Return the first columns of batches as numpy arrays; None unless all batches request arrays.

    Raises
    ------
    InputError
        A column is not an array: it has nulls, or lists of different lengths or types.
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
    try:
        with pa.ipc.open_stream(content) as reader:
            return reader.read_next_batch()
    except (pa.ArrowException, StopIteration, ValueError) as error:
        raise SerializationError(f"the received rows are damaged: {error}") from error


def _kind_of(batch: pa.RecordBatch) -> list[Any]:
    kind: list[Any] = json.loads(batch.schema.metadata[_KIND])
    return kind


def _batch(kind: list[Any], array: Any) -> pa.RecordBatch:
    field = pa.field("items", array.type)
    schema = pa.schema([field], {_KIND: json.dumps(kind).encode()})
    return pa.RecordBatch.from_arrays([array], schema=schema)


def _encode(values: list[Any]) -> tuple[list[Any], Any]:
    types = _types(values)
    if len(types) == 1:
        found = _encode_alike(next(iter(types)), values)
        if found is not None:
            return found
    elif values and all(_is_vector(kind) for kind in types):
        return _encode_vectors(values)
    elif len(types) == 2 and type(None) in types:
        kind, array = _encode([value for value in values if value is not None])
        return ["optional", kind], _ragged([value is not None for value in values], array)
    return ["value"], pa.array(
        [encode_value(value, name="a row") for value in values], pa.large_string()
    )


def _types(values: list[Any]) -> set[type]:
    # Most lists have values of one type, and counting is faster than building a set.
    if values and countOf(map(type, values), type(values[0])) == len(values):
        return {type(values[0])}
    return set(map(type, values))


def _encode_alike(kind: type, values: list[Any]) -> tuple[list[Any], Any] | None:
    """Encode values of one type as a column; None if that would change a value."""
    if kind in _FLAT:
        name, arrow = _FLAT[kind]
        try:
            return [name], pa.array(values, arrow)
        except (OverflowError, UnicodeEncodeError, pa.ArrowException):
            return None  # a number beyond 64 bits, or text that UTF-8 cannot encode
    if kind is bytearray:
        return ["bytearray"], pa.array(list(map(bytes, values)), pa.large_binary())
    if kind in _TEXTUAL and not _is_folded(kind, values):
        name, write, _ = _TEXTUAL[kind]
        return [name], pa.array(list(map(write, values)), pa.string())
    if kind is list:
        child, array = _encode(list(chain.from_iterable(values)))
        return ["list", child], _ragged(list(map(len, values)), array)
    if kind is dict:
        return _encode_dicts(values)
    if issubclass(kind, tuple):
        return _encode_tuples(kind, values)
    if kind is np.ndarray or issubclass(kind, np.generic):
        return _encode_arrays(values, is_scalar=kind is not np.ndarray)
    if _is_spark(kind, "DenseVector", "pyspark.ml.linalg"):
        child, array = _encode([value.toArray() for value in values])
        if child[0] == "array":
            return ["vector", child], array
    return _encode_vectors(values) if _is_vector(kind) else None


def _is_folded(kind: type, values: list[Any]) -> bool:
    """Return whether text would lose data: the second of two equal hours, or a named time zone."""
    if kind is not datetime.datetime:
        return False
    return any(value.fold or value.tzinfo is not None for value in values)


def _encode_dicts(values: list[dict[Any, Any]]) -> tuple[list[Any], Any] | None:
    keys = list(values[0])
    if not keys or any(list(value) != keys for value in values):
        return None
    if not all(type(key) is str for key in keys):
        return None
    return _encode_columns(["dict", keys], [[v[key] for v in values] for key in keys])


def _encode_tuples(kind: type, values: list[Any]) -> tuple[list[Any], Any] | None:
    width = len(values[0])
    if not width or any(len(value) != width for value in values):
        return None
    columns = [list(column) for column in zip(*values, strict=True)]
    if kind is tuple:
        return _encode_columns(["tuple"], columns)
    if _is_spark(kind, "Row", "pyspark.sql"):
        names = getattr(values[0], "__fields__", None)
        if names and all(getattr(value, "__fields__", None) == names for value in values):
            return _encode_columns(["row", list(names)], columns)
    return None


def _encode_columns(kind: list[Any], columns: list[list[Any]]) -> tuple[list[Any], Any]:
    encoded = [_encode(column) for column in columns]
    names = [str(place) for place in range(len(encoded))]
    array = pa.StructArray.from_arrays([array for _, array in encoded], names)
    return [*kind, [child for child, _ in encoded]], array


def _encode_arrays(values: list[Any], is_scalar: bool) -> tuple[list[Any], Any] | None:
    shapes = {(value.dtype.str, value.shape) for value in values}
    if len(shapes) > 1 or values[0].dtype.kind not in "biufc":
        return None
    dtype, shape = values[0].dtype, values[0].shape
    width = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if not width:
        return None
    stacked = np.empty((len(values), *shape), dtype)  # which preserves the byte order, too
    np.stack(values, out=stacked)
    content = pa.py_buffer(stacked)
    array = pa.Array.from_buffers(pa.binary(width), len(values), [None, content])
    return ["scalar" if is_scalar else "array", dtype.str, list(shape)], array


def _encode_vectors(values: list[Any]) -> tuple[list[Any], Any]:
    """Encode Spark ML vectors: dense ones, whose size is None here, and sparse ones."""
    is_sparse = [type(value).__name__ == "SparseVector" for value in values]
    pairs = list(zip(values, is_sparse, strict=True))
    sizes = [int(value.size) if sparse else None for value, sparse in pairs]
    places = [value.indices.tolist() if sparse else [] for value, sparse in pairs]
    numbers = [
        value.values.tolist() if sparse else value.toArray().tolist() for value, sparse in pairs
    ]
    return _encode_columns(["vectors"], [sizes, places, numbers])


def _decode_vectors(columns: list[list[Any]]) -> list[Any]:
    from pyspark.ml.linalg import Vectors

    return [
        Vectors.dense(numbers) if size is None else Vectors.sparse(size, places, numbers)
        for size, places, numbers in zip(*columns, strict=True)
    ]


def _ragged(lengths: Iterable[int], array: Any) -> Any:
    offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))])
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), array)


def _is_vector(kind: type) -> bool:
    return any(
        _is_spark(kind, f"{name}Vector", "pyspark.ml.linalg") for name in ("Dense", "Sparse")
    )


def _is_spark(kind: type, name: str, module: str) -> bool:
    """Return whether this is a Spark class, from any submodule."""
    return kind.__name__ == name and kind.__module__.startswith(module)


def _decode(kind: list[Any], array: Any) -> list[Any]:
    name = kind[0]
    if name in ("int", "float"):
        found: list[Any] = array.to_numpy(zero_copy_only=False).tolist()
        return found
    if name in ("bool", "text", "bytes"):
        return list(array.to_pylist())
    if name == "bytearray":
        return [bytearray(value) for value in array.to_pylist()]
    if name in _FROM_TEXT:
        return [_FROM_TEXT[name](value) for value in array.to_pylist()]
    if name == "value":
        return [decode_value(text) for text in array.to_pylist()]
    if name == "list":
        return _cut(array, _decode(kind[1], array.flatten()))
    if name == "optional":
        return [
            part[0] if part else None for part in _cut(array, _decode(kind[1], array.flatten()))
        ]
    if name in ("array", "scalar"):
        stacked = _stacked(kind, array)
        return list(stacked.copy()) if name == "array" else list(stacked)
    if name == "vector":
        from pyspark.ml.linalg import Vectors

        return [Vectors.dense(value) for value in _decode(kind[1], array)]
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
    if name == "vectors":
        return _decode_vectors(columns)
    from pyspark.sql import Row

    make = Row(*kind[1])
    return [make(*row) for row in zip(*columns, strict=True)]


def _cut(array: Any, flat: list[Any]) -> list[list[Any]]:
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
        found: list[Any] = array.to_numpy(zero_copy_only=False).tolist()
        return found
    if pa.types.is_list(array.type) and not array.null_count:
        return _cut(array, _plain(array.flatten()))
    return list(array.to_pylist())


def _stack(name: str, parts: Sequence[Any]) -> Any:
    """Return the parts of a column as one array."""
    arrays = [_to_numpy(name, part) for part in parts]
    layouts = list(dict.fromkeys((array.dtype, array.shape[1:]) for array in arrays))
    if len(layouts) > 1:
        first, other = (f"{dtype} of shape {list(shape)} per row" for dtype, shape in layouts[:2])
        raise _no_array(name, f"{first} and {other} in one batch")
    return np.concatenate(arrays)


def _to_numpy(name: str, array: Any) -> Any:
    """Return a column of a DataFrame as an array."""
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
