"""Results as files: everything comes back, and damage is named."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pybackend import InputError, SerializationError, barrier_train
from pybackend.core.errors import Moment
from pybackend.core.job.report import Generation, Restart
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
