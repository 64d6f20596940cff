"""Detached jobs: they outlive their session, and give the result or error of an ordinary call."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import full, is_running, marked_processes, wait_for
from detaching import (
    HERE,
    SETTINGS,
    assert_same,
    build,
    drivers,
    end_session,
    rows,
    slow,
    start_session,
    submit_and_kill,
    train_here,
)
from failing import nothing_left
from object_store import object_store

import pybackend
from pybackend import ClusterError, InputError, Observer, WorkerFailedError
from pybackend.cli import main
from pybackend.core.api.display import epoch_line
from pybackend.core.api.job_folder import EventLog, JobFolder, new_folder
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import EpochEnded, Event, Note
from pybackend.types import DetachedJob

MARK = f"TFDIST_TEST_RUN={os.environ['TFDIST_TEST_RUN']}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TFDIST_JOBS", str(tmp_path / "jobs"))
    return tmp_path / "jobs"


def submit(**changes: Any) -> DetachedJob:
    options: dict[str, Any] = {"epochs": 2, **SETTINGS, **changes}
    return pybackend.submit_training("local", build, rows(), **options)


@pytest.mark.full
def test_the_driver_records_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    uri = f"file://{tmp_path}/mlruns"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracker = pybackend.track_mlflow(tracking_uri=uri, experiment="away", log_model=False)
    result = submit(callbacks=[tracker]).result()
    assert isinstance(result, pybackend.types.TrainResult)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("away")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["loss"] == result.history["loss"][-1]


@pytest.fixture(scope="module")
def expected() -> Any:
    return train_here()


def test_the_session_is_killed_and_another_one_gets_the_same_model(
    expected: Any, folder: Path
) -> None:
    name = submit_and_kill(HERE)
    # In a new process, as in the user's next session.
    program = f"""
    import pybackend
    job = pybackend.attach_job({name!r})
    result = job.result(120, verbose=1)
    weights = [w.tolist() for w in result.model.get_weights()]
    print("RESULT", result.model_sha256, result.history, weights, job.status, sep="|")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert "epoch 2/2" in done.stdout, done.stderr
    found = done.stdout.rpartition("RESULT|")[2].strip().split("|")
    weights = [w.tolist() for w in expected.model.get_weights()]
    history = dict(expected.history)
    assert found == [expected.model_sha256, str(history), str(weights), "finished"]
    wait_for(lambda: not drivers())
    assert not (folder / name / "request").exists()
    assert (folder / name).stat().st_mode & 0o777 == 0o700


@pytest.mark.full
@pytest.mark.parametrize("number", range(20))
def test_a_session_that_is_killed_at_any_moment_leaves_a_job_or_nothing(
    number: int, expected: Any, folder: Path
) -> None:
    session = start_session()
    # A submission takes up to a second.
    time.sleep(random.Random(number).uniform(0, 1.0))
    end_session(session)

    def is_settled() -> bool:
        pybackend.jobs()  # removes what a killed submission left
        return not list(folder.glob(".new-*"))

    wait_for(is_settled)
    found = pybackend.jobs()
    left = os.listdir(folder) if folder.exists() else []
    assert left == [job.id for job in found]
    assert len(found) <= 1
    for job in found:
        assert job.result(120, verbose=0).model_sha256 == expected.model_sha256
    wait_for(lambda: not drivers())


def test_a_silent_job_stays_silent(capfd: Any) -> None:
    job = submit(workers=1, epochs=1)
    job.result()
    assert capfd.readouterr() == ("", "")
    pybackend.attach_job(job.id).result(verbose=1)
    assert "loss" in "".join(capfd.readouterr())


def test_half_a_submission_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = os.fork()
    if pid == 0:  # killed after it has written some of the request
        monkeypatch.setattr("pybackend.core.api.submit.write_request", lambda *_: os._exit(0))
        submit()
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(list(folder.iterdir())) == 1
    assert pybackend.jobs() == []
    assert list(folder.iterdir()) == []


def test_an_error_is_that_of_the_ordinary_call() -> None:
    def fail() -> Any:
        raise RuntimeError("no model today")

    job = pybackend.submit_training("local", fail, rows(), **SETTINGS)
    with pytest.raises(WorkerFailedError, match="no model today") as caught:
        job.result(120, verbose=0)
    assert caught.value.exception_type == "RuntimeError"
    assert {failure.rank for failure in caught.value.failures} == {0, 1}
    assert "no model today" in caught.value.worker_traceback
    assert job.status == "failed"
    assert "no model today" in repr(job)


