"""Encode an Arrow column as the payload of a feature: the bytes of its values, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pybackend.data.tfrecord.pieces import (
    Bytes,
    Index,
    build_per_size,
    get_bytes,
    join_columns,
    to_offsets,
)
from pybackend.data.tfrecord.pieces import split_bytes as rows_of
from pybackend.data.tfrecord.types import BYTES, INT64, choose_list, is_list
from pybackend.data.tfrecord.varint import encode_one, encode_varints
from pybackend.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Payload:
    """The values of one feature.

    Attributes
    ----------
    kind
        Number of the list in the message Feature.
    content, offsets
        The bytes of row i are ``content[offsets[i]:offsets[i + 1]]``.
    sizes
        Number of bytes of each row; -1 for a row without a value.
    is_one_field
        Whether a row's bytes are the content of one field of the list, to be preceded by its tag
        and length, and not complete fields.
    """

    kind: int
    content: Bytes
    offsets: Index
    sizes: Index
    is_one_field: bool


def build_payload(column: pa.Array, name: str, first_row: int = 0) -> Payload:
    """Build the payload of a column; `choose_list` must support its type.

    Raises
    ------
    InputError
        The type is not supported, or an array has a null; rows are counted from ``first_row``.
    """
    kind = choose_list(column.type)
    if kind is None:
        raise InputError(f"column {name!r} has the type {column.type}, which no record can hold")
    given = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    values = column.drop_null() if column.null_count else column
    if not is_list(values.type):
        content, offsets = _encode_values(values, kind)
        return _spread(Payload(kind, content, offsets, np.diff(offsets), True), given, len(column))
    values, places = _flatten(values)
    if values.null_count:
        _reject_null(values, places, given + first_row, name)
    content, offsets = _encode_values(values, kind)
    if kind == BYTES:
        content, offsets = _wrap_fields(content, offsets)
    offsets = offsets[places]
    whole = Payload(kind, content, offsets, np.diff(offsets), kind != BYTES)
    return _spread(whole, given, len(column))


def _spread(given: Payload, rows: Index, count: int) -> Payload:
    """Extend the payload of the ``rows`` with a value to ``count`` rows."""
    if len(rows) == count:
        return given
    sizes = np.full(count, -1)
    sizes[rows] = given.sizes
    offsets = to_offsets(np.maximum(sizes, 0))
    return Payload(given.kind, given.content, offsets, sizes, given.is_one_field)


def _flatten(lists: pa.Array) -> tuple[pa.Array, Index]:
    """Return the elements of lists without nulls, and the start of each list among them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = pc.list_value_length(lists).cast(pa.int64()).to_numpy()
    return lists.flatten(), to_offsets(lengths)


def _reject_null(values: pa.Array, places: Index, rows: Index, name: str) -> None:
    first = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
    row = rows[np.searchsorted(places, first, side="right") - 1]
    raise InputError(
        f"column {name!r} holds a null inside the array of row {row} (counting from 0): a record "
        "holds no nulls in lists. Fill or drop them first, e.g. with array_compact()"
    )


def _encode_values(values: pa.Array, kind: int) -> tuple[Bytes, Index]:
    """Return the bytes of values without nulls, and the start of each value."""
    import pyarrow as pa

    if kind == INT64:
        return encode_varints(_to_integers(values))
    if kind == BYTES:
        if pa.types.is_fixed_size_binary(values.type):
            values = values.cast(pa.binary())
        return get_bytes(values.cast(pa.large_binary()))
    content = _to_floats(values).view(np.uint8)
    return content, np.arange(len(values) + 1, dtype=np.int64) * 4


def _to_integers(values: pa.Array) -> Index:
    """Convert dates to days and timestamps to microseconds, both since 1970."""
    import pyarrow as pa

    if pa.types.is_date(values.type):
        values = values.cast(pa.date32()).cast(pa.int32())
    elif pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us", values.type.tz))
    return np.ascontiguousarray(values.cast(pa.int64()).to_numpy())


def _to_floats(values: pa.Array) -> npt.NDArray[np.float32]:
    import pyarrow as pa

    if pa.types.is_decimal(values.type):
        values = values.cast(pa.float64())
    # Numbers beyond float32 become infinite, as in protobuf.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values.to_numpy(), "<f4")


def _wrap_fields(content: Bytes, offsets: Index) -> tuple[Bytes, Index]:
    """Encode each value as one field: tag, length, bytes."""
    heads = build_per_size(
        np.diff(offsets), lambda sizes: [b"\x0a" + encode_one(s) for s in sizes.tolist()]
    )
    return get_bytes(join_columns([heads, rows_of(content, offsets)]))
