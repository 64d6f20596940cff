"""Evaluate a model, or predict with it, on several workers or in Spark's tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack, cast

import numpy as np

from pybackend.core.api import model_columns
from pybackend.core.api.call_data import columns_of, read_data
from pybackend.core.api.calls import (
    EvaluationCall,
    PredictionCall,
    Target,
    TrainedModel,
    explain_arguments,
    take_options,
)
from pybackend.core.api.in_process import read_inputs, shape_outputs, shows_columns
from pybackend.core.api.request import prepare
from pybackend.core.api.sent_objects import is_keras_model
from pybackend.core.data import arrays
from pybackend.core.data.batches import is_dataset
from pybackend.core.data.columns import ColumnGroup, ColumnSpec, input_name
from pybackend.core.errors import InputError
from pybackend.core.job import call_options
from pybackend.core.job.job import MODEL_FILE, EvaluationJob, ModelJob, PredictionJob
from pybackend.core.job.report import read_metrics
from pybackend.core.job.storage_options import ColumnEncoding, DataOptions, ModelOptions
from pybackend.core.job.value_codec import decode_value
from pybackend.core.launchers import (
    count_workers,
    is_spark_frame,
    launcher_for,
    read_schema,
    warm_up,
)
from pybackend.core.words import setting, term


@explain_arguments
@take_options
def barrier_evaluate(
    spark: Target, model: Any, data: Any, **options: Unpack[call_options.EvaluationOptions]
) -> dict[str, float]:
    """Evaluate a model on several workers, with the same values as in one process.

    Parameters
    ----------
    model
        As in `barrier_train`, or the `TrainResult` of a training run. The model must be compiled.
        With a `TrainResult`, ``features`` and the column options default to those of that training
        run; ``label`` and ``weight`` are not taken from it.
    spark, data
        As in `barrier_train`.
    data_options
        As in `barrier_train`. A text label needs the ``categories`` used in training, which a
        `TrainResult` has. Rows are read once, so ``in_memory`` makes no difference.

    Returns
    -------
    dict
        ``loss`` and each metric by its name.

    Raises
    ------
    InputError, ClusterError, WorkerFailedError, SerializationError
        As in `barrier_train`.

    Notes
    -----
    The states of the metrics are summed over the workers, so an AUC is computed over all rows.

    As in Keras itself, some values depend on which rows share a batch: a loss that compares rows or
    that leaves out masked time steps, a metric computed from one batch, and the loss of each of
    several outputs, which is a mean over batches. These values are those of Keras's ``evaluate``
    with batches of ``workers * batch_size`` rows. Workers read ranges of files and partitions of a
    Spark DataFrame, so their batches have other rows together.
    """
    launcher = launcher_for(spark)
    warm_up(launcher, options.get("resources"))
    options["workers"] = count_workers(launcher, options.get("workers"))
    call = EvaluationCall(model=model, options=options)
    request = prepare(
        EvaluationJob,
        call,
        lambda columns, job: {"train": read_data(launcher, data, "data", columns, job)},
    )
    # A metric such as F1Score has a value for each class.
    return read_metrics(request.run(launcher).reports[0], (int, float, list))


@explain_arguments
@take_options
def barrier_predict(
    spark: Target, model: Any, x: Any, **options: Unpack[call_options.PredictionOptions]
) -> Any:
    """Predict with a model on several workers.

    Parameters
    ----------
    x
        Inputs: an array with one entry per row, a list or dict of arrays, or a data frame. All
        columns of a data frame are inputs; with a `TrainResult`, those used in training.
    model
        As in `barrier_train`, or the `TrainResult` of a training run. It need not be compiled.
    spark
        As in `barrier_train`.

    Returns
    -------
    pandas.DataFrame, numpy array, or a list or dict of arrays
        As `TrainResult.predict` returns for ``x``: one entry per row, in the order of ``x``.

    Raises
    ------
    InputError, ClusterError, WorkerFailedError, SerializationError
        As in `barrier_train`.
    """
    launcher, complete = launcher_for(spark), None
    warm_up(launcher, options.get("resources"))
    options["workers"] = count_workers(launcher, options.get("workers"))
    call = PredictionCall(model=model, options=cast("call_options.TablePredictionOptions", options))
    skips_incomplete = model_columns.check_prediction(call.options)

    def read(columns: ColumnSpec, job: ModelJob) -> dict[str, Any]:
        nonlocal complete
        _refuse_inputs(x)
        rows = read_inputs(x, columns, job, skips_incomplete)
        complete, found = getattr(rows, "complete", None), columns_of(rows)
        return {"train": found} if arrays.count_rows(found) else {}

    request = prepare(PredictionJob, call, read)
    here = _build(request.model) if shows_columns(call.options["type"], x) else None
    if request.datasets:
        outcome = request.run(launcher)
        parts = [None if r.value is None else decode_value(r.value) for r in outcome.reports]
        outputs = _interleave(parts, arrays.count_rows(request.datasets["train"]))
    else:
        outputs = _predict_nothing(request.model)
    return shape_outputs(outputs, complete, x, call, here)


def _build(model: Any) -> Any:
    """Return a model, whose outputs name the columns, before anything is computed."""
    if is_keras_model(model):
        return model
    try:
        return model()
    except Exception as error:  # raised by the function
        raise InputError(
            f"the `model` function fails in this session ({error}), which needs the model's "
            f"outputs to name the columns: pass {setting(type='raw')}, or a model"
        ) from error


def _refuse_inputs(x: Any) -> None:
    if is_spark_frame(x):
        raise InputError(
            f"`x` is a {term('Spark DataFrame')}: use predict_spark(model, df), which adds the "
            "predictions to it"
        )
    if is_dataset(x):
        raise InputError(
            "`x` is a data set, whose batches workers cannot share here: pass arrays or a data "
            "frame, or use `predict` of the result or the model"
        )


def _predict_nothing(model: Any) -> Any:
    if not is_keras_model(model):
        raise InputError(
            "`x` has no rows, so no worker calls the `model` function and the shapes of its "
            "outputs are unknown: pass the model itself"
        )
    from pybackend.core.model.inputs_outputs import empty_outputs

    return empty_outputs(model)


def _interleave(parts: list[Any], rows: int) -> Any:
    """Return the rows in input order: rank r got every N-th row, starting at row r."""
    known = next(part for part in parts if part is not None)
    if isinstance(known, (dict, list, tuple)):
        keys = known if isinstance(known, dict) else range(len(known))
        found = {k: _interleave([p and p[k] for p in parts], rows) for k in keys}
        return found if isinstance(known, dict) else list(found.values())
    with_rows = (part for part in parts if part is not None)
    arrays.check_row_shapes(with_rows, "the output of the model", "on different workers")
    together = np.empty((rows, *known.shape[1:]), known.dtype)
    for rank, part in enumerate(parts):
        if part is not None:
            together[rank :: len(parts)] = part
    return together


@explain_arguments
def predict_spark(
    model: Any,
    df: Any,
    *,
    features: call_options.Features | None = None,
    tensors: Mapping[str, tuple[str, tuple[int | None, ...]]] | None = None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    encode: ColumnEncoding | Mapping[str, ColumnEncoding] | None = None,
    type: call_options.PredictionType | None = None,
    levels: Sequence[Any] | None = None,
    on_missing: call_options.OnMissing = "null",
    batch_size: int = 256,
    runtime: call_options.PredictionRuntime = "keras",
    model_options: ModelOptions | None = None,
) -> Any:
    """Add a model's predictions to a Spark DataFrame.

    Spark computes them lazily, when it is asked for rows, in ordinary tasks on all of its slots.
    With ``runtime="keras"``, the numbers equal those of ``model.predict``. Each of Spark's Python
    processes loads a model once and caches its last three models for later tasks and queries.

    Parameters
    ----------
    model
        A Keras model, which need not be compiled, or the `TrainResult` of `barrier_train`.
    df
        A ``pyspark.sql.DataFrame``, classic or Spark Connect.
    features, tensors, categories, encode
        As in `barrier_train` and `DataOptions`. None (default): as in the `TrainResult`; without a
        `TrainResult`, all columns are features. Rows of any length (``(dtype, (None,))``) are
        padded with zeros to the length of the model's input. If that length is not fixed, they are
        padded to the length of the longest row that Spark sends in the same batch.
    type
        - ``"class"``: the column ``.pred_class``, the class with the largest number;
        - ``"prob"``: a column ``.pred_<class>`` for each class's probability. If the loss is one of
          Keras's with ``from_logits``, this is the softmax or sigmoid of the output. For a model
          with one number per row and one of Keras's binary losses, the number is the probability of
          class 1, and class 0 gets 1 minus that. Raises an error if the numbers are not
          probabilities;
        - ``"raw"``: the column ``.pred``, or ``.pred_<output>`` for each of several outputs. A
          single number per row becomes a number; several become arrays, nested like the output's
          shape;
        - None (default): class and probabilities if the model's outputs are probabilities; only the
          class if they are not, but ``levels`` or a categorical loss shows that they represent
          classes; otherwise ``"raw"``.
    levels
        Names of the classes 0, 1, 2, ... None (default): those of the `TrainResult`, or else
        numbers.
    on_missing
        Treatment of a row that has a null, a NaN, an infinite number or a value outside its
        column's categories. ``"null"`` (default): its predictions are null. ``"error"``: as in
        training, a null or an unknown category raises an error, and other values are passed to the
        model.
    batch_size
        Number of rows that a task predicts at a time.
    runtime
        What computes the predictions in Spark's Python processes. ``"keras"`` (default) needs
        TensorFlow and Keras there, and may use GPUs. ``"onnx"``, ONNX Runtime, needs only the
        package onnxruntime there. It starts sooner, needs less memory, and computes on the CPU. The
        model is converted in this session, which needs the extra ``onnx``. The converted model is
        compared with Keras on random rows: differences above 1e-4 of the largest number raise an
        error. It takes functional and Sequential models, without text inputs.
    model_options
        As in `barrier_train`.

    Returns
    -------
    pyspark.sql.DataFrame
        All columns of ``df``, and the predictions. Spark SQL needs backticks around their names:
        ``df.select("`.pred_class`")``.

    Raises
    ------
    InputError
        An argument is invalid. Nothing was started. An invalid row, such as one with a value of the
        wrong size, is reported when Spark reaches it, as Spark's own exception.
    SerializationError
        The model cannot be encoded, or ONNX Runtime computes different numbers.
    """
    skips_incomplete = model_columns.check_prediction(
        {"type": type, "levels": levels, "on_missing": on_missing}
    )
    model_columns.check_runtime(runtime)
    check_model(model)
    columns_as = DataOptions(tensors=tensors, categories=categories, encode=encode)
    options: Any = {"batch_size": batch_size, "features": features, "data_options": columns_as}
    options["model_options"] = model_options
    call = PredictionCall(model=model, options=options)
    # Keras's files of equal models are equal: Spark's processes cache models by their digest.
    request = prepare(PredictionJob, call, partial(_check_inputs, df, model), as_file=True)

    from pybackend.core.model.inputs_outputs import check_features

    columns = request.columns
    groups = _group_columns(columns, df, request.job.floatx)
    names_of_numbers = {input_name(group.key): group.names for group in groups}
    check_features(request.model, columns.features, names_of_numbers)
    names = model_columns.check_levels(levels)
    predictions = model_columns.predictions_of(request.model, type, names, call.known_levels)
    files, inputs = request.files, None
    if runtime == "onnx":
        from pybackend.core.model.onnx import encode_onnx, match_inputs

        inputs = match_inputs(request.model, [group.key for group in groups])
        files = {MODEL_FILE: encode_onnx(request.model)}
    from pybackend.core.launchers import add_predictions

    return add_predictions(
        df,
        columns,
        request.job,
        files,
        predictions,
        onnx_inputs=inputs,
        skips_incomplete=skips_incomplete,
    )


def check_model(model: Any) -> None:
    if not (isinstance(model, TrainedModel) or is_keras_model(model)):
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        message = f"`model` must be a Keras 3 model or a {term('TrainResult')}, not a {kind}"
        raise InputError(message + ": it comes first, `df` second" * kind.endswith("DataFrame"))


def _check_inputs(
    frame: Any, model: Any, columns: ColumnSpec, job: PredictionJob
) -> dict[str, Any]:
    """Check the DataFrame, and return no data sets, because the rows stay in Spark."""
    if not is_spark_frame(frame):
        kind = f"{type(frame).__module__}.{type(frame).__qualname__}"
        raise InputError(
            f"`df` must be a pyspark.sql.DataFrame, not a {kind}. For arrays, use "
            f"{term('model.predict()')} or barrier_predict()"
        )
    if is_keras_model(model):  # a model without shapes cannot be written as a whole either
        from pybackend.core.model.inputs_outputs import list_outputs

        list_outputs(model)
    return {}


def _group_columns(columns: ColumnSpec, frame: Any, floatx: str) -> Sequence[ColumnGroup]:
    from pybackend.core.data.column_groups import group_columns
    from pybackend.core.data.spark_rows import column_types, describe_type

    types = column_types(read_schema(frame), columns)
    kinds = {name: describe_type(kind) for name, kind in types.items()}
    return group_columns(columns, kinds, floatx, "df")
