"""Runs in MLflow and Weights & Biases: one for each training, made in this session."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from conftest import build_dense, full, wait_for

from pybackend import (
    Elastic,
    InputError,
    Observer,
    Recovery,
    WorkerFailedError,
    barrier_train,
    plan,
    submit_training,
    track_mlflow,
    track_wandb,
    train_many,
    train_mnist,
)
from pybackend.core.api.observer import list_numbers, recording, split_trackers
from pybackend.core.launchers.joined.launcher import JoinedLauncher
from pybackend.core.launchers.joined.place import Place

# Neither package reports to its maker from a test.
os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
ROOT = Path(__file__).parents[2]
MLFLOW = ROOT / "build" / "mlflow-server"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: Any) -> Any:
    """Point MLflow at a new store in files, and return its client."""
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    yield mlflow.MlflowClient()
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(before)


def find_run(client: Any, name: str) -> Any:
    """Return the only run of an experiment."""
    experiment = client.get_experiment_by_name(name)
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def read_history(client: Any, run: Any, name: str) -> list[tuple[int, float]]:
    found = client.get_metric_history(run.info.run_id, name)
    return sorted((one.step, one.value) for one in found)


class NoTracking(keras.callbacks.Callback):
    """Fails on a worker that has imported a tracking package."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert not {"mlflow", "wandb"} & set(sys.modules)
        logs["own"] = 1.5


def check_recorded(client: Any, rows: Any, tmp_path: Path, caplog: Any) -> None:
    """Train with a tracker, and compare all that a store has of the run."""
    import mlflow

    caplog.set_level(logging.INFO, "tfdist")
    tracker = track_mlflow(experiment="dense", run_name="first", tags={"team": "a"})
    result = barrier_train(
        "local",
        build_dense,
        rows,
        workers=2,
        epochs=3,
        seed=4,
        validation_data=rows,
        callbacks=[NoTracking(), tracker],
        verbose=0,
    )
    assert mlflow.active_run() is None
    assert not [one for one in caplog.messages if "whole run" in one]
    run = find_run(client, "dense")
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    for name in ("loss", "val_accuracy"):
        expected = list(enumerate(result.history[name], 1))
        assert read_history(client, run, name) == expected
    assert read_history(client, run, "own") == [(1, 1.5), (2, 1.5), (3, 1.5)]
    assert run.data.params["seed"] == "4"
    assert run.data.params["workers"] == "2"
    assert run.data.params["exchange.kind"] == "Exchange"
    assert run.data.params["versions.keras"] == keras.__version__
    assert run.data.metrics["audit/steps"] == result.audit.steps > 0
    for worker in result.workers:
        assert run.data.metrics[f"system/worker_{worker.rank}/rows"] == 250
        assert run.data.metrics[f"system/worker_{worker.rank}/seconds"] == worker.seconds
    tags = run.data.tags
    assert tags["team"] == "a"
    assert tags["tfdist.hosts"] == result.workers[0].host
    assert tags["tfdist.model_sha256"] == result.model_sha256
    folder = tmp_path / "files"
    folder.mkdir(parents=True)
    for name in ("result.json", "plan.txt", "report.html"):
        client.download_artifacts(run.info.run_id, name, str(folder))
    assert json.loads((folder / "result.json").read_text())["seed"] == 4
    assert "workers" in (folder / "plan.txt").read_text()
    assert "tfdist-run" in (folder / "report.html").read_text()
    (output,) = client.get_run(run.info.run_id).outputs.model_outputs
    model = mlflow.keras.load_model(f"models:/{output.model_id}")
    assert np.array_equal(model.predict(rows[0], verbose=0), result.predict(rows[0]))
    signature = mlflow.models.get_model_info(f"models:/{output.model_id}").signature
    assert [tensor.shape for tensor in signature.inputs.inputs] == [(-1, 8)]
    assert [tensor.shape for tensor in signature.outputs.inputs] == [(-1, 3)]


