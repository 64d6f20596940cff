"""Checks of labels before training: missing labels, and values that the loss does not accept."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import counted
from pybackend.core.model.inputs_outputs import list_outputs
from pybackend.core.model.view import flatten, has_own, is_of_keras
from pybackend.core.words import either, row_number, show, term

_SPARSE = "sparse_categorical_crossentropy"


def check_has_labels(model: Any, columns: Collection[str], name: str, *, trains: bool) -> None:
    """Reject data without labels for a model whose loss or metrics Keras computes from labels.

    The argument ``name`` holds arrays, named as `data.arrays.flatten` names them. ``trains``: the
    model is trained on them, not only evaluated.
    """
    has_own_step = has_own(model, "train_step" if trains else "test_step")
    if has_own_step or any(column.partition("/")[0] == "y" for column in columns):
        return
    found = {
        "loss": not has_own(model, "compute_loss") and getattr(model, "loss", None) is not None,
        "metrics": not has_own(model, "compute_metrics")
        and any(hasattr(metric, "metrics") for metric in model.metrics),
    }
    needing = " and ".join(f"`{part}`" for part, needs in found.items() if needs)
    if needing:
        raise InputError(
            f"`{name}` has no labels, but the model is compiled with {needing}, for which Keras "
            f"needs labels: pass {term('(x, y)')}, or specify a column of the table as `label`. "
            "To train without labels, compute the loss in add_loss, compute_loss or train_step "
            f"of the model, and compile it without {needing}"
        )


def check_labels(
    model: Any, columns: Mapping[str, Any], name: str, *, names_rows: bool = True
) -> None:
    """Reject labels that a Keras loss misinterprets, or that are not classes.

    Misinterpreted labels train without an error: 1 and 2 as probabilities, for example. On labels
    that are not classes, TensorFlow fails at some step of training or, on a GPU, returns NaN. The
    argument ``name`` holds the arrays, as `data.arrays.flatten` names them. ``names_rows``: they
    contain all rows, in order.
    """
    weights = columns.get("sample_weight")
    shapes = _find_shapes(model)
    for key, loss in match_losses(model).items():
        labels, shape = columns.get(key), shapes.get(key, ())
        if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "fiub":
            continue
        owner = _LabelOwner(name, _name_output(model, key), names_rows)
        _check_range(loss, labels, weights, owner)
        if _name_function(loss):
            _check_weights(weights, shape, name)
        if len(shape) != 1 or shape[0] is None:
            continue
        _check_count(loss, labels, shape[0], owner)
        if _name_function(loss) == _SPARSE:
            _check_classes(loss, labels, shape[0], owner)


@dataclass(frozen=True)
class _LabelOwner:
    """Owner of labels: the argument, the output in words, and whether rows have numbers."""

    argument: str
    output: str
    names_rows: bool

    def describe(self, label: float, row: int) -> str:
        where = f" in {row_number(row)}" if self.names_rows else ""
        return f"`{self.argument}` has the label {label:g}{self.output}{where}"


def _check_classes(loss: Any, labels: Any, classes: int, owner: _LabelOwner) -> None:
    if labels.ndim == 2 and labels.shape[1] == classes > 1:
        raise InputError(
            f"`{owner.argument}` has labels of shape {show((classes,))}{owner.output}, but the "
            "model's loss takes class numbers: "
            f"pass {either('labels.argmax(axis=1)', '`max.col(labels) - 1`')}, or compile with "
            f"{term('CategoricalCrossentropy')}"
        )
    if labels.size != len(labels):
        return
    flat = labels.reshape(-1)
    is_class = (flat >= 0) & (flat < classes) & (flat == np.floor(flat))
    ignored = getattr(loss, "ignore_class", None)
    if ignored is not None:
        is_class |= flat == ignored
    if not is_class.all():
        row = int(np.argmin(is_class))
        outputs = f"output's {classes} numbers" if owner.output else f"model's {classes} outputs"
        raise InputError(
            f"{owner.describe(flat[row], row)}, but the {outputs} are for the "
            f"classes 0 to {classes - 1}: encode the labels accordingly, or give the model an "
            "output for each class"
        )


def _check_weights(weights: Any, shape: tuple[int | None, ...], name: str) -> None:
    """Reject several weights per row for an output that Keras's losses reduce to one number."""
    if len(shape) != 1 or not isinstance(weights, np.ndarray) or weights.size == len(weights):
        return
    raise InputError(
        f"`{name}` has sample weights of shape {show(weights.shape[1:])} per row, but the loss of "
        "the model is one number per row: pass one weight for each row"
    )


