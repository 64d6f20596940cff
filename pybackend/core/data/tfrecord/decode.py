"""Decode records of tf.train.Example to Arrow batches, and infer their columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pybackend.core.data.arrays import to_offsets
from pybackend.core.data.arrow import get_bytes
from pybackend.core.data.tfrecord import protobuf as pb
from pybackend.core.data.tfrecord.framing import Bytes, Chunk, Flags, Index, slide_window
from pybackend.core.errors import InputError
from pybackend.core.words import show

# The fields of Example, Features and an entry of its map.
_FEATURES, _ENTRY, _KEY, _VALUE = 1, 1, 1, 2
_ITEM = 1
# The wire types of fields with one value, by kind; one with several values is length-delimited.
_WIRES = {pb.BYTES: pb.LENGTH_DELIMITED, pb.FLOAT: pb.FIXED32, pb.INT64: pb.VARINT}
_FLOAT_BYTES = 4
# Numbers, how many each row of bytes has, and which rows contain an incomplete one.
Numbers = tuple[npt.NDArray[Any], Index, Flags]
_TYPES = {"int64": "int64", "float32": "float", "bytes": "binary", "string": "string"}
_NAMES = {pb.INT64: "int64", pb.FLOAT: "float32", pb.BYTES: "bytes"}
_LIST = "[]"


class Features(NamedTuple):
    """Entries of the records' maps, in the order in which they are stored."""

    records: Index  # index, within the chunk, of the record that contains the entry
    key_starts: Index  # position of its name
    key_ends: Index
    starts: Index  # position of its value, the message Feature
    ends: Index

    def at(self, rows: Index) -> Features:
        return Features(*(column[rows] for column in self))


class Lists(NamedTuple):
    """The lists of one feature, in the order of their records; a record has at most one."""

    records: Index  # index of the record within the chunk
    kinds: Index  # number of the list in the message Feature (`LISTS`)
    starts: Index
    ends: Index


def parse_features(chunk: Chunk) -> Features:
    """An `InputError` names the first record that is not a tf.train.Example."""
    records = np.arange(len(chunk.starts))
    features = parse_record_fields(chunk, records, chunk.starts, chunk.starts + chunk.lengths)
    features = features.messages(_FEATURES)
    records = records[features.owners]
    entries = parse_record_fields(chunk, records, features.starts, features.ends).messages(_ENTRY)
    records = records[entries.owners]
    parts = parse_record_fields(chunk, records, entries.starts, entries.ends)
    keys, values = parts.messages(_KEY), parts.messages(_VALUE)
    # Missing keys and values are empty and lie in their entry, so that positions are in order.
    positions = np.tile(entries.starts, (4, 1))
    # The last of several wins: it is assigned last.
    positions[0, keys.owners], positions[1, keys.owners] = keys.starts, keys.ends
    positions[2, values.owners], positions[3, values.owners] = values.starts, values.ends
    return Features(records, *positions)


def select_by_name(chunk: Chunk, features: Features, names: Sequence[str]) -> list[Features]:
    """Return the entries by name; if a record has several, the last one, as in protobuf."""
    numbers = _match_names(np.frombuffer(chunk.content, np.uint8), features, names)
    order = np.argsort(numbers, kind="stable")
    edges = np.searchsorted(numbers[order], np.arange(len(names) + 1))
    rows = [order[first:last] for first, last in pairwise(edges.tolist())]
    return [features.at(own[_is_last(features.records[own])]) for own in rows]


def _match_names(data: Bytes, features: Features, names: Sequence[str]) -> Index:
    """Return the index of each entry's name in ``names``; ``len(names)`` if it is absent."""
    numbers = np.full(len(features.records), len(names))
    lengths = features.key_ends - features.key_starts
    keys = [name.encode() for name in names]
    for length in {len(key) for key in keys}:
        rows = np.flatnonzero(lengths == length)
        if not len(rows):
            continue
        kind = pa.binary(length)
        content = np.ascontiguousarray(slide_window(data, length)[features.key_starts[rows]])
        buffers = [None, pa.py_buffer(content)]
        found = pa.FixedSizeBinaryArray.from_buffers(kind, len(rows), buffers)
        wanted = [key if len(key) == length else None for key in keys]
        positions = pc.index_in(found, pa.array(wanted, kind), skip_nulls=True)
        numbers[rows] = positions.fill_null(len(names)).to_numpy()
    return numbers


