"""Computations over all workers' rows: losses, metrics and statistics of global batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from replicas import Case, check_equal, sampled
from test_exact_cases import LOGITS, TAGS, WORDS, X, Y, several, stack, tagger
from test_probes import (
    batch_hard_triplet,
    correlation,
    mean_over_valid,
    partial_likelihood,
    ranking,
    soft_f1,
)

from pybackend.core.job.worker_options import Exchange

# The first test waits until the workers have trained all cases.
pytestmark = pytest.mark.timeout(1200)

layers = keras.layers
_RNG = np.random.default_rng(8)
TARGETS = _RNG.uniform(0.1, 1, (101, 3)).astype("float32")
IMAGES = _RNG.normal(size=(101, 6, 6, 2)).astype("float32")
TOGETHER = {"exchange": Exchange(loss_over="global batch")}
# With two workers, the second has rows only in some steps.
FEW = {"shuffle": False}
SHARDS = [slice(0, 60), slice(60, 63)]


def regressor(loss: Any, units: int = 3, **compiled: Any) -> Callable[[], Any]:
    return stack(
        lambda: layers.Dense(12, activation="tanh", kernel_regularizer="l2"),
        lambda: layers.Dense(units, activity_regularizer="l2"),
        loss=loss if isinstance(loss, str) else lambda: loss,
        **compiled,
    )


def two_taggers() -> Any:
    words = keras.Input((6,))
    hidden = layers.LSTM(5, return_sequences=True)(layers.Embedding(20, 4, mask_zero=True)(words))
    model = keras.Model(words, {"a": layers.Dense(3)(hidden), "b": layers.Dense(1)(hidden)})
    model.compile("sgd", {"a": LOGITS, "b": "mse"})
    return model


@keras.saving.register_keras_serializable("tests")
class Contrastive(keras.Model):
    """Has a loss that compares all rows, inputs included, in its own train_step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.hidden = layers.Dense(6, activation="tanh")

    def build(self, shape: Any) -> None:
        self.hidden.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.hidden(x)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        near = ops.matmul(x, ops.transpose(x))
        found = ops.matmul(y_pred, ops.transpose(y_pred))
        is_same = ops.cast(ops.equal(y[:, None], y[None]), "float32")
        return ops.mean((found - is_same) ** 2) + 0.01 * ops.mean((found - near) ** 2)

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def contrastive() -> Any:
    model = Contrastive()
    model.build((None, 8))
    model.compile("sgd")
    return model


@keras.saving.register_keras_serializable("tests")
class Forwarding(keras.Sequential):
    """Forwards the arguments of its loss without names, and stores its optimizer again."""

    def compile(self, optimizer: Any = "sgd", **options: Any) -> None:
        super().compile(optimizer, **options)
        self.kept = optimizer

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return 2 * super().compute_loss(*args, **options)


def forwarding() -> Any:
    model = Forwarding([keras.Input((8,)), layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.05), loss=correlation)
    return model


