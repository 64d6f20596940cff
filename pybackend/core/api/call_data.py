"""The data of a call: checked against the other arguments, in the form that launchers take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pybackend.core.api.calls import ModelCall, TrainingCall
from pybackend.core.api.display import showing
from pybackend.core.data import arrays
from pybackend.core.data.arrays import Ragged, count_rows
from pybackend.core.data.batches import Batches, is_dataset, read_batches
from pybackend.core.data.columns import TEXT, ColumnSpec, TableRows
from pybackend.core.data.files import is_path
from pybackend.core.data.frames import FrameRows, holds_frame
from pybackend.core.data.sharding import count_steps
from pybackend.core.data.sources import FileRows, FunctionRows
from pybackend.core.data.spark_rows import DataFrameRows
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import check_fraction, counted, find_mismatch
from pybackend.core.job.job import ModelJob, TrainingJob, argument_of
from pybackend.core.job.messages import Note
from pybackend.core.launchers import Launcher, is_spark_frame, read_schema
from pybackend.core.words import either, setting, show, term

# Number of rows on which a copy of a model is checked.
_TRIED = 8
# Arguments that only data with columns can have.
_ABOUT_COLUMNS = ("features", "weight")
_OPTIONS_ABOUT_COLUMNS = ("tensors", "categories", "tfrecord_spec", "encode")


def read_training_data(
    launcher: Launcher, call: TrainingCall, columns: ColumnSpec, job: TrainingJob
) -> dict[str, Any]:
    """Return the data sets ``"train"`` and, if there is one, ``"validation"``."""
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

    This is a dict of arrays; `FrameRows` for a table in memory, `DataFrameRows` for a Spark
    DataFrame, `Batches` for a TensorFlow or Keras data set; or, for data that workers read
    themselves, `FileRows` or `FunctionRows`.
    """
    try:
        return _read_rows(launcher, data, name, columns, job)
    except InputError as error:
        if name == "data" or f"`{name}`" in str(error):
            raise
        raise InputError(f"`{name}`: {error}") from error


def _read_rows(launcher: Launcher, data: Any, name: str, columns: ColumnSpec, job: ModelJob) -> Any:
    match kind_of_data(data):
        case "a data set":
            return _read_batches(data, name, job)
        case "a data frame":
            check_no_records(columns, name)
            rows = FrameRows.of(data, columns, job.floatx, name)
            _check_arrays(rows.columns, name, job)
            return rows
        case "a Spark DataFrame":
            return _read_spark_frame(launcher, data, name, columns, job)
        case "files":
            return _read_files(data, name, columns, job)
        case "a function":
            return _read_function(data, name, job)
        case _:
            return _check_arrays(arrays.flatten_data(data, job.floatx, name), name, job)


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
    else:
        epochs = range(job.initial_epoch, job.epochs)
        passes = len(epochs) if name == "data" else sum(map(job.validates, epochs))
        steps = job.steps_per_epoch if name == "data" else None
        with showing(f"reading the data set `{name}`", job.verbose):
            batches = read_batches(data, job.floatx, name, passes=passes, steps=steps)
        job = replace(job, steps_per_epoch=None)  # the batches define the steps
    _check_arrays(batches.columns, name, job)
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
    return {
        "train": replace(frame, columns=train) if frame else train,
        "validation": replace(frame, columns=validation) if frame else validation,
    }


def _check_arrays(found: arrays.Columns, name: str, job: ModelJob) -> arrays.Columns:
    is_data = name == "data"
    _check_class_weight(job, "y" in found or not is_data, "sample_weight" in found and is_data)
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
    _check_class_weight(job, isinstance(columns.label, str), columns.weight is not None)
    read_schema(data)  # in limited time, and PySpark remembers it
    return DataFrameRows.of(data, columns, job.floatx, name)


def _read_files(path: Any, name: str, columns: ColumnSpec, job: ModelJob) -> Any:
    if path == "":
        raise InputError(f"`{name}` is an empty path")
    rows = FileRows.at(path, columns, job.floatx, name)
    _check_class_weight(job, isinstance(columns.label, str), columns.weight is not None)
    check_rows(rows.rows, name, job)
    return rows


