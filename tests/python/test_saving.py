"""Trained models as files of Keras's two formats, and as SavedModels."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import full, largest_difference

from pybackend import InputError, SerializationError, TrainResult, load_model, model_to_bytes
from pybackend.model.serialization import model_from_bytes


def of(model: Any, kind: Any) -> TrainResult:
    data = model_to_bytes(model, format=kind, include_optimizer=True)
    text = base64.b64encode(data).decode()
    return TrainResult(text, kind, "", {}, [], 0.0, 0, 0, decode=model_from_bytes)


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
    result = TrainResult("", "keras", "", {}, [], 0.0, 0, 0, decode=lambda _: never_called)
    with pytest.raises(SerializationError, match="Keras cannot export the model 'own"):
        result.export(tmp_path / "served")
    assert list(tmp_path.iterdir()) == []