class Gan(keras.Model):
    """Keras's own example with several optimizers, and repeatable noise."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((8,)), layers.Dense(8)])
        self.discriminator = keras.Sequential(
            [keras.Input((8,)), layers.Dense(6, activation="tanh"), layers.Dense(1)]
        )

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss, self.g_loss]

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        real, noise = data[0], data[0][:, ::-1]
        ones, zeros = tf.ones((tf.shape(real)[0], 1)), tf.zeros((tf.shape(real)[0], 1))
        labels = tf.concat([ones, zeros], 0)
        with tf.GradientTape() as tape:
            made = tf.concat([self.generator(noise), real], 0)
            d_loss = self.loss_fn(labels, self.discriminator(made))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(zeros, self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


def gan() -> Any:
    model = Gan()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1), loss)
    return model


def normalize(**options: Any) -> Any:
    return layers.BatchNormalization(synchronized=True, **options)


def normalized(**compiled: Any) -> Callable[[], Any]:
    return stack(normalize, lambda: layers.Dense(6), normalize, lambda: layers.Dense(3), **compiled)


def two_branches() -> Any:
    images = keras.Input((6, 6, 2))
    one = normalize()(layers.Conv2D(3, 3, padding="same")(images))
    other = normalize(scale=False, center=False)(layers.Conv2D(3, 1)(images))
    both = layers.GlobalAveragePooling2D()(layers.ReLU()(layers.Add()([one, other])))
    model = keras.Model(images, layers.Dense(3)(both))
    model.compile("sgd", LOGITS, metrics=["accuracy"])
    return model


def normalized_words() -> Any:
    words = keras.Input((6,))
    hidden = normalize()(layers.Embedding(20, 4, mask_zero=True)(words))
    model = keras.Model(words, layers.Dense(3)(hidden))
    model.compile("sgd", LOGITS)
    return model


def largest_error(y: Any, predicted: Any) -> Any:
    return ops.max(ops.abs(y - predicted))


def largest_eight(y: Any, predicted: Any) -> Any:
    return ops.mean(ops.top_k(ops.abs(y - predicted)[:, 0], 8)[0])


def mean_error(y: Any, predicted: Any) -> Any:
    return ops.mean(ops.abs(y - predicted))


def loss_cases() -> dict[str, Case]:
    summed = keras.losses.MeanSquaredError(reduction="sum")
    pairs = {"left": X, "right": -X}, {"a": Y, "b": TARGETS[:, :1]}
    return {
        "triplet loss": Case(regressor(batch_hard_triplet), (X, Y), settings=TOGETHER),
        "circle loss": Case(
            regressor(keras.losses.Circle(gamma=2.0)), (X, Y), settings=TOGETHER, tolerance=1e-5
        ),
        "correlation, validated": Case(
            regressor(correlation),
            (X, TARGETS),
            validation=(X[:31], TARGETS[:31]),
            settings=TOGETHER,
        ),
        "partial likelihood": Case(
            regressor(partial_likelihood, 1), (X, TARGETS[:, :1]), settings=TOGETHER
        ),
        "ranking": Case(regressor(ranking, 1), (X, TARGETS[:, :1]), settings=TOGETHER),
        "soft F1": Case(regressor(soft_f1), (X, TARGETS), settings=TOGETHER, tolerance=1e-5),
        "mean over valid rows": Case(regressor(mean_over_valid), (X, Y), settings=TOGETHER),
        "summed loss": Case(regressor(summed), (X, TARGETS / 9), settings=TOGETHER),
        "sample weights of a root": Case(
            regressor(correlation), (X, TARGETS, TARGETS[:, 0]), settings=TOGETHER
        ),
        "loss over the global batch, empty steps": Case(
            regressor(correlation, metrics=lambda: [largest_error]),
            (X, TARGETS),
            settings={**TOGETHER, **FEW},
            shards=SHARDS,
            validation=(X[:1], TARGETS[:1]),
        ),
        "loss over the global batch, accumulation": Case(
            regressor(
                correlation,
                optimizer=lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
            ),
            (X, TARGETS),
            settings=TOGETHER,
        ),
        "several losses over the global batch": Case(several, pairs, settings=TOGETHER),
        "masks that reach two losses": Case(
            two_taggers,
            (WORDS, {"a": TAGS, "b": TAGS[..., None] / 3.0}),
            settings={**TOGETHER, **FEW},
            shards=SHARDS,
        ),
        "summed loss, loss scale": Case(
            stack(
                lambda: layers.Dense(6, activation="tanh", dtype="mixed_float16"),
                lambda: layers.Dense(3, dtype="float32"),
                optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01)),
                loss=lambda: summed,
            ),
            (X, TARGETS),
            settings=TOGETHER,
            tolerance=1e-2,
        ),
        "compute_loss of any arguments": Case(forwarding, (X, TARGETS), settings=TOGETHER),
        "contrastive, own train_step": Case(contrastive, (X, Y), settings=TOGETHER),
        "losses of several outputs, validated": Case(
            several,
            pairs,
            validation=({"left": X[:31], "right": X[:31]}, {"a": Y[:31], "b": TARGETS[:31, :1]}),
        ),
        "losses of several outputs, empty steps": Case(several, pairs, settings=FEW, shards=SHARDS),
        "masked loss, validated": Case(tagger(), (WORDS, TAGS), validation=(WORDS[:31], TAGS[:31])),
    }


def metric_cases() -> dict[str, Case]:
    return {
        "metric of a whole batch": Case(
            regressor("mse", metrics=lambda: [largest_error, "mae"]), (X, TARGETS)
        ),
        "metric of a whole batch, empty steps": Case(
            regressor("mse", metrics=lambda: [largest_error]),
            (X, TARGETS),
            settings=FEW,
            shards=SHARDS,
        ),
        "metric of at least eight rows": Case(  # the last batch has 12, a worker 6 of them
            regressor("mse", metrics=lambda: [largest_eight]), (X[:76], TARGETS[:76])
        ),
        "metric of a whole batch of few rows": Case(
            regressor("mse", metrics=lambda: [mean_error]),
            (X, TARGETS),
            batch_size=2,
            settings=FEW,
            shards=SHARDS,
            epochs=1,
        ),
        "correlation as a metric, validated": Case(
            regressor("mse", metrics=lambda: [correlation], jit_compile=True),
            (X, TARGETS),
            validation=(X[:31], TARGETS[:31]),
        ),
    }


def model_cases() -> dict[str, Case]:
    return {
        "several optimizers": Case(gan, (X, Y), tolerance=1e-5),
        "several optimizers, empty steps": Case(
            gan, (X, Y), tolerance=1e-5, settings=FEW, shards=SHARDS
        ),
        "synchronized, 3 steps": Case(normalized(steps_per_execution=3), (X, Y), tolerance=1e-5),
        "synchronized, float64": Case(
            stack(lambda: normalize(dtype="float64"), lambda: layers.Dense(3, dtype="float64")),
            (X, Y),
            tolerance=1e-8,
        ),
        "synchronized, eager": Case(normalized(run_eagerly=True), (X, Y), tolerance=1e-5),
        "synchronized, buckets": Case(
            normalized(jit_compile=True),
            (X, Y),
            tolerance=1e-5,
            settings={"exchange": Exchange(bucket_mb=1e-5)},
        ),
        "synchronized branches, empty steps": Case(
            two_branches, (IMAGES, Y), tolerance=1e-5, settings=FEW, shards=SHARDS
        ),
        "synchronized, masked, empty steps": Case(
            normalized_words, (WORDS, TAGS), tolerance=1e-5, settings=FEW, shards=SHARDS
        ),
        "synchronized, loss over the global batch": Case(
            normalized(loss=lambda: correlation), (X, TARGETS), tolerance=1e-5, settings=TOGETHER
        ),
    }


CASES = {**loss_cases(), **metric_cases(), **model_cases()}


@pytest.mark.parametrize("name", sampled(CASES, 3))
def test_workers_reach_together_what_one_process_reaches(
    name: str, trained: dict[str, Any]
) -> None:
    check_equal(CASES[name], trained[name], CASES[name].callbacks, name)
