"""Features that users of Keras's fit expect: validation on a share of the rows, data frames."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from conftest import full, largest_difference
from test_exact_cases import VAE, alike, vae

from pybackend import (
    InputError,
    WorkerFailedError,
    barrier_evaluate,
    barrier_predict,
    barrier_train,
    to_sql,
)

LEVELS = ["cat", "dog", "owl"]


@pytest.mark.full
def test_a_pandas_frame_gives_what_its_arrays_give(rows: Any, dense_model: Any) -> None:
    x, y = rows
    frame = pd.DataFrame({f"c{n}": x[:, n] for n in range(8)})
    frame["animal"] = np.array(LEVELS)[y]
    common: Any = {"workers": 2, "batch_size": 50, "seed": 1, "verbose": 0, "validation_split": 0.2}
    arrays = barrier_train(None, dense_model, rows, **common)
    result = barrier_train(None, dense_model, frame, label="animal", **common)
    assert largest_difference(arrays.model, result.model) == 0
    assert result.history == arrays.history
    assert (result.levels, result.features) == (LEVELS, [f"c{n}" for n in range(8)])
    assert [worker.rows for worker in result.workers] == [200, 200]
    expected = result.model.evaluate(x[400:], y[400:], verbose=0)[0]
    assert result.history["val_loss"] == pytest.approx([expected], abs=1e-6)
    # The result has its columns, in their order.
    shuffled = frame[["animal", *[f"c{n}" for n in reversed(range(8))]]][:40]
    predicted = barrier_predict(None, result, shuffled, workers=2, verbose=0)
    np.testing.assert_allclose(predicted, result.model.predict(x[:40], verbose=0), atol=1e-6)


class Halves(keras.utils.PyDataset):
    """Return the rows in batches of 70, the last of which is smaller."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self.rows = x, y

    def __len__(self) -> int:
        return -(-len(self.rows[0]) // 70)

    def __getitem__(self, index: int) -> Any:
        return tuple(part[70 * index : 70 * (index + 1)] for part in self.rows)


@pytest.mark.parametrize("kind", ["tf.data", full("PyDataset")])
@pytest.mark.full
def test_a_data_set_is_cut_over_the_workers(rows: Any, dense_model: Any, kind: str) -> None:
    x, y = rows[0][:301], rows[1][:301]
    data: Any = Halves(x, y)
    if kind == "tf.data":
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(70)
    result = barrier_train(
        None, dense_model, data, workers=2, epochs=2, validation_data=data, verbose=0
    )
    history = dense_model.fit(data, epochs=2, shuffle=False, verbose=0).history
    assert largest_difference(dense_model, result.model) <= 1e-6
    assert sum(worker.rows for worker in result.workers) == 301
    np.testing.assert_allclose(result.history["loss"], history["loss"], atol=1e-6)
    expected = dense_model.evaluate(data, verbose=0)[0]
    assert result.history["val_loss"][-1] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"validation_split": 0.5}, "`data` is a data set: pass another data set"),
        (
            {"steps_per_epoch": 7},
            r"a data set of 5 batches: omit `steps_per_epoch`, or repeat the batches",
        ),
        ({"workers": 302}, "`data` has 301 rows, fewer than workers=302"),
    ],
)
def test_arguments_that_do_not_go_with_a_data_set(
    rows: Any, dense_model: Any, arguments: Any, message: str
) -> None:
    data = Halves(rows[0][:301], rows[1][:301])
    with pytest.raises(InputError, match=message):
        barrier_train(None, dense_model, data, **arguments)


class Distances(keras.layers.Layer):
    """Distances from the anchor to the positive, and to the negative."""

    def call(self, anchor: Any, positive: Any, negative: Any) -> Any:
        others = keras.ops.stack([positive, negative], 1)
        return keras.ops.sum(keras.ops.square(anchor[:, None] - others), -1)


class Siamese(keras.Model):
    """Has three inputs and no target."""

    def __init__(self) -> None:
        super().__init__()
        embed = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activation="tanh")])
        inputs = [keras.Input((8,)) for _ in range(3)]
        self.network = keras.Model(inputs, Distances()(*map(embed, inputs)))
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def call(self, inputs: Any) -> Any:
        return self.network(inputs)

    def compute_triplets(self, data: Any) -> Any:
        distances = self(data)
        margins = distances[:, 0] - distances[:, 1] + 0.5
        return keras.ops.mean(keras.ops.softplus(margins))

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.compute_triplets(data)
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data: Any) -> Any:
        self.tracker.update_state(self.compute_triplets(data))
        return {"loss": self.tracker.result()}


def siamese() -> Any:
    model = Siamese()
    model.compile(keras.optimizers.SGD(0.1))
    return model


class Functional(keras.Model):
    """Build a functional model of two inputs, whose steps get them as a tuple."""

    def train_step(self, data: Any) -> Any:
        return super().train_step((data,))

    def test_step(self, data: Any) -> Any:
        return super().test_step((data,))


