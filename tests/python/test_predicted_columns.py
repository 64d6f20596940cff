"""Predictions for the rows of a Spark DataFrame, compared with those of Keras in this process."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import full, shared_spark
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions
from pyspark.sql.types import (
    ArrayType,
    DateType,
    DoubleType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
)
from pythons import python_with

from pybackend import InputError, barrier_train, predict_spark
from pybackend.core.data.columns import ColumnSpec
from pybackend.core.data.spark_rows import DataFrameRows
from pybackend.core.launchers.spark import predicted_columns as predict
from pybackend.core.launchers.spark.predicted_columns import PredictTask, remove_dates
from pybackend.core.model import scorers
from pybackend.core.model.serialization import model_from_bytes, model_to_bytes
from pybackend.types import TrainResult

LEVELS = ["no", "may be", "yes"]


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with shared_spark("local[2,2]") as session:
        yield session


@pytest.fixture
def table(spark: Any, rows: Any) -> Any:
    """Return 60 rows: an id, the 8 features as separate columns, and a label."""
    columns = ", ".join(f"f{i} float" for i in range(8))
    values = [(i, *x.tolist(), int(y)) for i, (x, y) in enumerate(zip(*rows, strict=True))][:60]
    return spark.createDataFrame(values, f"id int, {columns}, label int")


FEATURES = [f"f{i}" for i in range(8)]


def numbers(frame: Any, *names: str) -> Any:
    """Return columns of a DataFrame as one array, in the order of its column ``id``."""
    found = sorted(frame.collect(), key=lambda row: row["id"])
    return np.array([[row[name] for name in names] for row in found])


def softmax(logits: Any) -> Any:
    """Convert logits to the probabilities of `dense_model`'s loss."""
    return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)


def trained(model: Any, levels: list[Any] | None) -> TrainResult:
    """Return the result of a training that did not change the model."""
    return TrainResult(
        model_to_bytes(model), "h5", "", {}, [], 0.0, 0, 0, levels=levels, decode=model_from_bytes
    )


def test_a_result_knows_how_its_columns_are_read(spark: Any) -> None:
    keras.utils.set_random_seed(1)
    rows = [(0, bytearray(b"\xff\x01"), "b"), (1, bytearray(b"\x02\xfe"), "a")]
    data = spark.createDataFrame(rows, "id int, image binary, color string")
    image, color = keras.Input((2,), name="image"), keras.Input((1,), name="color")
    joined = keras.layers.Concatenate()([image, color])
    model = keras.Model({"image": image, "color": color}, keras.layers.Dense(1)(joined))
    found = replace(
        trained(model, None),
        features={"image": ["image"], "color": ["color"]},
        tensors={"image": ("int8", (2,))},
        categories={"color": ["a", "b"]},
    )
    expected = model.predict(
        {"image": np.array([[-1, 1], [2, -2]]), "color": np.array([[1], [0]])}, verbose=0
    )
    np.testing.assert_allclose(numbers(predict_spark(found, data), ".pred"), expected, atol=1e-6)


def test_python_gets_the_features_alone(table: Any, dense_model: Any) -> None:
    fails = functions.raise_error(functions.lit("this column is read"))
    wide = table.withColumn("other", functions.when(functions.col("id") >= 0, fails))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        scored = predict_spark(dense_model, wide, features=FEATURES)
    if predict.has_arrow_udfs(table.sparkSession):
        assert len(scored.select("id", f"`{scored.columns[-1]}`").collect()) == 60
    with pytest.raises(Exception, match="this column is read"):
        scored.collect()