def _read_function(fn: Any, name: str, job: ModelJob) -> Any:
    check_takes(fn, f"{name}(context)", None)
    if job.shuffles_globally and name == "data":
        raise InputError(
            f"{setting(shuffle='global')} cannot reorder what the `{name}` function returns"
        )
    if isinstance(job, TrainingJob) and job.class_weight and name == "data":
        raise InputError(
            "`class_weight` needs labels that are known before training starts: have the "
            f"`{name}` function return {term('(x, y, sample_weight)')}"
        )
    return FunctionRows(fn)


def check_columns_exist(call: ModelCall, datasets: Mapping[str, Any]) -> None:
    if any(isinstance(data, TableRows) for data in datasets.values()):
        return
    options = call.options["data_options"]
    given = [name for name in _ABOUT_COLUMNS if call.options[name] is not None]
    given += [name for name in _OPTIONS_ABOUT_COLUMNS if getattr(options, name, None) is not None]
    if given:
        raise InputError(
            f"`{given[0]}` needs data with columns, but `data` has none: use it only with data "
            "frames and files"
        )


def check_takes(fn: Any, call: str, /, *arguments: Any, **named: Any) -> None:
    """Reject a function that cannot be called with these arguments.

    If ``call`` names a context, the context is the first argument.
    """
    mismatch = find_mismatch(fn, *arguments, **named)
    if mismatch is not None:
        has_context = "context" in call
        also = f" and {', '.join(f'`{name}`' for name in named)}" if named else ""
        raise InputError(
            f"the function is called as {call} with {len(arguments) - has_context} arguments"
            f"{' after the context' if has_context else ''}{also}, but {mismatch}"
        )


def check_rows_fit(model: Any, datasets: Mapping[str, Any], job: ModelJob) -> Any:
    """Reject rows that the model or its loss cannot take.

    Return some of the training rows, as ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, if the
    driver has them, else None. The model has already loaded TensorFlow.
    """
    from pybackend.core.data.rows import to_rows
    from pybackend.core.model.inputs_outputs import (
        check_features,
        check_input_names,
        check_output_names,
        check_text,
        name_inputs,
        reshape_rows,
    )
    from pybackend.core.model.labels import (
        check_class_weight,
        check_has_labels,
        check_labels,
        check_levels,
    )

    some = None
    for name, data in datasets.items():
        argument = "x" if job.kind == "predict" else argument_of(name)
        columns, is_table = columns_of(data), isinstance(data, TableRows)
        if job.kind != "predict" and not isinstance(data, FunctionRows):
            keys = [group.key for group in data.column_groups] if is_table else columns
            trains = job.kind == "train" and name == "train"
            check_has_labels(model, keys, argument, trains=trains)
            check_output_names(model, keys)
            if is_table and (levels := data.summary["levels"]):
                check_levels(model, levels, argument)
        if isinstance(data, TableRows):
            names = data.feature_names
            if any(name.startswith("#") for name in names):  # a list, in the order of the inputs
                check_input_names(model, [group.key for group in data.column_groups])
                names = dict(zip(name_inputs(model), names.values(), strict=False))
            check_features(model, None if list(names) == [""] else names, names)
            inputs = [group for group in data.column_groups if not group.is_target]
            check_text(model, {one.key: one.columns for one in inputs if one.dtype == TEXT})
        if isinstance(columns, dict):
            ragged = [key for key, column in columns.items() if isinstance(column, Ragged)]
            try:
                if not isinstance(data, TableRows):
                    check_input_names(model, columns)
                    check_text(model, dict.fromkeys(ragged, ()))
                rows = None if ragged else reshape_rows(to_rows(columns), model)
            except InputError as error:
                raise InputError(f"`{argument}`: {error}") from error
            check_labels(model, columns, argument)
            if isinstance(job, TrainingJob) and job.class_weight and name == "train":
                classes = [int(code) for code, _ in job.class_weight]
                check_class_weight(model, classes, columns, argument)
            if rows is not None and name == "train":
                some = arrays.nest(rows.take(np.arange(min(len(rows), job.batch_size, _TRIED))))
    return some


