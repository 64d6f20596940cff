"""Encode Arrow batches for TFRecord files: one framed tf.train.Example per row.

The bytes match protobuf's deterministic serialization: features are sorted by the bytes of their
names, and numbers are packed. A null is stored by leaving the feature out of the record.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pybackend.core.data.arrays import to_offsets
from pybackend.core.data.arrow import get_bytes, measure_lists
from pybackend.core.data.files import open_file
from pybackend.core.data.tfrecord import framing
from pybackend.core.data.tfrecord import protobuf as pb
from pybackend.core.data.tfrecord.framing import Bytes, Checksums, Index
from pybackend.core.errors import InputError
from pybackend.core.words import row_number, show

_FIRST = b"\x0a"
_SECOND = b"\x12"
# The number of a record and its offset.
Mark = tuple[int, int]
Marks = tuple[Mark, ...]
# Size of rows that are encoded together, so that they stay in the processor's cache.
_BYTES_TOGETHER = 4 << 20
_MARK_BYTES = 1 << 20


@dataclass(frozen=True)
class Payload:
    """The values of one feature; the bytes of row i are ``content[offsets[i]:offsets[i + 1]]``."""

    kind: int  # number of the list in the message Feature
    content: Bytes
    offsets: Index
    sizes: Index  # bytes in each row; -1 for a row without a value
    # A row's bytes are only the content of one field of the list, which still needs its tag and
    # length, rather than complete fields.
    is_one_field: bool


def build_payload(column: pa.Array, name: str, first_row: int = 0) -> Payload:
    """Build the payload of a column.

    Raises `InputError` if a record cannot hold the type, or an array has a null; row numbers start
    at ``first_row``.
    """
    kind = pb.choose_list(column.type)
    if kind is None:
        raise InputError(
            f"column {show(name)} has the type {column.type}, which a TFRecord cannot store"
        )
    given = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    values = column.drop_null() if column.null_count else column
    starts: Any = slice(None)  # of the rows' values
    if is_list := pb.is_list(values.type):
        values, starts = values.flatten(), to_offsets(measure_lists(values))
        if values.null_count:
            _reject_null(values, starts, given + first_row, name)
    content, offsets = _encode_values(values, kind)
    if is_list and kind == pb.BYTES:
        # Each value is one field: tag, length, bytes.
        heads = pb.build_per_size(np.diff(offsets), _build_field_heads)
        content, offsets = get_bytes(pb.join_columns([heads, pb.split_bytes(content, offsets)]))
    sizes = np.full(len(column), -1)
    sizes[given] = np.diff(offsets[starts])
    is_one_field = not is_list or kind != pb.BYTES
    return Payload(kind, content, to_offsets(np.maximum(sizes, 0)), sizes, is_one_field)


def _reject_null(values: pa.Array, starts: Index, rows: Index, name: str) -> None:
    first = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
    row = rows[np.searchsorted(starts, first, side="right") - 1]
    raise InputError(
        f"column {show(name)} has a null in the array of {row_number(row)}, but lists in a "
        "TFRecord cannot contain nulls. Fill or drop them first, e.g. with array_compact()"
    )


def _encode_values(values: pa.Array, kind: int) -> tuple[Bytes, Index]:
    """Return the bytes of values without nulls, and the start of each value."""
    if kind == pb.INT64:
        return pb.encode_varints(_to_integers(values))
    if kind == pb.BYTES:
        if pa.types.is_fixed_size_binary(values.type):
            values = values.cast(pa.binary())
        return get_bytes(values.cast(pa.large_binary()))
    return _to_floats(values).view(np.uint8), np.arange(len(values) + 1, dtype=np.int64) * 4


def _to_integers(values: pa.Array) -> Index:
    """Convert dates to days and timestamps to microseconds, both since 1970."""
    if pa.types.is_date(values.type):
        values = values.cast(pa.date32()).cast(pa.int32())
    elif pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us", values.type.tz))
    return np.ascontiguousarray(values.cast(pa.int64()).to_numpy())


def _to_floats(values: pa.Array) -> npt.NDArray[np.float32]:
    if pa.types.is_decimal(values.type):
        values = values.cast(pa.float64())
    # Numbers beyond float32 become infinite, as in protobuf.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values.to_numpy(), "<f4")


class EncodedBatch(NamedTuple):
    """Records as the bytes to write to a file."""

    content: Bytes
    offsets: Index  # the start of each record, and the end
    checksums: Checksums  # of the data of each record


def encode_batch(batch: pa.RecordBatch, first_row: int = 0) -> EncodedBatch:
    """Encode all rows of a batch; ``first_row`` is the number of the first, for `build_payload`."""
    columns = []
    sizes = np.zeros(batch.num_rows, np.int64)
    for name in sorted(batch.schema.names, key=_sort_key):
        payload = build_payload(batch.column(name), name, first_row)
        heads = pb.build_per_size(payload.sizes, partial(_build_entries, name.encode(), payload))
        sizes += np.maximum(payload.sizes, 0) + np.diff(get_bytes(heads)[1])
        columns += [heads, pb.split_bytes(payload.content, payload.offsets)]
    foot = pa.scalar(bytes(framing.FOOT), pa.large_binary())
    heads = pb.build_per_size(sizes, _build_record_heads)
    content, offsets = get_bytes(pb.join_columns([heads, *columns, foot]))
    content = np.require(content, requirements="W")
    return EncodedBatch(content, offsets, _write_checksums(content, offsets))


def _sort_key(name: str) -> tuple[int, ...]:
    # By their bytes, but if one name is a prefix of the other, the longer one comes first: this is
    # the order of protobuf's Python package, which sorts them from the end.
    return (*name.encode(), 256)


def _build_field_heads(sizes: Index) -> list[bytes]:
    return [_FIRST + pb.encode_one(size) for size in sizes.tolist()]


def _build_record_heads(sizes: Index) -> list[bytes]:
    """Return the headers of the frame and of Example's only field, for features of these sizes."""
    fields = _build_field_heads(sizes)
    frames = framing.build_heads(sizes + np.array([len(field) for field in fields], np.int64))
    return [frame + field for frame, field in zip(frames, fields, strict=True)]


