"""Which columns a model's predictions become: classes, numbers of classes, or all as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pybackend.data.predictions import Output, Predictions
from pybackend.errors import InputError

_TYPES = ("class", "prob", "raw")
_ON_MISSING = ("null", "error")


def check_type(kind: Any) -> None:
    """Reject another kind of predictions."""
    if kind is not None and kind not in _TYPES:
        raise InputError(f"`type` must be None, 'class', 'prob' or 'raw', not {kind!r}")


def check_on_missing(on_missing: Any) -> bool:
    """Whether rows that lack a value are left to have no prediction."""
    if on_missing not in _ON_MISSING:
        raise InputError(f"`on_missing` must be 'null' or 'error', not {on_missing!r}")
    return bool(on_missing == "null")


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


def predictions_of(
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
