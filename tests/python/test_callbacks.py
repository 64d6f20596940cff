"""Keras's callbacks and custom ones, with two workers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import build_dense, full, largest_difference
from test_exact_cases import dense

from pybackend import WorkerFailedError, barrier_train


def callbacks() -> list[Any]:
    return [
        keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=0, min_delta=0.02),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs["val_loss"] > 0),
    ]


@pytest.mark.full
def test_plateaus_early_stops_and_best_weights_are_those_of_keras_fit(
    rows: Any, tmp_path: Path
) -> None:
    x, y = rows[0][:400], rows[1][:400]
    validation = rows[0][400:], rows[1][400:]
    keras.utils.set_random_seed(2)
    model = build_dense()
    model.optimizer.learning_rate = 0.3
    writers = [
        keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), save_best_only=True),
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        keras.callbacks.TensorBoard(str(tmp_path / "board")),
    ]
    result = barrier_train(
        None,
        model,
        (x, y),
        workers=2,
        epochs=12,
        batch_size=20,
        shuffle=False,
        validation_data=validation,
        callbacks=[*callbacks(), *writers],
        verbose=0,
    )
    history = model.fit(
        x,
        y,
        epochs=12,
        batch_size=40,
        shuffle=False,
        validation_data=validation,
        callbacks=callbacks(),
        verbose=0,
    ).history
    assert 2 < result.epochs < 12
    assert result.epochs == len(history["loss"])
    np.testing.assert_allclose(result.history["learning_rate"], history["learning_rate"])
    assert len(set(history["learning_rate"])) > 1
    np.testing.assert_allclose(result.history["val_loss"], history["val_loss"], atol=1e-5)
    assert largest_difference(model, result.model) <= 1e-5
    assert len((tmp_path / "log.csv").read_text().splitlines()) == result.epochs + 1
    # One file each: only rank 0 wrote.
    assert len(list((tmp_path / "board" / "train").iterdir())) == 1
    assert len(list((tmp_path / "board" / "validation").iterdir())) == 1
    assert keras.saving.load_model(tmp_path / "best.keras").count_params() > 0


@pytest.mark.full
def test_a_figure_that_no_epoch_has_is_named(rows: Any, capsys: Any) -> None:
    absent = [
        keras.callbacks.EarlyStopping("val_loss"),
        keras.callbacks.ReduceLROnPlateau("val_accurcy", mode="max"),
        keras.callbacks.EarlyStopping("loss"),
    ]
    validation = rows[0][:8], rows[1][:8]
    given = {"workers": 2, "epochs": 2, "batch_size": 20, "verbose": 1}
    data, model = (rows[0][:40], rows[1][:40]), build_dense()
    barrier_train(None, model, data, callbacks=absent, **given)
    barrier_train(None, model, data, callbacks=absent, validation_data=validation, **given)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": it")[0] for line in lines if " monitors " in line] == [
        "note: EarlyStopping monitors 'val_loss', which is not available without validation data",
        "note: ReduceLROnPlateau monitors 'val_accurcy', which is not available without validation "
        "data",
        "note: ReduceLROnPlateau monitors 'val_accurcy', which is not available",
    ]
    known = "The available metrics are 'loss', 'accuracy', 'val_loss', 'val_accuracy'"
    assert [known in line for line in lines if " monitors " in line] == [False, False, True]


class FailOnce(keras.callbacks.Callback):
    """Fails on one rank at the begin of the third epoch, the first time."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if os.environ["TFDIST_RANK"] == "1" and epoch == 2 and not Path(self.mark).exists():
            Path(self.mark).touch()
            raise RuntimeError("the power went out")


def test_a_training_resumes_where_it_broke_off(rows: Any, tmp_path: Path) -> None:
    def train(*more: Any) -> Any:
        return barrier_train(
            None,
            build_dense,
            rows,
            workers=2,
            epochs=4,
            batch_size=50,
            seed=9,
            callbacks=list(more),
            verbose=0,
        )

    kept = str(tmp_path / "backup")
    resuming = keras.callbacks.BackupAndRestore(kept), FailOnce(str(tmp_path / "mark"))
    with pytest.raises(WorkerFailedError, match="the power went out"):
        train(*resuming)
    assert (tmp_path / "backup" / "checkpoint-000002-000000000.json").exists()
    resumed = train(*resuming)
    whole = train()
    assert resumed.history == whole.history
    assert resumed.workers[0].weights_sha256 == whole.workers[0].weights_sha256
    assert not (tmp_path / "backup").exists()  # its work is finished


def test_not_a_number_stops_all_at_once(rows: Any) -> None:
    x = rows[0].copy()
    x[1] = np.inf  # a row of rank 1
    result = barrier_train(
        None,
        dense(),
        (x, rows[1]),
        workers=2,
        epochs=3,
        batch_size=10,
        shuffle=False,
        callbacks=[keras.callbacks.TerminateOnNaN()],
        verbose=0,
    )
    assert result.epochs == 1


class StopsWithin(keras.callbacks.Callback):
    """Asks to stop after the third step, on one rank or on all."""

    def __init__(self, rank: str) -> None:
        super().__init__()
        self.rank = rank

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2 and os.environ.get("TFDIST_RANK", self.rank) in self.rank:
            self.model.stop_training = True


