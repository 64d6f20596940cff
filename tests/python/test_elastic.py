"""Workers that leave and join: each epoch's workers, and the exact result."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas
import pytest
from conftest import full, largest_difference, wait_for, worker_processes
from contract import ElasticTraining, System, contract
from killing import KillAt

from pybackend import (
    Elastic,
    Exchange,
    Recovery,
    WorkerFailedError,
    barrier_train,
    replay_batches,
    submit_training,
)
from pybackend.core.engine.elastic import generations as elastic_engine
from pybackend.core.errors import Failure
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import Note, Order, Standby
from pybackend.core.job.report import Generation, WorkerReport, count_by_epoch, list_groups
from pybackend.core.launchers import crew
from pybackend.core.launchers import elastic_workers as elastic
from pybackend.core.launchers.base import StopRequestedError, stopped_by
from pybackend.types import TrainResult

BATCH, SEED = 5, 7
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4)).astype("float32")
Y = RNG.integers(0, 3, 64)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Any:
    yield
    wait_for(lambda: not worker_processes())


@pytest.fixture
def system(rows: Any) -> System:
    return ElasticTraining("local", "'local'", rows=rows)


TestContract = contract()


def build(**options: Any) -> Any:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential([keras.Input((4,)), layers.Dense(6, "tanh"), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.002), loss, metrics=["accuracy"], **options)
    return model


def train(*callbacks: Any, target: Any = "local", **settings: Any) -> TrainResult:
    defaults = {"data": (X, Y), "epochs": 4, "batch_size": BATCH, "seed": SEED, "model": build}
    given = {**defaults, **settings}
    model, data = given.pop("model"), given.pop("data")
    return barrier_train(target, model, data, callbacks=list(callbacks), **given)


def check_exact(
    result: TrainResult,
    shuffle: Any = True,
    batch_size: int = BATCH,
    make: Any = build,
    data: tuple[Any, Any] = (X, Y),
) -> None:
    """Check the result, and that all worker groups of several workers audited steps."""
    check_result(result, shuffle, batch_size, make, data)
    first = result.generations[-1].workers[0]
    audited = [g for g in result.generations if first in g.workers and len(g.workers) > 1]
    assert (result.audit.steps if result.audit else 0) >= len(audited)


def check_result(
    result: TrainResult,
    shuffle: Any = True,
    batch_size: int = BATCH,
    make: Any = build,
    data: tuple[Any, Any] = (X, Y),
) -> None:
    """Check that one process gets the same result on the batches of each epoch's workers."""
    (x, y), model, losses = data, make(), []
    for epoch in range(result.epochs):
        options = {"seed": SEED, "epoch": epoch, "shuffle": shuffle}
        found = 0.0
        for rows in replay_batches(len(x), result.generations, batch_size, **options):
            found += model.train_on_batch(x[rows], y[rows])[0] * len(rows)
        losses.append(found / len(x))
    assert largest_difference(result.model, model) < 2e-6
    assert np.allclose(result.history["loss"], losses, atol=1e-6)


class Script(keras.callbacks.Callback):
    """Records each epoch's workers, and preempts a worker once another has joined.

    The new one stops the training when nothing remains of the workers that left, at the
    earliest two epochs later.
    """

    def __init__(self, folder: Path, told: int, by: int) -> None:
        super().__init__()
        self.folder, self.told, self.by = str(folder), told, by

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        time.sleep(0.2)  # fewer epochs until the other one has joined

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        number, mark = int(os.environ["TFDIST_WORKER"]), Path(self.folder, "told")
        note = Path(self.folder, f"epoch-{epoch}-{number}")
        note.write_text(f"{os.getpid()} {os.environ['TMPDIR']}")
        rank = os.environ["TFDIST_RANK"]
        Path(self.folder, f"rank-{epoch}-{number}").write_text(rank)
        if number != self.by:
            return
        if mark.exists():
            left = [one for n in range(self.told + 1) for one in self.find_left(n)]
            Path(self.folder, f"left-{epoch}").write_text(" ".join(left))
            self.model.stop_training = not left and epoch >= int(mark.read_text()) + 2
        else:
            victim = Path(self.folder, f"epoch-0-{self.told}").read_text().split()[0]
            new = mark.with_suffix(".new")
            new.write_text(str(epoch))
            new.rename(mark)  # complete when the worker reads it
            os.kill(int(victim), signal.SIGTERM)

    def find_left(self, number: int) -> list[str]:
        """Return what remains of a worker: its process, its folder."""
        notes = sorted(Path(self.folder).glob(f"epoch-*-{number}"))
        pid, folder = notes[0].read_text().split() if notes else ("none", "none")
        return [one for one in (f"/proc/{pid}", folder) if Path(one).exists()]


