"""Compressed TFRecord files: the whole file is one gzip or zlib stream."""

from __future__ import annotations

import zlib
from typing import Any, Literal

from pybackend.core.data.tfrecord.framing import HEAD, read_first_length
from pybackend.core.errors import InputError
from pybackend.core.words import show

Compression = Literal["gzip", "zlib"] | None

SUFFIX = {None: "", "gzip": ".gz", "zlib": ".zlib"}
_WINDOW = {"gzip": 31, "zlib": 15}
# The fastest level: records are read more often than written, but by cores that would be idle.
_LEVEL = 1
_READ_BYTES = 1 << 20


def check_compression(compression: Any) -> Compression:
    """Return a valid compression; raise ``InputError`` for other values."""
    if compression is None or compression in _WINDOW:
        return compression  # type: ignore[no-any-return]
    raise InputError(
        f"`compression` must be {show(None)}, {show('gzip')} or {show('zlib')}, not "
        f"{show(compression)}"
    )


def recognize_compression(first_bytes: bytes) -> Compression:
    """Return the compression of a file with these first bytes.

    Raises
    ------
    ValueError
        It is not a TFRecord file.
    """
    if not first_bytes or read_first_length(first_bytes) is not None:
        return None
    if first_bytes[:2] == b"\x1f\x8b":
        return "gzip"
    # A zlib stream begins with its method, 8, and its first two bytes are a multiple of 31.
    if first_bytes[0] & 0xF == 8 and int.from_bytes(first_bytes[:2], "big") % 31 == 0:
        return "zlib"
    raise ValueError(f"it begins with {first_bytes[:HEAD].hex(' ')}, which is not a record header")


class CompressingWriter:
    """Writer that compresses content into a file; call `finish` at the end."""

    def __init__(self, file: Any, compression: str) -> None:
        self._file = file
        self._stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW[compression])

    def write(self, content: Any) -> None:
        """Compress and write content."""
        self._file.write(self._stream.compress(content))

    def finish(self) -> None:
        """Write the end of the stream."""
        self._file.write(self._stream.flush())


class DecompressingReader:
    """Reader of a compressed file that has one or several consecutive streams."""

    def __init__(self, file: Any, compression: str) -> None:
        self._file = file
        self._window = _WINDOW[compression]
        self._stream = zlib.decompressobj(self._window)
        self._left = b""

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes of the content; fewer only at its end.

        Raises
        ------
        ValueError
            The stream is damaged or truncated.
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
