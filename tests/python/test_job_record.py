"""Files of a job in its folder and its copy, and the signs of life of its driver."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import pybackend
from pybackend.core.api import job_record
from pybackend.core.api.job_copy import JobCopy, new_copy
from pybackend.core.api.job_folder import JobFolder, new_folder
from pybackend.core.api.job_record import (
    Ended,
    JobError,
    describe_error,
    restore_error,
    time_of_disk,
)
from pybackend.core.errors import (
    ClusterError,
    DatabaseError,
    Failure,
    InputError,
    PeerLostError,
    RError,
    SerializationError,
    TfdistError,
    WorkerFailedError,
)
from pybackend.core.job.codec import decode, encode
from pybackend.core.job.job import TrainingJob

ERRORS = [
    ClusterError("no slots"),
    DatabaseError("other numbers"),
    InputError("`x` is empty"),
    PeerLostError(2, "n3", "closed the connection"),
    RError("object 'x' not found", "1. f()"),
    SerializationError("a lambda"),
    WorkerFailedError(
        [Failure(1, "n2", "ValueError", "no", log=("a", "b")), Failure(0, "", "", "")]
    ),
]


def test_all_kinds_of_errors_are_here() -> None:
    # Others are raised in workers only.
    kinds = {
        kind for kind in TfdistError.__subclasses__() if kind.__module__ == "pybackend.core.errors"
    }
    assert {type(error) for error in ERRORS} == kinds


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_as_data(error: TfdistError) -> None:
    read = decode(encode(Ended("failed", 0.0, describe_error(error))), Ended)
    assert read.error is not None
    found = restore_error(read.error)
    assert type(found) is type(error)
    assert (str(found), vars(found)) == (str(error), vars(error))


@pytest.mark.parametrize(
    "error",
    [
        JobError("NewError", "new", ["new"]),
        JobError("PeerLostError", "new", []),
        JobError("WorkerFailedError", "new", [[]]),
        JobError("WorkerFailedError", "new", ["text"]),
    ],
)
def test_an_error_of_another_version_has_its_message(error: JobError) -> None:
    found = restore_error(error)
    assert (type(found), str(found)) == (ClusterError, "new")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    """Return a job that another machine drives, whose locks this one does not see."""
    monkeypatch.setenv("TFDIST_JOBS", str(tmp_path / "jobs"))
    with new_folder(tmp_path / "jobs") as (found, _):
        found.submit("here", 2, 3, f"file://{tmp_path}/copies")
        found.job.write_text(TrainingJob(2, epochs=3).to_json())
        published = found.publish()
    here = socket.gethostname()
    monkeypatch.setattr(socket, "gethostname", lambda: f"other-than-{here}")
    return published


class Clock:
    """The monotonic clock of the session: a driver beats while it sleeps."""

    def __init__(self, lock: Path, beats: bool) -> None:
        self.now, self.lock, self.beats = time.monotonic(), lock, beats

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1.0)
        if self.beats:
            found = self.lock.stat()
            os.utime(self.lock, (found.st_atime, found.st_mtime + seconds))


@pytest.fixture
def clock(folder: JobFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock(folder.lock, beats=True)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    yield clock
    monkeypatch.undo()  # pytest measures, too


def age(folder: JobFolder, seconds: float) -> None:
    """Date the last beat, as a driver does whose clock is that late."""
    os.utime(folder.lock, (0, time.time() - seconds))


def test_the_age_of_a_beat_is_that_of_the_file_server(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 130)
    assert pybackend.attach_job(folder.id).status == "running"
    age(folder, 10_000)
    job_record._SEEN.clear()
    assert pybackend.attach_job(folder.id).status == "lost"


def test_a_job_that_looks_lost_but_beats_is_not_removed(folder: JobFolder, clock: Clock) -> None:
    age(folder, 130)
    job = pybackend.attach_job(folder.id)
    assert job.status == "lost"
    with pytest.raises(InputError, match="cancel it first"):
        job.remove()
    assert job.status == "running"
    with pytest.raises(TimeoutError):
        job.result(10, verbose=0)
    with pytest.raises(pybackend.ClusterError, match="has not ended after 5 seconds"):
        job.cancel(5)
    assert folder.is_asked("cancel")


def test_a_beat_that_does_not_move_is_lost(folder: JobFolder, clock: Clock) -> None:
    clock.beats = False
    age(folder, -3600)  # a clock that is ahead by an hour
    job = pybackend.attach_job(folder.id)
    assert job.status == "running"
    clock.now += 119
    assert job.status == "running"
    clock.now += 2
    assert job.status == "lost"
    began = clock.now
    job.remove()
    assert clock.now == began  # it was watched before
    assert pybackend.jobs() == []


def test_a_lost_job_is_removed_after_a_while(folder: JobFolder, clock: Clock) -> None:
    clock.beats = False
    age(folder, 130)
    began = clock.now
    pybackend.attach_job(folder.id).remove()
    assert 30 <= clock.now - began <= 32
    assert not folder.path.exists()


def test_a_session_that_looks_rarely_sees_the_age_by_the_clock(
    folder: JobFolder, clock: Clock
) -> None:
    job = pybackend.attach_job(folder.id)
    assert job.status == "running"
    clock.now += 3600
    age(folder, 3000)
    assert job.status == "lost"


def test_a_copy_that_looks_lost_but_beats_is_not_removed(
    folder: JobFolder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_copy(folder):
        pass
    assert folder.submitted.copy is not None
    beat = Path(folder.submitted.copy.removeprefix("file://"), "beat")
    beat.write_text(str(time.time() - 130))
    job = pybackend.types.DetachedJob(JobCopy(folder.submitted.copy))
    assert job.status == "lost"

    def sleep(seconds: float) -> None:
        clock.now += seconds
        beat.write_text(str(float(beat.read_text()) + seconds))

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(InputError, match="cancel it first"):
        job.remove()


def test_a_disk_that_cannot_be_written_to_has_the_clock_of_this_machine(tmp_path: Path) -> None:
    assert abs(time_of_disk(tmp_path / "absent") - time.time()) < 5
    assert abs(time_of_disk(tmp_path) - time.time()) < 5
    assert os.listdir(tmp_path) == []
