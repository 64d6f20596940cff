"""Folders of detached jobs that are damaged, or that another user prepared; without a driver."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pybackend
from pybackend import InputError, SerializationError
from pybackend.cli import main
from pybackend.core.api.job_folder import EventLog, JobFolder, new_folder
from pybackend.core.job.codec import encode_line
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import EpochEnded, Note
from pybackend.core.job.report import WorkerReport
from pybackend.types import TrainResult

EPOCH = EpochEnded(1, 3, 1.0, {"loss": 0.5})


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TFDIST_JOBS", str(tmp_path / "jobs"))
    return tmp_path / "jobs"


def make(root: Path, is_ended: bool = True) -> JobFolder:
    """Return the folder of a job that has finished, or whose driver was killed."""
    with new_folder(root) as (found, _):
        found.submit("here", 2, 3, None)
        found.job.write_text(TrainingJob(2, epochs=3).to_json())
        EventLog(found)(EPOCH)
        if is_ended:
            found.end("finished")
        return found.publish()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


CODE = "is damaged, or another version of tfdist wrote it"
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (truncate, CODE),
    (lambda path: path.write_bytes(b""), CODE),
    (lambda path: path.write_bytes(bytes(range(256))), CODE),
    (lambda path: path.write_text("[1, 2]"), CODE),
    (lambda path: path.write_text(path.read_text().replace("}", ', "later": 1}')), CODE),
    (lambda path: path.write_text(re.sub(r"\d", "null", path.read_text())), CODE),
    (lambda path: path.write_text("[" * 100_000), CODE),
    (Path.unlink, "is missing"),
    (replace_by_folder, "is not a regular file"),
    (replace_by_pipe, "is not a regular file"),
    (replace_by_link, "cannot be read (Too many levels of symbolic links)"),
]


def list_damages() -> Iterator[tuple[str, Callable[[Path], object], str]]:
    for name in ("submitted.json", "job.json", "ended.json", "lock"):
        for damage, reason in DAMAGES:
            # The content of the lock has no meaning, and a job without an end has not ended.
            if (name, reason) != ("ended.json", "is missing") and (name, reason) != ("lock", CODE):
                yield name, damage, reason


@pytest.mark.parametrize(("name", "damage", "reason"), list_damages())
def test_a_damaged_job_is_named_beside_others_and_can_be_removed(
    name: str,
    damage: Callable[[Path], object],
    reason: str,
    root: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job, other = make(root, name != "lock"), make(root)
    damage(job.path / name)
    found = {one.id: one for one in pybackend.jobs()}
    statuses = {job.id: "unreadable", other.id: "finished"}
    assert {one.id: one.status for one in found.values()} == statuses
    damaged = found[job.id]
    assert damaged.describe().startswith(f"unreadable: {name} {reason}")
    assert damaged.to_dict() == {
        **dict.fromkeys(("submitted", "host", "where", "workers", "epochs")),
        "id": job.id,
        "status": "unreadable",
        "folder": str(job.path),
    }
    expected = re.escape(f"the job {job.id} cannot be read: {name} {reason}")
    with pytest.raises(SerializationError, match=f"^{expected}"):
        damaged.result(1)
    assert damaged.cancel() == "unreadable"
    assert main(["jobs", "list"]) == 0
    assert f"{job.id}  unreadable: {name} {reason}" in capsys.readouterr().out
    assert main(["jobs", "remove", job.id]) == 0
    assert [one.id for one in pybackend.jobs()] == [other.id]


def test_a_damaged_job_that_runs_is_cancelled_but_not_removed(root: Path) -> None:
    with new_folder(root) as (found, _):
        job = found.publish()
        (attached,) = pybackend.jobs()
        assert attached.describe() == "unreadable: job.json is missing"
        with pytest.raises(InputError, match="is running: cancel it first"):
            attached.remove()
        with pytest.raises(pybackend.ClusterError, match="ends when its driver notices"):
            attached.cancel(0)
        assert job.is_asked("cancel")
    # Its lock is free, but it may be another machine's.
    with pytest.raises(InputError, match="cannot be read, and may run on another machine: wait"):
        attached.remove()


@pytest.mark.parametrize("name", ["file", "link"])
def test_what_is_no_folder_is_listed_and_removed(name: str, root: Path) -> None:
    path = make(root).path
    path.rename(root / "kept")
    if name == "file":
        path.touch()
        reason = "cannot be read (Not a directory)"
    else:
        path.symlink_to("/nowhere")
        reason = "is missing"
    (job,) = (one for one in pybackend.jobs() if one.id == path.name)
    assert job.describe() == f"unreadable: {path} {reason}"
    job.remove()
    assert os.listdir(root) == ["kept"]


def test_a_file_without_permission_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, open_file = make(root), os.open

    def deny(path: Path, *rest: int) -> int:
        if path == job.job:
            raise PermissionError(13, "Permission denied")
        return open_file(path, *rest)

    monkeypatch.setattr(os, "open", deny)
    (found,) = pybackend.jobs()
    assert found.describe() == "unreadable: job.json cannot be read (Permission denied)"


def test_other_folders_are_not_jobs(root: Path) -> None:
    make(root)
    (root / "notes").mkdir()
    (root / ".hidden").mkdir()
    assert len(pybackend.jobs()) == 1


def test_a_folder_that_cannot_be_listed_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(root)

    def deny(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", deny)
    expected = f"{root}, the folder with all jobs, cannot be read (Permission denied)"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        pybackend.jobs()


@pytest.mark.parametrize(
    "junk", [encode_line(EPOCH)[:20] + b"\n", b"\x00\xff\n\n[]\n", b'{"__type__": "Later"}\n']
)
def test_damaged_lines_of_a_log_become_a_note(junk: bytes, root: Path) -> None:
    job = make(root)
    with job.events.open("ab") as file:
        file.write(junk + encode_line(EPOCH) + b'{"__ty')
    events, end = job.read_events(0)
    assert events == [EPOCH, Note("a part of the log is damaged, and left out"), EPOCH]
    assert end == job.events.stat().st_size - 6
    assert pybackend.attach_job(job.id).status == "finished"


@pytest.mark.parametrize("damage", [replace_by_folder, replace_by_pipe])
def test_a_log_that_is_not_a_file_becomes_a_note(
    damage: Callable[[Path], None], root: Path
) -> None:
    job = make(root)
    damage(job.events)
    attached = pybackend.attach_job(job.id)
    assert attached.logs() == ["note: events.jsonl is not a regular file"]
    assert attached.wait(verbose=0) == "finished"


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps(print)[:-4]])
def test_a_result_that_is_damaged_is_named(content: bytes, root: Path) -> None:
    job = make(root)
    job.decoder.write_bytes(content)
    job.result.write_text("{}")
    with pytest.raises(SerializationError, match=r"result\.json is not a result file"):
        pybackend.attach_job(job.id).result(verbose=0)
    job.result.unlink()
    worker = WorkerReport(0, "127.0.0.1", 100, rows=50, steps=4, seconds=1.25)
    made = TrainResult(b"model", "h5", "ab" * 32, {}, [worker], seconds=3.0, seed=7, epochs=1)
    made.save(job.result)
    result = pybackend.attach_job(job.id).result(verbose=0)
    assert result.content == b"model"
    with pytest.raises(SerializationError, match=r"^decoder\.pickle is damaged \("):
        _ = result.model
    job.decoder.unlink()
    with pytest.raises(SerializationError, match=r"^decoder\.pickle is missing$"):
        pybackend.attach_job(job.id).result(verbose=0)


def test_the_rows_of_a_killed_driver_are_removed_at_the_next_look(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_folder(root) as (found, _):
        found.submit("here", 2, 3, None)
        found.job.write_text(TrainingJob(2, epochs=3).to_json())
        found.request.mkdir()
        (found.request / "rows.pickle").touch()
        job = found.publish()
        attached = pybackend.attach_job(job.id)
        assert attached.status == "running"
        assert job.request.exists()
    with monkeypatch.context() as patch:  # elsewhere, only the age of the beat is known
        patch.setattr(socket, "gethostname", lambda: "elsewhere")
        os.utime(job.lock, (0, 0))
        assert attached.status == "lost"
        assert job.request.exists()
    assert attached.status == "lost"
    assert not job.request.exists()


def test_a_lost_job_on_a_disk_that_is_read_only(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, open_file = make(root, is_ended=False), os.open

    def deny(path: Path, flags: int, *rest: Any, **settings: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system")
        return open_file(path, flags, *rest, **settings)

    def fail(_: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", deny)
    monkeypatch.setattr(shutil, "rmtree", fail)
    (found,) = pybackend.jobs()
    assert found.describe().startswith("lost: its driver on ")
    expected = f"{job.path} cannot be removed (Read-only file system)"
    with pytest.raises(pybackend.ClusterError, match=f"^{re.escape(expected)}$"):
        found.remove()


def test_a_folder_of_another_user_is_listed_but_not_touched(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, user = make(root, is_ended=False), os.getuid()
    before = sorted(os.listdir(job.path))
    monkeypatch.setattr(os, "getuid", lambda: 1_234_567)
    (found,) = pybackend.jobs()
    name = "root" if user == 0 else ".+"
    reason = f"{job.path} belongs to {name}, not to you"
    assert re.fullmatch(f"unreadable: {reason}", found.describe())
    for act in (found.cancel, found.remove, found.logs, lambda: job.ask("stop")):
        with pytest.raises(InputError, match=reason):
            act()
    with pytest.raises(SerializationError, match=reason):
        found.result()
    assert sorted(os.listdir(job.path)) == before


def test_a_request_does_not_follow_a_link(root: Path, tmp_path: Path) -> None:
    job = make(root)
    (job.path / "cancel").symlink_to(tmp_path / "victim")
    with pytest.raises(pybackend.ClusterError, match="cannot be reached"):
        job.ask("cancel")
    assert not (tmp_path / "victim").exists()


def test_half_a_submission_with_a_pipe_is_not_opened(root: Path) -> None:
    job = make(root)
    half = job.path.rename(root / f".new-{job.id}")
    replace_by_pipe(half / "submitted.json")
    assert pybackend.jobs() == []


def test_a_folder_that_was_moved_behind_a_link_is_removed(root: Path, tmp_path: Path) -> None:
    job = make(root)
    (tmp_path / "disk").mkdir()
    job.path.rename(tmp_path / "disk" / "moved")
    job.path.symlink_to(tmp_path / "disk" / "moved")
    (found,) = pybackend.jobs()
    assert found.status == "finished"
    found.remove()
    assert os.listdir(root) == os.listdir(tmp_path / "disk") == []
