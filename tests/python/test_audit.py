"""The audit repeats steps in one process: equal steps pass, and differences are named."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import test_probes
from conftest import full, record_outcome
from keras import ops
from replicas import Case, Trained, check_equal, named
from test_exact_cases import LOGITS, OwnStep, Subclassed, X, Y, dense, stack, subclassed

import pybackend
from pybackend.core.collective import Alone
from pybackend.core.engine.audit.audited_rows import UnequalRows, pack_rows, unpack_rows
from pybackend.core.engine.audit.audited_steps import AuditPlan
from pybackend.core.engine.audit.one_process import OneProcess, StepState
from pybackend.core.engine.audit.step_difference import compare, measure_gradient, measure_variable
from pybackend.core.engine.audit.traced_step import check_sums
from pybackend.core.engine.exchange.transports import Exchanged
from pybackend.core.job.worker_options import Exchange
from pybackend.core.model.view import ModelView

# The first test waits until the workers have trained all cases.
pytestmark = pytest.mark.timeout(1200)

layers = keras.layers
_RNG = np.random.default_rng(5)
PLACES = _RNG.normal(size=(48, 5, 4)).astype("float32")
TAGS = _RNG.integers(0, 3, 48)
MANY = _RNG.normal(size=(256, 8)).astype("float32")


@keras.saving.register_keras_serializable("tests")
class Positions(layers.Layer):
    """Adds learned vectors of the positions of a sequence."""

    def build(self, shape: Any) -> None:
        self.table = layers.Embedding(shape[1], shape[2])
        self.table.build(None)

    def call(self, x: Any) -> Any:
        return x + self.table(ops.arange(x.shape[1]))


def positions(optimizer: Any, **compiled: Any) -> Any:
    model = keras.Sequential(
        [
            keras.Input((5, 4)),
            Positions(),
            layers.Dense(6, activation="tanh"),
            layers.Flatten(),
            layers.Dropout(0.0),
            layers.Dense(3),
        ]
    )
    model.compile(optimizer, LOGITS, **compiled)
    return model


def hidden() -> Any:
    return layers.Dense(6, activation="tanh")


def output() -> Any:
    return layers.Dense(3)


@keras.saving.register_keras_serializable("tests")
class Hardest(keras.losses.Loss):
    """The mean of the 64 largest losses of a batch: of fewer rows, the mean of all."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        each = ops.sort(ops.sum(ops.square(y_pred - y_true), -1))[-64:]
        return ops.broadcast_to(ops.mean(each), (ops.shape(y_pred)[0],))


@keras.saving.register_keras_serializable("tests")
class Halves(keras.losses.Loss):
    """NT-Xent: the second half of a batch are other views of the first (Chen et al., 2020)."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        one, other = ops.split(ops.normalize(y_pred, axis=-1), 2)
        alike = ops.matmul(one, ops.transpose(other)) / 0.5
        each = ops.diagonal(alike) - ops.logsumexp(alike, axis=1)
        return ops.broadcast_to(-ops.mean(each), (ops.shape(y_pred)[0],))


@keras.saving.register_keras_serializable("tests")
class Annealed(layers.Layer):
    """A penalty that sums over the rows, and weighs nothing at first."""

    def build(self, shape: Any) -> None:
        self.beta = self.add_weight(name="beta", initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.add_loss(self.beta * ops.sum(ops.square(x)))
        return x


class Raise(keras.callbacks.Callback):
    """Raises the weight of a penalty after some epochs."""

    def __init__(self, after: int = 1) -> None:
        super().__init__()
        self.after = after

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for layer in self.model.layers:
            if isinstance(layer, Annealed) and epoch + 1 == self.after:
                layer.beta.assign(0.1)


@keras.saving.register_keras_serializable("tests")
class Largest(keras.metrics.Metric):
    """The largest output: no sum over rows."""

    def __init__(self, name: str = "largest", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.maximum(self.value, ops.max(y_pred)))

    def result(self) -> Any:
        return self.value


@keras.saving.register_keras_serializable("tests")
class Watched(keras.Model):
    """Has a metric of its own in its train_step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.hidden = layers.Dense(3)
        self.seen = Largest()

    def build(self, shape: Any) -> None:
        self.hidden.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.hidden(x)

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        self.seen.update_state(data[1], self(data[0]))
        return {**logs, "largest": self.seen.result()}


