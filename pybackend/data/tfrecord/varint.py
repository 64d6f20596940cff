"""Variable-length integers of protocol buffers: seven bits per byte, the lowest first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# For 64 bits; a negative number uses all of them.
MOST_BYTES = 10
_LOW = np.uint64(0x7F)


def encode_one(value: int) -> bytes:
    """Encode one number that is not negative."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def encode_varints(values: Index) -> tuple[Bytes, Index]:
    """Return the consecutive bytes of numbers, and the start of each; the last entry is the end."""
    left = values.view(np.uint64)
    if not (left > _LOW).any():
        return values.astype(np.uint8), np.arange(len(values) + 1, dtype=np.int64)
    sizes = _measure(left)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    found = np.empty(offsets[-1], np.uint8)
    places = offsets[:-1]
    while len(left):
        more = left > _LOW
        found[places] = (left & _LOW).astype(np.uint8) | (more.astype(np.uint8) << 7)
        left, places = left[more] >> np.uint64(7), places[more] + 1
    return found, offsets


def _measure(values: npt.NDArray[np.uint64]) -> Index:
    sizes = np.ones(len(values), np.int64)
    for place in range(1, MOST_BYTES):
        longer = values >= np.uint64(1 << 7 * place)
        if not longer.any():
            break
        sizes += longer
    return sizes


def decode_varints(data: Bytes, begins: Index) -> tuple[Index, Index, Flags]:
    """Return the number at each place, its end, and whether it is complete within 10 bytes."""
    first = data.take(begins, mode="clip")
    values = (first & 0x7F).astype(np.uint64)
    ends = begins + 1
    rows = np.flatnonzero(first > 0x7F)
    for place in range(1, MOST_BYTES):
        if not len(rows):
            break
        following = data.take(ends[rows], mode="clip")
        values[rows] |= (following & 0x7F).astype(np.uint64) << np.uint64(7 * place)
        ends[rows] += 1
        rows = rows[following > 0x7F]
    whole = ends <= len(data)
    whole[rows] = False
    return values.view(np.int64), ends, whole
