"""Pickled Keras objects: a copy trains bit by bit like the original."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import named

from pybackend.core.errors import InputError
from pybackend.core.model.by_value import pickle_objects, take_snapshot, unpickle_objects

layers = keras.layers
_RNG = np.random.default_rng(0)
X = _RNG.random((32, 4)).astype("float32")
Y = _RNG.integers(0, 3, 32)
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Net(keras.Model):
    """A model whose argument and later attributes Keras does not save."""

    def __init__(self, units: int = 4) -> None:
        super().__init__()
        self.parts = [layers.Dense(units), layers.Dense(3)]

    def call(self, x: Any) -> Any:
        """Apply all parts."""
        for part in self.parts:
            x = part(x)
        return x


class Scaled(keras.losses.Loss):
    """A loss with an argument and no `get_config`."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """A multiple of the entropy."""
        entropy = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        return self.factor * entropy


def _compiled(model: Any, optimizer: Any = "adam", loss: Any = LOGITS, **options: Any) -> Any:
    model.compile(optimizer, loss, **options)
    return model


def _stack(*parts: Any) -> Any:
    return keras.Sequential([keras.Input((4,)), *parts, layers.Dense(3)])


def _functional() -> Any:
    inputs = keras.Input((4,))
    shared = layers.Dense(4)
    hidden = layers.BatchNormalization()(shared(shared(inputs)) + inputs * 2)
    hidden = keras.Sequential([layers.Dense(5), layers.Dropout(0.1, seed=3)])(hidden)
    model = keras.Model(inputs, layers.Dense(3)(hidden))
    return _compiled(model, metrics=["accuracy", keras.metrics.SparseCategoricalAccuracy("named")])


def _fitted() -> Any:
    model = _functional()
    model.fit(X, Y, verbose=0)
    return model


def _built() -> Any:
    model = _compiled(Net(7))
    model(X)
    return model


def _with_factors() -> Any:
    model = _stack(layers.Dense(8))
    model.layers[0].enable_lora(2)
    model.layers[1].bias.trainable = False
    optimizer = keras.optimizers.AdamW(0.01)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return _compiled(model, optimizer)


def _local() -> Any:
    class Times(layers.Layer):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x: Any) -> Any:
            return x * self.scale * self.factor

    return _compiled(_stack(Times(3.0)))


def _normalized() -> Any:
    normalization = layers.Normalization()
    normalization.adapt(X)
    return _compiled(_stack(normalization))


def _looked_up() -> Any:
    inputs = keras.Input((4,))
    found = layers.IntegerLookup(vocabulary=[1, 2, 3])(keras.ops.cast(inputs * 3, "int64"))
    hidden = layers.Flatten()(layers.Embedding(5, 3)(found))
    return _compiled(keras.Model(inputs, layers.Dense(3)(hidden)))


def _recurrent() -> Any:
    return _compiled(_stack(layers.Reshape((4, 1)), layers.Bidirectional(layers.LSTM(3))))


def _attentive() -> Any:
    inputs = keras.Input((4,))
    steps = layers.Reshape((4, 1))(inputs)
    attended = layers.LayerNormalization()(layers.MultiHeadAttention(2, 3)(steps, steps))
    return _compiled(keras.Model(inputs, layers.Dense(3)(layers.Flatten()(attended))))


def _scheduled() -> Any:
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    averaged = keras.optimizers.SGD(decay, momentum=0.9, use_ema=True, clipnorm=1.0)
    return _compiled(_stack(), averaged, Scaled(5.0))


def _half() -> Any:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    return _compiled(_stack(layers.Dense(3, dtype="mixed_float16")), optimizer)


def _half_fitted() -> Any:
    model = _half()
    model.fit(X, Y, verbose=0)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "functional": _functional,
    "fitted": _fitted,
    "subclassed": lambda: _compiled(Net(16)),
    "subclassed, built": _built,
    "factors and flags": _with_factors,
    "local class": _local,
    "normalization": _normalized,
    "lookup": _looked_up,
    "recurrent": _recurrent,
    "attention": _attentive,
    "schedule, averages and loss": _scheduled,
    "lambda": lambda: _compiled(_stack(layers.Lambda(lambda x: x * 2))),
    "half precision": _half,
    "half precision, fitted": _half_fitted,
}
# One of each type: `make test-full` copies the others, too.
DAILY = ["lookup"]


@pytest.mark.parametrize("name", named(MODELS, DAILY))
def test_a_copy_trains_bit_by_bit_as_the_original(name: str) -> None:
    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    copy = unpickle_objects(pickle_objects(model))
    assert type(copy) is type(model)
    histories = []
    for each in (model, copy):
        keras.utils.set_random_seed(7)
        histories.append(each.fit(X, Y, epochs=2, shuffle=False, verbose=0).history)
    assert histories[0] == histories[1]
    assert len(model.weights) == len(copy.weights)
    for one, other in zip(model.weights, copy.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
        assert one.trainable == other.trainable


def test_a_copy_can_be_written_as_a_file_of_keras(tmp_path: Any) -> None:
    copy = unpickle_objects(pickle_objects(_functional()))
    copy.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict(X, verbose=0), copy.predict(X, verbose=0))


def test_what_holds_a_part_of_a_model_holds_it_still() -> None:
    class Hold(keras.callbacks.Callback):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

    model = _functional()
    copy, hold = unpickle_objects(pickle_objects((model, Hold(model.layers[-1]))))
    assert hold.layer is copy.layers[-1]


def test_attributes_are_kept_and_the_original_is_as_it_was() -> None:
    model = _fitted()
    model.temperature = 2.5
    traced = model.train_function
    copy = unpickle_objects(pickle_objects(model))
    assert copy.temperature == 2.5
    assert copy.train_function is None
    assert model.train_function is traced
    copy.layers[-1].bias.assign([1.0, 2.0, 3.0])
    assert not np.array_equal(model.layers[-1].bias, copy.layers[-1].bias)


def test_a_function_of_tensorflow_is_traced_anew() -> None:
    model = _built()
    model.double = tf.function(
        lambda x: x * 2, jit_compile=True, input_signature=[tf.TensorSpec([])]
    )
    model.double(tf.constant(3.0))
    copy = unpickle_objects(pickle_objects(model))
    assert copy.double.input_signature == (tf.TensorSpec([]),)
    assert float(copy.double(tf.constant(4.0))) == 8.0
    assert "HloModule" in copy.double.experimental_get_compiler_ir(tf.constant(4.0))()


@pytest.mark.full
def test_snapshots_are_copies_of_what_was() -> None:
    model = _fitted()
    snapshot = take_snapshot(model)
    expected = model.predict(X, verbose=0)
    model.fit(X, Y, verbose=0)
    for _ in range(2):
        np.testing.assert_array_equal(snapshot().predict(X, verbose=0), expected)


@pytest.mark.parametrize("name", ["__slots__", "__getstate__"])
def test_a_class_with_a_state_of_its_own_is_refused(name: str) -> None:
    own = ("scale",) if name == "__slots__" else (lambda self: {})
    kind = type("Own", (layers.Layer,), {name: own})
    with pytest.raises(InputError, match=f"Own has {name}"):
        pickle_objects(_compiled(_stack(kind())))


@pytest.mark.full
def test_what_cannot_be_pickled_is_an_error() -> None:
    model = _built()
    model.lock = threading.Lock()
    with pytest.raises(InputError, match=r"the model Net .* because of `lock`"):
        pickle_objects(model)
