"""The call that puts a model's predictions beside the rows of a Spark DataFrame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pybackend.api.model import is_keras_model
from pybackend.api.request import prepare
from pybackend.api.result import TrainResult
from pybackend.api.signatures import explain_arguments
from pybackend.data.columns import ColumnSpec
from pybackend.data.predictions import Output, Predictions
from pybackend.errors import InputError
from pybackend.job.job import Job
from pybackend.job.options import DataOptions
from pybackend.launchers import is_spark_frame, read_schema

_TYPES = (None, "class", "prob", "raw")


@explain_arguments
def predict_spark(
    model: Any,
    df: Any,
    *,
    features: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
    tensors: Mapping[str, tuple[str, tuple[int | None, ...]]] | None = None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    type: str | None = None,
    levels: Sequence[Any] | None = None,
    batch_size: int = 256,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
) -> Any:
    """Predict for the rows of a Spark DataFrame in place, when Spark needs the predictions.

    The numbers are those of ``model.predict``. Spark runs nothing before it is asked for rows, and
    then ordinary tasks, as many at once as there are slots. Each of Spark's Python processes loads
    the model once and keeps its last three models for later tasks and queries.

    Parameters
    ----------
    model
        A Keras model, which need not be compiled, or the `TrainResult` of `barrier_train`.
    df
        A ``pyspark.sql.DataFrame``, classic or of Spark Connect.
    features, tensors, categories
        As in `barrier_train` and `DataOptions`. None: those of the `TrainResult`, or else all
        columns are features. Rows of any length (``(dtype, (None,))``) are padded with zeros to the
        length of the model's input or, if that is open, to the longest of the rows that Spark
        sends together.
    type
        - ``"class"``: the column ``.pred_class``, the class with the largest number;
        - ``"prob"``: a column ``.pred_<class>`` of each class's probability. Where the loss is one
          of Keras's with ``from_logits``, it is the softmax or sigmoid of what the model gives. A
          model of one number per row, whose loss is one of Keras's binary ones, gives that of class
          1; class 0 has the rest to 1. Refused if nothing makes the numbers probabilities;
        - ``"raw"``: the column ``.pred``, or ``.pred_<output>`` for each of several outputs. One
          number per row is a number, more are arrays, nested as the output's shape is;
        - None: class and probabilities, if the model gives such; the class alone, if numbers that
          are no probabilities tell classes by ``levels`` or a categorical loss; else ``"raw"``.
    levels
        Names of the classes 0, 1, 2, ...; None: those of the `TrainResult`, or else numbers.
    batch_size
        Rows that a task computes at once.
    custom_objects, safe_mode
        As in `barrier_train`.

    Returns
    -------
    pyspark.sql.DataFrame
        All columns of ``df``, and the predictions. Spark SQL needs backticks around their names:
        ``df.select("`.pred_class`")``.

    Raises
    ------
    InputError
        An argument is wrong; nothing was started. What is wrong with a row (a null, a value of
        another size) is reported when Spark reaches it, by Spark's own exception.
    SerializationError
        The model cannot be encoded.
    """
    check_type(type)
    names = check_levels(levels)
    check_model(model)
    data_options = DataOptions(tensors=tensors, categories=categories)
    arguments = {**locals(), "workers": 1}
    # Keras's file has equal bytes for equal models: Spark's processes keep models by their digest.
    request = prepare("predict", arguments, partial(_check_inputs, df, model), as_file=True)

    from pybackend.model.inputs import check_features

    columns = request.columns
    check_features(request.model, columns.features, _count_flat_columns(columns, df))
    known = check_levels(model.levels) if isinstance(model, TrainResult) else None
    predictions = choose_columns(request.model, type, names, known)
    from pybackend.launchers import add_predictions

    return add_predictions(df, columns, request.job, request.files, predictions)


def check_type(kind: Any) -> None:
    """Reject another kind of predictions."""
    if kind is not None and kind not in _TYPES[1:]:
        raise InputError(f"`type` must be None, 'class', 'prob' or 'raw', not {kind!r}")


def check_levels(levels: Any) -> tuple[str, ...] | None:
    """Names of classes, which must differ."""
    if levels is None:
        return None
    if isinstance(levels, (str, bytes, Mapping)) or not hasattr(levels, "__iter__"):
        raise InputError(f"`levels` must be a list of names of classes, not {levels!r}")
    names = tuple(str(level) for level in levels)
    if len(set(names)) < len(names):
        raise InputError(f"`levels` must be different names, not {list(names)!r}")
    return names


def check_model(model: Any) -> None:
    """Reject what is neither a model nor the result of a training."""
    if not (isinstance(model, TrainResult) or is_keras_model(model)):
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        raise InputError(f"`model` must be a Keras 3 model or a TrainResult, not a {kind}")


def _check_inputs(frame: Any, model: Any, columns: ColumnSpec, job: Job) -> dict[str, Any]:
    found = _check_frame(frame)
    if is_keras_model(model):  # without shapes it cannot be written as a whole either
        from pybackend.model.outputs import list_outputs

        list_outputs(model)
    return found


def _check_frame(frame: Any) -> dict[str, Any]:
    """No data sets: the DataFrame stays where it is."""
    if is_spark_frame(frame):
        return {}
    kind = type(frame)
    raise InputError(
        f"`df` must be a pyspark.sql.DataFrame, not a {kind.__module__}.{kind.__qualname__}. For "
        "arrays there is model.predict() or barrier_predict()"
    )


def _count_flat_columns(columns: ColumnSpec, frame: Any) -> int | None:
    """How many numbers a row of the only input has, if each column gives one."""
    types = {field.name: field.dataType.typeName() for field in read_schema(frame).fields}
    if isinstance(columns.features, Mapping) or columns.tensors:
        return None
    names = list(types) if columns.features is None else columns.named_columns
    flat = {"boolean", "byte", "short", "integer", "long", "float", "double", "decimal"}
    return len(names) if all(types.get(name) in flat for name in names) else None


def choose_columns(
    model: Any, kind: str | None, levels: tuple[str, ...] | None, known: tuple[str, ...] | None
) -> Predictions:
    """What a model's outputs become; ``known`` levels are used if they fit.

    Raises
    ------
    InputError
        The outputs are not what ``kind`` or ``levels`` say.
    """
    from pybackend.model.outputs import (
        count_classes,
        gives_probabilities,
        has_class_loss,
        has_logits,
        is_classifier,
        list_outputs,
    )

    outputs = list_outputs(model)
    are_logits = has_logits(model, outputs)
    classes = max(2 if are_logits else 0, count_classes(model, outputs))
    are_certain = are_logits or (classes > 0 and gives_probabilities(model, outputs))
    are_classes = are_logits or (
        is_classifier(model, outputs) and (are_certain or has_class_loss(model))
    )
    if kind == "prob" and classes and not are_certain:
        raise InputError(
            "type='prob' needs probabilities, but this model gives scores: its last layer is not a "
            "softmax (or, for one number, a sigmoid), and its loss is none of Keras's with "
            "from_logits=True. Use type='class' or type='raw'"
        )
    chosen = choose_predictions(outputs, classes, kind, levels, known, are_classes)
    shows_numbers = chosen.has_numbers and are_certain
    return replace(chosen, has_numbers=shows_numbers, are_logits=are_logits)


def choose_predictions(
    outputs: tuple[Output, ...],
    classes: int,
    kind: str | None,
    levels: tuple[str, ...] | None,
    known: tuple[str, ...] | None,
    is_of_classes: bool,
) -> Predictions:
    """What the outputs become; ``known`` levels are used if they fit."""
    if levels is not None and len(levels) != classes:
        given = f"has {classes} classes" if classes else "does not give a number for each class"
        raise InputError(f"`levels` has {len(levels)} names, but the model {given}")
    if levels is None and known is not None and len(known) == classes:
        levels = known
    if kind is None:
        kind = "both" if classes and (is_of_classes or levels) else "raw"
    elif kind != "raw" and not classes:
        shapes = ", ".join(f"{output.name} {output.shape}".strip() for output in outputs)
        raise InputError(
            f"type={kind!r} needs a model with one output of a number for each class, or of a "
            "probability by one of Keras's binary losses; this one gives rows of shape "
            f"{shapes}: use type='raw'"
        )
    if kind == "raw":
        return Predictions(outputs)
    return Predictions(outputs, kind in ("class", "both"), kind in ("prob", "both"), levels)
