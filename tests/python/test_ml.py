"""Keras models as stages of Spark ML pipelines, compared with Keras itself."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import build_dense, largest_difference, shared_spark
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import IndexToString, StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

from pybackend import (
    Exchange,
    InputError,
    LocalSteps,
    ModelOptions,
    ParameterServer,
    Recovery,
    ScaleLearningRate,
    SerializationError,
)
from pybackend.ml import KerasEstimator, KerasModel

LEVELS = ["no", "may be", "yes"]
FEATURES = [f"f{i}" for i in range(8)]


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with shared_spark("local[2,2]") as session:
        yield session


@pytest.fixture(scope="module")
def table(spark: Any, rows: Any) -> Any:
    """Return 120 rows: an id, the 8 features, a class as text, a weight, and validation flags."""
    columns = ", ".join(f"f{i} float" for i in range(8))
    values = [
        (i, *x.tolist(), LEVELS[y], 1.0 + i % 2, i % 6 == 0)
        for i, (x, y) in enumerate(zip(*rows, strict=True))
    ][:120]
    schema = f"id int, {columns}, name string, importance double, held_out boolean"
    return spark.createDataFrame(values, schema).cache()


def assembler() -> Any:
    return VectorAssembler(inputCols=FEATURES, outputCol="features")


@pytest.fixture(scope="module")
def pipeline(spark: Any) -> Any:
    """Build a pipeline: text to codes, columns to a vector, two workers, codes to text."""
    keras.utils.set_random_seed(11)
    training = KerasEstimator(
        build_dense(),
        labelCol="label",
        weightCol="importance",
        validationIndicatorCol="held_out",
        workers=2,
        epochs=2,
        batchSize=20,
        seed=5,
        trainOptions={"shuffle": False},
    )
    indexer = StringIndexer(inputCol="name", outputCol="label")
    return Pipeline(
        stages=[
            indexer,
            assembler(),
            training,
            IndexToString(inputCol="prediction", outputCol="said"),
        ]
    )


@pytest.fixture(scope="module")
def fitted(pipeline: Any, table: Any) -> Any:
    return pipeline.fit(table)


def test_a_pipeline_is_fitted_and_predicts(pipeline: Any, fitted: Any, table: Any) -> None:
    estimator, model = pipeline.getStages()[2], fitted.stages[2]
    result = model.result
    assert model.uid == estimator.uid
    assert (result.seed, result.epochs, len(result.workers)) == (5, 2, 2)
    assert sum(worker.rows for worker in result.workers) == 100
    assert set(model.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert largest_difference(estimator.model, model.model) > 0

    predicted = fitted.transform(table)
    got = predicted.orderBy("id").collect()
    x = np.array([[row[name] for name in FEATURES] for row in got], "float32")
    logits = model.model.predict(x, verbose=0)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    np.testing.assert_allclose([row.rawPrediction.toArray() for row in got], logits, atol=1e-6)
    np.testing.assert_allclose(
        [row.probability.toArray() for row in got], powers / powers.sum(1, keepdims=True), atol=1e-6
    )
    codes = logits.argmax(axis=1)
    assert [row.prediction for row in got] == codes.tolist()
    names = fitted.stages[0].labels
    assert [row.said for row in got] == [names[code] for code in codes]
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(predicted)
    assert accuracy == pytest.approx(np.mean([row.said == row.name for row in got]))


READ = """
import sys
from pyspark.ml import PipelineModel
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
fitted = PipelineModel.load(sys.argv[1])
row = spark.createDataFrame([("yes", 1.0, *map(float, range(8)))], sys.argv[2])
print(fitted.stages[2].history, *fitted.transform(row).first().rawPrediction)
spark.stop()
"""


@pytest.mark.full
def test_a_fresh_session_reads_what_was_saved(pipeline: Any, fitted: Any, tmp_path: Path) -> None:
    fitted.save(str(tmp_path / "fitted"))
    columns = ", ".join(f"f{i} float" for i in range(8))
    shown = subprocess.run(
        [
            sys.executable,
            "-c",
            READ,
            tmp_path / "fitted",
            f"name string, importance double, {columns}",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    said, _, numbers = shown.rpartition("} ")
    assert f"{said}}}" == str(dict(fitted.stages[2].history))
    expected = fitted.stages[2].model.predict(np.arange(8, dtype="float32")[None], verbose=0)
    np.testing.assert_allclose([*map(float, numbers.split())], expected[0], rtol=1e-5)

    copy = PipelineModel.load(str(tmp_path / "fitted")).stages[2]
    copy.write().overwrite().save(str(tmp_path / "again"))
    again = KerasModel.load(str(tmp_path / "again"))
    assert largest_difference(again.model, fitted.stages[2].model) == 0
    assert (list(again.levels), again.uid, again.result) == (copy.levels, copy.uid, None)
    with pytest.raises(InputError, match=r"contains a pybackend\.ml\.model\.KerasModel, not a"):
        KerasEstimator.load(str(tmp_path / "again"))


@pytest.mark.full
@pytest.mark.parametrize(
    "exchange",
    [
        LocalSteps(8, momentum=0.5),
        ParameterServer(servers=2),
        Exchange(scale_lr=ScaleLearningRate("sqrt", decay={2: 0.1})),
    ],
)
def test_an_estimator_is_saved_with_its_options(exchange: Any, spark: Any, tmp_path: Path) -> None:
    keras.utils.set_random_seed(1)
    options = {
        "class_weight": {0: 2.0},
        "exchange": exchange,
        "model_options": ModelOptions("/shared/model.h5"),
        "recovery": Recovery("/shared/run", every="10min"),
    }
    features = {"left": ["f0", "f1"], "right": "f2"}
    first = KerasEstimator(build_dense(), features=features, trainOptions=options, seed=3)
    first.save(str(tmp_path / "stage"))
    again = KerasEstimator.load(str(tmp_path / "stage"))
    assert largest_difference(first.model, again.model) == 0
    assert again.model.optimizer.get_config() == first.model.optimizer.get_config()
    assert (again.getSeed(), again.getFeatures(), again.uid) == (3, features, first.uid)
    assert again.getTrainOptions() == {**options, "class_weight": {"0": 2.0}}
    assert not again.isDefined("workers")

    called = KerasEstimator(build_dense(), trainOptions={"callbacks": [keras.callbacks.Callback()]})
    with pytest.raises(InputError, match="`callbacks` of trainOptions cannot be saved"):
        called.save(str(tmp_path / "called"))
    with pytest.raises(InputError, match="functions are not saved"):
        KerasEstimator(build_dense).save(str(tmp_path / "function"))


def test_a_damaged_model_is_refused(spark: Any, dense_model: Any, tmp_path: Path) -> None:
    KerasModel(dense_model).save(str(tmp_path / "stage"))
    spark.createDataFrame([(0, bytearray(b"other"))], "place int, content binary").write.mode(
        "overwrite"
    ).parquet(str(tmp_path / "stage" / "model"))
    with pytest.raises(SerializationError, match="SHA-256"):
        KerasModel.load(str(tmp_path / "stage"))


# pyspark leaves its thread pool to the garbage collector.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool:ResourceWarning")
@pytest.mark.parametrize("workers", [1, 2])
def test_cross_validation_trains_two_models_at_once_with_equal_metrics(
    workers: int, table: Any
) -> None:
    def build(units: int, rate: float) -> Any:  # inside: workers cannot import this module
        import keras

        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(units, "relu")])
        model.add(keras.layers.Dense(1))
        model.compile(keras.optimizers.SGD(rate), "mse")
        return model

    # With as many workers as there are slots, one training run waits for the other.
    training = KerasEstimator(build, labelCol="importance", workers=workers, seed=1)
    grid = ParamGridBuilder().addGrid(
        training.modelArgs, [{"units": 2, "rate": 0.01}, {"units": 3, "rate": 1e-9}]
    )
    tuning = CrossValidator(
        estimator=Pipeline(stages=[assembler(), training]),
        estimatorParamMaps=grid.build(),
        evaluator=RegressionEvaluator(labelCol="importance"),
        numFolds=2,
        parallelism=2,
        seed=1,
    )
    tuned = tuning.fit(table)
    in_turn = tuning.copy().setParallelism(1).fit(table)
    assert tuned.avgMetrics == in_turn.avgMetrics
    assert tuned.stdMetrics == in_turn.stdMetrics
    best = tuned.bestModel.stages[1]
    chosen = 0 if tuned.avgMetrics[0] < tuned.avgMetrics[1] else 1
    assert best.model.layers[0].units == (2, 3)[chosen]
    predicted = tuned.transform(table).orderBy("id")
    x = np.array([[row[name] for name in FEATURES] for row in predicted.collect()], "float32")
    expected = best.model.predict(x, verbose=0)[:, 0]
    got = [row.prediction for row in predicted.collect()]
    np.testing.assert_allclose(got, expected, atol=1e-6)
    del tuning, tuned, in_turn
    gc.collect()


def test_what_other_outputs_become(table: Any) -> None:
    keras.utils.set_random_seed(4)
    data = assembler().transform(table.limit(10))
    x = np.array([row.features.toArray() for row in data.collect()])

    def transformed(model: Any, **params: Any) -> tuple[Any, Any]:
        found = KerasModel(model, **params).transform(data)
        return found, found.collect()

    inputs = keras.Input((8,))
    number = keras.layers.Dense(1, name="number")(inputs)
    one = keras.Model(inputs, number)
    expected = one.predict(x, verbose=0)[:, 0]
    for loss, odds in (
        (keras.losses.BinaryCrossentropy(from_logits=True), 1 / (1 + np.exp(-expected))),
        ("binary_crossentropy", expected),
    ):
        one.compile(loss=loss)
        frame, got = transformed(one, rawPredictionCol="")
        assert "rawPrediction" not in frame.columns
        shown = np.array([row.probability.toArray() for row in got])
        np.testing.assert_allclose(shown, np.stack([1 - odds, odds], axis=1), atol=1e-6)
        assert [row.prediction for row in got] == (odds > 0.5).tolist()

    pair = keras.layers.Dense(2, name="pair")(inputs)
    grid = keras.layers.Reshape((2, 1), name="grid")(pair)
    several = keras.Model(inputs, {"number": number, "pair": pair, "grid": grid})
    frame, got = transformed(several, features=FEATURES, predictionCol="out")
    kinds = dict(frame.dtypes[-3:])
    assert kinds == {
        "out_grid": "array<array<float>>",
        "out_number": "double",
        "out_pair": "vector",
    }
    expected = several.predict(x, verbose=0)
    np.testing.assert_allclose([row.out_number for row in got], expected["number"][:, 0], atol=1e-6)
    np.testing.assert_allclose([row.out_pair.toArray() for row in got], expected["pair"], atol=1e-6)
    np.testing.assert_allclose([row.out_grid for row in got], expected["grid"], atol=1e-6)
    with pytest.raises(InputError, match="two columns named 'ID'"):
        KerasModel(one, predictionCol="ID").transform(data)


def test_params_are_checked_when_they_are_set(dense_model: Any) -> None:
    estimator = KerasEstimator(dense_model)
    with pytest.raises(TypeError, match="'epoch' is not one of the options: steps_per_epoch"):
        estimator.setTrainOptions({"epoch": 3})
    with pytest.raises(TypeError, match="a dict with strings as keys"):
        estimator.setLabels(["a"])
    with pytest.raises(InputError, match="`model` must be a compiled Keras model, a function"):
        KerasEstimator("model.keras")
    with pytest.raises(InputError, match="`model` must be a Keras 3 model or a TrainResult"):
        KerasModel(build_dense)
    with pytest.raises(InputError, match="no Param `epoch`: did you mean `epochs`"):
        KerasEstimator(dense_model, epoch=2)
    with pytest.raises(InputError, match="`dataset` must be a Spark DataFrame, not"):
        estimator.fit({})
    copy = estimator.copy({estimator.epochs: 7})
    assert (copy.getEpochs(), estimator.getEpochs(), copy.model) == (7, 1, dense_model)
