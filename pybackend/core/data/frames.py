"""In-memory tables as training data: their columns become tensors through Arrow.

A table is a pandas DataFrame, or comes from a library that exports Arrow streams (polars, pyarrow,
DuckDB). Labels and weights may be separate arrays.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pybackend.core.data import arrays, arrow
from pybackend.core.data.arrays import Array, Columns, Ragged
from pybackend.core.data.column_groups import group_columns
from pybackend.core.data.columns import (
    DEFAULT_LABEL,
    JOINED_NAMES,
    ColumnGroup,
    ColumnKind,
    ColumnSpec,
    TableRows,
    find_categories,
    find_index,
    input_name,
    keep_categories,
    list_columns,
    reject_duplicate_columns,
)
from pybackend.core.errors import InputError
from pybackend.core.words import row_number, show, term

_BATCH_ROWS = 65_536
_LISTED = 8


@dataclass(frozen=True)
class FrameRows(TableRows):
    """Rows of a table, converted to tensors: text is `Ragged`."""

    columns: Columns  # by name as in `arrays`; empty if there are no rows
    # If incomplete rows were left out: whether each row of the table is in `columns`.
    complete: Array | None = None

    @classmethod
    def of(
        cls, data: Any, spec: ColumnSpec, floatx: str, name: str, *, skips_incomplete: bool = False
    ) -> FrameRows:
        """Convert the selected columns to tensors, following the rules for a Spark DataFrame.

        ``data`` are tables, or a tuple of tables, labels and weights (see `holds_frame`). Without
        `categories`, the sorted values of an encoded column become the codes 0, 1, 2, ... With
        ``skips_incomplete``, rows with a null or an unknown category are left out; then there may
        be zero rows. An `InputError` names the column, and the row that has a null, a label that is
        NaN, an unknown category or an array of a different length.
        """
        frame, *targets = data if isinstance(data, (list, tuple)) else (data,)
        if is_frame(frame):
            table = _read_table(frame, name)
        else:
            spec, table = _read_inputs(frame, spec, floatx, name)
        if targets:
            spec, table = _add_targets(spec, table, targets, floatx, name)
        if not table.rows and not skips_incomplete:
            raise InputError(f"`{name}` has no rows")
        left_out = find_index(spec, table.columns)
        own = {name: column for name, column in table.columns.items() if name not in left_out}
        used = own if spec.features is None else spec.named_columns
        import pyarrow as pa

        chosen = pa.table({name: own[name].read() for name in dict.fromkeys(used) if name in own})
        if skips_incomplete and any(map(pa.types.is_null, chosen.schema.types)):
            nothing = np.zeros(table.rows, bool)  # a column of only nulls has no type
            return cls((), spec, {}, left_out=tuple(left_out), complete=nothing)
        known = arrow.describe_schema(chosen.schema)
        kinds = {name: known.get(name) or column.kind for name, column in own.items()}
        spec = keep_categories(spec, kinds, lambda name: own[name].find_categories())
        spec = find_categories(spec, kinds, lambda column: chosen[column].unique().to_pylist())
        groups = group_columns(spec, kinds, floatx, name)
        tensors, complete = _read_tensors(chosen, groups, skips_incomplete)
        return cls(tuple(groups), spec, tensors, left_out=tuple(left_out), complete=complete)

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values())))


def _read_tensors(
    table: Any, groups: Sequence[ColumnGroup], skips_incomplete: bool
) -> tuple[Columns, Array | None]:
    """Return the tensors of a table's rows, and if some are skipped, a mask of complete ones."""
    import pyarrow as pa

    reader = arrow.TensorReader(groups)
    parts: list[arrow.Tensors] = []
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
    tensors = {key: _join([part[key] for part in parts]) for key in (parts or [{}])[0]}
    if not skips_incomplete:
        return tensors, None
    if table.num_rows and not parts:
        _warn_of_other_values(table, groups)
    return tensors, np.concatenate([np.empty(0, bool), *complete])


