"""The columns of a model's predictions."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from pybackend.core.api.model_columns import predictions_of

L = keras.layers


@pytest.mark.parametrize(
    ("last", "loss"),
    [
        (L.Dense(3, activation=tf.nn.softmax), "sparse_categorical_crossentropy"),
        (L.Dense(1, activation=lambda x: keras.ops.sigmoid(x)), "binary_crossentropy"),
    ],
)
def test_of_a_function_that_is_not_keras_s_the_loss_tells_what_it_gives(
    last: Any, loss: str
) -> None:
    model = keras.Sequential([keras.Input((3,)), last])
    model.compile(loss=loss)
    found = predictions_of(model, None, None, None)
    assert (found.has_class, found.has_numbers, found.are_logits) == (True, True, False)
