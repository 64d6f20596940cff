"""Read the values in lists of features: numbers, packed or not, and strings of bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pybackend.data.tfrecord.chunks import Chunk
from pybackend.data.tfrecord.features import Lists, malformed_error, parse_record_fields
from pybackend.data.tfrecord.message import FIXED32, LENGTH_DELIMITED, VARINT
from pybackend.data.tfrecord.pieces import Bytes, Index, cut_bytes, get_bytes, to_offsets
from pybackend.data.tfrecord.types import BYTES, FLOAT, INT64
from pybackend.data.tfrecord.varint import Flags, decode_varints

if TYPE_CHECKING:
    import pyarrow as pa

_ITEM = 1
# The wire types of values of a kind: of a field with several of them, and of one.
_WIRES = {
    BYTES: (LENGTH_DELIMITED, LENGTH_DELIMITED),
    FLOAT: (LENGTH_DELIMITED, FIXED32),
    INT64: (LENGTH_DELIMITED, VARINT),
}
_FLOAT_BYTES = 4


def read_values(chunk: Chunk, lists: Lists, kind: int) -> tuple[pa.Array, Index]:
    """Return all values of lists of one kind, and the number of values of each list.

    Returns
    -------
    values
        An Arrow array of ``large_binary``, ``float`` or ``int64``.
    counts
        An entry per list.

    Raises
    ------
    InputError
        Names the record whose list is malformed.
    """
    import pyarrow as pa

    items = parse_record_fields(chunk, lists.records, lists.starts, lists.ends)
    items = items.where(items.numbers == _ITEM)
    wrong = ~np.isin(items.wires, _WIRES[kind])
    rows = cut_bytes(np.frombuffer(chunk.content, np.uint8), items.starts, items.ends)
    if kind == BYTES:
        values, sizes = rows, np.ones(len(rows), np.int64)
    else:
        numbers, sizes, broken = _READERS[kind](*get_bytes(rows))
        values, wrong = pa.array(numbers), wrong | broken
    if wrong.any():
        raise malformed_error(chunk, int(lists.records[items.owners[np.argmax(wrong)]]))
    counts = np.bincount(items.owners, sizes, len(lists.records)).astype(np.int64)
    return values, counts


def _read_floats(content: Bytes, offsets: Index) -> Numbers:
    lengths = np.diff(offsets)
    whole = content[: len(content) // _FLOAT_BYTES * _FLOAT_BYTES]
    return whole.view("<f4"), lengths // _FLOAT_BYTES, lengths % _FLOAT_BYTES != 0


def _read_integers(content: Bytes, offsets: Index) -> Numbers:
    lengths = np.diff(offsets)
    is_last = content <= 0x7F
    if is_last.all():
        return content.astype(np.int64), lengths, np.zeros(len(lengths), np.bool_)
    places = to_offsets(is_last.astype(np.int64))[offsets]
    begins = np.append(0, np.flatnonzero(is_last) + 1)[: places[-1]]
    values, _, whole = decode_varints(content, begins)
    broken = np.zeros(len(lengths), np.bool_)
    broken[np.searchsorted(places, np.flatnonzero(~whole), side="right") - 1] = True
    # A row that ends inside a number would continue in the next row.
    broken[lengths > 0] |= ~is_last[offsets[1:][lengths > 0] - 1]
    return values, np.diff(places), broken


# Numbers, how many each row of bytes has, and which rows contain an incomplete one.
Numbers = tuple[npt.NDArray[Any], Index, Flags]
_READERS: dict[int, Callable[[Bytes, Index], Numbers]] = {
    FLOAT: _read_floats,
    INT64: _read_integers,
}
