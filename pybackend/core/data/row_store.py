"""A worker's rows on disk, in the layout that `rows` reads by row number in bounded memory.

Fixed-width columns are stored row by row in one ``.npy`` file with a structured type, so that one
read returns a whole row. For a ragged column, this file has the position and length of each row's
values; the values are in a separate ``.npy`` file. `LAYOUT` is a file with the columns' types,
which workers compare.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pybackend.core.data.arrays import Array, Columns, Ragged, count_rows
from pybackend.core.data.files import naming_full_disk
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.codec import read_fields
from pybackend.core.job.job import argument_of
from pybackend.core.words import show

LAYOUT = "layout.json"
_ROWS = "rows.npy"
_CHUNK_BYTES = 4 << 20
# Start and number of the values of a ragged row.
SPAN = np.dtype([("start", "<i8"), ("length", "<i8")])


@dataclass(frozen=True)
class Kind:
    """Type and shape of a column's values."""

    dtype: str  # numpy's name for the values' type
    # Of a row; None for a ragged column, whose rows are padded with zeros to `longest`.
    shape: tuple[int, ...] | None
    longest: int = 0  # length of a ragged column's longest row on any worker
    is_text: bool = False  # a row is a string: the values are bytes
    inner: tuple[int, ...] = ()  # shape of each value in a ragged column's row
    is_list: bool = False  # with `is_text`: a row is a list of strings

    @classmethod
    def of(cls, column: Array | Ragged) -> Kind:
        if isinstance(column, Ragged):
            is_list = column.most_texts is not None
            longest = column.most_texts or int(column.lengths.max(initial=0))
            inner = column.values.shape[1:]
            return cls(column.values.dtype.str, None, longest, column.is_text, inner, is_list)
        return cls(column.dtype.str, column.shape[1:])

    def describe(self) -> str:
        """Describe rows for messages: ``"have shape (3,) and type float32"``."""
        if self.is_text:
            return "are lists of strings" if self.is_list else "are single strings"
        return f"have shape {show(self.shape)} and type {np.dtype(self.dtype)}"

    @property
    def field(self) -> tuple[Any, ...]:
        """Type and shape of the column's field in the file's structured type."""
        return (SPAN,) if self.shape is None else (self.dtype, self.shape)

    @property
    def row(self) -> tuple[Any, tuple[int, ...]]:
        """Type and shape of a row as a model's input; strings are ``bytes`` objects."""
        if self.is_text:
            return np.dtype(object), (self.longest if self.is_list else 1,)
        shape = (self.longest, *self.inner) if self.shape is None else self.shape
        return np.dtype(self.dtype), shape

    @property
    def item(self) -> np.dtype[Any]:
        """Type of one value of a ragged column's row."""
        return np.dtype((self.dtype, self.inner))


Kinds = dict[str, Kind]


def describe_columns(columns: Mapping[str, Array | Ragged]) -> Kinds:
    return {key: Kind.of(column) for key, column in columns.items()}


def row_dtype(kinds: Kinds) -> np.dtype[Any]:
    """The fields are named ``f0``, ``f1``, ... in column order."""
    return np.dtype([(f"f{index}", *kind.field) for index, kind in enumerate(kinds.values())])


def build_header(dtype: np.dtype[Any], rows: int) -> bytes:
    """Build the header of an ``.npy`` file; its length does not depend on the number of rows."""
    buffer, description = io.BytesIO(), np.lib.format.dtype_to_descr(dtype)
    fields = {"descr": description, "fortran_order": False, "shape": (rows,)}
    np.lib.format.write_array_header_2_0(buffer, fields)
    return buffer.getvalue()


def pack_rows(columns: Mapping[str, Array], kinds: Kinds) -> Array:
    """The columns have a fixed width; the array is of type `row_dtype`."""
    rows = np.empty(count_rows(columns), row_dtype(kinds))
    for index, column in enumerate(columns.values()):
        rows[f"f{index}"] = column
    return rows


def write_layout(folder: Path, rows: int, kinds: Kinds) -> None:
    """Called again once the rows of all workers are known."""
    layout = {"rows": rows, "columns": {key: asdict(kind) for key, kind in kinds.items()}}
    layout["sha256"] = _digest(layout)
    (folder / LAYOUT).write_text(json.dumps(layout))


def read_layout(folder: Path) -> tuple[int, Kinds]:
    layout = _read(folder / LAYOUT)
    return layout["rows"], read_kinds(layout["columns"])


def read_layouts(folder: Path) -> dict[str, Any]:
    """Read the layouts of all subfolders of a folder, as plain JSON data."""
    return {path.parent.name: _read(path) for path in sorted(folder.glob(f"*/{LAYOUT}"))}


def _read(path: Path) -> dict[str, Any]:
    try:
        layout = json.loads(path.read_text())
        if layout.pop("sha256") == _digest(layout):
            return dict(layout)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise report_damage(path)


def report_damage(path: Path) -> ClusterError:
    """Return the error for a file of rows that was altered."""
    return ClusterError(
        f"{path}, which contains this worker's rows, was altered or truncated "
        f"on {socket.gethostname()} after it was written: check that disk, or set TMPDIR to a "
        "folder on another disk, and start again"
    )