def test_a_run_of_mlflow_has_all_of_a_training(
    store: Any, rows: Any, tmp_path: Path, caplog: Any
) -> None:
    check_recorded(store, rows, tmp_path, caplog)


def pickled() -> Any:
    model = build_dense()
    model.layers[0].kernel.trainable = False  # Keras's file does not have it
    return model


KINDS: dict[str, Any] = {"function": lambda: build_dense, "file": build_dense, "pickled": pickled}
CALLS: dict[str, Any] = {
    "detached": lambda model, rows, _, **settings: submit_training(
        "local", model, rows, workers=1, **settings
    ).result(verbose=0),
    "resumed": lambda model, rows, path, **settings: [
        barrier_train("local", model, rows, workers=1, **{**settings, **changes})
        for changes in (
            {"recovery": Recovery(path), "epochs": 1},
            {"recovery": Recovery(path, resume=True)},
        )
    ][-1],
    "elastic": lambda model, rows, _, **settings: barrier_train(
        "local", model, rows, workers=Elastic(max=1), **settings
    ),
    "trial": lambda model, rows, _, **settings: (
        train_many("local", model, rows, grid=[{}], workers_per_trial=1, **settings)[0].result
    ),
}
# A search takes only functions.
CROSSED = [(k, call) for k in KINDS for call in CALLS if k == "function" or call != "trial"]


