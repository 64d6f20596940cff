"""A worker's rows on disk, read back by row number in memory that does not grow with them.

Columns of fixed width lie row by row in one ``.npy`` file of a structured type, so that one read
brings a whole row. A ragged column has its place and length there, and its values in an ``.npy``
file of its own.

Beyond the first ones, rows are read by ``pread``, not through a memory map: a map of shuffled rows
makes the whole file resident, which counts against the limits that containers and resource managers
set.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.data.arrays import Columns, rows_of
from pybackend.errors import InputError
from pybackend.job.job import argument_of

Array = npt.NDArray[Any]

_LAYOUT = "layout.json"
_ROWS = "rows.npy"
# Where the values of a ragged row begin, and how many there are.
_PLACE = np.dtype([("start", "<i8"), ("length", "<i8")])
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths: row i is ``values[offsets[i]:offsets[i + 1]]``.

    With ``is_text`` the values are UTF-8 bytes, and a row is one string.
    """

    values: Array
    offsets: Array
    is_text: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Array:
        """Values of each row."""
        return np.diff(self.offsets)

    def __getitem__(self, rows: slice) -> Ragged:
        """A copy of some rows."""
        places = np.arange(len(self))[rows]
        lengths = self.lengths[places]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        elements = np.repeat(self.offsets[places] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Ragged(self.values[elements], offsets, self.is_text)


def concatenate(parts: Sequence[Ragged]) -> Ragged:
    """The rows of several ragged columns of one type as one column."""
    lengths = np.concatenate([part.lengths for part in parts])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = [part.values[part.offsets[0] : part.offsets[-1]] for part in parts]
    return Ragged(np.concatenate(values), offsets, parts[0].is_text)


def dense(column: Array | Ragged, longest: int = 0) -> Array:
    """A column as an array: text as strings of shape (rows, 1), numbers padded with zeros.

    Parameters
    ----------
    longest
        So long padded rows become at least.
    """
    if not isinstance(column, Ragged):
        return column
    values = column.values[column.offsets[0] : column.offsets[-1]]
    if column.is_text:
        content, edges = values.tobytes(), (column.offsets - column.offsets[0]).tolist()
        return strings_of([content[first:last] for first, last in pairwise(edges)])
    lengths = column.lengths
    padded = np.zeros((len(column), max(longest, int(lengths.max(initial=0)))), values.dtype)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = values
    return padded


def strings_of(texts: Sequence[bytes]) -> Array:
    """Text as a column of shape (rows, 1)."""
    strings = np.empty((len(texts), 1), object)
    strings[:, 0] = texts
    return strings


@dataclass(frozen=True)
class Kind:
    """What a column holds.

    Attributes
    ----------
    dtype
        Numpy's name of the values' type.
    shape
        Of a row; None for a ragged column, whose rows are padded with zeros to the ``longest``.
    longest
        Of a ragged column's rows, on any worker.
    is_text
        A row is a string, whose bytes are the values.
    """

    dtype: str
    shape: tuple[int, ...] | None
    longest: int = 0
    is_text: bool = False

    @classmethod
    def of(cls, column: Array | Ragged) -> Kind:
        """The kind of a column in memory."""
        if isinstance(column, Ragged):
            longest = int(column.lengths.max(initial=0))
            return cls(column.values.dtype.str, None, longest, column.is_text)
        return cls(column.dtype.str, column.shape[1:])

    @property
    def field(self) -> Any:
        """Its place in a row of the file: type and shape."""
        return _PLACE if self.shape is None else (self.dtype, self.shape)

    @property
    def row(self) -> tuple[Any, tuple[int, ...]]:
        """Type and shape of a row as it is fed to a model; strings are objects of ``bytes``."""
        if self.is_text:
            return np.dtype(object), (1,)
        return np.dtype(self.dtype), (self.longest,) if self.shape is None else self.shape


Kinds = dict[str, Kind]


def kinds_of(columns: Mapping[str, Array | Ragged]) -> Kinds:
    """The kind of each column."""
    return {key: Kind.of(column) for key, column in columns.items()}


def row_dtype(kinds: Kinds) -> np.dtype[Any]:
    """The structured type of a row of the file: fields ``f0``, ``f1``, ... in column order."""
    fields = [(f"f{place}", kind.field) for place, kind in enumerate(kinds.values())]
    return np.dtype(
        [(name, *field) if isinstance(field, tuple) else (name, field) for name, field in fields]
    )


def packed(columns: Mapping[str, Array], kinds: Kinds) -> Array:
    """Columns of fixed width as one array of `row_dtype`."""
    count = len(next(iter(columns.values()))) if columns else 0
    rows = np.empty(count, row_dtype(kinds))
    for place, column in enumerate(columns.values()):
        rows[f"f{place}"] = column
    return rows


class SpoolWriter:
    """Writes rows into a new folder as they come.

    Parameters
    ----------
    kinds
        What the columns hold; None: as the first rows show.
    """

    def __init__(self, folder: Path, kinds: Kinds | None = None) -> None:
        folder.mkdir()
        self.rows = 0
        self.kinds = kinds
        self._folder = folder
        self._file = (folder / _ROWS).open("wb")
        self._values: dict[str, Any] = {}
        self._written: dict[str, int] = {}
        self._header = 0
        if kinds is not None:
            self._begin(kinds)

    def __enter__(self) -> SpoolWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def append(self, columns: Mapping[str, Array | Ragged]) -> None:
        """Write rows of the kinds that the first ones had."""
        if self.kinds is None:
            self._begin(kinds_of(columns))
        assert self.kinds is not None
        for key, column in columns.items():
            if not isinstance(column, Ragged) and Kind.of(column) != self.kinds[key]:
                raise InputError(
                    f"rows of {key!r} have shape {column.shape[1:]} and type {column.dtype} after "
                    f"rows of {self.kinds[key].shape} and {self.kinds[key].dtype}: all need the "
                    "same (pad them to one length)"
                )
        fields: dict[str, Array] = {}
        for key, column in columns.items():
            fields[key] = self._places(key, column) if isinstance(column, Ragged) else column
        self._file.write(packed(fields, self.kinds).data)
        self.rows += len(next(iter(fields.values())))

    def place(self, first_row: int, content: bytes) -> None:
        """Write packed rows at a row number; what is before it may come later."""
        assert self.kinds is not None
        size = row_dtype(self.kinds).itemsize
        os.pwrite(self._file.fileno(), content, self._header + first_row * size)
        self.rows = max(self.rows, first_row + len(content) // max(1, size))

    def close(self) -> None:
        """Write what is known only now: how many rows there are."""
        if self._file.closed:
            return
        self._file.flush()
        if self.kinds is not None:
            os.pwrite(self._file.fileno(), _header(row_dtype(self.kinds), self.rows), 0)
        self._file.close()
        for key, file in self._values.items():
            file.seek(0)
            assert self.kinds is not None
            file.write(_header(np.dtype(self.kinds[key].dtype), self._written[key]))
            file.close()
        write_layout(self._folder, self.rows, self.kinds or {})

    def _begin(self, kinds: Kinds) -> None:
        self.kinds = kinds
        header = _header(row_dtype(kinds), 0)
        self._header = len(header)
        self._file.write(header)
        for place, (key, kind) in enumerate(kinds.items()):
            if kind.shape is None:
                self._values[key] = (self._folder / f"values{place}.npy").open("wb")
                self._values[key].write(_header(np.dtype(kind.dtype), 0))
                self._written[key] = 0
        self._file.flush()

    def _places(self, key: str, column: Ragged) -> Array:
        assert self.kinds is not None
        first, last = int(column.offsets[0]), int(column.offsets[-1])
        places = np.empty(len(column), _PLACE)
        places["start"] = column.offsets[:-1] - first + self._written[key]
        places["length"] = column.lengths
        self._values[key].write(np.ascontiguousarray(column.values[first:last]).data)
        self._written[key] += last - first
        known = self.kinds[key]
        longest = max(known.longest, int(column.lengths.max(initial=0)))
        self.kinds[key] = Kind(known.dtype, None, longest, known.is_text)
        return places


def write_layout(folder: Path, rows: int, kinds: Kinds) -> None:
    """Write down what a folder of rows holds, again where other workers' rows have told more."""
    layout = {"rows": rows, "columns": {key: asdict(kind) for key, kind in kinds.items()}}
    (folder / _LAYOUT).write_text(json.dumps(layout))


def read_layout(folder: Path) -> tuple[int, Kinds]:
    """Number of rows, and what their columns hold."""
    layout = json.loads((folder / _LAYOUT).read_text())
    return layout["rows"], kinds_from_json(layout["columns"])


def layouts_in(folder: Path) -> dict[str, Any]:
    """What `write_layout` wrote into the folders in a folder, as JSON can carry it."""
    return {
        path.parent.name: json.loads(path.read_text())
        for path in sorted(folder.glob(f"*/{_LAYOUT}"))
    }


def check_layouts(layouts: Sequence[Mapping[str, Any]]) -> None:
    """Refuse data sets without rows, and rows that differ from worker to worker.

    Parameters
    ----------
    layouts
        What `layouts_in` tells on each worker.
    """
    for name in layouts[0]:
        found = [layout[name] for layout in layouts]
        known = {
            json.dumps({k: [c["dtype"], c["shape"]] for k, c in layout["columns"].items()})
            for layout in found
            if layout["columns"]
        }
        argument = f"`{argument_of(name)}`"
        if not known or not sum(layout["rows"] for layout in found):
            raise InputError(f"{argument} has no rows")
        if len(known) > 1:
            raise InputError(
                f"the rows of {argument} differ in width or type ({'; '.join(sorted(known))}): "
                "every row needs the same"
            )


def settle(folder: Path, layouts: Sequence[Mapping[str, Any]]) -> None:
    """Make a folder's layout the one of all workers' rows.

    A worker without rows learns what their columns hold, and all pad ragged rows alike.
    """
    own, _ = read_layout(folder)
    every = [kinds_from_json(layout["columns"]) for layout in layouts if layout["columns"]]
    common = {
        key: replace(kind, longest=max(kinds[key].longest for kinds in every))
        for key, kind in every[0].items()
    }
    if not own:
        shutil.rmtree(folder)
        SpoolWriter(folder, common).close()
    write_layout(folder, own, common)


def kinds_from_json(columns: Mapping[str, Mapping[str, Any]]) -> Kinds:
    """Kinds from JSON of their fields."""
    return {
        key: Kind(
            fields["dtype"],
            None if fields["shape"] is None else tuple(fields["shape"]),
            fields["longest"],
            fields["is_text"],
        )
        for key, fields in columns.items()
    }


def write_columns(folder: Path, columns: Columns) -> None:
    """Write columns of equal length into a new folder, a few rows at a time."""
    with SpoolWriter(folder, kinds_of(columns)) as writer:
        rows = rows_of(columns) if columns else 0
        step = max(1, _CHUNK_BYTES // max(1, row_dtype(kinds_of(columns)).itemsize))
        for first in range(0, rows, step):
            writer.append({key: array[first : first + step] for key, array in columns.items()})


def link_columns(folder: Path, source: Path) -> None:
    """Make a folder of the same rows without a copy."""
    folder.mkdir()
    for file in source.iterdir():
        os.link(file, folder / file.name)


def _header(dtype: np.dtype[Any], rows: int) -> bytes:
    """Header of an ``.npy`` file; of one length, whatever the number of rows."""
    buffer = io.BytesIO()
    fields = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (rows,),
    }
    np.lib.format.write_array_header_2_0(buffer, fields)
    return buffer.getvalue()
