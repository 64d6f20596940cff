"""Models as ONNX files: ONNX Runtime computes the same as Keras, or nothing is written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import onnxruntime
import pytest
from conftest import full
from keras import layers

from pybackend import InputError, SerializationError
from pybackend.core.model.onnx import check_onnx_installed
from pybackend.types import TrainResult


def of(model: Any) -> TrainResult:
    return TrainResult(b"", "keras", "", {}, [], 0.0, 0, 0, decode=lambda _: model)


def dense() -> Any:
    return keras.Sequential([keras.Input((4,)), layers.Dense(8, "relu"), layers.Dense(3)])


def normalized() -> Any:
    scale = layers.Normalization()
    scale.adapt(np.random.default_rng(0).normal(3, 2, (50, 4)))
    return keras.Sequential([keras.Input((4,)), scale, layers.Dense(2)])


def several() -> Any:
    left, right = keras.Input((2,), name="left"), keras.Input((3,), dtype="int32", name="right")
    embedded = layers.Flatten()(layers.Embedding(10, 2)(right))
    both = layers.Concatenate()([left, embedded])
    outputs = {"price": layers.Dense(1)(both), "sold": layers.Dense(2, "softmax")(both)}
    return keras.Model({"right": right, "left": left}, outputs)


def convolutional() -> Any:
    return keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(3, "softmax"),
        ]
    )


def recurrent() -> Any:
    return keras.Sequential([keras.Input((None, 3)), layers.LSTM(4), layers.Dense(1)])


def attentive() -> Any:
    rows = keras.Input((6, 8))
    mixed = layers.LayerNormalization()(layers.MultiHeadAttention(2, 4)(rows, rows))
    return keras.Model(rows, layers.Dense(2)(mixed))


@pytest.mark.parametrize(
    "build", [dense, normalized, several, full(convolutional), full(recurrent), full(attentive)]
)
def test_onnx_runtime_computes_the_same(
    build: Callable[[], Any], tmp_path: Path, capfd: Any, caplog: Any
) -> None:
    caplog.set_level(logging.WARNING)
    model = build()
    path = of(model).export(tmp_path / "new" / "model.onnx")
    assert [one.name for one in path.parent.iterdir()] == ["model.onnx"]
    assert not caplog.records
    assert not capfd.readouterr().out
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(2)
    rows = [
        rng.integers(0, 10, (11, *tensor.shape[1:])).astype(tensor.dtype)
        if "int" in tensor.dtype
        else rng.normal(size=(11, *(n or 9 for n in tensor.shape[1:]))).astype("float32")
        for tensor in model.inputs
    ]
    named = {one.name: array for one, array in zip(session.get_inputs(), rows, strict=True)}
    given = rows[0] if len(rows) == 1 else keras.tree.pack_sequence_as(model.input, rows)
    expected = keras.tree.flatten(model.predict(given, verbose=0))
    for one, other in zip(session.run(None, named), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    # The model itself is unchanged, and the file can be replaced.
    of(model).export(path)
    after = keras.tree.flatten(model.predict(given, verbose=0))
    for one, other in zip(after, expected, strict=True):
        np.testing.assert_array_equal(one, other)


class Uneven(layers.Layer):
    """Computes other numbers while it is exported."""

    def call(self, x: Any) -> Any:
        return x * (1.0 if self.is_exact else 1.01)

    is_exact = True


def test_other_numbers_are_an_error_that_names_the_output(tmp_path: Path, monkeypatch: Any) -> None:
    layer = Uneven()
    rows = keras.Input((4,))
    model = keras.Model(rows, layers.Dense(2, name="score")(layer(rows)))
    export = model.export

    def spoil(*args: Any, **kwargs: Any) -> None:
        layer.is_exact = False
        export(*args, **kwargs)

    model.export = spoil
    with pytest.raises(SerializationError, match="for the output 'score': the largest difference"):
        of(model).export(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_what_onnx_cannot_hold_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    words = keras.Input((1,), dtype="string", name="words")
    found = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot", name="table")(words)
    with pytest.raises(InputError, match=r"cannot have the layers table \(StringLookup\)"):
        of(keras.Model(words, layers.Dense(1)(found))).export(tmp_path / "model.onnx")

    class Own(keras.Model):
        def call(self, inputs: Any) -> Any:
            return inputs

    with pytest.raises(InputError, match="only functional and Sequential models"):
        of(Own()).export(tmp_path / "model.onnx")
    monkeypatch.setattr("pybackend.core.model.onnx.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"onnx is not installed .*tfdist\[onnx\]"):
        check_onnx_installed()
    assert not list(tmp_path.iterdir())
