"""A result's model used in this process, with rows that are read as in the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from conftest import build_dense

from pybackend import DataOptions, InputError, barrier_predict, barrier_train
from pybackend.types import TrainResult

LEVELS = ["cat", "dog", "owl"]


def of(model: Any, **known: Any) -> TrainResult:
    """Return a result with this model."""
    made = {"history": {}, "workers": [], "seconds": 0.0, "seed": 0, "epochs": 0}
    return TrainResult(b"", "h5", "", decode=lambda _: model, **made, **known)


def frame_of(rows: Any) -> Any:
    """Return eight columns, one of them text, in another order than the model's, and a label."""
    frame = pd.DataFrame({f"c{n}": rows[0][:, n] for n in reversed(range(8))})
    frame["c0"] = np.array(["lo", "hi"])[(rows[0][:, 0] > 0).astype(int)]
    frame["animal"] = np.array(LEVELS)[rows[1]]
    frame.index = frame.index + 1000
    return frame


def arrays_of(rows: Any) -> Any:
    x = rows[0].copy()
    x[:, 0] = x[:, 0] > 0
    return x


KNOWN = {
    "features": [f"c{n}" for n in range(8)],
    "levels": LEVELS,
    "categories": {"c0": ["lo", "hi"]},
}


def test_incomplete_rows_have_no_prediction(rows: Any, tmp_path: Path) -> None:
    model = build_dense()
    result, frame = of(model, **KNOWN), frame_of(rows)[:6]
    frame.loc[frame.index[1], "c0"] = None
    frame.loc[frame.index[3], "c0"] = "unknown"
    frame.loc[frame.index[4], "c5"] = np.nan  # computed, as for arrays
    wanted = model.predict(arrays_of(rows)[:6], verbose=0)
    for outputs in (
        result.predict(frame, type="raw"),
        barrier_predict(None, result, frame, workers=2, type="raw", verbose=0),
    ):
        np.testing.assert_array_equal(np.isnan(outputs).all(axis=1), np.isin(range(6), [1, 3, 4]))
        np.testing.assert_allclose(outputs[[0, 2, 5]], wanted[[0, 2, 5]], atol=1e-6)
    classes = result.predict(frame)
    pd.testing.assert_frame_equal(
        barrier_predict(None, result, frame, workers=2, verbose=0), classes, atol=1e-6
    )
    assert list(classes.index) == list(frame.index)
    assert [name is None for name in classes[".pred_class"]] == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]
    assert classes.drop(columns=".pred_class").isna().all(axis=1).sum() == 3
    assert list(result.predict(frame[:0])[".pred_class"]) == []
    with pytest.warns(UserWarning, match=r"'c0' has none of its categories"):
        assert list(result.predict(frame.iloc[[1, 3]])[".pred_class"]) == [None, None]
    for few in (frame[:0], frame.iloc[[1]]):
        assert result.predict(few, type="raw").shape == (len(few), 3)
    assert result.predict(arrays_of(rows)[:0]).shape == (0, 3)
    path = tmp_path / "rows.parquet"
    frame.to_parquet(path)
    np.testing.assert_array_equal(result.predict(path), result.predict(frame, type="raw"))
    frame[:0].to_parquet(tmp_path / "none.parquet")
    assert result.predict(tmp_path / "none.parquet").shape == (0, 3)
    with pytest.raises(InputError, match=r"column 'c0' has 1 null.*row 1 .*rows\.parquet"):
        result.predict(path, on_missing="error")
    with pytest.raises(InputError, match=r"column 'c0' has 1 null.*row 1 "):
        result.predict(frame, on_missing="error")
    with pytest.raises(InputError, match="column 'c0' has 1 null"):
        barrier_predict(None, result, frame, workers=1, on_missing="error")
    with pytest.raises(InputError, match="`on_missing` must be 'null' or 'error', not 'drop'"):
        result.predict(frame, on_missing="drop")


@pytest.mark.full
def test_models_one_after_another_give_no_warning(rows: Any, caplog: Any) -> None:
    """Use many models, which TensorFlow would trace again and again as one function."""
    logger = tf.get_logger()
    logger.addHandler(caplog.handler)
    try:
        for _ in range(8):
            of(build_dense()).predict(rows[0][:4])
    finally:
        logger.removeHandler(caplog.handler)
    assert "retracing" not in caplog.text


