"""The engine around ``fit``: randomness, statistics, callbacks, errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import build_dense, full, record_outcome

from pybackend import InputError, ModelOptions, WorkerFailedError, barrier_train, hosts
from pybackend.core.api.prepared_training import note_files
from pybackend.core.engine.equal_state import offset_seeds
from pybackend.core.engine.train import CALLBACK_ORDER, check_order, order_callbacks
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.worker_options import Exchange, LocalSteps
from pybackend.core.launchers import launcher_for
from pybackend.core.model.callbacks import check_callbacks, select_callbacks
from pybackend.core.model.checks import check_model
from pybackend.core.model.view import ModelView

TWO = TrainingJob(workers=2)


def test_callbacks_in_another_order_are_refused() -> None:
    names = [name for name, _ in CALLBACK_ORDER]
    assert order_callbacks({name: [name, name] for name in reversed(names)})[::2] == names
    check_order(["clock", "sync", "own", "own", "stop"])
    with pytest.raises(AssertionError, match="is not the order"):
        check_order(["clock", "sync", "stop", "own"])
    with pytest.raises(AssertionError, match="unknown callbacks"):
        order_callbacks({"sync": [1], "synch": [2]})


class StopRankOne(keras.callbacks.Callback):
    """Asks to stop on one rank only, after the first epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        import os

        if os.environ["TFDIST_RANK"] == "1":
            self.model.stop_training = True