def epochs(first: int, end: int) -> list[Event]:
    return [EpochEnded(number, 500, 1.0, {"loss": 0.5}) for number in range(first, end)]


def finished(folder: Path, events: Sequence[Event]) -> JobFolder:
    """Return the folder of a job with these events."""
    folder.mkdir(0o700)
    with new_folder(folder) as (found, _):
        found.submit("processes of this machine", 2, 500, None)
        found.job.write_text(TrainingJob(2, epochs=500).to_json())
        log = EventLog(found)
        for event in events:
            log(event)
        found.end("finished")
        return found.publish()


def test_a_result_that_is_there_shows_notes_and_the_last_epoch(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "no audit in this test"
    job = pybackend.attach_job(finished(folder, [*epochs(1, 99), Note(note), *epochs(99, 501)]).id)
    assert job.wait(verbose=1) == "finished"
    assert capsys.readouterr().out.splitlines() == [f"note: {note}", epoch_line(*epochs(500, 501))]
    assert len(job.logs()) == 501


def test_cancel_leaves_nothing_but_the_folder(tmp_path: Path, folder: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with nothing_left(MARK, temporary):
        job = submit(epochs=1000, callbacks=[slow(0.05)])
        wait_for(lambda: any("epoch 1/" in line for line in job.logs()))
        with pytest.raises(InputError, match="cancel it first"):
            job.remove()
        with pytest.raises(TimeoutError):
            job.result(0.1, verbose=0)
        assert job.cancel() == "cancelled"
    with pytest.raises(ClusterError, match="was cancelled"):
        job.result(verbose=0)
    assert pybackend.attach_job(job.id).status == "cancelled"
    job.remove()
    assert list(folder.iterdir()) == []


def test_a_driver_that_is_killed_is_lost_and_its_workers_end(tmp_path: Path) -> None:
    job = submit(epochs=1000, callbacks=[slow(0.05)])
    wait_for(lambda: any("epoch 1/" in line for line in job.logs()))
    (driver,) = drivers()
    os.kill(driver, signal.SIGKILL)
    wait_for(lambda: job.status == "lost")
    # The system closes the files of a killed process before it has freed its memory.
    wait_for(lambda: not is_running(driver))
    with pytest.raises(ClusterError, match="make the same call again"):
        job.result(verbose=0)
    wait_for(lambda: not any(b"pybackend" in words for _, words in marked_processes(MARK)))


@pytest.mark.full
def test_a_lost_job_resumes_from_its_checkpoint(expected: Any, tmp_path: Path) -> None:
    place = str(tmp_path / "checkpoints")
    job = submit(recovery=pybackend.Recovery(place, every=1), callbacks=[slow(0.5)])
    wait_for(lambda: any("epoch 1/" in line for line in job.logs()))
    (driver,) = drivers()
    os.kill(driver, signal.SIGKILL)
    wait_for(lambda: job.status == "lost")
    assert os.listdir(place)
    again = submit(recovery=pybackend.Recovery(place, every=1, resume=True), callbacks=[slow(0)])
    assert_same(again.result(120, verbose=0), expected)


def test_an_observer_in_another_session_stops_the_training() -> None:
    job = submit(epochs=1000, callbacks=[slow(0.02)])
    wait_for(lambda: any("epoch 1/" in line for line in job.logs()))
    seen: list[int] = []

    def stop(epoch: int, logs: Any) -> bool:
        seen.append(epoch)
        return len(seen) == 2

    result = pybackend.attach_job(job.id, callbacks=[Observer(stop)]).result(120, verbose=0)
    assert seen[0] > 1
    assert seen[1] <= result.epochs < 1000


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"callbacks": [Observer(lambda epoch, logs: None)]}, r"it to `attach_job\(..., callba"),
        ({"folder": "memory://jobs"}, "other processes cannot read it"),
    ],
)
def test_what_cannot_be_detached_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        submit(**changes)
    assert pybackend.jobs() == []


