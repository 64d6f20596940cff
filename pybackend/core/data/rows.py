"""Rows for a model, by row number: from arrays in memory, or from a row store on disk."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

import numpy as np

from pybackend.core.data import arrays
from pybackend.core.data.arrays import Array, Columns
from pybackend.core.data.row_store import Kind, build_header, read_layout, report_damage, row_dtype
from pybackend.core.errors import InputError
from pybackend.core.words import show

Spec = dict[str, tuple[Any, tuple[int, ...]]]
Shapes = dict[str, tuple[int, ...]]
# Up to this size, the first rows are memory-mapped and a ragged column's values are in memory.
_MAPPED_BYTES = 40 << 20
# Number of texts from which the mean length is estimated.
_SAMPLED_TEXTS = 1000


Rows = Union["ArrayRows", "StoredRows", "Renamed", "ShardedRows"]
"""Rows of named columns.

``spec`` has the type and shape of a row, by column, and ``row_bytes`` the mean size of a row in
memory. ``take`` returns the rows with some numbers, in this order.
"""


class ArrayRows:
    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._count = arrays.count_rows(columns)
        self.spec: Spec = {key: (a.dtype, a.shape[1:]) for key, a in columns.items()}
        some = [array[:_SAMPLED_TEXTS] for array in columns.values() if array.dtype.kind == "O"]
        letters = sum(len(text) for array in some for text in array.flat)
        sampled = min(_SAMPLED_TEXTS, max(1, self._count))
        self.row_bytes: int = _measure_row(self.spec) + letters // sampled

    def __len__(self) -> int:
        return self._count

    def take(self, indices: Array) -> Columns:
        return {key: array[indices] for key, array in self._columns.items()}


class StoredRows:
    """Rows in a folder that a `RowStoreWriter` wrote; only requested rows are in memory.

    ``in_memory`` reads all rows into memory immediately. Both this and `take` raise `ClusterError`
    if the files were altered.
    """

    def __init__(self, folder: Path, in_memory: bool = False) -> None:
        self._count, kinds = read_layout(folder)
        self.spec: Spec = {key: kind.row for key, kind in kinds.items()}
        self._dtype = row_dtype(kinds)
        self._records = _Items(folder / "rows.npy", self._dtype, self._count, in_memory)
        self._ragged = {
            key: _RaggedValues(folder / f"values{index}.npy", kind, in_memory)
            for index, (key, kind) in enumerate(kinds.items())
            if kind.shape is None
        }
        letters = sum(self._ragged[key].size for key, kind in kinds.items() if kind.is_text)
        self.row_bytes: int = _measure_row(self.spec) + letters // max(1, self._count)

    def __len__(self) -> int:
        return self._count

    def take(self, indices: Array) -> Columns:
        records = np.ndarray(len(indices), self._dtype, self._records.take(indices))
        found = {}
        for index, (key, (dtype, shape)) in enumerate(self.spec.items()):
            field = records[f"f{index}"]
            if key in self._ragged:
                found[key] = self._ragged[key].take(field)
            else:
                found[key] = np.ascontiguousarray(field.reshape(len(indices), *shape), dtype)
        return found


class _Items:
    """Items of equal size in a file after a header; the first ones are memory-mapped."""

    def __init__(self, path: Path, dtype: np.dtype[Any], count: int, in_memory: bool) -> None:
        self._size = size = dtype.itemsize
        self._path = path
        # Without columns, the file is empty.
        self._start = _check_file(path, dtype, count)[0] if dtype.names else 0
        self._mapped_count = count if in_memory else min(count, _MAPPED_BYTES // max(1, size))
        mapped: Array = np.empty(0, np.uint8)
        if in_memory:
            mapped = np.fromfile(path, np.uint8, offset=self._start)
        elif self._mapped_count * size:  # pages are read at first use
            mapped = np.memmap(path, np.uint8, "r", self._start, self._mapped_count * size)
        self._mapped = np.asarray(mapped).reshape(self._mapped_count, size)
        # None: all are mapped.
        self._number = None if self._mapped_count == count else _open_descriptor(self, path)

    def take(self, indices: Array) -> Array:
        """Return contiguous bytes with shape (number of rows, size)."""
        if (number := self._number) is None:
            return np.take(self._mapped, indices, axis=0)
        is_mapped, size = indices < self._mapped_count, self._size
        items = np.empty((len(indices), size), np.uint8)
        items[is_mapped] = np.take(self._mapped, indices[is_mapped], axis=0)
        offsets = (indices[~is_mapped] * size + self._start).tolist()
        content = b"".join([os.pread(number, size, offset) for offset in offsets])
        if len(content) != len(offsets) * size:
            raise report_damage(self._path)
        items[~is_mapped] = np.frombuffer(content, np.uint8).reshape(-1, size)
        return items


class _RaggedValues:
    """Values of a ragged column; each row stores the position of its values."""

    def __init__(self, path: Path, kind: Kind, in_memory: bool) -> None:
        self._kind = kind
        self._path = path
        self._start, self._count = _check_file(path, kind.item)
        self.size = self._count * kind.item.itemsize
        is_mapped = in_memory or self.size <= _MAPPED_BYTES
        with path.open("rb") as file:
            file.seek(self._start)
            self._mapped = file.read(self.size) if is_mapped else None
        self._number = None if is_mapped else _open_descriptor(self, path)

    def take(self, spans: Array) -> Array:
        """Return padded rows of shape (rows, longest, ...); strings have shape (rows, 1)."""
        width, longest = self._kind.item.itemsize, self._kind.longest
        starts, lengths = spans["start"], spans["length"]
        ends = starts + lengths
        is_short = self._kind.is_text or int(lengths.max(initial=0)) <= longest
        # A damaged file may have any numbers here: they are not followed.
        if not is_short or not ((starts >= 0) & (starts <= ends) & (ends <= self._count)).all():
            raise report_damage(self._path)
        pairs = zip((starts * width).tolist(), (lengths * width).tolist(), strict=True)
        rows = [self._read(start, size) for start, size in pairs]
        if self._kind.is_list:
            lists = [arrays.unpack_list(row) for row in rows]
            if max(map(len, lists), default=0) > longest:
                raise report_damage(self._path)
            return arrays.to_strings(lists, longest)
        if self._kind.is_text:
            return arrays.to_strings([[row] for row in rows], 1)
        values = np.frombuffer(b"".join(rows), self._kind.item)
        return arrays.to_dense(arrays.Ragged(values, arrays.to_offsets(spans["length"])), longest)

    def _read(self, start: int, size: int) -> bytes:
        if self._mapped is not None:
            return self._mapped[start : start + size]
        assert self._number is not None
        return os.pread(self._number, size, self._start + start)


def _check_file(path: Path, dtype: np.dtype[Any], count: int | None = None) -> tuple[int, int]:
    """Return the offset and the number of a file's items; raise an error if it is incomplete."""
    header = build_header(dtype, 0)
    try:
        with path.open("rb") as file:
            begin, whole = file.read(len(header)), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise report_damage(path) from error
    size = whole - len(header)
    found = size // max(1, dtype.itemsize) if count is None else count
    if begin != build_header(dtype, max(0, found)) or size != found * dtype.itemsize:
        raise report_damage(path)
    return len(header), found