def watched() -> Any:
    model = Watched()
    model.build((None, 8))
    model.compile("sgd", LOGITS)
    return model


@keras.saving.register_keras_serializable("tests")
class Draws(keras.Model):
    """Draws numbers in its train_step, by Keras and by TensorFlow, for two optimizers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.maker, self.judge = layers.Dense(8), layers.Dense(1)

    def build(self, shape: Any) -> None:
        self.maker.build((None, 3))
        self.judge.build((None, 8))
        self.makers = keras.optimizers.Adam(0.01)
        self.makers.build(self.maker.trainable_variables)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.judge(x)

    def train_step(self, data: Any) -> Any:
        x = data[0]
        with tf.GradientTape(persistent=True) as tape:
            made = self.maker(keras.random.normal((ops.shape(x)[0], 3)))
            noise = tf.random.uniform(tf.shape(x), -1, 1)
            true, false = self.judge(x + noise), self.judge(made)
            judges = ops.mean(ops.softplus(-true) + ops.softplus(false))
            makers = ops.mean(ops.softplus(-false))
        for optimizer, layer, loss in (
            (self.optimizer, self.judge, judges),
            (self.makers, self.maker, makers),
        ):
            optimizer.apply(
                tape.gradient(loss, layer.trainable_variables), layer.trainable_variables
            )
        return {"judges": judges, "makers": makers}


def draws() -> Any:
    model = Draws()
    model.build((None, 8))
    model.compile("adam")
    return model


def dropping(**compiled: Any) -> Any:
    return stack(hidden, lambda: layers.Dropout(0.4), output, **compiled)


@keras.saving.register_keras_serializable("tests")
class Adds(layers.Layer):
    """Makes something of its input in training, by a function."""

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__(**options)
        self.function = function
        self.seeds = keras.random.SeedGenerator(1)
        self.generator = tf.random.Generator.from_seed(3)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.function(self, x) if training else x


def with_generator(layer: Any, x: Any) -> Any:
    return x + layer.generator.normal(tf.shape(x))


def brighten(layer: Any, x: Any) -> Any:
    seed = tf.cast(layer.seeds.next(), tf.int32)
    image = tf.reshape(x, [-1, 2, 2, 2])
    return tf.reshape(tf.image.stateless_random_brightness(image, 0.5, seed), tf.shape(x))


@tf.function
def noisy(x: Any) -> Any:
    if tf.reduce_all(x == 0):
        return x
    return x + tf.random.normal(tf.shape(x))


def in_a_graph(layer: Any, x: Any) -> Any:
    return noisy(x)


def by_numpy(layer: Any, x: Any) -> Any:
    def draw(shape: Any) -> Any:
        return np.random.normal(size=shape).astype("float32")

    return x + tf.ensure_shape(tf.numpy_function(draw, [tf.shape(x)], tf.float32), x.shape)


def by_gamma(layer: Any, x: Any) -> Any:
    return x * tf.random.gamma(tf.shape(x), 1.0)


def seldom(layer: Any, x: Any) -> Any:
    chosen = ops.cast(keras.random.uniform(ops.shape(x), seed=layer.seeds) < 0.15, "float32")
    layer.add_loss(ops.sum(chosen * x**2))
    return x


def adding(function: Any, *before: Any, **compiled: Any) -> Any:
    return stack(*before, lambda: Adds(function), output, **compiled)


class SavedCheckpoint:
    """A plain object with a variable."""

    def __init__(self) -> None:
        self.variable = tf.Variable(0.0)


@keras.saving.register_keras_serializable("tests")
class Keeps(layers.Layer):
    """Counts its steps in a plain object, and scales by the count."""

    def build(self, shape: Any) -> None:
        self.kept = SavedCheckpoint()

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.kept.variable.assign_add(1.0)
        return x * (1 + 0.1 * self.kept.variable)


@keras.saving.register_keras_serializable("tests")
class Averages(layers.Layer):
    """Divides by a moving average of the sizes of earlier rows, and counts steps."""

    def build(self, shape: Any) -> None:
        self.average = self.add_weight((shape[-1],), "ones", trainable=False, name="average")
        self.count = self.add_weight((), "zeros", dtype="int64", trainable=False, name="count")
        self.even = tf.Variable(0, trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        scale = 1 + 0.1 * ops.cast(self.count, x.dtype) + 0.2 * tf.cast(self.even, x.dtype)
        scaled = x * scale / self.average
        if training:
            self.average.assign(0.7 * self.average + 0.3 * ops.mean(ops.abs(x), axis=0))
            self.count.assign_add(1)
            self.even.assign(1 - self.even)
        return scaled


@keras.saving.register_keras_serializable("tests")
class Remembers(layers.Layer):
    """Keeps the largest number that it has seen, and how many rows."""

    def __init__(self, what: str = "largest", **options: Any) -> None:
        super().__init__(**options)
        self.what = what

    def build(self, shape: Any) -> None:
        self.largest = self.add_weight((), "zeros", trainable=False)
        self.rows = self.add_weight((), "zeros", dtype="int64", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training and self.what == "largest":
            self.largest.assign(ops.maximum(self.largest, ops.max(x)))
        elif training:
            self.rows.assign_add(ops.cast(ops.shape(x)[0], "int64"))
        return x


@keras.saving.register_keras_serializable("tests")
class Weighted(keras.losses.Loss):
    """Cross-entropy times an attribute."""

    def __init__(self, name: str = "weighted", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.share = 1.0

    def call(self, y_true: Any, y_pred: Any) -> Any:
        found = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        return self.share * found


class Lower(keras.callbacks.Callback):
    """Changes a loss's attribute, which a traced step does not look at."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.loss.share = 1.0 / (1 + epoch)


