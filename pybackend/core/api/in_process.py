"""Evaluate or predict with a result's model in this process, with rows read as in training."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pybackend.core.api import model_columns
from pybackend.core.api.call_data import columns_of, read_data
from pybackend.core.api.calls import EvaluationCall, PredictionCall
from pybackend.core.data import arrays
from pybackend.core.data.batches import is_dataset
from pybackend.core.data.columns import ColumnSpec
from pybackend.core.data.frames import FrameRows, has_frames, is_frame, is_pandas
from pybackend.core.data.predictions import spread_rows
from pybackend.core.data.row_store import write_columns
from pybackend.core.data.rows import Rows, StoredRows, to_rows
from pybackend.core.data.sources import FileRows, read_table
from pybackend.core.errors import InputError
from pybackend.core.job.job import EvaluationJob, ModelJob, PredictionJob
from pybackend.core.launchers import is_spark_frame, launcher_for
from pybackend.core.quiet import quiet_about_traces
from pybackend.core.words import term


def evaluate_here(call: EvaluationCall, data: Any) -> dict[str, Any]:
    """Evaluate a model in this process, for `TrainResult.evaluate`.

    Decoding a model is slow, so checks that do not need it come first.
    """
    _refuse_elsewhere(data, "data", "barrier_evaluate(df.sparkSession, result, df, ...)")
    job, columns = call.make_job(EvaluationJob), model_columns.choose_columns(call)
    if is_dataset(data):
        model = _find_compiled(call, job)
        given: dict[str, Any] = {"x": data}
    else:
        found = read_data(launcher_for("local"), data, "data", columns, job)
        model = _find_compiled(call, job)
        parts = ("x", "y", "sample_weight")
        given = dict(zip(parts, _feed(found, model, "data"), strict=True))
        given["batch_size"] = job.batch_size
    with quiet_about_traces():
        metrics = model.evaluate(**given, verbose=job.verbose, return_dict=True)
    # A metric such as F1Score has a value for each class.
    return {name: np.asarray(value).tolist() for name, value in metrics.items()}


def predict_here(call: PredictionCall, x: Any) -> Any:
    skips_incomplete = model_columns.check_prediction(call.options)
    _refuse_elsewhere(x, "x", "predict_spark(result, df)")
    job, columns = call.make_job(PredictionJob), model_columns.choose_columns(call)
    complete = None
    if is_dataset(x):
        model = call.find_model()
        with quiet_about_traces():
            outputs = model.predict(x, verbose=job.verbose)
    else:
        found = _read_inputs(x, columns, job, skips_incomplete)
        complete = getattr(found, "complete", None)
        model = call.find_model()
        outputs = _predict_rows(model, found, job)
    return shape_outputs(outputs, complete, x, call, model)


def shape_outputs(outputs: Any, complete: Any, x: Any, call: PredictionCall, model: Any) -> Any:
    """Return outputs for the complete rows of ``x`` in the form that ``type`` asks for.

    ``complete`` shows which rows are; None: all. The outputs of ``model`` name the columns.
    """
    kind, levels = call.options["type"], call.options["levels"]
    has_columns = shows_columns(kind, x)
    if not has_columns and (complete is None or complete.all()):
        return outputs
    import keras

    if not has_columns:
        return keras.tree.map_structure(lambda array: spread_rows(array, complete), outputs)
    made = model_columns.predictions_of(
        model, kind, model_columns.check_levels(levels), call.known_levels
    )
    import pandas as pd

    columns = made.arrow(keras.tree.flatten(outputs), complete)
    named = {
        field.name: column.to_pandas() for field, column in zip(made.fields, columns, strict=True)
    }
    return pd.DataFrame(named).set_index(x.index) if is_pandas(x) else pd.DataFrame(named)


def shows_columns(kind: str | None, x: Any) -> bool:
    """Return whether predictions of a type for these inputs are columns, not the raw outputs."""
    return kind != "raw" and (kind is not None or is_frame(x))


def _predict_rows(model: Any, found: Any, job: ModelJob) -> Any:
    columns = columns_of(found)
    if isinstance(columns, dict) and not arrays.count_rows(columns):
        from pybackend.core.model.inputs_outputs import empty_outputs

        return empty_outputs(model)
    given = _feed(found, model, "x")[0]
    with quiet_about_traces():
        return model.predict(given, batch_size=job.batch_size, verbose=job.verbose)


def _refuse_elsewhere(data: Any, name: str, instead: str) -> None:
    if is_spark_frame(data):
        raise InputError(
            f"`{name}` is a {term('Spark DataFrame')}, but this call needs rows in memory: use "
            f"{instead}, or pass df.toPandas()"
        )
    if callable(data) and not is_dataset(data):
        raise InputError(
            f"`{name}` is a function, but no workers call it here: pass the tf.data.Dataset that "
            "it returns"
        )


def _find_compiled(call: EvaluationCall, job: ModelJob) -> Any:
    from pybackend.core.model.checks import check_model
    from pybackend.core.model.view import ModelView

    model = call.find_model()
    check_model(ModelView(model), job)
    return model


def _read_inputs(x: Any, columns: ColumnSpec, job: ModelJob, skips_incomplete: bool) -> Any:
    if isinstance(x, (str, os.PathLike)):
        if not skips_incomplete:
            return FileRows.at(x, columns, job.floatx, "x")
        x = read_table(x, columns, "x")
    return read_inputs(x, columns, job, skips_incomplete)


def read_inputs(x: Any, columns: ColumnSpec, job: ModelJob, skips_incomplete: bool) -> Any:
    """Return the rows in memory to predict, as `FrameRows` or a dict of arrays."""
    if has_frames(x):
        return FrameRows.of((x,), columns, job.floatx, "x", skips_incomplete=skips_incomplete)
    return arrays.flatten_inputs(x, job.floatx, may_be_empty=True)


def _feed(found: Any, model: Any, name: str) -> tuple[Any, ...]:
    """Return x, y and weights (or None) for Keras, in the shapes of the model's inputs."""
    import keras

    from pybackend.core.model.inputs_outputs import check_input_names, reshape_rows
    from pybackend.core.model.labels import check_has_labels, check_labels

    columns = columns_of(found)
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
        rows = _open_rows(columns, Path(folder))
        if name == "data":
            check_has_labels(model, rows.spec, name, trains=False)
            if isinstance(columns, dict):
                check_labels(model, columns, name)
        try:
            if isinstance(found, dict):
                check_input_names(model, found)
            rows = reshape_rows(rows, model)
        except InputError as error:
            raise InputError(f"`{name}`: {error}") from error
        # Copied before the folder goes.
        taken = rows.take(np.arange(len(rows)))
    batch = arrays.nest({key: _as_tensor(column) for key, column in taken.items()})
    parts: tuple[Any, ...] = keras.utils.unpack_x_y_sample_weight(batch)
    return parts


def _open_rows(columns: Any, folder: Path) -> Rows:
    """Return rows of arrays; files and text pass through a row store, as on workers."""
    rows = folder / "rows"
    if isinstance(columns, FileRows):
        columns.spool(rows, 1, 0, True)
    elif all(isinstance(column, np.ndarray) for column in columns.values()):
        return to_rows(columns)
    else:
        write_columns(rows, columns)
    return StoredRows(rows, in_memory=True)


def _as_tensor(column: Any) -> Any:
    """Return text as a tensor, because Keras does not accept arrays of text."""
    if column.dtype.kind != "O":
        return column
    import tensorflow as tf

    return tf.constant(column)
