"""Observers in the session that started a training: their values, and how they stop it."""

from __future__ import annotations

import json
import threading
from typing import Any

import keras
import numpy as np
import pytest
from conftest import build_dense, worker_processes
from standalone import low_port

from pybackend import (
    Elastic,
    InputError,
    Observer,
    ParameterServer,
    WorkerFailedError,
    barrier_train,
)
from pybackend.core.api.observer import Observers, split_observers
from pybackend.core.job.messages import Answers, EpochEnded, GoOn, StepEnded, StopTraining

EPOCH = EpochEnded(2, 5, 1.0, {"loss": 0.5})
STEP = StepEnded(2, 5, 3, 10, 96, 0.5, {"loss": 0.6})


def test_only_true_stops_and_only_rank_0_is_observed() -> None:
    seen: list[Any] = []
    answers = iter([None, "true", 1, np.True_])

    def watch(epoch: int, logs: dict[str, Any]) -> Any:
        seen.append((epoch, logs.pop("loss")))
        return next(answers)

    observers = Observers([Observer(on_epoch_end=watch)])
    other = EpochEnded(2, 5, 1.0, {"loss": 0.7}, rank=1)
    assert observers(other) is None
    assert [observers(EPOCH) for _ in range(4)] == [GoOn(2)] * 3 + [StopTraining()]
    assert seen == [(2, 0.5)] * 4
    # A step that was already on its way does not continue the training.
    assert observers(STEP) == StopTraining()
    assert Observers()(EPOCH) is None
    assert EPOCH.logs == {"loss": 0.5}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Observer(), "needs one of on_epoch_end, on_step_end"),
        (lambda: Observer(on_epoch_end=3), "`on_epoch_end` must be a function"),  # type: ignore[arg-type]
        (lambda: Observer(on_epoch_end=lambda: 1), r"`on_epoch_end` is called .* takes \(\)"),  # type: ignore[arg-type,misc]
        (lambda: Observer(on_step_end=lambda step: 1), "`on_step_end` is called"),  # type: ignore[arg-type,misc]
        (lambda: split_observers([Observer]), "pass an instance, Observer"),
    ],
)
def test_a_wrong_observer_is_an_error_at_once(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_steps_of_a_strategy_cannot_be_observed() -> None:
    observer = Observer(on_step_end=lambda step, logs: None)
    with pytest.raises(InputError, match="`on_step_end` of an Observer cannot be combined with"):
        barrier_train(
            "local",
            build_dense,
            (np.zeros((4, 8)), np.zeros(4)),
            callbacks=[observer],
            exchange=ParameterServer(),
        )


def test_the_wait_for_an_answer_ends_with_that_of_the_epoch_or_a_stop() -> None:
    answers = Answers()
    answers.take(GoOn(1))
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(answers.wait_for_epoch(2)))
    waiting.start()
    answers.take(GoOn(2))
    waiting.join(30)
    answers.forget_epochs()
    answers.take(StopTraining())
    assert [*found, answers.wait_for_epoch(1)] == [False, True]


class Count(keras.callbacks.Callback):
    """A Keras callback, which runs on the workers."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["counted"] = float(epoch)


@pytest.mark.full
def test_a_stop_after_an_epoch_is_the_end_of_a_training_of_so_many(rows: Any) -> None:
    seen: list[Any] = []

    def watch(epoch: int, logs: dict[str, Any]) -> bool:
        seen.append((epoch, logs))
        return epoch == 2

    common = {"workers": 2, "batch_size": 16, "seed": 3, "validation_data": rows, "verbose": 0}
    stopped = barrier_train(
        "local", build_dense, rows, epochs=6, callbacks=[Count(), Observer(watch)], **common
    )
    plain = barrier_train("local", build_dense, rows, epochs=2, **common)
    counted = stopped.history.pop("counted")
    assert counted == [0.0, 1.0]
    assert stopped.history == plain.history
    assert [epoch for epoch, _ in seen] == [1, 2]
    assert seen[1][1] == {name: values[1] for name, values in plain.history.items()}
    assert len({worker.weights_sha256 for worker in [*stopped.workers, *plain.workers]}) == 1


def test_a_stop_within_an_epoch_is_after_the_same_step_on_all_ranks(rows: Any) -> None:
    observer = Observer(on_step_end=lambda step, logs: np.isfinite(logs["loss"]))
    result = barrier_train(
        "local",
        build_dense,
        tuple(np.tile(part.T, 200).T for part in rows),
        workers=2,
        epochs=1,
        batch_size=1,
        callbacks=observer,
        verbose=0,
    )
    steps = {worker.steps for worker in result.workers}
    assert len(steps) == 1
    assert steps.pop() < 50_000
    assert len({worker.weights_sha256 for worker in result.workers}) == 1


def _sum_losses(y: Any, predicted: Any) -> Any:
    return keras.ops.sum(keras.losses.sparse_categorical_crossentropy(y, predicted, True))


def _build_summed() -> Any:
    model = build_dense()
    model.compile("sgd", _sum_losses)
    return model


@pytest.mark.full
def test_a_step_is_reported_before_its_audit(rows: Any) -> None:
    seen: list[int] = []
    observer = Observer(on_step_end=lambda step, logs: seen.append(step))
    with pytest.raises(WorkerFailedError, match="step 1 of epoch 1 was repeated in one process"):
        barrier_train("local", _build_summed, rows, workers=2, callbacks=observer, verbose=0)
    assert seen == [1]


def test_what_an_observer_raises_ends_the_training(rows: Any) -> None:
    def watch(epoch: int, logs: dict[str, Any]) -> None:
        raise LookupError("no such plot")

    with pytest.raises(LookupError, match="no such plot"):
        barrier_train("local", build_dense, rows, workers=2, callbacks=[Observer(watch)], verbose=0)
    assert not worker_processes()


def test_an_elastic_training_of_one_worker_stops_too(rows: Any) -> None:
    stopped = barrier_train(
        "local",
        build_dense,
        rows,
        workers=Elastic(1),
        epochs=3,
        callbacks=[Observer(lambda epoch, logs: True)],
        verbose=0,
    )
    assert stopped.epochs == 1


def test_processes_that_join_observe_on_the_thread_that_calls(rows: Any, monkeypatch: Any) -> None:
    # Only one process, as TF_CONFIG describes it.
    address = f"127.0.0.1:{low_port()}"
    config = {"cluster": {"worker": [address]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    threads: list[Any] = []

    def watch(epoch: int, logs: dict[str, Any]) -> bool:
        threads.append(threading.current_thread())
        return epoch == 1

    result = barrier_train(
        None, build_dense, rows, epochs=3, callbacks=[Observer(watch)], verbose=0
    )
    assert (result.epochs, threads) == (1, [threading.main_thread()])
