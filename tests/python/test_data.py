"""Training on this machine from files and from a function: exact, as from arrays."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from conftest import build_dense, full, largest_difference

import pybackend
from pybackend import (
    InputError,
    ModelOptions,
    Recovery,
    WorkerFailedError,
    barrier_evaluate,
    barrier_train,
)
from pybackend.core.collective import Alone
from pybackend.core.data.reading import call_pipeline
from pybackend.core.data.sharding import replay_batches
from pybackend.core.data.sources import FunctionRows
from pybackend.core.engine.row_batches import PipelineBatches
from pybackend.core.job.storage_options import DataOptions
from pybackend.types import WorkerContext

LEVELS = ["cat", "dog", "owl"]


def parquet(folder: Path, rows: Any, **more: Any) -> str:
    """Write 500 rows into two files: the features in one column, the label as text."""
    x, y = rows
    columns = {
        "features": pa.array(list(x), pa.list_(pa.float32())),
        "animal": pa.array([LEVELS[label] for label in y]),
        **more,
    }
    table = pa.table(columns)
    for number, part in enumerate((table.slice(0, 180), table.slice(180))):
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=64)
    return str(folder)


def fitted(model: Any, batches: list[Any], epochs: int) -> Any:
    """Train this model in this process, one step per batch."""
    for _ in range(epochs):
        for batch in batches:
            model.train_on_batch(*batch)
    return model


@pytest.mark.full
def test_files_give_what_one_process_gives(tmp_path: Path, rows: Any, dense_model: Any) -> None:
    path = parquet(tmp_path, rows)
    result = barrier_train(
        None,
        dense_model,
        path,
        label="animal",
        workers=2,
        epochs=2,
        batch_size=25,
        shuffle=False,
        data_options=DataOptions(repartition=False),
        validation_data=str(tmp_path / "1.parquet"),
        verbose=0,
    )
    assert result.levels == LEVELS
    assert [worker.rows for worker in result.workers] == [250, 250]
    x, y = rows
    halves = [(slice(s, s + 25), slice(250 + s, 275 + s)) for s in range(0, 250, 25)]
    batches = [tuple(np.concatenate([a[p], a[q]]) for a in (x, y)) for p, q in halves]
    fitted(dense_model, batches, 2)
    assert largest_difference(dense_model, result.model) <= 1e-6
    expected = dense_model.evaluate(x[180:], y[180:], verbose=0, return_dict=True)
    assert result.history["val_loss"][-1] == pytest.approx(expected["loss"], abs=1e-6)
    categories = DataOptions(categories={"animal": LEVELS})
    figures = barrier_evaluate(
        None, dense_model, path, label="animal", data_options=categories, workers=2, verbose=0
    )
    everything = dense_model.evaluate(x, y, verbose=0, return_dict=True)
    assert figures["loss"] == pytest.approx(everything["loss"], abs=1e-6)


@pytest.mark.parametrize("shuffle", [full("global"), False, True])
def test_files_are_read_in_the_batches_that_replay_lists(
    tmp_path: Path, rows: Any, dense_model: Any, shuffle: Any
) -> None:
    path = parquet(tmp_path, rows)
    options: Any = {"batch_size": 30, "seed": 5, "shuffle": shuffle}
    result = barrier_train(None, dense_model, path, label="animal", workers=2, verbose=0, **options)
    orders = replay_batches(500, 2, epoch=0, files=True, **options)
    if not shuffle:
        assert np.concatenate(orders).tolist() == list(range(500))
    fitted(dense_model, [(rows[0][order], rows[1][order]) for order in orders], 1)
    assert largest_difference(dense_model, result.model) <= 1e-6


def build_named() -> Any:
    """Return a functional model of numbers, text, and rows of any length, of all kinds."""
    numbers = keras.Input((9,), name="numbers")
    animal = keras.Input((1,), name="animal", dtype="string")
    words = keras.Input((None,), name="words", dtype="int32")
    tracks = keras.Input((None, 2), name="tracks")
    tags = keras.Input((None,), name="tags", dtype="string")
    found = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="multi_hot")(tags)
    lookup = keras.layers.StringLookup(vocabulary=LEVELS, output_mode="one_hot")
    embedded = keras.layers.Embedding(20, 4)(words)
    pooled = keras.layers.GlobalAveragePooling1D()(embedded)
    last = keras.layers.GRU(3)(keras.layers.Masking()(tracks))
    joined = keras.layers.Concatenate()([numbers, lookup(animal), pooled, last, found])
    inputs = {"numbers": numbers, "animal": animal, "words": words, "tracks": tracks, "tags": tags}
    model = keras.Model(inputs, keras.layers.Dense(1)(joined))
    model.compile(keras.optimizers.SGD(0.01), "mse", weighted_metrics=["mae"])
    return model


def test_named_inputs_with_text_ragged_rows_and_weights(tmp_path: Path, rows: Any) -> None:
    x, y = rows
    rng = np.random.default_rng(1)
    words = [rng.integers(0, 20, rng.integers(0, 6)).tolist() for _ in y]
    tracks = [rng.random((rng.integers(0, 4), 2), "float32").tolist() for _ in y]
    weight, target = rng.random(500), rng.normal(size=500)
    tags = [["a", "b", "c"][: rng.integers(0, 4)] for _ in y]
    more = {
        "tags": pa.array(tags),
        "tracks": pa.array(tracks, pa.list_(pa.list_(pa.float64()))),
        "words": pa.array(words, pa.list_(pa.int64())),
        "age": pa.array(np.arange(500) / 500),
        "weight": pa.array(weight),
        "target": pa.array(target),
    }
    result = barrier_train(
        None,
        build_named,
        parquet(tmp_path, rows, **more),
        features={
            "numbers": ["features", "age"],
            "animal": "animal",
            "words": "words",
            "tracks": "tracks",
            "tags": "tags",
        },
        label="target",
        weight="weight",
        data_options=DataOptions(
            tensors={"words": ("int32", (None,)), "tracks": ("float32", (None, 2))},
            repartition=False,
        ),
        workers=2,
        batch_size=250,
        shuffle=False,
        seed=3,
        verbose=0,
    )
    keras.utils.set_random_seed(3)
    model = build_named()
    padded = np.zeros((500, max(map(len, words))), "int32")
    vectors = np.zeros((500, max(map(len, tracks)), 2), "float32")
    for row, (values, track) in enumerate(zip(words, tracks, strict=True)):
        padded[row, : len(values)] = values
        vectors[row, : len(track)] = np.reshape(track, (-1, 2))
    inputs = {
        "tracks": vectors,
        "tags": np.array([row + [""] * (3 - len(row)) for row in tags], dtype=object),
        "numbers": np.concatenate([x, np.arange(500)[:, None] / 500], axis=1).astype("float32"),
        "animal": np.array([[LEVELS[label]] for label in y], dtype=object),
        "words": padded,
    }
    tensors = {name: keras.ops.convert_to_tensor(value) for name, value in inputs.items()}
    fitted(model, [(tensors, target.astype("float32"), weight.astype("float32"))], 1)
    assert largest_difference(model, result.model) <= 1e-6


def build_two_labels() -> Any:
    features = keras.Input((8,))
    kind = keras.layers.Dense(3, name="kind")(features)
    size = keras.layers.Dense(1, name="size")(features)
    model = keras.Model(features, {"kind": kind, "size": size})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), {"kind": loss, "size": "mse"})
    return model


@pytest.mark.full
def test_a_table_gives_the_labels_of_several_outputs(tmp_path: Path, rows: Any) -> None:
    x, y = rows
    model = build_two_labels()
    result = barrier_train(
        None,
        model,
        parquet(tmp_path, rows, code=pa.array(y), length=pa.array(x[:, 0] * 2)),
        features="features",
        label={"kind": "code", "size": "length"},
        workers=2,
        batch_size=250,
        verbose=0,
    )
    assert result.levels is None
    fitted(model, [(x, {"kind": y, "size": x[:, 0] * 2})], 1)
    assert largest_difference(model, result.model) <= 1e-6


def test_a_function_gives_what_one_process_gives(rows: Any, dense_model: Any) -> None:
    x, y = rows
    sizes = [16 * 5, 16 * 3 + 7]  # the second worker ends earlier

    def data(context: Any) -> Any:
        import tensorflow as tf

        own = slice(context.rank * 200, context.rank * 200 + sizes[context.rank])
        return tf.data.Dataset.from_tensor_slices((x[own], y[own])).batch(16)

    result = barrier_train(
        None, dense_model, data, workers=2, epochs=2, validation_data=data, verbose=0
    )
    assert [(w.rows, w.steps) for w in result.workers] == [(80, 10), (55, 10)]
    batches = []
    for step in range(5):
        own = [np.arange(80)[16 * step :][:16], 200 + np.arange(55)[16 * step :][:16]]
        together = np.concatenate(own)
        batches.append((x[together], y[together]))
    fitted(dense_model, batches, 2)
    assert largest_difference(dense_model, result.model) <= 1e-6
    used = np.concatenate([np.arange(80), 200 + np.arange(55)])
    expected = dense_model.evaluate(x[used], y[used], verbose=0, return_dict=True)
    assert result.history["val_loss"][-1] == pytest.approx(expected["loss"], abs=1e-6)
    assert result.history["val_accuracy"][-1] == pytest.approx(expected["accuracy"], abs=1e-6)


def test_functions_and_callbacks_share_what_they_shared(rows: Any) -> None:
    import tensorflow as tf

    x, y = rows

    class State:
        """What all use."""

        def __init__(self) -> None:
            self.scale = tf.Variable(1.0)
            self.models: list[Any] = []

    class Harder(keras.callbacks.Callback):
        def __init__(self, state: State) -> None:
            super().__init__()
            self.state = state

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.state.scale.assign(1.0 + epoch)
            self.state.models[-1].layers[0].trainable = epoch > 0
            assert self.state.models[-1] is self.model

    def batches(state: State, chosen: slice) -> Any:
        data = tf.data.Dataset.from_tensor_slices((x[chosen], y[chosen])).batch(50)
        return data.map(lambda x, y: (x * state.scale, y))

    def make(state: State) -> Any:
        def build() -> Any:
            keras.utils.set_random_seed(3)
            state.models.append(build_dense())
            return state.models[-1]

        return build

    state = State()
    result = barrier_train(
        None,
        make(state),
        lambda context: batches(state, slice(50 * context.rank, 50 * context.rank + 50)),
        workers=2,
        epochs=3,
        callbacks=[Harder(state)],
        verbose=0,
    )
    state = State()
    model = make(state)()
    together = batches(state, slice(100)).unbatch().batch(100)
    model.fit(together, epochs=3, callbacks=[Harder(state)], verbose=0)
    assert largest_difference(model, result.model) <= 1e-6


def test_a_function_may_use_the_model_that_is_trained(rows: Any, dense_model: Any) -> None:
    import tensorflow as tf

    x, y = rows

    def batches(chosen: slice) -> Any:
        data = tf.data.Dataset.from_tensor_slices((x[chosen], y[chosen])).batch(50)
        return data.map(lambda x, y: (x * dense_model(x)[:, :1], y))

    result = barrier_train(
        None,
        dense_model,
        lambda context: batches(slice(50 * context.rank, 50 * context.rank + 50)),
        workers=2,
        epochs=3,
        verbose=0,
    )
    dense_model.fit(batches(slice(100)).unbatch().batch(100), epochs=3, verbose=0)
    assert largest_difference(dense_model, result.model) <= 1e-6


def test_endless_data_go_on_from_epoch_to_epoch() -> None:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((np.arange(6.0), np.arange(6))).batch(2).repeat()
    with pytest.raises(InputError, match="infinite data on worker 0: pass `steps_per_epoch`"):
        PipelineBatches(data, Alone(), None)
    feed = PipelineBatches(data, Alone(), 2)
    assert feed.fit_options == {"steps_per_epoch": 2}
    assert not feed.may_be_empty
    for _, (epoch, batch) in zip(range(8), enumerate(feed.dataset()), strict=False):
        if epoch % 2 == 0:
            feed.begin_epoch(epoch // 2)
        feed.count_steps(epoch % 2 + 1)
        assert batch[1].numpy().tolist() == [2 * (epoch % 3), 2 * (epoch % 3) + 1]
        assert feed.rows == 2 * (epoch % 2 + 1)


def test_an_endless_generator_needs_to_be_read_no_further_than_asked(rows: Any) -> None:
    x, y = rows
    layers = [keras.Input((8,)), keras.layers.BatchNormalization(momentum=0.5)]

    def build() -> Any:
        model = keras.Sequential([*layers, keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def data(context: Any) -> Any:
        import tensorflow as tf

        def endless() -> Any:
            size = 10 if context.rank == 0 else 30
            while True:
                yield x[:size] * 0 + context.rank, y[:size]

        spec = tf.TensorSpec([None, 8], "float32"), tf.TensorSpec([None], "int64")
        return tf.data.Dataset.from_generator(endless, output_signature=spec)

    result = barrier_train(None, build, data, workers=2, steps_per_epoch=2, verbose=0)
    assert [worker.rows for worker in result.workers] == [20, 60]
    # Each worker's own batches moved it to 0 and 0.75: averaged by the rows trained on.
    mean = result.model.layers[0].moving_mean.numpy()
    np.testing.assert_allclose(mean, 0.75 * 0.75, atol=1e-6)


@pytest.mark.full
def test_a_pipeline_that_can_be_read_only_once_is_told(rows: Any) -> None:
    x, y = rows

    def data(context: Any) -> Any:
        import tensorflow as tf

        batches = iter([(x[:9], y[:9]), (x[9:18], y[9:18])])
        spec = tf.TensorSpec([None, 8], "float32"), tf.TensorSpec([None], "int64")
        return tf.data.Dataset.from_generator(lambda: batches, output_signature=spec)

    with pytest.raises(WorkerFailedError, match=r"returned no rows for step [12] of 2"):
        barrier_train(None, build_dense, data, workers=2, verbose=0)


@pytest.mark.full
def test_a_worker_may_read_for_longer_than_the_timeout(rows: Any) -> None:
    x, y = rows

    def data(context: Any) -> Any:
        import time

        import tensorflow as tf

        time.sleep(5 * context.rank)
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(250)

    result = barrier_train(
        None, build_dense, data, workers=2, recovery=Recovery(timeout=3), verbose=0
    )
    assert [worker.rows for worker in result.workers] == [500, 500]


class OfKeras(keras.utils.PyDataset):
    """Two batches."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return np.ones((3, 4)), np.ones(3)