class KillAsItWrites(keras.callbacks.Callback):
    """Kills the process of the first worker, once, when the trained model is to be written."""

    def on_train_end(self, logs: Any = None) -> None:
        if os.environ["TFDIST_WORKER"] == "0":
            self.model.get_config = lambda: os.kill(os.getpid(), signal.SIGKILL)


class KillAsOneJoins(keras.layers.Layer):
    """Kills the first worker's process in the check of the model, before it trains with another.

    Parameters
    ----------
    mark
        A file that marks that an epoch was trained.
    """

    def __init__(self, mark: str, **options: Any) -> None:
        super().__init__(**options)
        self.mark = mark

    def call(self, inputs: Any) -> Any:
        if os.environ.get("TFDIST_WORKER") == "0" and Path(self.mark).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return inputs


def test_the_first_is_killed_one_joins_and_one_is_told_to_end(tmp_path: Path, capsys: Any) -> None:
    killer, script = KillAt(0, 1, 2, tmp_path / "killed"), Script(tmp_path, told=1, by=2)
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    result = train(killer, script, log, workers=Elastic(2, max=2), epochs=500)
    said = capsys.readouterr().out
    # The replacement of worker 1 may or may not be in time.
    first = result.generations[:4]
    assert [generation.workers for generation in first] == [[0, 1], [1], [1, 2], [2]]
    assert [generation.joined for generation in first] == [[], [], [2], []]
    left = [generation.left for generation in first]
    assert left[1] == {"0": "the process was killed by SIGKILL"}
    reason = "the process received SIGTERM; it left the training after epoch"
    assert left[3]["1"].startswith(reason)
    check_exact(result)
    # Each epoch has one row in the log and one line here; each worker is one process.
    epochs = len(result.history["loss"])
    rows = (tmp_path / "log.csv").read_text().splitlines()[1:]
    assert [int(row.partition(",")[0]) for row in rows] == list(range(epochs))
    assert [said.count(f"epoch {n}/500 ") for n in range(1, epochs + 1)] == [1] * epochs
    for number in range(3):
        assert len({p.read_text() for p in tmp_path.glob(f"epoch-*-{number}")}) == 1
    # Worker 1 is rank 1, then 0; worker 2 is rank 1, then 0.
    for number, ranks in {0: "0", 1: "10", 2: "10"}.items():
        notes = sorted(tmp_path.glob(f"rank-*-{number}"), key=lambda p: int(p.name.split("-")[1]))
        found = [note.read_text() for note in notes]
        assert [rank for rank, _ in itertools.groupby(found)] == list(ranks), number
    # Nothing remains of the two workers that left, while the training continues.
    looks = sorted(tmp_path.glob("left-*"), key=lambda path: int(path.name[5:]))
    assert looks[-1].read_text() == ""


def take_two_steps_at_once() -> Any:
    return build(steps_per_execution=2)


@pytest.mark.full
def test_if_steps_are_taken_together_the_epoch_is_repeated_as_if_there_had_been_fewer_workers(
    tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "rows.parquet"
    pandas.DataFrame({**{f"x{n}": X[:, n] for n in range(4)}, "label": Y}).to_parquet(path)
    settings = {"data": str(path), "shuffle": "global", "epochs": 3}
    settings |= {"validation_data": (X[:21] + 0.1, Y[:21])}
    settings["exchange"] = Exchange(scale_lr="linear")
    settings["model"] = take_two_steps_at_once

    def listed() -> list[Any]:
        stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
        return [stop, keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1.0)]

    killers = KillAt(1, 0, 3, tmp_path / "killed"), KillAsItWrites()
    found = train(*killers, *listed(), workers=Elastic(3, min=2), **settings)
    assert [generation.workers for generation in found.generations] == [[0, 1, 2], [0, 2], [2]]
    expected = train(*listed(), workers=2, **settings)
    assert found.workers_by_epoch == expected.workers_by_epoch == [2] * expected.epochs
    assert found.history == expected.history
    assert found.workers[0].weights_sha256 == expected.workers[0].weights_sha256
    reason = "the others repeat the epoch from its beginning, not only a step: several steps run at"
    assert reason in capsys.readouterr().out


