"""Losses that are no mean over rows are found by a trial, and others are let through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from conftest import full, record_outcome
from keras import ops

from pybackend import InputError
from pybackend.engine.loss_trial import check_loss_is_mean

layers = keras.layers
_RNG = np.random.default_rng(3)
X = _RNG.normal(size=(32, 8)).astype("float32")
TARGETS = _RNG.uniform(size=(32, 3)).astype("float32")
CLASSES = _RNG.integers(0, 3, 32)
TIMES = _RNG.uniform(1, 9, (32, 1)).astype("float32")


def _compiled(*parts: Any, loss: Any = "mse", units: int = 3, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), *parts, layers.Dense(units, **options)])
    model.compile("sgd", loss)
    return model


def _distances(vectors: Any) -> Any:
    return ops.sum((vectors[:, None] - vectors[None]) ** 2, axis=-1)


def batch_hard_triplet(y: Any, predicted: Any) -> Any:
    is_same = ops.equal(ops.reshape(y, (-1, 1)), ops.reshape(y, (1, -1)))
    distances = _distances(predicted)
    farthest = ops.max(ops.where(is_same, distances, 0.0), axis=1)
    nearest = ops.min(ops.where(is_same, 1e9, distances), axis=1)
    return ops.relu(farthest - nearest + 0.2)


def correlation(y: Any, predicted: Any) -> Any:
    one, other = y - ops.mean(y), predicted - ops.mean(predicted)
    size = ops.sqrt(ops.sum(one**2) * ops.sum(other**2))
    return 1 - ops.sum(one * other) / size


def partial_likelihood(y: Any, predicted: Any) -> Any:
    at_risk = ops.cast(ops.reshape(y, (1, -1)) >= ops.reshape(y, (-1, 1)), "float32")
    risk = ops.exp(ops.reshape(predicted, (1, -1)))
    return ops.log(ops.sum(at_risk * risk, axis=1)) - ops.reshape(predicted, (-1,))


def ranking(y: Any, predicted: Any) -> Any:
    above = ops.cast(y[:, None] > y[None], "float32")
    return ops.mean(above * ops.softplus(predicted[None] - predicted[:, None]))


def mean_over_valid(y: Any, predicted: Any) -> Any:
    valid = ops.cast(ops.not_equal(y, 0), "float32")
    entropy = keras.losses.sparse_categorical_crossentropy(y, predicted, from_logits=True)
    return ops.sum(entropy * valid) / ops.sum(valid)


def _root_mean_square(y: Any, predicted: Any) -> Any:
    return ops.sqrt(ops.mean((y - predicted) ** 2))


def soft_f1(y: Any, predicted: Any) -> Any:
    hits = ops.sum(y * predicted)
    return 1 - 2 * hits / (ops.sum(y) + ops.sum(predicted))


def _summed(y: Any, predicted: Any) -> Any:
    return ops.sum((y - predicted) ** 2)


class AddsSum(layers.Layer):
    """Adds a loss that is a sum over the rows of a batch, in training if it is told so."""

    def __init__(self, in_training: bool) -> None:
        super().__init__()
        self.in_training = in_training

    def call(self, x: Any, training: bool = False) -> Any:
        """As it is."""
        if training or not self.in_training:
            self.add_loss(ops.sum(x**2))
        return x


class SumsItsLoss(keras.Sequential):
    """Adds up the losses of rows, without a parameter `training`."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        """A sum."""
        return ops.sum((y - y_pred) ** 2)


def _with_own_loss() -> Any:
    model = SumsItsLoss([keras.Input((8,)), layers.Dense(3)])
    model.compile("sgd")
    return model


class OwnStep(keras.Model):
    """A train_step of its own; the loss compares the rows of a batch if it is to."""

    def __init__(self, contrasts: bool, drops: bool = False) -> None:
        super().__init__()
        self.dense = layers.Dense(3)
        self.dropout = layers.Dropout(0.5 if drops else 0.0)
        self.contrasts = contrasts

    def call(self, x: Any, training: bool = False) -> Any:
        """Logits."""
        return self.dropout(self.dense(x), training=training)

    def train_step(self, data: Any) -> Any:
        """As Keras's example."""
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = ops.mean((y - predicted) ** 2)
            if self.contrasts:
                loss += ops.mean(ops.logsumexp(-_distances(predicted), axis=1))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def _stepping(contrasts: bool, drops: bool = False) -> Any:
    model = OwnStep(contrasts, drops)
    model.compile("sgd")
    model(X)
    model.optimizer.build(model.trainable_variables)
    return model


