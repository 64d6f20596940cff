"""Training by several workers equals training by one process on the same global batches.

With complete calls of `barrier_train`; `test_exact_cases` checks more of what Keras offers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import build_dense, full, largest_difference

import pybackend
from pybackend import barrier_train
from pybackend.core.data.sharding import replay_batches
from pybackend.mnist_example import digit_model, mnist


def replay(
    model: Any,
    x: Any,
    y: Any,
    *,
    workers: int,
    batch_size: int,
    epochs: int,
    seed: int,
    sample_weight: Any = None,
) -> dict[str, float]:
    """Train in this process on the combined batches of the workers.

    Return the metrics over all rows of the last epoch.
    """
    sums: dict[str, float] = {}
    for epoch in range(epochs):
        sums = {}
        for rows in replay_batches(len(x), workers, batch_size, seed=seed, epoch=epoch):
            weight = None if sample_weight is None else sample_weight[rows]
            model.reset_metrics()
            logs = model.train_on_batch(x[rows], y[rows], sample_weight=weight, return_dict=True)
            for name, value in logs.items():
                sums[name] = sums.get(name, 0.0) + float(value) * len(rows)
    # As at the end of `fit`: a moving average of the weights replaces them.
    model.optimizer.finalize_variable_values(model.trainable_weights)
    return {name: total / len(x) for name, total in sums.items()}


def digits(count: int) -> tuple[Any, Any]:
    """The package's own images of digits."""
    found = mnist(
        Path(pybackend.__file__).parent / "core" / "data" / "mnist_subset.npz", limit=count
    )
    return found.x_train[..., None].astype("float32") / 255, found.y_train


