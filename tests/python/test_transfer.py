"""Models are trained exactly as passed, even if Keras's file would lose a part."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import Case, check_equal, named
from test_by_value import Net, Scaled

import pybackend
from pybackend.core.api.sent_objects import add_custom_objects, encode_model
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.job import (
    EXTRAS,
    MODEL_DIGESTS,
    MODEL_FILE,
    MODEL_OBJECTS,
    TrainingJob,
    make_job,
)
from pybackend.core.model.by_value import take_snapshot
from pybackend.core.model.compare import find_differences, hash_weights
from pybackend.core.model.transfer import (
    describe_inputs,
    encode_file,
    encode_objects,
    read_objects,
    restore,
    write_weights,
)
from pybackend.core.model.view import ModelView

# The first test waits until the workers have trained all cases.
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
        """Clip the weights."""
        return keras.ops.clip(w, -self.most, self.most)


class Slow(keras.optimizers.SGD):
    """An optimizer with an argument that is not in its `get_config`."""

    def __init__(self, factor: float) -> None:
        super().__init__(0.1)
        self.factor = factor

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Apply a part of SGD's update."""
        super().update_step(gradient * self.factor, variable, learning_rate)


class Above(keras.metrics.Metric):
    """The number of logits above a bound; no `get_config`."""

    def __init__(self, bound: float) -> None:
        super().__init__(name="above")
        self.bound = bound
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count the logits."""
        above = keras.ops.cast(y_pred > self.bound, "float32")
        self.count.assign_add(keras.ops.sum(above))

    def result(self) -> Any:
        """Return the number."""
        return self.count


class Tempered(keras.Model):
    """Uses an attribute that is set after construction, and a compile() of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)
        self.temperature = 1.0

    def compile(self, *arguments: Any, alpha: float = 1.0, **options: Any) -> None:
        """Compile as Keras, with a weight of the loss."""
        super().compile(*arguments, **options)
        self.alpha = alpha

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        """Return Keras's loss, weighted."""
        return self.alpha * super().compute_loss(*arguments, **options)

    def call(self, x: Any) -> Any:
        """Return logits divided by the temperature."""
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


def _without_decay_of_some() -> Any:
    model = _stack(layers.Dense(6, activation="tanh"))
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.3)
    optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel])
    return _compiled(model, optimizer)


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


def _half_trained() -> Any:
    model = _stack(layers.Dense(6, activation="tanh"))
    model.layers[0].kernel.trainable = False
    return _compiled(model, keras.optimizers.SGD(0.05, momentum=0.9))