class Sampling(layers.Layer):
    """The middle of a variational autoencoder, with its divergence."""

    def __init__(self, reduce: Callable[[Any], Any]) -> None:
        super().__init__()
        self.reduce = reduce
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, x: Any) -> Any:
        """A draw."""
        mean, spread = x[:, :4], x[:, 4:]
        divergence = -0.5 * ops.sum(1 + spread - mean**2 - ops.exp(spread), axis=-1)
        self.add_loss(self.reduce(divergence))
        return mean + ops.exp(spread / 2) * keras.random.normal(ops.shape(mean), seed=self.seeds)


class Counts(layers.Layer):
    """Adds more to the loss with each call."""

    def build(self, shape: Any) -> None:
        """The number of calls."""
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        """As it is."""
        self.calls.assign_add(1.0)
        self.add_loss(0.01 * self.calls * ops.mean(x**2))
        return x


NOT_MEANS: dict[str, tuple[Callable[[], Any], Any]] = {
    "sum": (lambda: _compiled(loss=_summed), TARGETS),
    "sum in a list": (lambda: _compiled(loss=[_summed]), TARGETS),
    "dice": (lambda: _compiled(loss=keras.losses.Dice(), activation="sigmoid"), TARGETS),
    "tversky": (lambda: _compiled(loss=keras.losses.Tversky(), activation="sigmoid"), TARGETS),
    "soft F1": (lambda: _compiled(loss=soft_f1, activation="sigmoid"), TARGETS),
    "root mean square": (lambda: _compiled(loss=_root_mean_square), TARGETS),
    "correlation": (lambda: _compiled(loss=correlation), TARGETS),
    "triplet": (lambda: _compiled(loss=batch_hard_triplet), CLASSES),
    "partial likelihood": (lambda: _compiled(loss=partial_likelihood, units=1), TIMES),
    "ranking": (lambda: _compiled(loss=ranking, units=1), TIMES),
    "mean over valid rows": (lambda: _compiled(loss=mean_over_valid), CLASSES),
    "add_loss": (lambda: _compiled(AddsSum(False)), TARGETS),
    "add_loss in training": (lambda: _compiled(AddsSum(True)), TARGETS),
    "compute_loss": (_with_own_loss, TARGETS),
    "random, with a sum": (lambda: _compiled(Sampling(ops.sum)), TARGETS),
    "sum, with dropout": (lambda: _compiled(AddsSum(True), layers.Dropout(0.5)), TARGETS),
}


@pytest.mark.parametrize("name", NOT_MEANS)
def test_a_loss_must_be_a_mean_over_rows(name: str) -> None:
    build, y = NOT_MEANS[name]
    with pytest.raises(InputError, match="not a mean over the rows of a batch") as caught:
        check_loss_is_mean(build(), (X, y))
    record_outcome(name, str(caught.value))


def test_a_loss_on_two_equal_rows_is_tried_at_predictions_that_differ() -> None:
    x, y = np.repeat(X[:1], 2, axis=0), np.repeat(TARGETS[:1], 2, axis=0)
    with pytest.raises(InputError, match="not a mean over the rows of a batch"):
        check_loss_is_mean(_compiled(loss=_root_mean_square), (x, y))


