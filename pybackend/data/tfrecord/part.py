"""One file of records, written batch by batch."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from pybackend.data.files import open_file
from pybackend.data.tfrecord.compression import CompressingWriter, Compression
from pybackend.data.tfrecord.crc import Checksums
from pybackend.data.tfrecord.encode import encode_batch
from pybackend.data.tfrecord.pieces import Index

if TYPE_CHECKING:
    import pyarrow as pa

# The number of a record, and where it begins.
Mark = tuple[int, int]
Marks = tuple[Mark, ...]
# Rows that are encoded together: what they need stays in the processor's cache.
_BYTES_TOGETHER = 4 << 20
_MARK_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """A file of records.

    Attributes
    ----------
    name
        Inside its folder.
    rows, size
        Its records and bytes.
    checksum
        The CRC-32 of the records' own checksums, 4 bytes each, one after another: as good as that
        of the whole file, and found by the way.
    marks
        Numbers of records and where they begin, so that a reader need not begin at the first
        record; empty if the file is compressed.
    """

    name: str
    rows: int
    size: int
    checksum: int
    marks: Marks = ()


def write_part(
    batches: Iterable[pa.RecordBatch], uri: str, name: str, compression: Compression = None
) -> Part | None:
    """Write a file; None, and no file, if there are no rows.

    Raises
    ------
    InputError
        Names the column and the row that no record can hold.
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
    """A `Part`'s checksum of these records and those ``before`` them."""
    return zlib.crc32(checksums.astype("<u4").tobytes(), before)


def place_marks(offsets: Index, row: int, place: int) -> list[Mark]:
    """The first of some records and about one in a megabyte: its number and where it begins.

    Parameters
    ----------
    offsets
        Where the records begin, counted from ``place``.
    row
        The number of the first of them.
    """
    megabytes = np.arange(0, offsets[-1] + 1, _MARK_BYTES)
    chosen = np.searchsorted(offsets, megabytes)
    return [(row + int(index), place + int(offsets[index])) for index in np.unique(chosen)]


class _CountingFile:
    """A file, and how much was written into it."""

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