@pytest.mark.full
def test_a_training_on_a_frame_is_evaluated_and_predicts_as_its_model(rows: Any) -> None:
    frame, x = frame_of(rows)[:100], arrays_of(rows)[:100]
    result = barrier_train(
        None,
        build_dense,
        frame,
        label="animal",
        features=KNOWN["features"],
        data_options=DataOptions(categories={"c0": ["lo", "hi"]}),
        workers=1,
        verbose=0,
    )
    expected = result.model.evaluate(x, rows[1][:100], verbose=0, return_dict=True)
    assert result.evaluate(frame, label="animal") == pytest.approx(expected, abs=1e-6)
    outputs = result.model.predict(x, verbose=0)
    predicted = result.predict(frame)
    assert list(predicted) == [".pred_class", ".pred_cat", ".pred_dog", ".pred_owl"]
    assert list(predicted.index) == list(frame.index)
    assert list(predicted[".pred_class"]) == [LEVELS[k] for k in outputs.argmax(axis=1)]
    probabilities = keras.ops.softmax(outputs)  # the model returns logits, as its loss shows
    found = predicted.drop(columns=".pred_class").to_numpy()
    np.testing.assert_allclose(found, probabilities, atol=1e-6)
    settings = result.settings
    assert settings["launcher"] == "processes of this machine"
    assert (settings["workers"], settings["batch_size"], settings["epochs"]) == (1, 32, 1)
    assert settings["exchange"]["kind"] == "Exchange"
    assert settings["seed"] == result.seed
    assert settings["versions"]["keras"] == keras.__version__
    assert "pyspark" not in settings["versions"]


def test_a_result_takes_the_arguments_of_keras(rows: Any, capsys: Any) -> None:
    model, x, y = build_dense(), rows[0][:40], rows[1][:40]
    result, weight = of(model), np.linspace(0, 2, 40)
    expected = model.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True)
    assert result.evaluate(x, y, weight, verbose=0) == pytest.approx(expected, rel=1e-6)
    assert result.evaluate(x, y) == pytest.approx(result.evaluate((x, y)))
    assert np.array_equal(result.predict(x, verbose=0), model.predict(x, verbose=0))
    assert capsys.readouterr().out == ""
    result.predict(x, verbose="auto")
    assert "2/2" in capsys.readouterr().out
    with pytest.raises(InputError, match="sample weights but no labels"):
        result.evaluate(x, sample_weight=weight)
    with pytest.raises(InputError, match="`verbose` must be"):
        result.evaluate(x, y, verbose="loud")


