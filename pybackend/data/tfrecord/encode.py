"""Arrow batches as TFRecord files hold them: one tf.train.Example per row, framed.

The bytes are those of protobuf's deterministic serialization: features in the order of their
names' bytes, numbers packed. A null is a feature that the record lacks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pybackend.data.tfrecord.crc import Checksums, masked_crcs
from pybackend.data.tfrecord.framing import FOOT, HEAD, heads_of
from pybackend.data.tfrecord.payload import Payload, payload_of
from pybackend.data.tfrecord.pieces import Bytes, Index, bytes_of, joined, per_size, pieces
from pybackend.data.tfrecord.types import BYTES
from pybackend.data.tfrecord.varint import varint

if TYPE_CHECKING:
    import pyarrow as pa

# All messages around a list, and what is in it, are fields of this wire type: bytes of a length.
_LENGTH_DELIMITED = 2
_FIRST = b"\x0a"
_SECOND = b"\x12"


class Framed(NamedTuple):
    """Records as a file holds them.

    Attributes
    ----------
    content, offsets
        Their bytes, and where each begins; the last entry is their end.
    checksums
        Those of their data.
    """

    content: Bytes
    offsets: Index
    checksums: Checksums


def framed(batch: pa.RecordBatch, first_row: int = 0) -> Framed:
    """All records of a batch.

    Parameters
    ----------
    first_row
        The number of the first row in messages.

    Raises
    ------
    InputError
        As in `payload_of`.
    """
    import pyarrow as pa

    columns = []
    sizes = np.zeros(batch.num_rows, np.int64)
    for name in sorted(batch.schema.names, key=_order):
        payload = payload_of(batch.column(name), name, first_row)
        heads = per_size(payload.sizes, partial(_entry_heads, name.encode(), payload))
        sizes += np.maximum(payload.sizes, 0) + np.diff(bytes_of(heads)[1])
        columns += [heads, pieces(payload.content, payload.offsets)]
    foot = pa.scalar(bytes(FOOT), pa.large_binary())
    content, offsets = bytes_of(joined([per_size(sizes, _record_heads), *columns, foot]))
    content = np.require(content, requirements="W")
    return Framed(content, offsets, _with_checksums(content, offsets))


def _order(name: str) -> tuple[int, ...]:
    # By their bytes, but of two names that begin alike, the longer comes first: so protobuf's own
    # Python has it, which sorts them from behind.
    return (*name.encode(), 256)


def _record_heads(sizes: Index) -> list[bytes]:
    """The frame's head and that of Example's one field, before ``sizes`` bytes of features."""
    fields = [_FIRST + varint(size) for size in sizes.tolist()]
    lengths = sizes + np.array([len(field) for field in fields], np.int64)
    frames = heads_of(lengths)
    return [frame + field for frame, field in zip(frames, fields, strict=True)]


def _entry_heads(key: bytes, payload: Payload, sizes: Index) -> list[bytes]:
    """What comes before payloads of these sizes, from the map's entry to the list's one field."""
    name = _FIRST + varint(len(key)) + key
    return [b"" if size < 0 else _entry_head(name, payload, size) for size in sizes.tolist()]


def _entry_head(name: bytes, payload: Payload, size: int) -> bytes:
    # From the inside out: every message begins with the length of what is in it. Numbers are one
    # packed field, which an empty list has not.
    is_there = payload.is_one_field and (size > 0 or payload.kind == BYTES)
    field = _FIRST + varint(size) if is_there else b""
    tag = bytes([payload.kind << 3 | _LENGTH_DELIMITED])
    values = tag + varint(len(field) + size) + field
    feature = name + _SECOND + varint(len(values) + size) + values
    return _FIRST + varint(len(feature) + size) + feature


def _with_checksums(content: Bytes, offsets: Index) -> Checksums:
    """The data's checksums, which are also written behind them."""
    starts, ends = offsets[:-1] + HEAD, offsets[1:] - FOOT
    found = masked_crcs(content, starts, ends - starts)
    for place in range(FOOT):
        content[ends + place] = (found >> np.uint32(8 * place)).astype(np.uint8)
    return found
