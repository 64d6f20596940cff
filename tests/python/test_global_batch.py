"""Rows of the global batch on every worker: what is fetched, rejected and left unchanged."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from test_exact_cases import TAGS, WORDS
from test_exact_together import Forwarding, two_taggers
from test_probes import compiled, correlation

from pybackend import Exchange, InputError, barrier_evaluate, barrier_train
from pybackend.core.collective import Alone
from pybackend.core.data.rows import ArrayRows
from pybackend.core.engine.statistics.global_batch import (
    GatheredRows,
    GlobalBatch,
    OverBatch,
    check_runs_eagerly,
)
from pybackend.core.engine.statistics.metrics import build_losses
from pybackend.core.engine.statistics.probes import find_unsummable_metrics
from pybackend.core.engine.step_changes import StepCalls
from pybackend.core.model.view import ModelView

layers = keras.layers
TOGETHER = Exchange(loss_over="global batch")
_RNG = np.random.default_rng(4)
X = _RNG.normal(size=(40, 8)).astype("float32")
TARGETS = _RNG.uniform(size=(40, 3)).astype("float32")


class Recorded(Alone):
    """The middle one of three workers; the others have sent the given rows."""

    rank = 1
    world_size = 3

    def __init__(self, before: Any, after: Any) -> None:
        self.before, self.after = before, after

    def all_gather(self, part: Any) -> list[Any]:
        return [self.before, part, self.after]


def _sent(rows: int, *arrays: Any) -> Any:
    """Return a worker's message."""
    sent: list[Any] = []

    class Keeps(Alone):
        def all_gather(self, part: Any) -> list[Any]:
            sent.append(part)
            return [part]

    calls = StepCalls()
    calls.begin(rows)
    GatheredRows(Keeps(), calls)([tf.constant(array) for array in arrays], True)
    return sent[0]


def _gather(before: Any, own: Any, after: Any) -> Any:
    calls = StepCalls()
    calls.begin(len(own[0]))
    found = GatheredRows(Recorded(before, after), calls)([tf.constant(a) for a in own], True)
    return found[:3]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool", "float16"])
def test_rows_come_in_the_order_of_the_ranks(dtype: str) -> None:
    arrays = [_RNG.normal(size=(rows, 2, 3)).astype(dtype) for rows in (3, 2, 1)]
    labels = [np.arange(rows) for rows in (3, 2, 1)]
    packed = [_sent(len(a), a, y) for a, y in zip(arrays, labels, strict=True)]
    before, after, factor = _gather(packed[0], (arrays[1], labels[1]), packed[2])
    np.testing.assert_array_equal(before[0], arrays[0])
    np.testing.assert_array_equal(after[0], arrays[2])
    np.testing.assert_array_equal(before[1], labels[0])
    assert float(factor) == 6 / 2


def test_a_worker_without_rows_is_left_out() -> None:
    nothing = np.zeros(0, np.uint8)
    before, after, factor = _gather(nothing, (X[:2],), nothing)
    assert before[0].shape == after[0].shape == (0, 8)
    assert float(factor) == 1


def test_rows_of_several_shapes_are_named() -> None:
    other = _sent(2, X[:2, :5])
    with pytest.raises(Exception, match="pad rows to the same length"):
        _gather(other, (X[:2],), np.zeros(0, np.uint8))