class KillAfter(keras.callbacks.Callback):
    """Kills a worker, once, while it takes one of the next steps, as its optimizer counts them."""

    def __init__(self, rank: int, steps: int, mark: Path) -> None:
        super().__init__()
        self.rank, self.steps, self.mark = str(rank), steps, str(mark)

    def on_train_begin(self, logs: Any = None) -> None:
        if os.environ["TFDIST_WORKER"] == self.rank:
            threading.Thread(target=self.kill, daemon=True).start()

    def kill(self) -> None:
        while int(self.model.optimizer.iterations.numpy()) < self.steps:
            time.sleep(1e-4)
        Path(self.mark).write_text(str(int(self.model.optimizer.iterations.numpy())))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.full
def test_a_detached_job_survives_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDIST_JOBS", str(tmp_path / "jobs"))
    kill = KillAt(1, 1, 1, tmp_path / "mark")
    settings: dict[str, Any] = {"epochs": 4, "batch_size": BATCH, "seed": SEED, "verbose": 0}
    workers = Elastic(3, min=2)
    job = submit_training("local", build, (X, Y), callbacks=[kill], workers=workers, **settings)
    result = job.result(120, verbose=0)
    check_exact(result)
    assert [len(generation.workers) for generation in result.generations] == [3, 2]


@pytest.mark.full
@pytest.mark.parametrize("bucket", [25.0, 1e-4])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_two_losses_within_steps(bucket: float, is_compiled: bool, tmp_path: Path) -> None:
    killers = KillAfter(0, 7, tmp_path / "0"), KillAfter(2, 17, tmp_path / "2")
    settings: dict[str, Any] = {"workers": Elastic(4), "exchange": Exchange(bucket_mb=bucket)}
    settings["model"] = partial(build, jit_compile=is_compiled)
    result = train(*killers, batch_size=1, epochs=2, **settings)
    check_exact(result, batch_size=1)
    steps = 0
    for number, mark in enumerate(("0", "2"), start=1):
        generation = result.generations[number]
        done = steps_before(result, generation)
        assert done >= int((tmp_path / mark).read_text()) - 1 > steps
        steps = done


def steps_before(result: TrainResult, generation: Generation) -> int:
    """Return how many steps were taken before a generation that began in the second epoch."""
    first = replay_batches(len(X), result.generations, 1, seed=SEED, epoch=0)
    return len(first) * (generation.epoch - 1) + generation.step - 1


def normalize() -> Any:
    layers = keras.layers
    model = keras.Sequential([keras.Input((4,)), layers.Dense(6), layers.BatchNormalization()])
    model.add(layers.Dropout(0.2))
    model.add(layers.Dense(3, "softmax"))
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")]
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=metrics)
    return model


@pytest.mark.full
def test_statistics_and_callbacks_survive_a_loss(tmp_path: Path, capsys: Any) -> None:
    saved = keras.callbacks.ModelCheckpoint(tmp_path / "saved.keras", save_freq=4)
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    stop = keras.callbacks.EarlyStopping("val_loss", patience=9)
    settings: dict[str, Any] = {"model": normalize, "validation_data": (X[:21], Y[:21])}
    settings["exchange"] = Exchange(scale_lr="linear")
    killer = KillAt(0, 1, 2, tmp_path / "killed")
    result = train(killer, saved, log, stop, workers=Elastic(3), **settings)
    assert result.generations[1].epoch == 2
    assert result.generations[1].step in (4, 5)
    said = capsys.readouterr().out
    assert "with their state from the beginning of the epoch: ModelCheckpoint\n" in said
    variance = result.model.layers[1].moving_variance.numpy()
    assert np.all((variance > 0.5) & (variance < 1.5) & (variance != 1))
    rows = (tmp_path / "log.csv").read_text().splitlines()[1:]
    assert [int(row.partition(",")[0]) for row in rows] == [0, 1, 2, 3]
    assert len(result.history["val_loss"]) == 4


@pytest.mark.parametrize(("rank", "step"), [(0, 3), full(2, 1), full(1, 4)])
def test_a_loss_costs_at_most_a_step(rank: int, step: int, tmp_path: Path) -> None:
    result = train(KillAt(rank, 1, step, tmp_path / "killed"), workers=Elastic(3))
    assert [len(generation.workers) for generation in result.generations] == [3, 2]
    last = result.generations[1]
    assert last.epoch == 2
    assert last.step in (step + 1, step + 2)
    check_exact(result)