@pytest.mark.parametrize("rank", ["0", full("1"), full("01")])
@pytest.mark.full
def test_a_stop_within_an_epoch_is_after_the_same_step_as_in_keras_fit(
    rows: Any, rank: str
) -> None:
    batches = tf.data.Dataset.from_tensor_slices(rows).batch(40)
    model = build_dense()
    result = barrier_train(
        None,
        model,
        batches,
        workers=2,
        epochs=2,
        callbacks=[StopsWithin(rank)],
        verbose=0,
    )
    plain = build_dense()
    plain.set_weights(model.get_weights())
    history = plain.fit(batches, epochs=2, callbacks=[StopsWithin(rank)], verbose=0)
    assert int(result.model.optimizer.iterations) == int(plain.optimizer.iterations) == 3
    assert result.history["loss"] == pytest.approx(history.history["loss"], rel=1e-5)
    for one, other in zip(result.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


class MoveWeights(keras.callbacks.Callback):
    """Changes the weights of one rank after the first epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if os.environ["TFDIST_RANK"] == "1":
            self.model.layers[-1].bias.assign_add([1e-7, 0.0, 0.0])


def test_weights_that_drift_apart_are_found(rows: Any) -> None:
    message = "after epoch 1 .*bias' of worker 1 differs from that of worker 0"
    with pytest.raises(WorkerFailedError, match=message):
        barrier_train(
            None,
            build_dense,
            rows,
            workers=2,
            epochs=2,
            batch_size=125,
            callbacks=[MoveWeights()],
            verbose=0,
        )


class PretendGpus(MoveWeights):
    """Makes this process believe that it has GPUs, so that rounding makes weights differ."""

    def on_train_begin(self, logs: Any = None) -> None:
        from pybackend.core.engine import equal_state
        from pybackend.core.engine.audit import auditor

        auditor.uses_gpus = equal_state.uses_gpus = lambda collective: True


@pytest.mark.full
def test_weights_that_gpus_round_apart_are_made_equal(rows: Any, capsys: Any) -> None:
    result = barrier_train(
        None,
        build_dense,
        rows,
        workers=2,
        epochs=3,
        batch_size=125,
        seed=1,
        callbacks=[PretendGpus()],
    )
    assert len(result.history["loss"]) == 3
    note = r"note: weights of the workers differed by [1-9]e-\d\d of their norm after an epoch"
    assert len(re.findall(note, capsys.readouterr().out)) == 1
    # The step is repeated in full precision, without a difference.
    assert result.audit.steps >= 2
    assert result.audit.weights < 2e-5
    assert result.audit.skipped == []


class Switches(keras.callbacks.Callback):
    """Freezes the first layer at the second epoch, or thaws it; may compile the model again."""

    def __init__(self, *, compiles: bool = False) -> None:
        super().__init__()
        self.compiles = compiles

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            layer = self.model.layers[0]
            layer.trainable = not layer.trainable
            if self.compiles:
                self.model.compile("sgd", "mse")


@pytest.mark.parametrize(
    ("is_frozen", "eagerly"), [full(False, True), full(False, False), (True, False)]
)
@pytest.mark.full
def test_layers_frozen_or_thawed_meanwhile_train_as_by_keras_fit(
    rows: Any, is_frozen: bool, eagerly: bool, caplog: Any
) -> None:
    x, y = rows[0][:80], rows[1][:80]
    keras.utils.set_random_seed(2)
    model = build_dense()
    model.layers[0].trainable = not is_frozen
    model.compile("adam", model.loss, run_eagerly=eagerly)
    own = {"epochs": 3, "shuffle": False, "callbacks": [Switches()], "verbose": 0}
    with caplog.at_level("INFO", "tfdist"):
        result = barrier_train(None, model, (x, y), workers=2, batch_size=20, **own)
    history = model.fit(x, y, batch_size=40, **own).history
    np.testing.assert_allclose(result.history["loss"], history["loss"], rtol=1e-5)
    assert largest_difference(model, result.model) <= 1e-5
    assert result.model.layers[0].trainable == is_frozen
    assert "a callback froze or unfroze layers: the trained model has a new optim" in caplog.text


@pytest.mark.full
def test_a_callback_that_compiles_the_model_is_told_what_to_do(rows: Any) -> None:
    expected = r"before epoch 2 a callback called compile\(\).*`initial_epoch=1`"
    with pytest.raises(WorkerFailedError, match=expected):
        barrier_train(
            None,
            build_dense(),
            (rows[0][:80], rows[1][:80]),
            workers=2,
            epochs=3,
            callbacks=[Switches(compiles=True)],
            verbose=0,
        )


SEEN: list[float] = []


class Fills(keras.callbacks.Callback):
    """Fill lists: one of its own, one that training creates, and a global one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.losses: list[float] = []
        self.fixed = [1, 2]

    def on_train_begin(self, logs: Any = None) -> None:
        self.epochs: list[int] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])
        self.epochs.append(epoch)
        SEEN.append(logs["loss"])


def test_lists_that_callbacks_fill_on_the_workers_are_named(
    rows: Any, tmp_path: Path, capsys: Any
) -> None:
    found: dict[int, float] = {}
    own = [
        Fills("a"),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda n, logs: found.update({n: 0})),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.History(),
    ]
    barrier_train(None, build_dense, rows, workers=2, callbacks=own, verbose=1)
    (note,) = re.findall("note: callbacks run .*", capsys.readouterr().out)
    assert note == (
        "note: callbacks run on the workers and filled Fills.losses, Fills.epochs, SEEN, found, "
        "History.history there; in this session, nothing was added. Use the history of the result, "
        "or an Observer, which runs here"
    )
    assert [SEEN, found, own[0].losses] == [[], {}, []]
