"""Add a model's predictions to a Spark DataFrame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pybackend.core.api.calls import PredictionCall, explain_arguments
from pybackend.core.api.model import is_keras_model
from pybackend.core.api.model_columns import (
    check_levels,
    check_on_missing,
    check_runtime,
    check_type,
    predictions_of,
)
from pybackend.core.api.request import prepare
from pybackend.core.api.result import TrainResult
from pybackend.core.data.columns import ColumnGroup, ColumnSpec, input_name
from pybackend.core.errors import InputError
from pybackend.core.job.call_options import Features, OnMissing, PredictionRuntime, PredictionType
from pybackend.core.job.job import MODEL_FILE, PredictionJob
from pybackend.core.job.storage_options import ColumnEncoding, DataOptions, ModelOptions
from pybackend.core.launchers import is_spark_frame, read_schema
from pybackend.core.words import term


@explain_arguments
def predict_spark(
    model: Any,
    df: Any,
    *,
    features: Features | None = None,
    tensors: Mapping[str, tuple[str, tuple[int | None, ...]]] | None = None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    encode: ColumnEncoding | Mapping[str, ColumnEncoding] | None = None,
    type: PredictionType | None = None,
    levels: Sequence[Any] | None = None,
    on_missing: OnMissing = "null",
    batch_size: int = 256,
    runtime: PredictionRuntime = "keras",
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
    check_type(type)
    check_runtime(runtime)
    names = check_levels(levels)
    skips_incomplete = check_on_missing(on_missing)
    check_model(model)
    call = PredictionCall(
        model=model,
        options={
            "batch_size": batch_size,
            "features": features,
            "data_options": DataOptions(tensors=tensors, categories=categories, encode=encode),
            "model_options": model_options,
        },
    )
    # Keras's files of equal models are equal: Spark's processes cache models by their digest.
    request = prepare(PredictionJob, call, partial(_check_inputs, df, model), as_file=True)

    from pybackend.core.model.inputs_outputs import check_features

    columns = request.columns
    groups = _group_columns(columns, df, request.job.floatx)
    names_of_numbers = {input_name(group.key): group.names for group in groups}
    check_features(request.model, columns.features, names_of_numbers)
    known = check_levels(model.levels) if isinstance(model, TrainResult) else None
    predictions = predictions_of(request.model, type, names, known)
    from pybackend.core.launchers import add_predictions

    files, inputs = request.files, None
    if runtime == "onnx":
        from pybackend.core.model.onnx import encode_onnx, match_inputs

        inputs = match_inputs(request.model, [group.key for group in groups])
        files = {MODEL_FILE: encode_onnx(request.model)}
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
    """Reject a value that is neither a model nor the result of a training run."""
    if not (isinstance(model, TrainResult) or is_keras_model(model)):
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        message = f"`model` must be a Keras 3 model or a {term('TrainResult')}, not a {kind}"
        raise InputError(message + ": it comes first, `df` second" * kind.endswith("DataFrame"))


def _check_inputs(
    frame: Any, model: Any, columns: ColumnSpec, job: PredictionJob
) -> dict[str, Any]:
    found = _check_frame(frame)
    if is_keras_model(model):  # a model without shapes cannot be written as a whole either
        from pybackend.core.model.inputs_outputs import list_outputs

        list_outputs(model)
    return found


def _check_frame(frame: Any) -> dict[str, Any]:
    """Check the DataFrame, and return no data sets, because the rows stay in Spark."""
    if is_spark_frame(frame):
        return {}
    kind = type(frame)
    raise InputError(
        f"`df` must be a pyspark.sql.DataFrame, not a "
        f"{kind.__module__}.{kind.__qualname__}. For arrays, use {term('model.predict()')} or "
        "barrier_predict()"
    )


def _group_columns(columns: ColumnSpec, frame: Any, floatx: str) -> Sequence[ColumnGroup]:
    """Return the tensors that the model's inputs get."""
    from pybackend.core.data.column_groups import group_columns
    from pybackend.core.data.dataframe import column_types, describe_type

    types = column_types(read_schema(frame), columns)
    kinds = {name: describe_type(kind) for name, kind in types.items()}
    groups, _ = group_columns(columns, kinds, floatx, "df")
    return groups
