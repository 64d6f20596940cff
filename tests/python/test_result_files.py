"""Files of a whole result, and of its model."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from conftest import full, largest_difference

import pybackend
from pybackend import InputError, SerializationError, barrier_train, load_model
from pybackend.core.errors import Moment
from pybackend.core.job.report import Generation, Restart
from pybackend.core.model.serialization import model_from_bytes, model_to_bytes
from pybackend.types import TrainResult


def build() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


FRAME = pd.DataFrame({"size": np.arange(12.0), "town": list("ab") * 6, "label": list("yn") * 6})


@pytest.fixture(scope="module")
def result() -> TrainResult:
    return barrier_train(None, build, FRAME, validation_split=0.25, workers=2, epochs=2, verbose=0)


def test_all_of_a_result_comes_back(result: TrainResult, tmp_path: Path) -> None:
    full = replace(
        result,
        history={**result.history, "odd": [math.nan, math.inf], "f1": [[0.5, 1.0], [0.0, 0.25]]},
        validation_freq=(1, 2),
        generations=[Generation(1, [0, 1]), Generation(2, [1, 2], [2], {"0": "it was lost"})],
        restarts=[Restart(1.5, "a worker was lost", "epoch 1")],
        timeline=[Moment(1.5, "started", "PID 7", 1, "b")],
    )
    path = full.save(tmp_path / "fits" / "fit.json")
    again = TrainResult.load(path)
    for one in fields(TrainResult):
        if one.name not in ("decode", "fetch", "workers", "history"):
            assert getattr(again, one.name) == getattr(full, one.name), one.name
    assert repr(again.history) == repr(full.history)
    assert again.audit == full.audit
    for worker, before in zip(again.workers, full.workers, strict=True):
        assert worker == replace(before, value=None, inputs=None)
    assert json.loads(again.record) == json.loads(full.record)
    pd.testing.assert_frame_equal(again.predict(FRAME), result.predict(FRAME))
    assert again.model.optimizer.iterations == result.model.optimizer.iterations
    assert again.save(tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_a_model_elsewhere_is_read_there(tmp_path: Path, result: TrainResult) -> None:
    (tmp_path / "model.h5").write_bytes(result.model_bytes())
    elsewhere = replace(result, content=b"", model_uri=str(tmp_path / "model.h5"))
    again = TrainResult.load(elsewhere.save(tmp_path / "fit.json"))
    assert again.model_bytes() == result.model_bytes()


def test_what_is_no_result_is_refused(tmp_path: Path, result: TrainResult) -> None:
    path = result.save(tmp_path / "fit.json")
    values = json.loads(path.read_text())
    for damaged in (
        "{",
        "[]",
        json.dumps({**values, "version": 2}),
        json.dumps({**values, "history": 3}),
        json.dumps({**values, "workers": [{"rank": "0"}]}),
        json.dumps({name: value for name, value in values.items() if name != "seed"}),
    ):
        path.write_text(damaged)
        with pytest.raises(SerializationError, match=r"fit.json is not a result file, or"):
            TrainResult.load(path)
    path.write_text(
        json.dumps({**values, "model_base64": values["model_base64"][:-400] + "A" * 400})
    )
    with pytest.raises(SerializationError, match="SHA-256"):
        _ = TrainResult.load(path).model
    with pytest.raises(InputError, match="there is no file"):
        TrainResult.load(tmp_path / "absent.json")


def test_files_have_the_names_that_classes_are_registered_under(tmp_path: Path) -> None:
    import keras

    @keras.saving.register_keras_serializable("mine")
    class Net(keras.Model):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.dense = keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    x, model = np.ones((8, 3), "float32"), Net()
    model(x)
    model.compile("sgd", "mse")
    result = barrier_train(None, model, (x, x[:, :2]), workers=1, verbose=0)
    wanted = result.predict(x)
    loaded = keras.saving.load_model(result.save(tmp_path / "net.keras"))
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), wanted)
    again = TrainResult.load(result.save(tmp_path / "fit.json"))
    np.testing.assert_array_equal(again.predict(x), wanted)


def of(model: Any, kind: Any) -> TrainResult:
    data = model_to_bytes(model, format=kind, include_optimizer=True)
    return TrainResult(data, kind, "", {}, [], 0.0, 0, 0, decode=model_from_bytes)


@pytest.mark.parametrize("kind", ["keras", full("h5")])
def test_a_model_is_written_in_either_format(
    kind: str, rows: Any, dense_model: Any, tmp_path: Path
) -> None:
    dense_model.fit(*rows, epochs=1, verbose=0)
    result = of(dense_model, kind)
    own = result.save(tmp_path / f"own.{kind}")
    assert own.read_bytes() == result.model_bytes()
    other = result.save(tmp_path / "new" / f"other.{'keras' if kind == 'h5' else 'h5'}")
    # The optimizer's state came back, too: the next epoch is the same.
    kept, again = load_model(own), load_model(other)
    for model in (kept, again):
        model.fit(*rows, epochs=1, shuffle=False, verbose=0)
    assert largest_difference(kept, again) == 0
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == sorted([own.name, other.name])


def test_tensorflow_loads_what_is_exported(rows: Any, dense_model: Any, tmp_path: Path) -> None:
    path = of(dense_model, "h5").export(tmp_path / "new" / "served")
    assert path == tmp_path / "new" / "served"
    loaded = tf.saved_model.load(path)
    served = loaded.signatures["serving_default"]
    (found,) = served(tf.constant(rows[0][:7])).values()
    np.testing.assert_allclose(found, dense_model.predict(rows[0][:7], verbose=0), atol=1e-6)
    assert [one.name for one in path.parent.iterdir()] == ["served"]
    with pytest.raises(InputError, match=r"served' exists and is not an empty folder"):
        of(dense_model, "h5").export(path)


def test_a_model_that_cannot_be_exported_leaves_nothing(tmp_path: Path) -> None:
    class Own(keras.Model):
        def call(self, inputs: Any) -> Any:
            return inputs

    never_called = Own()
    result = TrainResult(b"", "keras", "", {}, [], 0.0, 0, 0, decode=lambda _: never_called)
    with pytest.raises(SerializationError, match="Keras cannot export the model 'own"):
        result.export(tmp_path / "served")
    assert list(tmp_path.iterdir()) == []


X = np.random.default_rng(1).normal(size=(32, 3)).astype("float32")


Y = X[:, :1]


READ = """
import pickle, numpy as np
result, x, expected = pickle.load(open("result.pkl", "rb"))
np.testing.assert_array_equal(result.model(x), expected)
print(*result.evaluate((x, x[:, :1])))
"""


class Scaled(keras.layers.Layer):
    """A layer that the other process cannot import."""

    factor = 3.0

    def call(self, x: Any) -> Any:
        return x * self.factor


class Own(keras.Model):
    """A model that no file can store."""

    def __init__(self, scaled: Any) -> None:
        super().__init__()
        self.scaled, self.dense = scaled, keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(self.scaled(x))


def functional() -> Any:
    model = keras.Sequential([keras.Input((3,)), Scaled(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def subclassed() -> Any:
    model = Own(Scaled())
    model.compile("sgd", "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize(
    "model",
    [pytest.param(functional(), id="a file"), pytest.param(subclassed, id="a function")],
)
@pytest.mark.full
def test_a_pickled_result_has_its_model_in_another_process(model: Any, tmp_path: Path) -> None:
    result = pybackend.barrier_train(None, model, (X, Y), workers=2, verbose=0)
    expected = np.asarray(result.model(X))
    again = pickle.loads(pickle.dumps(result))  # noqa: S301 - our own
    assert again == result
    assert "model" not in vars(again)
    np.testing.assert_array_equal(again.model(X), expected)
    (tmp_path / "result.pkl").write_bytes(pickle.dumps((result, X, expected)))
    done = subprocess.run(
        [sys.executable, "-c", READ], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["loss", "mae"], done.stderr
