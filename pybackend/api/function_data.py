"""Rows for `WorkerContext.feed` in a function of `barrier_run`: one array per column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pybackend.data.columns import TEXT, ColumnGroup, ColumnSpec
from pybackend.data.frames import is_frame, is_pandas
from pybackend.errors import InputError
from pybackend.job.job import ROWS
from pybackend.launchers import Launcher, is_spark_frame, read_schema


def read_function_data(launcher: Launcher, data: Any) -> dict[str, Any]:
    """Return the argument ``data`` in the form that launchers take.

    Parameters
    ----------
    data
        A Spark DataFrame, an RDD that can become one, a data frame of pandas or polars, or a dict
        of arrays.

    Raises
    ------
    InputError
        The data has another type, or a column cannot become an array.
    """
    if is_frame(data):
        data = data if is_pandas(data) else _to_pandas(data)
        data = {str(name): column.to_numpy() for name, column in data.items()}
    if isinstance(data, Mapping):
        return {ROWS: _read_arrays(data)}
    is_rdd = hasattr(data, "mapPartitions") and hasattr(data, "context")
    if not is_rdd and not is_spark_frame(data):
        raise InputError(
            "`data` must be a Spark DataFrame, an RDD, a pandas or polars data frame or a dict of "
            f"arrays, not {type(data).__name__}"
        )
    if launcher.session is None:
        raise InputError(
            "`data` belongs to Spark, but `spark` is None or 'local': pass its session, e.g. "
            "barrier_run(df.sparkSession, fn, data=df)"
        )
    return {ROWS: _read_frame(_as_frame(launcher.session, data) if is_rdd else data)}


def _to_pandas(table: Any) -> Any:
    import pyarrow as pa

    return pa.table(table).to_pandas()


def _read_arrays(data: Mapping[Any, Any]) -> dict[str, Any]:
    columns = {f"x/{name}": np.asarray(column) for name, column in data.items()}
    if not columns:
        raise InputError("`data` has no columns")
    if objects := [
        name[2:] for name, column in columns.items() if column.dtype.kind not in "biufc"
    ]:
        raise InputError(f"the column {objects[0]!r} of `data` is not numeric: encode it first")
    if len({len(column) if column.ndim else -1 for column in columns.values()} - {-1}) != 1:
        sizes = {name[2:]: np.shape(column) for name, column in columns.items()}
        raise InputError(
            f"all columns of `data` must have the same number of rows: their shapes are {sizes}"
        )
    return columns


def _as_frame(session: Any, rows: Any) -> Any:
    try:
        return session.createDataFrame(rows)
    except Exception as error:
        raise InputError(
            "`data` is an RDD that cannot become a DataFrame; its items must be tuples, Rows or "
            f"dicts of numbers, text, bytes or lists: {error}"
        ) from error


def _read_frame(frame: Any) -> Any:
    from pybackend.data.dataframe import DataFrameRows, describe_type

    kinds = {field.name: describe_type(field.dataType) for field in read_schema(frame).fields}
    spec = ColumnSpec(features={name: [name] for name in kinds}, label=None, finds_levels=False)
    # Doubles stay doubles, and narrower types keep their width.
    rows = DataFrameRows.of(frame, spec, "float64", "data")
    groups = [_keep_type(group, kinds[group.columns[0]]) for group in rows.column_groups]
    return replace(rows, column_groups=tuple(groups))


def _keep_type(group: ColumnGroup, kind: Any) -> ColumnGroup:
    """Keep the type of numbers, and give one value per row no extra axis."""
    if kind.holds == "number":
        dtype = kind.dtype if kind.dtype != "bool" else group.dtype
        return replace(group, dtype=dtype, is_flat=not kind.depth)
    return replace(group, is_flat=group.dtype == TEXT)
