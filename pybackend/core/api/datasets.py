"""Check the data sets of a request, and convert them to the form that launchers take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pybackend.core.api.calls import TrainingCall
from pybackend.core.api.data_checks import (
    check_can_be_split,
    check_no_records,
    check_one_label,
    check_rows,
    check_takes,
    check_weights,
    kind_of_data,
)
from pybackend.core.api.progress import showing
from pybackend.core.data import arrays
from pybackend.core.data.batches import Batches, read_batches
from pybackend.core.data.columns import ColumnSpec, TableRows
from pybackend.core.data.frames import FrameRows, holds_frame
from pybackend.core.data.sources import FileRows, FunctionRows
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import check_fraction
from pybackend.core.job.job import ModelJob, TrainingJob
from pybackend.core.job.messages import Note
from pybackend.core.launchers import Launcher, read_schema
from pybackend.core.words import either, setting, show, term


def read_training_data(
    launcher: Launcher, call: TrainingCall, columns: ColumnSpec, job: TrainingJob
) -> dict[str, Any]:
    """Return the training and validation data of a call."""
    data, validation = call.data, call.options["validation_data"]
    fraction = check_fraction("validation_split", call.options["validation_split"])
    if fraction and validation is not None:
        raise InputError("`validation_data` and `validation_split` cannot be combined: use one")
    if job.validation_freq != 1 and validation is None and not fraction:
        raise InputError("`validation_freq` needs `validation_data` or `validation_split`")
    if fraction:
        return _read_split(data, fraction, columns, job)
    found = {"train": read_data(launcher, data, "data", columns, job)}
    if validation is not None:
        columns = narrow_columns(columns, found["train"])
        found["validation"] = read_data(launcher, validation, "validation_data", columns, job)
    return found


def read_data(launcher: Launcher, data: Any, name: str, columns: ColumnSpec, job: ModelJob) -> Any:
    """Check a data set and convert it to the form that launchers take.

    Returns
    -------
    Columns of arrays; `FrameRows` for a table in memory, `DataFrameRows` for a Spark DataFrame,
    `Batches` for a TensorFlow or Keras data set; or, for data that workers read themselves,
    `FileRows` or `FunctionRows`.
    """
    try:
        return _read_rows(launcher, data, name, columns, job)
    except InputError as error:
        if name == "data" or f"`{name}`" in str(error):
            raise
        raise InputError(f"`{name}`: {error}") from error


def _read_rows(launcher: Launcher, data: Any, name: str, columns: ColumnSpec, job: ModelJob) -> Any:
    rows: Any
    match kind_of_data(data):
        case "a data set":
            rows = _read_batches(data, name, job)
        case "a data frame":
            check_no_records(columns, name)
            rows = FrameRows.of(data, columns, job.floatx, name)
            _check_arrays(rows.columns, name, job)
        case "a Spark DataFrame":
            rows = _read_spark_frame(launcher, data, name, columns, job)
        case "files":
            rows = _read_files(data, name, columns, job)
        case "a function":
            rows = _read_function(data, name, job)
        case _:
            rows = _check_arrays(arrays.flatten_data(data, job.floatx, name), name, job)
    return rows


def note_index(datasets: Mapping[str, Any]) -> Iterator[Note]:
    """Yield a note about training data columns that are not used because they hold an index."""
    data = datasets.get("train")
    if isinstance(data, TableRows) and data.left_out:
        yield Note(
            f"not used: {', '.join(data.left_out)}, an index that pandas or dask saved alongside "
            "the columns. List it in `features` to use it"
        )


def narrow_columns(columns: ColumnSpec, trained_on: Any) -> ColumnSpec:
    """Return the columns of the validation data: those of the training data, with categories."""
    if not isinstance(trained_on, TableRows):
        return replace(columns, finds_levels=False)
    known = trained_on.spec
    features = known.features
    if features is None:  # the columns may have another order in the validation data
        features = [
            c for group in trained_on.column_groups if group.key == "x" for c in group.columns
        ]
    return replace(known, features=features, finds_levels=False, known_from="`data`")


def _read_batches(data: Any, name: str, job: ModelJob) -> Batches:
    if not isinstance(job, TrainingJob):
        batches = read_batches(data, job.floatx, name, passes=1)
        _check_arrays(batches.columns, name, job)
        return batches
    epochs = range(job.initial_epoch, job.epochs)
    passes = len(epochs) if name == "data" else sum(map(job.validates, epochs))
    steps = job.steps_per_epoch if name == "data" else None
    with showing(f"reading the data set `{name}`", job.verbose):
        batches = read_batches(data, job.floatx, name, passes=passes, steps=steps)
    # The batches define the steps.
    _check_arrays(batches.columns, name, replace(job, steps_per_epoch=None))
    return batches


def _read_split(data: Any, fraction: float, columns: ColumnSpec, job: ModelJob) -> dict[str, Any]:
    """Split one data set into training data and, as in Keras, the last rows as validation data."""
    check_can_be_split(data)
    frame = FrameRows.of(data, columns, job.floatx, "data") if holds_frame(data) else None
    found = frame.columns if frame else arrays.flatten_data(data, job.floatx, "data")
    rows = arrays.count_rows(found)
    first = math.floor(rows * (1 - fraction))
    if first in (0, rows):
        raise InputError(
            f"{setting(validation_split=fraction)} of {rows} rows leaves no rows for "
            f"{'training' if first == 0 else 'validation'}"
        )
    parts = {"data": slice(first), "validation_data": slice(first, None)}
    train, validation = (
        _check_arrays({key: array[part] for key, array in found.items()}, name, job)
        for name, part in parts.items()
    )
    if frame:
        return {
            "train": replace(frame, columns=train),
            "validation": replace(frame, columns=validation),
        }
    return {"train": train, "validation": validation}


def _check_arrays(found: arrays.Columns, name: str, job: ModelJob) -> arrays.Columns:
    check_one_label(job, "y" in found or name != "data")
    check_weights(job, "sample_weight" in found and name == "data")
    check_rows(arrays.count_rows(found), name, job)
    return found


def _read_spark_frame(
    launcher: Launcher, data: Any, name: str, columns: ColumnSpec, job: ModelJob
) -> Any:
    if launcher.session is None:
        raise InputError(
            f"`{name}` is a {term('Spark DataFrame')}, but `{term('spark')}` is {show(None)} or "
            f"{show('local')}: pass its session, e.g. "
            f"barrier_train({either('df.sparkSession, model, df', 'sc, model, data')}, ...)"
        )
    from pybackend.core.data.spark_rows import DataFrameRows

    check_no_records(columns, name)
    if job.shuffles_globally and name == "data":
        raise InputError(
            f"{setting(shuffle='global')} needs all rows on every worker: pass arrays or files, or "
            f"use {setting(shuffle=True)} (the rows of a {term('DataFrame')} are distributed over "
            "the workers at random anyway)"
        )
    check_one_label(job, isinstance(columns.label, str))
    check_weights(job, columns.weight is not None)
    read_schema(data)  # in limited time, and PySpark remembers it
    return DataFrameRows.of(data, columns, job.floatx, name)


def _read_files(path: Any, name: str, columns: ColumnSpec, job: ModelJob) -> Any:
    if path == "":
        raise InputError(f"`{name}` is an empty path")
    rows = FileRows.at(path, columns, job.floatx, name)
    check_one_label(job, isinstance(columns.label, str))
    check_weights(job, columns.weight is not None)
    check_rows(rows.rows, name, job)
    return rows


def _read_function(fn: Any, name: str, job: ModelJob) -> Any:
    check_takes(fn, f"{name}(context)", None)
    if name != "data":
        return FunctionRows(fn)
    if job.shuffles_globally:
        raise InputError(
            f"{setting(shuffle='global')} cannot reorder what the `{name}` function returns"
        )
    if isinstance(job, TrainingJob) and job.class_weight:
        raise InputError(
            "`class_weight` needs labels that are known before training starts: have the "
            f"`{name}` function return {term('(x, y, sample_weight)')}"
        )
    return FunctionRows(fn)
