"""The format of a TFRecord file: records with their CRC-32C, chunks of them, and compression.

The checksum is computed with google-crc32c if its C extension is installed, otherwise with numpy.
It is linear: leading zero bytes do not change a register that is zero. So all pieces can be cut
into blocks of equal length, which are looked up in the table in lockstep.

A record is its length (8 bytes, little-endian), the length's masked CRC-32C (4 bytes), the data,
and the data's masked CRC-32C (4 bytes). A compressed file is one gzip or zlib stream.
"""

from __future__ import annotations

import functools
import importlib
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import check_choice

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Checksums = npt.NDArray[np.uint32]

_POLYNOMIAL = 0x82F63B78
_ONES = np.uint32(0xFFFFFFFF)
_MASK_DELTA = np.uint32(0xA282EAD8)
_BLOCK = 256
# Blocks that go through the table together: their bytes fit into the processor's cache.
_TOGETHER = 8192
HEAD, FOOT = 12, 4
_LENGTH = 8
# After this many records of one length, the next ones are expected to have the same length.
_STREAK = 32
Compression = Literal["gzip", "zlib"] | None
SUFFIX = {None: "", "gzip": ".gz", "zlib": ".zlib"}
_WINDOW = {"gzip": 31, "zlib": 15}
# The fastest level: records are read more often than written, but by cores that would be idle.
_LEVEL = 1
_READ_BYTES = 1 << 20


def compute_masked_crcs(data: Bytes, starts: Index, lengths: Index) -> Checksums:
    """Return the masked CRC-32C of ``data[start:start + length]`` for every start and length."""
    if (library := _load_library()) is None:
        crcs = compute_crcs_by_numpy(data, starts, lengths)
    else:
        crcs = compute_crcs_by_library(library, data, starts, lengths)
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + _MASK_DELTA


def compute_crcs_by_library(
    value: Callable[[bytes], int], data: Bytes, starts: Index, lengths: Index
) -> Checksums:
    """``value`` is the library's function for one piece."""
    # The library does not accept views; content that was read from a file is bytes already.
    base: Any = data.base
    is_whole = isinstance(base, bytes) and len(base) == len(data)
    content: bytes = base if is_whole else data.tobytes()
    pieces = map(slice, starts.tolist(), (starts + lengths).tolist())
    # Only C code runs per piece.
    return np.fromiter(map(value, map(content.__getitem__, pieces)), np.uint32, len(starts))