def check_class_weight(
    model: Any, class_weight: Collection[int], columns: Mapping[str, Any], name: str
) -> None:
    """Reject class weights for labels that are not classes, or for classes that cannot occur.

    Of the arrays in the argument ``name``, only ``y`` is checked, with shape (rows,), (rows, 1) or
    one-hot.
    """
    labels = columns.get("y")
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "fiub" or labels.ndim > 2:
        return
    if labels.size > len(labels):
        classes: int | None = labels.shape[-1]
    else:
        check_are_classes(labels, name)
        classes = _count_classes(model)
    for code in class_weight:
        if classes is not None and code >= classes:
            raise InputError(
                f"`class_weight` has the class {code}, but the model has the classes 0 to "
                f"{classes - 1}"
            )


def check_are_classes(labels: Any, name: str, *, names_rows: bool = True) -> None:
    """Reject labels that are not class numbers, as `check_class_weight` does.

    Keras rounds labels to find the weight: 0.9 is a soft label of class 1.
    """
    flat = labels.reshape(-1)
    is_class = np.rint(flat) >= 0
    if not is_class.all():
        row = int(np.argmin(is_class))
        described = _LabelOwner(name, "", names_rows).describe(flat[row], row)
        raise InputError(
            f"{described}, but `class_weight` is for classes, numbered from 0: pass a weight for "
            "each row instead"
        )


def _check_count(loss: Any, labels: Any, units: int, owner: _LabelOwner) -> None:
    """Reject rows whose number of labels differs from the outputs, if the loss pairs them.

    Keras broadcasts one of them to the other, or fails in the first step. Keras's losses of numbers
    may compare one label with several outputs.
    """
    is_of_classes = _find_range(loss) in (_BINARY, _CATEGORICAL)
    is_known = _find_range(loss) is not None or _name_function(loss) in _OF_NUMBERS
    if not is_known or not len(labels) or labels.ndim > 2:
        return
    count = labels.size // len(labels)
    # Without an axis, Keras would pair the labels with the outputs of a row.
    if count == units or (count == 1 and labels.ndim == 2 and not is_of_classes):
        return
    cure = f"for {counted(count, 'number')}, give the model {counted(count, 'output')}"
    if is_of_classes:
        cure = (
            f"for class numbers, compile with {term('SparseCategoricalCrossentropy')}, or, for two "
            "classes, give the model one output"
        )
    numbers = f"{counted(units, 'number')}{owner.output}"
    outputs = numbers if owner.output else f"model's {counted(units, 'output')}"
    pairs = f"each of the {outputs} with its own" if units > 1 else f"the {outputs} with one"
    raise InputError(
        f"`{owner.argument}` has {'one label' if count == 1 else f'{count} labels'} per row, but "
        f"the loss {_name_loss(loss)} compares {pairs} label: {cure}"
    )


def check_levels(model: Any, levels: Sequence[Any], name: str) -> None:
    """Reject text labels with more values than the model's only output has classes.

    A regression loss would interpret the codes of the values as numbers.
    """
    loss, classes = match_losses(model).get("y"), _count_classes(model)
    shown = ", ".join(map(show, levels[:4])) + (", ..." if len(levels) > 4 else "")
    if classes is not None and len(levels) > classes:
        raise InputError(
            f"`{name}` has labels with {len(levels)} different values ({shown}), "
            f"but the model has {classes} classes: give it an output for each class, and a loss "
            f"such as {term('SparseCategoricalCrossentropy')}"
        )
    if loss is not None and len(levels) > 2 and _name_function(loss) in _OF_NUMBERS:
        raise InputError(
            f"`{name}` has text labels ({shown}), but the loss {_name_loss(loss)} "
            "takes numbers: convert the column if it contains numbers; for classes, give the "
            f"model an output for each, and {term('SparseCategoricalCrossentropy')}"
        )


Range = tuple[float, float, str]
_ONE_HOT = "one-hot labels, or probabilities: for class numbers, compile with {sparse}"
_TWO = (
    "0 and 1, or probabilities: encode two classes as 0 and 1; for more classes, give the model "
    "an output for each, and {sparse}"
)
_BINARY: Range = (0, 1, _TWO)
_CATEGORICAL: Range = (0, 1, _ONE_HOT)
_SIGNS: Range = (-1, 1, "-1 and 1, or 0 and 1")
_POSITIVE: Range = (0, np.inf, "numbers of at least 0")
_RANGES: Mapping[str, Range] = {
    "binary_crossentropy": _BINARY,
    "binary_focal_crossentropy": _BINARY,
    "categorical_crossentropy": _CATEGORICAL,
    "categorical_focal_crossentropy": _CATEGORICAL,
    "kl_divergence": (0, 1, "probabilities"),
    "dice": (0, 1, "0 and 1, or probabilities"),
    "tversky": (0, 1, "0 and 1, or probabilities"),
    "hinge": _SIGNS,
    "squared_hinge": _SIGNS,
    "categorical_hinge": (-1, 1, "one-hot labels, of 0 and 1 or of -1 and 1"),
    "poisson": _POSITIVE,
    "mean_squared_logarithmic_error": _POSITIVE,
}
_OF_NUMBERS = {
    "huber",
    "log_cosh",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "poisson",
}


