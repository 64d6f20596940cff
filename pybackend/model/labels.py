"""Labels that a model's loss cannot take, or lacks, as far as it is known before the training."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import keras
import numpy as np

from pybackend.errors import InputError
from pybackend.model.layers import flatten, is_of_keras
from pybackend.model.outputs import list_outputs

_SPARSE = "sparse_categorical_crossentropy"


def check_has_labels(model: Any, columns: Collection[str], name: str, *, trains: bool) -> None:
    """Reject data without labels for a model whose loss or metrics Keras computes from them.

    Parameters
    ----------
    columns
        Names of arrays, as `pybackend.data.arrays` flattens them.
    name
        The argument that they are of.
    trains
        Whether the model is trained on them, not only evaluated.

    Raises
    ------
    InputError
        Names the argument, and the ways to train without labels.
    """
    kind = type(model)
    has_own_step = not is_of_keras(kind.train_step if trains else kind.test_step)
    if has_own_step or any(column.partition("/")[0] == "y" for column in columns):
        return
    found = {
        "loss": is_of_keras(kind.compute_loss) and getattr(model, "loss", None) is not None,
        "metrics": is_of_keras(kind.compute_metrics)
        and any(hasattr(metric, "metrics") for metric in model.metrics),
    }
    needing = " and ".join(f"`{part}`" for part, needs in found.items() if needs)
    if needing:
        raise InputError(
            f"`{name}` has no labels, and the model is compiled with {needing}, for which Keras "
            "needs them: pass (x, y), or name the column of a table as `label`. To train without "
            "labels, compute the loss in add_loss, compute_loss or train_step of the model, and "
            f"compile it without {needing}"
        )


def check_labels(model: Any, columns: Mapping[str, Any], name: str) -> None:
    """Reject labels that are not the number of one of the model's classes.

    Only for a model with one output of a number per class and Keras's sparse loss, on which
    TensorFlow fails at some step of the training, or, on a GPU, gives NaN.

    Parameters
    ----------
    columns
        Arrays by name; the labels are ``y``.
    name
        The argument that they are of.

    Raises
    ------
    InputError
        Names a label, its row, and the classes.
    """
    classes, labels = _count_sparse_classes(model), columns.get("y")
    if classes is None or not isinstance(labels, np.ndarray) or labels.dtype.kind not in "fiub":
        return
    if labels.ndim == 2 and labels.shape[1] == classes > 1:
        raise InputError(
            f"`{name}` has labels of shape ({classes},), but the loss of the model takes the "
            "number of a class: pass labels.argmax(axis=1), or compile with CategoricalCrossentropy"
        )
    if labels.size != len(labels):
        return
    flat = labels.reshape(-1)
    is_class = (flat >= 0) & (flat < classes) & (flat == np.floor(flat))
    ignored = getattr(flatten(model.loss)[0], "ignore_class", None)
    if ignored is not None:
        is_class |= flat == ignored
    if not is_class.all():
        row = int(np.argmin(is_class))
        raise InputError(
            f"`{name}` has the label {flat[row]:g} in row {row}, but the model's {classes} outputs "
            f"are for the classes 0 to {classes - 1}: encode the labels so, or give the model an "
            "output for every class"
        )


def _count_sparse_classes(model: Any) -> int | None:
    losses = flatten(getattr(model, "loss", None))
    own = (type(model).train_step, type(model).compute_loss)
    is_usual = all(method.__module__.startswith("keras.") for method in own)
    if not is_usual or len(losses) != 1 or not _is_sparse(losses[0]):
        return None
    try:
        outputs = list_outputs(model)
    except InputError:  # not known before it runs
        return None
    shape = outputs[0].shape
    return shape[0] if len(outputs) == 1 and len(shape) == 1 else None


def _is_sparse(loss: Any) -> bool:
    """Whether this is Keras's own loss; one that is derived from it may read labels otherwise."""
    if isinstance(loss, str):
        return loss == _SPARSE
    known = keras.losses.sparse_categorical_crossentropy
    return loss is known or type(loss) is keras.losses.SparseCategoricalCrossentropy
