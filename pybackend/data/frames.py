"""A pandas DataFrame as training data: its columns become tensors by way of Arrow."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.data.arrays import Columns
from pybackend.data.arrow import TensorReader, Tensors, describe_schema
from pybackend.data.column_groups import group_columns
from pybackend.data.columns import (
    ColumnKind,
    ColumnSpec,
    TableRows,
    find_index,
    list_columns,
    reject_duplicate_columns,
)
from pybackend.data.encoding import find_categories, keep_categories
from pybackend.data.ragged import Ragged, concatenate, to_dense
from pybackend.errors import InputError

Array = npt.NDArray[Any]
_BATCH_ROWS = 65_536


@dataclass(frozen=True)
class FrameRows(TableRows):
    """Rows of a pandas DataFrame, as what its columns become.

    Attributes
    ----------
    columns
        Arrays with one entry per row, as `pybackend.data.arrays` names them; text is `Ragged`.
        Empty if there are no rows.
    complete
        If incomplete rows were left out: whether each row of the frame is in ``columns``.
    """

    columns: Columns
    complete: Array | None = None

    @classmethod
    def of(
        cls, frame: Any, spec: ColumnSpec, floatx: str, name: str, *, skips_incomplete: bool = False
    ) -> FrameRows:
        """Turn the columns that are used into tensors, by the rules for a Spark DataFrame.

        Without `categories`, the sorted values of a column that is encoded are 0, 1, 2, ...

        Parameters
        ----------
        skips_incomplete
            Whether to leave out rows with a null or an unknown category; then there may be none.

        Raises
        ------
        InputError
            Names the column, and the row of a null, of a label that is NaN, of an unknown category
            or of an array of another length.
        """
        _check_names(frame, name)
        if not len(frame) and not skips_incomplete:
            raise InputError(f"`{name}` has no rows")
        left_out = find_index(spec, frame.columns)
        frame = frame.drop(columns=left_out) if left_out else frame
        frame = _name_intervals(frame)
        table = _to_arrow(frame, spec, name)
        import pyarrow as pa

        if skips_incomplete and any(map(pa.types.is_null, table.schema.types)):
            nothing = np.zeros(len(frame), bool)  # a column of nulls alone has no type
            return cls((), spec, {}, left_out=tuple(left_out), complete=nothing)
        kinds = _kinds(frame, table)
        spec = keep_categories(spec, kinds, lambda column: _categories(frame[column]))

        def distinct(column: str) -> Iterable[Any]:
            values: list[Any] = table[column].unique().to_pylist()
            return values

        spec = find_categories(spec, kinds, distinct)
        groups, _ = group_columns(spec, kinds, floatx, name)
        reader = TensorReader(groups)
        parts: list[Tensors] = []
        complete: list[Array] = []
        first = 0
        for batch in table.select(list_columns(groups)).to_batches(_BATCH_ROWS):
            rows = np.arange(first, first + batch.num_rows)
            first += batch.num_rows
            if skips_incomplete:
                complete.append(reader.find_complete(batch))
                rows, batch = rows[complete[-1]], batch.filter(pa.array(complete[-1]))
            if batch.num_rows:
                parts.append(reader.read(batch, partial(_name_row, rows)))
        columns = {key: _join([part[key] for part in parts]) for key in (parts or [{}])[0]}
        kept = np.concatenate([np.empty(0, bool), *complete]) if skips_incomplete else None
        return cls(tuple(groups), spec, columns, left_out=tuple(left_out), complete=kept)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values())))


def _categories(series: Any) -> Any:
    """The categories of a Categorical, in their order; None for another column."""
    found = getattr(series.dtype, "categories", None)
    return None if found is None else list(found)


def _name_intervals(frame: Any) -> Any:
    """Categories that are neither text nor numbers, such as those of ``pandas.cut``, as text."""
    others = {
        column: frame[column].cat.rename_categories(str)
        for column in frame.columns
        if (known := _categories(frame[column])) is not None and not _is_text_or_number(known)
    }
    return frame.assign(**others) if others else frame


def _is_text_or_number(values: list[Any]) -> bool:
    return all(isinstance(value, str | int | float | np.number | np.bool_) for value in values)


def is_frame(data: Any) -> bool:
    """Whether data are a pandas DataFrame; pandas is not imported to find out."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(data, pandas.DataFrame)


def _check_names(frame: Any, name: str) -> None:
    names = list(frame.columns)
    bad = [column for column in names if not isinstance(column, str)]
    if bad:
        raise InputError(
            f"`{name}` has a column named {bad[0]!r}: columns are named by text, e.g. "
            "frame.columns = [f'c{n}' for n in range(frame.shape[1])]"
        )
    reject_duplicate_columns(names, name)


def _to_arrow(frame: Any, spec: ColumnSpec, name: str) -> Any:
    """An Arrow table of the columns that may be used."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise InputError(
            f"`{name}` is a pandas DataFrame, which needs the Python package pyarrow: install it, "
            "or pass arrays"
        ) from error
    used = list(frame.columns) if spec.features is None else spec.named_columns
    columns = {c: _arrow_column(frame[c], name) for c in dict.fromkeys(used) if c in frame}
    return pa.table(columns)


def _arrow_column(series: Any, name: str) -> Any:
    import pyarrow as pa

    try:
        if isinstance(series.dtype, np.dtype) and series.dtype.kind == "f":
            return pa.array(series.to_numpy())  # in pandas' own way, NaN would become null
        return pa.Array.from_pandas(_nested_lists(series))
    except OverflowError as error:
        raise InputError(
            f"column {series.name!r} of `{name}` has whole numbers of more than 64 bits"
        ) from error
    except UnicodeError as error:
        raise InputError(
            f"column {series.name!r} of `{name}` has text that is not valid Unicode: {error}"
        ) from error
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise InputError(
            f"column {series.name!r} of `{name}` has values of different types, or of one that "
            f"Arrow does not know ({error}): expected numbers, arrays of numbers, bytes or text"
        ) from error


def _nested_lists(series: Any) -> Any:
    """Arrays of several dimensions as lists of arrays: Arrow takes no others."""
    if series.dtype != object or not any(np.ndim(value) > 1 for value in series.iloc[:1]):
        return series
    return series.map(_nest)


def _nest(value: Any) -> Any:
    return [_nest(part) for part in value] if np.ndim(value) > 1 else value


def _kinds(frame: Any, table: Any) -> Mapping[str, ColumnKind]:
    """What all columns hold; those that are not used have the name of pandas for it only."""
    known = describe_schema(table.schema)
    return {
        column: known.get(column) or ColumnKind("other", None, 0, str(frame[column].dtype))
        for column in frame.columns
    }


def _name_row(rows: Array, row: int) -> str:
    return f"row {rows[row]} (counting from 0)"


def _join(parts: list[Any]) -> Any:
    """Parts of a column as one, ragged numbers padded with zeros to the longest row."""
    if not isinstance(parts[0], Ragged):
        return np.concatenate(parts)
    column = concatenate(parts)
    return column if column.is_text else to_dense(column)
