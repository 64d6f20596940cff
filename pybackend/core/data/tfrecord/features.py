"""The features of a chunk's records: their names, lists and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pybackend.core.data.tfrecord.chunks import Chunk
from pybackend.core.data.tfrecord.framing import slide_window
from pybackend.core.data.tfrecord.protobuf import (
    FIXED32,
    LENGTH_DELIMITED,
    VARINT,
    Bytes,
    Fields,
    Flags,
    Index,
    Malformed,
    cut_bytes,
    decode_varints,
    get_bytes,
    parse_fields,
    to_offsets,
)
from pybackend.core.data.tfrecord.types import BYTES, FLOAT, INT64, LISTS
from pybackend.core.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

# The fields of Example, Features and an entry of its map.
_FEATURES, _ENTRY, _KEY, _VALUE = 1, 1, 1, 2


@dataclass(frozen=True)
class Features:
    """Entries of the records' maps, in the order in which they are stored.

    Attributes
    ----------
    records
        Index, within the chunk, of the record that contains the entry.
    key_starts, key_ends
        Position of its name.
    starts, ends
        Position of its value, the message Feature.
    """

    records: Index
    key_starts: Index
    key_ends: Index
    starts: Index
    ends: Index

    def at(self, rows: Index) -> Features:
        """Return the entries at these indices."""
        return Features(
            self.records[rows],
            self.key_starts[rows],
            self.key_ends[rows],
            self.starts[rows],
            self.ends[rows],
        )


@dataclass(frozen=True)
class Lists:
    """The lists of one feature, in the order of their records; a record has at most one.

    Attributes
    ----------
    records
        Index of the record within the chunk.
    kinds
        Number of the list in the message Feature (`LISTS`).
    starts, ends
        Position of the list.
    """

    records: Index
    kinds: Index
    starts: Index
    ends: Index


def parse_features(chunk: Chunk) -> Features:
    """Return all features of a chunk's records.

    Raises
    ------
    InputError
        Names the first record that is not a tf.train.Example.
    """
    records = np.arange(len(chunk.starts))
    features = parse_record_fields(chunk, records, chunk.starts, chunk.starts + chunk.lengths)
    features = features.messages(_FEATURES)
    records = records[features.owners]
    entries = parse_record_fields(chunk, records, features.starts, features.ends).messages(_ENTRY)
    records = records[entries.owners]
    parts = parse_record_fields(chunk, records, entries.starts, entries.ends)
    keys, values = parts.messages(_KEY), parts.messages(_VALUE)
    # Missing keys and values are empty and lie in their entry, so that places are in order.
    places = np.tile(entries.starts, (4, 1))
    # The last of several wins: it is assigned last.
    places[0, keys.owners], places[1, keys.owners] = keys.starts, keys.ends
    places[2, values.owners], places[3, values.owners] = values.starts, values.ends
    return Features(records, *places)


def select_by_name(chunk: Chunk, features: Features, names: Sequence[str]) -> list[Features]:
    """Return the entries by name; if a record has several, the last one, as in protobuf."""
    numbers = _match_names(np.frombuffer(chunk.content, np.uint8), features, names)
    order = np.argsort(numbers, kind="stable")
    edges = np.searchsorted(numbers[order], np.arange(len(names) + 1))
    found = []
    for first, last in pairwise(edges.tolist()):
        rows = order[first:last]
        records = features.records[rows]
        found.append(features.at(rows[_is_last(records)]))
    return found


def _match_names(data: Bytes, features: Features, names: Sequence[str]) -> Index:
    """Return the index of each entry's name in ``names``; ``len(names)`` if it is absent."""
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = np.full(len(features.records), len(names))
    lengths = features.key_ends - features.key_starts
    keys = [name.encode() for name in names]
    for length in {len(key) for key in keys}:
        rows = np.flatnonzero(lengths == length)
        if not len(rows):
            continue
        kind = pa.binary(length)
        content = pa.py_buffer(
            np.ascontiguousarray(slide_window(data, length)[features.key_starts[rows]])
        )
        found = pa.FixedSizeBinaryArray.from_buffers(kind, len(rows), [None, content])
        wanted = [key if len(key) == length else None for key in keys]
        places = pc.index_in(found, pa.array(wanted, kind), skip_nulls=True)
        numbers[rows] = places.fill_null(len(names)).to_numpy()
    return numbers


def list_names(chunk: Chunk, features: Features) -> list[str]:
    """Return the sorted names of all features; an `InputError` names a record with invalid text."""
    data = np.frombuffer(chunk.content, np.uint8)
    keys = cut_bytes(data, features.key_starts, features.key_ends)
    try:
        return sorted(key.decode() for key in keys.unique().to_pylist())
    except UnicodeDecodeError as error:
        place = keys.to_pylist().index(error.object)
        raise malformed_error(chunk, int(features.records[place])) from error


def parse_lists(chunk: Chunk, features: Features) -> Lists:
    """Return the lists of all features with one name; a Feature without a list counts as absent."""
    fields = parse_record_fields(chunk, features.records, features.starts, features.ends)
    is_list = (fields.wires == LENGTH_DELIMITED) & (fields.numbers <= max(LISTS))
    fields = fields.where(is_list)
    fields = fields.where(_is_last(fields.owners))
    return Lists(features.records[fields.owners], fields.numbers, fields.starts, fields.ends)


def _is_last(owners: Index) -> Flags:
    """Return, for each entry, whether it is the last one of its owner; ``owners`` are sorted."""
    last = np.ones(len(owners), np.bool_)
    last[:-1] = owners[1:] != owners[:-1]
    return last


def parse_record_fields(chunk: Chunk, records: Index, starts: Index, ends: Index) -> Fields:
    """Return the fields of these records' messages; an `InputError` names a malformed record."""
    try:
        return parse_fields(np.frombuffer(chunk.content, np.uint8), starts, ends)
    except Malformed as error:
        raise malformed_error(chunk, int(records[error.owner])) from error


def malformed_error(chunk: Chunk, record: int) -> InputError:
    """Return the error for a record that is not a tf.train.Example."""
    return InputError(
        f"{chunk.name_record(record)} is not a tf.train.Example: only files of such records can "
        "be read as columns"
    )


_ITEM = 1
# The wire types of values of a kind: of a field with several of them, and of one.
_WIRES = {
    BYTES: (LENGTH_DELIMITED, LENGTH_DELIMITED),
    FLOAT: (LENGTH_DELIMITED, FIXED32),
    INT64: (LENGTH_DELIMITED, VARINT),
}
_FLOAT_BYTES = 4


def read_values(chunk: Chunk, lists: Lists, kind: int) -> tuple[pa.Array, Index]:
    """Return all values of lists of one kind, and the number of values in each list.

    Returns
    -------
    values
        An Arrow array of ``large_binary``, ``float`` or ``int64``.
    counts
        One entry per list.

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