@pytest.mark.full
def test_a_copy_in_an_object_store_serves_other_machines(expected: Any, folder: Path) -> None:
    uri = "s3://bucket/team/jobs"
    with object_store("bucket") as store:
        job = submit(folder=uri, callbacks=[slow(0.3)])
        there = pybackend.attach_job(job.id, folder=uri)
        assert there.status == "running"
        assert there.folder == f"{uri}/{job.id}"
        wait_for(lambda: any("epoch 1/" in line for line in there.logs()))
        result = there.result(120, verbose=0)
        assert_same(result, expected)
        assert result.model_sha256 == job.result(verbose=0).model_sha256
        for found, wanted in zip(
            result.model.get_weights(), expected.model.get_weights(), strict=True
        ):
            assert (found == wanted).all()
        assert there.logs() == job.logs()
        assert [one.id for one in pybackend.jobs(uri)] == [job.id]
        there.remove()
        assert pybackend.jobs(uri) == []
        assert job.status == "finished"

        other = submit(folder=uri, epochs=1000, callbacks=[slow(0.05)])
        assert pybackend.attach_job(other.id, folder=uri).cancel() == "cancelled"
        wait_for(lambda: not drivers())
        assert other.status == "cancelled"
        store.shut("PUT")
        with pytest.raises(InputError, match=f"jobs cannot be written to '{uri}/"):
            submit(folder=uri)
    assert sorted(os.listdir(folder)) == sorted([job.id, other.id])


def test_an_unknown_job_is_named() -> None:
    with pytest.raises(InputError, match="there is no job 'abc'"):
        pybackend.attach_job("abc")


@pytest.mark.parametrize(
    ("place", "reason"),
    [("/dev/null/jobs", "Not a directory"), ("/proc/self", "No such file or directory")],
)
def test_a_place_that_cannot_be_written_to_names_the_setting(place: str, reason: str) -> None:
    expected = (
        f"the files of a job cannot be written to '{place}' ({reason}): pass another "
        "`folder`, or set TFDIST_JOBS to it"
    )
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        submit(folder=place)


def test_a_folder_that_others_may_write_to_is_not_read(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(InputError, match="only you may write"):
        submit()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("ending", ["failed", full("cancelled"), full("lost")])
def test_logs_of_a_job_without_a_result_end_with_its_status(ending: str, capsys: Any) -> None:
    def fail() -> Any:
        raise RuntimeError("no model today")

    if ending == "failed":
        job = pybackend.submit_training("local", fail, rows(), **SETTINGS)
    else:
        job = submit(epochs=1000, callbacks=[slow(0.05)])
    if ending == "cancelled":
        job.cancel()
    elif ending == "lost":
        os.kill(drivers()[0], signal.SIGKILL)
    assert main(["jobs", "logs", job.id, "-f"]) == 1
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shown.startswith(ending)
    assert ("no model today" in shown) == (ending == "failed")
    assert main(["jobs", "logs", job.id]) == 0


def test_the_plan_shows_where_the_driver_runs(folder: Path) -> None:
    plan = pybackend.plan("local", build, rows(), submit=True, **SETTINGS)
    assert plan.driver is not None
    assert plan.driver.startswith(f"a process of its own on {socket.gethostname()}, ")
    assert f"driver: {plan.driver}" in str(plan).splitlines()
    assert str(folder) in plan.driver
    assert not folder.exists()
    assert pybackend.plan("local", build, rows(), **SETTINGS).driver is None
    plan = pybackend.plan("local", build, rows(), submit="s3://bucket/jobs", **SETTINGS)
    assert plan.driver is not None
    assert plan.driver.endswith(f"{folder} and a copy in s3://bucket/jobs")
    with pytest.raises(InputError, match="other processes cannot read it"):
        pybackend.plan("local", build, rows(), submit="memory://jobs", **SETTINGS)


def test_the_command_line(tmp_path: Path, capsys: Any) -> None:
    job = submit()
    assert main(["jobs", "logs", job.id[-6:], "-f"]) == 0
    assert "epoch 2/2" in capsys.readouterr().out
    assert main(["jobs", "list"]) == 0
    assert f"{job.id}  finished, epoch 2/2 completed" in capsys.readouterr().out
    assert main(["jobs", "result", job.id, "-o", str(tmp_path / "model.h5")]) == 0
    assert (tmp_path / "model.h5").read_bytes() == job.result(verbose=0).content
    assert main(["jobs", "cancel", job.id]) == 0
    assert "finished" in capsys.readouterr().out
    assert main(["jobs", "remove", job.id]) == 0
    assert main(["jobs", "status", job.id]) == 1
    assert "there is no job" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["jobs", "status"])
    assert "status needs an ID" in capsys.readouterr().err
