"""Trained models as files of Keras's two formats, and as SavedModels."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import full, largest_difference

import pybackend
from pybackend import InputError, SerializationError, load_model
from pybackend.core.model.serialization import model_from_bytes, model_to_bytes
from pybackend.types import TrainResult


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
