"""Many trials at once: equal results, failures, poor trials, and what is wrong in a call."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import pytest
from conftest import build_dense, marked_processes, wait_for, worker_processes

from pybackend import (
    InputError,
    MedianPruning,
    Observer,
    Resources,
    SuccessiveHalving,
    barrier_train,
    train_many,
)
from pybackend.core.launchers.hosts.ssh import divide_slots, parse_hosts
from pybackend.core.words import speak
from pybackend.tuning.grid import ModelFunction, list_trials
from pybackend.tuning.trials import ModelFiles, Trial
from pybackend.types import Trials

ROWS = np.zeros((8, 8), "float32"), np.zeros(8)


def build(units: int = 4, rate: float = 0.05, fails: bool = False) -> Any:
    import keras

    if fails:
        raise ValueError("there is no such model")
    layers = [keras.Input((8,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss, metrics=["accuracy"])
    return model


def weights_of(result: Any) -> set[str]:
    return {worker.weights_sha256 for worker in result.workers}


@pytest.mark.launcher(False)
def test_each_trial_has_the_result_of_its_own_training_and_a_failure_is_a_row(
    rows: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    ended: list[Any] = []
    grid = [
        {"units": 4, "rate": 0.1},
        {"units": 4, "fails": True},
        {"units": 2, "seed": 9, "epochs": 1, "batch_size": 50},
    ]
    common = {"validation_split": 0.2, "epochs": 2, "seed": 3}
    trials = train_many(
        "local",
        build,
        rows,
        grid=grid,
        workers_per_trial=2,
        parallelism=2,
        on_trial=lambda trial: ended.append((trial.number, threading.current_thread())),
        **common,
    )
    assert [trial.arguments for trial in trials.trials] == grid
    statuses = ["completed", "failed", "completed"]
    assert [trial.status for trial in trials.trials] == statuses
    for trial in trials.trials:
        if trial.result is not None:
            own = {n: trial.arguments[n] for n in ("units", "rate") if n in trial.arguments}
            options = {n: v for n, v in trial.arguments.items() if n not in own}
            alone = barrier_train(
                "local",
                lambda own=own: build(**own),
                rows,
                workers=2,
                verbose=0,
                **{**common, **options},
            )
            assert trial.result.history == alone.history
            assert weights_of(trial.result) == weights_of(alone)
            assert trial.metrics == {name: values[-1] for name, values in alone.history.items()}
    error = trials.trials[1].error
    assert str(error)[7:] in [
        f"{rank} on 127.0.0.1 failed: ValueError: there is no such model" for rank in (0, 1)
    ]
    # A user's functions run on the thread of the call.
    assert sorted(number for number, _ in ended) == [1, 2, 3]
    assert {thread for _, thread in ended} == {threading.main_thread()}
    best = trials.best()
    assert best.metrics["val_loss"] == min(t.metrics.get("val_loss", 9) for t in trials.trials)
    assert best.model.layers[0].units == best.arguments["units"]
    assert trials.to_frame()["units"].tolist() == [4, 4, 2]
    said = capsys.readouterr().out
    assert said.startswith("Training 3 trials, 2 at once, each with 2 workers: processes of this")
    assert f"trial 2 (units=4, fails=True)  failed: {error}" in said
    wait_for(lambda: not worker_processes())


HERE = ModelFunction(lambda arguments, _: build(**arguments), ["units", "rate", "fails"])
BAD = {
    "model": ({"fails": True}, "ValueError: there is no such model"),
    "option": ({"steps_per_epoch": 999}, "`steps_per_epoch` is 999, but 500 rows give"),
}


@pytest.mark.launcher(False)
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("bad", BAD)
def test_a_trial_that_cannot_start_is_a_row_in_any_place(bad: str, place: int, rows: Any) -> None:
    arguments, message = BAD[bad]
    grid: list[dict[str, Any]] = [{"units": 2}, {"units": 3}]
    grid[place:place] = [arguments, arguments]
    told: list[int] = []
    common = {"workers_per_trial": 1, "parallelism": 1, "verbose": 0}
    trials = train_many(
        "local", HERE, rows, grid=grid, on_trial=lambda one: told.append(one.number), **common
    )
    failed = [number in (place, place + 1) for number in range(4)]
    assert [trial.status == "failed" for trial in trials] == failed
    assert message in str(trials[place].error)
    assert [trial.arguments for trial in trials] == grid
    assert told == [1, 2, 3, 4]


def test_an_error_of_all_trials_is_raised(rows: Any) -> None:
    message = r"^no trial can start; trial 1 \(fails=True\) failed: ValueError: there is no"
    with pytest.raises(InputError, match=message):
        train_many("local", HERE, rows, grid={"fails": [True, True]}, verbose=0)
    study = optuna.create_study()
    grid = {"units": optuna.distributions.IntDistribution(1, 4)}
    with pytest.raises(InputError, match=r"^`class_weight` has"):
        train_many("local", build, rows, grid=grid, study=study, trials=9, class_weight={"a": 1.0})
    assert len(study.trials) == 1


@pytest.mark.full
@pytest.mark.launcher(False)
def test_poor_trials_end_early_with_the_model_of_their_last_epoch(rows: Any) -> None:
    seen: list[int] = []
    trials = train_many(
        "local",
        build,
        rows,
        grid={"rate": [0.1, 0.2, 0.0]},
        parallelism=1,
        epochs=4,
        seed=1,
        validation_data=rows,
        prune=MedianPruning(warmup_epochs=1, warmup_trials=2),
        resources=Resources(cpus=1),
        callbacks=[Observer(lambda epoch, logs: seen.append(epoch))],
        verbose=0,
    )
    assert [trial.status for trial in trials.trials] == ["completed", "completed", "pruned"]
    poor = trials.trials[2]
    assert poor.trained_epochs == 2
    assert seen == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert poor.result is not None
    alone = barrier_train(
        "local",
        lambda: build(rate=0.0),
        rows,
        workers=1,
        epochs=2,
        seed=1,
        validation_data=rows,
        resources=Resources(cpus=1),
        verbose=0,
    )
    assert poor.result.history == alone.history
    assert weights_of(poor.result) == weights_of(alone)
    assert "pruned after 2 epochs" in str(trials)


MARK = "TFDIST_TEST_SEARCH"
SEARCH = """
import os, sys
import numpy as np
import pybackend
from test_tuning import build