def _find_range(loss: Any) -> Range | None:
    """Return the labels that one of Keras's own losses accepts; None for other losses."""
    return _RANGES.get(_name_function(loss))


def _name_function(loss: Any) -> str:
    """Name of the function of Keras's own loss; a derived one may interpret labels differently."""
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:  # "crossentropy", which is chosen by the shapes
            return ""
    if not inspect.isfunction(loss):  # Keras's classes keep their function
        loss = getattr(loss, "fn", None) if is_of_keras(type(loss)) else None
    name: str = getattr(loss, "__name__", "")
    return name if getattr(keras.losses, name, None) is loss else ""


def _name_loss(loss: Any) -> str:
    return loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)


def take_output(model: Any, name: str, index: int) -> Any:
    """Return a model of one of several outputs, compiled with its loss; None if not known."""
    losses = match_losses(model)
    loss = losses.get(f"y/{name}", losses.get("y"))
    outputs = getattr(model, "output", None)
    if loss is None or outputs is None:
        return None
    alone = keras.Model(model.inputs, keras.tree.flatten(outputs)[index])
    alone.compile(loss=flatten(loss)[0])
    return alone


def match_losses(model: Any) -> dict[str, Any]:
    """Return the losses passed to `compile`, by the keys of their labels, as far as known."""
    loss = getattr(model, "loss", None)
    # Otherwise Keras does not compute the training loss from the arguments of `compile`.
    if loss is None or has_own(model, "train_step", "compute_loss"):
        return {}
    if not isinstance(loss, (Mapping, list, tuple)):
        return {"y": loss}
    names = list(getattr(model, "output_names", None) or [])
    if len(names) < 2 and len(flatten(loss)) == 1:
        return {"y": flatten(loss)[0]}
    pairs = loss.items() if isinstance(loss, Mapping) else zip(names, loss, strict=False)
    by_name = {name: one for name, one in pairs if len(flatten(one)) == 1}
    by_number = {f"y/#{n}": by_name[name] for n, name in enumerate(names) if name in by_name}
    return {**{f"y/{name}": one for name, one in by_name.items()}, **by_number}


def _find_shapes(model: Any) -> dict[str, tuple[int | None, ...]]:
    """Row shapes of the outputs, by the keys of their labels; empty if not known."""
    try:
        outputs = list_outputs(model)
    except InputError:  # not known before it runs
        return {}
    if len(outputs) == 1:
        return {"y": outputs[0].shape}
    named = {f"y/{output.name}": output.shape for output in outputs}
    return {**named, **{f"y/#{number}": output.shape for number, output in enumerate(outputs)}}


def _name_output(model: Any, key: str) -> str:
    """Describe which of several outputs the labels with a key belong to."""
    name = key.partition("/")[2]
    if name.startswith("#"):
        name = model.output_names[int(name[1:])]
    return f" of the output {show(name)}" if name else ""


def _check_range(loss: Any, labels: Any, weights: Any, owner: _LabelOwner) -> None:
    found = _find_range(loss)
    if found is None or not len(labels):
        return
    least, most, taken = found
    rows = labels.reshape(len(labels), -1)
    is_outside = (rows < least) | (rows > most)
    if isinstance(weights, np.ndarray) and weights.shape == (len(rows),):
        is_outside &= weights[:, None] != 0  # a row that does not count may have any label
    if not is_outside.any():
        return
    row = int(np.argmax(is_outside.any(axis=1)))
    label = rows[row][is_outside[row]][0]
    taken = taken.format(sparse=term("SparseCategoricalCrossentropy"))
    raise InputError(f"{owner.describe(label, row)}, but the loss {_name_loss(loss)} takes {taken}")


def _count_classes(model: Any) -> int | None:
    """Return the number of classes for Keras's own loss of the only output; None if not known."""
    loss = match_losses(model).get("y")
    if _find_range(loss) is _BINARY:
        return 2
    shape = _find_shapes(model).get("y", ())
    return shape[0] if _name_function(loss) == _SPARSE and len(shape) == 1 else None
