"""TFRecord files with rows numbered across all files, which can be read starting at any row.

Files are read in chunks of whole records, with bounded memory.
"""

from __future__ import annotations

import socket
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from operator import itemgetter
from typing import Any, ClassVar

import pyarrow as pa

from pybackend.core.data.files import (
    Paths,
    find_files,
    get_size,
    is_pattern,
    open_file,
    open_folder,
)
from pybackend.core.data.sharding import Ranges
from pybackend.core.data.tfrecord import framing
from pybackend.core.data.tfrecord.decode import decode_chunk, infer_spec, spec_to_schema
from pybackend.core.data.tfrecord.encode import Mark, RecordFile, place_marks, update_checksum
from pybackend.core.data.tfrecord.folder import NAME as MANIFEST
from pybackend.core.data.tfrecord.folder import TEMPORARY, read_manifest
from pybackend.core.data.tfrecord.framing import Chunk, Compression
from pybackend.core.data.tfrecord.protobuf import to_schema, to_spark_fields
from pybackend.core.errors import InputError
from pybackend.core.job.codec import read_fields
from pybackend.core.job.storage_options import check_tfrecord_spec
from pybackend.core.words import show

Spec = Mapping[str, str] | None
_SAMPLE_ROWS = 1000
_SAMPLE_BYTES = 1 << 20
_SAMPLE_FILES = 8
# Larger chunks would be allocated again each time, which costs more than it saves.
CHUNK_BYTES = 4 << 20
# protobuf's own limit.
_MOST_BYTES = (1 << 31) - 1
_READ_BYTES = 16 << 20