def track(is_frozen: bool) -> Any:
    class Track(keras.layers.Layer):
        """Has a moving average of its inputs, and a counter, which do not affect its outputs."""

        def build(self, shape: Any) -> None:
            options = {"initializer": "zeros", "trainable": False}
            self.mean = self.add_weight(shape=(shape[-1],), name="mean", **options)
            self.count = self.add_weight(shape=(), name="count", **options)

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(inputs, axis=0))
                self.count.assign(self.count + 1)
            return inputs

    keras.utils.set_random_seed(3)
    tracked = Track(trainable=not is_frozen)
    model = keras.Sequential([keras.Input((4,)), tracked, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


@pytest.mark.full
@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_state_of_custom_layers_survives_a_loss(is_frozen: bool, tmp_path: Path) -> None:
    make = partial(track, is_frozen)
    killer = KillAt(2, 1, 2, tmp_path / "killed")
    result = train(killer, model=make, workers=Elastic(3), epochs=2)
    last = result.generations[-1]
    assert (last.epoch, last.step > 1) == (2, not is_frozen)
    check_exact(result, make=make)


def rescale(is_keras: bool) -> Any:
    layers = keras.layers

    class Rescale(layers.Layer):
        """Changes a trainable weight in the forward pass."""

        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.scale.assign(0.9 * self.scale + 0.1)
            return inputs * self.scale

    keras.utils.set_random_seed(3)
    first = layers.SpectralNormalization(layers.Dense(4)) if is_keras else Rescale()
    model = keras.Sequential([keras.Input((4,)), first, layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


@pytest.mark.full
@pytest.mark.parametrize("is_keras", [False, True])
def test_if_the_forward_pass_changes_trainable_weights_the_epoch_is_repeated(
    is_keras: bool, tmp_path: Path, capsys: Any
) -> None:
    make = partial(rescale, is_keras)
    result = train(KillAt(2, 1, 2, tmp_path / "killed"), model=make, workers=Elastic(3), epochs=2)
    assert (result.generations[-1].epoch, result.generations[-1].step) == (2, 1)
    check_result(result, make=make)
    assert "not only a step: the forward pass changes " in capsys.readouterr().out


@pytest.mark.full
def test_statistics_that_only_some_workers_changed_survive_a_loss(tmp_path: Path) -> None:
    rows = X.copy()
    rows[:, 0] = np.arange(len(X)) % 3 == 1  # not 0 only on worker 1

    def make() -> Any:
        layers = keras.layers
        model = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(), layers.Dense(3)])
        model.compile("sgd", "mse")
        return model

    settings: dict[str, Any] = {"model": make, "data": (rows, X[:, :3]), "shuffle": False}
    killer = KillAt(2, 0, 2, tmp_path / "killed")
    result = train(killer, workers=Elastic(3), epochs=1, **settings)
    assert result.generations[-1].step > 1
    mean = result.model.layers[0].moving_mean.numpy()[0]
    assert 0.005 < mean < 0.1


class StopAfterLoss(keras.callbacks.Callback):
    """Stops a training after its second epoch, when a worker is killed, too."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = str(mark)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if os.environ["TFDIST_WORKER"] == "1" and epoch == 1 and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.model.stop_training = epoch == 1


@pytest.mark.full
def test_a_loss_as_the_training_stops_does_not_cost_rows(tmp_path: Path) -> None:
    result = train(StopAfterLoss(tmp_path / "killed"), workers=Elastic(2))
    assert result.workers_by_epoch == [2, 1]
    assert result.generations[-1].step > 1
    check_exact(result)


def build_with_deaths(size: int, number: int, is_sent: bool, folder: Path) -> Any:
    """Build a model; one worker dies while it sends or receives the state.

    Parameters
    ----------
    size
        Number of bytes of additional state.
    number
        Number of the worker.
    is_sent
        True if all of the state is sent before.
    """
    whole, mark = elastic_engine.broadcast_bytes, folder / "died"

    def die(collective: Any, content: bytes) -> Any:
        if is_sent:
            whole(collective, content)
        else:  # the size, which is sent before the content
            collective.broadcast(np.array([len(content)], np.int64))
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ.get("TFDIST_WORKER") == str(number) and not mark.exists():
        elastic_engine.broadcast_bytes = die
    layers = keras.layers
    keras.utils.set_random_seed(3)
    table = layers.Embedding(1 + size // 32, 8, trainable=False, embeddings_initializer="zeros")
    inputs = keras.Input((4,))
    zeros = layers.Flatten()(table(keras.ops.zeros_like(inputs, "int32")))
    hidden = layers.Dropout(0.0)(layers.Dense(6, "tanh")(inputs))
    outputs = layers.Dense(3)(layers.Concatenate()([hidden, zeros]))
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


class WriteSeeds(keras.callbacks.Callback):
    """Writes the first random number of each worker in each of its epochs."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        number = os.environ["TFDIST_WORKER"]
        drawn = np.random.RandomState()
        drawn.set_state(np.random.get_state())
        Path(self.folder, f"seed-{epoch}-{number}").write_text(str(drawn.random()))


@pytest.mark.full
@pytest.mark.parametrize("size", [100, 30_000_000])
@pytest.mark.parametrize(("number", "is_sent"), [(2, False), (0, False), (1, False), (0, True)])
def test_a_worker_dies_while_the_state_is_sent_to_a_new_one(
    number: int, is_sent: bool, size: int, tmp_path: Path
) -> None:
    make = partial(build_with_deaths, size, number, is_sent, tmp_path)
    stop, seeds = StopWhenJoined(tmp_path, 3), WriteSeeds(tmp_path)
    settings = {"workers": Elastic(2, max=3), "epochs": 500, "verbose": 0}
    result = train(stop, seeds, model=make, **settings)
    left = {0, 1, 2} - {number}
    groups = [set(generation.workers) for generation in result.generations]
    # The last one may join at the same time.
    assert groups in ([{0, 1}, {0, 1, 2}, *more] for more in ([left, left | {3}], [left | {3}]))
    assert list(result.generations[2].left) == [str(number)]
    check_result(result, make=make)
    last = result.epochs - 1
    found = [path.read_text() for path in tmp_path.glob(f"seed-{last}-*")]
    assert len(set(found)) == len(found) == 3


class StopWhenJoined(keras.callbacks.Callback):
    """Stops a training an epoch after a worker with some number joined."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__()
        self.mark, self.number = str(folder / "joined"), str(number)
        self.begun = str(folder / "begun")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        Path(self.begun).touch()
        time.sleep(0.2)
        if os.environ["TFDIST_WORKER"] == self.number and not Path(self.mark).exists():
            Path(self.mark).write_text(str(epoch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        mark = Path(self.mark)
        self.model.stop_training = mark.exists() and epoch > int(mark.read_text())


@pytest.mark.full
def test_it_grows_to_as_many_as_there_may_be(tmp_path: Path) -> None:
    settings = {"workers": Elastic(1, max=2), "epochs": 500, "verbose": 0}
    result = train(StopWhenJoined(tmp_path, 1), **settings)
    assert [generation.workers for generation in result.generations] == [[0], [0, 1]]
    assert result.workers_by_epoch[-2:] == [2, 2]
    check_exact(result)


def test_the_only_one_that_has_the_state_is_lost_as_another_joins(tmp_path: Path) -> None:
    mark = tmp_path / "trained"

    class Mark(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            mark.touch()
            time.sleep(0.2)

    def make() -> Any:
        model = keras.Sequential([keras.Input((4,)), KillAsOneJoins(str(mark))])
        model.add(keras.layers.Dense(3))
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    settings = {"callbacks": [Mark()], "epochs": 500, "verbose": 0}
    with pytest.raises(WorkerFailedError) as caught:
        barrier_train("local", make, (X, X[:, :3]), workers=Elastic(1, max=2), **settings)
    assert "by SIGKILL; none of the remaining workers has the state of the t" in str(caught.value)


def test_of_an_epoch_the_last_group_counts_that_has_trained_it() -> None:
    generations = [
        Generation(1, [0, 1, 2]),
        Generation(4, [1, 2]),
        Generation(3, [2]),
        Generation(6, [2, 3]),
    ]
    assert count_by_epoch(generations, 5) == [3, 3, 1, 1, 1]


def test_a_group_may_repeat_the_last_steps_of_the_one_before() -> None:
    generations = [
        Generation(1, [0, 1, 2]),
        Generation(2, [0, 1], step=7),
        Generation(2, [1], step=6),
        Generation(2, [1, 3], step=9),
    ]
    assert list_groups(generations, 1) == [(3, 0)]
    assert list_groups(generations, 2) == [(3, 5), (1, 3), (2, 0)]
    assert list_groups(generations, 3) == [(2, 0)]
    assert list_groups([*generations, Generation(2, [3])], 2) == [(1, 0)]


@pytest.mark.full
def test_the_first_of_two_is_killed_before_they_are_connected() -> None:
    def die_or_build() -> Any:
        if os.environ["TFDIST_WORKER"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return build()

    settings = {"epochs": 1, "batch_size": BATCH, "seed": SEED, "recovery": Recovery(timeout=3600)}
    result = barrier_train("local", die_or_build, (X, Y), workers=Elastic(2), **settings)
    assert [generation.workers for generation in result.generations] == [[1]]
    assert result.generations[0].left == {"0": "the process was killed by SIGKILL"}
    check_exact(result)


def test_too_few_are_left(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        train(KillAt(1, 1, 1, tmp_path / "killed"), workers=Elastic(2, min=2, max=2))
    text = str(caught.value)
    cause = "worker 1 on 127.0.0.1 failed: ProcessDied: the process was killed by SIGKILL"
    assert text.startswith(f"{cause}; fewer than min=2 workers are left")
    assert "with `restarts` in `recovery`, it restarts automatically" in text
    assert caught.value.is_loss(is_kept=False)


class ScriptedSite:
    """Two slots; in the second one, no worker after the first can join."""

    places = 2
    host = "here"

    def __init__(self, clock: Iterator[float]) -> None:
        self.clock, self.starts = clock, list[float]()
        self.say: Callable[[Any], None] = print

    def start(self, number: int, place: int, say: Callable[[Any], None]) -> ScriptedSite:
        if number == 0:
            self.say = say
        if number < 2:
            say(Standby("here:1", 0, rank=number))
        else:
            self.starts.append(next(self.clock))
            say(WorkerReport(number, "here", 0, failure=Failure(number, "here", "Rejected", "no")))
            if len(self.starts) == 5:
                self.say(WorkerReport(0, "here", 0))
        return self

    def go(self, order: Any) -> None:
        if isinstance(order, Order) and len(order.peers) == 2 and order.rank == 1:
            self.say(WorkerReport(1, "here", 0, failure=Failure(1, "here", "Preempted", "SIGTERM")))
            self.say(Standby("here:1", 1, epoch=0, rank=0))

    def model(self) -> None:
        return None

    def close(self) -> None:
        """Nothing is left of it."""


def test_in_a_slot_where_none_can_join_workers_are_started_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(elastic.time, "monotonic", lambda: next(clock))
    job = TrainingJob(2, elastic=Elastic(max=2), epochs=3)
    said: list[Any] = []
    site = ScriptedSite(clock)
    elastic.train_elastically(job, {"train": {"x": X}}, said.append, site)
    pauses = np.diff(site.starts)
    assert all(30 * 2**n <= pause < 30 * 2**n + 50 for n, pause in enumerate(pauses))
    notes = [event.text for event in said if isinstance(event, Note)]
    assert notes[1] == "no worker could join on here: no. Another one will be started there in 30 s"
    assert len(notes) == 6


def test_another_thread_may_stop_it() -> None:
    stop = threading.Event()
    stop.set()
    job, site = TrainingJob(2, elastic=Elastic()), ScriptedSite(itertools.count(0.0))
    with stopped_by(stop), pytest.raises(StopRequestedError):
        elastic.train_elastically(job, {"train": {"x": X}}, print, site)


def test_the_first_cause_ends_it_as_it_ends_other_trainings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing(ScriptedSite):
        def go(self, order: Any) -> None:
            if isinstance(order, Order) and order.rank == 1:
                for kind, second in (("PeerLostError", 1.0), ("ValueError", 2.0)):
                    failure = Failure(1, "here", kind, "no", time=second)
                    self.say(WorkerReport(1, "here", 0, failure=failure))

    # The other worker trains on; it has this long to report an earlier cause.
    monkeypatch.setattr(crew, "_SHORT_GRACE_SECONDS", 0.2)
    job, begun = TrainingJob(2, elastic=Elastic(max=2)), time.monotonic()
    site = Failing(itertools.count(0.0))
    with pytest.raises(WorkerFailedError, match="worker 1 on here failed: ValueError: no"):
        elastic.train_elastically(job, {"train": {"x": X}}, print, site)
    assert time.monotonic() - begun < 3
    assert site.starts == []  # no worker replaces one whose failure ends the training
