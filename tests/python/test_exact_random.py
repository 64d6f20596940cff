"""Random models, losses and data: two workers get the result of one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from replicas import Case, check_equal, sampled
from test_probes import correlation

from pybackend.core.job.worker_options import Exchange

# The first test waits until the workers have trained all cases.
layers = keras.layers
losses = keras.losses
optimizers = keras.optimizers
FIRST = int(os.environ.get("TFDIST_TEST_SEED", "0"))
DRAWN = 10


def _draw_part(generator: np.random.Generator) -> Callable[[], Any]:
    units = int(generator.integers(2, 9))
    activation = str(generator.choice(["relu", "tanh", "gelu", "softplus"]))
    penalty = str(generator.choice(["l1", "l2"])) if generator.random() < 0.3 else None
    parts: list[Callable[[], Any]] = [
        lambda: layers.Dense(units, activation=activation, kernel_regularizer=penalty),
        lambda: layers.LayerNormalization(),
        lambda: layers.Dense(units, use_bias=False, activity_regularizer=penalty),
        lambda: layers.Dense(units, kernel_constraint="non_neg"),
        lambda: layers.GroupNormalization(1),
        # Some rows may be nearly equal: a small epsilon would magnify rounding.
        lambda: layers.BatchNormalization(epsilon=0.1, synchronized=True),
    ]
    return parts[int(generator.integers(len(parts)))]


def _small_sum(y: Any, predicted: Any) -> Any:
    return 0.01 * ops.sum((y - predicted) ** 2)


def _draw_case(seed: int) -> Case:
    generator = np.random.default_rng(seed)
    rows, width = int(generator.integers(20, 120)), int(generator.integers(2, 9))
    outputs = int(generator.integers(2, 5))
    x = generator.normal(size=(rows, width)).astype("float32")
    classes = generator.integers(0, outputs, rows)
    values = generator.normal(size=(rows, outputs)).astype("float32")
    shares = generator.dirichlet(np.ones(outputs), rows).astype("float32")
    loss, y = [
        (lambda: losses.SparseCategoricalCrossentropy(from_logits=True), classes),
        (lambda: losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1), shares),
        (lambda: losses.Huber(0.5), values),
        (lambda: losses.LogCosh(), values),
        (lambda: losses.CosineSimilarity(), values),
        (lambda: losses.BinaryFocalCrossentropy(from_logits=True), shares.round()),
    ][int(generator.integers(6))]
    optimizer = [
        lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        lambda: optimizers.SGD(0.1, clipnorm=0.1, weight_decay=0.01),
        lambda: optimizers.SGD(
            optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), use_ema=True, ema_momentum=0.9
        ),
        lambda: optimizers.SGD(0.1, global_clipnorm=0.2),
        lambda: optimizers.Adagrad(0.05),
    ][int(generator.integers(5))]
    parts = [_draw_part(generator) for _ in range(int(generator.integers(1, 4)))]

    def build() -> Any:
        hidden = [part() for part in parts]
        model = keras.Sequential([keras.Input((width,)), *hidden, layers.Dense(outputs)])
        model.compile(optimizer(), loss(), weighted_metrics=[])
        return model

    weights = (generator.uniform(size=rows).astype("float32"),) if generator.random() < 0.4 else ()
    batch_size = int(generator.integers(1, 20))
    settings: dict[str, Any] = {"shuffle": [True, False, "global"][int(generator.integers(3))]}
    if generator.random() < 0.3:
        settings["steps_per_epoch"] = 1 + (rows // 2) // batch_size // 2
    if generator.random() < 0.4:
        settings["exchange"] = Exchange(loss_over="global batch")
        if generator.random() < 0.5 and y is not classes:
            loss = [lambda: correlation, lambda: _small_sum][int(generator.integers(2))]
    return Case(build, (x, y, *weights), batch_size=batch_size, settings=settings, tolerance=1e-5)


CASES = {f"seed {seed}": _draw_case(seed) for seed in range(FIRST, FIRST + DRAWN)}


@pytest.mark.parametrize("name", sampled(CASES, 1))
def test_whatever_is_drawn_is_exact(name: str, trained: dict[str, Any]) -> None:
    check_equal(CASES[name], trained[name])
