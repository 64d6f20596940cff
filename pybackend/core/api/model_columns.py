"""The columns that a model was trained on, and the columns for its predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pybackend.core.api.calls import ModelCall, PredictionCall, TrainedModel, TrainingCall
from pybackend.core.data.columns import ColumnSpec, as_list, check_column_spec
from pybackend.core.data.predictions import Predictions
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import check_choice
from pybackend.core.job.storage_options import check_data_options
from pybackend.core.words import setting, show


def choose_columns(call: ModelCall) -> ColumnSpec:
    """Return the columns of the call, or else those that a result's model was trained on."""
    options = check_data_options(call.options["data_options"])
    columns = ColumnSpec(
        features=as_list(call.options["features"]),
        label=call.options["label"],
        weight=call.options["weight"],
        tensors=options.tensors,
        categories=options.categories,
        encode=options.encode,
        tfrecord_spec=options.tfrecord_spec,
        repartition=options.repartition,
        finds_levels=isinstance(call, TrainingCall),
    )
    check_column_spec(columns)
    if isinstance(call, PredictionCall):
        columns = replace(columns, label=None)
    return _add_defaults(columns, call.result) if call.result else columns


def _add_defaults(columns: ColumnSpec, known: TrainedModel) -> ColumnSpec:
    """Read columns as in training, unless the call specifies otherwise."""
    named = replace(columns, features=columns.features or known.features).named_columns

    def select(given: Any, in_training: Any) -> Any:
        if given is not None:
            return given
        return {column: v for column, v in (in_training or {}).items() if column in named} or None

    categories = select(columns.categories, known.categories)
    if known.levels is not None and isinstance(columns.label, str):
        categories = {columns.label: known.levels, **(categories or {})}
    return replace(
        columns,
        features=known.features if columns.features is None else columns.features,
        tensors=known.tensors if columns.tensors is None else columns.tensors,
        categories=categories,
        encode=select(columns.encode, known.encode) or None,
        known_from=None if columns.features or not known.features else "the training",
    )


def check_type(kind: Any) -> None:
    check_choice("type", kind, choices=[None, "class", "prob", "raw"])


def check_prediction(options: Mapping[str, Any]) -> bool:
    """Check the options of a prediction; return whether incomplete rows get none."""
    check_type(options["type"])
    check_levels(options["levels"])
    check_choice("on_missing", options["on_missing"], choices=["null", "error"])
    return bool(options["on_missing"] == "null")


def check_runtime(runtime: Any) -> None:
    check_choice("runtime", runtime, choices=["keras", "onnx"])
    if runtime == "onnx":
        from pybackend.core.model.onnx import check_onnx_installed

        check_onnx_installed()


def check_levels(levels: Any) -> tuple[str, ...] | None:
    if levels is None:
        return None
    if isinstance(levels, (str, bytes, Mapping)) or not hasattr(levels, "__iter__"):
        raise InputError(f"`levels` must be a list of class names, not {show(levels)}")
    names = tuple(str(level) for level in levels)
    if len(set(names)) < len(names):
        raise InputError(f"`levels` must be distinct names, not {show(list(names))}")
    return names


def predictions_of(
    model: Any, kind: str | None, levels: tuple[str, ...] | None, known: tuple[str, ...] | None
) -> Predictions:
    """Return the predictions from a model's outputs; ``known`` levels are used if they fit."""
    from pybackend.core.model.inputs_outputs import (
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
    shows_classes = are_certain or has_class_loss(model)
    are_classes = are_logits or (shows_classes and is_classifier(model, outputs))
    if kind == "prob" and classes and not are_certain:
        raise InputError(
            f"{setting(type='prob')} needs probabilities, but this model outputs scores: its last "
            "layer is not a softmax (or a sigmoid, for a single output), and its loss is not a "
            f"Keras loss with {setting(from_logits=True)}. Use {setting(type='class')} or "
            f"{setting(type='raw')}"
        )
    if levels is not None and len(levels) != classes:
        given = f"has {classes} classes" if classes else "does not output a number for each class"
        raise InputError(f"`levels` has {len(levels)} names, but the model {given}")
    if levels is None and known is not None and len(known) == classes:
        levels = known
    if kind is None and not (classes and (are_classes or levels)):
        kind = "raw"
    elif kind not in (None, "raw") and not classes:
        shapes = ", ".join(f"{output.name} {show(output.shape)}".strip() for output in outputs)
        raise InputError(
            f"{setting(type=kind)} needs a model with one output: a number for each class, or a "
            "probability with one of Keras's binary losses. Each row of this model's output has "
            f"shape {shapes}: use {setting(type='raw')}"
        )
    if kind == "raw":
        return Predictions(outputs, are_logits=are_logits)
    has_numbers = kind != "class" and are_certain
    return Predictions(outputs, kind != "prob", has_numbers, levels, are_logits)


def divide_predictions(
    model: Any, predictions: Predictions, levels: Mapping[str, Sequence[str]]
) -> dict[str, Predictions]:
    """Return the predictions of each of a model's outputs, with classes if its levels are known."""
    from pybackend.core.model.labels import take_output

    found = {}
    for index, output in enumerate(predictions.outputs):
        found[output.name] = Predictions((replace(output, name=""),))
        names = check_levels(levels.get(output.name))
        if names and (alone := take_output(model, output.name, index)) is not None:
            found[output.name] = predictions_of(alone, None, None, names)
    return found
