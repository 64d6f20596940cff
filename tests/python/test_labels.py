"""Labels that a loss cannot take are named before anything starts."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
from conftest import build_dense

import pybackend
from pybackend.errors import InputError
from pybackend.model.labels import check_has_labels, check_labels

X = np.zeros((6, 8), "float32")
GOOD = np.array([0, 1, 2, 0, 1, 2])


def model_with(loss: Any, outputs: int = 3) -> Any:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(outputs)])
    model.compile("sgd", loss)
    return model


def replaced(value: Any) -> Any:
    labels = GOOD.astype("float64")
    labels[4] = value
    return labels


@pytest.mark.parametrize("value", [3, -1, 0.5])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_a_label_that_is_no_class_is_named_with_its_row(value: float, shape: Any) -> None:
    data = (X, replaced(value).reshape(shape))
    with pytest.raises(InputError, match=rf"label {value:g} in row 4, .* classes 0 to 2"):
        pybackend.barrier_train(None, build_dense(), data, workers=2, verbose=0)


@pytest.mark.parametrize(
    ("compiled", "needing"),
    [
        ({"loss": "mse"}, "`loss`"),
        ({"loss": None, "metrics": ["mae"]}, "`metrics`"),
        ({"loss": "mse", "metrics": ["mae"]}, "`loss` and `metrics`"),
    ],
)
@pytest.mark.parametrize(
    "data",
    [X, {"x": X}, (X, None), pd.DataFrame(X, columns=list("abcdefgh"))],
    ids=["array", "dict", "None", "frame"],
)
def test_absent_labels_are_named(compiled: Any, needing: str, data: Any) -> None:
    model = keras.Sequential([keras.Input((8,), name="x"), keras.layers.Dense(3)])
    model.compile("sgd", **compiled)
    message = f"`data` has no labels, and the model is compiled with {needing}, for which Keras"
    with pytest.raises(InputError, match=message):
        pybackend.barrier_train(None, model, data, label=None, workers=2, verbose=0)


class OwnLoss(keras.Sequential):
    """Computes its loss from inputs alone, in training and evaluation."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, **_: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y_pred))


def test_labels_that_nobody_reads_may_be_absent() -> None:
    model = OwnLoss([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    check_has_labels(model, ["x"], "data", trains=True)
    check_has_labels(model, ["x"], "data", trains=False)


def test_labels_of_validation_data_are_named() -> None:
    with pytest.raises(InputError, match="`validation_data` has no labels, and the model"):
        pybackend.barrier_train(
            None, build_dense(), (X, GOOD), validation_data=X, workers=2, verbose=0
        )


def test_one_hot_labels_are_named() -> None:
    with pytest.raises(InputError, match=r"labels of shape \(3,\).*argmax"):
        pybackend.barrier_train(None, build_dense(), (X, np.eye(3)[GOOD]), workers=2, verbose=0)


def test_validation_data_is_named() -> None:
    data, held_out = (X, GOOD), (X, GOOD + 1)
    with pytest.raises(InputError, match="`validation_data` has the label 3 in row 2"):
        pybackend.barrier_train(
            None, build_dense(), data, validation_data=held_out, workers=2, verbose=0
        )


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        ("sparse_categorical_crossentropy", GOOD),
        ("sparse_categorical_crossentropy", GOOD.astype("float32")),
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=-1), replaced(-1)),
        ("mse", replaced(7.5)),
        ("categorical_crossentropy", np.eye(3)[GOOD]),
        (lambda y_true, y_pred: keras.ops.mean(y_pred, -1), replaced(9)),
    ],
)
def test_what_other_losses_take_is_theirs_to_say(loss: Any, labels: Any) -> None:
    check_labels(model_with(loss), {"x": X, "y": labels}, "data")


def test_a_loss_that_is_derived_from_keras_s_may_read_labels_otherwise() -> None:
    class Shifted(keras.losses.SparseCategoricalCrossentropy):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return super().call(y_true - 1, y_pred)

    check_labels(model_with(Shifted()), {"x": X, "y": GOOD + 1}, "data")


def test_a_model_whose_shapes_are_unknown_is_left_to_the_workers() -> None:
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    check_labels(model, {"x": X, "y": replaced(9)}, "data")
