"""Keras's global settings of the session: workers get them, or an error is raised."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from pybackend import InputError, barrier_train

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