@pytest.mark.parametrize("library", [pd.DataFrame, pl.DataFrame])
def test_labels_as_a_frame_let_predictions_go_by_name(rows: Any, library: Any) -> None:
    columns = {f"c{n}": rows[0][:20, n] for n in range(8)}
    data = library(columns), library({"animal": rows[1][:20]})
    result = barrier_train("local", build_dense(), data, workers=1, epochs=1, verbose=0)
    assert result.feature_names == list(columns)
    turned = library(dict(reversed(columns.items())))
    expected = result.model.predict(rows[0][:20], verbose=0)
    np.testing.assert_allclose(result.predict(turned, type="raw"), expected, atol=1e-6)
    found = barrier_predict("local", result, turned, workers=1, type="raw", verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert result.evaluate((turned, data[1])) == pytest.approx(result.evaluate(data))
    other = library({**columns, "other": columns["c0"]})[[*columns, "other"][1:]]
    with pytest.raises(InputError, match="`x` has no column 'c0'"):
        result.predict(other)
    with pytest.raises(InputError, match="`x` has no column 'c0'"):
        barrier_predict("local", result, other, workers=1)


@pytest.mark.parametrize("is_dict", [True, False])
def test_frames_of_several_inputs_are_predicted_by_name(rows: Any, is_dict: bool) -> None:
    left, right = keras.Input((5,), name="left"), keras.Input((3,), name="right")
    output = keras.layers.Dense(3)(keras.layers.Concatenate()([left, right]))
    model = keras.Model({"left": left, "right": right} if is_dict else [left, right], output)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    frame = pd.DataFrame(rows[0][:20], columns=list("abcdefgh"))

    def make(one: str, two: str) -> Any:
        parts = frame[list(one)], frame[list(two)]
        return dict(zip(("left", "right"), parts, strict=True)) if is_dict else list(parts)

    data = make("abcde", "fgh"), rows[1][:20]
    result = barrier_train("local", model, data, workers=1, epochs=1, verbose=0)
    x = (rows[0][:20, :5], rows[0][:20, 5:])
    x = dict(zip(("left", "right"), x, strict=True)) if is_dict else list(x)
    expected = result.model.predict(x, verbose=0)
    turned = make("edcba", "hgf")
    np.testing.assert_allclose(result.predict(turned), expected, atol=1e-6)
    found = barrier_predict("local", result, turned, workers=1, verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert result.evaluate((turned, data[1])) == pytest.approx(result.evaluate((x, data[1])))
    with pytest.raises(InputError, match=r"`x` has no column '(left|0)\.e'"):
        result.predict(make("abcd", "fgh"))


def test_all_kinds_of_rows_give_the_figures_of_keras(rows: Any, tmp_path: Any) -> None:
    model, (x, y) = build_dense(), (rows[0][:70], rows[1][:70])
    result, weight = of(model), np.linspace(0, 2, 70)
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    weighted = model.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.table({"x": list(x), "label": y}), path)
    for data in ((x, y), batches, path):
        assert result.evaluate(data) == pytest.approx(expected, abs=1e-6)
    assert result.evaluate((x, y, weight)) == pytest.approx(weighted, abs=1e-6)
    outputs = model.predict(x, verbose=0)
    for data in (x, batches.map(lambda x, y: x)):
        np.testing.assert_array_equal(result.predict(data, batch_size=32), outputs)
    found = of(model, features=["x"]).predict(path)
    np.testing.assert_allclose(found, outputs, atol=1e-6)
    classes = result.predict(x, type="class", levels=LEVELS)
    assert list(classes[".pred_class"]) == [LEVELS[k] for k in outputs.argmax(axis=1)]
    raw = of(model, **KNOWN).predict(frame_of(rows)[:5], type="raw")
    np.testing.assert_allclose(raw, model.predict(arrays_of(rows)[:5], verbose=0), atol=1e-6)


def test_text_and_several_inputs_and_outputs(rows: Any) -> None:
    words = keras.layers.TextVectorization(output_mode="multi_hot", vocabulary=["red", "blue"])
    text, number = keras.Input((1,), dtype="string", name="text"), keras.Input((8,), name="number")
    both = keras.layers.Concatenate()([keras.layers.Flatten()(words(text)), number])
    outputs = {name: keras.layers.Dense(2, name=name)(both) for name in ("a", "b")}
    model = keras.Model({"text": text, "number": number}, outputs)
    x = {"text": np.array(["red", "blue red", "green"]), "number": rows[0][:3]}
    found = of(model).predict(x)
    tensors = {"text": x["text"][:, None], "number": x["number"]}
    expected = model({name: tf.constant(array) for name, array in tensors.items()})
    assert set(found) == {"a", "b"}
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6)


def test_a_metric_may_have_a_figure_for_each_class(rows: Any) -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score(name="f1")])
    figures = of(model).evaluate((rows[0][:20], np.eye(3)[rows[1][:20]]))
    assert [type(one) for one in (figures["loss"], figures["f1"])] == [float, list]
    assert len(figures["f1"]) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.evaluate(np.ones((4, 8))), "`data` has no labels"),
        (lambda r: r.evaluate((np.ones((4, 5)), np.ones(4))), r"`data`: .*shape \(5,\)"),
        (lambda r: r.evaluate((np.ones((4, 8)), np.ones(4)), batch_size=0), "`batch_size` must be"),
        (lambda r: r.evaluate(lambda context: 1), "`data` is a function, but no workers"),
        (lambda r: r.predict(np.ones((4, 5))), r"`x`: .*shape \(5,\).*shape \(8,\)"),
        (lambda r: r.predict({"a": np.ones((4, 8))}), "`x`: the model has one input"),
        (lambda r: r.predict(np.ones((4, 8)), type="classes"), "`type` must be None, 'class'"),
        (lambda r: r.predict(np.ones((4, 8)), type="class", levels=["a"]), "the model has 3 class"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(of(build_dense()))


def test_what_needs_no_model_is_refused_without_it() -> None:
    def fail(_: bytes) -> Any:
        raise AssertionError("the model was read")

    result = TrainResult(b"", "h5", "", {}, [], 0.0, 0, 0, decode=fail)
    with pytest.raises(InputError, match="`data` has no rows"):
        result.evaluate(np.ones((0, 8)))
    with pytest.raises(InputError, match="`x` has no inputs"):
        result.predict({})


def test_an_uncompiled_model_has_no_figures(rows: Any) -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    with pytest.raises(InputError, match="the model is not compiled"):
        of(model).evaluate((rows[0][:4], rows[1][:4]))
