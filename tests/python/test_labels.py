"""Labels that a loss cannot use are named before anything starts."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
from conftest import build_dense

import pybackend
from pybackend.core.errors import InputError
from pybackend.core.model.labels import (
    check_class_weight,
    check_has_labels,
    check_labels,
    check_levels,
)

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
    with pytest.raises(InputError, match=rf"label {value:g} in row 4 .*, .* classes 0 to 2"):
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
    message = f"`data` has no labels, but the model is compiled with {needing}, for which Keras"
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
    with pytest.raises(InputError, match="`validation_data` has no labels, but the model"):
        pybackend.barrier_train(
            None, build_dense(), (X, GOOD), validation_data=X, workers=2, verbose=0
        )


def test_one_hot_labels_are_named() -> None:
    with pytest.raises(InputError, match=r"labels of shape \(3,\).*argmax"):
        pybackend.barrier_train(None, build_dense(), (X, np.eye(3)[GOOD]), workers=2, verbose=0)


def test_validation_data_is_named() -> None:
    data, validation = (X, GOOD), (X, GOOD + 1)
    with pytest.raises(InputError, match="`validation_data` has the label 3 in row 2"):
        pybackend.barrier_train(
            None, build_dense(), data, validation_data=validation, workers=2, verbose=0
        )


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        ("sparse_categorical_crossentropy", GOOD),
        ("sparse_categorical_crossentropy", GOOD.astype("float32")),
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=-1), replaced(-1)),
        ("mse", replaced(7.5).reshape(-1, 1)),
        ("categorical_crossentropy", np.eye(3)[GOOD]),
        ("binary_crossentropy", np.eye(3)[GOOD] / 2),
        (keras.losses.Hinge(), (1 - 2 * (GOOD % 2)).reshape(-1, 1)),
        ("crossentropy", GOOD),
        (lambda y_true, y_pred: keras.ops.mean(y_pred, -1), replaced(9)),
    ],
)
def test_what_other_losses_take_is_theirs_to_say(loss: Any, labels: Any) -> None:
    check_labels(model_with(loss), {"x": X, "y": labels}, "data")


@pytest.mark.parametrize("loss", ["binary_crossentropy", keras.losses.CategoricalCrossentropy()])
def test_one_label_for_several_outputs_is_named(loss: Any) -> None:
    with pytest.raises(
        InputError, match=r"one label per row, but .* each of the model's 3 outputs"
    ):
        check_labels(model_with(loss), {"x": X, "y": GOOD % 2}, "data")


@pytest.mark.parametrize("loss", ["mse", keras.losses.Huber(), "poisson"])
def test_one_number_for_several_outputs_needs_an_axis(loss: Any) -> None:
    with pytest.raises(InputError, match=r"one label per row, .* for 1 number, give the model 1 o"):
        check_labels(model_with(loss), {"x": X, "y": GOOD % 2}, "data")
    check_labels(model_with(loss), {"x": X, "y": (GOOD % 2).reshape(-1, 1)}, "data")


@pytest.mark.parametrize("loss", ["mse", keras.losses.Huber(), "mean_absolute_error"])
def test_text_is_no_number(loss: Any) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(loss=loss)
    with pytest.raises(
        InputError, match=r"text labels \('10', '100', '9'\), but the loss .* numbers"
    ):
        check_levels(model, ["10", "100", "9"], "data")
    check_levels(model, ["no", "yes"], "data")  # 0 and 1


BINARY = GOOD % 2
WRONG: dict[str, tuple[Any, Any, str]] = {
    "codes 1 and 2": (
        "binary_crossentropy",
        BINARY + 1,
        "label 2 in row 1 .*, .* 0 and 1, or prob",
    ),
    "signs": (
        keras.losses.BinaryCrossentropy(True),
        1 - 2 * BINARY,
        "label -1 in row 1 .*, .* 0 and 1",
    ),
    "bytes": (
        keras.losses.BinaryFocalCrossentropy(),
        np.full((6, 3), 255, "uint8"),
        "label 255 in row 0",
    ),
    "codes": ("categorical_crossentropy", GOOD, "label 2 in row 2 .*, .* one-hot labels"),
    "counts": (
        keras.losses.Poisson(),
        replaced(-2),
        "label -2 in row 4 .*, .* numbers of at least 0",
    ),
    "logarithms": ("msle", replaced(-0.5), "label -0.5 in row 4"),
    "hinge": (keras.losses.hinge, GOOD, "label 2 in row 2 .*, but the loss hinge takes -1 and 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_labels_that_a_loss_takes_for_something_else_are_named(name: str) -> None:
    loss, labels, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        check_labels(model_with(loss), {"x": X, "y": labels}, "data")
    # Rows with weight 0 may have any label.
    weights = np.zeros(6, "float32")
    columns = {"x": X, "y": labels, "sample_weight": weights}
    if loss != "categorical_crossentropy":
        check_labels(model_with(loss, np.size(labels) // 6), columns, "data")


def test_labels_of_one_output_of_several_are_named() -> None:
    inputs = keras.Input((8,))
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"a": "mse", "b": "binary_crossentropy"})
    columns = {"x": X, "y/a": GOOD, "y/b": BINARY}
    check_labels(model, columns, "data")
    with pytest.raises(InputError, match="label 2 of the output 'b' in row 2"):
        check_labels(model, {**columns, "y/b": GOOD}, "data")


@pytest.mark.parametrize("named", [True, False])
def test_a_class_that_one_output_of_several_has_not_is_named(named: bool) -> None:
    inputs = keras.Input((8,))
    outputs = [keras.layers.Dense(units, name=name)(inputs) for name, units in (("a", 3), ("b", 2))]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", ["sparse_categorical_crossentropy"] * 2)
    keys = ("y/a", "y/b") if named else ("y/#0", "y/#1")
    check_labels(model, dict(zip(keys, (GOOD, BINARY), strict=True)), "data")
    message = "label 2 of the output 'b' in row 2 .*, but the output's 2 numbers .* classes 0 to 1"
    with pytest.raises(InputError, match=message):
        check_labels(model, dict(zip(keys, (GOOD, GOOD), strict=True)), "data")


@pytest.mark.parametrize("listed", [True, False])
def test_losses_in_a_list_for_one_output_are_known(listed: bool) -> None:
    loss = "sparse_categorical_crossentropy"
    model = model_with([loss] if listed else loss)
    with pytest.raises(InputError, match="label 3 in row 4"):
        check_labels(model, {"x": X, "y": replaced(3)}, "data")


def test_several_weights_of_a_row_need_several_losses() -> None:
    weights = np.ones((6, 2), "float32")
    with pytest.raises(InputError, match=r"weights of shape \(2,\) per row, .* one number per row"):
        pybackend.barrier_train(None, build_dense(), (X, GOOD, weights), workers=2, verbose=0)
    own = model_with(lambda y_true, y_pred: keras.ops.square(y_true - y_pred), 2)
    check_labels(own, {"x": X, "y": weights, "sample_weight": weights}, "data")
    steps = keras.Sequential([keras.Input((2, 8)), keras.layers.Dense(3)])
    steps.compile("sgd", "sparse_categorical_crossentropy")
    labels = np.stack([GOOD, GOOD], axis=1)
    check_labels(steps, {"x": X, "y": labels, "sample_weight": weights}, "data")


@pytest.mark.parametrize(
    ("loss", "outputs", "labels", "message"),
    [
        ("mse", 1, replaced(-1), "label -1 in row 4 .*, but `class_weight` is for classes"),
        ("sparse_categorical_crossentropy", 3, GOOD, "the class 3, but .* classes 0 to 2$"),
        ("categorical_crossentropy", 3, np.eye(3)[GOOD], "class 3, but .* classes 0 to 2$"),
        ("binary_crossentropy", 1, GOOD % 2, "the class 3, but .* classes 0 to 1$"),
    ],
)
def test_class_weights_are_for_classes(loss: str, outputs: int, labels: Any, message: str) -> None:
    model = model_with(loss, outputs)
    with pytest.raises(InputError, match=message):
        pybackend.barrier_train(
            None, model, (X, labels), class_weight={0: 1.0, 3: 2.0}, workers=2, verbose=0
        )
    for known in (GOOD, replaced(0.9)):
        check_class_weight(model_with("mse", 1), [0, 3], {"y": known}, "data")


def test_text_of_more_values_than_there_are_classes_is_named(tmp_path: Any) -> None:
    frame = pd.DataFrame(X, columns=list("abcdefgh")).assign(label=list("xyzxyz"))
    frame.to_parquet(tmp_path / "rows.parquet")
    for model, classes in (
        (model_with("binary_crossentropy", 1), 2),
        (model_with("sparse_categorical_crossentropy", 2), 2),
    ):
        for data in (frame, tmp_path / "rows.parquet"):
            said = f"with 3 different values .'x', 'y', 'z'.* {classes} classes"
            with pytest.raises(InputError, match=said):
                pybackend.barrier_train(None, model, data, workers=2, verbose=0)


def test_workers_look_at_labels_that_this_process_does_not_see(tmp_path: Any) -> None:
    frame = pd.DataFrame(X, columns=list("abcdefgh")).assign(label=BINARY + 1)
    frame.to_parquet(tmp_path / "rows.parquet")

    def build() -> Any:
        return model_with("binary_crossentropy", 1)

    message = "`data` has the label 2, but the loss binary_crossentropy takes 0 and 1"
    for model in (build, build()):
        with pytest.raises(pybackend.WorkerFailedError, match=message):
            pybackend.barrier_train(None, model, tmp_path, workers=2, verbose=0)


def test_a_loss_that_is_derived_from_keras_s_may_read_labels_otherwise() -> None:
    class Shifted(keras.losses.SparseCategoricalCrossentropy):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return super().call(y_true - 1, y_pred)

    check_labels(model_with(Shifted()), {"x": X, "y": GOOD + 1}, "data")


def test_a_model_whose_shapes_are_unknown_is_left_to_the_workers() -> None:
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    check_labels(model, {"x": X, "y": replaced(9)}, "data")


@pytest.mark.parametrize(
    ("loss", "outputs", "count"),
    [
        ("categorical_crossentropy", 3, 2),
        ("binary_crossentropy", 1, 2),
        ("mse", 1, 2),
        (keras.losses.Huber(), 3, 2),
        (keras.losses.Hinge(), 3, 2),
    ],
)
def test_more_or_fewer_labels_than_outputs_are_refused(loss: Any, outputs: int, count: int) -> None:
    labels = {"y": np.eye(count)[GOOD % count]}
    with pytest.raises(InputError, match=f"{count} labels per row, .* {outputs} output"):
        check_labels(model_with(loss, outputs), labels, "data")
    check_labels(model_with(loss, count), labels, "data")


def test_labels_of_one_of_several_outputs_are_counted() -> None:
    rows = keras.Input((8,))
    outputs = {"price": keras.layers.Dense(1)(rows), "share": keras.layers.Dense(3)(rows)}
    model = keras.Model(rows, outputs)
    model.compile("sgd", {"price": "mse", "share": "mae"})
    good = np.zeros((6, 3))
    check_labels(model, {"y/price": good[:, :1], "y/share": good}, "data")
    with pytest.raises(InputError, match=r"2 labels per row, .* 3 numbers of the output 'share'"):
        check_labels(model, {"y/price": good[:, :1], "y/share": good[:, :2]}, "data")
