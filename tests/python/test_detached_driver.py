"""The process that drives a detached job, as a function: full disks, and a folder that vanishes."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_for

import pybackend
from pybackend import ClusterError
from pybackend.core.api import detached_driver, result_files
from pybackend.core.api.job_copy import copied, new_copy
from pybackend.core.api.job_folder import EventLog, JobFolder, new_folder
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import EpochEnded
from pybackend.core.job.report import WorkerReport
from pybackend.types import TrainResult

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
class Prepared:
    job: TrainingJob
    observers: object = None


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
    def opened(_: JobFolder) -> Iterator[Any]:
        yield Prepared(TrainingJob(1, epochs=1))

    def drive(train: Train) -> None:
        monkeypatch.setattr(detached_driver, "opened_request", opened)
        monkeypatch.setattr(detached_driver, "run_prepared", lambda *_: train())
        detached_driver._drive(folder)

    return drive


def fill_disk(monkeypatch: pytest.MonkeyPatch, *full: Path) -> list[bool]:
    """Let writing a result to some folders fail; return whether there was a request each time."""
    write, requests = result_files.write_whole, []

    def fail(path: str, content: bytes) -> None:
        requests.append(Path(path).with_name("request").exists())
        if any(Path(path).is_relative_to(one) for one in full):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(result_files, "write_whole", fail)
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


@pytest.mark.parametrize("what", ["folder", "content"])
def test_a_job_whose_folder_is_deleted_ends_and_does_not_create_it_again(
    what: str,
    folder: JobFolder,
    drive: Callable[[Train], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detached_driver, "_GONE_SECONDS", 0.5)

    def train() -> TrainResult:
        for path in [folder.path] if what == "folder" else folder.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        time.sleep(30)  # interrupted
        raise AssertionError("the driver went on")

    began = time.monotonic()
    with new_copy(folder), copied(folder):
        drive(train)
    assert time.monotonic() - began < 20
    assert list(folder.path.parent.rglob("*")) == ([] if what == "folder" else [folder.path])


def test_a_folder_that_is_moved_behind_a_link_does_not_end_its_job(
    folder: JobFolder,
    drive: Callable[[Train], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detached_driver, "_GONE_SECONDS", 20.0)

    def train() -> TrainResult:
        folder.path.rename(tmp_path / "moved")
        assert folder.is_gone
        time.sleep(0.5)
        folder.path.symlink_to(tmp_path / "moved")
        time.sleep(0.5)
        return RESULT

    drive(train)
    assert pybackend.attach_job(folder.id).status == "finished"
    folder.remove()
    assert not (tmp_path / "moved").exists()


def test_a_disk_that_does_not_answer_does_not_stop_the_watch(
    folder: JobFolder, drive: Callable[[Train], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    def train() -> TrainResult:
        with monkeypatch.context() as patch:
            patch.setattr(os, "utime", fail)
            patch.setattr(Path, "lstat", fail)
            wait_for(lambda: not folder.is_gone)
            time.sleep(0.5)
        folder.ask("cancel")
        time.sleep(30)  # interrupted
        raise AssertionError("the driver went on")

    monkeypatch.setattr(detached_driver, "_GONE_SECONDS", 0.1)
    monkeypatch.setattr(detached_driver, "BEAT_SECONDS", 0.0)
    drive(train)
    assert pybackend.attach_job(folder.id).status == "cancelled"
