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
from pybackend.core.words import show

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
    blocks = -(-lengths // _BLOCK)
    padding = blocks * _BLOCK - lengths
    firsts = np.cumsum(blocks) - blocks
    begun = blocks > 0
    registers = np.zeros(int(blocks.sum()), np.uint32)
    registers[firsts[begun]] = _build_start_registers()[padding[begun]]
    cleared = np.zeros(len(registers), np.int64)
    cleared[firsts[begun]] = padding[begun]
    begins = np.repeat(starts - padding - firsts * _BLOCK, blocks)
    begins += np.arange(len(registers)) * _BLOCK
    _apply_blocks(data, begins, cleared, registers)
    return _join(registers, firsts, blocks) ^ _ONES


def _apply_blocks(data: Bytes, begins: Index, cleared: Index, registers: Checksums) -> None:
    """Update every register with its block, whose first ``cleared`` bytes count as zeros."""
    padded = np.concatenate([np.zeros(_BLOCK, np.uint8), data])
    windows = np.lib.stride_tricks.sliding_window_view(padded, _BLOCK)
    for first in range(0, len(registers), _TOGETHER):
        group = slice(first, first + _TOGETHER)
        matrix = windows[begins[group] + _BLOCK]
        _apply_zeros(matrix, cleared[group])
        registers[group] = _apply_table(matrix, registers[group])


def _join(of_blocks: Checksums, firsts: Index, blocks: Index) -> Checksums:
    """Combine the registers of blocks into registers of pieces."""
    register = np.full(len(blocks), _ONES)
    # The longest first, so that the pieces with a block left are always at the front.
    order = np.argsort(-blocks, kind="stable")
    left = -blocks[order]
    for number in range(int(blocks.max(initial=0))):
        rows = order[: np.searchsorted(left, -number)]
        following = of_blocks[firsts[rows] + number]
        register[rows] = following if number == 0 else _skip_zeros(register[rows]) ^ following
    return register


def _apply_zeros(matrix: Bytes, counts: Index) -> None:
    """Set the first bytes of rows to zero: the block begins before its piece."""
    reach = np.flatnonzero(counts)
    part = matrix[reach]
    part[np.arange(_BLOCK) < counts[reach, None]] = 0
    matrix[reach] = part


def _apply_table(matrix: Bytes, register: Checksums) -> Checksums:
    """Return the registers after each has processed a row of bytes, two bytes per step."""
    _, two = _build_tables()
    for pair in np.ascontiguousarray(matrix.view("<u2").T):
        register = two[(register ^ pair) & np.uint32(0xFFFF)] ^ (register >> np.uint32(16))
    return register


def _skip_zeros(register: Checksums) -> Checksums:
    """Return the registers after a block of zeros: the sum over the bytes of a register."""
    table = _build_block_table()
    found: Checksums = table[0][register & np.uint32(0xFF)]
    for byte in range(1, 4):
        found = found ^ table[byte][(register >> np.uint32(8 * byte)) & np.uint32(0xFF)]
    return found


@functools.cache
def _build_block_table() -> Checksums:
    """Return how a block of zeros changes a register with one byte set, by position and byte."""
    low = np.arange(256, dtype=np.uint32)
    registers = np.concatenate([low << np.uint32(8 * byte) for byte in range(4)])
    zeros = np.zeros((len(registers), _BLOCK), np.uint8)
    table: Checksums = np.reshape(_apply_table(zeros, registers), (4, 256))
    return table


@functools.cache
def _build_start_registers() -> Checksums:
    """Return, for each n, the register that n zero bytes turn into the start value, all ones."""
    one, _ = _build_tables()
    last_byte = {int(changed) >> 24: low for low, changed in enumerate(one)}
    found = [0xFFFFFFFF]
    for _ in range(_BLOCK):
        low = last_byte[found[-1] >> 24]
        found.append(((found[-1] ^ int(one[low])) << 8) | low)
    return np.array(found, np.uint32)


@functools.cache
def _build_tables() -> tuple[Checksums, Checksums]:
    """Return how one byte, and how two bytes, change the register."""
    one = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        one = np.where(one & 1, (one >> np.uint32(1)) ^ np.uint32(_POLYNOMIAL), one >> np.uint32(1))
    low = np.arange(1 << 16, dtype=np.uint32)
    half = one[low & np.uint32(0xFF)] ^ (low >> np.uint32(8))
    return one, one[half & np.uint32(0xFF)] ^ (half >> np.uint32(8))


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

    The lengths are not verified; use `find_wrong_head`.
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


def find_wrong_head(content: bytes, starts: Index, lengths: Index) -> int | None:
    """Return the first record whose length does not match its checksum, or None."""
    distinct, which = np.unique(lengths, return_inverse=True)
    expected = np.frombuffer(b"".join(build_heads(distinct)), np.uint8).reshape(-1, HEAD)
    found = slide_window(np.frombuffer(content, np.uint8), HEAD)[starts - HEAD]
    return _find_first((found != expected[which]).any(axis=1))


def find_wrong_data(content: bytes, starts: Index, lengths: Index) -> int | None:
    """Return the first record whose data does not match its checksum, or None."""
    computed = compute_masked_crcs(np.frombuffer(content, np.uint8), starts, lengths)
    return _find_first(read_checksums(content, starts, lengths) != computed)


def read_checksums(content: bytes, starts: Index, lengths: Index) -> Checksums:
    """Return the checksums that are stored after the records' data."""
    found = slide_window(np.frombuffer(content, np.uint8), FOOT)[starts + lengths]
    stored: Checksums = found.view("<u4").reshape(-1)
    return stored


def slide_window(data: Bytes, width: int) -> Bytes:
    """Return a view of all windows of ``width`` bytes, indexed by their first byte."""
    if len(data) < width:
        return np.empty((0, width), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(data, width)


def _find_first(wrong: Flags) -> int | None:
    return int(np.argmax(wrong)) if wrong.any() else None


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
    if compression is None or compression in _WINDOW:
        return compression  # type: ignore[no-any-return]
    raise InputError(
        f"`compression` must be {show(None)}, {show('gzip')} or {show('zlib')}, not "
        f"{show(compression)}"
    )


def recognize_compression(first_bytes: bytes) -> Compression:
    """Raise `ValueError` if a file with these first bytes is not a TFRecord file."""
    if not first_bytes or read_first_length(first_bytes) is not None:
        return None
    if first_bytes[:2] == b"\x1f\x8b":
        return "gzip"
    # A zlib stream begins with its method, 8, and its first two bytes are a multiple of 31.
    if first_bytes[0] & 0xF == 8 and int.from_bytes(first_bytes[:2], "big") % 31 == 0:
        return "zlib"
    raise ValueError(f"it begins with {first_bytes[:HEAD].hex(' ')}, which is not a record header")


def check_head(first_bytes: bytes, uri: str) -> Compression:
    """Return the compression of the file at ``uri``, which begins with these bytes."""
    try:
        return recognize_compression(first_bytes)
    except ValueError as error:
        raise InputError(f"{uri} is not a TFRecord file: {error}") from error


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
        """Return the next ``size`` bytes of the content; fewer only at its end.

        Raises `ValueError` if the stream is damaged or truncated.
        """
        parts: list[bytes] = []
        while size > 0 and (part := self._read_some(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _read_some(self, size: int) -> bytes:
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
        row = find_wrong_head(self.content, self.starts, self.lengths)
        if row is not None:
            raise self.report_damage("length", row)

    def check(self) -> Checksums:
        """Verify and return the data checksums; an `InputError` names the first mismatch."""
        row = find_wrong_data(self.content, self.starts, self.lengths)
        if row is not None:
            raise self.report_damage("data", row)
        return read_checksums(self.content, self.starts, self.lengths)
