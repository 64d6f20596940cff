"""A Spark DataFrame as training data: checked on the driver, using only its schema."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pybackend.core.data.column_groups import group_columns
from pybackend.core.data.columns import (
    ColumnKind,
    ColumnSpec,
    TableRows,
    find_index,
    reject_duplicate_columns,
)
from pybackend.core.data.encoding import MOST_CATEGORIES, find_categories

_NUMBERS = {
    "boolean": "bool",
    "byte": "int8",
    "short": "int16",
    "integer": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
    "decimal": "float64",
}


@dataclass(frozen=True)
class DataFrameRows(TableRows):
    """The columns used from a Spark DataFrame, and the tensors made from them.

    Attributes
    ----------
    frame
        A ``pyspark.sql.DataFrame`` of these columns, renamed to ``c0``, ``c1``, ..., so that dots
        and backticks in names need no quoting. The ``places`` of the column groups refer to these.
    """

    frame: Any

    @classmethod
    def of(cls, frame: Any, spec: ColumnSpec, floatx: str, name: str) -> DataFrameRows:
        """Check names and types against the schema.

        A Spark job runs for each encoded column (text label or feature) without `categories`: its
        sorted values become the codes 0, 1, 2, ...

        Raises
        ------
        InputError
            Names the column and what is expected.
        """
        reject_duplicate_columns(
            [field.name for field in frame.schema.fields], name, ignores_case=True
        )
        types = column_types(frame.schema, spec)
        frame = add_fields(frame, types)
        left_out = find_index(spec, types)
        kinds = {c: describe_type(kind) for c, kind in types.items() if c not in left_out}
        spec = find_categories(spec, kinds, lambda column: _collect_distinct(frame, column))
        column_groups, read = group_columns(spec, kinds, floatx, name)
        columns = [
            _narrow(frame, column, types[column], kinds[column], floatx).alias(f"c{place}")
            for place, column in enumerate(read)
        ]
        selected = frame.select(*columns)
        return cls(tuple(column_groups), spec, selected, left_out=tuple(left_out))


def column_types(schema: Any, spec: ColumnSpec) -> dict[str, Any]:
    """Return the types of a schema's columns and of the fields that a spec names (``"s.a"``)."""
    types = {field.name: field.dataType for field in schema.fields}
    for name in spec.named_columns:
        kind = None if name in types else _find_field(schema, name)
        types |= {} if kind is None else {name: kind}
    return types


def _find_field(schema: Any, name: str) -> Any:
    kind = schema
    for part in name.split("."):
        if kind.typeName() != "struct" or part not in kind.fieldNames():
            return None
        kind = kind[part].dataType
    return kind


def add_fields(frame: Any, types: Iterable[str]) -> Any:
    """Add the fields of structs among names of `column_types` to a DataFrame, as last columns."""
    own = set(frame.columns)
    fields = [
        frame[".".join(map(_quote, name.split(".")))].alias(name)
        for name in types
        if name not in own
    ]
    return frame.select("*", *fields) if fields else frame


def describe_type(kind: Any) -> ColumnKind:
    """Return the kind of a column that has a Spark type."""
    depth, inner = 0, kind
    while inner.typeName() == "array":
        depth, inner = depth + 1, inner.elementType
    type_name = inner.typeName()
    shown = kind.simpleString()
    if type_name in _NUMBERS:
        return ColumnKind("number", _NUMBERS[type_name], depth, shown)
    if type(inner).__name__ == "VectorUDT" and not depth:
        return ColumnKind("number", "float64", 1, "vector")
    holds = {"binary": "binary", "string": "text", "char": "text", "varchar": "text"}
    return ColumnKind(holds.get(type_name, "other"), None, depth, shown)


def _collect_distinct(frame: Any, column: str) -> list[Any]:
    found = frame.select(_quote_column(frame, column)).distinct().limit(MOST_CATEGORIES + 1)
    return [row[0] for row in found.collect()]


def _quote_column(frame: Any, column: str) -> Any:
    """Return a column by its complete name, dots included.

    PySpark's functions are not used: they assume that a process has only one kind of session.
    """
    return frame[_quote(column)]


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def column_as_array(frame: Any, column: str, kind: Any) -> Any:
    """Return a column by name; ML vectors, dense or sparse, become arrays of doubles."""
    quoted = _quote_column(frame, column)
    if type(kind).__name__ != "VectorUDT":
        return quoted
    from pyspark.ml.functions import vector_to_array

    return vector_to_array(quoted)


def _narrow(frame: Any, column: str, kind: Any, holds: ColumnKind, floatx: str) -> Any:
    """Return a column as it is sent: floats in the precision of training, vectors as arrays."""
    quoted = _quote_column(frame, column)
    wide = floatx == "float64"
    if type(kind).__name__ == "VectorUDT":
        from pyspark.ml.functions import vector_to_array

        return vector_to_array(quoted, "float64" if wide else "float32")
    is_wide = holds.holds == "number" and holds.dtype == "float64"
    if is_wide and holds.depth <= 1:
        name = "double" if wide else "float"
        return quoted.cast(f"array<{name}>" if holds.depth else name)
    return quoted
