"""Keras's global settings of the session: workers get them, or an error is raised."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from pybackend import InputError, barrier_train
from pybackend.core.api.prepared_training import describe_optimizer

DATA = (np.ones((8, 2), "float32"), np.ones(8, "float32"))


def build() -> Any:
    assert keras.config.epsilon() == 1e-3
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_workers_have_the_epsilon_of_the_session() -> None:
    before = keras.config.epsilon()
    keras.config.set_epsilon(1e-3)
    try:
        assert barrier_train(None, build, DATA, workers=2, verbose=0).epochs == 1
    finally:
        keras.config.set_epsilon(before)


@pytest.mark.parametrize("setting", ["max_epochs", "max_steps_per_epoch"])
def test_a_session_that_ends_trainings_early_is_told(setting: str) -> None:
    change = getattr(keras.config, f"set_{setting}")
    change(3)
    try:
        with pytest.raises(InputError, match=rf"keras.config.{setting}\(\) is 3, which ends"):
            barrier_train(None, build, DATA, workers=1, verbose=0)
    finally:
        change(None)


def test_settings_have_the_split_and_the_optimizer() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(schedule, momentum=0.9), "mse")
    data = (np.ones((8, 2)), np.ones(8))
    call = {"workers": 1, "validation_split": 0.25, "verbose": 0}
    found = barrier_train("local", model, data, **call).settings
    rate = found["optimizer"].pop("learning_rate")
    assert (rate["kind"], rate["initial_learning_rate"]) == ("ExponentialDecay", 0.1)
    assert (found["optimizer"]["kind"], found["optimizer"]["momentum"]) == ("SGD", 0.9)
    assert found["validation_split"] == 0.25


def test_plain_arguments_of_optimizers() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.001)), "mse")
    described = describe_optimizer(model)
    assert described is not None
    assert described["inner_optimizer"]["learning_rate"] == 0.001
    assert "clipnorm" not in described["inner_optimizer"]
    assert describe_optimizer(build) is None
