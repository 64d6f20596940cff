"""Estimators that train with a function, and models that predict with its exported model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import shared_spark
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import Vectors
from pyspark.ml.param import TypeConverters

from pybackend import InputError
from pybackend.ml.params import param
from pybackend.tfos import compat
from pybackend.tfos.pipeline import (
    HasBatchSize,
    HasSteps,
    Namespace,
    TFEstimator,
    TFModel,
    TFParams,
    yield_batch,
)
from pybackend.tfos.TFCluster import InputMode


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with shared_spark("local[2,2]") as session:
        yield session


def test_a_function_trains_and_its_export_predicts(spark: Any, tmp_path: Path) -> None:
    def fit_line(args: Any, ctx: Any) -> None:
        import keras
        import numpy as np

        from pybackend.tfos import TFNode, compat

        feed = TFNode.DataFeed(ctx.mgr, input_mapping=args.input_mapping)
        features, labels = [], []
        while not feed.should_stop():
            batch = feed.next_batch(args.batch_size)
            assert {type(column) for column in batch.values()} == {list}
            features += batch["x"]
            labels += batch["y"]
        assert (len(features), args.scale, ctx.job_name) == (122, 2.0, "chief")
        kernel = np.linalg.lstsq(np.array(features), np.array(labels) * args.scale)[0]
        inputs = keras.Input((2,))
        first = keras.layers.Dense(1, use_bias=False, name="first")
        model = keras.Model(inputs, [first(inputs), keras.layers.Flatten(name="same")(inputs)])
        first.set_weights([kernel])
        compat.export_saved_model(model, args.export_dir, ctx.job_name == "chief")

    x = np.random.default_rng(0).normal(size=(60, 2))
    rows = [(*row.tolist(), [float(row @ [3.0, 1.5])]) for row in x] + [(0.0, 0.0, [0.0])]
    estimator = (
        TFEstimator(fit_line, {"scale": 2.0})
        .setInputMapping({"features": "x", "labels": "y"})
        .setExportDir(str(tmp_path / "export"))
        .setBatchSize(7)
        .setEpochs(2)
    )
    table = spark.createDataFrame(rows, "a double, b double, labels array<double>")
    # The row of zeros becomes a sparse vector.
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    vectors = assembler.transform(table)
    with pytest.raises(InputError, match="the DataFrame has no rows"):
        estimator.fit(vectors.limit(0))
    assert not (tmp_path / "export").exists()
    for mapping, message in (({"f": "x"}, "its columns are 'a', 'b', 'labels'"), ({}, "is empty")):
        with pytest.raises(InputError, match=message):
            TFEstimator(fit_line, {}).setInputMapping(mapping).fit(vectors)
    with pytest.raises(InputError, match="`train_fn` must be a function of"):
        TFEstimator("fit.py", {})
    model = estimator.fit(vectors)
    assert (model.getBatchSize(), model.args.scale) == (7, 2.0)

    model.setInputMapping({"v": "first_input"}).setOutputMapping({"first": "line", "same": "x`s"})
    vectors = spark.createDataFrame([(Vectors.dense(row), 0) for row in x], ["v", "other"])
    predicted = model.transform(vectors)
    assert predicted.dtypes == [("line", "array<double>"), ("x`s", "array<double>")]
    got = predicted.collect()
    np.testing.assert_allclose([row[0] for row in got], (x @ [6.0, 3.0])[:, None], rtol=1e-4)
    np.testing.assert_allclose([row[1] for row in got], x, rtol=1e-6)

    # Another model in the same folder, which computes in float64.
    inputs = keras.Input((2,), dtype="float64")
    first = keras.layers.Dense(1, use_bias=False, name="first", dtype="float64")
    same = keras.layers.Flatten(name="same", dtype="float64")
    other = keras.Model(inputs, [first(inputs), same(inputs)])
    first.set_weights([np.array([[1.0], [2.0]])])
    compat.export_saved_model(other, str(tmp_path / "export"), is_chief=True)
    got = model.transform(vectors).collect()
    np.testing.assert_allclose([row[0] for row in got], (x @ [1.0, 2.0])[:, None], rtol=1e-12)
    np.testing.assert_array_equal([row[1] for row in got], x)

    for mapping, message in (
        (
            {"v": "x"},
            r"`input_mapping` has the input 'x', but the model's inputs are first_input",
        ),
        ({}, "`input_mapping` is empty: the model's inputs are first_input"),
        ({"w": "first_input"}, "`dataset` has no column 'w'"),
    ):
        with pytest.raises(InputError, match=message):
            model.setInputMapping(mapping).transform(vectors)
    nowhere = TFModel({}).setInputMapping({"v": "x"}).setExportDir(str(tmp_path / "none"))
    with pytest.raises(InputError, match="cannot load a SavedModel from"):
        nowhere.transform(vectors)
    with pytest.raises(InputError, match="`export_dir` is not set"):
        TFModel({}).transform(vectors)


def test_what_other_exports_are_called(tmp_path: Path) -> None:
    left, right = keras.Input((2,), name="left"), keras.Input((3, 1), name="right")
    joined = keras.layers.Concatenate()([left, keras.layers.Flatten()(right)])
    model = keras.Model({"r": right, "l": left}, keras.layers.Dense(1, name="out")(joined))
    compat.export_saved_model(model, str(tmp_path / "chief"), is_chief=True)
    compat.export_saved_model(model, str(tmp_path / "other"))
    assert [path.name for path in tmp_path.iterdir()] == ["chief"]
    loaded = tf.saved_model.load(str(tmp_path / "chief"))
    rows = {"left": tf.random.normal((5, 2)), "right": tf.random.normal((5, 3, 1))}
    found = loaded.signatures["serving_default"](**rows)
    expected = model({"l": rows["left"], "r": rows["right"]})
    np.testing.assert_allclose(found["out"], expected, atol=1e-6)
    line = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="dense")])
    compat.export_saved_model(line, str(tmp_path / "line"), is_chief=True)
    loaded = tf.saved_model.load(str(tmp_path / "line"))
    found = loaded.signatures["serving_default"](dense_input=rows["left"])
    np.testing.assert_allclose(found["dense"], line(rows["left"]), atol=1e-6)
    options = tf.data.Options()
    compat.disable_auto_shard(options)
    policy = options.experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.OFF
    assert not compat.is_gpu_available()


def test_arguments_and_params_are_merged() -> None:
    class Stage(TFParams, HasBatchSize, HasSteps):
        def __init__(self, args: Any) -> None:
            super().__init__()
            self.args = args

    stage = Stage(Namespace({"a": 1, "steps": 3})).setBatchSize(10).setSteps(100)
    assert stage.merge_args_params() == Namespace({"a": 1, "batch_size": 10, "steps": 100})
    assert stage.args == Namespace({"a": 1, "steps": 3})
    given = Namespace(argparse.Namespace(a=1, b=[2]))
    assert "a" in given
    assert "c" not in given
    assert repr(Namespace(given)) == "Namespace(a=1, b=[2])"
    words = Namespace(["--a", "1"])
    assert "--a" in words
    assert (words.argv, list(words), words == ["--a", "1"]) == (["--a", "1"], ["--a", "1"], True)
    with pytest.raises(InputError, match="a dict, a namespace or a list"):
        Namespace(3)
    with pytest.raises(InputError, match=r"must be InputMode\.SPARK"):
        TFEstimator(print, {}).setInputMode(InputMode.TENSORFLOW)
    with pytest.raises(InputError, match="`export_fn` belongs to TensorFlow 1"):
        TFEstimator(print, {}, export_fn=print)
    with pytest.raises(TypeError, match="expected a dict"):
        TFEstimator(print, {}).setInputMapping(["x"])


class OwnEstimator(TFEstimator):
    decay, setDecay, getDecay = param("decay", "a Param of a subclass", TypeConverters.toInt)


def test_a_subclass_may_have_params_of_its_own() -> None:
    stage = OwnEstimator(print, {})
    assert not stage.hasDefault(stage.decay)
    assert stage.setDecay(3).getDecay() == 3
    assert stage.getBatchSize() == 100


def test_rows_come_in_batches() -> None:
    rows = [(n, -n) for n in range(5)]
    assert list(yield_batch(rows, 2, 2)) == [
        [[0, 1], [0, -1]],
        [[2, 3], [-2, -3]],
        [[4], [-4]],
    ]
    assert list(yield_batch([*rows[:1], None, *rows], 2)) == [[[0]]]