@pytest.mark.parametrize(
    "returned", [lambda: (np.ones((6, 4)), np.ones(6)), OfKeras, lambda: iter(OfKeras())]
)
def test_a_function_that_returns_something_else_is_shown_how_to(returned: Any) -> None:
    context = WorkerContext(0, 1, ("h:1",), "{}")
    data = returned()
    with pytest.raises(InputError, match=r"returned \w+; expected a tf.data.Dataset") as caught:
        call_pipeline(FunctionRows(lambda context: data), context, "data")
    (line,) = re.findall("such as (.*)", str(caught.value))
    names = {"x": np.ones((6, 4)), "y": np.ones(6), "data": data, "generate": OfKeras}
    made = eval(line, {"tf": tf, **names})  # noqa: S307
    assert call_pipeline(FunctionRows(lambda context: made), context, "data") is made
    assert sum(len(y) for _, y in made) == 6


@pytest.mark.full
def test_a_model_may_stay_where_it_is_written(tmp_path: Path, rows: Any) -> None:
    uri = tmp_path / "models" / "trained.keras"
    result = barrier_train(
        None, build_dense, rows, workers=2, model_options=ModelOptions(uri=uri), verbose=0
    )
    assert result.model_base64 == ""
    assert result.model_format == "keras"
    assert [path.name for path in uri.parent.iterdir()] == ["trained.keras"]
    before = uri.read_bytes()

    class Spoiler(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            if os.environ["TFDIST_RANK"] == "1":
                self.model.layers[0].bias.assign_add([1.0] * 16)

    with pytest.raises(pybackend.ClusterError, match="weights differ"):
        barrier_train(
            None,
            build_dense,
            rows,
            workers=2,
            model_options=ModelOptions(uri=uri),
            callbacks=[Spoiler()],
            verbose=0,
        )
    assert uri.read_bytes() == before
    again = pybackend.load_model(uri)
    assert largest_difference(again, result.model) == 0


def test_inputs_that_the_model_lacks_are_told_at_once(tmp_path: Path, rows: Any) -> None:
    path = parquet(tmp_path, rows, age=pa.array(np.arange(500) / 500))
    features = {"numbers": ["features"], "animals": "animal"}
    with pytest.raises(
        InputError, match="the model has the inputs animal, numbers, tags, tracks, words: specify"
    ):
        barrier_train(None, build_named(), path, features=features, label="age", verbose=0)


def test_a_file_of_another_kind_is_told(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,label\n1,0\n")
    with pytest.raises(InputError, match=r"neither a Parquet nor a TFRecord file.*read\.csv"):
        barrier_train(None, build_dense, tmp_path / "rows.csv", verbose=0)


def test_files_that_do_not_fit_are_rejected_at_once(tmp_path: Path, rows: Any) -> None:
    path = parquet(tmp_path, rows)
    with pytest.raises(InputError, match="`data` has no column 'label'"):
        barrier_train(None, build_dense, path, verbose=0)
    with pytest.raises(InputError, match="there is no file or folder"):
        barrier_train(None, build_dense, path + "/nothing", verbose=0)
    with pytest.raises(InputError, match=r"500 rows, fewer than workers=501"):
        barrier_train(None, build_dense, path, label="animal", workers=501, verbose=0)