def wait(epoch, logs):
    print("epoch", flush=True)

if __name__ == "__main__":
    os.environ["TFDIST_FORK_SERVER"] = sys.argv[1]
    pybackend.train_many(
        "local", build, (np.zeros((8, 8), "float32"), np.zeros(8)), grid={"units": [1, 2, 3]},
        parallelism=2, epochs=10**6, verbose=0, callbacks=[pybackend.Observer(wait)],
    )
"""


def start_search(folder: Path, fork_server: str) -> subprocess.Popen[str]:
    """Start a search in its own process, with this value of ``TFDIST_FORK_SERVER``."""
    # Its workers start as users' do, and not from the forge that an earlier test has started.
    own = {
        "TMPDIR": str(folder),
        MARK: str(folder),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TFDIST_TEST_FORGE": "",
    }
    return subprocess.Popen(
        [sys.executable, "-c", SEARCH, fork_server],
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes_of(folder: Path) -> list[tuple[int, bytes]]:
    """Return the processes of the search that was started in a folder."""
    return marked_processes(f"{MARK}={folder}")


@pytest.mark.launcher(False)
def test_ctrl_c_ends_all_trials_and_leaves_nothing(tmp_path: Path) -> None:
    search = start_search(tmp_path, "0")
    assert search.stdout is not None
    search.stdout.readline()
    search.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in search.communicate(timeout=60)[1]
    wait_for(lambda: not processes_of(tmp_path))
    wait_for(lambda: not list(tmp_path.glob("tfdist-*")))


@pytest.mark.launcher(False)
def test_a_search_that_is_killed_while_its_fork_server_starts_leaves_nothing(
    tmp_path: Path,
) -> None:
    search = start_search(tmp_path, "1")
    try:
        server = b"forking import serve"
        wait_for(lambda: any(server in command for _, command in processes_of(tmp_path)), 180)
        wait_for(lambda: list(tmp_path.glob("tfdist-[01]-*")), 180)
    finally:
        search.kill()
        search.communicate()
    wait_for(lambda: not list(tmp_path.glob("tfdist-*")))
    wait_for(lambda: not processes_of(tmp_path))


@pytest.mark.full
@pytest.mark.launcher(False)
def test_an_error_in_a_function_of_the_user_ends_all_trials(rows: Any) -> None:
    def fail(trial: Any) -> None:
        raise ZeroDivisionError(trial.number)

    with pytest.raises(ZeroDivisionError):
        train_many(
            "local",
            build,
            rows,
            grid=[{"fails": True}, {}],
            parallelism=2,
            epochs=10**6,
            on_trial=fail,
            verbose=0,
        )
    wait_for(lambda: not worker_processes())


@pytest.mark.full
@pytest.mark.launcher(False)
def test_a_study_suggests_the_values_of_trials_and_stops_poor_ones(rows: Any) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        sampler=optuna.samplers.RandomSampler(seed=2),
        pruner=optuna.pruners.NopPruner(),
        direction="maximize",
    )
    distributions = optuna.distributions
    trials = train_many(
        "local",
        build,
        rows,
        grid={
            "rate": distributions.FloatDistribution(0.01, 0.1, log=True),
            "units": distributions.CategoricalDistribution([2, 4]),
            "fails": distributions.CategoricalDistribution([True, False]),
        },
        study=study,
        trials=5,
        parallelism=2,
        metric="accuracy",
        epochs=2,
        verbose=0,
    )
    states = {"COMPLETE": "completed", "PRUNED": "pruned", "FAIL": "failed"}
    assert [states[one.state.name] for one in study.trials] == [t.status for t in trials.trials]
    assert {trial.status for trial in trials.trials} == {"completed", "failed"}
    assert [one.params for one in study.trials] == [t.arguments for t in trials.trials]
    assert trials.mode == "max"
    assert study.best_value == trials.best().metrics["accuracy"]
    reported = study.trials[trials.best().number - 1].intermediate_values
    assert list(reported) == [1, 2]
    poor = train_many(
        "local",
        build,
        rows,
        grid={"rate": distributions.FloatDistribution(0.0, 0.0)},
        study=optuna.create_study(pruner=optuna.pruners.ThresholdPruner(lower=9.0)),
        trials=1,
        epochs=3,
        verbose=0,
    )
    assert [(t.status, t.trained_epochs) for t in poor.trials] == [("pruned", 1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": {}, "model": build_dense()}, "`model` must be a function"),
        ({"grid": {"size": [1]}}, r"`grid` has `size`.*\(units, rate, fails\)"),
        ({"grid": {"units": 3}}, "`units` has 3 instead of a list"),
        ({"grid": []}, "`grid` has no trials"),
        ({"grid": 3}, "`grid` must be a dict of lists"),
        ({"grid": [3]}, "it has 3"),
        ({"grid": {"batch_size": [0]}}, "`batch_size` must be at least 1, not 0"),
        ({"grid": {"units": [1]}, "mode": "least"}, "`mode` must be"),
        ({"grid": {"units": [1]}, "prune": "median"}, "`prune` must be None or a MedianPruning"),
        ({"grid": {"units": [1]}, "parallelism": 0}, "`parallelism` must be at least 1"),
        ({"grid": {"units": [1]}, "workers_per_trial": 0}, "`workers_per_trial` must be"),
        ({"grid": {"units": [1]}, "trials": 3}, "`trials` is only used with `study`"),
        ({"grid": {"units": [1]}, "study": 3}, "optuna.create_study"),
        ({"grid": {"units": [1]}, "study": optuna.create_study()}, "must map names to Optuna's"),
        ({"grid": {}, "study": optuna.create_study()}, "`study` needs a number of trials"),
        (
            {"grid": {}, "study": optuna.create_study(), "trials": 1, "mode": "max"},
            "`study` has the other direction",
        ),
        (
            {"grid": {}, "study": optuna.create_study(directions=["minimize", "maximize"])},
            "several objectives",
        ),
        ({"grid": {"units": [1]}, "on_trial": 3}, "`on_trial` must be a function"),
        ({"grid": {"units": [1]}, "metric": 3}, "`metric` must be the name"),
        ({"grid": {"units": [1]}, "recovery": "a"}, "`recovery` of trials has no `uri`"),
        ({"grid": [{}], "model": lambda a, b: 1}, "needs `a`, `b`, which `grid` does not have"),
        ({"grid": {"seed": [1]}, "model": lambda seed: 1}, "both of this call and of the"),
        ({"grid": {"error": [1]}, "model": lambda error: 1}, "a column of the result"),
        ({"grid": {"units": [1]}, "resources": Resources(cpus=4000)}, "4000 cpus"),
    ],
)
def test_a_wrong_argument_is_an_error_at_once(change: dict[str, Any], message: str) -> None:
    call = {"model": build, **change}
    with pytest.raises(InputError, match=message):
        train_many("local", data=ROWS, verbose=0, **call)


def test_a_metric_that_does_not_exist_ends_the_search(rows: Any) -> None:
    with pytest.raises(InputError, match="`metric` is 'auc', but the trials have only"):
        train_many(
            "local",
            build,
            rows,
            grid={"units": [1]},
            metric="auc",
            prune=SuccessiveHalving(),
            verbose=0,
        )


def test_a_grid_is_all_combinations_or_one_trial_per_row() -> None:
    expected = [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}]
    grid = {"a": np.array([1, 2]), "b": ["x", "y"]}
    assert list_trials(grid) == expected
    assert list_trials(expected) == expected
    found = list_trials(pd.DataFrame(expected))
    assert found == expected
    assert type(found[0]["a"]) is int
    function = ModelFunction.of(lambda **arguments: arguments)
    function.check(["anything", "epochs"])
    assert function.split({"anything": 1, "epochs": 2}) == ({"anything": 1}, {"epochs": 2})


def test_a_grid_with_an_option_of_the_exchange_names_the_object() -> None:
    with pytest.raises(InputError) as error:
        HERE.check(["scale_lr"])
    assert str(error.value).endswith(": pass `exchange=[Exchange(scale_lr=...)]` in `grid`")
    speak("R")
    try:
        with pytest.raises(InputError) as error:
            HERE.check(["scale_lr"])
    finally:
        speak("Python")
    assert str(error.value).endswith(": pass `exchange = list(exchange(scale_lr = ...))` in `grid`")
    with pytest.raises(InputError, match=r"steps_per_epoch$"):
        HERE.check(["workers"])


def test_the_median_rule_compares_the_best_values_so_far() -> None:
    rule = MedianPruning(warmup_epochs=1, warmup_trials=3)
    others = [{1: 1.0, 2: 0.5}, {1: 2.0, 2: 3.0}, {1: 3.0, 2: 4.0}]
    assert not rule.prunes(1, {1: 9.0}, others)
    assert rule.prunes(2, {1: 9.0, 2: 2.1}, others)
    assert not rule.prunes(2, {1: 1.9, 2: 9.0}, others)
    assert not rule.prunes(2, {1: 9.0, 2: 9.0}, others[:2])
    with pytest.raises(InputError, match="`warmup_epochs` must be"):
        MedianPruning(warmup_epochs=0)


def test_successive_halving_keeps_the_best_of_those_that_were_there() -> None:
    rule = SuccessiveHalving(first=2, factor=2)
    others = [{1: 0.0, 2: 1.0}, {2: 2.0}, {2: 3.0}, {1: 5.0}]
    assert not rule.prunes(1, {1: 9.0}, others)
    assert not rule.prunes(3, {3: 9.0}, others)
    assert rule.prunes(2, {2: 2.5}, others)
    assert not rule.prunes(2, {2: 1.5}, others)
    assert not rule.prunes(4, {4: 9.0}, others)  # the first
    with pytest.raises(InputError, match="`factor` must be"):
        SuccessiveHalving(factor=1)


def test_the_table_has_a_column_for_each_argument_and_metric() -> None:
    done = Trial(1, {"loss": "mse", "seed": 4}, "completed", {"loss": 0.5}, 2, 1.0, 4)
    other = Trial(2, {"units": 3}, "failed", {}, 0, 1.0, 5, "worker 0 on a failed: no")
    trials = Trials([done, other], "loss", "min", 2, 2.0)
    assert trials.records[0] == {
        "trial": 1,
        "loss": "mse",
        "seed": 4,
        "units": None,
        "status": "completed",
        "metric.loss": 0.5,
        "trained_epochs": 2,
        "seconds": 1.0,
        "error": None,
    }
    assert [*trials.records[1]] == [*trials.records[0]]
    assert trials.best() is done
    assert "<table" in trials._repr_html_()
    assert (len(trials), list(trials), trials[1]) == (2, [done, other], other)
    assert str(trials).splitlines()[-1] == "best loss: trial 1"
    with pytest.raises(InputError, match="trial 2 has no model: worker 0 on a failed"):
        _ = other.model
    with pytest.raises(InputError, match=r"no trial was completed; trial 2 \(units=3\) failed"):
        Trials([other], "loss", "min", 1, 1.0).best()
    with pytest.raises(InputError, match="`metric` is 'auc', but the trials have only loss"):
        Trials([done], "auc", "max", 1, 1.0).best()


def test_the_best_trial_depends_on_the_metric() -> None:
    values = [{"loss": 0.1, "accuracy": 0.5}, {"loss": 0.2, "accuracy": 0.9}]
    trials = [Trial(n, {"a": n}, "completed", found, 1, 1.0, 4) for n, found in enumerate(values)]
    found = Trials(trials, "loss", "min", 1, 2.0)
    assert found.best() is found.best("loss") is trials[0]
    assert found.best("loss", "max") is found.best("accuracy") is trials[1]
    assert found.best("accuracy", mode="min") is trials[0]
    assert found.best(mode="max") is trials[1]
    with pytest.raises(InputError, match="`metric` is 'auc', but the trials have only loss, acc"):
        found.best("auc")
    with pytest.raises(InputError, match="`metric` must be the name of a metric, not 3"):
        found.best(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="`mode` must be None, 'min' or 'max'"):
        found.best(mode="least")  # pyright: ignore[reportArgumentType]


def test_settings_are_shown_as_given() -> None:
    arguments = {"units": 16.0, "rate": 1e-7, "kind": "relu"}
    trial = Trial(1, arguments, "completed", {"loss": 0.25}, 1, 1.0, 4)
    assert trial.describe() == "trial 1 (units=16.0, rate=1e-07, kind='relu')  loss 0.2500  (1.0 s)"
    page = Trials([trial], "loss", "min", 1, 1.0)._repr_html_()
    assert all(f">{text}<" in page for text in ("16.0", "1e-07", "0.2500", "completed"))
    speak("R")
    try:
        assert trial.label == 'trial 1 (units = 16, rate = 1e-07, kind = "relu")'
    finally:
        speak("Python")


def test_model_files_are_on_disk_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = barrier_train("local", build, ROWS, workers=1, verbose=0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = ModelFiles()
    others = [replace(trained, content=bytes([place]) * place) for place in range(3)]
    stored = [files.store(result) for result in (trained, *others)]
    assert list(tmp_path.iterdir()) == []
    assert [one.args[0].content for one in stored] == [b""] * 4  # type: ignore[attr-defined]
    assert [one() for one in stored] == [trained, *others]
    trial = Trial(1, {}, "completed", {}, 1, 1.0, 4, stored=stored[0])
    assert trial.model is trial.model
    copied = pickle.loads(pickle.dumps(trial))  # noqa: S301
    assert copied == trial
    assert copied.result == trained
    end, write = files._end, os.pwrite

    def fill_disk(number: int, content: memoryview, place: int) -> int:
        if place != end:
            raise OSError(errno.ENOSPC, "no space left")
        return write(number, content[:9], place)

    monkeypatch.setattr(os, "pwrite", fill_disk)
    assert files.store(trained)() == trained
    assert files._end == end  # what was written before the disk was full is not kept
    number = files._number
    del files, stored, trial
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_slots_of_hosts_are_divided_in_order() -> None:
    parts = divide_slots(parse_hosts("a:3,b:2"), 2, 2)
    described = [[(h.name, h.slots, h.first, h.neighbours) for h in part] for part in parts]
    assert described == [[("a", 2, 0, 3)], [("a", 1, 2, 3), ("b", 1, 0, 1)]]