@pytest.mark.parametrize("drops", [False, True])
def test_a_train_step_must_give_the_mean_of_its_rows_gradients(drops: bool) -> None:
    check_loss_is_mean(_stepping(False, drops), (X, TARGETS))
    with pytest.raises(InputError, match="a loss that compares or sums rows"):
        check_loss_is_mean(_stepping(True), (X, TARGETS))


def _per_row(y: Any, predicted: Any) -> Any:
    return ops.sum((y - predicted) ** 2, axis=-1)


def _normalized() -> Any:
    return _compiled(
        layers.Dense(3, kernel_regularizer="l2", activity_regularizer="l2"),
        layers.BatchNormalization(),
        layers.Dropout(0.5),
    )


MEANS: dict[str, tuple[Callable[[], Any], Any]] = {
    "squares": (_compiled, TARGETS),
    "mean": (lambda: _compiled(loss=lambda y, p: ops.mean((y - p) ** 2)), TARGETS),
    "per row": (lambda: _compiled(loss=_per_row), TARGETS),
    "regularizers": (_normalized, TARGETS),
    "logits": (lambda: _compiled(loss="sparse_categorical_crossentropy"), CLASSES),
    "probabilities": (
        lambda: _compiled(loss="sparse_categorical_crossentropy", activation="softmax"),
        CLASSES,
    ),
    "shares": (lambda: _compiled(loss="binary_crossentropy", activation="sigmoid"), TARGETS),
    "rates": (lambda: _compiled(loss="poisson", activation="softplus"), TARGETS),
    "random": (lambda: _compiled(Sampling(ops.mean)), TARGETS),
    "counting": (lambda: _compiled(Counts()), TARGETS),
    "half precision": (lambda: _compiled(dtype="mixed_bfloat16"), TARGETS),
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("rows", [2, 3, 32])
def test_means_over_rows_are_taken(name: str, rows: int) -> None:
    build, y = MEANS[name]
    check_loss_is_mean(build(), (X[:rows], y[:rows]))


def test_weights_of_rows_are_part_of_the_loss() -> None:
    weights = _RNG.uniform(size=32).astype("float32")
    check_loss_is_mean(_compiled(), (X, TARGETS, weights))


def test_predictions_that_may_not_be_moved_are_tried_as_they_are() -> None:
    def only_small(y: Any, predicted: Any) -> Any:
        return ops.where(ops.max(ops.abs(predicted)) < 0.5, ops.mean((y - predicted) ** 2), np.nan)

    model = _compiled(loss=only_small, kernel_initializer="zeros")
    check_loss_is_mean(model, (X, TARGETS))


def test_what_is_not_a_number_cannot_be_tried() -> None:
    x = X.copy()
    x[3, 2] = np.nan
    with pytest.raises(InputError, match="the loss of 32 of the rows is nan, so it cannot"):
        check_loss_is_mean(_compiled(), (x, TARGETS))
    scaled = _compiled()
    scaled.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
    check_loss_is_mean(scaled, (x, TARGETS))


@pytest.mark.parametrize("build", [_normalized, lambda: _compiled(Counts(), Sampling(ops.mean))])
def test_a_trial_leaves_a_model_as_it_was(build: Callable[[], Any]) -> None:
    model = build()
    before = [(v.path, v.trainable, v.numpy()) for v in model.variables]
    check_loss_is_mean(model, (X, TARGETS))
    for (path, trainable, value), v in zip(before, model.variables, strict=True):
        assert (v.path, v.trainable) == (path, trainable)
        np.testing.assert_array_equal(v.numpy(), value)
    assert all(layer.trainable for layer in model.layers)


class Teaches(keras.Model):
    """A train_step that moves a teacher by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = layers.Dense(3), layers.Dense(3)

    def call(self, x: Any) -> Any:
        """Of the student."""
        self.teacher(x)
        return self.student(x)

    def train_step(self, data: Any) -> Any:
        """One of Keras's, and a step of the teacher."""
        logs = super().train_step(data)
        for own, other in zip(self.teacher.weights, self.student.weights, strict=True):
            own.assign(0.9 * own + 0.1 * other)
        return logs


def test_a_trial_undoes_what_a_train_step_assigns() -> None:
    model = Teaches()
    model.compile("sgd", "mse")
    model(X)
    model.optimizer.build(model.trainable_variables)
    before = model.get_weights()
    check_loss_is_mean(model, (X, TARGETS))
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


class Depends(keras.Model):
    """Outputs that depend on whether it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        """Two outputs in training, one class else."""
        y = self.dense(x)
        return [y, 2 * y] if training else ops.argmax(y, axis=-1)


def test_a_model_that_predicts_otherwise_is_tried_in_training() -> None:
    model = Depends()
    model.compile("sgd", ["mse", "mse"])
    model(X)
    check_loss_is_mean(model, (X, [TARGETS, TARGETS]))
    model.compile("sgd", ["mse", _summed])
    with pytest.raises(InputError, match=r"in training is .* not a mean over the rows"):
        check_loss_is_mean(model, (X, [TARGETS, TARGETS]))


class SkipsItself(layers.Layer):
    """Leaves itself out of some steps, for all rows alike."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.dense = layers.Dense(8)
        self.seeds = keras.random.SeedGenerator(seed)

    def call(self, x: Any, training: bool = False) -> Any:
        """Most of the time with the layer inside."""
        if not training:
            return x + self.dense(x)
        drawn = keras.random.uniform((), seed=self.seeds)
        return x + ops.cast(drawn > 0.1, "float32") * self.dense(x) / 0.9


@pytest.mark.parametrize("seed", range(6))
def test_a_layer_that_is_left_out_at_random_is_no_loss_of_sums(seed: int) -> None:
    check_loss_is_mean(_compiled(SkipsItself(seed), SkipsItself(seed + 50)), (X, TARGETS))


def test_predictions_that_are_asserted_are_not_moved() -> None:
    import tensorflow as tf

    def cosine(y: Any, predicted: Any) -> Any:
        tf.debugging.assert_near(tf.norm(predicted, axis=-1), 1.0)
        return -ops.sum(y * predicted, axis=-1)

    model = keras.Sequential([keras.Input((8,)), layers.Dense(3), layers.UnitNormalization()])
    model.compile("sgd", cosine)
    check_loss_is_mean(model, (X, TARGETS))


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", full("sum")])
def test_a_long_sequence_is_tried_as_a_graph(
    reduction: str, caplog: pytest.LogCaptureFixture
) -> None:
    places, called = 60, []
    recurrent = layers.GRU(4, dropout=0.2)
    wrapped = layers.Bidirectional(layers.LSTM(3))
    parts = [layers.Reshape((8, 1)), layers.UpSampling1D(places // 8 + 1), layers.Masking()]
    branches = keras.Input((8,))
    hidden = branches
    for part in parts:
        hidden = part(hidden)
    joined = layers.Concatenate()([recurrent(hidden), wrapped(hidden)])
    model = keras.Model(branches, layers.Dense(3)(joined))
    model.compile("sgd", keras.losses.MeanSquaredError(reduction))
    own = recurrent.cell.call

    def count(*arguments: Any, **options: Any) -> Any:
        called.append(1)
        return own(*arguments, **options)

    recurrent.cell.call = count
    before = [v.numpy() for v in model.variables]
    if reduction != "sum":
        check_loss_is_mean(model, (X, TARGETS))
    else:
        with pytest.raises(InputError, match="is not a mean over the rows"):
            check_loss_is_mean(model, (X, TARGETS))
    assert len(called) < places  # as often as it is traced, not for each place
    assert "retracing" not in caplog.text
    assert "call" not in vars(recurrent)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
