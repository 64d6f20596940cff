"""Elastic training with checkpoints: it resumes with any number of workers, and is exact."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import wait_for, worker_processes
from killing import KillAt
from test_elastic import (
    X,
    Y,
    check_result,
    normalize,
    nothing_left_behind,  # noqa: F401
    take_two_steps_at_once,
    train,
)

from pybackend import Elastic, InputError, Recovery, load_checkpoint
from pybackend.core.data.checkpoint_store import CheckpointStore
from pybackend.core.errors import WorkerFailedError
from pybackend.core.job.report import Generation, find_groups_before, resume_generations
from pybackend.core.model.compare import hash_weights
from pybackend.types import TrainResult

EPOCHS = 4


class Slow(keras.callbacks.Callback):
    """Leaves time for each checkpoint to be written."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.03)


def make_callbacks(folder: Path, *kills: tuple[int, int, int]) -> list[Any]:
    """Return callbacks that kill workers, each once, and that write a log."""
    killers = [KillAt(*moment, folder / f"killed-{n}") for n, moment in enumerate(kills)]
    return [*killers, Slow(), keras.callbacks.CSVLogger(folder / "log.csv")]


def check_log(folder: Path) -> None:
    rows = (folder / "log.csv").read_text().splitlines()[1:]
    assert [int(row.partition(",")[0]) for row in rows] == list(range(EPOCHS))


def load_weights(kept: Recovery) -> str:
    return hash_weights(load_checkpoint(kept.uri))


def test_fewer_than_min_are_left_and_it_restarts_from_the_last_checkpoint(
    tmp_path: Path, capsys: Any
) -> None:
    kept = Recovery(tmp_path / "kept", every=2)
    settings = {"workers": Elastic(2, min=2), "recovery": replace(kept, restarts=1)}
    result = train(*make_callbacks(tmp_path, (1, 1, 3)), **settings)
    # An epoch has 7 steps.
    resumed = Generation(2, [0, 1], [0, 1], step=4)
    assert result.generations == [Generation(1, [0, 1]), resumed]
    assert result.restarts[0].checkpoint == "epoch 2, step 3"
    assert result.workers_by_epoch == [2] * EPOCHS
    check_result(result)
    check_log(tmp_path)
    said = capsys.readouterr().out
    assert "fewer than min=2 workers are left; restarting from the newest checkpoint" in said
    assert load_weights(kept) == result.workers[0].weights_sha256


def train_and_be_killed(folder: str, every: Any, *kills: tuple[int, int, int]) -> None:
    """Lose a worker, then let another one kill this process, the driver."""
    Path(folder, "killed-1.victim").write_text(str(os.getpid()))
    kept = Recovery(f"{folder}/kept", every=every)
    train(*make_callbacks(Path(folder), *kills), workers=Elastic(3), recovery=kept)


def lose_driver(folder: Path, every: Any, *kills: tuple[int, int, int]) -> None:
    arguments = ", ".join(map(repr, (str(folder), every, *kills)))
    program = f"import test_elastic_checkpoints as t; t.train_and_be_killed({arguments})"
    path = {"PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{os.environ['PYTHONPATH']}"}
    command = [sys.executable, "-c", program]
    driver = subprocess.run(command, env={**os.environ, **path}, timeout=170)
    assert driver.returncode == -signal.SIGKILL
    wait_for(lambda: not worker_processes())


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_after_the_driver_was_killed_any_number_of_workers_resumes(
    workers: int, tmp_path: Path
) -> None:
    kills = (0, 0, 3), (2, 2, 3)  # rank 0 first: another worker continues its checkpoints
    lose_driver(tmp_path, 1, *kills)
    kept = Recovery(tmp_path / "kept", every=1, resume=True)
    callbacks = make_callbacks(tmp_path, *kills)
    with pytest.raises(InputError, match=r"resume with workers=Elastic\(\.\.\.\)"):
        train(*callbacks, workers=3, recovery=kept)
    result = train(*callbacks, workers=Elastic(workers), recovery=kept, seed=None)
    assert [len(generation.workers) for generation in result.generations] == [3, 2, workers]
    assert [generation.epoch for generation in result.generations] == [1, 1, 3]
    assert all(generation.step > 2 for generation in result.generations[1:])
    check_result(result)
    check_log(tmp_path)
    assert load_weights(kept) == result.workers[0].weights_sha256


