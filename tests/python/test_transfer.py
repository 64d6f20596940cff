"""What trains is what was passed: models whose file of Keras's forgets what they are."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from replicas import Case, check_equal, chosen, train_all
from test_by_value import Net, Scaled

import pybackend
from pybackend.errors import ClusterError, InputError
from pybackend.job.job import MODEL_FILE, MODEL_OBJECTS
from pybackend.model.compare import find_differences
from pybackend.model.transfer import encode_file, encode_objects, read_objects, restore

# The first test waits until the workers have trained all cases.
pytestmark = pytest.mark.timeout(300)
layers = keras.layers
_RNG = np.random.default_rng(5)
X = _RNG.normal(size=(101, 8)).astype("float32")
Y = _RNG.integers(0, 3, 101)
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Capped(keras.constraints.Constraint):
    """A constraint with an argument and no `get_config`."""

    def __init__(self, most: float) -> None:
        self.most = most

    def __call__(self, w: Any) -> Any:
        """Cut off."""
        return keras.ops.clip(w, -self.most, self.most)


class Slow(keras.optimizers.SGD):
    """An optimizer with an argument that its `get_config` does not know."""

    def __init__(self, factor: float) -> None:
        super().__init__(0.1)
        self.factor = factor

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """A part of SGD's."""
        super().update_step(gradient * self.factor, variable, learning_rate)


class Above(keras.metrics.Metric):
    """How many logits are above a number; no `get_config`."""

    def __init__(self, bound: float) -> None:
        super().__init__(name="above")
        self.bound = bound
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count."""
        above = keras.ops.cast(y_pred > self.bound, "float32")
        self.count.assign_add(keras.ops.sum(above))

    def result(self) -> Any:
        """The number."""
        return self.count


class Tempered(keras.Model):
    """Uses an attribute that is set after construction, and a compile() of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)
        self.temperature = 1.0

    def compile(self, *arguments: Any, alpha: float = 1.0, **options: Any) -> None:
        """Keras's, and a weight of the loss."""
        super().compile(*arguments, **options)
        self.alpha = alpha

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        """Keras's, weighted."""
        return self.alpha * super().compute_loss(*arguments, **options)

    def call(self, x: Any) -> Any:
        """Cooled logits."""
        return self.dense(x) / self.temperature


def _compiled(model: Any, optimizer: Any = "sgd", loss: Any = LOGITS, **options: Any) -> Any:
    model.compile(optimizer, loss, **options)
    return model


def _stack(*parts: Any) -> Any:
    return keras.Sequential([keras.Input((8,)), *parts, layers.Dense(3)])


def _with_factors() -> Any:
    model = _stack(layers.Dense(6, activation="tanh"))
    model.layers[0].enable_lora(2)
    return _compiled(model)


def _with_flags() -> Any:
    model = _stack(layers.Dense(6, activation="tanh"))
    model.layers[0].kernel.trainable = False
    return _compiled(model)


def _without_decay() -> Any:
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.3)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return _compiled(_stack(layers.Dense(6, activation="tanh")), optimizer)


def _tempered() -> Any:
    model = Tempered()
    model.temperature = 2.5
    model.compile("sgd", LOGITS, alpha=0.25)
    return model