@pytest.mark.launcher(False)
@pytest.mark.parametrize(
    ("kind", "call"),
    [one if one == ("file", "detached") else full(*one) for one in CROSSED],
)
def test_trackers_record_any_kind_of_call(
    kind: str, call: str, store: Any, rows: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    import wandb

    monkeypatch.setenv("TFDIST_JOBS", str(tmp_path / "jobs"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    mlflow = track_mlflow(experiment="any", tracking_uri=f"file://{tmp_path}/mlruns")
    trackers = [mlflow, track_wandb(project="any")]
    result = CALLS[call](
        KINDS[kind](), rows, tmp_path / "checkpoint", epochs=2, callbacks=trackers, verbose=0
    )
    run, *_ = store.search_runs([store.get_experiment_by_name("any").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.tags["tfdist.model_sha256"] == result.model_sha256
    assert run.data.metrics["loss"] == result.history["loss"][-1]
    names = {one.path for one in store.list_artifacts(run.info.run_id)}
    assert {"plan.txt", "result.json", "report.html"} <= names
    assert len(run.outputs.model_outputs) == 1
    wandb.teardown()
    written = [one.read_bytes() for one in tmp_path.glob("wandb/offline-run-*/run-*.wandb")]
    assert any(result.model_sha256.encode() in content for content in written)


class Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise ValueError("no such weather")


def train(rows: Any, **settings: Any) -> Any:
    return barrier_train("local", build_dense, rows, workers=1, verbose=0, **settings)


def test_a_failed_run_has_the_error_and_an_active_run_stays_open(
    store: Any, rows: Any, tmp_path: Path
) -> None:
    import mlflow

    tracker = track_mlflow(experiment="failing", log_model=False)
    with pytest.raises(WorkerFailedError):
        train(rows, callbacks=[Fails(), tracker])
    run = find_run(store, "failing")
    assert run.info.status == "FAILED"
    assert "no such weather" in run.data.tags["tfdist.error"]
    folder = Path(store.download_artifacts(run.info.run_id, "", str(tmp_path)))
    assert "no such weather" in (folder / "report.html").read_text()

    def interrupt(epoch: int, logs: Any) -> None:
        raise KeyboardInterrupt

    mlflow.set_experiment("active")
    child = track_mlflow(nested=True, log_model=False, run_name="trial")
    own = track_mlflow(log_model=False)
    with mlflow.start_run() as active:
        train(rows, callbacks=[own])
        assert mlflow.active_run().info.run_id == active.info.run_id
        with pytest.raises(KeyboardInterrupt):
            train(rows, callbacks=[Observer(on_epoch_end=interrupt), child])
        assert mlflow.active_run().info.run_id == active.info.run_id
    parent = store.get_run(active.info.run_id)
    assert read_history(store, parent, "loss")[0][0] == 1
    (trial,) = store.search_runs([parent.info.experiment_id], "attributes.run_name = 'trial'")
    assert trial.info.status == "KILLED"
    assert trial.data.tags["mlflow.parentRunId"] == active.info.run_id


@pytest.mark.full
def test_a_training_outlives_its_tracking_store(store: Any, rows: Any, capfd: Any) -> None:
    def lose(epoch: int, logs: Any) -> None:
        os.environ.pop("MLFLOW_ALLOW_FILE_STORE", None)
        uri = store._tracking_client.tracking_uri.removeprefix("file://")
        os.rename(uri, f"{uri}.lost")

    callbacks = [Observer(on_epoch_end=lambda n, logs: lose(n, logs) if n == 1 else None)]
    result = barrier_train(
        "local",
        build_dense,
        rows,
        workers=1,
        epochs=2,
        callbacks=[*callbacks, track_mlflow(log_model=False)],
    )
    assert len(result.history["loss"]) == 2
    assert capfd.readouterr().out.count("MLflow does not have the whole run") == 1


def test_wrong_settings_are_errors_at_once(monkeypatch: Any) -> None:
    with pytest.raises(InputError, match="`experiment` must be text"):
        track_mlflow(experiment=3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="`tags` must be a dict"):
        track_mlflow(tags=["a"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="has no argument `name`"):
        track_mlflow(name="a")  # type: ignore[call-arg]
    with pytest.raises(InputError, match="`log_model` must be True or False"):
        track_wandb(log_model="yes")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"use 'digits', and set .* WANDB_ENTITY to 'team'"):
        track_wandb(project="team/digits")
    with pytest.raises(InputError, match=r"`project` must not contain # \?"):
        track_wandb(project="digits?#1")
    for name, value in (("WANDB_PROJECT", "a:b"), ("WANDB_MODE", "ofline")):
        monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match=name):
            track_wandb()
        monkeypatch.delenv(name)
    with pytest.raises(InputError, match=r"call it, track_mlflow\(\)"):
        split_trackers([track_mlflow])
    for module, make in (("mlflow", track_mlflow), ("wandb", track_wandb)):
        monkeypatch.setattr("pybackend.tracking.find_spec", lambda name: None)
        with pytest.raises(InputError, match=rf"is not installed .*tfdist\[{module}\]"):
            make()


def test_only_numbers_are_metrics() -> None:
    logs = {"loss": 1, "name": "a", "f1": [0.5, None], "none": None}
    assert list_numbers(logs) == {"loss": 1.0, "f1.0": 0.5}


def test_a_plan_starts_no_run(store: Any, rows: Any) -> None:
    made = plan("local", build_dense, rows, callbacks=[track_mlflow(experiment="planned")])
    assert len(made.workers) == 2
    assert store.get_experiment_by_name("planned") is None


@pytest.mark.full
def test_each_trial_is_a_run_of_its_own(
    store: Any, rows: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    import mlflow

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))

    def build(rate: float, timeout: int) -> Any:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(rate), loss)
        return model

    trackers = [track_mlflow(experiment="trials", log_model=False), track_wandb(project="trials")]
    mlflow.set_experiment("trials")
    with mlflow.start_run() as parent:
        found = train_many(
            "local",
            build,
            rows,
            grid={"rate": [0.1, 0.01], "timeout": [7]},
            callbacks=trackers,
            verbose=0,
        )
    experiment = store.get_experiment_by_name("trials")
    runs = [
        run
        for run in store.search_runs([experiment.experiment_id])
        if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id
    ]
    losses = {run.info.run_name: run.data.metrics["loss"] for run in runs}
    assert losses == {f"trial-{t.number}": t.metrics["loss"] for t in found.trials}
    rates = {run.info.run_name: float(run.data.params["rate"]) for run in runs}
    assert rates == {"trial-1": 0.1, "trial-2": 0.01}
    # Another argument has the name of a setting.
    assert all(run.data.params["model.timeout"] == "7" for run in runs)
    assert all(run.data.params["timeout"] == "300.0" for run in runs)
    import wandb

    wandb.teardown()  # its process has the folder of this test
    wandb_runs = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(wandb_runs) == 2
    for path in wandb_runs:
        items = [item for one in read_records(path) for item in one.config.update]
        assert "rate" in {item.key for item in items}


def test_a_run_of_wandb_is_on_disk(rows: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    result = train(
        rows, epochs=2, callbacks=[NoTracking(), track_wandb(project="dense", run_name="first")]
    )
    import wandb

    assert wandb.run is None
    wandb.teardown()  # its process writes the rest
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    for text in ("versions.keras", "loss", "system/worker_0/rows", result.model_sha256):
        assert text.encode() in content


def read_records(path: Path) -> list[Any]:
    """Return the records in a file of wandb: a log of blocks of 32 KB, as LevelDB's."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts, found = path.read_bytes(), 7, b"", []
    while len(content) - place >= 7:
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


def test_a_training_that_fails_is_a_failed_run_of_wandb(
    rows: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(WorkerFailedError):
        train(rows, callbacks=[Fails(), track_wandb(project="dense")])
    import wandb

    assert wandb.run is None
    wandb.teardown()
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = read_records(written)
    assert [one.exit.exit_code for one in records if one.HasField("exit")] == [1]
    values = [item for one in records for item in one.summary.update]
    (error,) = [one.value_json for one in values if "tfdist/error" in (one.key, *one.nested_key)]
    assert "no such weather" in error


@pytest.fixture
def server(tmp_path: Path, monkeypatch: Any) -> Iterator[str]:
    """Start MLflow's server on a free port of this machine, from its own installation."""
    if not (MLFLOW / "mlflow").is_dir():
        packages = ["mlflow", "sqlalchemy", "alembic", "mako", "huey"]
        install = ["scripts/py-install.sh", "--no-deps", "--target", str(MLFLOW), *packages]
        subprocess.run(install, cwd=ROOT, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(MLFLOW)}
    environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path}/runs.db"]
    command += ["--artifacts-destination", str(tmp_path / "artifacts")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True
        )
    try:
        wait_for(lambda: is_open(port) or process.poll() is not None, 180)
        assert process.poll() is None, (tmp_path / "log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.full
def test_a_server_of_mlflow_has_all_of_a_training(
    server: str, rows: Any, tmp_path: Path, caplog: Any
) -> None:
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(server)
    try:
        check_recorded(mlflow.MlflowClient(), rows, tmp_path / "copy", caplog)
        result = train_mnist(
            "local",
            workers=2,
            epochs=1,
            limit=200,
            callbacks=[track_mlflow(experiment="digits")],
            verbose=0,
        )
        run = find_run(mlflow.MlflowClient(), "digits")
        assert run.data.metrics["test/accuracy"] == result.metrics["test_accuracy"]
    finally:
        mlflow.set_tracking_uri(before)


@pytest.mark.parametrize("rank", [0, 1])
def test_among_processes_that_join_only_the_first_records(rank: int) -> None:
    begun: list[Any] = []
    tracker = SimpleNamespace(system="any", begin=begun.append)
    place = Place(rank, 2, "localhost:1", None, "mpirun", (), rank, 2)
    prepared = SimpleNamespace(launcher=JoinedLauncher(place, "secret"), trackers=[tracker])
    with recording(prepared, begun.append):
        assert len(begun) == (rank == 0)