def _digest(layout: Mapping[str, Any]) -> str:
    text = json.dumps([layout["rows"], layout["columns"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _describe_types(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe what must be the same on all workers: all but the longest ragged row."""
    names = ("dtype", "shape", "inner", "is_text", "is_list")
    return json.dumps({key: [kind[name] for name in names] for key, kind in columns.items()})


def check_layouts(layouts: Sequence[Mapping[str, Any]]) -> None:
    """Reject data sets without rows, and rows whose types differ between workers.

    ``layouts`` is the result of `read_layouts` on each worker.
    """
    for name in layouts[0]:
        found = [layout[name] for layout in layouts]
        known = {_describe_types(layout["columns"]) for layout in found if layout["columns"]}
        argument = f"`{argument_of(name)}`"
        if not known or not sum(layout["rows"] for layout in found):
            raise InputError(f"{argument} has no rows")
        if len(known) > 1:
            raise InputError(
                f"the rows of {argument} differ in width or type ({'; '.join(sorted(known))}): "
                "all rows must match"
            )


def read_kinds(columns: Mapping[str, Mapping[str, Any]]) -> Kinds:
    """Convert the kinds' fields from JSON to `Kind`."""
    return {key: read_fields(Kind, fields) for key, fields in columns.items()}


class RowStoreWriter:
    """Writer of rows into a new folder; ``kinds`` None: those of the first rows."""

    def __init__(self, folder: Path, kinds: Kinds | None = None) -> None:
        folder.mkdir()
        self.rows = 0
        self.kinds: Kinds = {}
        self._folder = folder
        self._file = (folder / _ROWS).open("wb")
        self._values: dict[str, Any] = {}
        self._written: dict[str, int] = {}
        self._header_bytes = 0  # until the kinds are known
        if kinds is not None:
            self._begin(kinds)

    def __enter__(self) -> RowStoreWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def append(self, columns: Mapping[str, Array | Ragged]) -> None:
        if not self._header_bytes:
            self._begin(describe_columns(columns))
        for key, column in columns.items():
            own, known = Kind.of(column), self.kinds[key]
            if replace(own, longest=known.longest) != known:
                raise InputError(
                    f"rows of {show(key)} {own.describe()}, but earlier rows {known.describe()}: "
                    "all rows must match (pad them to the same length)"
                )
        with naming_full_disk(self._folder, "rows"):
            fields = {
                key: self._write_ragged(key, column) if isinstance(column, Ragged) else column
                for key, column in columns.items()
            }
            self._file.write(pack_rows(fields, self.kinds).data)
        self.rows += len(next(iter(fields.values())))

    def write_at(self, first_row: int, content: bytes) -> None:
        """Write packed rows at a row number; rows with lower numbers may be written later."""
        size = row_dtype(self.kinds).itemsize
        with naming_full_disk(self._folder, "rows"):
            os.pwrite(self._file.fileno(), content, self._header_bytes + first_row * size)
        self.rows = max(self.rows, first_row + len(content) // max(1, size))

    def close(self) -> None:
        """Write the headers with the final number of rows, and close the files."""
        if self._file.closed:
            return
        with naming_full_disk(self._folder, "rows"):
            self._file.flush()
            if self._header_bytes:
                os.pwrite(self._file.fileno(), build_header(row_dtype(self.kinds), self.rows), 0)
            self._file.close()
            for key, file in self._values.items():
                file.seek(0)
                file.write(build_header(self.kinds[key].item, self._written[key]))
                file.close()
            write_layout(self._folder, self.rows, self.kinds)

    def _begin(self, kinds: Kinds) -> None:
        self.kinds = kinds
        header = build_header(row_dtype(kinds), 0)
        self._header_bytes = len(header)
        self._file.write(header)
        for index, (key, kind) in enumerate(kinds.items()):
            if kind.shape is None:
                self._values[key] = (self._folder / f"values{index}.npy").open("wb")
                self._values[key].write(build_header(kind.item, 0))
                self._written[key] = 0
        self._file.flush()

    def _write_ragged(self, key: str, column: Ragged) -> Array:
        first, last = int(column.offsets[0]), int(column.offsets[-1])
        spans = np.empty(len(column), SPAN)
        spans["start"] = column.offsets[:-1] - first + self._written[key]
        spans["length"] = column.lengths
        self._values[key].write(np.ascontiguousarray(column.values[first:last]).data)
        self._written[key] += last - first
        longest = max(self.kinds[key].longest, Kind.of(column).longest)
        self.kinds[key] = replace(self.kinds[key], longest=longest)
        return spans


def unify_layout(folder: Path, layouts: Sequence[Mapping[str, Any]]) -> None:
    """Set a folder's layout to the common layout of all workers' rows.

    A worker without rows gets the other workers' columns, and all workers pad ragged rows to the
    same length.
    """
    own, _ = read_layout(folder)
    every = [read_kinds(layout["columns"]) for layout in layouts if layout["columns"]]
    common = {
        key: replace(kind, longest=max(kinds[key].longest for kinds in every))
        for key, kind in every[0].items()
    }
    if not own:
        shutil.rmtree(folder)
        RowStoreWriter(folder, common).close()
    write_layout(folder, own, common)


def digest_rows(folder: Path) -> str:
    """The digest is the same for the same rows in the same order."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def write_columns(folder: Path, columns: Columns) -> None:
    with RowStoreWriter(folder, describe_columns(columns)) as writer:
        step = max(1, _CHUNK_BYTES // max(1, row_dtype(writer.kinds).itemsize))
        for first in range(0, count_rows(columns), step):
            writer.append({key: array[first : first + step] for key, array in columns.items()})


def link_columns(folder: Path, source: Path) -> None:
    """Create a folder with the same rows using hard links, without copying them."""
    folder.mkdir()
    for file in source.iterdir():
        # Each worker writes the layout again.
        copy = shutil.copyfile if file.name == LAYOUT else os.link
        copy(file, folder / file.name)
