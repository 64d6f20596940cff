"""Data sets of batches as data."""

from __future__ import annotations

import time
import traceback
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import build_dense, largest_difference

from pybackend import barrier_evaluate, barrier_train
from pybackend.core.api import display
from pybackend.core.data import batches as module
from pybackend.core.data.arrays import count_rows, nest, shard
from pybackend.core.data.batches import is_dataset, read_batches
from pybackend.core.data.sharding import share_batches
from pybackend.core.errors import InputError
from pybackend.core.job.job import MODEL_FILE, TrainingJob
from pybackend.core.job.messages import Phases
from pybackend.core.job.worker_options import Exchange
from pybackend.core.launchers import launcher_for
from pybackend.core.model.serialization import model_from_bytes, model_to_bytes

X = np.random.default_rng(0).normal(size=(201, 8)).astype("float32")
Y = np.arange(201) % 3


def batches(size: int = 50) -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)


class Slices(keras.utils.PyDataset):
    """Return the same rows in batches of different sizes."""

    edges = (0, 50, 53, 120, 200, 201)

    def __init__(self, weight: float | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.epochs = 0

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __getitem__(self, index: int) -> Any:
        part = slice(self.edges[index], self.edges[index + 1])
        if self.weight is None:
            return X[part], Y[part]
        return X[part], Y[part], np.full(len(Y[part]), self.weight)

    def on_epoch_end(self) -> None:
        self.epochs += 1


class Shuffled(Slices):
    """A data set with a new order after each epoch."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return np.roll(x, self.epochs, axis=0), y


class Recording(Slices):
    """Record what is called, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __getitem__(self, index: int) -> Any:
        self.calls.append(index)
        return super().__getitem__(index)

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")


class Reshuffled(Slices):
    """Return rows that both hooks change, and each read."""

    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(0)
        self.order = np.arange(len(X))

    def __getitem__(self, index: int) -> Any:
        own = self.order[slice(*self.edges[index : index + 2])]
        return X[own] + self.random.normal(size=X[own].shape).astype("float32"), Y[own]

    def on_epoch_begin(self) -> None:
        self.order = self.random.permutation(len(X))

    on_epoch_end = on_epoch_begin


class Curriculum(Slices):
    """Return harder rows from the third epoch on."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * (2 if self.epochs > 2 else 1), y

    def on_epoch_begin(self) -> None:
        self.epochs += 1

    def on_epoch_end(self) -> None:
        """Change nothing."""


class Endless(Slices):
    """A data set of unknown length."""

    def __len__(self) -> int:
        raise NotImplementedError


def read(data: Any, passes: int = 2, name: str = "data") -> Any:
    return read_batches(data, "float32", name, passes=passes)


# Three workers: some have no row of the last batch, which has one row.
@pytest.mark.parametrize(
    ("make", "workers"),
    [
        pytest.param(batches, 2, id="2-Dataset"),
        pytest.param(Slices, 3, id="3-PyDataset"),
        pytest.param(batches, 3, id="3-Dataset"),
        pytest.param(Slices, 2, id="2-PyDataset"),
    ],
)
@pytest.mark.full
def test_workers_train_as_one_process_on_the_data_set(make: Any, workers: int) -> None:
    keras.utils.set_random_seed(4)
    model = build_dense()
    files = {MODEL_FILE: model_to_bytes(model, format="keras", include_optimizer=True)}
    found = read(make())
    job = found.adapt(TrainingJob(workers, epochs=2, verbose=0))
    outcome = launcher_for("local").launch(job, files, {"train": found.columns}, print)
    history = model.fit(make(), epochs=2, shuffle=False, verbose=0).history
    assert outcome.model is not None
    assert largest_difference(model_from_bytes(outcome.model[1]), model) < 1e-6
    for name, values in history.items():
        assert np.allclose(outcome.reports[0].value[name], values, atol=1e-5), name
    assert sum(report.rows for report in outcome.reports) == len(Y)
    assert {report.steps for report in outcome.reports} == {2 * len(found.sizes)}


def test_rows_keep_their_order_and_batches_their_sizes() -> None:
    for data, sizes in ((batches(), (50, 50, 50, 50, 1)), (Slices(), (50, 3, 67, 80, 1))):
        found = read(data)
        assert found.sizes == sizes
        assert np.array_equal(found.columns["x"], X)
        assert np.array_equal(found.columns["y"], Y)


def test_structures_weights_and_types_are_those_of_arrays() -> None:
    one = tf.data.Dataset.from_tensor_slices(
        ({"a": X.astype("float64"), "b": Y}, (Y, X[:, :1]), np.ones(len(Y)))
    ).batch(64)
    found = read(one).columns
    assert sorted(found) == ["sample_weight", "x/a", "x/b", "y/#0", "y/#1"]
    assert found["x/a"].dtype == "float32"
    assert read(Slices(weight=0.5)).columns["sample_weight"].tolist() == [0.5] * 201


class Alone(Slices):
    """Return only the inputs."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0]


@pytest.mark.parametrize(
    "rows",
    [X, (X,), {"a": X, "b": Y}, ((X, Y),), (X, X, X), Alone],
    ids=["x", "(x,)", "named", "list", "three", "PyDataset"],
)
def test_train_step_gets_what_keras_s_fit_gives_it(rows: Any) -> None:
    def make() -> Any:
        return Alone() if rows is Alone else tf.data.Dataset.from_tensor_slices(rows).batch(67)

    model = Remembering()
    model.compile("sgd")
    model.fit(make(), verbose=0, shuffle=False)
    own = nest(read(make()).columns)
    assert tf.nest.map_structure(lambda array: tf.constant(array[:0]).dtype, own) == model.seen


class Remembering(keras.Model):
    """Records the arguments of its train_step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = None
        self.built = True

    def train_step(self, data: Any) -> Any:
        # Keras would store a tuple as its own list type.
        object.__setattr__(self, "seen", tf.nest.map_structure(lambda tensor: tensor.dtype, data))
        return {"loss": tf.zeros(())}


@pytest.mark.parametrize("sizes", [(4, 4), (5, 1, 1, 7), (1, 1, 1), (9,)])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_shares_of_batches_are_rows_that_a_worker_has(sizes: tuple[int, ...], workers: int) -> None:
    rows = np.arange(sum(sizes))
    parts = [shard({"x": rows}, workers, rank)["x"] for rank in range(workers)]
    edges = [share_batches(sizes, workers, rank) for rank in range(workers)]
    ends = np.cumsum([0, *sizes])
    for step in range(len(sizes)):
        shares = [p[e[step] : e[step + 1]] for p, e in zip(parts, edges, strict=True)]
        assert sorted(np.concatenate(shares)) == list(range(ends[step], ends[step + 1]))
    assert [e[-1] for e in edges] == [count_rows({"x": part}) for part in parts]


REJECTED = {
    "endless": (lambda: batches().repeat(), "`data` is an infinite data set: limit it"),
    "endless PyDataset": (Endless, "`data` is an infinite data set"),
    "shuffled": (lambda: batches().shuffle(5), "yields different rows each time it is read"),
    "shuffled PyDataset": (Shuffled, "yields different rows each time it is read"),
    "four parts": (lambda: tf.data.Dataset.from_tensors((X, Y, Y, Y)), "have 4 parts; expected"),
    "not batched": (lambda: batches().unbatch(), r"expected batches .* use \.batch\(\)"),
    "ragged": (
        lambda: tf.data.Dataset.from_tensors((tf.ragged.constant([[1], [1, 2]]), Y[:2])),
        "RaggedTensorSpec.*pad ragged tensors",
    ),
    "widths": (
        lambda: tf.data.Dataset.range(2, 4).map(lambda n: (tf.ones([1, n]), tf.ones([1]))).batch(1),
        r"`x` of the data set `data` has rows of shapes \(1, 2\) and \(1, 3\)",
    ),
    "no rows": (lambda: batches().take(0), "`data` has no rows"),
    "lengths": (lambda: tf.data.Dataset.from_tensors((X, Y[:3])), "different lengths"),
    "NaN": (lambda: tf.data.Dataset.from_tensors((X, Y * np.nan)), "`y` of `data` has a NaN"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_cannot_be_shared_out_exactly_is_rejected_by_name(name: str) -> None:
    make, message = REJECTED[name]
    with pytest.raises(InputError, match=message):
        read(make())


def test_a_refusal_names_the_other_way() -> None:
    for make in (REJECTED[name][0] for name in ("endless", "shuffled PyDataset")):
        with pytest.raises(InputError, match="data=lambda context: make_dataset"):
            read(make())


def test_one_epoch_may_be_read_at_random() -> None:
    assert read(batches().shuffle(5), passes=1).sizes
    data = Shuffled()
    assert read(data, passes=1).sizes == (50, 3, 67, 80, 1)
    assert data.epochs == 2


@pytest.mark.parametrize("epochs", [1, 3])
def test_hooks_are_called_as_keras_calls_them(epochs: int) -> None:
    data, validation, own, own_validation = (Recording() for _ in range(4))
    build_dense().fit(data, epochs=epochs, validation_data=validation, shuffle=False, verbose=0)
    read(own, epochs)
    read(own_validation, epochs, "validation_data")
    assert own.calls == data.calls
    assert own_validation.calls == validation.calls


def test_rows_are_read_until_they_can_no_longer_change() -> None:
    data = Recording()
    data.calls = Counted()
    read(data, 100)
    assert data.calls.appended == 2 + 1 + 2 * (2 + len(data))
    with pytest.raises(InputError, match="`data` is a data set that yields different rows"):
        read(Curriculum(), 3)
    assert read(Curriculum(), 2).sizes


class Counted:
    """Count the calls of a list's method, outside of what is pickled."""

    appended = 0

    def append(self, _: Any) -> None:
        Counted.appended += 1


def test_a_data_set_with_hooks_trains_and_evaluates_as_in_keras(dense_model: Any) -> None:
    result = barrier_train(
        None,
        dense_model,
        Reshuffled(),
        workers=2,
        epochs=1,
        validation_data=Reshuffled(),
        verbose=0,
    )
    metrics = barrier_evaluate(None, dense_model, Reshuffled(), workers=2, verbose=0)
    expected = dense_model.evaluate(Reshuffled(), verbose=0, return_dict=True)
    assert metrics == pytest.approx(expected, abs=1e-6)
    fitted = dense_model.fit(Reshuffled(), validation_data=Reshuffled(), shuffle=False, verbose=0)
    assert largest_difference(dense_model, result.model) <= 1e-6
    for name, values in fitted.history.items():
        assert result.history[name] == pytest.approx(values, abs=1e-6)


def test_validation_data_that_change_between_epochs_are_rejected(rows: Any) -> None:
    with pytest.raises(InputError) as caught:
        barrier_train(
            None, build_dense, rows, workers=2, epochs=2, validation_data=Reshuffled(), verbose=0
        )
    assert str(caught.value) == (
        "`validation_data` is a data set that yields different rows each time it is read (it "
        "shuffles, draws at random, changes in its `on_epoch_begin` or `on_epoch_end`, or can be "
        "read only once), but the workers would use the rows of the first evaluation in all. Leave "
        "out .shuffle() and other changes, or use epochs=1."
    )


def test_data_that_this_process_could_not_hold_are_rejected(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 4000)

    def rows() -> Any:
        while True:
            yield X[:50], Y[:50]

    shapes = (tf.TensorSpec((None, 8), tf.float32), tf.TensorSpec((None,), tf.int64))
    with pytest.raises(InputError, match="infinite data set, or one of more than 0 GiB"):
        read(tf.data.Dataset.from_generator(rows, output_signature=shapes))


def test_a_job_that_cannot_keep_the_batches_is_rejected() -> None:
    found = read(batches())
    with pytest.raises(InputError, match=r"`steps_per_epoch` is 6, but .* of 5 batches"):
        found.adapt(TrainingJob(2, steps_per_epoch=6))
    with pytest.raises(InputError, match="shuffle='global' cannot reorder"):
        found.adapt(TrainingJob(2, shuffle="global"))
    with pytest.raises(
        InputError, match="`scale_lr` cannot be combined with a data set of batches"
    ):
        found.adapt(TrainingJob(2, exchange=Exchange(scale_lr="linear")))


def endless() -> Any:
    def generate() -> Any:
        while True:
            for first in range(0, 201, 50):
                yield X[first : first + 50], Y[first : first + 50]

    shapes = (tf.TensorSpec((None, 8), tf.float32), tf.TensorSpec((None,), tf.int64))
    return tf.data.Dataset.from_generator(generate, output_signature=shapes)


@pytest.mark.parametrize(
    ("make", "steps", "epochs"),
    [(endless, 7, 2), (lambda: batches().repeat(), 3, 2), (batches, 2, 1), (Slices, 5, 2)],
)
def test_steps_per_epoch_are_those_of_fit(make: Any, steps: int, epochs: int) -> None:
    alone = build_dense()
    result = barrier_train(
        None, alone, make(), workers=2, epochs=epochs, steps_per_epoch=steps, verbose=0
    )
    fitted = alone.fit(make(), epochs=epochs, steps_per_epoch=steps, shuffle=False, verbose=0)
    assert largest_difference(alone, result.model) <= 1e-6
    assert result.history["loss"] == pytest.approx(fitted.history["loss"], abs=1e-6)
    assert result.workers[0].steps == steps * epochs


def test_with_steps_per_epoch_no_more_is_read_than_they_need() -> None:
    assert read_batches(endless(), "float32", "data", passes=2, steps=3).sizes[-2:] == (1, 50)
    # A finite data set is read whole, whatever the epochs.
    assert len(read_batches(batches(), "float32", "data", passes=1, steps=2).sizes) == 5
    # The third epoch would begin again, with other rows.
    with pytest.raises(InputError, match="yields different rows each time"):
        read_batches(batches().shuffle(5), "float32", "data", passes=3, steps=2)
    assert read_batches(batches().shuffle(5), "float32", "data", passes=2, steps=2).sizes


def test_only_data_sets_are_data_sets() -> None:
    assert is_dataset(batches())
    assert is_dataset(Slices())
    assert not is_dataset((X, Y))


def test_batches_without_rows_are_no_steps() -> None:
    holes = batches().map(lambda x, y: (x[:0], y[:0])).take(1).concatenate(batches())
    assert read_batches(holes, "float32", "data", passes=1).sizes[0] == 50
    with pytest.raises(InputError, match="a batch without rows, which Keras counts as one of"):
        read_batches(holes, "float32", "data", passes=1, steps=2)


def test_infinite_data_that_this_process_could_not_hold_name_the_steps(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 4000)
    with pytest.raises(InputError, match=r"has 6 batches for all .* of more than 0"):
        read_batches(endless(), "float32", "data", passes=2, steps=3)


class Broken(Slices):
    """A data set that is slow, and fails."""

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            time.sleep(0.2)
            raise ValueError("broken item")
        return super().__getitem__(index)


def test_a_slow_data_set_is_shown_and_its_error_begins_with_its_own_frame(
    capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(display, "Phases", partial(Phases, seconds=(0.05, 60.0, 120.0)))
    with pytest.raises(ValueError, match="broken item") as caught:
        barrier_train(None, build_dense(), Broken(), workers=2, verbose=1)
    assert "reading the data set `data` ..." in capsys.readouterr().out
    names = [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert names[-2:] == ["call", "__getitem__"]