def kind_of_data(data: Any) -> str:
    """Return the kind of the argument ``data``: the key of the first test that it passes."""
    tests: dict[str, Callable[[Any], bool]] = {
        "a data set": is_dataset,
        "a data frame": holds_frame,
        "a Spark DataFrame": is_spark_frame,
        "files": is_path,
        "a function": callable,
    }
    return next((kind for kind, test in tests.items() if test(data)), "arrays")


def check_can_be_split(data: Any) -> None:
    kind = kind_of_data(data)
    others = {
        "a data set": "another data set, e.g. data.skip(n),",
        "a Spark DataFrame": either(
            "the second part of df.randomSplit([0.8, 0.2])",
            "the second part of sparklyr::sdf_random_split(data, 0.8, 0.2)",
        ),
        "files": "other files",
        "a function": "another function",
    }
    if kind in others:
        what = f"a {term('Spark DataFrame')}" if kind == "a Spark DataFrame" else kind
        raise InputError(
            f"`validation_split` needs arrays or a data frame in memory, but `data` is {what}: "
            f"pass {others[kind]} as `validation_data`"
        )


def check_no_records(columns: ColumnSpec, name: str) -> None:
    # It also applies to the validation data, but these may be a data frame.
    if columns.tfrecord_spec is not None and name == "data":
        raise InputError(f"`tfrecord_spec` is given, but `{name}` is a data frame")


def _check_class_weight(job: ModelJob, has_one_label: bool, has_weights: bool) -> None:
    if not (isinstance(job, TrainingJob) and job.class_weight):
        return
    if not has_one_label:
        raise InputError(
            "`class_weight` needs labels and a model with one output: pass sample weights instead"
        )
    if has_weights:
        raise InputError(
            "`class_weight` and sample weights cannot be combined: multiply them into one weight"
        )


def check_classes_occur(job: TrainingJob, data: Any) -> None:
    """Reject class weights if none of the labels in this process has one of the classes."""
    columns = columns_of(data)
    labels = columns.get("y") if isinstance(columns, dict) and job.class_weight else None
    if not isinstance(labels, np.ndarray) or labels.ndim > 2 or not job.class_weight:
        return
    is_one_hot = labels.size > len(labels)
    found = np.unique(labels.argmax(axis=1) if is_one_hot else np.rint(labels))
    classes = [int(code) for code, _ in job.class_weight]
    if not np.isin(classes, found).any():
        shown = ", ".join(f"{label:g}" for label in found[:_TRIED])
        raise InputError(
            f"`class_weight` has the class {classes[0]}, but the labels of `data` are {shown}"
            f"{', ...' if len(found) > _TRIED else ''}"
        )


def check_rows(rows: int, name: str, job: ModelJob) -> None:
    if name == "data" and isinstance(job, TrainingJob):
        argument = "workers" if job.most_workers == job.workers else "max"
        arrays.check_enough_rows(rows, job.most_workers, argument=argument)
        _check_steps(rows, job)
    elif rows == 0:
        raise InputError(f"`{name}` has no rows")


def _check_steps(rows: int, job: TrainingJob) -> None:
    """Reject more steps per epoch than there are batches of rows."""
    full = count_steps([-(-rows // job.workers)], job.batch_size)
    if job.steps_per_epoch is not None and job.steps_per_epoch > full:
        raise InputError(
            f"`steps_per_epoch` is {job.steps_per_epoch}, but {rows} rows give "
            f"{counted(full, 'step')} of {job.workers} x {job.batch_size} rows"
        )


def columns_of(data: Any) -> Any:
    """Return the arrays of rows in memory; other data unchanged."""
    return data.columns if isinstance(data, FrameRows | Batches) else data


def count_known(data: Any) -> int | None:
    """Return the number of rows of all workers together; None: not known before the start."""
    return None if isinstance(data, (DataFrameRows, FunctionRows)) else count_data(data)


def count_data(data: Any) -> int:
    return data.rows if isinstance(data, FileRows) else count_rows(columns_of(data))