def _build_entries(key: bytes, payload: Payload, sizes: Index) -> list[bytes]:
    """Return the bytes that precede payloads of these sizes, from map entry to list field."""
    name = _FIRST + pb.encode_one(len(key)) + key
    return [b"" if size < 0 else _build_entry_head(name, payload, size) for size in sizes.tolist()]


def _build_entry_head(name: bytes, payload: Payload, size: int) -> bytes:
    # From the inside out: every message begins with the length of its content. Numbers are one
    # packed field, which an empty list does not have.
    is_there = payload.is_one_field and (size > 0 or payload.kind == pb.BYTES)
    field = _FIRST + pb.encode_one(size) if is_there else b""
    # All messages around a list, and its content, are fields of this wire type.
    tag = bytes([payload.kind << 3 | pb.LENGTH_DELIMITED])
    values = tag + pb.encode_one(len(field) + size) + field
    feature = name + _SECOND + pb.encode_one(len(values) + size) + values
    return _FIRST + pb.encode_one(len(feature) + size) + feature


def _write_checksums(content: Bytes, offsets: Index) -> Checksums:
    """After each record's data."""
    starts, ends = offsets[:-1] + framing.HEAD, offsets[1:] - framing.FOOT
    found = framing.compute_masked_crcs(content, starts, ends - starts)
    for byte in range(framing.FOOT):
        content[ends + byte] = (found >> np.uint32(8 * byte)).astype(np.uint8)
    return found


@dataclass(frozen=True)
class RecordFile:
    """A file of records."""

    name: str  # in its folder
    rows: int  # number of records
    size: int  # bytes
    # CRC-32 of the concatenated record checksums, 4 bytes each: as reliable as a CRC of the whole
    # file, and cheap.
    checksum: int
    marks: Marks = ()  # at which a reader can begin; none if the file is compressed


def write_part(
    batches: Iterable[pa.RecordBatch], uri: str, name: str, compression: framing.Compression = None
) -> RecordFile | None:
    """Write a file; if there are no rows, write nothing and return None."""
    slices = _slice_batches(batches)
    first = next(slices, None)
    if first is None:
        return None
    rows, start, size, checksum = 0, 0, 0, 0
    marks: list[Mark] = []
    packer = framing.make_compressor(compression)
    with closing(open_file(uri, "wb")) as file:
        for batch in chain([first], slices):
            some = encode_batch(batch, rows)
            if packer is None:
                marks += place_marks(some.offsets[:-1], rows, start)
            content = some.content.data if packer is None else packer.compress(some.content.data)
            file.write(content)
            size += len(content)
            checksum = update_checksum(some.checksums, checksum)
            rows, start = rows + batch.num_rows, start + len(some.content)
        if packer is not None:
            rest = packer.flush()
            file.write(rest)
            size += len(rest)
    return RecordFile(name, rows, size, checksum, tuple(marks))


def update_checksum(checksums: Checksums, before: int = 0) -> int:
    """Return the checksum of a `RecordFile` with these records, given the one ``before`` them."""
    return zlib.crc32(checksums.astype("<u4").tobytes(), before)


def place_marks(offsets: Index, row: int, start: int) -> list[Mark]:
    """Return marks for the first of some records and about one per megabyte.

    ``offsets`` are the starts of the records, relative to the offset ``start``; ``row`` is the
    number of the first.
    """
    chosen = np.searchsorted(offsets, np.arange(0, offsets[-1] + 1, _MARK_BYTES))
    return [(row + int(index), start + int(offsets[index])) for index in np.unique(chosen)]


def _slice_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rows = max(1, batch.num_rows * _BYTES_TOGETHER // max(1, batch.nbytes))
        for first in range(0, batch.num_rows, rows):
            yield batch.slice(first, rows)
