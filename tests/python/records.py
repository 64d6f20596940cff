"""Records made by hand, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pybackend.data.tfrecord.crc import compute_masked_crcs
from pybackend.data.tfrecord.framing import build_heads
from pybackend.data.tfrecord.varint import encode_one


def field(number: int, content: bytes) -> bytes:
    """A field that has a length: bytes, a message, or packed numbers."""
    return encode_one(number << 3 | 2) + encode_one(len(content)) + content


def entry(name: str, kind: int, values: bytes) -> bytes:
    """The field of Features that holds one feature; ``values`` is the content of its list."""
    return field(1, field(1, name.encode()) + field(2, field(kind, values)))


def example(*entries: bytes) -> bytes:
    """A message Example."""
    return field(1, b"".join(entries))


def frame(data: bytes) -> bytes:
    """A record of a TFRecord file."""
    whole = np.frombuffer(data, np.uint8)
    crc = compute_masked_crcs(whole, np.array([0]), np.array([len(data)]))
    return build_heads(np.array([len(data)]))[0] + data + crc.astype("<u4").tobytes()


def write(path: Path, records: Iterable[bytes]) -> str:
    """A file of these records; its path."""
    path.write_bytes(b"".join(map(frame, records)))
    return str(path)