@pytest.mark.full
@pytest.mark.parametrize("runtime", ["keras", "onnx"])
def test_images_in_bytes(spark: Any, runtime: Any) -> None:
    images = np.random.default_rng(0).integers(0, 256, (50, 28, 28), "uint8")
    data = spark.createDataFrame(
        [(i, bytearray(image.tobytes())) for i, image in enumerate(images)], "id int, image binary"
    ).repartition(3)
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(4, 5, strides=3, activation="relu"),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )
    found = predict_spark(
        model,
        data,
        features=["image"],
        tensors={"image": ("uint8", (28, 28))},
        batch_size=16,
        runtime=runtime,
    )
    expected = model.predict(images[..., None], verbose=0)
    digits = [f".pred_{digit}" for digit in range(10)]
    assert found.columns == ["id", "image", ".pred_class", *digits]
    np.testing.assert_allclose(numbers(found, *digits), expected, atol=1e-6)
    assert (numbers(found, ".pred_class")[:, 0] == expected.argmax(axis=1)).all()


@pytest.mark.full
def test_a_training_s_levels_name_the_classes(table: Any, rows: Any, dense_model: Any) -> None:
    result = trained(dense_model, LEVELS)
    found = predict_spark(result, table, features=FEATURES)
    expected = softmax(dense_model.predict(rows[0][:60], verbose=0))
    columns = [f".pred_{level}" for level in LEVELS]
    np.testing.assert_allclose(numbers(found, *columns), expected, atol=1e-6)
    classes = numbers(found, ".pred_class")[:, 0]
    assert classes.tolist() == [LEVELS[code] for code in expected.argmax(axis=1)]
    # Spark computes with them as with any other column.
    sure = found.filter("`.pred_class` = 'yes' AND `.pred_may be` < 0.2")
    assert sure.count() == ((expected.argmax(axis=1) == 2) & (expected[:, 1] < 0.2)).sum()

    chosen = {"class": [".pred_class"], "prob": columns, "raw": [".pred"], None: found.columns[-4:]}
    for kind, names in chosen.items():
        frame = predict_spark(result, table, features=FEATURES, type=kind)
        assert frame.columns == [*table.columns, *names]
    other = predict_spark(result, table, features=FEATURES, type="class", levels=["a", "b", "c"])
    assert other.dtypes[-1] == (".pred_class", "string")


@pytest.mark.full
def test_a_table_s_own_columns_stay_as_they_are(spark: Any, dense_model: Any, rows: Any) -> None:
    schema = StructType(
        [
            StructField("id", IntegerType()),
            StructField("a.b", VectorUDT()),
            StructField("listed", ArrayType(DoubleType())),
            StructField("date", DateType()),
            StructField("map", MapType(StringType(), IntegerType())),
            StructField("none", StructType([StructField("in.side", StringType())])),
        ]
    )
    import datetime

    x = rows[0][:20].astype("float64").tolist()
    data = spark.createDataFrame(
        [
            (i, Vectors.dense(x[i]), x[i], datetime.date(2020, 1, 1), {"": i}, None)
            for i in range(20)
        ],
        schema,
    )
    expected = dense_model.predict(rows[0][:20], verbose=0)
    before = data.orderBy("id").collect()
    for column in ("a.b", "listed"):
        found = predict_spark(dense_model, data, features=[column], type="raw")
        assert found.schema[:6] == schema
        np.testing.assert_allclose(numbers(found, ".pred")[:, 0], expected, atol=1e-6)
        assert [row[:6] for row in found.orderBy("id").collect()] == [tuple(row) for row in before]


@pytest.mark.parametrize("runtime", [full("keras"), "onnx"])
def test_several_inputs_and_outputs(table: Any, rows: Any, runtime: Any) -> None:
    keras.utils.set_random_seed(2)
    left, right = keras.Input((3,), name="left"), keras.Input((2,), name="right")
    both = keras.layers.Concatenate()([left, right])
    grid = keras.layers.Reshape((2, 3))(keras.layers.Dense(6)(both))
    outputs = {"score": keras.layers.Dense(1)(both), "grid": grid}
    model = keras.Model({"left": left, "right": right}, outputs)
    features = {"right": ["f0", "f1"], "left": ["f2", "f3", "f4"]}
    found = predict_spark(model, table, features=features, runtime=runtime)
    x = rows[0][:60]
    expected = model.predict({"left": x[:, 2:5], "right": x[:, :2]}, verbose=0)
    assert found.dtypes[-2:] == [(".pred_grid", "array<array<float>>"), (".pred_score", "float")]
    np.testing.assert_allclose(numbers(found, ".pred_score"), expected["score"], atol=1e-6)
    np.testing.assert_allclose(numbers(found, ".pred_grid")[:, 0], expected["grid"], atol=1e-6)
    with pytest.raises(InputError, match=r"inputs left, right: specify the columns"):
        predict_spark(model, table, features=FEATURES)