class NoteRank(keras.callbacks.Callback):
    """Writes a file per rank on which it runs."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        import os

        name = f"{os.environ['TFDIST_RANK']}-{epoch}"
        Path(self.folder, name).write_text(f"{logs['loss']:.9f} {logs['val_loss']:.9f}")


def test_callbacks_run_where_documented_and_stop_together(rows: Any, tmp_path: Path) -> None:
    result = barrier_train(
        None,
        build_dense,
        rows,
        workers=2,
        epochs=5,
        batch_size=64,
        seed=1,
        validation_data=rows,
        callbacks=[
            NoteRank(str(tmp_path)),
            StopRankOne(),
            keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        ],
        verbose=0,
    )
    assert result.epochs == 1
    assert len(result.history["loss"]) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0-0", "1-0", "log.csv"]
    assert (tmp_path / "0-0").read_text() == (tmp_path / "1-0").read_text()
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 2


def test_batch_normalization_statistics_agree_on_all_ranks(rows: Any) -> None:
    def build() -> Any:
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.BatchNormalization(momentum=0.0),
                keras.layers.Dense(3),
            ]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    x, y = rows
    result = barrier_train(
        None, build, (x, y), workers=2, batch_size=250, shuffle=False, seed=1, verbose=0
    )
    assert len({w.weights_sha256 for w in result.workers}) == 1
    # With momentum 0 and one step the moving mean is the batch mean: the average over all rows.
    moving_mean = result.model.layers[0].moving_mean.numpy()
    np.testing.assert_allclose(moving_mean, x.mean(axis=0), atol=1e-6)


def test_ranks_draw_different_dropout_masks() -> None:
    def masks(rank: int) -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5)])
        offset_seeds(model, rank)
        return model(np.ones((1, 64), "float32"), training=True).numpy()

    assert (masks(0) == masks(0)).all()
    assert (masks(0) != masks(1)).any()
    assert (masks(1) != masks(2)).any()


def test_one_worker_is_plain_keras(dense_model: Any, rows: Any) -> None:
    x, y = rows
    result = barrier_train(
        None, dense_model, rows, workers=1, epochs=2, batch_size=50, shuffle=False, verbose=0
    )
    dense_model.fit(x, y, batch_size=50, epochs=2, shuffle=False, verbose=0)
    for one, other in zip(dense_model.get_weights(), result.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-7)


@pytest.mark.full
def test_several_inputs_and_outputs(rows: Any) -> None:
    def build() -> Any:
        left = keras.Input((8,), name="left")
        right = keras.Input((8,), name="right")
        both = keras.layers.Dense(4)(keras.layers.Concatenate()([left, right]))
        model = keras.Model(
            {"left": left, "right": right},
            {
                "a": keras.layers.Dense(3, name="a")(both),
                "b": keras.layers.Dense(1, name="b")(both),
            },
        )
        model.compile(
            "sgd",
            {"a": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "b": "mse"},
        )
        return model

    x, y = rows
    data = ({"left": x, "right": -x}, {"a": y, "b": x[:, :1]})
    result = barrier_train(None, build, data, workers=2, batch_size=64, seed=3, verbose=0)
    keras.utils.set_random_seed(3)
    assert set(result.history) >= {"loss", "a_loss", "b_loss"}
    assert np.isfinite(result.history["loss"]).all()


@pytest.mark.full
def test_subclassed_model_with_its_own_train_step(rows: Any) -> None:
    class Doubled(keras.Model):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.dense = keras.layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                loss = 2.0 * self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

        def get_config(self) -> dict[str, Any]:
            return {}

    keras.utils.set_random_seed(1)
    model = Doubled()
    model.compile(
        keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    x, y = rows[0][:400], rows[1][:400]
    model(x[:1])
    result = barrier_train(
        None,
        model,
        (x, y),
        workers=2,
        batch_size=100,
        shuffle=False,
        model_options=ModelOptions(custom_objects={"Doubled": Doubled}),
        verbose=0,
    )
    assert result.model_format == "keras"
    model.fit(x, y, batch_size=200, shuffle=False, verbose=0)
    for one, other in zip(model.get_weights(), result.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def compiled(*layers: Any, loss: Any = "mse") -> Any:
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("sgd", loss)
    return model


def two_masked_outputs() -> Any:
    words = keras.Input((8,))
    hidden = keras.layers.Embedding(5, 2, mask_zero=True)(words)
    model = keras.Model(words, [keras.layers.Dense(1)(hidden), keras.layers.Dense(2)(hidden)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]), "not compiled"),
        (
            lambda: compiled(keras.layers.BatchNormalization(synchronized=True, renorm=True)),
            "synchronized=True together with renorm=True",
        ),
        (
            lambda: compiled(
                keras.layers.Dense(1), loss=keras.losses.MeanSquaredError(reduction="sum")
            ),
            "reduction='sum'",
        ),
        (two_masked_outputs, "leaves time steps or a class out of the loss and has 2 outputs"),
    ],
    ids=["uncompiled", "synchronized", "sum", "mask"],
)
def test_refused_models_name_the_part(model: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_model(ModelView(model()), TWO)


def stateful() -> Any:
    parts = [keras.layers.Reshape((4, 2)), keras.layers.LSTM(2, stateful=True)]
    model = keras.Sequential([keras.Input(batch_shape=(4, 8)), *parts])
    model.compile("sgd", "mse")
    return model


class TrainsByItself(keras.Sequential):
    """May use any optimizer."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def by_itself() -> Any:
    model = TrainsByItself([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def with_two_optimizers() -> Any:
    model = by_itself()
    model.second = keras.optimizers.Adam()
    return model


def with_own_second_optimizer() -> Any:
    model = by_itself()
    model.second = [keras.optimizers.Adam(), OwnApply(0.1)]
    return model


class Inside(keras.layers.Layer):
    """Keeps a layer in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"norm": [keras.layers.BatchNormalization(synchronized=True)]}

    def call(self, x: Any) -> Any:
        return self.kept["norm"][0](x)


class OwnApply(keras.optimizers.SGD):
    """Changes gradients before they are averaged."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        return super().apply_gradients([(g * 2, v) for g, v in grads_and_vars])


def compiled_with(optimizer: Any, loss: Any = "mse") -> Any:
    model = compiled(keras.layers.Dense(3))
    model.compile(optimizer, loss)
    return model


def masks_and_activities() -> Any:
    words = keras.layers.Embedding(5, 2, mask_zero=True, activity_regularizer="l2")
    return compiled(words, keras.layers.Dense(1))


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "synchronized batch normalization and local steps": (
        lambda: compiled(Inside()),
        {"exchange": LocalSteps(2)},
        "synchronized=True together with `LocalSteps`",
    ),
    "the loss Circle": (
        lambda: compiled_with("sgd", keras.losses.Circle()),
        {},
        "Circle compares the rows",
    ),
    "an own apply_gradients": (
        lambda: compiled_with(OwnApply(0.1)),
        {},
        "has its own apply_gradients",
    ),
    "moving averages and local steps": (
        lambda: compiled_with(keras.optimizers.SGD(0.1, use_ema=True)),
        {"exchange": LocalSteps(2)},
        "`LocalSteps` cannot be combined with an optimizer with use_ema=True",
    ),
    "masks and an activity regularizer": (masks_and_activities, {}, "has an activity regularizer"),
    "masks that reach two losses": (two_masked_outputs, {}, "has 2 outputs"),
    "several optimizers and local steps": (
        with_two_optimizers,
        {"exchange": LocalSteps(2)},
        "further optimizers",
    ),
    "an own apply_gradients of a further optimizer": (
        with_own_second_optimizer,
        {},
        "has its own apply_gradients",
    ),
    "a stateful layer": (stateful, {}, "stateful=True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused(name: str) -> None:
    model, settings, message = REFUSED[name]
    with pytest.raises(InputError, match=message) as caught:
        check_model(ModelView(model()), TrainingJob(workers=2, **settings))
    record_outcome(name, str(caught.value))


class StopInTheMiddle(keras.callbacks.Callback):
    """Asks to stop on one rank, within the second epoch; records each rank's last step."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        Path(self.folder, os.environ["TFDIST_RANK"]).write_text(f"{self.epoch} {batch}")
        if os.environ["TFDIST_RANK"] == "1" and self.epoch == 1 and batch == 2:
            self.model.stop_training = True


@pytest.mark.parametrize("transport", ["tcp", full("tf")])
def test_a_stop_in_the_middle_of_an_epoch_comes_after_the_same_step(
    rows: Any, tmp_path: Path, transport: str
) -> None:
    result = barrier_train(
        None,
        build_dense,
        rows,
        workers=2,
        epochs=5,
        batch_size=32,
        callbacks=[StopInTheMiddle(str(tmp_path))],
        exchange=Exchange(transport=transport),
        verbose=0,
    )
    assert result.epochs == 2
    # As in Keras's fit, on both ranks.
    assert [w.steps for w in result.workers] == [8 + 3, 8 + 3]
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["1 2", "1 2"]
    assert all(0 <= value <= 1 for value in result.history["accuracy"])


@pytest.mark.full
def test_a_model_fitted_before_still_exchanges_gradients(rows: Any) -> None:
    x, y = rows[0][:64], rows[1][:64]

    def build() -> Any:
        import tensorflow as tf

        model = build_dense()
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(16), verbose=0)
        return model

    result = barrier_train(None, build, rows, workers=2, batch_size=64, verbose=0)
    assert len({w.weights_sha256 for w in result.workers}) == 1


class LogsOfItsOwn(keras.Sequential):
    """Logs a number that is not a metric's under a metric's name."""

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return {"loss": tf.reduce_mean(x), "mean_label": tf.reduce_mean(tf.cast(y, tf.float32))}


def test_logs_of_a_train_step_of_ones_own_are_averaged_over_the_rows(rows: Any) -> None:
    def build() -> Any:
        model = LogsOfItsOwn([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    x, y = rows
    result = barrier_train(
        None,
        build,
        (x[:101], y[:101]),
        workers=2,
        batch_size=101,
        verbose=0,
        model_options=ModelOptions(custom_objects={"LogsOfItsOwn": LogsOfItsOwn}),
    )
    assert result.history["loss"][0] == pytest.approx(x[:101].mean(), abs=1e-6)
    assert result.history["mean_label"][0] == pytest.approx(y[:101].mean(), abs=1e-6)


def test_a_custom_metric_is_of_all_rows_and_unequal_weights_are_reported(
    rows: Any, capsys: Any
) -> None:
    class Largest(keras.metrics.Metric):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.largest = self.add_weight(initializer="zeros")

        def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
            self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(predicted)))

        def result(self) -> Any:
            return self.largest.value

    def build() -> Any:
        model = build_dense()
        model.compile(
            "sgd",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[Largest(name="largest")],
        )
        # As if a user sets a seed per rank.
        keras.utils.set_random_seed(int(os.environ["TFDIST_RANK"]))
        model.layers[0].kernel.assign(keras.random.normal((8, 16)))
        return model

    barrier_train(
        None,
        build,
        rows,
        workers=2,
        batch_size=250,
        model_options=ModelOptions(custom_objects={"Largest": Largest}),
    )
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 2
    assert "some of the metrics are not sums over rows" in notes[0]
    assert "initial weights of worker 1 differed" in notes[1]


def test_rows_that_do_not_fit_the_model_are_refused_on_the_driver(dense_model: Any) -> None:
    with pytest.raises(InputError, match=r"shape \(5,\).*shape \(8,\)"):
        barrier_train(None, dense_model, (np.ones((10, 5)), np.zeros(10)), workers=2)


def test_refused_callbacks() -> None:
    with pytest.raises(InputError, match=r"object, which is not a keras\.callbacks\.Callback"):
        check_callbacks([object()])
    with pytest.raises(InputError, match=r"Observer\(on_epoch_end=...\) calls a function"):
        check_callbacks([print])


def test_files_and_what_asks_for_it_are_of_rank_0(tmp_path: Path) -> None:
    everywhere, once = keras.callbacks.LambdaCallback(), keras.callbacks.LambdaCallback()
    once.rank_0_only = True
    files = [keras.callbacks.CSVLogger("log.csv"), keras.callbacks.ModelCheckpoint("best.keras")]
    assert select_callbacks(0, [everywhere, once, *files]) == [everywhere, once, *files]
    assert select_callbacks(1, [everywhere, once, *files]) == [everywhere]
    (note,) = note_files(files, hosts("ann:2"))
    assert "CSVLogger('log.csv'), ModelCheckpoint('best.keras'): worker 0 writes" in note.text
    absolute = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    assert note_files(absolute, hosts("ann:2")) == note_files(files, launcher_for("local")) == []


def test_one_worker_may_do_what_several_cannot() -> None:
    summed = keras.losses.MeanSquaredError(reduction="sum")
    view = ModelView(compiled(keras.layers.Dense(1), loss=summed))
    check_model(view, TrainingJob(workers=1))


@pytest.mark.parametrize(
    ("built", "message"),
    [
        (5, "returned int, not a Keras model"),
        (None, "returned None, not a Keras model: end it with `return model`"),
    ],
)
def test_a_model_function_is_checked_on_the_workers(rows: Any, built: Any, message: str) -> None:
    with pytest.raises(WorkerFailedError, match=message) as caught:
        barrier_train(None, lambda: built, rows, workers=2, verbose=0)
    assert caught.value.exception_type == "InputError"


@pytest.mark.parametrize("safe_mode", [True, full(False)])
def test_a_model_that_carries_code_comes_back(rows: Any, safe_mode: bool, tmp_path: Path) -> None:
    def build() -> Any:
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Lambda(lambda x: x * 2), keras.layers.Dense(3)]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    result = barrier_train(
        None,
        build,
        rows,
        workers=2,
        batch_size=64,
        model_options=ModelOptions(safe_mode=safe_mode),
        verbose=0,
    )
    assert result.model_format == ("weights.h5" if safe_mode else "h5")
    expected = result.model.predict(rows[0][:2], verbose=0)
    assert expected.shape == (2, 3)
    saved = keras.saving.load_model(result.save(tmp_path / "model.keras"), safe_mode=False)
    assert np.array_equal(saved.predict(rows[0][:2], verbose=0), expected)
