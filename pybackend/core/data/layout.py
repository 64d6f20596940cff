"""Layout of a row store: a file with its columns' types, compared between workers."""

from __future__ import annotations

import hashlib
import io
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.core.data.ragged import Ragged
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.job import argument_of
from pybackend.core.words import show

Array = npt.NDArray[Any]

LAYOUT = "layout.json"
# Start and number of the values of a ragged row.
PLACE = np.dtype([("start", "<i8"), ("length", "<i8")])


_TEXT = ("is_text", "is_list")


@dataclass(frozen=True)
class Kind:
    """Type and shape of a column's values.

    Attributes
    ----------
    dtype
        numpy's name for the values' type.
    shape
        Shape of a row; None for a ragged column, whose rows are padded with zeros to ``longest``.
    longest
        Length of a ragged column's longest row on any worker.
    is_text, is_list
        Whether a row is a string, or with ``is_list`` a list of strings; the values are bytes.
    inner
        Shape of each value in a ragged column's row.
    """

    dtype: str
    shape: tuple[int, ...] | None
    longest: int = 0
    is_text: bool = False
    inner: tuple[int, ...] = ()
    is_list: bool = False

    @classmethod
    def of(cls, column: Array | Ragged) -> Kind:
        """Return the kind of a column in memory."""
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
    def field(self) -> Any:
        """Type and shape of the column's field in the file's structured type."""
        return PLACE if self.shape is None else (self.dtype, self.shape)

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
    """Return the kind of each column."""
    return {key: Kind.of(column) for key, column in columns.items()}


def row_dtype(kinds: Kinds) -> np.dtype[Any]:
    """Return the structured type of a row: fields ``f0``, ``f1``, ... in column order."""
    fields = [(f"f{place}", kind.field) for place, kind in enumerate(kinds.values())]
    return np.dtype(
        [(name, *field) if isinstance(field, tuple) else (name, field) for name, field in fields]
    )


def build_header(dtype: np.dtype[Any], rows: int) -> bytes:
    """Build the header of an ``.npy`` file; its length does not depend on the number of rows."""
    buffer = io.BytesIO()
    fields = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (rows,),
    }
    np.lib.format.write_array_header_2_0(buffer, fields)
    return buffer.getvalue()


def pack_rows(columns: Mapping[str, Array], kinds: Kinds) -> Array:
    """Pack fixed-width columns into one array of type `row_dtype`."""
    count = len(next(iter(columns.values()))) if columns else 0
    rows = np.empty(count, row_dtype(kinds))
    for place, column in enumerate(columns.values()):
        rows[f"f{place}"] = column
    return rows


def write_layout(folder: Path, rows: int, kinds: Kinds) -> None:
    """Write the layout of a folder of rows; called again once the rows of all workers are known."""
    layout = {"rows": rows, "columns": {key: asdict(kind) for key, kind in kinds.items()}}
    layout["sha256"] = _digest(layout)
    (folder / LAYOUT).write_text(json.dumps(layout))


def read_layout(folder: Path) -> tuple[int, Kinds]:
    """Read the number of rows and the kinds of their columns."""
    layout = _read(folder / LAYOUT)
    return layout["rows"], read_kinds(layout["columns"])


def read_layouts(folder: Path) -> dict[str, Any]:
    """Read the layouts of all subfolders of a folder, as plain JSON data."""
    return {path.parent.name: _read(path) for path in sorted(folder.glob(f"*/{LAYOUT}"))}


def _read(path: Path) -> dict[str, Any]:
    """Read a layout; raise `ClusterError` if it was altered."""
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


def check_layouts(layouts: Sequence[Mapping[str, Any]]) -> None:
    """Reject data sets without rows, and rows whose types differ between workers.

    Parameters
    ----------
    layouts
        Result of `read_layouts` on each worker.
    """
    for name in layouts[0]:
        found = [layout[name] for layout in layouts]
        known = {
            json.dumps(
                {
                    key: [column[name] for name in ("dtype", "shape", "inner", *_TEXT)]
                    for key, column in layout["columns"].items()
                }
            )
            for layout in found
            if layout["columns"]
        }
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
    return {
        key: Kind(
            fields["dtype"],
            None if fields["shape"] is None else tuple(fields["shape"]),
            fields["longest"],
            fields["is_text"],
            tuple(fields["inner"]),
            fields["is_list"],
        )
        for key, fields in columns.items()
    }
