"""TensorFlow's own distribution strategies: what each can do, and asynchronous training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import build_dense

from pybackend import TrainResult, barrier_train

ROLES = {"chief": 1, "worker": 1, "ps": 1}


def make_rows(count: int = 600) -> tuple[Any, Any]:
    """Rows of 8 features whose class is the largest of the first three."""
    x = np.random.default_rng(3).normal(size=(count, 8)).astype("float32")
    return x, x[:, :3].argmax(axis=1)


def train(model: Any, data: Any, **changes: Any) -> TrainResult:
    arguments = {"strategy": "parameter_server", "workers": 2, "seed": 1, **changes}
    return barrier_train("local", model, data, **arguments)


def test_workers_train_what_lies_on_parameter_servers(dense_model: Any, capfd: Any) -> None:
    x, y = make_rows()
    before = [weight.numpy() for weight in dense_model.weights]
    result = train(dense_model, (x, y), epochs=8, validation_data=(x[:100], y[:100]))
    assert set(result.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert result.history["accuracy"][-1] > 0.8 > result.history["accuracy"][0]
    # What comes back is what was evaluated last, and each step was counted by its optimizer.
    figures = result.model.evaluate(x[:100], y[:100], verbose=0, return_dict=True)
    assert figures["loss"] == pytest.approx(result.history["val_loss"][-1], rel=1e-5)
    assert figures["accuracy"] == pytest.approx(result.history["val_accuracy"][-1])
    assert int(result.model.optimizer.iterations.numpy()) == 8 * 20
    assert [report.rows for report in result.workers] == [150] * 4
    assert result.workers[0].steps == 160
    said = capfd.readouterr().out
    assert "of 160 asynchronous steps worker 1 took" in said
    for weight, kept in zip(dense_model.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), kept)


def test_one_worker_takes_the_steps_of_one_process() -> None:
    x, y = make_rows(480)
    weights = np.linspace(0.5, 2, 480).astype("float32")

    def build() -> Any:
        import keras

        keras.utils.set_random_seed(5)
        model = build_dense()
        schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.7)
        model.compile(keras.optimizers.Adam(schedule), model.loss, weighted_metrics=["accuracy"])
        return model

    result = train(
        build, (x, y, weights), workers=None, roles=ROLES, epochs=3, batch_size=32, shuffle=False
    )
    # Rows are dealt to ranks in turn, and the worker has those of the chief first.
    order = np.concatenate([np.arange(rank, 480, 3) for rank in range(3)])
    model = build()
    rows = (x[order], y[order])
    fitted = model.fit(
        *rows, sample_weight=weights[order], epochs=3, batch_size=32, shuffle=False, verbose=0
    )
    for name, expected in fitted.history.items():
        np.testing.assert_allclose(result.history[name], expected, rtol=1e-5)
    for own, other in zip(result.model.weights, model.weights, strict=True):
        np.testing.assert_allclose(own.numpy(), other.numpy(), atol=1e-6)
    for own, other in zip(result.model.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_allclose(own.numpy(), other.numpy(), atol=1e-6)