def list_names(chunk: Chunk, features: Features) -> list[str]:
    """Return the sorted names of all features; an `InputError` names a record with invalid text."""
    data = np.frombuffer(chunk.content, np.uint8)
    keys = pb.cut_bytes(data, features.key_starts, features.key_ends)
    try:
        return sorted(key.decode() for key in keys.unique().to_pylist())
    except UnicodeDecodeError as error:
        entry = keys.to_pylist().index(error.object)
        raise malformed_error(chunk, int(features.records[entry])) from error


def parse_lists(chunk: Chunk, features: Features) -> Lists:
    """Return the lists of all features with one name; a Feature without a list counts as absent."""
    fields = parse_record_fields(chunk, features.records, features.starts, features.ends)
    is_list = (fields.wires == pb.LENGTH_DELIMITED) & (fields.numbers <= max(pb.LISTS))
    fields = fields.where(is_list)
    fields = fields.where(_is_last(fields.owners))
    return Lists(features.records[fields.owners], fields.numbers, fields.starts, fields.ends)


def _is_last(owners: Index) -> Flags:
    """Return, for each entry, whether it is the last one of its owner; ``owners`` are sorted."""
    last = np.ones(len(owners), np.bool_)
    last[:-1] = owners[1:] != owners[:-1]
    return last


def parse_record_fields(chunk: Chunk, records: Index, starts: Index, ends: Index) -> pb.Fields:
    """Return the fields of these records' messages; an `InputError` names a malformed record."""
    try:
        return pb.parse_fields(np.frombuffer(chunk.content, np.uint8), starts, ends)
    except pb.Malformed as error:
        raise malformed_error(chunk, int(records[error.args[0]])) from error


def malformed_error(chunk: Chunk, record: int) -> InputError:
    return InputError(
        f"{chunk.name_record(record)} is not a tf.train.Example: only files of such records can "
        "be read as columns"
    )


def read_values(chunk: Chunk, lists: Lists, kind: int) -> tuple[pa.Array, Index]:
    """Return all values of lists of one kind, and the number of values in each list.

    The values are an Arrow array of ``large_binary``, ``float`` or ``int64``. An `InputError` names
    the record whose list is malformed.
    """
    items = parse_record_fields(chunk, lists.records, lists.starts, lists.ends)
    items = items.where(items.numbers == _ITEM)
    wrong = ~np.isin(items.wires, (pb.LENGTH_DELIMITED, _WIRES[kind]))
    rows = pb.cut_bytes(np.frombuffer(chunk.content, np.uint8), items.starts, items.ends)
    if kind == pb.BYTES:
        values, sizes = rows, np.ones(len(rows), np.int64)
    else:
        read = _read_floats if kind == pb.FLOAT else _read_integers
        numbers, sizes, broken = read(*get_bytes(rows))
        values, wrong = pa.array(numbers), wrong | broken
    if wrong.any():
        raise malformed_error(chunk, int(lists.records[items.owners[np.argmax(wrong)]]))
    return values, np.bincount(items.owners, sizes, len(lists.records)).astype(np.int64)


