"""TensorFlow's own distribution strategies: what each supports, and asynchronous training."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import build_dense
from strategies import WAYS, try_on_one_machine, try_on_servers, try_on_workers

import pybackend
from pybackend import InputError, Observer, Recovery, barrier_train
from pybackend.core.data.checkpoint_checks import describe_settings
from pybackend.core.job.job import TrainingJob
from pybackend.core.model.view import ModelView
from pybackend.types import TrainResult

ROLES = {"chief": 1, "worker": 1, "ps": 1}


def make_rows(count: int = 600) -> tuple[Any, Any]:
    """Return rows of 8 features whose class is the largest of the first three."""
    x = np.random.default_rng(3).normal(size=(count, 8)).astype("float32")
    return x, x[:, :3].argmax(axis=1)


def train(model: Any, data: Any, **changes: Any) -> TrainResult:
    arguments = {"exchange": pybackend.ParameterServer(), "workers": 2, "seed": 1, **changes}
    return barrier_train("local", model, data, **arguments)


@pytest.mark.full
def test_workers_train_what_lies_on_parameter_servers(dense_model: Any, capfd: Any) -> None:
    x, y = make_rows()
    before = [weight.numpy() for weight in dense_model.weights]
    result = train(dense_model, (x, y), epochs=8, validation_data=(x[:100], y[:100]))
    assert set(result.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert result.history["accuracy"][-1] > 0.8 > result.history["accuracy"][0]
    # The returned model is the one that was evaluated last, and its optimizer counted each step.
    figures = result.model.evaluate(x[:100], y[:100], verbose=0, return_dict=True)
    assert figures["loss"] == pytest.approx(result.history["val_loss"][-1], rel=1e-5)
    assert figures["accuracy"] == pytest.approx(result.history["val_accuracy"][-1])
    assert int(result.model.optimizer.iterations.numpy()) == 8 * 20
    assert [report.rows for report in result.workers] == [150] * 4
    chief, *workers, server = [report.steps for report in result.workers]
    assert (chief, server) == (sum(workers), 0) == (160, 0)
    assert min(workers) > 0
    said = capfd.readouterr().out
    assert "Starting 2 workers, a chief and 1 parameter server: processes of this machine" in said
    assert "160 asynchronous steps: worker 1 took" in said
    for weight, kept in zip(dense_model.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), kept)


@pytest.mark.full
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
        build,
        (x, y, weights),
        workers=1,
        exchange=pybackend.ParameterServer(servers=1),
        epochs=5,
        batch_size=32,
        shuffle=False,
        callbacks=[Observer(on_epoch_end=lambda epoch, logs: epoch == 3)],
    )
    # Rows are assigned to ranks in turn, and the worker has the chief's first.
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


class Output(io.StringIO):
    """Standard output that kills workers, by rank, when an epoch is reported."""

    def __init__(self, victims: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._victims = victims
        self._pids: dict[int, int] = {}
        start = subprocess.Popen

        def popen(*arguments: Any, **options: Any) -> Any:
            process = start(*arguments, **options)
            if rank := options.get("env", {}).get("TFDIST_RANK"):
                self._pids[int(rank)] = process.pid
            return process

        monkeypatch.setattr(subprocess, "Popen", popen)
        monkeypatch.setattr(sys, "stdout", self)

    def write(self, text: str) -> int:
        for epoch in [found for found in self._victims if found in text]:
            os.kill(self._pids[self._victims.pop(epoch)], signal.SIGKILL)
        return super().write(text)


def test_a_lost_worker_is_done_without_and_a_lost_server_is_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows, kept = make_rows(), str(tmp_path / "kept")
    output = Output({"epoch 1/": 2, "epoch 3/": 3}, monkeypatch)
    result = train(build_dense, rows, epochs=6, recovery=Recovery(kept, restarts=1))
    said = output.getvalue()
    assert "worker 2 on 127.0.0.1 was lost (the process was killed by SIGKILL)" in said
    assert "worker 3 on 127.0.0.1 failed: ProcessDied" in said
    assert "restarting from the newest checkpoint (restart 1 of 1)" in said
    assert re.search("resumes from the checkpoint of epoch [23]\n", said)
    assert [said.count(f"epoch {number}/6  loss") for number in (1, 2, 5, 6)] == [1] * 4
    assert [len(figures) for figures in result.history.values()] == [6, 6]
    # The step of the lost worker may have been taken twice.
    assert 0 <= int(result.model.optimizer.iterations.numpy()) - 6 * 20 <= 1
    last = pybackend.load_checkpoint(kept)
    for own, other in zip(last.weights, result.model.weights, strict=True):
        np.testing.assert_array_equal(own.numpy(), other.numpy())
    # Synchronous steps would be another training.
    resuming = pybackend.Recovery(kept, resume=True)
    with pytest.raises(
        InputError, match=r"`exchange` was ParameterServer\(servers=1\), but is now Exchange"
    ):
        train(build_dense, rows, exchange=None, epochs=7, recovery=resuming)
    described = [
        describe_settings(TrainingJob(4, exchange=pybackend.ParameterServer(n))) for n in (1, 2)
    ]
    assert described[0] == described[1]  # a run may resume with other servers


def compiled(*layers: Any, kind: Any = None, **options: Any) -> Any:
    import keras

    kind = kind or keras.Sequential
    model = kind([keras.Input((4, 1), batch_size=2), *layers, keras.layers.Dense(1)])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    return model


def unfit_models() -> dict[str, Callable[[], Any]]:
    """Return models by their expected error."""
    from keras import Sequential, layers, optimizers

    class OwnStep(Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    class OwnMetrics(Sequential):  # type: ignore[misc]
        def compute_metrics(self, *arguments: Any, **named: Any) -> Any:
            return super().compute_metrics(*arguments, **named)

    def scaled() -> Any:
        return optimizers.LossScaleOptimizer(optimizers.SGD())

    return {
        "a custom train_step": lambda: compiled(kind=OwnStep),
        "a custom compute_metrics": lambda: compiled(kind=OwnMetrics),
        "with a LossScaleOptimizer": lambda: compiled(optimizer=scaled()),
        "with gradient_accumulation_steps": lambda: compiled(
            optimizer=optimizers.SGD(gradient_accumulation_steps=2)
        ),
        "with use_ema=True": lambda: compiled(optimizer=optimizers.SGD(use_ema=True)),
        "with run_eagerly=True": lambda: compiled(run_eagerly=True),
        "with stateful=True": lambda: compiled(layers.LSTM(2, stateful=True)),
        "with synchronized=True": lambda: compiled(layers.BatchNormalization(synchronized=True)),
    }


def test_what_needs_synchronized_steps_is_refused_by_name() -> None:
    from pybackend.core.parameter_server.chief import check_without_common_steps

    job = TrainingJob(3, exchange=pybackend.ParameterServer(), roles=(*ROLES.items(),))
    for reason, build in unfit_models().items():
        with pytest.raises(
            InputError, match=rf"exchange=ParameterServer\(...\) cannot train .*{reason}"
        ):
            check_without_common_steps(ModelView(build()), job)
    check_without_common_steps(ModelView(compiled()), job)


def read_table() -> dict[str, dict[str, str]]:
    """Return the cells of the page, by strategy and way to train."""
    page = Path(pybackend.__file__).parents[1] / "docs" / "strategies.md"
    blocks = page.read_text().split("\n\n")
    table = next(block for block in blocks if block.startswith("| strategy |"))
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    names, cells = rows[0][1:4], {row[0].strip("`"): row[1:4] for row in rows[2:]}
    assert tuple(names) == WAYS
    return {name: dict(zip(names, found, strict=True)) for name, found in cells.items()}


ON_ONE_MACHINE = ["OneDeviceStrategy", "MirroredStrategy", "CentralStorageStrategy", "TPUStrategy"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("names", "fn", "where"),
    [
        (ON_ONE_MACHINE, try_on_one_machine, {"workers": 1}),
        (["MultiWorkerMirroredStrategy"], try_on_workers, {"workers": 2}),
        (["ParameterServerStrategy"], try_on_servers, {"roles": ROLES}),
    ],
    ids=["one machine", "workers", "servers"],
)
def test_each_cell_of_the_page_is_what_tensorflow_does(
    names: list[str], fn: Any, where: dict[str, Any]
) -> None:
    table = read_table()
    assert len(table) == 6
    found = pybackend.barrier_run("local", fn, verbose=0, **where)
    found = [one if len(names) > 1 else {names[0]: one} for one in found if one is not None]
    for cells in found:
        kinds = {
            name: {way: what.partition(":")[0] for way, what in ways.items()}
            for name, ways in cells.items()
        }
        assert kinds == {name: table[name] for name in names}