@pytest.mark.parametrize("runtime", ["keras", full("onnx")])
def test_a_list_of_inputs_without_names(table: Any, rows: Any, runtime: Any) -> None:
    keras.utils.set_random_seed(2)
    inputs = [keras.Input((3,)), keras.Input((2,))]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(inputs)))
    names = [layer.name for layer in model.layers[:2]]
    features = dict(zip(names, (["f2", "f3", "f4"], ["f0", "f1"]), strict=True))
    found = predict_spark(model, table, features=features, runtime=runtime, type="raw")
    x = rows[0][:60]
    expected = model.predict([x[:, 2:5], x[:, :2]], verbose=0)
    np.testing.assert_allclose(numbers(found, ".pred"), expected, atol=1e-6)


@pytest.mark.full
def test_training_and_predictions_name_inputs_alike(table: Any, rows: Any) -> None:
    def build() -> Any:
        inputs = [keras.Input((3,)), keras.Input((2,))]
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(inputs)))
        model.compile("sgd", "mse")
        return model

    model = build()
    names = [layer.name for layer in model.layers[:2]]
    features = dict(zip(names, (["f2", "f3", "f4"], ["f0", "f1"]), strict=True))
    settings: dict[str, Any] = {"workers": 2, "epochs": 1, "seed": 1, "verbose": 0}
    result = barrier_train("local", model, table.toPandas(), features=features, **settings)
    found = predict_spark(result, table, type="raw")
    x = rows[0][:60]
    expected = result.model.predict([x[:, 2:5], x[:, :2]], verbose=0)
    np.testing.assert_allclose(numbers(found, ".pred"), expected, atol=1e-6)
    data = [x[:, 2:5], x[:, :2]], rows[1][:60]
    assert barrier_train("local", model, data, **settings).history == result.history


@pytest.mark.full
def test_onnx_gets_the_types_of_its_inputs_and_rows_of_any_length(spark: Any) -> None:
    keras.utils.set_random_seed(2)
    code, series = keras.Input((2,), dtype="int32", name="c"), keras.Input((3,), name="s")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(9, 2)(code))
    joined = keras.layers.Concatenate()([embedded, series])
    model = keras.Model([code, series], keras.layers.Dense(1)(joined))
    values = [(i, i % 9, 8 - i % 9, [0.5 * i] * (1 + i % 3)) for i in range(30)]
    data = spark.createDataFrame(values, "id int, a long, b short, series array<double>")
    arguments = {
        "features": {"s": ["series"], "c": ["a", "b"]},
        "tensors": {"series": ("float32", (None,))},
    }
    expected = numbers(predict_spark(model, data, **arguments), ".pred")
    found = numbers(predict_spark(model, data, runtime="onnx", **arguments), ".pred")
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.full
def test_one_onnx_file_reads_its_input_under_two_names(table: Any, rows: Any) -> None:
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((8,), name="given"), keras.layers.Dense(2)])
    expected = model.predict(rows[0][:60], verbose=0)
    for features in (FEATURES, {"given": FEATURES}):
        found = predict_spark(model, table, features=features, type="raw", runtime="onnx")
        np.testing.assert_allclose(numbers(found, ".pred")[:, 0], expected, atol=1e-6)


def test_onnx_cannot_read_text(spark: Any) -> None:
    text = keras.Input((1,), dtype="string", name="text")
    known = keras.layers.StringLookup(vocabulary=["a"])(text)
    model = keras.Model(text, keras.layers.Embedding(2, 3)(known))
    data = spark.createDataFrame([("a",)], "text string")
    with pytest.raises(InputError, match="ONNX files cannot have the layers"):
        predict_spark(model, data, runtime="onnx")