def _open_descriptor(owner: object, path: Path) -> int:
    """Open a file descriptor that is closed when its owner is deleted."""
    number = os.open(path, os.O_RDONLY)
    weakref.finalize(owner, os.close, number)
    return number


def _measure_row(spec: Spec) -> int:
    """Return the number of bytes that a row takes in memory; strings count without their text."""
    sizes = {key: 64 if dtype.kind == "O" else dtype.itemsize for key, (dtype, _) in spec.items()}
    return sum(sizes[key] * math.prod(shape) for key, (_, shape) in spec.items())


def to_rows(columns: Rows | Mapping[str, Any]) -> Rows:
    return ArrayRows(dict(columns)) if isinstance(columns, Mapping) else columns


def make_zero_row(rows: Rows) -> Columns:
    """Return one row of zeros with the columns' shapes and types, even if there are no rows."""
    zero = {key: b"" if dtype.kind == "O" else 0 for key, (dtype, _) in rows.spec.items()}
    return {key: np.full((1, *s), zero[key], dtype) for key, (dtype, s) in rows.spec.items()}


class Renamed:
    """The same rows, with other names of columns and shapes of the rows in them."""

    def __init__(self, rows: Rows, names: Mapping[str, str], shapes: Shapes | None = None) -> None:
        self._rows, self._names, self._shapes = rows, names, shapes or {}
        self.row_bytes: int = rows.row_bytes
        self.spec: Spec = {
            names.get(key, key): (dtype, self._shapes.get(key, shape))
            for key, (dtype, shape) in rows.spec.items()
        }

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, indices: Array) -> Columns:
        found = self._rows.take(indices)
        for key, shape in self._shapes.items():
            found[key] = found[key].reshape(len(indices), *shape)
        return {self._names.get(key, key): column for key, column in found.items()}


def reshape_columns(rows: Rows, shapes: Mapping[str, tuple[int | None, ...]]) -> Rows:
    """Reshape flat rows of columns to these shapes; a shape with an unknown size is left alone.

    Raises `InputError` if a row has more or fewer numbers than the shape.
    """
    changed: Shapes = {}
    for key, wanted in shapes.items():
        own = rows.spec[key][1]
        shape = tuple(n for n in wanted if n is not None)
        if own == shape or len(shape) < len(wanted):
            continue
        if math.prod(own) != math.prod(shape):
            found = f"have shape {show(own)}" if own else "are one number each"
            raise InputError(
                f"the rows {found}, but the model's input"
                f"{f' {show(key[2:])}' if key != 'x' else ''} has shape {show(shape)}"
            )
        changed[key] = shape
    return Renamed(rows, {}, changed) if changed else rows


class ShardedRows:
    """The shard of one worker, as in `sharding.shard_slice`, of rows that every worker holds."""

    def __init__(self, rows: Rows, workers: int, rank: int) -> None:
        self.everything, self._workers, self._rank = rows, workers, rank
        self.spec: Spec = rows.spec
        self.row_bytes: int = rows.row_bytes

    def __len__(self) -> int:
        return len(range(self._rank, len(self.everything), self._workers))

    def take(self, indices: Array) -> Columns:
        return self.everything.take(indices * self._workers + self._rank)
