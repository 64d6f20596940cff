"""Results that are pickled and used in another process."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import pybackend

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
