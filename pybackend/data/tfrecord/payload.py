"""An Arrow column as the payload of a feature: the bytes of its values, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pybackend.data.tfrecord.pieces import Bytes, Index, bytes_of, joined, offsets_of, per_size
from pybackend.data.tfrecord.pieces import pieces as rows_of
from pybackend.data.tfrecord.types import BYTES, INT64, is_list, kind_of
from pybackend.data.tfrecord.varint import encoded, varint
from pybackend.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Payload:
    """The values of one feature.

    Attributes
    ----------
    kind
        The list that Example holds them in, by its number in the message Feature.
    content, offsets
        The bytes of row i are ``content[offsets[i]:offsets[i + 1]]``.
    sizes
        How many bytes each row has, -1 where it has no value at all.
    is_one_field
        Whether a row's bytes are the content of one field of the list, so that its tag and length
        come before them; False where they are whole fields.
    """

    kind: int
    content: Bytes
    offsets: Index
    sizes: Index
    is_one_field: bool


def payload_of(column: pa.Array, name: str, first_row: int = 0) -> Payload:
    """The payload of a column of any type for which `kind_of` knows a list.

    Raises
    ------
    InputError
        Where the type is another, or an array holds a null; rows are counted from ``first_row``.
    """
    kind = kind_of(column.type)
    if kind is None:
        raise InputError(f"column {name!r} has the type {column.type}, which no record can hold")
    given = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    values = column.drop_null() if column.null_count else column
    if not is_list(values.type):
        content, offsets = _content(values, kind)
        return _spread(Payload(kind, content, offsets, np.diff(offsets), True), given, len(column))
    values, places = _flat(values)
    if values.null_count:
        _refuse_null(values, places, given + first_row, name)
    content, offsets = _content(values, kind)
    if kind == BYTES:
        content, offsets = _as_fields(content, offsets)
    offsets = offsets[places]
    whole = Payload(kind, content, offsets, np.diff(offsets), kind != BYTES)
    return _spread(whole, given, len(column))


def _spread(given: Payload, rows: Index, count: int) -> Payload:
    """A payload of ``count`` rows from that of the ``rows`` that have a value."""
    if len(rows) == count:
        return given
    sizes = np.full(count, -1)
    sizes[rows] = given.sizes
    offsets = offsets_of(np.maximum(sizes, 0))
    return Payload(given.kind, given.content, offsets, sizes, given.is_one_field)


def _flat(lists: pa.Array) -> tuple[pa.Array, Index]:
    """The elements of lists without nulls, and where each list begins among them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = pc.list_value_length(lists).cast(pa.int64()).to_numpy()
    return lists.flatten(), offsets_of(lengths)


def _refuse_null(values: pa.Array, places: Index, rows: Index, name: str) -> None:
    first = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
    row = rows[np.searchsorted(places, first, side="right") - 1]
    raise InputError(
        f"column {name!r} holds a null inside the array of row {row} (counting from 0): a record "
        "holds no nulls in lists. Fill or drop them first, e.g. with array_compact()"
    )


def _content(values: pa.Array, kind: int) -> tuple[Bytes, Index]:
    """The bytes of values without nulls, and where each begins."""
    import pyarrow as pa

    if kind == INT64:
        return encoded(_integers(values))
    if kind == BYTES:
        if pa.types.is_fixed_size_binary(values.type):
            values = values.cast(pa.binary())
        return bytes_of(values.cast(pa.large_binary()))
    content = _floats(values).view(np.uint8)
    return content, np.arange(len(values) + 1, dtype=np.int64) * 4


def _integers(values: pa.Array) -> Index:
    """Dates as days and timestamps as microseconds, both since 1970."""
    import pyarrow as pa

    if pa.types.is_date(values.type):
        values = values.cast(pa.date32()).cast(pa.int32())
    elif pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us", values.type.tz))
    return np.ascontiguousarray(values.cast(pa.int64()).to_numpy())


def _floats(values: pa.Array) -> npt.NDArray[np.float32]:
    import pyarrow as pa

    if pa.types.is_decimal(values.type):
        values = values.cast(pa.float64())
    # What float32 cannot hold becomes infinite, as in protobuf itself.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values.to_numpy(), "<f4")


def _as_fields(content: Bytes, offsets: Index) -> tuple[Bytes, Index]:
    """Every value as a field of its own: tag, length, bytes."""
    heads = per_size(np.diff(offsets), lambda sizes: [b"\x0a" + varint(s) for s in sizes.tolist()])
    return bytes_of(joined([heads, rows_of(content, offsets)]))