@pytest.mark.full
def test_a_resumed_training_loses_workers_and_resumes_again(tmp_path: Path) -> None:
    # The numbers of the workers begin again.
    kills = (1, 1, 2), (0, 2, 2), (1, 2, 3), (0, 3, 3)
    lose_driver(tmp_path, "epoch", *kills)
    newest = CheckpointStore(str(tmp_path / "kept")).read_manifest()
    assert newest is not None
    assert [len(generation.workers) for generation in newest.generations] == [3, 2]
    kept = Recovery(tmp_path / "kept", every="0.01s", resume=True)
    settings = {"workers": Elastic(3, min=2), "recovery": replace(kept, restarts=1)}
    result = train(*make_callbacks(tmp_path, *kills), **settings)
    assert [len(generation.workers) for generation in result.generations] == [3, 2, 3, 2, 3]
    assert [generation.epoch for generation in result.generations] == [1, 2, 3, 3, 4]
    check_result(result)
    check_log(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("every", [3, "epoch"])
def test_statistics_dropout_and_callbacks_are_in_the_checkpoint(every: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": normalize, "validation_data": (X[:21], Y[:21])}
    settings |= {"workers": Elastic(2, min=2)}

    def train_with(recovery: Recovery, killer: KillAt) -> TrainResult:
        log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
        stop = keras.callbacks.EarlyStopping("val_loss", patience=9)
        return train(killer, Slow(), stop, log, recovery=replace(recovery, restarts=1), **settings)

    killer, kept = KillAt(0, 1, 4, tmp_path / "killed"), Recovery(tmp_path / "kept", every=every)
    result = train_with(kept, killer)
    again = result.generations[1]
    assert (again.epoch, again.step) == (2, 1 if every == "epoch" else 3)
    variance = result.model.layers[1].moving_variance.numpy()
    assert np.all((variance > 0.5) & (variance < 1.5) & (variance != 1))
    check_log(tmp_path)
    undisturbed = train_with(Recovery(), killer)
    for name, values in undisturbed.history.items():
        assert np.allclose(values[:1], result.history[name][:1])
        assert every == 3 or values == result.history[name]


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_if_steps_cannot_be_recorded_checkpoints_are_written_between_epochs(
    workers: int, tmp_path: Path, capsys: Any
) -> None:
    kept = Recovery(tmp_path / "kept", every=1)
    settings = {"model": take_two_steps_at_once, "recovery": replace(kept, restarts=1)}
    killer = KillAt(0, 2, 3, tmp_path / "killed")
    result = train(killer, Slow(), workers=Elastic(workers, min=workers), **settings)
    assert (result.generations[1].epoch, result.generations[1].step) == (3, 1)
    check_result(result)
    assert "are therefore only written at the end of an epoch" in capsys.readouterr().out


@pytest.mark.full
def test_all_are_preempted_and_no_step_is_lost(tmp_path: Path) -> None:
    told = [KillAt(rank, 1, 2, tmp_path / str(rank), signal.SIGTERM) for rank in (0, 1)]
    kept = Recovery(tmp_path / "kept", every="1h")
    result = train(*told, workers=Elastic(2), recovery=replace(kept, restarts=1))
    assert [(g.epoch, g.step) for g in result.generations] == [(1, 1), (3, 1)]
    check_result(result)


class WaitUntilSaved(keras.callbacks.Callback):
    """Wait in a step for a checkpoint within an epoch, once the file ``told`` exists."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        store = CheckpointStore(f"{self.folder}/kept")
        if batch == 5 and Path(self.folder, "told").exists():
            wait_for(lambda: (kept := store.read_manifest()) and kept.step)


@pytest.mark.full
def test_a_preempted_worker_is_killed_and_a_checkpoint_has_its_last_step(tmp_path: Path) -> None:
    told = KillAt(1, 1, 1, tmp_path / "told", signal.SIGTERM)
    killer = KillAt(1, 1, 5, tmp_path / "killed")
    kept = Recovery(tmp_path / "kept", every="1h")
    settings = {"workers": Elastic(2, min=2), "recovery": replace(kept, restarts=1)}
    result = train(told, WaitUntilSaved(tmp_path), killer, **settings)
    resumed = result.generations[1]
    assert resumed.epoch == 2
    assert resumed.step in (3, 4)
    check_result(result)


@pytest.mark.full
def test_rows_in_another_order_are_refused_within_an_epoch_and_between(tmp_path: Path) -> None:
    kept = Recovery(tmp_path / "kept", every=2, resume=True)
    settings = {"recovery": kept, "epochs": 2}
    callbacks = [WaitUntilSaved(tmp_path), KillAt(1, 1, 5, tmp_path / "killed")]

    def check_refuses() -> None:
        with pytest.raises(WorkerFailedError, match="its `data` has different rows"):
            train(*callbacks, workers=Elastic(3), data=(X[::-1], Y[::-1]), **settings)

    train(*callbacks, workers=Elastic(2), **{**settings, "epochs": 1})
    check_refuses()
    (tmp_path / "told").touch()
    with pytest.raises(WorkerFailedError, match="fewer than min=2 workers"):
        train(*callbacks, workers=Elastic(2, min=2), **settings)
    newest = CheckpointStore(kept.uri).read_manifest()
    assert newest is not None
    assert newest.step > 0
    check_refuses()


class LoseLast(keras.callbacks.Callback):
    """Once, as rank 0, removes the last checkpoint when it is written, and kills the worker."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def on_train_end(self, logs: Any = None) -> None:
        mark, store = Path(self.folder, "lost"), CheckpointStore(f"{self.folder}/kept")
        if os.environ["TFDIST_WORKER"] == "0" and not mark.exists():
            wait_for(lambda: (kept := store.read_manifest()) and kept.epoch == EPOCHS)
            newest = store.read_manifest()
            assert newest is not None
            mark.write_text(newest.run)
            store.clear()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.full
def test_a_worker_is_lost_after_the_last_epoch_and_another_writes_its_checkpoint(
    tmp_path: Path,
) -> None:
    kept = Recovery(tmp_path / "kept", every="1h")
    result = train(LoseLast(tmp_path), workers=Elastic(2), recovery=kept)
    newest = CheckpointStore(kept.uri).read_manifest()
    assert newest is not None
    assert (newest.epoch, newest.step) == (EPOCHS, 0)
    assert newest.run == (tmp_path / "lost").read_text()
    assert load_weights(kept) == result.workers[0].weights_sha256


@pytest.mark.full
def test_a_training_that_has_ended_may_go_on_elastic_or_not(tmp_path: Path) -> None:
    kept = Recovery(tmp_path / "kept", resume=True)
    half = train(workers=Elastic(2), recovery=kept, epochs=2)
    assert half.workers_by_epoch == [2, 2]
    fixed = train(workers=3, recovery=kept, epochs=3)
    assert fixed.history["loss"][:2] == half.history["loss"]
    more = train(workers=Elastic(2), recovery=kept, epochs=4)
    assert more.history["loss"][:3] == fixed.history["loss"]
    fresh = Generation(3, [0, 1, 2], [0, 1, 2]), Generation(4, [0, 1], [0, 1])
    assert more.generations == [Generation(1, [0, 1]), *fresh]
    assert more.workers_by_epoch == [2, 2, 3, 2]
    check_result(more)


def test_a_training_that_was_not_elastic_resumes_as_such_and_then_elastic(tmp_path: Path) -> None:
    kept = Recovery(tmp_path / "kept", every=2, resume=True)
    callbacks = KillAt(1, 0, 4, tmp_path / "killed"), Slow()
    fixed = train(*callbacks, workers=2, recovery=replace(kept, restarts=1), epochs=2)
    assert fixed.restarts[0].checkpoint is not None
    more = train(*callbacks, workers=Elastic(3), recovery=kept, epochs=3)
    assert more.generations == [Generation(1, [0, 1]), Generation(3, [0, 1, 2], [0, 1, 2])]
    check_result(more)


@pytest.mark.full
def test_backups_are_removed_at_the_end(tmp_path: Path) -> None:
    backup = keras.callbacks.BackupAndRestore(tmp_path / "kept", save_freq=2)
    result = train(backup, KillAt(0, 1, 3, tmp_path / "killed"), workers=Elastic(2))
    assert len(result.generations) == 2
    check_result(result)
    assert not (tmp_path / "kept").exists()


def test_groups_before_a_checkpoint_and_generations_after_it() -> None:
    saved = [Generation(1, [0, 1, 2]), Generation(2, [0, 2], step=4)]
    assert find_groups_before(saved, 0, 3) == ((3, 3),)
    assert find_groups_before(saved, 1, 5) == ((3, 3), (2, 2))
    assert find_groups_before(saved, 2, 4) == ((2, 4),)
    assert find_groups_before(saved, 2, 0) == ()
    own = [Generation(1, [0, 1]), Generation(1, [1], left={"0": "lost"})]
    resumed = resume_generations(saved, own, 1, 5)
    assert resumed[2] == Generation(2, [0, 1], [0, 1], step=6)
    assert resumed[3] == Generation(2, [1], [1], {"0": "lost"}, step=6)