def _warn_of_other_values(table: Any, groups: Sequence[ColumnGroup]) -> None:
    """Warn if none of a column's values are among its categories from training."""
    for group in groups:
        for name, values in group.categories.items():
            column = table[name].drop_null().unique()
            if len(column) and not arrow.find_known(column, name, values).any():
                known = ", ".join(str(value) for value in values[:_LISTED])
                warnings.warn(
                    f"column {show(name)} has none of its categories "
                    f"({known}{', ...' if len(values) > _LISTED else ''}), but other values such "
                    f"as {show(column[0].as_py())}: no row gets a prediction",
                    stacklevel=2,
                )


def is_frame(data: Any) -> bool:
    """True for a table in memory; its library is not imported."""
    is_arrow = hasattr(type(data), "__arrow_c_stream__") and (
        hasattr(data, "columns") or hasattr(data, "schema")
    )
    # A Spark DataFrame also exports a stream, by collecting all rows.
    return is_pandas(data) or (is_arrow and not type(data).__module__.startswith("pyspark."))


def is_pandas(data: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(data, pandas.DataFrame)


def has_frames(x: Any) -> bool:
    """True for a table, or a dict or list of tables and arrays of several inputs."""
    inputs = list(x.values()) if isinstance(x, Mapping) else x
    if not isinstance(inputs, (list, tuple)):
        return is_frame(x)
    dtypes = [getattr(one, "dtype", None) for one in inputs if not is_frame(one)]
    is_number = [getattr(dtype, "kind", "O") in "fiub" for dtype in dtypes]
    return len(dtypes) < len(inputs) and all(is_number)


def holds_frame(data: Any) -> bool:
    """True if x has tables, in data of the form x, (x,), (x, y) or (x, y, sample_weight)."""
    if not isinstance(data, (list, tuple)):
        return has_frames(data)
    return 1 <= len(data) <= 3 and has_frames(data[0])


@dataclass(frozen=True)
class _Column:
    """A column of a table, which is read only when used."""

    kind: ColumnKind  # for messages, if it is not read
    read: Callable[[], Any]  # as an Arrow array
    find_categories: Callable[[], Sequence[Any] | None]  # in order; None if it has none


@dataclass(frozen=True)
class _Table:
    columns: dict[str, _Column]
    rows: int


def _read_table(frame: Any, name: str) -> _Table:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise InputError(
            f"`{name}` is a data frame, which needs the package pyarrow: install it or pass arrays"
        ) from error
    if is_pandas(frame):
        return _read_pandas(frame, name)
    try:
        table = pa.table(frame)
    except MemoryError:  # Arrow's is an `ArrowException`, too
        raise
    except pa.ArrowException as error:
        raise InputError(
            f"`{name}`, of class {type(frame).__qualname__}, has a column that Arrow cannot read: "
            f"{error}. Cast it to a 64-bit type, or leave it out"
        ) from error
    reject_duplicate_columns(table.column_names, name)

    def read(column: str) -> Any:
        return arrow.drop_views(table[column])

    def find(column: str) -> list[Any] | None:
        if not isinstance(table.schema.field(column).type, pa.DictionaryType):
            return None
        chunks = read(column).unify_dictionaries().chunks
        return chunks[0].dictionary.to_pylist() if chunks else []

    kinds = arrow.describe_schema(table.schema).items()
    columns = {c: _Column(kind, partial(read, c), partial(find, c)) for c, kind in kinds}
    return _Table(columns, table.num_rows)


def _read_pandas(frame: Any, name: str) -> _Table:
    _check_names(frame, name)
    columns = {
        column: _Column(
            ColumnKind("other", None, 0, str(series.dtype)),
            partial(_arrow_column, series, name),
            partial(_categories, series),
        )
        for column, series in _name_intervals(frame).items()
    }
    return _Table(columns, len(frame))


def _read_inputs(x: Any, spec: ColumnSpec, floatx: str, name: str) -> tuple[ColumnSpec, _Table]:
    """Return several inputs as one table, and its columns of each input.

    The column ``a`` of the input ``left`` is ``left.a``, unless `features` has it as ``a``. An
    array is one column with the name of the input.
    """
    known = spec.features if isinstance(spec.features, Mapping) else {}
    own: dict[str, _Column] = {}
    features: dict[str, list[str]] = {}
    rows: dict[str, int] = {}
    tensors = dict(spec.tensors or {})
    for key, part in arrays.flatten_part("x", x):
        of = input_name(key)
        table = _read_targets(part, key, floatx, name)
        columns = [of.removeprefix("#")]
        if is_frame(part):
            columns = [
                column if column in known.get(of, ()) else f"{of.removeprefix('#')}.{column}"
                for column in table.columns
            ]
        elif np.ndim(part) > 2:
            tensors[columns[0]] = part.dtype.str, part.shape[1:]
        reject_duplicate_columns([*own, *columns], name)
        own |= zip(columns, table.columns.values(), strict=True)
        rows[key], indexes = table.rows, find_index(spec, table.columns)
        pairs = zip(columns, table.columns, strict=True)
        features[of] = [column for column, named in pairs if named not in indexes]
    arrays.check_equal_counts(rows, f"inputs of `{name}`")
    label = spec.label if spec.label in own else None  # without labels, as arrays
    spec = replace(spec, label=label, features=spec.features or features, tensors=tensors or None)
    return spec, _Table(own, next(iter(rows.values())))


def _add_targets(
    spec: ColumnSpec, table: _Table, targets: Sequence[Any], floatx: str, name: str
) -> tuple[ColumnSpec, _Table]:
    parts = dict(zip(("y", "sample_weight"), targets, strict=False))
    if parts["y"] is None and parts.get("sample_weight") is not None:
        raise InputError(
            f"`{name}` has sample weights but no labels: pass {term('(x, y, sample_weight)')}"
        )
    defaults = {
        "y": spec.label if isinstance(spec.label, str) else DEFAULT_LABEL,
        "sample_weight": spec.weight if isinstance(spec.weight, str) else "sample_weight",
    }
    added: dict[str, _Column] = {}
    roles: dict[str, Any] = {}
    for part, given in parts.items():
        if given is None:
            continue
        names: dict[str, Any] = {}
        for key, value in arrays.flatten_part(part, given):
            found = _read_targets(value, key, floatx, name)
            arrays.check_equal_counts({"x": table.rows, key: found.rows}, f"arrays of `{name}`")
            output = input_name(key)
            columns = [f"{part}.{output}" if output else defaults[part]]
            if len(found.columns) > 1:  # x may have columns of these names, such as earlier values
                columns = [c if c not in table.columns else f"{part}.{c}" for c in found.columns]
            if twice := (table.columns.keys() | added).intersection(columns):
                raise InputError(
                    f"the data frame in `{name}` has a column {show(min(twice))}, but {part} is "
                    "also passed separately: drop the column, or pass the data frame alone"
                )
            added |= zip(columns, found.columns.values(), strict=True)
            names[output] = columns if len(columns) > 1 else columns[0]
        roles[part] = names.get("", names)
    label = roles.get("y")
    if spec.known_from and isinstance(spec.label, list) and isinstance(label, list):
        if sorted(label) != sorted(spec.label):
            raise InputError(
                f"the labels of `{name}` have the columns {', '.join(label)}, but those of "
                f"{spec.known_from} have {', '.join(spec.label)}"
            )
        label = spec.label
    spec = replace(spec, label=label, weight=roles.get("sample_weight"))
    return spec, _Table(table.columns | added, table.rows)


def _read_targets(part: Any, key: str, floatx: str, name: str) -> _Table:
    """Return an input, labels or weights as a table, of one column unless it is a data frame."""
    if is_frame(part):
        if is_pandas(part):
            part = part.set_axis(list(map(str, part.columns)), axis=1)
        table = _read_table(part, key)
        if not table.columns:
            raise InputError(f"`{key}` of `{name}` is a data frame without columns")
        return table
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(part, pandas.Series):
        return _read_table(part.to_frame(key), key)
    import pyarrow as pa

    if hasattr(part, "__arrow_c_stream__"):
        column = arrow.drop_views(pa.chunked_array(part))
    else:
        array = np.asarray(part)
        if array.dtype.kind not in "OUS" or array.ndim != 1:
            array = arrays.to_array(key, part, floatx, name)
        column = pa.array(array.reshape(-1))
        for size in reversed(array.shape[1:]):
            column = pa.FixedSizeListArray.from_arrays(column, size)
    kind = ColumnKind("other", None, 0, str(column.type))
    return _Table({key: _Column(kind, lambda: column, partial(_categories, part))}, len(column))


def _categories(series: Any) -> Any:
    """Return the categories of a Categorical, in order; None for other columns."""
    found = getattr(getattr(series, "dtype", None), "categories", None)
    return None if found is None else list(found)


def _name_intervals(frame: Any) -> Any:
    """Convert categories that are not text or numbers, e.g. those of ``pandas.cut``, to text."""
    plain = str | int | float | np.number | np.bool_
    others = {
        column: frame[column].cat.rename_categories(str)
        for column in frame.columns
        if not all(isinstance(value, plain) for value in _categories(frame[column]) or ())
    }
    return frame.assign(**others) if others else frame


def _check_names(frame: Any, name: str) -> None:
    names = list(frame.columns)
    if bad := [column for column in names if not isinstance(column, str)]:
        of_any = "frame.columns = [f'c{n}' for n in range(frame.shape[1])]"
        cure = JOINED_NAMES if isinstance(bad[0], tuple) else of_any  # tuples: of a MultiIndex
        raise InputError(
            f"`{name}` has a column named {show(bad[0])}: column names must be text, e.g. {cure}"
        )
    reject_duplicate_columns(names, name)


def _arrow_column(series: Any, name: str) -> Any:
    import pyarrow as pa

    try:
        if isinstance(series.dtype, np.dtype) and series.dtype.kind == "f":
            return pa.array(series.to_numpy())  # pandas' conversion would turn NaN into null
        if hasattr(series.dtype, "fill_value"):  # pandas' sparse columns
            series = series.sparse.to_dense()
        if series.dtype == object and any(map(_is_nested, series.iloc[:1])):
            series = series.map(_nest)
        return pa.Array.from_pandas(series)
    except MemoryError:
        raise
    except (OverflowError, UnicodeError, pa.ArrowException) as error:
        what = (
            f"has values of different types, or of a type that Arrow does not support ({error}): "
            "expected numbers, arrays of numbers, bytes or text"
        )
        if isinstance(error, OverflowError):
            what = "contains integers wider than 64 bits"
        elif isinstance(error, UnicodeError):
            what = f"has text that is not valid Unicode: {error}"
        raise InputError(f"column {show(series.name)} of `{name}` {what}") from error


def _nest(value: Any) -> Any:
    """Convert arrays of several dimensions to lists of arrays, which Arrow accepts."""
    return [_nest(part) for part in value] if _is_nested(value) else value


def _is_nested(value: Any) -> bool:
    try:
        return np.ndim(value) > 1
    except ValueError:  # lists of different lengths
        return True


def _name_row(rows: Array, row: int) -> str:
    return row_number(rows[row])


def _join(parts: list[Any]) -> Any:
    """Ragged numbers are zero-padded to equal length."""
    if not isinstance(parts[0], Ragged):
        return np.concatenate(parts)
    column = arrays.concatenate(parts)
    return column if column.is_text else arrays.to_dense(column)
