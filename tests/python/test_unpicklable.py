"""Objects that cannot be sent to the workers are named, with the attribute and what to do."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import pybackend
from pybackend.errors import InputError, TfdistError
from pybackend.job.pickling import pickle_value

X = np.ones((8, 4), "float32")
Y = np.ones((8, 1), "float32")
LOCK = threading.Lock()


class Logs(keras.callbacks.Callback):
    """Contains a writer, nested deeply."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.writers = {"loss": [tf.summary.create_file_writer(str(folder))]}


class Waits(keras.callbacks.Callback):
    """Uses a lock of its module."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Wait."""
        LOCK.acquire()


class Doubles(keras.layers.Layer):
    """Has a table that it creates immediately, and no `get_config`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def call(self, x: Any) -> Any:
        """Return the double."""
        return 2 * x


class Remembers(keras.losses.Loss):
    """Has a generator, and no `get_config`."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"numbers": (n for n in range(3))}

    def call(self, y: Any, y_pred: Any) -> Any:
        """Return the mean squared error."""
        return keras.ops.mean((y - y_pred) ** 2, -1)


def _compiled(*parts: Any, loss: Any = "mse") -> Any:
    model = keras.Sequential([keras.Input((4,)), *parts, keras.layers.Dense(1)])
    model.compile("sgd", loss)
    return model


def _flushing(folder: Path) -> Any:
    writer = tf.summary.create_file_writer(str(folder))
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: writer.flush())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda _: _compiled(Doubles()), ["the layer Doubles", "`table`", "Pass a function"]),
        (
            lambda _: _compiled(loss=Remembers()),
            ["the loss Remembers", "`state['numbers']`", "Pass a function"],
        ),
        (
            lambda path: (_compiled(), [Logs(path)]),
            ["the callback Logs", "`writers['loss'][0]`", "`on_train_begin`"],
        ),
        (
            lambda path: (_compiled(), [_flushing(path)]),
            ["the callback LambdaCallback", "`on_epoch_end`, which uses `writer`", "_train_begin`"],
        ),
        (
            lambda _: (_compiled, [keras.callbacks.History(), Waits()]),
            ["the callback Waits", "`on_epoch_end`, which uses `LOCK`", "`on_train_begin`"],
        ),
    ],
)
def test_the_attribute_that_cannot_be_sent_is_named(
    make: Any, expected: list[str], tmp_path: Path
) -> None:
    made = make(tmp_path)
    model, callbacks = made if isinstance(made, tuple) else (made, [])
    with pytest.raises(TfdistError) as caught:
        pybackend.barrier_train(None, model, (X, Y), workers=2, callbacks=callbacks, verbose=0)
    for part in expected:
        assert part in str(caught.value)


def test_what_a_function_uses_is_named() -> None:
    lock = threading.Lock()
    locks = {"one": [lock]}
    with pytest.raises(InputError, match=r"`fn` cannot .* because of `locks\['one'\]\[0\]` \(cl"):
        pickle_value(lambda: locks, "`fn`")
    with pytest.raises(InputError, match=r"because of `lock` \(class lock\): .* inside the func"):
        pickle_value(lambda lock=lock: lock, "`fn`")
