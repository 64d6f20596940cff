"""A check finds losses of evaluations that are not a mean over rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from conftest import full
from keras import ops

from pybackend.core.engine.statistics.probes import is_mean_in_evaluation, mixes_rows
from pybackend.core.model.view import ModelView

layers = keras.layers
_RNG = np.random.default_rng(3)
X = _RNG.normal(size=(32, 8)).astype("float32")
TARGETS = _RNG.uniform(size=(32, 3)).astype("float32")
CLASSES = _RNG.integers(0, 3, 32)
TIMES = _RNG.uniform(1, 9, (32, 1)).astype("float32")


def compiled(*parts: Any, loss: Any = "mse", units: int = 3, **options: Any) -> Any:
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
    """Adds a loss that is a sum over the rows of a batch, optionally only in training."""

    def __init__(self, in_training: bool) -> None:
        super().__init__()
        self.in_training = in_training

    def call(self, x: Any, training: bool = False) -> Any:
        """Return the input."""
        if training or not self.in_training:
            self.add_loss(ops.sum(x**2))
        return x


class SumsItsLoss(keras.Sequential):
    """Adds up the losses of rows, without a parameter `training`."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        """Return a sum."""
        return ops.sum((y - y_pred) ** 2)


def _with_own_loss() -> Any:
    model = SumsItsLoss([keras.Input((8,)), layers.Dense(3)])
    model.compile("sgd")
    return model


class Sampling(layers.Layer):
    """The middle of a variational autoencoder, with its divergence."""

    def __init__(self, reduce: Callable[[Any], Any]) -> None:
        super().__init__()
        self.reduce = reduce
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, x: Any) -> Any:
        """Draw from the distribution."""
        mean, spread = x[:, :4], x[:, 4:]
        divergence = -0.5 * ops.sum(1 + spread - mean**2 - ops.exp(spread), axis=-1)
        self.add_loss(self.reduce(divergence))
        return mean + ops.exp(spread / 2) * keras.random.normal(ops.shape(mean), seed=self.seeds)


class Counts(layers.Layer):
    """Adds more to the loss with each call."""

    def build(self, shape: Any) -> None:
        """Create the counter of calls."""
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        """Return the input."""
        self.calls.assign_add(1.0)
        self.add_loss(0.01 * self.calls * ops.mean(x**2))
        return x


NOT_MEANS: dict[str, tuple[Callable[[], Any], Any]] = {
    "sum": (lambda: compiled(loss=_summed), TARGETS),
    "sum in a list": (lambda: compiled(loss=[_summed]), TARGETS),
    "dice": (lambda: compiled(loss=keras.losses.Dice(), activation="sigmoid"), TARGETS),
    "tversky": (lambda: compiled(loss=keras.losses.Tversky(), activation="sigmoid"), TARGETS),
    "soft F1": (lambda: compiled(loss=soft_f1, activation="sigmoid"), TARGETS),
    "root mean square": (lambda: compiled(loss=_root_mean_square), TARGETS),
    "correlation": (lambda: compiled(loss=correlation), TARGETS),
    "triplet": (lambda: compiled(loss=batch_hard_triplet), CLASSES),
    "partial likelihood": (lambda: compiled(loss=partial_likelihood, units=1), TIMES),
    "ranking": (lambda: compiled(loss=ranking, units=1), TIMES),
    "mean over valid rows": (lambda: compiled(loss=mean_over_valid), CLASSES),
    "add_loss": (lambda: compiled(AddsSum(False)), TARGETS),
    "compute_loss": (_with_own_loss, TARGETS),
}
IN_TRAINING = {
    "add_loss in training": (lambda: compiled(AddsSum(True)), TARGETS),
    "random, with a sum": (lambda: compiled(Sampling(ops.sum)), TARGETS),
    "sum, with dropout": (lambda: compiled(AddsSum(True), layers.Dropout(0.5)), TARGETS),
}


@pytest.mark.parametrize("name", NOT_MEANS)
def test_what_is_not_a_mean_over_rows_is_found(name: str) -> None:
    build, y = NOT_MEANS[name]
    assert not is_mean_in_evaluation(ModelView(build()), (X, y))


def test_a_loss_on_two_equal_rows_is_tried_at_predictions_that_differ() -> None:
    x, y = np.repeat(X[:1], 2, axis=0), np.repeat(TARGETS[:1], 2, axis=0)
    assert not is_mean_in_evaluation(ModelView(compiled(loss=_root_mean_square)), (x, y))


def _per_row(y: Any, predicted: Any) -> Any:
    return ops.sum((y - predicted) ** 2, axis=-1)


def _normalized() -> Any:
    return compiled(
        layers.Dense(3, kernel_regularizer="l2", activity_regularizer="l2"),
        layers.BatchNormalization(),
        layers.Dropout(0.5),
    )


MEANS: dict[str, tuple[Callable[[], Any], Any]] = {
    "squares": (compiled, TARGETS),
    "mean": (lambda: compiled(loss=lambda y, p: ops.mean((y - p) ** 2)), TARGETS),
    "per row": (lambda: compiled(loss=_per_row), TARGETS),
    "regularizers": (_normalized, TARGETS),
    "logits": (lambda: compiled(loss="sparse_categorical_crossentropy"), CLASSES),
    "probabilities": (
        lambda: compiled(loss="sparse_categorical_crossentropy", activation="softmax"),
        CLASSES,
    ),
    "shares": (lambda: compiled(loss="binary_crossentropy", activation="sigmoid"), TARGETS),
    "rates": (lambda: compiled(loss="poisson", activation="softplus"), TARGETS),
    "random": (lambda: compiled(Sampling(ops.mean)), TARGETS),
    "counting": (lambda: compiled(Counts()), TARGETS),
    "half precision": (lambda: compiled(dtype="mixed_bfloat16"), TARGETS),
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("rows", [2, 3, 32])
def test_means_over_rows_are_taken(name: str, rows: int) -> None:
    build, y = MEANS[name]
    assert is_mean_in_evaluation(ModelView(build()), (X[:rows], y[:rows]))


def test_weights_of_rows_are_part_of_the_loss() -> None:
    weights = _RNG.uniform(size=32).astype("float32")
    assert is_mean_in_evaluation(ModelView(compiled()), (X, TARGETS, weights))


def test_predictions_that_may_not_be_moved_are_tried_as_they_are() -> None:
    def only_small(y: Any, predicted: Any) -> Any:
        return ops.where(ops.max(ops.abs(predicted)) < 0.5, ops.mean((y - predicted) ** 2), np.nan)

    model = compiled(loss=only_small, kernel_initializer="zeros")
    assert is_mean_in_evaluation(ModelView(model), (X, TARGETS))


def test_a_trial_leaves_a_model_as_it_was() -> None:
    model = compiled(Counts(), Sampling(ops.mean))
    before = [(v.path, v.numpy()) for v in model.variables]
    assert is_mean_in_evaluation(ModelView(model), (X, TARGETS))
    for (path, value), v in zip(before, model.variables, strict=True):
        assert v.path == path
        np.testing.assert_array_equal(v.numpy(), value)


def test_predictions_that_are_asserted_are_not_moved() -> None:
    import tensorflow as tf

    def cosine(y: Any, predicted: Any) -> Any:
        tf.debugging.assert_near(tf.norm(predicted, axis=-1), 1.0)
        return -ops.sum(y * predicted, axis=-1)

    model = keras.Sequential([keras.Input((8,)), layers.Dense(3), layers.UnitNormalization()])
    model.compile("sgd", cosine)
    assert is_mean_in_evaluation(ModelView(model), (X, TARGETS))


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", full("sum")])
@pytest.mark.full
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
    assert is_mean_in_evaluation(ModelView(model), (X, TARGETS)) == (reduction != "sum")
    assert len(called) < places  # once per trace, not per place
    assert "retracing" not in caplog.text
    assert "call" not in vars(recurrent)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


class Standardizes(layers.Layer):
    """Standardizes by the rows of a batch, but not in training."""

    def call(self, x: Any, training: bool = False) -> Any:
        return x if training else (x - ops.mean(x, axis=0)) / (1e-3 + ops.std(x, axis=0))


def test_predictions_that_depend_on_other_rows_are_found() -> None:
    assert mixes_rows(ModelView(compiled(Standardizes())), (X, TARGETS))
    for part in (layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(9)):
        assert not mixes_rows(ModelView(compiled(part)), (X, TARGETS))
    assert not mixes_rows(
        ModelView(compiled(layers.Dense(3, dtype="mixed_bfloat16"))), (X, TARGETS)
    )