def pair() -> Any:
    made = alike(by_name=False)()
    model = Functional(made.inputs, made.outputs)
    model.compile(keras.optimizers.SGD(0.1))
    return model


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        full(vae, lambda x: x, id="VAE"),
        pytest.param(siamese, lambda x: (x, x + 0.1, x[::-1]), id="siamese"),
        full(pair, lambda x: (x, x[::-1]), id="own train_step of two inputs"),
        full(alike(), lambda x: {"left": x, "right": x[::-1]}, id="named"),
        full(alike(by_name=False), lambda x: ((x, x[::-1]),), id="list"),
    ],
)
def test_a_data_set_without_labels_is_that_of_fit(rows: Any, build: Any, parts: Any) -> None:
    data = tf.data.Dataset.from_tensor_slices(parts(rows[0][:96])).batch(32)
    keras.utils.set_random_seed(1)
    model = build()
    options: Any = {"epochs": 2, "validation_data": data, "verbose": 0}
    result = barrier_train(None, model, data, workers=2, seed=1, **options)
    history = model.fit(data, shuffle=False, **options).history
    assert largest_difference(model, result.model) <= 1e-6
    for name, values in history.items():
        np.testing.assert_allclose(result.history[name], values, rtol=1e-5)
    assert result.audit is not None
    assert (result.audit.steps > 0, result.audit.skipped) == (True, [])
    evaluated = barrier_evaluate(None, result, data, workers=2, batch_size=16, verbose=0)
    assert evaluated["loss"] == pytest.approx(history["val_loss"][-1], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("is_named", [False, True])
def test_a_function_may_return_inputs_alone(rows: Any, is_named: bool) -> None:
    x = rows[0][:64]
    given: Any = {"left": x, "right": x[::-1]} if is_named else x

    def batches(context: Any) -> Any:
        data = tf.data.Dataset.from_tensor_slices(given)
        return data.shard(context.world_size, context.rank).batch(16)

    keras.utils.set_random_seed(1)
    model = alike()() if is_named else vae()
    result = barrier_train(
        None, model, batches, workers=2, validation_data=batches, seed=1, verbose=0
    )
    history = model.fit(
        given, batch_size=32, shuffle=False, validation_data=(given,), verbose=0
    ).history
    assert largest_difference(model, result.model) <= 1e-6
    assert result.history["val_loss"] == pytest.approx(history["val_loss"], rel=1e-5)
    assert result.audit is not None
    assert (result.audit.steps, result.audit.skipped) == (1, [])


@pytest.mark.full
def test_a_frame_without_a_label_gives_what_its_array_gives(rows: Any) -> None:
    frame = pd.DataFrame({f"c{n}": rows[0][:64, n] for n in range(8)})
    keras.utils.set_random_seed(1)
    common: Any = {"workers": 2, "batch_size": 16, "seed": 1, "verbose": 0, "validation_split": 0.2}
    result = barrier_train(None, vae(), frame, label=None, **common)
    keras.utils.set_random_seed(1)
    arrays = barrier_train(None, vae(), rows[0][:64], **common)
    assert largest_difference(arrays.model, result.model) == 0
    assert result.history == arrays.history
    assert (result.levels, result.features) == (None, [f"c{n}" for n in range(8)])


class Unfit(VAE):
    """Cannot be called with any inputs."""

    def call(self, inputs: Any) -> Any:
        raise ValueError("no inputs of these")


def test_a_batch_that_no_model_takes_has_two_readings(rows: Any) -> None:
    def build() -> Any:
        model = Unfit()
        model.compile("sgd")
        return model

    data = tf.data.Dataset.from_tensors((rows[0][:8],) * 3)
    message = r"neither its first part, the x of \(x, y\), nor all of it as 3 inputs: "
    with pytest.raises(WorkerFailedError, match=message):
        barrier_train(None, build, data, workers=2, verbose=0)


def test_several_labels_keep_their_levels() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(16, 3)), columns=list("abc")).astype("float32")
    frame["kind"] = np.where(frame.a > 0, "yes", "no")
    frame["size"] = pd.Categorical(np.where(frame.b > 0, "low", "high"), ["low", "high"])
    label = {"p": "kind", "q": "size"}
    inputs = keras.Input((3,))
    model = keras.Model(inputs, {name: keras.layers.Dense(2, name=name)(inputs) for name in "pq"})
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    options: dict[str, Any] = {"label": label, "workers": 1, "shuffle": False, "verbose": 0}
    result = barrier_train(None, model, frame, **options)
    assert result.levels is None
    assert result.categories == {"kind": ["no", "yes"], "size": ["low", "high"]}

    turned = frame.assign(size=pd.Categorical(frame["size"].astype(str), ["high", "low"]))
    figures = [result.evaluate(data, label=label) for data in (frame, turned)]
    assert figures[0] == figures[1]
    again = [barrier_train(None, result, data, **options) for data in (frame, turned)]
    assert again[0].workers[0].weights_sha256 == again[1].workers[0].weights_sha256
    assert again[1].categories == result.categories
    assert len(result.predict(frame.drop(columns=["kind", "size"]))) == 16
    assert "kind" not in str(to_sql(result, "duckdb", table="t", key="a", type="raw"))
