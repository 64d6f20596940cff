"""The process that drives a detached job, as a function: full disks."""

from __future__ import annotations

import errno
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import pybackend
from pybackend import ClusterError, TrainResult
from pybackend.api import detached_driver, result_file
from pybackend.api.job_folder import EventLog, JobFolder, new_folder
from pybackend.job.job import TrainingJob
from pybackend.job.messages import EpochEnded
from pybackend.job.report import WorkerReport

RESULT = TrainResult(
    content=b"model" * 1000,
    model_format="h5",
    model_sha256="ab" * 32,
    history={"loss": [0.5]},
    workers=[WorkerReport(0, "127.0.0.1", 100, rows=50, steps=4, seconds=1.25)],
    seconds=3.0,
    seed=7,
    epochs=1,
)
Train = Callable[[], TrainResult]


@dataclass(frozen=True)
class Request:
    job: TrainingJob
    observers: object = None


@dataclass(frozen=True)
class Prepared:
    request: Request


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobFolder]:
    """Return the folder of a job that runs, with a request."""
    monkeypatch.setenv("TFDIST_JOBS", str(tmp_path / "jobs"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with new_folder(tmp_path / "jobs") as (found, _):
        found.submit("here", 1, 1, f"file://{tmp_path}/copies")
        found.job.write_text(TrainingJob(1, epochs=1).to_json())
        found.request.mkdir()
        (found.request / "rows.pickle").write_bytes(bytes(1000))
        yield found.publish()


@pytest.fixture
def drive(folder: JobFolder, monkeypatch: pytest.MonkeyPatch) -> Callable[[Train], None]:
    """Return a function that drives the job, whose training is another function."""

    @contextmanager
    def opened(_: JobFolder) -> Iterator[tuple[Any, float]]:
        yield Prepared(Request(TrainingJob(1, epochs=1))), 0.0

    def drive(train: Train) -> None:
        monkeypatch.setattr(detached_driver, "opened_request", opened)
        monkeypatch.setattr(detached_driver, "run_prepared", lambda *_: train())
        detached_driver._drive(folder)

    return drive


def fill_disk(monkeypatch: pytest.MonkeyPatch, *full: Path) -> list[bool]:
    """Let writing a result to some folders fail; return whether there was a request each time."""
    write, requests = result_file.write_whole, []

    def fail(path: str, content: bytes) -> None:
        requests.append(Path(path).with_name("request").exists())
        if any(Path(path).is_relative_to(one) for one in full):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(result_file, "write_whole", fail)
    return requests


def test_a_result_that_does_not_fit_is_saved_elsewhere(
    folder: JobFolder,
    drive: Callable[[Train], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = fill_disk(monkeypatch, folder.path)
    drive(lambda: RESULT)
    assert requests == [False, False]  # its space was free before
    job = pybackend.attach_job(folder.id)
    (saved,) = (tmp_path / "temporary").glob(f"tfdist-{folder.id}-*/result.json")
    expected = (
        f"training has ended, but its result could not be written to {folder.path}: the disk that "
        f"contains {folder.path} is full: SPACE are free, and the files of the result need more. "
        "Free up space there, or set TFDIST_JOBS to a folder on a larger disk. The result is in "
        f"'{saved}' on {socket.gethostname()}: read it there with TrainResult.load('{saved}')"
    )
    with pytest.raises(ClusterError) as caught:
        job.result(verbose=0)
    assert re.sub("full: .* are free", "full: SPACE are free", str(caught.value)) == expected
    assert TrainResult.load(saved).content == RESULT.content
    assert saved.parent.stat().st_mode & 0o777 == 0o700
    assert not folder.decoder.exists()


def test_a_result_that_fits_nowhere_is_named(
    folder: JobFolder,
    drive: Callable[[Train], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill_disk(monkeypatch, tmp_path, Path("/dev/shm"))
    drive(lambda: RESULT)
    end = f"The result could not be written to {tmp_path}/temporary or /dev/shm, either"
    assert pybackend.attach_job(folder.id).describe().endswith(end)
    assert os.listdir(tmp_path / "temporary") == []


@pytest.mark.parametrize("fits", [0, 5])
def test_a_log_on_a_full_disk_has_whole_lines_and_names_the_gap(
    fits: int, folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, write = EventLog(folder), os.write
    events = [EpochEnded(number, 9, 1.0, {"loss": 0.5}) for number in range(4)]

    def fail(descriptor: int, content: bytes) -> int:
        if not fits:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content[:fits])

    log(events[0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        log(events[1])
        log(events[2])
    log(events[3])
    first, gap, last = folder.read_events(0)[0]
    assert (first, last) == (events[0], events[3])
    assert "lines are missing here" in str(gap)