CASES: dict[str, Case] = {
    name: Case(build, (X, Y))
    for name, build in {
        "low-rank factors": _with_factors,
        "a variable that is not trained": _with_flags,
        "variables without decay": _without_decay,
        "variables without decay, listed": _without_decay_of_some,
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


# One of each type: `make test-full` trains the others, too.
DAILY = [
    "low-rank factors",
    "arguments of an unbuilt model",
    "arguments of a loss",
    "a class of a function",
    "attributes and own compile",
]


@pytest.mark.parametrize("name", named(CASES, DAILY))
def test_what_trains_is_what_was_passed(name: str, trained: dict[str, Any]) -> None:
    check_equal(CASES[name], trained[name], name=name)


@pytest.mark.full
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


@pytest.mark.full
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
    with pytest.raises(InputError, match=r"kernel\.trainable=False.*a function that builds.*lock"):
        pybackend.barrier_train(None, model, (X, Y), workers=2, verbose=0)


@pytest.mark.full
def test_a_model_that_cannot_be_pickled_goes_as_a_file_if_that_has_all_of_it() -> None:
    model = _compiled(_stack())
    model.lock = threading.Lock()
    with pytest.raises(InputError, match="lock"):
        encode_objects(model, {})
    assert list(encode_file(ModelView(model), {}, safe_mode=True, kind="train")) == [MODEL_FILE]


def _fit(model: Any) -> None:
    model.fit(X, Y, verbose=0)
    model.predict(X, verbose=0)


USES: dict[str, Callable[[Any, Path], object]] = {
    "fit": lambda model, _: _fit(model),
    "SavedModel": lambda model, path: model.export(path / "exported", verbose=False),
    "ONNX": lambda model, path: model.export(path / "x.onnx", "onnx", verbose=False),
    "HDF5": lambda model, path: model.save(path / "model.h5"),
    "Keras": lambda model, path: model.save(path / "model.keras"),
    "weights": lambda model, path: model.save_weights(path / "model.weights.h5"),
    "summary": lambda model, _: model.summary(print_fn=lambda *_, **__: None),
    "compile": lambda model, _: model.compile("adam", "mse"),
    "int8": lambda model, _: model.quantize("int8"),
    "clone": lambda model, _: keras.models.clone_model(model),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.filterwarnings("ignore")  # of Keras and tf2onnx, about themselves
def test_the_file_has_all_of_a_model_that_was_used(use: str, tmp_path: Path) -> None:
    model = _compiled(_stack(layers.Dense(2)))
    _fit(model)
    USES[use](model, tmp_path)
    encode_file(ModelView(model), {}, safe_mode=True, kind="train", rows=(X[:8], Y[:8]))


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
        encode_file(ModelView(build()), known, safe_mode=True, kind="train")


def test_another_version_of_keras_is_named() -> None:
    content = encode_objects(_compiled(_stack()), {})[MODEL_OBJECTS]
    versions, _, pickled = content.partition(b"\n")
    older = json.dumps({**json.loads(versions), "keras": "3.0.5"}).encode()
    with pytest.raises(ClusterError, match=r"the driver has Keras 3\.0\.5, but .*python.* has 3\."):
        read_objects(older + b"\n" + pickled)


def test_predictions_need_less() -> None:
    model = _with_flags()
    with pytest.raises(InputError, match="trainable"):
        encode_file(ModelView(model), {}, safe_mode=True, kind="train")
    encode_file(ModelView(model), {}, safe_mode=True, kind="predict")


def test_a_model_restored_has_the_weights_of_the_file_or_is_refused() -> None:
    model = _local()
    model.fit(X, Y, verbose=0)
    snapshot = take_snapshot(model)
    assert find_differences(ModelView(model), ModelView(snapshot())) == []
    before = hash_weights(model)
    model.fit(X, Y, verbose=0)
    file, inputs = write_weights(model), describe_inputs(X[:1])
    copy = restore(snapshot(), file, "weights.h5", inputs, hash_weights(model))
    for one, other in zip(model.weights, copy.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    with pytest.raises(pybackend.SerializationError, match="cannot be loaded into a copy"):
        restore(snapshot(), file, "weights.h5", inputs, before)


def test_a_file_that_lacks_a_weight_is_refused_before_the_training() -> None:
    class Forgetful(layers.Dense):
        def save_own_variables(self, store: Any) -> None:
            store["0"] = self.kernel

        def load_own_variables(self, store: Any) -> None:
            self.kernel.assign(store["0"])

    class Whole(keras.Model):
        def __init__(self, units: int) -> None:
            super().__init__()
            self.dense = Forgetful(units)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    model = _compiled(Whole(3))
    model(X)
    with pytest.raises(pybackend.WorkerFailedError, match="does not contain all of the weights"):
        pybackend.barrier_train(None, model, (X, Y), workers=2, epochs=1, verbose=0)


def _files(model: Any, callbacks: Any = ()) -> set[str]:
    arguments = {"workers": 2, "epochs": 1, "batch_size": 8, "seed": 1, "timeout": 30}
    job = replace(make_job(TrainingJob, arguments), model_source="file")
    known = add_custom_objects(ModelView(model), None)
    return set(encode_model(ModelView(model), known, job, callbacks)) - {EXTRAS, MODEL_DIGESTS}


def test_a_model_that_its_file_has_all_of_goes_as_a_file() -> None:
    plain = _compiled(_stack())
    assert _files(plain) == {MODEL_FILE}
    assert _files(_tempered()) == {MODEL_OBJECTS}
    hold = keras.callbacks.Callback()
    assert _files(plain, [hold]) == {MODEL_FILE}
    hold.layer = plain.layers[-1]
    assert _files(plain, [hold]) == {MODEL_OBJECTS}


class Hidden(layers.Layer):
    """Stores its argument where only its own methods look."""

    def __init__(self, factor: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self._factor = factor

    def call(self, x: Any) -> Any:
        """Return the scaled value."""
        return self._factor * x


class Written(Hidden):
    """Has a configuration."""

    def get_config(self) -> dict[str, Any]:
        """Return the configuration with the argument."""
        return {**super().get_config(), "factor": self._factor}


USUAL: dict[str, Callable[[], Any]] = {
    "two outputs": lambda: _two_outputs(),
    "metrics": lambda: _compiled(
        _stack(), metrics=["accuracy"], weighted_metrics=["sparse_categorical_accuracy"]
    ),
    "normalization": lambda: _compiled(_stack(layers.BatchNormalization(), layers.Dropout(0.1))),
    "schedule": lambda: _compiled(
        _stack(), keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 9))
    ),
    "a custom layer with a configuration": lambda: _compiled(_stack(Written(3.0))),
}


def _two_outputs() -> Any:
    inputs = keras.Input((8,))
    model = keras.Model(inputs, {"a": layers.Dense(3)(inputs), "b": layers.Dense(3)(inputs)})
    return _compiled(model, "adam", {"a": LOGITS, "b": LOGITS}, metrics={"a": ["accuracy"]})


@pytest.mark.full
@pytest.mark.parametrize("name", USUAL)
def test_a_model_in_use_goes_as_a_file(name: str) -> None:
    model = USUAL[name]()
    y = {"a": Y, "b": Y} if name == "two outputs" else Y
    assert _files(model) == {MODEL_FILE}
    model.fit(X, y, verbose=0)
    model.evaluate(X, y, verbose=0)
    model.predict(X, verbose=0)
    assert _files(model) == {MODEL_FILE}


def test_an_attribute_that_only_its_own_class_reads_is_compared() -> None:
    forgets = Hidden()
    assert _files(_compiled(_stack(forgets))) == {MODEL_FILE}
    forgets._factor = 3.0
    assert _files(_compiled(_stack(forgets))) == {MODEL_OBJECTS}


class Factor:
    """A value without attributes to compare."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


class Helped(layers.Layer):
    """Calls an object that is not in its configuration."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.factor = Factor(1.0)

    def call(self, x: Any) -> Any:
        """Return the scaled value."""
        return self.factor.value * x


def test_a_copy_must_compute_the_same() -> None:
    helped = Helped()
    model = _compiled(_stack(helped, layers.BatchNormalization(), layers.Dropout(0.5)))
    known = add_custom_objects(ModelView(model), None)
    before = [v.numpy() for v in model.variables]
    encode_file(ModelView(model), known, True, "train", (X[:8], Y[:8]))
    helped.factor = Factor(2.0)
    encode_file(ModelView(model), known, True, "train")
    with pytest.raises(InputError, match="loses something that changes its loss"):
        encode_file(ModelView(model), known, True, "train", (X[:8], Y[:8]))
    assert MODEL_OBJECTS in encode_objects(model, {"custom_objects": known}, (X[:8], Y[:8]))
    for value, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(value, variable.numpy())


class WeighsClasses(keras.losses.Loss):
    """Stores a tensor, and has no `get_config`."""

    def __init__(self, weights: Any = (1.0, 1.0, 1.0), **options: Any) -> None:
        super().__init__(**options)
        self.weights = tf.constant(weights)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the weighted entropy."""
        entropy = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        return entropy * tf.gather(self.weights, tf.reshape(tf.cast(y_true, tf.int32), [-1]))


def _scaled(factor: float) -> Any:
    def loss(y: Any, predicted: Any) -> Any:
        return factor * keras.losses.sparse_categorical_crossentropy(y, predicted, True)

    return loss


def _two_of_a_name() -> Any:
    inputs = keras.Input((8,))
    model = keras.Model(inputs, {"a": layers.Dense(3)(inputs), "b": layers.Dense(3)(inputs)})
    return _compiled(model, "sgd", {"a": _scaled(1.0), "b": _scaled(100.0)})


def _with_replaced_call() -> Any:
    dense = layers.Dense(3)
    model = _compiled(keras.Sequential([keras.Input((8,)), dense]))
    own = dense.call
    dense.call = lambda x, training=None: 5 * own(x)
    return model


HIDDEN: dict[str, Callable[[], Any]] = {
    "the delta of Huber": lambda: _compiled(_stack(), "sgd", keras.losses.Huber(0.5)),
    "a tensor": lambda: _compiled(_stack(), "sgd", WeighsClasses((1.0, 10.0, 100.0))),
    "two of a name": _two_of_a_name,
    # A file's optimizer is built before its weights are read.
    "a state that starts from the weights": lambda: _compiled(
        _stack(), keras.optimizers.ScheduleFreeAdamW()
    ),
    "a method of an object": _with_replaced_call,
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_hides_from_a_configuration_is_seen_without_rows(name: str) -> None:
    assert _files(HIDDEN[name]()) == {MODEL_OBJECTS}


def test_a_callback_that_refers_to_the_model_travels_with_it() -> None:
    model = _compiled(_stack())
    kernel = model.layers[-1].kernel
    clear = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: kernel.assign(kernel * 0)
    )
    assert _files(model, [clear]) == {MODEL_OBJECTS}
    assert _files(model, [keras.callbacks.LambdaCallback(on_epoch_end=lambda e, _: e)]) == {
        MODEL_FILE
    }


def test_the_callers_model_and_random_numbers_stay_as_they_are() -> None:
    model = _compiled(
        _stack(Hidden(2.0), layers.SpectralNormalization(layers.Dense(4)), layers.Dropout(0.5)),
        "sgd",
        WeighsClasses((1.0, 2.0, 3.0)),
    )
    before = [v.numpy() for v in model.variables]
    state = random.getstate()
    encode_objects(model, {}, (X[:8], Y[:8]))
    view = ModelView(model)
    with pytest.raises(InputError):
        encode_file(view, add_custom_objects(view, None), True, "train", (X[:8], Y[:8]))
    assert random.getstate() == state
    for value, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(value, variable.numpy())


@pytest.mark.full
def test_words_that_a_layer_has_learned_come_back() -> None:
    texts = np.array(["the cat sat", "a dog ran"] * 10)
    words = layers.TextVectorization(output_sequence_length=4)
    words.adapt(texts)
    hidden = [layers.Embedding(20, 4), layers.GlobalAveragePooling1D(), layers.Dense(3)]
    model = _compiled(keras.Sequential([keras.Input((1,), dtype="string"), words, *hidden]))
    data = texts, np.arange(20) % 3
    result = pybackend.barrier_train(None, model, data, workers=2, verbose=0)
    assert result.model_format == "keras"
    assert result.model.layers[0].get_vocabulary() == words.get_vocabulary()
    found = pybackend.barrier_predict(None, result, texts, workers=2, verbose=0)
    expected = result.model.predict(tf.constant(texts[:, None]), verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.full
def test_a_feature_space_with_learned_bins_trains_as_in_one_process() -> None:
    space = keras.utils.FeatureSpace(
        {
            "age": keras.utils.FeatureSpace.float_discretized(num_bins=5),
            "sex": keras.utils.FeatureSpace.string_categorical(num_oov_indices=0),
        }
    )
    age = _RNG.uniform(20, 80, 64).astype("float32")
    columns = {"age": age, "sex": np.where(age > 50, "f", "m")}
    space.adapt(tf.data.Dataset.from_tensor_slices(columns))
    outputs = layers.Dense(3)(space.get_encoded_features())
    model = _compiled(keras.Model(space.get_inputs(), outputs))
    rows = {name: column[:, None] for name, column in columns.items()}
    labels = (age > 50).astype("int64")
    result = pybackend.barrier_train(
        None, model, (rows, labels), workers=2, batch_size=16, shuffle=False, verbose=0
    )
    tensors = {name: tf.constant(column) for name, column in rows.items()}
    model.fit(tensors, labels, batch_size=32, shuffle=False, verbose=0)
    for one, other in zip(model.weights, result.model.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)


def test_what_only_adapt_forgets_is_told_from_what_a_layer_computes_with() -> None:
    class Shifting(layers.Discretization):
        def call(self, inputs: Any) -> Any:
            return super().call(inputs + self.summary[0, 0])

    for kind, expected in ((layers.Discretization, 0), (Shifting, 1)):
        layer = kind(num_bins=3)
        layer.adapt(X[:, :1])
        model = keras.Sequential([keras.Input((1,)), layer, layers.Dense(1)])
        copy = keras.models.clone_model(model)
        copy.set_weights(model.get_weights())
        assert len(find_differences(ModelView(model), ModelView(copy))) == expected


@pytest.mark.full
def test_a_deep_model_by_value() -> None:
    model = _compiled(_stack(*[layers.Dense(8) for _ in range(150)]))
    assert not find_differences(ModelView(model), ModelView(take_snapshot(model)()))
    copy = read_objects(encode_objects(model, {})[MODEL_OBJECTS])["model"]
    assert len(copy.layers) == 151


@pytest.mark.full
def test_a_class_of_the_function_that_builds_the_model_comes_back() -> None:
    def build() -> Any:
        class Plain(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.embed = layers.Embedding(9, 2)
                self.dense = layers.Dense(3)

            def call(self, x: Any) -> Any:
                return self.dense(keras.ops.mean(self.embed(x), axis=1))

        return _compiled(Plain())

    x = np.abs(X * 2).astype("int64").clip(0, 8)
    result = pybackend.barrier_train(None, build, (x, Y), workers=2, epochs=1, verbose=0)
    assert result.model_format == "weights.h5"
    assert type(result.model).__name__ == "Plain"
    again = pybackend.barrier_evaluate(None, result, (x, Y), workers=2, verbose=0)
    assert again["loss"] == pytest.approx(result.model.evaluate(x, Y, verbose=0), rel=1e-5)


@pytest.mark.parametrize("build", [lambda: _compiled(_stack(), "adam"), _half_trained])
@pytest.mark.full
def test_training_a_result_again_goes_on_as_one_process_does(build: Any) -> None:
    keras.utils.set_random_seed(1)
    single = build()
    options = {"workers": 2, "batch_size": 16, "shuffle": False, "verbose": 0}
    result = pybackend.barrier_train(None, single, (X, Y), epochs=1, **options)
    again = pybackend.barrier_train(None, result, (X, Y), epochs=1, **options)
    for _ in range(2):
        for batch in pybackend.replay_batches(len(X), 2, 16, seed=0, epoch=0, shuffle=False):
            single.train_on_batch(X[batch], Y[batch])
    for one, other in zip(single.weights, again.model.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-6)


def test_the_classes_of_this_process_stay_as_they_are() -> None:
    call, scale = Tempered.call, Scaled.call
    encode_objects(_compiled(Tempered(), "sgd", Scaled(2.0)), {})
    take_snapshot(_tempered())()
    assert Tempered.call is call
    assert Scaled.call is scale