@dataclass(frozen=True)
class RecordFiles:
    """TFRecord files of tf.train.Example."""

    parts: tuple[RecordFile, ...]  # their names are whole paths or URIs
    schema: pa.Schema  # the columns
    compressions: tuple[Compression, ...]
    is_listed: bool = False  # in a manifest, with the checksums of all records
    # The compressed file that was read last.
    _reader: dict[str, ForwardReader] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    # TFRecord files mark no index columns, and nulls are not known until they are read.
    index: ClassVar[tuple[str, ...]] = ()
    nulls: ClassVar[Mapping[str, int]] = {}

    @classmethod
    def at(
        cls, uri: Paths, spec: Spec = None, name: str = "data", listed: Sequence[str] | None = None
    ) -> RecordFiles:
        """Open a file, the files in a folder, or the files at several paths.

        A folder that `write_tfrecords` wrote is described by its manifest. Other files are read
        once to count their records, and a sample of them determines the columns. ``spec`` is the
        `tfrecord_spec` of `pybackend.read_tfrecords`; ``listed`` is what `find_files` returned for
        the path, if it is known. An `InputError` names the file that is missing, damaged, or
        different from its manifest.
        """
        if spec is not None:
            check_tfrecord_spec(spec)
        if isinstance(uri, tuple) or is_pattern(uri):
            return _count_files(listed or find_files(uri, name), spec, name)
        folder = open_folder(uri)
        manifest = read_manifest(folder)
        if manifest is None:
            if rest := [one for one in folder.names() or [] if one.startswith(TEMPORARY)]:
                raise InputError(
                    f"`{name}`: {show(uri)} is being written, or was left behind by a process that "
                    f"ended: it contains {rest[0]}"
                )
            return _count_files(listed or find_files(uri, name), spec, name)
        manifest.check(folder)
        parts = tuple(replace(part, name=folder.path(part.name)) for part in manifest.parts)
        known = {part.name for part in parts}
        found = (listed or find_files(uri, name)) if parts else ()
        if others := [file for file in found if file not in known]:
            raise InputError(
                f"`{name}`: {others[0]} is not listed in {MANIFEST}: move it elsewhere, or "
                f"remove {MANIFEST} to read all files in the folder"
            )
        schema = spec_to_schema(spec) if spec else manifest.schema
        return cls(parts, schema, (manifest.compression,) * len(parts), is_listed=True)

    def to_json(self) -> dict[str, Any]:
        parts = [asdict(part) for part in self.parts]
        schema = to_spark_fields(self.schema)
        return {**self.__getstate__(), "parts": parts, "schema": schema}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RecordFiles:
        """Restore what `to_json` converted, even if JSON has turned tuples into lists."""
        parts = tuple(read_fields(RecordFile, part) for part in values["parts"])
        schema = to_schema(values["schema"])
        return cls(parts, schema, tuple(values["compressions"]), values["is_listed"])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reader": {}}

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(part.rows for part in self.parts)

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def batches(self, first: int, last: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield rows ``first`` to ``last`` - 1, numbered across all files, in order.

        An `InputError` names the file and the record that is damaged or does not match the schema.
        """
        for column in columns:
            if column not in self.schema.names:
                raise InputError(
                    f"the records have no feature {show(column)}: they have "
                    f"{', '.join(self.schema.names)}"
                )
        schema = pa.schema([self.schema.field(column) for column in columns])
        begin = 0
        for part, compression in zip(self.parts, self.compressions, strict=True):
            own = max(first - begin, 0), min(last - begin, part.rows)
            if own[0] < own[1]:
                yield from self._read_file(part, compression, *own, schema)
            begin += part.rows

    def pieces(self, ranges: Ranges, columns: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield batches for ranges of rows, with the number of each batch's first row."""
        for first, last in ranges:
            start = first
            for batch in self.batches(first, last, columns):
                yield start, batch
                start += batch.num_rows

    def ranges(self, size: int) -> list[tuple[int, int]]:
        """Split all rows into ranges of about ``size`` bytes that can be read independently."""
        found, begin, row, byte = [], (0, 0), 0, 0
        for part in self.parts:
            edges = [(row + number, byte + start) for number, start in part.marks[1:]]
            row, byte = row + part.rows, byte + part.size
            for edge in [*edges, (row, byte)]:
                if edge[1] - begin[1] >= size:
                    found.append((begin[0], edge[0]))
                    begin = edge
        return [pair for pair in [*found, (begin[0], row)] if pair[0] < pair[1]]

    def _read_file(
        self, part: RecordFile, compression: Compression, first: int, last: int, schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        read, checksum = 0, 0
        for chunk in self._read_file_chunks(part, compression, first, last):
            wanted = chunk.between(first, last)
            if len(wanted.starts):
                checksum = update_checksum(wanted.check(), checksum)
                yield decode_chunk(wanted, schema)
            read += len(wanted.starts)
            if read == last - first:
                break
        is_known = self.is_listed and read == part.rows
        if read < last - first or (is_known and checksum != part.checksum):
            raise InputError(
                f"{part.name} no longer has the {part.rows} records that it had when it was "
                "written or counted: it was replaced. Write it again"
            )

    def _read_file_chunks(
        self, part: RecordFile, compression: Compression, first: int, last: int
    ) -> Iterator[Chunk]:
        """Yield the chunks of a file that contain these rows, and possibly others."""
        file, marks = part.name, part.marks or ((0, 0),)
        if compression:
            # Removed while it is in use: another thread may read the same file.
            reader = self._reader.pop(file, None)
            if reader is None or not reader.has(first):
                reader = ForwardReader(file, compression)
            try:
                yield from reader.chunks()
            finally:
                self._reader.clear()
                self._reader[file] = reader
            return
        before = bisect_right(marks, first, key=itemgetter(0)) - 1
        after = bisect_left(marks, last, key=itemgetter(0))
        # Not beyond the mark after the range: bytes of a remote file are transferred.
        end = marks[after][1] if after < len(marks) else part.size
        size = min(CHUNK_BYTES, end - marks[before][1])
        yield from read_chunks(file, None, marks[before], size)


def _count_files(files: Sequence[str], spec: Spec, name: str) -> RecordFiles:
    compressions = [detect_compression(file) for file in files]
    if spec is None:
        spec = sample_spec(files, compressions, name)
    parts = tuple(count_records(*pair) for pair in zip(files, compressions, strict=True))
    return RecordFiles(parts, spec_to_schema(spec), tuple(compressions))


def count_records(file: str, compression: Compression) -> RecordFile:
    """Count the records in a file, and find points from which it can be read."""
    count = 0
    marks: list[Mark] = []
    for chunk in read_chunks(file, compression):
        count += len(chunk.starts)
        marks += place_marks(chunk.starts - framing.HEAD, chunk.first, chunk.begin)
    return RecordFile(file, count, get_size(file), 0, () if compression else tuple(marks))


def sample_spec(files: Sequence[str], compressions: list[Compression], name: str) -> dict[str, str]:
    """Infer a `tfrecord_spec` from the first records of at most eight files."""
    pairs = list(zip(files, compressions, strict=True))
    samples = [
        chunk.between(0, _SAMPLE_ROWS)
        for file, compression in pairs[:: -(-len(pairs) // _SAMPLE_FILES)]
        for chunk in islice(read_chunks(file, compression, size=_SAMPLE_BYTES), 1)
    ]
    for chunk in samples:
        chunk.check()
    spec = infer_spec(samples)
    if not spec:
        raise InputError(
            f"`{name}`: the first records of {files[0]} have no features: specify the features of "
            "the records in `tfrecord_spec`"
        )
    return spec


def detect_compression(uri: str) -> Compression:
    with open_for_reading(uri) as file:
        return framing.check_head(file.read(framing.HEAD), uri)


def read_chunks(
    uri: str, compression: Compression, mark: tuple[int, int] = (0, 0), size: int = CHUNK_BYTES
) -> Iterator[Chunk]:
    """Yield a file's records, starting at ``mark``: the number of a record and its offset.

    Only the length checksums are verified; `Chunk.check` verifies the data checksums. An
    `InputError` names the file, and the record and byte at which it is truncated or damaged.
    """
    first, start = mark
    with open_for_reading(uri) as file:
        file.seek(start)
        stream = framing.DecompressingReader(file, compression) if compression else file
        content = _read(uri, stream, size)
        while content:
            starts, lengths, end = framing.find_records(content)
            chunk = Chunk(uri, first, start, content, starts, lengths)
            if not len(starts):
                content += _read_rest(chunk, stream)
                continue
            chunk.check_lengths()
            yield chunk
            first, start, content = first + len(starts), start + end, content[end:]
            content += _read(uri, stream, size - len(content))


class ForwardReader:
    """Reader of a compressed file for ranges of rows in increasing order.

    It decompresses the file once for all ranges, instead of starting over for each range.
    """

    def __init__(self, uri: str, compression: Compression) -> None:
        self._last: Chunk | None = None
        self._rest = read_chunks(uri, compression)

    def has(self, row: int) -> bool:
        """True if the reader has not yet passed a row."""
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
    content = chunk.content
    if len(content) >= framing.HEAD:
        length = framing.read_first_length(content)
        if length is None:
            raise chunk.report_damage("length")
        if length > _MOST_BYTES:
            raise InputError(
                f"{chunk.name_record()} claims to have {length:,} bytes, more than the limit of 2 "
                "GB for a tf.train.Example: write the file again"
            )
        missing = framing.HEAD + length + framing.FOOT - len(content)
        rest = _read(chunk.file, stream, missing)
        if len(rest) == missing:
            return rest
    raise InputError(f"{chunk.name_record()} is incomplete: the file is truncated. Write it again")


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
