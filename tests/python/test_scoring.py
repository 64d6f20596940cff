"""Evaluation and prediction with several workers: the values and the order of one process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import build_dense, shared_spark

from pybackend import (
    ClusterError,
    InputError,
    barrier_evaluate,
    barrier_predict,
    barrier_train,
    plan,
)
from pybackend.types import TrainResult


def two_outputs() -> Any:
    left, right = keras.Input((8,), name="left"), keras.Input((8,), name="right")
    both = keras.layers.Concatenate()([left, right])
    model = keras.Model(
        {"left": left, "right": right},
        {"a": keras.layers.Dense(3, name="a")(both), "b": keras.layers.Dense(1, name="b")(both)},
    )
    return model


@pytest.mark.full
def test_evaluate_gives_the_figures_of_one_process(rows: Any) -> None:
    x, y = rows[0][:101], (rows[1][:101, None] > 0).astype("float32")
    weight = np.linspace(0, 2, 101).astype("float32")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile(
        "sgd",
        "binary_crossentropy",
        metrics=[keras.metrics.AUC(name="auc"), keras.metrics.F1Score(name="f1")],
        weighted_metrics=["accuracy"],
    )
    found = barrier_evaluate(None, model, (x, y, weight), workers=3, batch_size=16, verbose=0)
    expected = model.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True)
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-6)


def test_predictions_come_in_the_order_of_the_rows(rows: Any) -> None:
    x = rows[0][:101]
    model = build_dense()
    found = barrier_predict("local", model, x, workers=3, batch_size=16, verbose=0)
    np.testing.assert_allclose(found, model.predict(x, verbose=0), atol=1e-6)


def test_several_inputs_and_outputs_of_an_uncompiled_model(rows: Any) -> None:
    x = {"left": rows[0][:2], "right": rows[0][2:4]}  # of three workers, one has no row
    model = two_outputs()
    found = barrier_predict(None, model, x, workers=3, verbose=0)
    expected = model.predict(x, verbose=0)
    assert set(found) == {"a", "b"}
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6)


@pytest.mark.full
def test_fewer_rows_than_workers(rows: Any) -> None:
    model = build_dense()  # its metrics saw no row
    found = barrier_evaluate(None, model, (rows[0][:1], rows[1][:1]), workers=2, verbose=0)
    expected = model.evaluate(rows[0][:1], rows[1][:1], verbose=0, return_dict=True)
    assert found == pytest.approx(expected, abs=1e-6)


def test_no_rows_have_no_predictions(rows: Any) -> None:
    model = build_dense()
    width = model.output_shape[-1]
    assert barrier_predict(None, model, rows[0][:0], verbose=0).shape == (0, width)
    frame = pd.DataFrame(rows[0][:2].copy())
    frame.columns = [f"c{name}" for name in frame.columns]
    frame.iloc[:, 0] = np.nan
    predicted = barrier_predict(None, model, frame, type="raw", verbose=0)
    assert predicted.shape == (2, width)
    assert np.isnan(predicted).all()
    assert barrier_predict(None, model, frame[:0], type="raw", verbose=0).shape == (0, width)
    assert list(barrier_predict(None, model, frame[:0], verbose=0)[".pred_class"]) == []


def test_half_precision_outputs(rows: Any) -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, dtype="bfloat16")])
    found = barrier_predict(None, model, rows[0][:5], workers=2, verbose=0)
    assert found.dtype == "float32"
    expected = model.predict(rows[0][:5], verbose=0).astype("float32")
    np.testing.assert_array_equal(found, expected)


def test_on_spark(rows: Any, dense_model: Any) -> None:
    x, y = rows[0][:41], rows[1][:41]
    with shared_spark("local[2,2]") as session:
        predicted = barrier_predict(session, dense_model, x, workers=2, verbose=0)
        np.testing.assert_allclose(predicted, dense_model.predict(x, verbose=0), atol=1e-6)
        frame = session.createDataFrame(
            [(row.tolist(), int(c)) for row, c in zip(x, y, strict=True)], ["x", "y"]
        )
        found = barrier_evaluate(session, dense_model, frame, label="y", workers=2, verbose=0)
        made = plan(session, dense_model, frame, label="y", workers=2, epochs=2)
        assert (made.rows, made.workers[1].place) == (None, "a task of the barrier stage")
        assert made.data == "a Spark DataFrame, inputs x; labels y"
        assert any("Spark counts them at the start" in line for line in made.later)
        assert made.settings["versions"]["pyspark"] == session.version
        with pytest.raises(ClusterError, match=r"3, but this Spark session runs at most 2"):
            plan(session, dense_model, frame, label="y", workers=3)
        # A result's own methods are for rows in this process.
        result = TrainResult(b"", "h5", "", {}, [], 0.0, 0, 0, decode=lambda _: dense_model)
        with pytest.raises(InputError, match=r"Spark DataFrame.*use barrier_evaluate"):
            result.evaluate(frame, label="y")
        with pytest.raises(InputError, match=r"Spark DataFrame.*use predict_spark"):
            result.predict(frame)
    expected = dense_model.evaluate(x, y, verbose=0, return_dict=True)
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": np.ones((4, 5))}, r"shape \(5,\).*shape \(8,\)"),
        ({"x": [["a"]]}, "`x`: x is text, but the model's input takes float32"),
        ({"workers": 0}, "`workers` must be"),
        ({"batch_size": 1.5}, "`batch_size` must be a whole number"),
        ({"model": 3}, "`model` must be"),
        ({"spark": 7}, "`spark` must be"),
    ],
)
def test_bad_arguments_are_refused_on_the_driver(arguments: Any, message: str) -> None:
    good = {"spark": None, "model": build_dense(), "x": np.ones((4, 8))}
    with pytest.raises(InputError, match=message):
        barrier_predict(**{**good, **arguments})


def test_a_model_must_be_compiled_to_be_evaluated(rows: Any) -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    with pytest.raises(InputError, match="not compiled"):
        barrier_evaluate(None, model, rows)


@pytest.mark.full
def test_a_result_is_a_model_that_knows_its_columns(rows: Any, tmp_path: Any) -> None:
    names = np.array(["cat", "dog", "fox"])
    path = str(tmp_path / "rows.parquet")
    table = {"x": list(rows[0]), "animal": names[rows[1]], "other": np.arange(len(rows[1]))}
    pq.write_table(pa.table(table), path)
    result = barrier_train(
        None,
        build_dense,
        path,
        features=["x"],
        label="animal",
        workers=1,
        batch_size=100,
        verbose=0,
    )
    expected = result.model.evaluate(*rows, verbose=0, return_dict=True)
    common: Any = {"workers": 2, "verbose": 0}
    found = barrier_evaluate(None, result, path, label="animal", **common)
    assert found == pytest.approx(expected, abs=1e-6)
    found = barrier_evaluate(None, result, rows, **common)
    assert found == pytest.approx(expected, abs=1e-6)
    x = rows[0][:11]
    predicted = barrier_predict(None, result, x, **common)
    np.testing.assert_allclose(predicted, result.model.predict(x, verbose=0), atol=1e-6)
    further = barrier_train(None, result, path, label="animal", workers=1, verbose=0)
    assert (further.levels, further.features) == (result.levels, ["x"])
    assert further.history["loss"][0] < result.history["loss"][0]


def test_a_function_that_cannot_run_here_is_told_before_the_workers_compute(rows: Any) -> None:
    def build() -> Any:
        return open("/only/on/workers")

    frame = pd.DataFrame(rows[0][:3]).add_prefix("c")
    with pytest.raises(InputError, match=r"`model` function fails in this .*: pass type='raw'"):
        barrier_predict(None, build, frame, workers=1, verbose=0)


def test_a_data_set_is_not_predicted_by_several_workers(rows: Any) -> None:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(rows[0]).batch(50)
    with pytest.raises(InputError, match=r"`x` is a data set, .*: pass arrays or a data"):
        barrier_predict(None, build_dense(), data, workers=1, verbose=0)