def compute_crcs_by_numpy(data: Bytes, starts: Index, lengths: Index) -> Checksums:
    """The pieces do not overlap."""
    padded = np.concatenate([np.zeros(_BLOCK, np.uint8), data])
    # A register that begins with zeros, instead of ones, needs the first 4 bytes inverted.
    for byte in range(4):
        padded[starts[lengths > byte] + _BLOCK + byte] ^= 0xFF
    windows = np.lib.stride_tricks.sliding_window_view(padded, _BLOCK)
    blocks = -(-lengths // _BLOCK)
    before = blocks * _BLOCK - lengths  # bytes of the first block that precede its piece
    firsts = np.cumsum(blocks) - blocks
    begins = np.repeat(starts - before + _BLOCK - firsts * _BLOCK, blocks)
    begins += np.arange(len(begins)) * _BLOCK
    cleared = np.zeros(len(begins), np.int64)
    cleared[firsts[blocks > 0]] = before[blocks > 0]
    registers = np.empty(len(begins), np.uint32)
    for first in range(0, len(begins), _TOGETHER):
        group = slice(first, first + _TOGETHER)
        matrix, counts = windows[begins[group]], cleared[group, None]
        rows = np.flatnonzero(counts)
        matrix[rows] *= np.arange(_BLOCK) >= counts[rows]
        registers[group] = _apply_table(matrix, np.uint32(0))
    inverted = np.uint64(_ONES) >> (8 * np.minimum(lengths, 4)).astype(np.uint64)
    return _join(registers, firsts, blocks) ^ inverted.astype(np.uint32) ^ _ONES


def _join(of_blocks: Checksums, firsts: Index, blocks: Index) -> Checksums:
    """Combine the registers of blocks into registers of pieces."""
    register = np.zeros(len(blocks), np.uint32)
    # The longest first, so that the pieces with a block left are always at the front.
    order = np.argsort(-blocks, kind="stable")
    left = -blocks[order]
    for number in range(int(blocks.max(initial=0))):
        rows = order[: np.searchsorted(left, -number)]
        register[rows] = _skip_zeros(register[rows]) ^ of_blocks[firsts[rows] + number]
    return register


def _apply_table(matrix: Bytes, register: Any) -> Checksums:
    """Return the registers after each has processed a row of bytes, two bytes per step."""
    table = _build_table()
    for pair in np.ascontiguousarray(matrix.view("<u2").T):
        register = table[(register ^ pair) & np.uint32(0xFFFF)] ^ (register >> np.uint32(16))
    found: Checksums = register
    return found


def _skip_zeros(register: Checksums) -> Checksums:
    """Return the registers after a block of zeros: the sum over the bytes of a register."""
    found = np.zeros_like(register)
    for byte, one in enumerate(_build_block_table()):
        found ^= one[(register >> np.uint32(8 * byte)) & np.uint32(0xFF)]
    return found


@functools.cache
def _build_block_table() -> Checksums:
    """Return how a block of zeros changes a register with one byte set, by position and byte."""
    low = np.arange(256, dtype=np.uint32)
    registers = np.concatenate([low << np.uint32(8 * byte) for byte in range(4)])
    return _apply_table(np.zeros((len(registers), _BLOCK), np.uint8), registers).reshape(4, 256)


@functools.cache
def _build_table() -> Checksums:
    """Return how two bytes change the register."""
    one = np.uint32(1)
    table = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(16):
        table = np.where(table & one, (table >> one) ^ np.uint32(_POLYNOMIAL), table >> one)
    return table


@functools.cache
def _load_library() -> Callable[[bytes], int] | None:
    try:
        library = importlib.import_module("google_crc32c")
    except ImportError:
        return None
    # Its Python implementation is slower than numpy.
    return library.value if library.implementation == "c" else None


def build_heads(lengths: Index) -> list[bytes]:
    """Build the headers (length and checksum) of records with data of these lengths."""
    words = lengths.astype("<u8").view(np.uint8)
    starts = np.arange(len(lengths)) * _LENGTH
    crcs = compute_masked_crcs(words, starts, np.full(len(lengths), _LENGTH))
    table = np.empty((len(lengths), HEAD), np.uint8)
    table[:, :_LENGTH] = words.reshape(-1, _LENGTH)
    table[:, _LENGTH:] = crcs.astype("<u4").view(np.uint8).reshape(-1, HEAD - _LENGTH)
    return [row.tobytes() for row in table]


def find_records(content: bytes) -> tuple[Index, Index, int]:
    """Return the start and length of the data in each complete record, and the last one's end.

    The lengths are not verified; use `Chunk.check_lengths`.
    """
    starts, lengths, at, is_streak = _hop(content, 0)
    parts = [(starts, lengths)]
    while is_streak:
        starts, lengths, at = _stride(content, at, int(lengths[-1]))
        parts.append((starts, lengths))
        starts, lengths, at, is_streak = _hop(content, at)
        parts.append((starts, lengths))
    return np.concatenate([s for s, _ in parts]), np.concatenate([n for _, n in parts]), at


def read_first_length(content: bytes) -> int | None:
    """Return the length of the first record, whose header must be complete; None if damaged."""
    length = int.from_bytes(content[:_LENGTH], "little")
    is_whole = length < 1 << 63 and build_heads(np.array([length]))[0] == content[:HEAD]
    return length if is_whole else None


def slide_window(data: Bytes, width: int) -> Bytes:
    """Return a view of all windows of ``width`` bytes, indexed by their first byte."""
    if len(data) < width:
        return np.empty((0, width), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(data, width)


def _hop(content: bytes, at: int) -> tuple[Index, Index, int, bool]:
    """Find records one by one, up to the end or the first run of records of equal length."""
    starts: list[int] = []
    lengths: list[int] = []
    length_at, limit, streak = struct.Struct("<Q").unpack_from, len(content), 0
    while at + HEAD + FOOT <= limit and streak < _STREAK:
        (length,) = length_at(content, at)
        if at + HEAD + length + FOOT > limit:
            break
        streak = streak + 1 if lengths and length == lengths[-1] else 0
        starts.append(at + HEAD)
        lengths.append(length)
        at += HEAD + length + FOOT
    return np.array(starts, np.int64), np.array(lengths, np.int64), at, streak == _STREAK


def _stride(content: bytes, at: int, length: int) -> tuple[Index, Index, int]:
    """Find the records that follow, for as long as they have the same length."""
    words = slide_window(np.frombuffer(content, np.uint8), _LENGTH)
    stride = HEAD + length + FOOT
    # Double the run each time: a short run costs little, and a long one few steps.
    begin, run = at, _STREAK
    while count := min(run, (len(content) - at) // stride):
        same = words[at : at + count * stride : stride].view("<u8")[:, 0] == length
        matched = count if same.all() else int(np.argmin(same))
        at += matched * stride
        run = 2 * run if matched == count else 0
    starts = np.arange(begin + HEAD, at + HEAD, stride)
    return starts, np.full(len(starts), length), at


def check_compression(compression: Any) -> Compression:
    found: Compression = check_choice("compression", compression, choices=[*SUFFIX])
    return found


def check_head(first_bytes: bytes, uri: str) -> Compression:
    """Return the compression of the file at ``uri``, which begins with these bytes."""
    if not first_bytes or read_first_length(first_bytes) is not None:
        return None
    if first_bytes[:2] == b"\x1f\x8b":
        return "gzip"
    # A zlib stream begins with its method, 8, and its first two bytes are a multiple of 31.
    if first_bytes[0] & 0xF == 8 and int.from_bytes(first_bytes[:2], "big") % 31 == 0:
        return "zlib"
    raise InputError(
        f"{uri} is not a TFRecord file: it begins with {first_bytes[:HEAD].hex(' ')}, which is not "
        "a record header"
    )


def make_compressor(compression: Compression) -> Any:
    """None for a file that is not compressed."""
    if compression is None:
        return None
    return zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW[compression])


class DecompressingReader:
    """Reader of a compressed file that has one or several consecutive streams."""

    def __init__(self, file: Any, compression: str) -> None:
        self._file = file
        self._window = _WINDOW[compression]
        self._stream = zlib.decompressobj(self._window)
        self._left = b""

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes of the content; none only at its end.

        Raises `ValueError` if the stream is damaged or truncated.
        """
        while True:
            if self._stream.eof:
                self._left = self._stream.unused_data or self._left
            self._left = self._left or self._file.read(_READ_BYTES)
            if self._stream.eof:
                if not self._left:
                    return b""
                self._stream = zlib.decompressobj(self._window)
            if not self._left:
                raise ValueError("its compressed stream ends too early: the file is truncated")
            try:
                part = self._stream.decompress(self._left, size)
            except zlib.error as error:
                raise ValueError(f"its compressed stream is damaged: {error}") from error
            self._left = self._stream.unconsumed_tail
            if part:
                return part


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of a file: record i is ``content[starts[i]:starts[i] + lengths[i]]``."""

    file: str  # path, for messages
    first: int  # number of the first record within the file
    begin: int  # offset of `content` in the (decompressed) file
    content: bytes
    starts: Index
    lengths: Index

    def between(self, first: int, last: int) -> Chunk:
        """Return the records numbered ``first`` to ``last`` - 1."""
        rows = slice(max(0, first - self.first), max(0, last - self.first))
        starts, lengths = self.starts[rows], self.lengths[rows]
        return replace(self, first=self.first + rows.start, starts=starts, lengths=lengths)

    def name_record(self, row: int = 0) -> str:
        """Return the file, number and position of a record, for messages."""
        # A record that is longer than its chunk is not yet in `starts`.
        offset = int(self.starts[row]) - HEAD if len(self.starts) else 0
        return f"record {self.first + row} of {self.file} (at byte {self.begin + offset})"

    def report_damage(self, what: str, row: int = 0) -> InputError:
        return InputError(
            f"{self.name_record(row)} is damaged: the checksum of its {what} is wrong. Write or "
            "copy the file again"
        )

    def check_lengths(self) -> None:
        """Verify the checksums of the lengths; an `InputError` names the first mismatch."""
        distinct, which = np.unique(self.lengths, return_inverse=True)
        expected = np.frombuffer(b"".join(build_heads(distinct)), np.uint8).reshape(-1, HEAD)
        found = slide_window(np.frombuffer(self.content, np.uint8), HEAD)[self.starts - HEAD]
        self._reject((found != expected[which]).any(axis=1), "length")

    def check(self) -> Checksums:
        """Verify and return the data checksums; an `InputError` names the first mismatch."""
        data = np.frombuffer(self.content, np.uint8)
        found = slide_window(data, FOOT)[self.starts + self.lengths]
        stored: Checksums = found.view("<u4").reshape(-1)
        self._reject(stored != compute_masked_crcs(data, self.starts, self.lengths), "data")
        return stored

    def _reject(self, wrong: Flags, what: str) -> None:
        if wrong.any():
            raise self.report_damage(what, int(np.argmax(wrong)))
