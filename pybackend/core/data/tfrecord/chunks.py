"""Read a TFRecord file in chunks of whole records, with bounded memory."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pybackend.core.data.files import open_file
from pybackend.core.data.tfrecord.compression import (
    Compression,
    DecompressingReader,
    recognize_compression,
)
from pybackend.core.data.tfrecord.framing import (
    FOOT,
    HEAD,
    Checksums,
    find_records,
    find_wrong_data,
    find_wrong_head,
    read_checksums,
    read_first_length,
)
from pybackend.core.data.tfrecord.protobuf import Index
from pybackend.core.errors import InputError

# Larger chunks would be allocated again each time, which costs more than it saves.
CHUNK_BYTES = 4 << 20
# protobuf's own limit.
_MOST_BYTES = (1 << 31) - 1
_READ_BYTES = 16 << 20


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of a file.

    Attributes
    ----------
    file
        Path of the file, for messages.
    first, place
        Number of the first record within the file, and the offset of ``content`` in the
        (decompressed) file.
    content, starts, lengths
        The data of record i is ``content[starts[i]:starts[i] + lengths[i]]``.
    """

    file: str
    first: int
    place: int
    content: bytes
    starts: Index
    lengths: Index

    def between(self, first: int, last: int) -> Chunk:
        """Return the records numbered ``first`` to ``last`` - 1."""
        rows = slice(max(0, first - self.first), max(0, last - self.first))
        starts, lengths = self.starts[rows], self.lengths[rows]
        return replace(self, first=self.first + rows.start, starts=starts, lengths=lengths)

    def name_record(self, row: int) -> str:
        """Return the file, number and position of a record, for messages."""
        return _name_record(self, row, int(self.starts[row]) - HEAD)

    def check(self) -> Checksums:
        """Verify and return the data checksums; an `InputError` names the first mismatch."""
        row = find_wrong_data(self.content, self.starts, self.lengths)
        if row is not None:
            raise _damaged_error(self.name_record(row), "data")
        return read_checksums(self.content, self.starts, self.lengths)


def detect_compression(uri: str) -> Compression:
    """Return the compression of a file; raise `InputError` if it is not a TFRecord file."""
    with open_for_reading(uri) as file:
        first_bytes = file.read(HEAD)
    try:
        return recognize_compression(first_bytes)
    except ValueError as error:
        raise InputError(f"{uri} is not a TFRecord file: {error}") from error


def read_chunks(
    uri: str,
    compression: Compression,
    mark: tuple[int, int] = (0, 0),
    size: int = CHUNK_BYTES,
) -> Iterator[Chunk]:
    """Yield a file's records, starting at ``mark``: the number of a record and its offset.

    Only the length checksums are verified; `Chunk.check` verifies the data checksums.

    Raises
    ------
    InputError
        Names the file, and the record and byte at which it is truncated or damaged.
    """
    first, place = mark
    with open_for_reading(uri) as file:
        file.seek(place)
        stream = DecompressingReader(file, compression) if compression else file
        content = _read(uri, stream, size)
        while content:
            starts, lengths, end = find_records(content)
            chunk = Chunk(uri, first, place, content, starts, lengths)
            if not len(starts):
                content += _read_rest(chunk, stream)
                continue
            _check_heads(chunk)
            yield chunk
            first, place, content = first + len(starts), place + end, content[end:]
            content += _read(uri, stream, size - len(content))


class ForwardReader:
    """Reader of a compressed file for ranges of rows in increasing order.

    It decompresses the file once for all ranges, instead of starting over for each range.
    """

    def __init__(self, uri: str, compression: Compression) -> None:
        self._last: Chunk | None = None
        self._rest = read_chunks(uri, compression)

    def has(self, row: int) -> bool:
        """Return whether the reader has not yet passed a row."""
        return self._last is None or self._last.first <= row

    def chunks(self) -> Iterator[Chunk]:
        """Yield the last chunk that was read, and the following ones."""
        if self._last is not None:
            yield self._last
        for chunk in self._rest:
            self._last = chunk
            yield chunk


@contextmanager
def open_for_reading(uri: str) -> Iterator[Any]:
    """Open a file for reading; an `InputError` names the host on which this fails."""
    try:
        file = open_file(uri)
    except OSError as error:
        raise InputError(
            f"{uri} cannot be read on {socket.gethostname()}: {error}. Every machine that reads "
            "it must see it at this path: use a shared file system, or a URI"
        ) from error
    with closing(file):
        yield file


def _read_rest(chunk: Chunk, stream: Any) -> bytes:
    """Read the rest of a record that is longer than its chunk."""
    content = chunk.content
    if len(content) < HEAD:
        raise _truncated_error(chunk)
    length = read_first_length(content)
    if length is None:
        raise _damaged_error(_name_record(chunk), "length")
    if length > _MOST_BYTES:
        raise InputError(
            f"{_name_record(chunk)} claims to have {length:,} bytes, more than the limit of 2 GB "
            "for a tf.train.Example: write the file again"
        )
    missing = HEAD + length + FOOT - len(content)
    rest = _read(chunk.file, stream, missing)
    if len(rest) < missing:
        raise _truncated_error(chunk)
    return rest


def _check_heads(chunk: Chunk) -> None:
    row = find_wrong_head(chunk.content, chunk.starts, chunk.lengths)
    if row is not None:
        raise _damaged_error(chunk.name_record(row), "length")


def _read(uri: str, stream: Any, size: int) -> bytes:
    """Read up to ``size`` bytes; allocate no more memory than the file has bytes."""
    parts: list[bytes] = []
    try:
        while size > 0 and (part := stream.read(min(size, _READ_BYTES))):
            parts.append(part)
            size -= len(part)
    except ValueError as error:
        raise InputError(f"{uri} cannot be read: {error}") from error
    return b"".join(parts)


def _name_record(chunk: Chunk, row: int = 0, place: int = 0) -> str:
    return f"record {chunk.first + row} of {chunk.file} (at byte {chunk.place + place})"


def _damaged_error(record: str, what: str) -> InputError:
    return InputError(
        f"{record} is damaged: the checksum of its {what} is wrong. Write or copy the file again"
    )


def _truncated_error(chunk: Chunk) -> InputError:
    return InputError(
        f"{_name_record(chunk)} is incomplete: the file is truncated. Write or copy it again"
    )
