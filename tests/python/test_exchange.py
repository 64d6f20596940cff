"""The exchange of gradients: messages, skipped exchanges, and random numbers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from conftest import build_dense, full, largest_difference
from replicas import Case, Trained, train_all
from test_exact_cases import X, Y, dense, layers, stack

from pybackend import barrier_train
from pybackend.core.collective import Alone
from pybackend.core.engine.exchange.flat_buffer import TransferSettings
from pybackend.core.engine.exchange.gradient_exchange import GradientExchange
from pybackend.core.engine.row_batches import RowBatches
from pybackend.core.engine.step_changes import Position
from pybackend.core.job.worker_options import Exchange
from pybackend.core.model.view import ModelView

FLOOD = X.copy()
FLOOD[1] = 1e30  # of rank 1; half precision cannot represent its loss


class RecordingCollective(Alone):
    """A collective of one rank that records its calls."""

    def __init__(self) -> None:
        self.summed: list[int] = []
        self.gathered: list[tuple[int, ...]] = []

    def all_reduce(self, buffer: Any, codec: Any = None, terms: Any = None) -> None:
        self.summed.append(len(buffer))
        super().all_reduce(buffer, codec, terms)

    def all_gather(self, part: Any) -> list[Any]:
        self.gathered.append(part.shape)
        return [part]


def record_exchange(
    model: Any, x: Any, y: Any, bucket_mb: float = 25.0, batch_size: int = 8
) -> Any:
    """Fit a model for one epoch and record its exchange."""
    feed = RowBatches({"x": x, "y": y}, [len(x)], 0, batch_size)
    recorded = RecordingCollective()
    model.optimizer.build(model.trainable_variables)
    exchange = GradientExchange(
        ModelView(model),
        recorded,
        Position(feed),
        TransferSettings(batch_size, bucket_mb * 1e6),
        feed.may_be_empty,
    )
    with exchange.install():
        exchange.begin_training()
        exchange.begin_epoch()
        model.fit(feed.dataset(), verbose=0)
    return recorded


def test_a_small_model_travels_in_one_buffer() -> None:
    assert record_exchange(build_dense(), X[:16], Y[:16]).summed == [211, 211]


def test_a_large_model_travels_in_buckets() -> None:
    recorded = record_exchange(build_dense(), X[:8], Y[:8], bucket_mb=1e-4)
    # Last layer first: its bias and kernel; then the first layer's, and the tail.
    assert recorded.summed == [16 + 48, 16 + 128 + 3]


def test_an_embedding_travels_as_the_rows_that_were_used() -> None:
    model = stack(
        lambda: layers.Embedding(1 << 18, 4), layers.Flatten, lambda: layers.Dense(3), shape=(2,)
    )()
    words = np.array([[5, 9], [5, 1000]])
    recorded = record_exchange(model, words, Y[:2], batch_size=2)
    assert sum(recorded.summed) < 100
    assert recorded.gathered == [(4,), (4, 4)]


def test_accumulated_gradients_travel_once() -> None:
    model = dense(optimizer=lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))()
    # Seven steps: after three, after six, and the rest at the end of the epoch.
    assert len(record_exchange(model, X[:56], Y[:56]).summed) == 3


def test_the_model_is_as_it_was_afterwards() -> None:
    model = dense(jit_compile=True)()
    record_exchange(model, X[:16], Y[:16])
    assert "apply" not in vars(model.optimizer)
    assert "train_step" not in vars(model)
    assert model.jit_compile is True


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> dict[str, Any]:
    dropping = stack(lambda: layers.Dropout(0.5), lambda: layers.Dense(3))
    scaled = stack(
        lambda: layers.Dense(12, activation="relu", dtype="mixed_float16"),
        lambda: layers.Dense(3, dtype="float32"),
        optimizer=lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05), initial_scale=1024.0
        ),
    )
    one = {"shuffle": False}
    cases = {
        "dropout": Case(dropping, (X, Y)),
        "dropout again": Case(dropping, (X, Y)),
        "overflow": Case(scaled, (FLOOD[:8], Y[:8]), epochs=1, batch_size=4, settings=one),
        "no overflow": Case(scaled, (X[:8], Y[:8]), epochs=1, batch_size=4, settings=one),
        "batch normalization": Case(
            stack(layers.BatchNormalization, lambda: layers.Dense(3)), (X, Y)
        ),
    }
    return train_all(cases, tmp_path_factory.mktemp("exchange"))


def found(trained: dict[str, Any], name: str) -> Trained:
    outcome = trained[name]
    assert isinstance(outcome, Trained), outcome
    assert len(set(outcome.digests)) == 1
    return outcome


@pytest.mark.full
def test_dropout_repeats_itself_by_the_seed(trained: dict[str, Any]) -> None:
    one, other = found(trained, "dropout"), found(trained, "dropout again")
    assert one.digests == other.digests


@pytest.mark.full
def test_an_overflow_on_one_worker_skips_the_step_on_all(trained: dict[str, Any]) -> None:
    keras.utils.set_random_seed(1)
    skipped, stepped = found(trained, "overflow"), found(trained, "no overflow")
    fresh = stack(
        lambda: layers.Dense(12, activation="relu", dtype="mixed_float16"),
        lambda: layers.Dense(3, dtype="float32"),
    )()
    assert largest_difference(fresh, skipped.model) == 0
    assert largest_difference(fresh, stepped.model) > 0


def test_moving_statistics_agree(trained: dict[str, Any]) -> None:
    layer = found(trained, "batch normalization").model.layers[0]
    assert np.abs(layer.moving_mean.numpy()).max() > 0


@pytest.mark.parametrize("kind", [full("fp16"), full("bf16")])
def test_compressed_gradients_come_close(rows: Any, dense_model: Any, kind: str) -> None:
    options: Any = {"workers": 2, "epochs": 3, "batch_size": 50, "seed": 1, "verbose": 0}
    exact = barrier_train(None, dense_model, rows, **options)
    close = barrier_train(None, dense_model, rows, exchange=Exchange(compression=kind), **options)
    assert largest_difference(exact.model, close.model) < 0.01
    assert len({w.weights_sha256 for w in close.workers}) == 1


@pytest.mark.full
@pytest.mark.parametrize("bucket_mb", [25.0, 1e-5], ids=["one buffer", "buckets"])
def test_tensorflows_collectives_reach_the_same(
    rows: Any, dense_model: Any, bucket_mb: float, capfd: pytest.CaptureFixture[str]
) -> None:
    options: Any = {"workers": 2, "epochs": 2, "batch_size": 36, "seed": 1, "verbose": 0}
    tcp = barrier_train(None, dense_model, rows, **options)
    exchange = Exchange(transport="tf", bucket_mb=bucket_mb)
    options["verbose"] = 1
    tf = barrier_train(None, dense_model, rows, exchange=exchange, **options)
    assert capfd.readouterr().out.count("accept every connection, without a token") == 1
    assert largest_difference(tcp.model, tf.model) <= 1e-6
    assert len({w.weights_sha256 for w in tf.workers}) == 1
