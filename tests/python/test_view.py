"""A view finds what is in a model, once; a renewed one also has what was created since."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from pybackend.core.engine.audit.one_process import StepState
from pybackend.core.model.view import ModelView, build_model, has_own

layers = keras.layers
X, Y = np.ones((4, 8), "float32"), np.ones((4, 3), "float32")


def compiled(*parts: Any) -> Any:
    model = keras.Sequential([keras.Input((8,)), *parts, layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


class Late(keras.Model):
    """Model that builds a layer, and whose first step creates an optimizer and a variable."""

    def build(self, shape: Any) -> None:
        self.dense = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        if not hasattr(self, "count"):
            self.others = [keras.optimizers.Adam()]
            self.others[0].build(self.trainable_variables)
            self.count = tf.Variable(0.0)
        return super().train_step(data)


def test_parts_are_searched_once_and_later_ones_are_in_a_renewed_view() -> None:
    model = Late()
    model.compile("sgd", "mse", run_eagerly=True)
    unbuilt = ModelView(model)
    assert unbuilt.layers == []
    build_model(model, X)
    assert unbuilt.layers == []
    view = unbuilt.renewed()
    assert view.layers == [model.dense]
    assert view.layers is view.layers
    assert view.optimizers == [model.optimizer]
    state = StepState(view)
    known = set(state.find())
    model.fit(X, Y, verbose=0)
    assert view.optimizers == [model.optimizer]
    assert view.renewed().other_optimizers == {"others": model.others[0]}
    assert set(view.custom_objects) == {"Late"}
    # Not searched once: a call may create variables even in parts that are known.
    assert any(one is model.count for one in view.list_variables())
    # An audit searches again before each step that it repeats.
    new = set(state.find()) - known
    assert new >= {id(model.count), *(id(v.value) for v in model.others[0].variables)}
    assert state.view.optimizers == [model.optimizer, *model.others]


def test_settings_of_parts_are_always_current() -> None:
    normalization = layers.BatchNormalization()
    view = ModelView(compiled(normalization))
    assert view.unsynchronized == [normalization]
    assert len(view.normalizing_variables) == 2
    normalization.trainable = False
    assert view.unsynchronized == []
    assert not view.has_half_layers
    normalization.dtype_policy = "mixed_float16"
    assert view.has_half_layers
    assert view.has_mixed_layers
    assert not view.has_masked_loss
    view.model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(ignore_class=0))
    assert view.has_masked_loss


def test_an_optimizer_of_a_later_compile_is_the_first() -> None:
    model = compiled()
    view = ModelView(model)
    assert [type(one) for one in view.optimizers] == [keras.optimizers.SGD]
    model.compile("adam", "mse")
    assert view.optimizers == [model.optimizer]


@pytest.mark.parametrize(("method", "is_own"), [("train_step", True), ("test_step", False)])
def test_overridden_methods_are_the_models_own(method: str, is_own: bool) -> None:
    assert has_own(Late(), method) == is_own
    assert has_own(Late(), "test_step", method) == is_own
    assert not has_own(compiled(), method)