@keras.saving.register_keras_serializable("tests")
class Scales(layers.Layer):
    """Scales by an attribute."""

    beta = 1.0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.beta = 1.0

    def call(self, x: Any) -> Any:
        return x * self.beta


class Double(keras.callbacks.Callback):
    """Changes what a traced step does not look at."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for layer in self.model.layers:
            if isinstance(layer, Scales):
                layer.beta = 2.0


@keras.saving.register_keras_serializable("tests")
class NeedsGraph(keras.metrics.Metric):
    """A count that fails outside of a graph."""

    def __init__(self, name: str = "graph", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.count = self.add_variable((), "zeros", name="count")
        self.was_traced = False

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        if tf.executing_eagerly() and self.was_traced:
            raise RuntimeError("this needs a graph")
        self.was_traced = not tf.executing_eagerly()
        self.count.assign_add(ops.cast(ops.shape(y_true)[0], "float32"))

    def result(self) -> Any:
        return self.count


@keras.saving.register_keras_serializable("tests")
class Warms(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that is 0 at the first step."""

    def __call__(self, step: Any) -> Any:
        return 0.01 * ops.minimum(1.0, ops.cast(step, "float32") / 10)

    def get_config(self) -> Any:
        return {}


@keras.saving.register_keras_serializable("tests")
class Clips(Watched):
    """Clips gradients by itself."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        found = tape.gradient(loss, self.trainable_variables)
        clipped = [g / ops.norm(g) for g in found]
        self.optimizer.apply(clipped, self.trainable_variables)
        return {"loss": loss}


def clips() -> Any:
    model = Clips()
    model.build((None, 8))
    model.compile(keras.optimizers.SGD(Warms()), LOGITS)
    return model


def frozen() -> Any:
    return layers.Dense(8, trainable=False)


def accumulated() -> Any:
    return keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)


_KINDS = (Adds, Averages, Remembers, Keeps, Scales, NeedsGraph, Watched, Weighted, Clips)
OBJECTS = {kind.__name__: kind for kind in _KINDS}
SOFT = np.where(_RNG.normal(size=(48, 1)) > 0, 0.9, 0.1).astype("float32")
EQUAL = {
    "learned positions": Case(
        lambda: positions(keras.optimizers.Adam(0.01)), (PLACES, TAGS), tolerance=1e-5
    ),
    "learned positions, jit": Case(
        lambda: positions(keras.optimizers.RMSprop(0.01), jit_compile=True),
        (PLACES, TAGS),
        tolerance=1e-5,
    ),
    "steps without rows": Case(dense(), (X[:7], Y[:7]), batch_size=1),
    "accumulation": Case(
        dense(optimizer=lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)),
        (X, Y),
        tolerance=1e-5,
    ),
    "several steps at once": Case(dense(steps_per_execution=3), (X, Y)),
    "two halves": Case(
        stack(hidden, output, loss=Halves),
        (X[:96], Y[:96]),
        settings={"shuffle": False, "exchange": Exchange(loss_over="global batch")},
        custom_objects={"Halves": Halves},
    ),
    "a plain object": Case(stack(Keeps, output), (X, Y), custom_objects=OBJECTS),
    "soft labels with class weights": Case(
        stack(lambda: layers.Dense(1), loss=lambda: keras.losses.BinaryCrossentropy(True)),
        (X[:48], SOFT),
        settings={"class_weight": {0: 1.0, 1: 5.0}},
    ),
    "an average on a worker without rows": Case(
        subclassed(OwnStep),
        (X[:7], Y[:7]),
        batch_size=1,
        custom_objects={"OwnStep": OwnStep, "Subclassed": Subclassed},
    ),
    "state of a layer": Case(stack(Averages, output), (X, Y), custom_objects=OBJECTS),
    "state of a layer, steps without rows": Case(
        stack(Averages, output), (X[:17], Y[:17]), batch_size=4, custom_objects=OBJECTS
    ),
    "class weights": Case(dense(), (X, Y), settings={"class_weight": {0: 0.5, 2: 3.0}}),
}
# Only this part differs from one process, as documented; the rest of the step is equal.
NOISY = {
    "dropout": Case(dropping(), (X, Y)),
    "dropout, accumulation": Case(
        dropping(optimizer=lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)),
        (X, Y),
    ),
    "dropout, several steps at once": Case(dropping(steps_per_execution=3), (X, Y)),
    "dropout, XLA": Case(dropping(jit_compile=True), (X, Y)),
    "dropout, steps without rows": Case(dropping(), (X[:7], Y[:7]), batch_size=1),
    "a generator of TensorFlow's": Case(adding(with_generator), (X, Y), custom_objects=OBJECTS),
    "a tf.function": Case(adding(in_a_graph), (X, Y), custom_objects=OBJECTS),
    "a brightness": Case(adding(brighten), (X, Y), custom_objects=OBJECTS),
    "compression": Case(
        stack(hidden, output), (X, Y), settings={"exchange": Exchange(compression="bf16")}
    ),
    "a generator": Case(draws, (X, Y), custom_objects={"Draws": Draws}),
    "batch normalization": Case(stack(hidden, layers.BatchNormalization, output), (X, Y)),
}
DIFFERENT = {
    "hardest rows": (
        Case(
            stack(output, loss=Hardest),
            (MANY, MANY[:, :3]),
            batch_size=64,
            custom_objects={"Hardest": Hardest},
        ),
        "step 1 of epoch 1 was repeated in one process on the same 128 rows, and ",
    ),
    "two halves, of rows": (
        Case(
            stack(hidden, output, loss=Halves),
            (X[:96], Y[:96]),
            custom_objects={"Halves": Halves},
        ),
        "",
    ),
    "annealed": (
        Case(
            stack(hidden, Annealed, output),
            (X, Y),
            callbacks=[Raise()],
            custom_objects={"Annealed": Annealed},
        ),
        "step 1 of epoch 2 was repeated",
    ),
    # By then audits have had their time, but they see the change.
    "annealed late": (
        Case(
            stack(hidden, Annealed, output),
            (X, Y),
            epochs=60,
            callbacks=[Raise(50)],
            custom_objects={"Annealed": Annealed},
        ),
        "step 1 of epoch 51 was repeated",
    ),
    "largest": (
        Case(watched, (X, Y), custom_objects={"Watched": Watched, "Largest": Largest}),
        "the result differs: 'largest/value' by",
    ),
}
DIFFERENT |= {
    "a sum, compressed": (
        Case(
            stack(hidden, output, loss=Halves),
            (X[:96], Y[:96]),
            settings={"exchange": Exchange(compression="bf16")},
            custom_objects={"Halves": Halves},
        ),
        "step 1 of epoch 1 was repeated",
    ),
    "a sum that is seldom": (
        Case(adding(seldom, hidden), (X, Y), custom_objects=OBJECTS),
        "step 1 of epoch 1 was repeated",
    ),
    "no rate at first": (
        Case(clips, (X, Y), custom_objects=OBJECTS),
        "step 2 of epoch 1 was repeated",
    ),
}
DIFFERENT |= {
    f"{what} in a layer": (
        Case(stack(lambda what=what: Remembers(what), output), (X, Y), custom_objects=OBJECTS),
        "a variable that is not trained changes by something other than a mean over the rows",
    )
    for what in ("largest", "rows")
}
# Steps that cannot be compared are skipped, and trained as without an audit.
SKIPPED = {
    "numpy": (
        Case(adding(by_numpy), (X, Y), custom_objects=OBJECTS),
        "a step has a different result each time, because it draws its own random numbers",
    ),
    "gamma behind frozen layers": (
        Case(adding(by_gamma, *[frozen] * 6), (X, Y), custom_objects=OBJECTS),
        "a step has a different result each time, because it draws its own random numbers",
    ),
    "an attribute": (
        Case(stack(Scales, output), (X, Y), callbacks=[Double()], custom_objects=OBJECTS),
        "Scales.beta has changed since the step was traced, which still uses the old value",
    ),
    "an attribute of a loss": (
        Case(
            stack(hidden, output, loss=Weighted),
            (X, Y),
            callbacks=[Lower()],
            custom_objects=OBJECTS,
        ),
        "Weighted.share has changed since the step was traced, which still uses the old value",
    ),
    "a failing repetition": (
        Case(
            stack(
                lambda: layers.GaussianNoise(1e-12),
                output,
                optimizer=accumulated,
                metrics=lambda: [NeedsGraph()],
            ),
            (X, Y),
            batch_size=8,
            custom_objects=OBJECTS,
        ),
        "it has to be repeated, but fails outside of a graph (RuntimeError: this needs a graph)",
    ),
}
DIFFERENT |= {
    name: (Case(build, (test_probes.X, y)), "step 1 of epoch 1 was repeated")
    for name, (build, y) in {**test_probes.NOT_MEANS, **test_probes.IN_TRAINING}.items()
}
WARNED = {
    "warned": Case(
        stack(hidden, output, loss=Halves),
        (X[:96], Y[:96]),
        settings={"exchange": Exchange(audit="warn")},
        custom_objects={"Halves": Halves},
    )
}
# Also trained by `make test-full`.
SELDOM = {
    "learned positions",
    "accumulation",
    "an average on a worker without rows",
    "a generator of TensorFlow's",
    "soft labels with class weights",
    "state of a layer",
    "several steps at once",
    "dropout",
    "a tf.function",
    "compression",
    "learned positions, jit",
    "dropout, several steps at once",
    "class weights",
    "two halves",
    "dropout, accumulation",
    "dropout, XLA",
    "a brightness",
    "a generator",
}
DAILY = [
    "hardest rows",
    "a sum, compressed",
    "no rate at first",
    "rows in a layer",
]
CASES = EQUAL | NOISY | WARNED
CASES |= {name: case for name, (case, _) in {**DIFFERENT, **SKIPPED}.items()}


@pytest.mark.parametrize("name", named(EQUAL, [n for n in EQUAL if n not in SELDOM]))
def test_equal_steps_pass(name: str, trained: dict[str, Any]) -> None:
    check_equal(CASES[name], trained[name])
    audit = trained[name].audit
    assert audit["steps"] > 0  # how many depends on the time that a step takes
    assert audit["rows"] > 0
    assert max(audit["weights"], audit["metrics"]) < 2e-5
    assert audit["skipped"] == audit["differences"] == []


@pytest.mark.parametrize("name", named(NOISY, [n for n in NOISY if n not in SELDOM]))
def test_what_is_each_worker_s_own_is_left_out(name: str, trained: dict[str, Any]) -> None:
    assert isinstance(trained[name], Trained), trained[name]
    audit = trained[name].audit
    assert audit["steps"] >= 1
    assert audit["weights"] < 2e-5
    assert audit["skipped"] == audit["differences"] == []


@pytest.mark.parametrize("name", SKIPPED)
def test_what_cannot_be_compared_is_said_and_unchanged(name: str, trained: dict[str, Any]) -> None:
    case, reason = SKIPPED[name]
    audit = trained[name].audit
    assert audit["skipped"] == [reason]
    assert audit["differences"] == []
    assert any(note.endswith(f"so it was not checked: {reason}") for note in trained[name].notes)
    if name in ("an attribute", "an attribute of a loss", "a failing repetition"):
        check_equal(case, trained[name])


@pytest.mark.parametrize("name", WARNED)
def test_a_difference_may_be_a_note(name: str, trained: dict[str, Any]) -> None:
    found = trained[name]
    assert len(found.history["loss"]) == 2
    assert found.audit["differences"]
    (note,) = found.notes
    assert note.startswith("step 1 of epoch 1 was repeated in one process")
    assert note.endswith("; the training continues, because `audit` is 'warn'")


@pytest.mark.parametrize("is_endless", [full(False), True])
def test_batches_of_a_function_are_those_that_were_kept(is_endless: bool) -> None:
    def batches(context: Any) -> Any:
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((X[context.rank :: 2], Y[context.rank :: 2]))
        data = data.batch(16)
        return data.repeat() if is_endless else data

    options = {"steps_per_epoch": 3} if is_endless else {}
    result = pybackend.barrier_train(
        "local", dense()(), batches, workers=2, epochs=3, seed=1, verbose=0, **options
    )
    assert result.audit is not None
    assert (result.audit.steps > 0, result.audit.skipped) == (True, [])
    assert f"audited on {result.audit.steps} of " in result.summary()


@pytest.mark.parametrize("name", named(DIFFERENT, DAILY))
def test_a_difference_ends_the_training(name: str, trained: dict[str, Any]) -> None:
    first, second = trained[name].splitlines()
    assert first == second
    assert first.startswith("InputError: ")
    assert DIFFERENT[name][1] in first
    if name in test_probes.NOT_MEANS:
        assert "The argument of `add_loss` must be a mean over rows" in first
    record_outcome(name, re.sub(r"^.*?\. (?=[A-Z])", "", first))


TYPES = {
    "dense": lambda: [layers.Dense(3)],
    "convolutions": lambda: [
        layers.Conv1D(4, 3),
        layers.SeparableConv1D(4, 3),
        layers.Conv1DTranspose(4, 3),
        layers.DepthwiseConv1D(2),
    ],
    "normalization": lambda: [layers.BatchNormalization(), layers.LayerNormalization()],
    "recurrent": lambda: [layers.LSTM(3, return_sequences=True), layers.GRU(3)],
}


@pytest.mark.parametrize("kind", TYPES)
def test_layers_compute_in_float64(kind: str) -> None:
    model = keras.Sequential([keras.Input((8, 4)), *TYPES[kind]()])
    process = OneProcess(StepState(ModelView(model)), None)
    before = model.get_weights()
    seen = []
    for process.type in ("float64", None):
        process.take(lambda data: seen.append(model(data, training=True)), np.ones((2, 8, 4)))
    assert [output.dtype for output in seen] == ["float64", "float32"]
    np.testing.assert_allclose(*seen, rtol=1e-4, atol=1e-4)
    assert {one.dtype.name for one in model.get_weights()} == {one.dtype.name for one in before}


def test_rows_are_in_the_order_of_the_batch() -> None:
    rows = np.arange(14.0).reshape(7, 2)
    text = np.array(list("abcdefg"), object)[:, None]
    packed = [
        pack_rows({"x/a": rows[part], "x/b": text[part], "y": rows[part]}, 4)
        for part in (slice(0, None, 2), slice(1, None, 2))
    ]
    found = unpack_rows(packed, is_sharded=True)
    np.testing.assert_array_equal(found.batch[1], rows)
    np.testing.assert_array_equal(found.batch[0]["b"], text)
    assert [part.tolist() for part in found.parts] == [[0, 2, 4, 6], [1, 3, 5]]
    found = unpack_rows(packed, is_sharded=False)
    np.testing.assert_array_equal(found.batch[1], np.concatenate([rows[::2], rows[1::2]]))
    with pytest.raises(UnequalRows, match="rows of 'x/a' have different shapes"):
        unpack_rows([pack_rows({"x/a": rows[:, :n]}, 0) for n in (1, 2)], is_sharded=True)


@pytest.mark.full
@pytest.mark.parametrize("seed", [5, 7])
def test_a_saturated_activation_is_no_difference(seed: int) -> None:
    rng = np.random.default_rng(1)
    age = rng.integers(18, 80, 160)
    x = np.column_stack([age, rng.normal(size=160)]).astype("float32")
    y = np.unique(age, return_inverse=True)[1].astype("float32")
    keras.utils.set_random_seed(1)
    layers = [keras.Input((2,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    result = pybackend.barrier_train(
        None, model, (x, y), workers=2, batch_size=16, epochs=6, seed=seed, verbose=0
    )
    assert result.audit is not None
    assert result.audit.steps >= 1


@pytest.mark.full
def test_gradients_that_cancel_in_half_precision_are_no_difference() -> None:
    rng = np.random.default_rng(7)
    x, y = rng.integers(1, 1000, (500, 20)).astype("int32"), rng.integers(0, 10, 500)
    half = {"dtype": "mixed_bfloat16"}
    layers = [
        keras.Input((20,), dtype="int32"),
        keras.layers.Embedding(1000, 32, **half),
        keras.layers.LSTM(32, **half),
        keras.layers.Dense(10, **half),
    ]
    keras.utils.set_random_seed(1)
    model = keras.Sequential(layers)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    result = pybackend.barrier_train(
        None, model, (x, y), workers=2, batch_size=32, epochs=2, seed=3, verbose=0
    )
    assert result.audit is not None
    assert result.audit.steps >= 1


def test_rows_in_another_order_stay_those_of_their_workers() -> None:
    rows = np.arange(14.0).reshape(7, 2)
    packed = [pack_rows({"x": rows[part]}, 0) for part in (slice(0, None, 2), slice(1, None, 2))]
    found = unpack_rows(packed, is_sharded=True)
    turned = found.reordered()
    assert not np.array_equal(turned.batch, rows)
    for rank, part in enumerate(turned.parts):
        np.testing.assert_array_equal(turned.batch[part], rows[rank::2])
        np.testing.assert_array_equal(found.of_rank(rank).batch, rows[rank::2])


RNG = np.random.default_rng(0)
GRADIENT = RNG.normal(size=1000).astype("float32")


def measures(found: Any, key: Any = "a", expected: Any = GRADIENT) -> dict[Any, Any]:
    return {key: measure_gradient(np.asarray(found, expected.dtype), expected)}


def answering(**answers: Any) -> Any:
    """Return the values of one process once more, in several ways; by default the same."""

    def again(how: str) -> Any:
        return answers.get(how, {"a": GRADIENT, "b": GRADIENT})

    return again


def never(how: str) -> Any:
    raise AssertionError


def off_by(size: float) -> Any:
    return GRADIENT * np.float64(1 + size)


def test_a_small_difference_needs_no_other_computation() -> None:
    found = compare(measures(off_by(3e-7)), never)
    assert found.differing == found.undecided == []
    assert found.largest == pytest.approx(3e-7, rel=0.3)
    assert compare(measures(GRADIENT), never).largest == 0


def test_a_difference_is_measured_against_float64() -> None:
    exact = {"float64": {"a": off_by(-3e-5)}}
    found = compare(measures(off_by(1e-4)), answering(**exact))
    assert found.differing == []
    assert found.largest == pytest.approx(1e-4, rel=0.01)
    assert compare(measures(off_by(4e-4)), answering(**exact)).differing[0][0] == "a"
    ((key, size),) = compare(measures(off_by(1e-3)), answering()).differing
    assert (key, size) == ("a", pytest.approx(1e-3, rel=0.01))


def test_what_float32_does_not_tell_is_undecided() -> None:
    found = compare(measures(off_by(0.02)), answering(float64={"a": off_by(-0.01)}))
    assert (found.differing, [key for key, _ in found.undecided]) == ([], ["a"])
    found = compare(measures(off_by(0.5)), answering(float64={"a": off_by(-0.01)}))
    assert [key for key, _ in found.differing] == ["a"]


def test_without_float64_the_order_of_rows_is_the_measure() -> None:
    order = {"float64": None, "order": {"a": off_by(1e-5)}}
    assert compare(measures(off_by(5e-5)), answering(**order)).differing == []
    assert compare(measures(off_by(5e-4)), answering(**order)).differing != []
    order["order"] = {"a": off_by(0.1)}  # two views of a batch
    assert compare(measures(off_by(5e-4)), answering(**order)).undecided != []


def test_gradients_of_rounding_errors_are_equal_if_they_are_small() -> None:
    noise = GRADIENT[::-1] * np.float32(1e-8)
    zero = measures(noise, "b", GRADIENT * np.float32(1e-8))
    exact = {"float64": {"a": GRADIENT, "b": GRADIENT * 1e-20}}
    same = {"a": GRADIENT, "b": zero["b"].expected}
    found = compare(measures(GRADIENT) | zero, answering(**exact, same=same))
    assert (found.differing, found.undecided, found.largest) == ([], [], 0)
    assert 1e-9 < found.zeros < 1e-7
    # A real gradient of this size is another matter.
    found = compare(measures(GRADIENT) | zero, answering(float64=same, same=same))
    assert [key for key, _ in found.differing] == ["b"]


def test_other_values_each_time_tell_nothing() -> None:
    assert not compare(measures(off_by(0.1)), answering(same={"a": off_by(0.2)})).is_repeatable


def test_numbers_that_are_not_finite_and_counters() -> None:
    broken = np.where(np.arange(1000) == 7, np.nan, GRADIENT).astype("float32")
    assert compare(measures(broken), answering()).differing != []
    assert compare(measures(broken, expected=broken), never).differing == []
    counted = measure_variable(np.array(1), np.array(3), np.array(2))
    assert [key for key, _ in compare({1: counted}, never).differing] == [1]


def test_a_wrong_mean_of_any_kind_changes_its_projection() -> None:
    own = [GRADIENT.reshape(10, 100), np.ones(3, "float32"), 2 * np.ones(3, "float32")]

    def check(means: Any, tolerance: float = 1e-5) -> list[int]:
        return check_sums([Exchanged(16.0, 16.0, own, means, [0, 1, 2])], Alone(), tolerance)

    assert check(own) == []
    assert check([own[0] * np.float32(1 + 1e-7), *own[1:]]) == []
    assert check([own[0] * np.float32(1.001), *own[1:]]) == [0]
    assert check([own[0][::-1], *own[1:]]) == [0]
    assert check([own[0], own[2], own[1]]) == [1, 2]
    assert check([np.zeros_like(own[0]), *own[1:]], 2**-6) == [0]


def test_time_for_audits_is_spread_over_the_epoch() -> None:
    clock = mock.Mock(side_effect=lambda: now)
    now = 100.0
    with mock.patch("pybackend.core.engine.audit.audited_steps.time.monotonic", clock):
        plan = AuditPlan()
        chosen = []
        plan.begin_epoch(100, 0, {0})
        for step in range(100):
            if plan.is_due(step):
                found = step if plan.is_must(step) else plan.choose(step)
                if found > step:
                    plan.postpone(found)
                else:
                    plan.begin(step, step)
                    plan.end(0.05)
                    now += 0.05
                    chosen.append(step)
            now += 0.01
    # A quarter of a second in any case: five audits, and none of the 2 % of a second.
    assert len(chosen) == 5
    assert chosen[0] == 0
    assert max(np.diff([*chosen, 99])) <= 30