@pytest.mark.parametrize(
    ("tensor", "message"), [(["a", "b"], "must be numbers"), (1.0, "a value for each row")]
)
def test_what_cannot_be_gathered_is_refused(tensor: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _gather(np.zeros(0, np.uint8), ([1], tensor), np.zeros(0, np.uint8))


def test_a_model_is_left_as_it_was() -> None:
    model = compiled(loss=correlation)
    model.compile("sgd", correlation, metrics=["mae"])
    model.train_on_batch(X, TARGETS)
    before = {**vars(model)}
    calls = StepCalls()
    batch = GlobalBatch(model, GatheredRows(Alone(), calls), calls, OverBatch(True, True))
    with batch.install():
        assert vars(model).keys() != before.keys()
    assert vars(model).keys() == before.keys()
    assert all("update_state" not in vars(metric) for metric in model.metrics)


def test_a_model_that_says_it_is_built_is_called_if_its_layers_are_not() -> None:
    class Plain(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    model = Plain()
    model.build((None, 8))
    model.compile("sgd", "mse")
    result = barrier_train(None, model, (X, TARGETS), workers=2, batch_size=8, verbose=0)
    assert [weight.shape for weight in result.model.get_weights()] == [(8, 3), (3,)]


def _largest(y: Any, predicted: Any) -> Any:
    return ops.max(ops.abs(y - predicted))


def test_metrics_that_are_no_sums_are_found() -> None:
    model = compiled()
    given = [_largest, "mae", keras.metrics.AUC(name="auc"), correlation]
    model.compile("sgd", "mse", metrics=given)
    found = find_unsummable_metrics(model, (X, (TARGETS > 0.5).astype("float32")))
    assert found == ["_largest", "correlation"]
    assert all(not np.any(variable.numpy()) for variable in model.metrics_variables)


@pytest.mark.parametrize("metrics", [["accuracy"], ["mae"]])
def test_a_step_creates_no_variables_and_is_traced_once(metrics: list[str]) -> None:
    model = compiled()
    model.compile("sgd", "mse", metrics=metrics)
    model.optimizer.build(model.trainable_variables)
    assert find_unsummable_metrics(model, (X[:8], TARGETS[:8])) == []
    build_losses(ModelView(model), ArrayRows({"x": X[:8], "y": TARGETS[:8]}))
    variables = [id(variable) for variable in model.metrics_variables]
    # As in the next generation of an elastic training.
    assert find_unsummable_metrics(model, (X[:8], TARGETS[:8])) == []
    assert [id(variable) for variable in model.metrics_variables] == variables
    assert all(not np.any(variable.numpy()) for variable in model.metrics_variables)
    traced, train_step = [], model.train_step
    model.train_step = lambda data: traced.append(1) or train_step(data)
    model.fit(X[:8], TARGETS[:8], verbose=0)
    assert len(traced) == 1


def test_an_evaluation_is_that_of_global_batches() -> None:
    model = compiled(loss=correlation)
    model.compile("sgd", correlation, metrics=[_largest])
    found = barrier_evaluate(
        None, model, (X[:32], TARGETS[:32]), workers=2, batch_size=8, verbose=0
    )
    expected = model.evaluate(X[:32], TARGETS[:32], batch_size=16, verbose=0, return_dict=True)
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.full
def test_an_evaluation_of_several_masked_outputs_is_that_of_global_batches() -> None:
    keras.utils.set_random_seed(1)
    model = two_taggers()
    labels = {"a": TAGS[:32], "b": TAGS[:32, :, None] / 3.0}
    found = barrier_evaluate(None, model, (WORDS[:32], labels), workers=2, batch_size=8, verbose=0)
    expected = model.evaluate(WORDS[:32], labels, batch_size=16, verbose=0, return_dict=True)
    assert found == pytest.approx(expected, abs=1e-6)


class EvaluatesItself(keras.callbacks.Callback):
    """Evaluates the model on rank 0 alone; no other rank may wait for it."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        import os

        if os.environ["TFDIST_RANK"] == "0":
            logs["own"] = self.model.evaluate(X, TARGETS, batch_size=40, verbose=0)


@pytest.mark.full
def test_what_a_callback_evaluates_is_its_own() -> None:
    model = compiled(layers.BatchNormalization(synchronized=True), loss=correlation)
    result = barrier_train(
        None,
        model,
        (X, TARGETS),
        workers=2,
        batch_size=8,
        validation_data=(X, TARGETS),
        callbacks=[EvaluatesItself()],
        exchange=TOGETHER,
        verbose=0,
    )
    expected = result.model.evaluate(X, TARGETS, batch_size=40, verbose=0)
    assert result.history["own"][0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.full
def test_a_function_of_data_may_be_over_the_global_batch() -> None:
    """Use workers that do not know the rows of each other's steps."""

    def data(context: Any) -> Any:
        rows = np.arange(40)[context.rank :: context.world_size][: 20 - 9 * context.rank]
        return tf.data.Dataset.from_tensor_slices((X[rows], TARGETS[rows])).batch(4)

    model = compiled(layers.BatchNormalization(synchronized=True), loss=correlation)
    result = barrier_train(None, model, data, workers=2, exchange=TOGETHER, verbose=0)
    mine, others = np.arange(40)[::2][:20], np.arange(40)[1::2][:11]
    for first in range(0, 20, 4):
        rows = np.concatenate([mine[first : first + 4], others[first : first + 4]])
        model.train_on_batch(X[rows], TARGETS[rows])
    for one, other in zip(result.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


class KeepsItsOptimizer(Forwarding):
    """Stores its optimizer, which Keras wraps in half precision."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def test_optimizers_that_no_step_uses_are_no_others() -> None:
    model, nested = compiled(), compiled()
    model.nested = nested
    assert ModelView(model).other_optimizers == {}
    keras.config.set_dtype_policy("mixed_float16")
    try:
        scaled = KeepsItsOptimizer([keras.Input((8,)), layers.Dense(3)])
        scaled.compile(keras.optimizers.SGD(0.1))
    finally:
        keras.config.set_dtype_policy("float32")
    assert scaled.optimizer is not scaled.kept
    assert ModelView(scaled).other_optimizers == {}


def test_an_eager_first_step_without_rows_is_refused() -> None:
    model = compiled(loss=correlation)
    model.compile("sgd", correlation, run_eagerly=True)
    with pytest.raises(InputError, match="run_eagerly=True every worker needs rows in its first"):
        check_runs_eagerly(model, begins_empty=True)


@keras.saving.register_keras_serializable("tests")
class Penalized(keras.Sequential):
    """Penalizes the gradient of its outputs, as WGAN-GP does."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                predicted = self(x, training=True)
            slope = inner.gradient(predicted, x)
            loss = ops.mean((predicted - y) ** 2) + ops.mean(ops.sum(slope**2, axis=-1))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_a_gradient_penalty_through_synchronized_layers_is_refused() -> None:
    parts = [layers.Dense(6), layers.BatchNormalization(synchronized=True), layers.Dense(3)]
    model = Penalized([keras.Input((8,)), *parts])
    model.compile("sgd")
    with pytest.raises(Exception, match="the gradient of a gradient"):
        barrier_train(None, model, (X, TARGETS), workers=2, batch_size=8, verbose=0)
