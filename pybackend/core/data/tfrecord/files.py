"""TFRecord files with rows numbered across all files, which can be read starting at any row."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from pybackend.core.data.files import Folder, Places, find_files, get_size, is_pattern, open_folder
from pybackend.core.data.tfrecord.chunks import (
    CHUNK_BYTES,
    Chunk,
    ForwardReader,
    detect_compression,
    read_chunks,
)
from pybackend.core.data.tfrecord.compression import Compression
from pybackend.core.data.tfrecord.decode import decode_chunk, infer_spec, spec_to_schema
from pybackend.core.data.tfrecord.folder import NAME as MANIFEST
from pybackend.core.data.tfrecord.folder import TEMPORARY, Manifest, read_manifest
from pybackend.core.data.tfrecord.framing import HEAD
from pybackend.core.data.tfrecord.part import Mark, Marks, place_marks, update_checksum
from pybackend.core.data.tfrecord.types import to_schema, to_spark_fields
from pybackend.core.errors import InputError
from pybackend.core.job.storage_options import check_tfrecord_spec
from pybackend.core.words import show

_SAMPLE_ROWS = 1000
_SAMPLE_BYTES = 1 << 20
_SAMPLE_FILES = 8


if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class RecordFiles:
    """TFRecord files of tf.train.Example.

    Attributes
    ----------
    files, counts, sizes
        Paths or URIs, and the number of records and of bytes in each.
    schema
        The columns.
    compressions, marks
        Compression of each file, and points from which it can be read: record numbers with their
        offsets.
    checksums
        Checksum of each file's records, as in `Part`; empty if there is no manifest.
    """

    files: tuple[str, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    schema: pa.Schema
    compressions: tuple[Compression, ...]
    marks: tuple[Marks, ...]
    checksums: tuple[int, ...] = ()
    # The compressed file that was read last.
    _reader: dict[str, ForwardReader] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @property
    def index(self) -> tuple[str, ...]:
        """Index columns: always empty, because TFRecord files do not mark any."""
        return ()

    @property
    def nulls(self) -> Mapping[str, int]:
        """Columns with nulls: always empty, because they are unknown until the files are read."""
        return {}

    @classmethod
    def at(
        cls,
        uri: Places,
        tfrecord_spec: Mapping[str, str] | None = None,
        name: str = "data",
        listed: Sequence[str] | None = None,
    ) -> RecordFiles:
        """Open a file, the files in a folder, or the files at several paths.

        A folder that `write_tfrecords` wrote is described by its manifest. Other files are read
        once to count their records, and a sample of them determines the columns.

        Parameters
        ----------
        tfrecord_spec
            Feature names and types: see `pybackend.read_tfrecords`.
        name
            The argument's name in messages.
        listed
            What `find_files` returned for the path, if it is known.

        Raises
        ------
        InputError
            Names the file that is missing, damaged, or different from its manifest.
        """
        if tfrecord_spec is not None:
            check_tfrecord_spec(tfrecord_spec)
        if isinstance(uri, tuple) or is_pattern(uri):
            return _count_files(listed or find_files(uri, name), tfrecord_spec, name)
        folder = open_folder(uri)
        manifest = read_manifest(folder)
        if manifest is None:
            _reject_unfinished(uri, folder, name)
            return _count_files(listed or find_files(uri, name), tfrecord_spec, name)
        manifest.check(folder)
        if manifest.parts:
            _reject_others(listed or find_files(uri, name), folder, manifest, name)
        parts = manifest.parts
        return cls(
            files=tuple(folder.path(part.name) for part in parts),
            counts=tuple(part.rows for part in parts),
            sizes=tuple(part.size for part in parts),
            schema=spec_to_schema(tfrecord_spec) if tfrecord_spec else manifest.schema,
            compressions=(manifest.compression,) * len(parts),
            marks=tuple(part.marks for part in parts),
            checksums=tuple(part.checksum for part in parts),
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        return {**values, "schema": to_spark_fields(self.schema)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RecordFiles:
        """Restore what `to_json` converted, even if JSON has turned tuples into lists."""
        lists = {name: tuple(value) for name, value in values.items() if name != "schema"}
        marks = tuple(tuple((row, place) for row, place in pairs) for pairs in values["marks"])
        return cls(**{**lists, "schema": to_schema(values["schema"]), "marks": marks})

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reader": {}}

    @property
    def rows(self) -> int:
        """Number of records in all files."""
        return sum(self.counts)

    def batches(self, first: int, last: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield rows ``first`` to ``last`` - 1, numbered across all files, in order.

        Parameters
        ----------
        columns
            Names of the columns to read, in the order of the batches' columns.

        Raises
        ------
        InputError
            Names the file and the record that is damaged or does not match the schema.
        """
        schema = self._select_schema(columns)
        begin = 0
        for number, count in enumerate(self.counts):
            own = max(first - begin, 0), min(last - begin, count)
            if own[0] < own[1]:
                yield from self._read_file(number, *own, schema)
            begin += count

    def pieces(
        self, ranges: Sequence[tuple[int, int]], columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield batches for ranges of rows, with the number of each batch's first row."""
        for first, last in ranges:
            place = first
            for batch in self.batches(first, last, columns):
                yield place, batch
                place += batch.num_rows

    def ranges(self, size: int) -> list[tuple[int, int]]:
        """Split all rows into ranges of about ``size`` bytes that can be read independently."""
        found, begin, row, byte = [], (0, 0), 0, 0
        for count, file_size, marks in zip(self.counts, self.sizes, self.marks, strict=True):
            edges = [(row + number, byte + place) for number, place in marks[1:]]
            row, byte = row + count, byte + file_size
            for edge in [*edges, (row, byte)]:
                if edge[1] - begin[1] >= size:
                    found.append((begin[0], edge[0]))
                    begin = edge
        return [pair for pair in [*found, (begin[0], row)] if pair[0] < pair[1]]

    def _select_schema(self, columns: Sequence[str]) -> pa.Schema:
        import pyarrow as pa

        for column in columns:
            if column not in self.schema.names:
                raise InputError(
                    f"the records have no feature {show(column)}: they have "
                    f"{', '.join(self.schema.names)}"
                )
        return pa.schema([self.schema.field(column) for column in columns])

    def _read_file(
        self, number: int, first: int, last: int, schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        file, read, checksum = self.files[number], 0, 0
        for chunk in self._read_file_chunks(number, first, last):
            wanted = chunk.between(first, last)
            if len(wanted.starts):
                checksum = update_checksum(wanted.check(), checksum)
                yield decode_chunk(wanted, schema)
            read += len(wanted.starts)
            if read == last - first:
                break
        is_known = self.checksums and read == self.counts[number]
        if read < last - first or (is_known and checksum != self.checksums[number]):
            raise InputError(
                f"{file} no longer has the {self.counts[number]} records that it had when it was "
                "written or counted: it was replaced. Write it again"
            )

    def _read_file_chunks(self, number: int, first: int, last: int) -> Iterator[Chunk]:
        """Yield the chunks of a file that contain these rows, and possibly others."""
        file, marks = self.files[number], self.marks[number] or ((0, 0),)
        if compression := self.compressions[number]:
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
        end = marks[after][1] if after < len(marks) else self.sizes[number]
        size = min(CHUNK_BYTES, end - marks[before][1])
        yield from read_chunks(file, None, marks[before], size)


def _reject_others(files: Sequence[str], folder: Folder, manifest: Manifest, name: str) -> None:
    """Reject a folder with files that its manifest does not list."""
    known = {folder.path(part.name) for part in manifest.parts}
    others = [file for file in files if file not in known]
    if others:
        raise InputError(
            f"`{name}`: {others[0]} is not listed in {MANIFEST}: move it elsewhere, or "
            f"remove {MANIFEST} to read all files in the folder"
        )


def _reject_unfinished(uri: str, folder: Folder, name: str) -> None:
    unfinished = [entry for entry in folder.names() or [] if entry.startswith(TEMPORARY)]
    if unfinished:
        raise InputError(
            f"`{name}`: {show(uri)} is being written, or was left behind by a process that ended: "
            f"it contains {unfinished[0]}"
        )


def _count_files(files: Sequence[str], spec: Mapping[str, str] | None, name: str) -> RecordFiles:
    """Open files without a manifest."""
    compressions = [detect_compression(file) for file in files]
    if spec is None:
        spec = sample_spec(files, compressions, name)
    counted = [count_records(*pair) for pair in zip(files, compressions, strict=True)]
    return RecordFiles(
        files=tuple(files),
        counts=tuple(count for count, _ in counted),
        sizes=tuple(get_size(file) for file in files),
        schema=spec_to_schema(spec),
        compressions=tuple(compressions),
        marks=tuple(marks for _, marks in counted),
    )


# Content of files without a manifest: number of records, and features.


def count_records(file: str, compression: Compression) -> tuple[int, Marks]:
    """Count the records in a file, and find points from which it can be read.

    Raises
    ------
    InputError
        Names the record and byte at which the file is truncated or damaged.
    """
    count = 0
    marks: list[Mark] = []
    for chunk in read_chunks(file, compression):
        count += len(chunk.starts)
        marks += place_marks(chunk.starts - HEAD, chunk.first, chunk.place)
    return count, () if compression else tuple(marks)


def sample_spec(
    files: Sequence[str], compressions: Sequence[Compression], name: str
) -> dict[str, str]:
    """Infer a `tfrecord_spec` from the first records of at most eight files.

    Raises
    ------
    InputError
        The records have no features, or are damaged.
    """
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
