"""Decode records of tf.train.Example to Arrow batches, and infer their columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from pybackend.core.data.tfrecord.chunks import Chunk
from pybackend.core.data.tfrecord.features import (
    Lists,
    list_names,
    parse_features,
    parse_lists,
    read_values,
    select_by_name,
)
from pybackend.core.data.tfrecord.protobuf import Index, to_offsets
from pybackend.core.data.tfrecord.types import BYTES, FLOAT, INT64, LISTS, choose_list, is_list
from pybackend.core.errors import InputError
from pybackend.core.words import show

if TYPE_CHECKING:
    import pyarrow as pa

_TYPES = {"int64": "int64", "float32": "float", "bytes": "binary", "string": "string"}
_NAMES = {INT64: "int64", FLOAT: "float32", BYTES: "bytes"}
_LIST = "[]"


def spec_to_schema(spec: Mapping[str, str]) -> pa.Schema:
    """Convert a checked `tfrecord_spec` to a schema, in the same order."""
    import pyarrow as pa

    fields = []
    for name, kind in spec.items():
        element = pa.type_for_alias(_TYPES[kind.removesuffix(_LIST)])
        fields.append((name, pa.list_(element) if kind.endswith(_LIST) else element))
    return pa.schema(fields)


def infer_spec(chunks: Iterable[Chunk]) -> dict[str, str]:
    """Infer the `tfrecord_spec` of a sample, sorted by name.

    A feature is a scalar if it has one value in each record that contains it, otherwise a list.
    Bytes remain bytes: records do not specify whether they are text.

    Raises
    ------
    InputError
        Names the feature that has more than one kind, or whose type cannot be inferred.
    """
    kinds: dict[str, int] = {}
    single: dict[str, bool] = {}
    for chunk in chunks:
        features = parse_features(chunk)
        names = list_names(chunk, features)
        for name, entries in zip(names, select_by_name(chunk, features, names), strict=True):
            lists = parse_lists(chunk, entries)
            if not len(lists.kinds):
                continue
            kind = kinds.setdefault(name, int(lists.kinds[0]))
            if (lists.kinds != kind).any():
                row = int(lists.records[np.argmax(lists.kinds != kind)])
                raise InputError(
                    f"{chunk.name_record(row)} has the feature {show(name)} in a different kind of "
                    f"list than earlier records ({LISTS[kind]}): one column cannot contain both"
                )
            _, counts = read_values(chunk, lists, kind)
            single[name] = single.get(name, True) and bool((counts == 1).all())
    return {name: _NAMES[kinds[name]] + ("" if single[name] else _LIST) for name in sorted(kinds)}


def decode_chunk(chunk: Chunk, schema: pa.Schema) -> pa.RecordBatch:
    """Return the features of a schema, in schema order; null where a record lacks one.

    Raises
    ------
    InputError
        Names the record, and the feature that has the wrong kind, does not have exactly one value
        although the schema requires it, or has a value that its type cannot hold.
    """
    import pyarrow as pa

    features = select_by_name(chunk, parse_features(chunk), schema.names)
    columns = [
        _build_column(chunk, parse_lists(chunk, entries), field)
        for entries, field in zip(features, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _build_column(chunk: Chunk, lists: Lists, field: pa.Field) -> pa.Array:
    kind = choose_list(field.type)
    assert kind is not None, "schemas contain only types that records support"
    _check_kinds(chunk, lists, field, kind)
    values, counts = read_values(chunk, lists, kind)
    if is_list(field.type):
        values = _cast(chunk, values, counts, lists, field)
        return _to_lists(values, counts, lists.records, len(chunk.starts), field.type)
    if (counts != 1).any():
        row = int(np.argmax(counts != 1))
        raise InputError(
            f"{chunk.name_record(int(lists.records[row]))} has {counts[row]} values for the "
            f"feature {show(field.name)}, but a column of {field.type} needs one: read it as an "
            "array, with '[]' after its type in `tfrecord_spec`"
        )
    values = _cast(chunk, values, counts, lists, field)
    return _spread(values, lists.records, len(chunk.starts))


def _check_kinds(chunk: Chunk, lists: Lists, field: pa.Field, kind: int) -> None:
    other = lists.kinds != kind
    if other.any():
        row = int(np.argmax(other))
        raise InputError(
            f"{chunk.name_record(int(lists.records[row]))} has the feature {show(field.name)} as "
            f"{LISTS[int(lists.kinds[row])]}, but a column of {field.type} needs {LISTS[kind]}"
        )


def _to_lists(
    values: pa.Array, counts: Index, records: Index, rows: int, kind: pa.DataType
) -> pa.Array:
    import pyarrow as pa

    lengths = np.zeros(rows, np.int64)
    lengths[records] = counts
    absent = np.ones(rows, np.bool_)
    absent[records] = False
    offsets = pa.array(to_offsets(lengths), pa.int32())
    return pa.ListArray.from_arrays(offsets, values, type=kind, mask=pa.array(absent))


def _spread(values: pa.Array, records: Index, rows: int) -> pa.Array:
    """Expand the values of some rows to a column for all rows; the others are null."""
    import pyarrow as pa

    if len(values) == rows:
        return values
    places = np.zeros(rows, np.int64)
    absent = np.ones(rows, np.bool_)
    places[records], absent[records] = np.arange(len(values)), False
    return values.take(pa.array(places, mask=absent))


def _cast(chunk: Chunk, values: pa.Array, counts: Index, lists: Lists, field: pa.Field) -> pa.Array:
    """Cast values to the type of the column, or of the elements in its arrays."""
    import pyarrow as pa

    kind = field.type.value_type if is_list(field.type) else field.type
    try:
        return _to_type(values, kind)
    except pa.ArrowInvalid as error:
        value = next(place for place in range(len(values)) if not _fits(values[place], kind))
        row = int(np.searchsorted(np.cumsum(counts), value, side="right"))
        raise InputError(
            f"{chunk.name_record(int(lists.records[row]))} has a value for the feature "
            f"{show(field.name)} that does not fit in {kind}: {error}"
        ) from error


def _fits(value: pa.Scalar, kind: pa.DataType) -> bool:
    import pyarrow as pa

    try:
        _to_type(pa.array([value]), kind)
    except pa.ArrowInvalid:
        return False
    return True


def _to_type(values: pa.Array, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    of = pa.types
    if of.is_date(kind):
        values = values.cast(pa.int32())
    elif of.is_decimal(kind):
        values = values.cast(pa.float64())
    elif of.is_string(kind):
        values = values.cast(pa.binary())
    return values.cast(kind)
