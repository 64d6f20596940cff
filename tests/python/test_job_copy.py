"""Copies of detached jobs at a URI, without a driver; the store is slow, or fails."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import wait_for

import pybackend.core.api.detached_job as detached_job
import pybackend.core.api.job_record as job_record
import pybackend.core.api.submit as submit
from pybackend import ClusterError, InputError
from pybackend.core.api.job_copy import JobCopy, copied, new_copy
from pybackend.core.api.job_folder import JobFolder, new_folder
from pybackend.core.data.files import Folder, hide_password
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.storage_options import Checkpoint
from pybackend.core.launchers.spark.sessions import hand_over
from pybackend.types import DetachedJob

SECRET = "://ann:secret@host/"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[JobFolder, int]]:
    """Return the folder of a running job, whose copy is beside it, and its lock."""
    uri = f"file://{tmp_path}/copies"
    job = TrainingJob(
        workers=2,
        epochs=3,
        model_uri=f"s3{SECRET}model.h5",
        checkpoint=Checkpoint(f"s3{SECRET}run"),
        tensorboard=f"s3{SECRET}logs",
    )
    with new_folder(tmp_path / "jobs") as (found, lock):
        found.submit("here", 2, 3, uri)
        found.job.write_text(job.to_json())
        found.events.touch()
        yield found.publish(), lock


@pytest.fixture
def folder(started: tuple[JobFolder, int]) -> JobFolder:
    return started[0]


def copy_of(folder: JobFolder) -> JobCopy:
    assert folder.submitted.copy is not None
    return JobCopy(folder.submitted.copy)


def test_a_copy_shows_a_job_without_its_uris(folder: JobFolder, tmp_path: Path) -> None:
    with new_copy(folder):
        copy = copy_of(folder)
    job = copy.read_job()
    assert isinstance(job, TrainingJob)
    assert (job.workers, job.epochs, job.verbose) == (2, 3, 1)
    for path in (tmp_path / "copies").rglob("*"):
        assert path.is_dir() or b"secret" not in path.read_bytes(), path
    assert DetachedJob(JobCopy(f"s3{SECRET}jobs/1")).folder == "s3://***@host/jobs/1"
    assert hide_password("abfs://box@account/a at host:1/b@c") == (
        "abfs://box@account/a at host:1/b@c"
    )
    with pytest.raises(InputError, match=r"unknown://\*\*\*@host") as caught:
        detached_job.jobs(f"unknown{SECRET}jobs")
    assert "secret" not in str(caught.value)


def test_a_slow_upload_of_the_result_does_not_look_lost(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, may_end, is_writing = Folder.write, threading.Event(), threading.Event()

    def slow(self: Folder, name: str, content: bytes) -> None:
        if name == "result.json":
            is_writing.set()
            assert may_end.wait(30)
        write(self, name, content)

    monkeypatch.setattr(Folder, "write", slow)
    monkeypatch.setattr(job_record, "BEAT_SECONDS", 0.05)
    copy = copy_of(folder)
    beat = Path(copy.uri.removeprefix("file://"), "beat")

    def drive() -> None:
        with copied(folder):
            folder.result.write_text("{}")
            folder.end("finished")

    with new_copy(folder):
        driver = threading.Thread(target=drive)
        driver.start()
        assert is_writing.wait(30)
        first = beat.read_bytes()
        wait_for(lambda: beat.read_bytes() != first, 10)
        assert copy.status == "running"
        folder.remove()  # the end was read before
        may_end.set()
        driver.join()
    assert copy.status == "finished"
    last = beat.read_bytes()
    time.sleep(0.2)
    assert beat.read_bytes() == last


def test_a_copy_that_was_removed_is_not_completed(folder: JobFolder) -> None:
    with new_copy(folder), copied(folder):
        folder.end("finished")
        copy_of(folder).remove()
    assert not Path(copy_of(folder).uri.removeprefix("file://")).exists()


def test_a_job_is_removed_after_its_copy_is_complete(
    started: tuple[JobFolder, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lock = started
    folder.end("finished")
    monkeypatch.setattr(detached_job, "_COPY_SECONDS", 0.3)
    job = DetachedJob(folder)
    with pytest.raises(ClusterError, match="is still being copied"):
        job.remove()
    monkeypatch.setattr(detached_job, "_COPY_SECONDS", 30)
    timer = threading.Timer(0.3, fcntl.flock, (lock, fcntl.LOCK_UN))
    timer.start()
    job.remove()
    timer.join()
    assert not folder.path.exists()


@pytest.mark.parametrize("beat", [b"", b"17.", b"x"])
def test_a_beat_is_read_while_it_is_written(folder: JobFolder, beat: bytes) -> None:
    with new_copy(folder):
        copy = copy_of(folder)
    Path(copy.uri.removeprefix("file://"), "beat").write_bytes(beat)
    assert copy.status == ("lost" if beat == b"17." else "running")


@pytest.mark.parametrize("name", ["submitted.json", "job.json", "ended.json"])
def test_a_damaged_copy_is_named_and_can_be_removed(folder: JobFolder, name: str) -> None:
    with new_copy(folder), copied(folder):
        folder.end("finished")
    copy = copy_of(folder)
    path = Path(copy.uri.removeprefix("file://"), name)
    path.write_bytes(path.read_bytes()[:-5])
    found = DetachedJob(copy)
    assert found.describe().startswith(f"unreadable: {name} is damaged, or another version")
    assert found.to_dict()["status"] == "unreadable"
    found.remove()
    assert not path.parent.exists()


def test_waiting_survives_a_store_that_fails_for_a_moment(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_copy(folder), copied(folder):
        folder.end("finished")
    read, failures = Folder.read, [OSError("busy")] * 3

    def busy(self: Folder, name: str) -> bytes | None:
        if name == "ended.json" and failures:
            raise failures.pop()
        return read(self, name)

    monkeypatch.setattr(Folder, "read", busy)
    monkeypatch.setattr(JobCopy, "look_seconds", 0.01)
    job = DetachedJob(copy_of(folder))
    assert job.wait(verbose=0) == "finished"
    failures += [OSError("busy")] * 1000
    with pytest.raises(ClusterError, match="busy"):
        job.wait(0.1, verbose=0)
    monkeypatch.setattr(detached_job, "LOST_SECONDS", 0.1)
    with pytest.raises(ClusterError, match="busy"):
        job.wait(verbose=0)


def test_ctrl_c_while_the_driver_starts_leaves_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[Any] = []
    popen = subprocess.Popen

    def start(*_: Any, **settings: Any) -> Any:
        processes.append(popen(["sleep", "60"], **settings))
        return processes[0]

    with new_folder(tmp_path / "jobs") as (found, lock):

        def interrupt(_: float) -> None:  # just after the driver has published the folder
            found.publish()
            raise KeyboardInterrupt

        monkeypatch.setattr(subprocess, "Popen", start)
        monkeypatch.setattr(
            submit, "time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            submit._start(found, lock, {})
    assert processes[0].returncode is not None
    assert os.listdir(tmp_path / "jobs") == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_copy_of_a_session_ends_if_it_cannot_be_used(error: type[BaseException]) -> None:
    calls: list[str] = []
    client = SimpleNamespace(
        close=lambda: calls.append("close"), release_session=lambda: calls.append("release")
    )

    def fail(*_: str) -> None:
        raise error

    copy = SimpleNamespace(client=client, conf=SimpleNamespace(set=fail))
    session = SimpleNamespace(cloneSession=lambda: copy)
    with pytest.raises(error), hand_over(session, {}):
        pass
    assert calls == ["release", "close"]
