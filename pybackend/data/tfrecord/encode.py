"""Encode Arrow batches for TFRecord files: one framed tf.train.Example per row.

The bytes are those of protobuf's deterministic serialization: features in the order of their
names' bytes, numbers packed. A null is a feature that the record does not have.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pybackend.data.tfrecord.crc import Checksums, compute_masked_crcs
from pybackend.data.tfrecord.framing import FOOT, HEAD, build_heads
from pybackend.data.tfrecord.payload import Payload, build_payload
from pybackend.data.tfrecord.pieces import (
    Bytes,
    Index,
    build_per_size,
    get_bytes,
    join_columns,
    split_bytes,
)
from pybackend.data.tfrecord.types import BYTES
from pybackend.data.tfrecord.varint import encode_one

if TYPE_CHECKING:
    import pyarrow as pa

# All messages around a list, and its content, are fields of this wire type.
_LENGTH_DELIMITED = 2
_FIRST = b"\x0a"
_SECOND = b"\x12"


class EncodedBatch(NamedTuple):
    """Records as bytes of a file.

    Attributes
    ----------
    content, offsets
        Their bytes, and the start of each record; the last entry is the end.
    checksums
        Checksums of their data.
    """

    content: Bytes
    offsets: Index
    checksums: Checksums


def encode_batch(batch: pa.RecordBatch, first_row: int = 0) -> EncodedBatch:
    """Encode all rows of a batch.

    Parameters
    ----------
    first_row
        Number of the first row in messages.

    Raises
    ------
    InputError
        As in `build_payload`.
    """
    import pyarrow as pa

    columns = []
    sizes = np.zeros(batch.num_rows, np.int64)
    for name in sorted(batch.schema.names, key=_sort_key):
        payload = build_payload(batch.column(name), name, first_row)
        heads = build_per_size(payload.sizes, partial(_build_entry_heads, name.encode(), payload))
        sizes += np.maximum(payload.sizes, 0) + np.diff(get_bytes(heads)[1])
        columns += [heads, split_bytes(payload.content, payload.offsets)]
    foot = pa.scalar(bytes(FOOT), pa.large_binary())
    content, offsets = get_bytes(
        join_columns([build_per_size(sizes, _build_record_heads), *columns, foot])
    )
    content = np.require(content, requirements="W")
    return EncodedBatch(content, offsets, _write_checksums(content, offsets))


def _sort_key(name: str) -> tuple[int, ...]:
    # By their bytes, but if one name is a prefix of the other, the longer one comes first: this is
    # the order of protobuf's Python package, which sorts them from the end.
    return (*name.encode(), 256)


def _build_record_heads(sizes: Index) -> list[bytes]:
    """Return the heads of the frame and of Example's one field, for features of these sizes."""
    fields = [_FIRST + encode_one(size) for size in sizes.tolist()]
    lengths = sizes + np.array([len(field) for field in fields], np.int64)
    frames = build_heads(lengths)
    return [frame + field for frame, field in zip(frames, fields, strict=True)]


def _build_entry_heads(key: bytes, payload: Payload, sizes: Index) -> list[bytes]:
    """Return the bytes before payloads of these sizes, from the map's entry to the list's field."""
    name = _FIRST + encode_one(len(key)) + key
    return [b"" if size < 0 else _build_entry_head(name, payload, size) for size in sizes.tolist()]


def _build_entry_head(name: bytes, payload: Payload, size: int) -> bytes:
    # From the inside out: every message begins with the length of its content. Numbers are one
    # packed field, which an empty list does not have.
    is_there = payload.is_one_field and (size > 0 or payload.kind == BYTES)
    field = _FIRST + encode_one(size) if is_there else b""
    tag = bytes([payload.kind << 3 | _LENGTH_DELIMITED])
    values = tag + encode_one(len(field) + size) + field
    feature = name + _SECOND + encode_one(len(values) + size) + values
    return _FIRST + encode_one(len(feature) + size) + feature


def _write_checksums(content: Bytes, offsets: Index) -> Checksums:
    """Write the checksum behind each record's data, and return the checksums."""
    starts, ends = offsets[:-1] + HEAD, offsets[1:] - FOOT
    found = compute_masked_crcs(content, starts, ends - starts)
    for place in range(FOOT):
        content[ends + place] = (found >> np.uint32(8 * place)).astype(np.uint8)
    return found
