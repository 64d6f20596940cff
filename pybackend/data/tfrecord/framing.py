"""Framing of records in a TFRecord file.

A record is its length (8 bytes, little-endian), the length's masked CRC-32C (4 bytes), the data,
and the data's masked CRC-32C (4 bytes).
"""

from __future__ import annotations

import struct

import numpy as np

from pybackend.data.tfrecord.crc import Checksums, compute_masked_crcs
from pybackend.data.tfrecord.pieces import Bytes, Index
from pybackend.data.tfrecord.varint import Flags

HEAD, FOOT = 12, 4
_LENGTH = 8
# After this many records of one length, the next ones are expected to have the same length.
_STREAK = 32


def build_heads(lengths: Index) -> list[bytes]:
    """Build the heads (length and checksum) of records with data of these lengths."""
    words = lengths.astype("<u8").view(np.uint8)
    places = np.arange(len(lengths)) * _LENGTH
    crcs = compute_masked_crcs(words, places, np.full(len(lengths), _LENGTH))
    table = np.empty((len(lengths), HEAD), np.uint8)
    table[:, :_LENGTH] = words.reshape(-1, _LENGTH)
    table[:, _LENGTH:] = crcs.astype("<u4").view(np.uint8).reshape(-1, HEAD - _LENGTH)
    return [row.tobytes() for row in table]


def find_records(content: bytes) -> tuple[Index, Index, int]:
    """Return the start and length of each whole record's data, and the last record's end.

    The lengths are not verified; use `find_wrong_head`.
    """
    starts, lengths, place, is_streak = _hop(content, 0)
    parts = [(starts, lengths)]
    while is_streak:
        starts, lengths, place = _stride(content, place, int(lengths[-1]))
        parts.append((starts, lengths))
        starts, lengths, place, is_streak = _hop(content, place)
        parts.append((starts, lengths))
    return np.concatenate([s for s, _ in parts]), np.concatenate([n for _, n in parts]), place


def read_first_length(content: bytes) -> int | None:
    """Return the length of the first record, whose head must be complete; None if damaged."""
    length = int.from_bytes(content[:_LENGTH], "little")
    is_whole = length < 1 << 63 and build_heads(np.array([length]))[0] == content[:HEAD]
    return length if is_whole else None


def find_wrong_head(content: bytes, starts: Index, lengths: Index) -> int | None:
    """Return the first record whose length does not match its checksum, or None."""
    distinct, places = np.unique(lengths, return_inverse=True)
    expected = np.frombuffer(b"".join(build_heads(distinct)), np.uint8).reshape(-1, HEAD)
    found = slide_window(np.frombuffer(content, np.uint8), HEAD)[starts - HEAD]
    return _find_first((found != expected[places]).any(axis=1))


def find_wrong_data(content: bytes, starts: Index, lengths: Index) -> int | None:
    """Return the first record whose data do not match their checksum, or None."""
    data = np.frombuffer(content, np.uint8)
    return _find_first(
        read_checksums(content, starts, lengths) != compute_masked_crcs(data, starts, lengths)
    )


def read_checksums(content: bytes, starts: Index, lengths: Index) -> Checksums:
    """Return the checksums that are stored behind the records' data."""
    found = slide_window(np.frombuffer(content, np.uint8), FOOT)[starts + lengths]
    stored: Checksums = found.view("<u4").reshape(-1)
    return stored


def slide_window(data: Bytes, width: int) -> Bytes:
    """Return a view of all windows of ``width`` bytes, by their first byte."""
    if len(data) < width:
        return np.empty((0, width), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(data, width)


def _find_first(wrong: Flags) -> int | None:
    return int(np.argmax(wrong)) if wrong.any() else None


def _hop(content: bytes, place: int) -> tuple[Index, Index, int, bool]:
    """Find records one by one, up to the end or the first streak of records of one length."""
    starts: list[int] = []
    lengths: list[int] = []
    length_at, limit, streak = struct.Struct("<Q").unpack_from, len(content), 0
    while place + HEAD + FOOT <= limit and streak < _STREAK:
        (length,) = length_at(content, place)
        if place + HEAD + length + FOOT > limit:
            break
        streak = streak + 1 if lengths and length == lengths[-1] else 0
        starts.append(place + HEAD)
        lengths.append(length)
        place += HEAD + length + FOOT
    return np.array(starts, np.int64), np.array(lengths, np.int64), place, streak == _STREAK


def _stride(content: bytes, place: int, length: int) -> tuple[Index, Index, int]:
    """Find the following records as long as they have the same length."""
    words = slide_window(np.frombuffer(content, np.uint8), _LENGTH)
    stride = HEAD + length + FOOT
    # Double the run each time: a short run costs little, and a long one few steps.
    begin, run = place, _STREAK
    while count := min(run, (len(content) - place) // stride):
        same = words[place : place + count * stride : stride].view("<u8")[:, 0] == length
        matched = count if same.all() else int(np.argmin(same))
        place += matched * stride
        run = 2 * run if matched == count else 0
    starts = np.arange(begin + HEAD, place + HEAD, stride)
    return starts, np.full(len(starts), length), place