def _read_floats(content: Bytes, offsets: Index) -> Numbers:
    lengths = np.diff(offsets)
    whole = content[: len(content) // _FLOAT_BYTES * _FLOAT_BYTES]
    return whole.view("<f4"), lengths // _FLOAT_BYTES, lengths % _FLOAT_BYTES != 0


def _read_integers(content: Bytes, offsets: Index) -> Numbers:
    lengths = np.diff(offsets)
    is_last = content <= 0x7F
    if is_last.all():
        return content.astype(np.int64), lengths, np.zeros(len(lengths), np.bool_)
    positions = to_offsets(is_last.astype(np.int64))[offsets]
    begins = np.append(0, np.flatnonzero(is_last) + 1)[: positions[-1]]
    values, _, whole = pb.decode_varints(content, begins)
    broken = np.zeros(len(lengths), np.bool_)
    broken[np.searchsorted(positions, np.flatnonzero(~whole), side="right") - 1] = True
    # A row that ends inside a number would continue in the next row.
    broken[lengths > 0] |= ~is_last[offsets[1:][lengths > 0] - 1]
    return values, np.diff(positions), broken


def spec_to_schema(spec: Mapping[str, str]) -> pa.Schema:
    """The columns are in the order of the checked `tfrecord_spec`."""
    fields = []
    for name, kind in spec.items():
        element = pa.type_for_alias(_TYPES[kind.removesuffix(_LIST)])
        fields.append((name, pa.list_(element) if kind.endswith(_LIST) else element))
    return pa.schema(fields)


def infer_spec(chunks: Iterable[Chunk]) -> dict[str, str]:
    """Infer the `tfrecord_spec` of a sample, sorted by name.

    A feature is a scalar if it has one value in each record that contains it, otherwise a list.
    Bytes remain bytes: records do not specify whether they are text. An `InputError` names the
    feature that has more than one kind, or whose type cannot be inferred.
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
                    f"list than earlier records ({pb.LISTS[kind]}): one column cannot contain both"
                )
            _, counts = read_values(chunk, lists, kind)
            single[name] = single.get(name, True) and bool((counts == 1).all())
    return {name: _NAMES[kinds[name]] + ("" if single[name] else _LIST) for name in sorted(kinds)}


def decode_chunk(chunk: Chunk, schema: pa.Schema) -> pa.RecordBatch:
    """Return the features of a schema, in schema order; null where a record lacks one.

    An `InputError` names the record, and the feature that has the wrong kind, does not have exactly
    one value although the schema requires it, or has a value that its type cannot hold.
    """
    features = select_by_name(chunk, parse_features(chunk), schema.names)
    columns = [
        _build_column(chunk, parse_lists(chunk, entries), field)
        for entries, field in zip(features, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _build_column(chunk: Chunk, lists: Lists, field: pa.Field) -> pa.Array:
    kind = pb.choose_list(field.type)
    assert kind is not None, "schemas contain only types that records support"
    other = lists.kinds != kind
    if other.any():
        row = int(np.argmax(other))
        found = pb.LISTS[int(lists.kinds[row])]
        raise InputError(
            f"{chunk.name_record(int(lists.records[row]))} has the feature {show(field.name)} as "
            f"{found}, but a column of {field.type} needs {pb.LISTS[kind]}"
        )
    values, counts = read_values(chunk, lists, kind)
    is_list = pb.is_list(field.type)
    if not is_list and (counts != 1).any():
        row = int(np.argmax(counts != 1))
        raise InputError(
            f"{chunk.name_record(int(lists.records[row]))} has {counts[row]} values for the "
            f"feature {show(field.name)}, but a column of {field.type} needs one: read it as an "
            "array, with '[]' after its type in `tfrecord_spec`"
        )
    values = _cast(chunk, values, counts, lists, field)
    if is_list:
        return _to_lists(values, counts, lists.records, len(chunk.starts), field.type)
    return _spread(values, lists.records, len(chunk.starts))


def _to_lists(values: pa.Array, counts: Index, records: Index, rows: int, kind: Any) -> pa.Array:
    lengths = np.full(rows, -1)
    lengths[records] = counts
    offsets = pa.array(to_offsets(np.maximum(lengths, 0)), pa.int32())
    return pa.ListArray.from_arrays(offsets, values, type=kind, mask=pa.array(lengths < 0))


def _spread(values: pa.Array, records: Index, rows: int) -> pa.Array:
    """Expand the values of some rows to a column for all rows; the others are null."""
    if len(values) == rows:
        return values
    positions = np.full(rows, -1)
    positions[records] = np.arange(len(values))
    return values.take(pa.array(positions, mask=positions < 0))


def _cast(chunk: Chunk, values: pa.Array, counts: Index, lists: Lists, field: pa.Field) -> pa.Array:
    """Cast values to the type of the column, or of the elements in its arrays."""
    kind = field.type.value_type if pb.is_list(field.type) else field.type
    try:
        return _to_type(values, kind)
    except pa.ArrowInvalid as error:
        value = next(index for index in range(len(values)) if not _fits(values[index], kind))
        row = int(np.searchsorted(np.cumsum(counts), value, side="right"))
        raise InputError(
            f"{chunk.name_record(int(lists.records[row]))} has a value for the feature "
            f"{show(field.name)} that does not fit in {kind}: {error}"
        ) from error


def _fits(value: pa.Scalar, kind: pa.DataType) -> bool:
    try:
        _to_type(pa.array([value]), kind)
    except pa.ArrowInvalid:
        return False
    return True


def _to_type(values: pa.Array, kind: pa.DataType) -> pa.Array:
    of = pa.types
    if of.is_date(kind):
        values = values.cast(pa.int32())
    elif of.is_decimal(kind):
        values = values.cast(pa.float64())
    elif of.is_string(kind):
        values = values.cast(pa.binary())
    return values.cast(kind)