@pytest.fixture
def floatx(request: Any) -> Iterator[str]:
    """Set the dtype of Keras's models, here and on the workers."""
    keras.config.set_floatx(request.param)
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(
    ("rows", "workers", "batch_size", "eagerly"),
    [
        (101, 2, 8, False),
        (97, 3, 8, False),  # the last step has one row, so two workers have none
        full(64, 2, 32, False),
        full(101, 1, 16, False),
        full(50, 3, 100, False),
        full(97, 3, 8, True),
        full(5, 4, 1, False),
    ],
)
def test_workers_train_what_fit_trains(
    rows: int, workers: int, batch_size: int, eagerly: bool
) -> None:
    """Workers and their batch sizes, multiplied, are the batch size of Keras's own ``fit``."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 8)).astype("float32"), rng.integers(0, 3, rows)
    model = build_dense()
    model.compile("adam", model.loss, metrics=["accuracy"], run_eagerly=eagerly)
    options: Any = {"epochs": 2, "shuffle": False, "verbose": 0}
    result = barrier_train(None, model, (x, y), workers=workers, batch_size=batch_size, **options)
    history = model.fit(x, y, batch_size=workers * batch_size, **options).history
    assert largest_difference(model, result.model) <= 1e-6
    assert result.history["loss"] == pytest.approx(history["loss"], rel=1e-5)
    assert result.history["accuracy"] == pytest.approx(history["accuracy"], rel=1e-6)


# In float32, rounding sometimes decides on which side of the relu's kink a number is, and the
# weights differ by about 1e-5, as in one process that adds the rows of a batch in another order.
# This number of steps is for values in which that does not happen.
@pytest.mark.parametrize(
    ("floatx", "epochs", "tolerance"),
    [full("float32", 1, 1e-6), ("float64", 3, 1e-12)],
    indirect=["floatx"],
)
def test_convolutional_network_two_workers(floatx: str, epochs: int, tolerance: float) -> None:
    x, y = digits(1600)
    x = x.astype(floatx)
    keras.utils.set_random_seed(2)
    model = digit_model()
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    result = barrier_train(
        None, model, (x, y), workers=2, epochs=epochs, batch_size=32, seed=8, verbose=0
    )
    assert [w.steps for w in result.workers] == [25 * epochs, 25 * epochs]
    replay(model, x, y, workers=2, batch_size=32, epochs=epochs, seed=8)
    assert largest_difference(model, result.model) <= tolerance
    assert len({w.weights_sha256 for w in result.workers}) == 1


def test_unshuffled_training_is_keras_fit_itself(dense_model: Any, rows: Any) -> None:
    x, y = rows[0][:480], rows[1][:480]
    result = barrier_train(
        "local", dense_model, (x, y), workers=3, epochs=2, batch_size=20, shuffle=False, verbose=0
    )
    # 3 workers x 20 rows = 60, which divides the rows: the global batches are those of fit.
    history = dense_model.fit(x, y, batch_size=60, epochs=2, shuffle=False, verbose=0).history
    assert largest_difference(dense_model, result.model) <= 1e-6
    np.testing.assert_allclose(result.history["loss"], history["loss"], rtol=1e-5)
    np.testing.assert_allclose(result.history["accuracy"], history["accuracy"], rtol=1e-6)


@pytest.mark.parametrize("rows_used", [7, full(101)], ids=["steps-without-rows", "uneven"])
def test_rows_that_do_not_divide_evenly_count_once(rows_used: int, rows: Any) -> None:
    x, y = rows[0][:rows_used], rows[1][:rows_used]
    keras.utils.set_random_seed(3)
    model = build_dense()
    # 7 rows in local batches of one: 3, 2 and 2 rows in 3 steps, so two workers skip one.
    batch_size = 1 if rows_used == 7 else 16
    result = barrier_train(
        None, model, (x, y), workers=3, epochs=2, batch_size=batch_size, seed=4, verbose=0
    )
    last = replay(model, x, y, workers=3, batch_size=batch_size, epochs=2, seed=4)
    assert largest_difference(model, result.model) <= 1e-6
    assert sum(w.rows for w in result.workers) == rows_used
    for name in ("loss", "accuracy"):
        assert result.history[name][-1] == pytest.approx(last[name], abs=1e-6)


@pytest.mark.full
def test_adam_clipping_weights_and_regularization(rows: Any) -> None:
    x, y = rows
    weight = np.linspace(0.1, 2.0, len(x)).astype("float32")
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh", kernel_regularizer="l2"),
            keras.layers.Dense(3),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01, global_clipnorm=0.05),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    result = barrier_train(
        None, model, (x, y, weight), workers=2, epochs=2, batch_size=32, seed=6, verbose=0
    )
    replay(model, x, y, workers=2, batch_size=32, epochs=2, seed=6, sample_weight=weight)
    # Adam divides by the root of a small second moment, which magnifies rounding.
    assert largest_difference(model, result.model) <= 1e-5


@pytest.mark.full
def test_few_validation_rows_leave_workers_without_any(rows: Any) -> None:
    validation = (rows[0][:4], rows[1][:4])
    result = barrier_train(
        None,
        build_dense,
        rows,
        workers=3,
        batch_size=1,
        steps_per_epoch=2,
        validation_data=validation,
        verbose=0,
    )
    expected = result.model.evaluate(*validation, verbose=0, return_dict=True)
    assert result.history["val_loss"][-1] == pytest.approx(expected["loss"], abs=1e-5)


def test_validation_and_rank_metrics_are_those_of_all_rows(dense_model: Any, rows: Any) -> None:
    x, y = rows
    binary = (y > 0).astype("float32")
    keras.utils.set_random_seed(8)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile("sgd", "binary_crossentropy", metrics=[keras.metrics.AUC(), "accuracy"])
    result = barrier_train(
        None,
        model,
        (x, binary),
        workers=2,
        epochs=1,
        batch_size=50,
        seed=1,
        validation_data=(x[:77], binary[:77]),
        verbose=0,
    )
    expected = result.model.evaluate(x[:77], binary[:77], verbose=0, return_dict=True)
    assert set(expected) == {"loss", "auc", "accuracy"}
    for name, value in expected.items():
        assert result.history[f"val_{name}"][-1] == pytest.approx(value, abs=1e-5)


@pytest.mark.full
def test_optimizer_state_travels_to_the_workers(dense_model: Any, rows: Any) -> None:
    x, y = rows[0][:120], rows[1][:120]
    dense_model.fit(x, y, batch_size=60, shuffle=False, verbose=0)  # leaves momenta behind
    before = dense_model.get_weights()
    result = barrier_train(
        None, dense_model, (x, y), workers=2, batch_size=30, shuffle=False, verbose=0
    )
    for own, kept in zip(dense_model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(own, kept)  # the caller's model is not changed
    dense_model.fit(x, y, batch_size=60, shuffle=False, verbose=0)
    assert largest_difference(dense_model, result.model) <= 1e-6


@pytest.mark.full
def test_same_seed_same_weights_other_seed_others(rows: Any) -> None:
    def train(seed: int) -> str:
        return barrier_train(
            None, build_dense, rows, workers=2, batch_size=50, seed=seed, verbose=0
        ).model_sha256

    first = train(1)
    assert train(1) == first
    assert train(2) != first