def test_onnx_needs_no_tensorflow_on_executors(
    spark: Any, table: Any, rows: Any, dense_model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    bare = ("pyspark", "pyarrow", "pandas", "cloudpickle")
    for packages, message in ((bare, "onnxruntime is not installed"), ((*bare, "onnxruntime"), "")):
        python = python_with(tmp_path / f"{len(packages)}", *packages)
        monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
        found = predict_spark(dense_model, table, features=FEATURES, type="raw", runtime="onnx")
        if message:
            with pytest.raises(Exception, match=message):
                found.collect()
    expected = dense_model.predict(rows[0][:60], verbose=0)
    np.testing.assert_allclose(numbers(found, ".pred")[:, 0], expected, atol=1e-6)
    with pytest.raises(Exception, match=r"No module named|is not installed"):
        predict_spark(dense_model, table, features=FEATURES).collect()


def test_text_is_one_hot_as_in_the_training(spark: Any) -> None:
    rows = [(0, 0.5, "b"), (1, 1.5, "a"), (2, -1.0, "c")]
    data = spark.createDataFrame(rows, "id int, size double, color string")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    found = replace(
        trained(model, None),
        features=["size", "color"],
        tensors=None,
        categories={"color": ["a", "b", "c"]},
        encode={"color": "one_hot"},
    )
    expected = model.predict(
        np.array([[0.5, 0, 1, 0], [1.5, 1, 0, 0], [-1, 0, 0, 1]]), verbose=0
    ).reshape(-1)
    predicted = numbers(predict_spark(found, data), ".pred")
    np.testing.assert_allclose(np.reshape(predicted, -1), expected, atol=1e-6)
    other = spark.createDataFrame([(0, 0.5, "pink")], data.schema)
    with pytest.raises(
        Exception, match=r"column 'color' contains 'pink' in .*not one of its categories"
    ):
        predict_spark(found, other, on_missing="error").collect()
    assert [row[".pred"] for row in predict_spark(found, other).collect()] == [None]


def test_text_and_rows_of_any_length(spark: Any) -> None:
    words = ["one", "two", "three", "né", ""]
    values = [
        (i, words[i % 5], [1.0 + i] * (i % 5), [[i / 9, 0.5]] * (i % 3), words[: i % 3])
        for i in range(23)
    ]
    columns = (
        "id int, word string, series array<double>, tracks array<array<double>>, tags array<string>"
    )
    data = spark.createDataFrame(values, columns)
    keras.utils.set_random_seed(3)
    text = keras.Input((1,), dtype="string", name="text")
    series = keras.Input((5,), name="series")
    tracks = keras.Input((4, 2), name="tracks")
    known = keras.layers.StringLookup(vocabulary=words[:4])(text)
    embedded = keras.layers.Flatten()(keras.layers.Embedding(6, 3)(known))
    tags = keras.Input((2,), name="tags", dtype="string")
    many = keras.layers.StringLookup(vocabulary=words[:4], output_mode="multi_hot")(tags)
    joined = keras.layers.Concatenate()([embedded, series, keras.layers.Flatten()(tracks), many])
    probability = keras.layers.Dense(1, activation="sigmoid")(joined)
    model = keras.Model([text, series, tracks, tags], probability)
    found = predict_spark(
        model,
        data,
        features={"text": "word", "series": ["series"], "tracks": "tracks", "tags": "tags"},
        tensors={"series": ("float32", (None,)), "tracks": ("float32", (None, 2))},
        batch_size=4,
    )
    padded = np.array([row[2] + [0.0] * (5 - len(row[2])) for row in values], "float32")
    vectors = np.array([row[3] + [[0.0, 0.0]] * (4 - len(row[3])) for row in values], "float32")
    strings = keras.ops.convert_to_tensor([[row[1]] for row in values])
    lists = keras.ops.convert_to_tensor([row[4] + [""] * (2 - len(row[4])) for row in values])
    expected = model.predict_on_batch([strings, padded, vectors, lists])
    assert found.dtypes[-1] == (".pred", "float")
    np.testing.assert_allclose(numbers(found, ".pred"), expected, atol=1e-6)


def test_fields_of_structs_are_features(spark: Any) -> None:
    keras.utils.set_random_seed(1)
    values = [(i, i / 5, Vectors.dense([i, -i])) for i in range(5)]
    plain = spark.createDataFrame(values, ["id", "a", "v"])
    data = plain.selectExpr("id", "struct(a, struct(v) AS `t t`, id % 2 AS y) AS s", "a AS `s.z`")
    features = ["s.a", "s.t t.v", "s.z"]
    spec = ColumnSpec(features={"x": features}, label="s.y")
    sent = DataFrameRows.of(data, spec, "float32", "data").frame.orderBy("c0").collect()
    wide = [i / 5 for i in range(5)]
    np.testing.assert_allclose([row[0] for row in sent], wide)
    assert [[*row[1], row[3]] for row in sent] == [[i, -i, i % 2] for i in range(5)]
    np.testing.assert_allclose([row[2] for row in sent], wide)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    expected = model(np.array([[i / 5, i, -i, i / 5] for i in range(5)], "float32"))
    found = predict_spark(model, data, features=features)
    assert found.columns == ["id", "s", "s.z", ".pred"]
    np.testing.assert_allclose(numbers(found, ".pred"), expected, atol=1e-6)
    with pytest.raises(InputError, match=r"`df` has no column 's\.b': did you mean 's\.z'"):
        predict_spark(model, data, features=["s.b"])
    with pytest.raises(
        InputError,
        match=r"has type struct<a:.*; expected numbers: name the fields "
        r"to use, e\.g\. features=\['s\.a'\]",
    ):
        predict_spark(model, data, features=["s"])


class Doubling(keras.Model):
    """A model of a custom class, for regression."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        """Return twice the output of a dense layer."""
        return 2 * self.inner(x)


@pytest.mark.full
def test_a_model_of_a_class_of_its_own(table: Any, rows: Any) -> None:
    model = Doubling()
    with pytest.raises(InputError, match="call it once on a batch"):
        predict_spark(model, table, features=FEATURES)
    expected = model.predict(rows[0][:60], verbose=0)
    found = predict_spark(model, table, features=FEATURES)
    np.testing.assert_allclose(numbers(found, ".pred")[:, 0], expected, atol=1e-6)
    # Scores distinguish classes, if the classes are named, but are not probabilities.
    named = predict_spark(model, table, features=FEATURES, levels=["a", "b"])
    assert named.columns[-2:] == ["label", ".pred_class"]
    with pytest.raises(InputError, match=r"type='prob' needs probabilities, .*outputs scores"):
        predict_spark(model, table, features=FEATURES, type="prob")


def test_nothing_runs_before_spark_is_asked(spark: Any, table: Any, dense_model: Any) -> None:
    failing = table.withColumn("f0", functions.expr("raise_error('it ran')").cast("float"))
    found = predict_spark(dense_model, failing, features=FEATURES)
    found.createOrReplaceTempView("found")
    assert spark.table("found").columns == [*table.columns, *found.columns[-4:]]
    with pytest.raises(Exception, match="it ran"):
        found.collect()


@pytest.mark.full
def test_no_rows_and_empty_partitions(table: Any, dense_model: Any) -> None:
    assert predict_spark(dense_model, table.limit(0), features=FEATURES).collect() == []
    few = table.limit(1).repartition(3)
    assert predict_spark(dense_model, few, features=FEATURES).count() == 1


class Counted(keras.layers.Layer):
    """Writes the id of the process in which it is created to a file."""

    def __init__(self, log: str, **options: Any) -> None:
        super().__init__(**options)
        self.log = log
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "log": self.log}

    def call(self, x: Any) -> Any:
        return x


@pytest.mark.full
def test_a_process_loads_a_model_once(table: Any, tmp_path: Path) -> None:
    made = tmp_path / "made"
    softmax = keras.layers.Dense(3, activation="softmax")
    model = keras.Sequential([keras.Input((8,)), Counted(str(made)), softmax])
    found = predict_spark(model, table.repartition(6), features=FEATURES)
    for _ in range(2):
        assert found.filter("`.pred_0` > `.pred_1`").count() < 60
    pids = [int(line) for line in made.read_text().split()]
    there = [pid for pid in pids if pid != os.getpid()]
    assert 1 <= len(there) == len(set(there))


def test_when_a_model_was_written_makes_it_no_other(dense_model: Any) -> None:
    content = model_to_bytes(dense_model, format="keras")
    later = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(later, "w") as target:
        for name in source.namelist():
            member = source.read(name)
            if name == "metadata.json":
                member = json.dumps({**json.loads(member), "date_saved": "later"}).encode()
            target.writestr(name, member)
    assert later.getvalue() != content
    assert remove_dates(later.getvalue()) == remove_dates(content)
    assert model_from_bytes(remove_dates(content)).name == dense_model.name


def test_large_outputs_come_in_blocks(monkeypatch: Any, rows: Any, dense_model: Any) -> None:
    monkeypatch.setattr(scorers, "_BLOCK_BYTES", 40 * 3 * 4)
    scorer = scorers.KerasScorer(dense_model)
    blocks = [outputs[0] for outputs in scorers.predict_rows(scorer, {"x": rows[0]}, 30)]
    assert [len(block) for block in blocks] == [60] * 8 + [20]
    expected = dense_model.predict(rows[0], verbose=0)
    np.testing.assert_allclose(np.concatenate(blocks), expected, atol=1e-6)


def test_a_process_keeps_the_last_models(monkeypatch: Any) -> None:
    monkeypatch.setattr(predict, "_models", type(predict._models)())
    monkeypatch.setattr(PredictTask, "_load", lambda task: task.digest.upper())
    asked: list[Any] = [PredictTask(None, {}, name, (), (), 0, None, False) for name in "abcabcadb"]  # type: ignore[arg-type]
    assert [task.model() for task in asked] == list("ABCABCADB")
    assert list(predict._models) == ["a", "d", "b"]


@pytest.mark.parametrize("arguments", [{"levels": ["a", "b", "c"]}, {"type": "raw"}])
@pytest.mark.full
def test_an_incomplete_row_has_no_prediction(
    table: Any, rows: Any, dense_model: Any, arguments: Any
) -> None:
    places = sorted(row.id for row in table.select("id").collect())
    holes = [places[0], *places[7:9], places[-1]]
    hole = functions.when(~table.id.isin(holes), table.f3)
    holed = table.withColumn("f3", hole)
    names = None
    for frame, is_hole in ((holed, holes), (holed.filter("f3 IS NULL"), holes)):
        predicted = predict_spark(dense_model, frame, features=FEATURES, batch_size=8, **arguments)
        names = predicted.columns[len(table.columns) :]
        found = {row.id: [row[name] for name in names] for row in predicted.collect()}
        assert len(found) == frame.count()
        for place, values in found.items():
            assert all((value is None) == (place in is_hole) for value in values)
    whole = predict_spark(dense_model, table, features=FEATURES, **arguments)
    wanted = {row.id: [row[name] for name in names] for row in whole.collect()}
    found = {
        row.id: [row[name] for name in names]
        for row in predict_spark(dense_model, holed, features=FEATURES, **arguments).collect()
    }
    known = [place for place in places if place not in holes]
    for place in known:
        for value, expected in zip(found[place], wanted[place], strict=True):
            assert value == expected or np.allclose(value, expected, atol=1e-6)
    assert predict_spark(dense_model, table.limit(0), features=FEATURES).collect() == []


def test_a_bad_row_is_named(table: Any, dense_model: Any) -> None:
    hole = functions.when(table.id != 7, table.f3)
    holed = predict_spark(
        dense_model, table.withColumn("f3", hole), features=FEATURES, on_missing="error"
    )
    with pytest.raises(Exception, match=r"InputError: column 'f3' has 1 null\(s\), first in .*f3"):
        holed.collect()
    wide = table.withColumn("x", functions.array("f0", "f1", "f2"))
    with pytest.raises(Exception, match=r"rows have shape \(3,\), but the model's input has"):
        predict_spark(dense_model, wide, features=["x"]).collect()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": ["f0", "oops"]}, "`df` has no column 'oops'"),
        ({"features": None}, r"shape \(8,\)\), but there are 10 features: id, f0"),
        ({"levels": ["a", "b"]}, "`levels` has 2 names, but the model has 3 classes"),
        ({"levels": ["a", "b", "A"]}, "two columns named '.pred_A'"),
        ({"levels": ["x", "y", "class"]}, "two columns named '.pred_class'"),
        ({"tensors": {"oops": ("uint8", (2,))}}, "no column 'oops'"),
        ({"runtime": "onnxruntime"}, "`runtime` must be 'keras' or 'onnx', not 'onnxruntime'"),
    ],
)
def test_what_does_not_fit_is_refused(
    table: Any, dense_model: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        predict_spark(dense_model, table, **{"features": FEATURES, **arguments})


@pytest.mark.full
def test_one_probability_tells_two_classes(table: Any, rows: Any) -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile(loss="binary_crossentropy")
    expected = model.predict(rows[0][:60], verbose=0)
    found = predict_spark(trained(model, ["no", "yes"]), table, features=FEATURES)
    assert found.columns[-3:] == [".pred_class", ".pred_no", ".pred_yes"]
    got = numbers(found, ".pred_no", ".pred_yes")
    np.testing.assert_allclose(got, np.concatenate([1 - expected, expected], axis=1), atol=1e-6)
    said = numbers(found, ".pred_class")[:, 0]
    assert set(said) == {"no", "yes"}
    assert said.tolist() == [["no", "yes"][int(p > 0.5)] for p in expected[:, 0]]
    plain = predict_spark(model, table, features=FEATURES, type="class")
    assert numbers(plain, ".pred_class")[:, 0].tolist() == (expected[:, 0] > 0.5).tolist()
    model.compile(loss="mse")
    assert predict_spark(model, table, features=FEATURES).columns[-1] == ".pred"
    logit = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    logit.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True))
    expected = 1 / (1 + np.exp(-logit.predict(rows[0][:60], verbose=0)))
    found = predict_spark(logit, table, features=FEATURES, type="prob")
    got = numbers(found, ".pred_0", ".pred_1")
    np.testing.assert_allclose(got, np.concatenate([1 - expected, expected], axis=1), atol=1e-6)
    # Several labels that may all apply are not classes.
    several = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, activation="sigmoid")])
    several.compile(loss="binary_crossentropy")
    assert predict_spark(several, table, features=FEATURES).columns[-1] == ".pred"


def test_classes_need_several_numbers(table: Any) -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, activation="sigmoid")])
    # Two levels from a training with a factor do not name one number.
    found = predict_spark(trained(model, ["no", "yes"]), table, features=FEATURES)
    assert found.columns[-1] == ".pred"
    for kind in ("class", "prob"):
        with pytest.raises(InputError, match=r"shape \(1,\): use type='raw'"):
            predict_spark(model, table, features=FEATURES, type=kind)
    own = table.withColumnRenamed("label", ".PRED")
    with pytest.raises(InputError, match=r"two columns named '\.pred'"):
        predict_spark(model, own, features=FEATURES)


@pytest.mark.full
def test_spark_looks_for_no_garbage_in_tensorflow() -> None:
    code = (
        "import gc\n"
        "from pybackend.core.launchers.spark.predicted_columns import set_up_tensorflow\n"
        "set_up_tensorflow()\n"
        "print(gc.isenabled(), gc.get_freeze_count())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    enabled, frozen = ended.stdout.split()
    assert enabled == "True"
    assert int(frozen) > 100_000
