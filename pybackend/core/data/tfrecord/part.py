"""Write one file of records, batch by batch."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from pybackend.core.data.files import open_file
from pybackend.core.data.tfrecord.compression import CompressingWriter, Compression
from pybackend.core.data.tfrecord.encode import encode_batch
from pybackend.core.data.tfrecord.framing import Checksums
from pybackend.core.data.tfrecord.protobuf import Index

if TYPE_CHECKING:
    import pyarrow as pa

# The number of a record and its offset.
Mark = tuple[int, int]
Marks = tuple[Mark, ...]
# Size of rows that are encoded together, so that they stay in the processor's cache.
_BYTES_TOGETHER = 4 << 20
_MARK_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """A file of records.

    Attributes
    ----------
    name
        Name of the file in its folder.
    rows, size
        Number of records and of bytes.
    checksum
        CRC-32 of the concatenated record checksums, 4 bytes each: as reliable as a CRC of the whole
        file, and cheap.
    marks
        Numbers and offsets of some records, at which a reader can begin; empty if the file is
        compressed.
    """

    name: str
    rows: int
    size: int
    checksum: int
    marks: Marks = ()


def write_part(
    batches: Iterable[pa.RecordBatch], uri: str, name: str, compression: Compression = None
) -> Part | None:
    """Write a file; if there are no rows, write nothing and return None.

    Raises
    ------
    InputError
        Names the column and row whose value a record cannot hold.
    """
    slices = _slice_batches(batches)
    first = next(slices, None)
    if first is None:
        return None
    rows, place, checksum = 0, 0, 0
    marks: list[Mark] = []
    with closing(open_file(uri, "wb")) as file:
        counted = _CountingFile(file)
        target = CompressingWriter(counted, compression) if compression else counted
        for batch in chain([first], slices):
            some = encode_batch(batch, rows)
            if not compression:
                marks += place_marks(some.offsets[:-1], rows, place)
            target.write(some.content.data)
            checksum = update_checksum(some.checksums, checksum)
            rows, place = rows + batch.num_rows, place + len(some.content)
        if isinstance(target, CompressingWriter):
            target.finish()
    return Part(name, rows, counted.size, checksum, tuple(marks))


def update_checksum(checksums: Checksums, before: int = 0) -> int:
    """Return the checksum of a `Part` with these records, given the checksum ``before`` them."""
    return zlib.crc32(checksums.astype("<u4").tobytes(), before)


def place_marks(offsets: Index, row: int, place: int) -> list[Mark]:
    """Return marks for the first of some records and about one per megabyte.

    Parameters
    ----------
    offsets
        Starts of the records, relative to ``place``.
    row
        Number of the first record.
    """
    megabytes = np.arange(0, offsets[-1] + 1, _MARK_BYTES)
    chosen = np.searchsorted(offsets, megabytes)
    return [(row + int(index), place + int(offsets[index])) for index in np.unique(chosen)]


class _CountingFile:
    """File that counts the bytes written to it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size = 0

    def write(self, content: Any) -> None:
        self._file.write(content)
        self.size += len(content)


def _slice_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rows = max(1, batch.num_rows * _BYTES_TOGETHER // max(1, batch.nbytes))
        for first in range(0, batch.num_rows, rows):
            yield batch.slice(first, rows)