def _local() -> Any:
    class Plain(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [layers.Dense(5, activation="tanh"), layers.Dense(3)]

        def call(self, x: Any) -> Any:
            for part in self.parts:
                x = part(x)
            return x

    return _compiled(Plain())


CASES: dict[str, Case] = {
    name: Case(build, (X, Y))
    for name, build in {
        "low-rank factors": _with_factors,
        "a variable that is not trained": _with_flags,
        "variables without decay": _without_decay,
        "arguments of an unbuilt model": lambda: _compiled(Net(16)),
        "arguments of a loss": lambda: _compiled(_stack(), "sgd", Scaled(3.0)),
        "arguments of a metric": lambda: _compiled(_stack(), metrics=[Above(0.3)]),
        "arguments of a constraint": lambda: _compiled(
            _stack(layers.Dense(6, kernel_constraint=Capped(0.1)))
        ),
        "arguments of an optimizer": lambda: _compiled(_stack(), Slow(0.2)),
        "attributes and own compile": _tempered,
        "a class of a function": _local,
        "a function as activation": lambda: _compiled(
            _stack(layers.Dense(6, activation=lambda x: keras.ops.sin(x)))
        ),
        "a lambda": lambda: _compiled(_stack(layers.Lambda(lambda x: x * 2))),
    }.items()
}


@pytest.fixture(scope="module")
def trained(request: Any, tmp_path_factory: Any) -> dict[str, Any]:
    return train_all(chosen(CASES, request), tmp_path_factory.mktemp("transfer"))


@pytest.mark.parametrize("name", CASES)
def test_what_trains_is_what_was_passed(name: str, trained: dict[str, Any]) -> None:
    check_equal(CASES[name], trained[name])


def test_a_callback_acts_on_the_model_that_trains() -> None:
    class Freeze(keras.callbacks.Callback):
        def __init__(self, bias: Any) -> None:
            super().__init__()
            self.bias = bias

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.bias.assign([7.0, 8.0, 9.0])

    model = _compiled(_stack())
    callbacks = [Freeze(model.layers[-1].bias)]
    result = pybackend.barrier_train(
        None, model, (X, Y), workers=2, epochs=1, callbacks=callbacks, verbose=0
    )
    np.testing.assert_array_equal(result.model.layers[-1].bias.numpy(), [7.0, 8.0, 9.0])
    assert not np.array_equal(model.layers[-1].bias.numpy(), [7.0, 8.0, 9.0])


def test_the_result_is_of_the_class_that_was_passed_and_can_be_trained_again() -> None:
    result = pybackend.barrier_train(None, _tempered(), (X, Y), workers=2, epochs=1, verbose=0)
    assert isinstance(result.model, Tempered)
    assert (result.model.temperature, result.model.alpha) == (2.5, 0.25)
    again = pybackend.barrier_train(None, result, (X, Y), workers=2, epochs=1, verbose=0)
    assert isinstance(again.model, Tempered)


def test_what_can_travel_neither_way_is_refused_before_anything_starts() -> None:
    model = _compiled(_stack(), "sgd", Scaled(3.0))
    model.lock = threading.Lock()
    with pytest.raises(pybackend.SerializationError, match=r"(?s)Scaled.*cannot pickle.*lock"):
        pybackend.barrier_train(None, model, (X, Y), workers=2, verbose=0)
    model = _with_flags()
    model.lock = threading.Lock()
    with pytest.raises(InputError, match=r"kernel\.trainable=False.*lock.*a function that builds"):
        pybackend.barrier_train(None, model, (X, Y), workers=2, verbose=0)


def test_a_model_that_cannot_be_pickled_goes_as_a_file_if_that_has_all_of_it() -> None:
    model = _compiled(_stack())
    model.lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        encode_objects(model, [], {})
    assert list(encode_file(model, {}, safe_mode=True, kind="train")) == [MODEL_FILE]


FORGOTTEN: dict[str, tuple[Callable[[], Any], str]] = {
    "flag": (_with_flags, r"kernel\.trainable=False"),
    "decay": (_without_decay, "_exclude_from_weight_decay"),
    "loss": (lambda: _compiled(_stack(), "sgd", Scaled(3.0)), "Scaled"),
    "optimizer": (lambda: _compiled(_stack(), Slow(0.2)), "Slow"),
    "attributes": (_tempered, "Tempered"),
    "units": (lambda: _compiled(Net(16)), "layers|weights"),
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_what_a_file_forgets_is_named(name: str) -> None:
    build, expected = FORGOTTEN[name]
    known = {"Scaled": Scaled, "Slow": Slow, "Tempered": Tempered, "Net": Net}
    with pytest.raises((InputError, pybackend.SerializationError), match=expected):
        encode_file(build(), known, safe_mode=True, kind="train")


def test_another_version_of_keras_is_named() -> None:
    content = encode_objects(_compiled(_stack()), [], {})[MODEL_OBJECTS]
    versions, _, pickled = content.partition(b"\n")
    older = json.dumps({**json.loads(versions), "keras": "3.0.5"}).encode()
    with pytest.raises(ClusterError, match=r"the driver has Keras 3\.0\.5, and .*python.* has 3\."):
        read_objects(older + b"\n" + pickled)


def test_predictions_need_less() -> None:
    model = _with_flags()
    with pytest.raises(InputError, match="trainable"):
        encode_file(model, {}, safe_mode=True, kind="train")
    encode_file(model, {}, safe_mode=True, kind="predict")


def test_a_model_restored_has_the_weights_of_the_file_and_a_new_optimizer() -> None:
    model = _local()
    model.fit(X, Y, verbose=0)
    content = encode_objects(model, [], {})[MODEL_OBJECTS]
    assert find_differences(model, read_objects(content)[0]) == []
    from pybackend.model.transfer import add_build_config, write_weights

    model.fit(X, Y, verbose=0)
    copy = restore(content, add_build_config(write_weights(model), model), "weights.h5")
    for one, other in zip(model.weights, copy.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert int(copy.optimizer.iterations) == 0
