"""Records encoded by hand, for tests of readers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pybackend.core.data.tfrecord.framing import build_heads, compute_masked_crcs
from pybackend.core.data.tfrecord.protobuf import encode_one


def field(number: int, content: bytes) -> bytes:
    """Encode a field that has a length: bytes, a message, or packed numbers."""
    return encode_one(number << 3 | 2) + encode_one(len(content)) + content


def entry(name: str, kind: int, values: bytes) -> bytes:
    """Encode the field of Features with one feature; ``values`` is the content of its list."""
    return field(1, field(1, name.encode()) + field(2, field(kind, values)))


def example(*entries: bytes) -> bytes:
    """Encode a message Example."""
    return field(1, b"".join(entries))


def frame(data: bytes) -> bytes:
    """Encode a record of a TFRecord file."""
    whole = np.frombuffer(data, np.uint8)
    crc = compute_masked_crcs(whole, np.array([0]), np.array([len(data)]))
    return build_heads(np.array([len(data)]))[0] + data + crc.astype("<u4").tobytes()


def write(path: Path, records: Iterable[bytes]) -> str:
    """Write a file of these records; return its path."""
    path.write_bytes(b"".join(map(frame, records)))
    return str(path)
