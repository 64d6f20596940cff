"""A Spark DataFrame as training data: checked on the driver, turned into arrays by each worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.data.arrays import Columns
from pybackend.errors import InputError

Array = npt.NDArray[Any]

_NUMBERS = {"byte", "short", "integer", "long", "float", "double", "boolean", "decimal"}
_WHOLE = {"byte", "short", "integer", "long", "boolean"}


@dataclass(frozen=True)
class Selection:
    """The columns of a DataFrame that are used, features first and the label last.

    Attributes
    ----------
    frame
        A ``pyspark.sql.DataFrame`` of just these columns, by names of its own: ``feature_0``, ...,
        ``label``. Dots and backticks in a user's names then mean nothing to Spark.
    features, label
        The user's names.
    """

    frame: Any
    features: tuple[str, ...]
    label: str

    @classmethod
    def of(cls, frame: Any, features: Sequence[str] | None, label: str, name: str) -> Selection:
        """Check names and types against the schema; no Spark job is run.

        Raises
        ------
        InputError
            Names the column and what is expected.
        """
        types = {field.name: field.dataType for field in frame.schema.fields}
        if isinstance(features, str):
            features = [features]
        chosen = [c for c in types if c != label] if features is None else list(features)
        for column in [*chosen, label]:
            if column not in types:
                raise InputError(
                    f"`{name}` has no column {column!r}: its columns are {', '.join(types)}"
                )
        if not chosen:
            raise InputError(f"`{name}` has no feature columns besides the label {label!r}")
        if label in chosen:
            raise InputError(f"{label!r} is named both as the label and as a feature")
        if types[label].typeName() not in _NUMBERS:
            raise InputError(
                f"the label column {label!r} has type {types[label].simpleString()}; expected a "
                "number (encode classes as 0, 1, 2, ... first)"
            )
        columns = [
            _numeric(frame, c, types[c], name).alias(f"feature_{place}")
            for place, c in enumerate(chosen)
        ]
        target = (
            _column(frame, label)
            .cast("long" if types[label].typeName() in _WHOLE else "double")
            .alias("label")
        )
        return cls(frame.select(*columns, target), tuple(chosen), label)


def _column(frame: Any, column: str) -> Any:
    """A column by its whole name, dots included.

    Not by PySpark's functions: they take one kind of session at a time for the only one.
    """
    return frame["`" + column.replace("`", "``") + "`"]


def _numeric(frame: Any, column: str, kind: Any, name: str) -> Any:
    type_name = kind.typeName()
    quoted = _column(frame, column)
    if type_name in _NUMBERS:
        return quoted.cast("float")
    if type_name == "array" and kind.elementType.typeName() in _NUMBERS:
        return quoted.cast("array<float>")
    if type(kind).__name__ == "VectorUDT":
        from pyspark.ml.functions import vector_to_array

        return vector_to_array(quoted, "float32")
    raise InputError(
        f"column {column!r} of `{name}` has type {kind.simpleString()}; expected numbers, arrays "
        "of numbers or ML vectors. Name the columns to use in `features`"
    )


def columns_from_arrow(
    batches: Iterable[Any], features: Sequence[str], label: str, floatx: str
) -> Columns:
    """Arrays ``x`` (rows, width) and ``y`` (rows,) from Arrow batches of a `Selection`.

    Raises
    ------
    InputError
        Names the column that holds a null, a NaN label, or arrays of different lengths.
    """
    parts_x, parts_y = [], []
    for batch in batches:
        if not batch.num_rows:  # the width of its arrays is unknown
            continue
        wide = [_matrix(batch.column(place), name) for place, name in enumerate(features)]
        parts_x.append(np.concatenate(wide, axis=1).astype(floatx, copy=False))
        parts_y.append(_labels(batch.column(len(features)), label))
    widths = {part.shape[1] for part in parts_x}
    if len(widths) > 1:
        raise InputError(
            f"the arrays in {', '.join(features)} have different lengths ({sorted(widths)}): "
            "every row needs the same"
        )
    if not parts_x:
        return {}
    return {"x": np.concatenate(parts_x), "y": np.concatenate(parts_y)}


def _matrix(column: Any, name: str) -> Array:
    _refuse_nulls(column, name)
    if not hasattr(column, "offsets"):
        return np.asarray(column.to_numpy(zero_copy_only=False)).reshape(-1, 1)
    values = column.flatten()
    _refuse_nulls(values, name)
    lengths = np.diff(column.offsets.to_numpy())
    if len(lengths) and lengths.min() != lengths.max():
        raise InputError(
            f"column {name!r} holds arrays of {lengths.min()} to {lengths.max()} numbers: every "
            "row needs the same"
        )
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(column), -1)


def _labels(column: Any, name: str) -> Array:
    _refuse_nulls(column, name)
    labels = np.asarray(column.to_numpy(zero_copy_only=False))
    if labels.dtype.kind == "f" and np.isnan(labels).any():
        raise InputError(f"the label column {name!r} holds NaN: drop or fill those rows first")
    return labels


def _refuse_nulls(column: Any, name: str) -> None:
    if column.null_count:
        raise InputError(
            f"column {name!r} holds {column.null_count} null(s): drop or fill those rows first"
        )
