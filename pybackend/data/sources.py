"""Data that every worker reads for itself: files, or what a function of the user's returns."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pybackend.data.arrow import TensorReader, kinds_of_schema
from pybackend.data.dataframe import with_label_categories
from pybackend.data.files import found
from pybackend.data.leaves import Choice, Leaf, columns_read, leaves_of
from pybackend.data.parquet import ParquetFiles
from pybackend.data.spool import SpoolWriter
from pybackend.errors import InputError

# Pieces of a worker's rows where they are dealt: so finely are rows sorted by label mixed.
_PIECES = 64
_PARQUET = b"PAR1"


class RowFiles(Protocol):
    """Files whose rows are numbered."""

    @property
    def files(self) -> tuple[str, ...]: ...
    @property
    def counts(self) -> tuple[int, ...]: ...
    @property
    def rows(self) -> int: ...
    @property
    def schema(self) -> Any: ...

    def batches(self, first: int, last: int, columns: Sequence[str]) -> Iterator[Any]:
        """Arrow batches of the rows from ``first`` to before ``last``, of these columns."""


@dataclass(frozen=True)
class FileRows:
    """Rows of files, of which each worker reads its share."""

    files: RowFiles
    leaves: tuple[Leaf, ...]
    choice: Choice

    @classmethod
    def at(cls, path: str | os.PathLike[str], choice: Choice, floatx: str, name: str) -> FileRows:
        """Files at a path or URI; checked by their schema.

        Raises
        ------
        InputError
            Names the file, or the column, and what is expected.
        """
        files = _opened(os.fspath(path), choice, name)
        kinds = kinds_of_schema(files.schema)

        def distinct(label: str) -> Iterable[Any]:
            import pyarrow.compute as pc

            values: set[Any] = set()
            for batch in files.batches(0, files.rows, [label]):
                values.update(pc.unique(batch.column(0)).to_pylist())
            return values

        choice = with_label_categories(choice, kinds, distinct)
        leaves, _ = leaves_of(choice, kinds, floatx, name)
        return cls(files, tuple(leaves), choice)

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return self.files.rows

    def counts(self, workers: int, shared: bool = False) -> list[int]:
        """Rows that every worker visits in an epoch, by rank.

        Where each has all rows, and they share them out anew, they take turns.
        """
        if shared:
            return [len(range(rank, self.rows, workers)) for rank in range(workers)]
        ranges = [self._ranges(workers, rank) for rank in range(workers)]
        return [sum(last - first for first, last in own) for own in ranges]

    def spool(self, folder: Path, workers: int, rank: int, everything: bool) -> None:
        """Write one worker's rows, or all of them, into a new folder."""
        reader = TensorReader(self.leaves)
        columns = columns_read(self.leaves)
        ranges = [(0, self.rows)] if everything else self._ranges(workers, rank)
        with SpoolWriter(folder) as writer:
            for first, last in ranges:
                place = first
                for batch in self.files.batches(first, last, columns):
                    writer.append(reader.read(batch, self._where(place)))
                    place += batch.num_rows

    def _ranges(self, workers: int, rank: int) -> list[tuple[int, int]]:
        """First row of each piece of a worker's rows, and the row after its last."""
        pieces = workers * (_PIECES if self.choice.repartition else 1)
        pieces = max(workers, min(pieces, self.rows))
        edges = [self.rows * number // pieces for number in range(pieces + 1)]
        own = list(itertools.pairwise(edges))[rank::workers]
        return [(first, last) for first, last in own if first < last]

    def _where(self, place: int) -> Callable[[int], str]:
        ends = list(itertools.accumulate(self.files.counts))

        def where(row: int) -> str:
            file = bisect.bisect_right(ends, place + row)
            inside = place + row - (ends[file - 1] if file else 0)
            return f"row {inside} (counting from 0) of {self.files.files[file]}"

        return where


@dataclass(frozen=True)
class FunctionRows:
    """Rows that a function of the user's gives on each worker.

    ``fn(context)``, with a `pybackend.context.WorkerContext`, returns a ``tf.data.Dataset`` whose
    elements are local batches: ``(x, y)`` or ``(x, y, sample_weight)``.
    """

    fn: Callable[[Any], Any]


def _opened(uri: str, choice: Choice, name: str) -> RowFiles:
    """Parquet by a file's first bytes, else TFRecord."""
    from pybackend.data.files import opened

    first = next((file for file in found(uri, name) if not file.endswith(".crc")), uri)
    try:
        with opened(first) as file:
            is_parquet = file.read(len(_PARQUET)) == _PARQUET
    except OSError as error:
        raise InputError(f"`{name}`: {first} cannot be read: {error}") from error
    if is_parquet:
        if choice.tfrecord_spec is not None:
            raise InputError(f"`tfrecord_spec` is given, but {first} is a Parquet file")
        return ParquetFiles.at(uri, name)
    from pybackend.data.tfrecord.files import RecordFiles

    records: RowFiles = RecordFiles.at(uri, choice.tfrecord_spec, name)
    return records
