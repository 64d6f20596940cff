"""Callbacks that share objects with data that is read before training starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import build_dense

from pybackend import InputError, barrier_train
from pybackend.core.api.sent_objects import check_shared_state

X, Y = np.ones((8, 8), "float32"), np.arange(8) % 3
Lambda = keras.callbacks.LambdaCallback


class Scaled(keras.utils.PyDataset):
    """Rows times a factor, which an attribute, an object or a dict has."""

    def __init__(self, **shared: Any) -> None:
        super().__init__()
        self.scale = 1.0
        self.shared = shared

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return X * self.scale, Y


class Holding(keras.callbacks.Callback):
    """Use what it holds, without changing it."""

    def __init__(self, held: Any = None, **state: Any) -> None:
        super().__init__()
        self.held = held
        self.state = state.get("state")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Read rows, and add a metric."""
        assert logs is not None
        logs["largest"] = self.held[0][0].max()


class Setting(Holding):
    """Set the attribute."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Double the rows."""
        self.level = epoch
        self.held.scale *= 2


class Storing(Holding):
    """Set an item of a dict."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Add to the item."""
        self.state["scale"] += 1


def _scaled_by(variable: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).map(lambda x, y: (x * variable, y))


def _hold_itself() -> Any:
    data = Scaled()
    return data, Setting(data)


def _set_in_a_function() -> Any:
    data = Scaled()
    return data, Lambda(on_epoch_begin=lambda epoch, logs: setattr(data, "scale", epoch))


def _share_an_object() -> Any:
    state = SimpleNamespace(scale=1.0)
    return Scaled(state=state), Setting(state)


def _share_a_dict() -> Any:
    state = {"scale": 1.0}
    return Scaled(state=state), Storing(state=state)


def _assign_a_variable() -> Any:
    variable = tf.Variable(1.0)
    return _scaled_by(variable), Lambda(on_epoch_begin=lambda epoch, logs: variable.assign(epoch))


def _assign_keras_s_variable() -> Any:
    variable = keras.Variable(1.0)
    return _scaled_by(variable), Lambda(on_epoch_begin=lambda epoch, logs: variable.assign(epoch))


def _change_a_generator() -> Any:
    state = SimpleNamespace(scale=1.0)
    data = tf.data.Dataset.from_generator(
        lambda: ((X * state.scale, Y) for _ in range(2)),
        output_signature=(tf.TensorSpec([8, 8]), tf.TensorSpec([8], "int64")),
    )
    return data, Setting(state)


REJECTED = {
    _hold_itself: r"Setting may change `held` \(class Scaled\), which is `data`, but",
    _set_in_a_function: "LambdaCallback may change `on_epoch_begin`, which uses `data`",
    _share_an_object: r"`held` \(class SimpleNamespace\), which is used by `data`",
    _share_a_dict: r"Storing may change `state` \(class dict\), which is used by `data`",
    _assign_a_variable: r"uses `variable` \(class ResourceVariable\), which is used by `data`",
    _assign_keras_s_variable: r"uses `variable\._value` \(class ResourceVariable\)",
    _change_a_generator: r"`held` \(class SimpleNamespace\), which is used by `data`",
}


@pytest.mark.parametrize("make", REJECTED)
def test_what_a_callback_may_change_is_named(make: Callable[[], Any]) -> None:
    data, callback = make()
    with pytest.raises(InputError, match=REJECTED[make]) as caught:
        check_shared_state(data, "data", [callback])
    assert "pass a function, data=lambda context: make_dataset" in str(caught.value)


def test_what_is_only_read_may_be_shared() -> None:
    logger = logging.getLogger("scale")
    data, variable = Scaled(rows=X, state={"scale": 1.0}, logger=logger), tf.Variable(1.0)
    setting = Setting(Scaled())
    setting.logger = logger
    setting.later = lambda: later
    check_shared_state(data, "data", [Holding(data), Holding(data.shared), setting])
    assign = Lambda(on_epoch_begin=lambda epoch, logs: variable.assign(epoch))
    check_shared_state(_scaled_by(2.0), "data", [assign])
    # Workers call it, with the same variable.
    check_shared_state(lambda context: _scaled_by(variable), "data", [assign])
    check_shared_state((X, Y), "data", [assign])
    later = variable


def test_a_validation_function_is_read_once_too() -> None:
    variable = tf.Variable(1.0)
    assign = Lambda(on_epoch_begin=lambda epoch, logs: variable.assign(epoch))
    with pytest.raises(InputError, match=r"used by `validation_data`, .* give the callback an obj"):
        check_shared_state(lambda context: _scaled_by(variable), "validation_data", [assign])


@pytest.mark.parametrize("name", ["data", "validation_data"])
def test_training_starts_with_the_check(name: str) -> None:
    data, callback = _hold_itself()
    arguments = {"data": (X, Y), name: data}
    with pytest.raises(InputError, match=f"which is `{name}`"):
        barrier_train(None, build_dense, workers=2, callbacks=[callback], **arguments)
