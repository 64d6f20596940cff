"""Copies of jobs at a URI, for sessions on other machines.

The driver of a job updates its copy every few seconds. Others may be able to write to the store, so
nothing in a copy is unpickled.
"""

from __future__ import annotations

import os
import posixpath
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from pybackend.core.api import job_record
from pybackend.core.api.job_folder import JobFolder, JobStore, Result, list_folders
from pybackend.core.api.job_record import ENDED, EVENTS, JOB, RESULT, SUBMITTED, JobFiles
from pybackend.core.data.files import hide_password, open_folder
from pybackend.core.errors import ClusterError, InputError, TfdistError
from pybackend.core.job.codec import encode
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import Event
from pybackend.core.words import show

_BEAT = "beat"
_UPDATE_SECONDS = 3.0
# A store that is overloaded for a moment must not lose a result.
_ATTEMPTS = 5


@dataclass(frozen=True)
class JobCopy(JobFiles):
    """The copy of a job, as a session on another machine reads it; see `JobFolder`."""

    uri: str

    look_seconds: ClassVar[float] = 2.0

    @property
    def id(self) -> str:
        return posixpath.basename(self.uri)

    @property
    def place(self) -> str:
        """The URI, which may be shown."""
        return hide_password(self.uri)

    @property
    def exists(self) -> bool:
        return self._find(JOB) is not None

    @property
    def status(self) -> job_record.Status:
        """The status, of which the caller knows ``"unreadable"`` by an error."""
        self.read_job()
        self.submitted  # noqa: B018
        if (ended := self.ended) is not None:
            return ended.status
        if (beat := self._find(_BEAT)) is None:
            return "lost"
        try:
            age = job_record.age_of_beat(self.uri, beat, lambda: time.time() - float(beat))
            return "running" if age < job_record.LOST_SECONDS else "lost"
        except ValueError:  # it is just being written
            return "running"

    @property
    def watched_seconds(self) -> float:
        return job_record.watched_seconds(self.uri)

    def read_events(self, start: int) -> tuple[list[Event], int]:
        return job_record.parse_events((self._find(EVENTS) or b"")[start:], start)

    def load_result(self, load: Callable[[Path], Result]) -> Result:
        with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
            path = Path(folder, RESULT)
            path.write_bytes(self._find(RESULT) or b"")
            return load(path)

    def may_run(self) -> bool:
        """Return False: an unreadable copy may be removed, since its job is elsewhere."""
        return False

    def ask(self, what: Literal["cancel", "stop"]) -> None:
        with _reaching(self.uri):
            open_folder(self.uri).write(what, b"1")

    def remove(self) -> None:
        root, _, name = self.uri.rpartition("/")
        with _reaching(self.uri):
            open_folder(root).remove(name)

    def read(self, name: str) -> bytes:
        # Some stores show a file before its content.
        if content := self._find(name):
            return content
        raise FileNotFoundError(name)

    def _find(self, name: str) -> bytes | None:
        with _reaching(self.uri):
            return open_folder(self.uri).read(name)


def list_jobs(root: JobStore) -> list[JobFolder | JobCopy]:
    """Return all jobs in a folder or at a URI, oldest first."""
    if root.copies is None:
        return [*list_folders(root.path)]
    with _reaching(root.copies):
        names = open_folder(root.copies).names() or []
    found = [JobCopy(posixpath.join(root.copies, name)) for name in names]
    return [copy for copy in found if copy.exists]


@contextmanager
def new_copy(folder: JobFolder) -> Iterator[None]:
    """Write what is known of a new job to its URI, if it has one; remove it if the block fails.

    A URI that cannot be written to raises an `InputError`.
    """
    uri = folder.submitted.copy
    if uri is None:
        yield
        return
    with _reaching(uri, "jobs cannot be written to {}", InputError):
        files = open_folder(uri)
        files.make()
        # The URI itself may have a password.
        files.write(SUBMITTED, encode(replace(folder.submitted, copy=None)).encode())
        files.write(_BEAT, str(time.time()).encode())
        # Last: now it exists. Only what `DetachedJob` shows; the rest may have passwords, too.
        job = folder.read_job()
        assert isinstance(job, TrainingJob)
        shown = TrainingJob(workers=job.workers, epochs=job.epochs, verbose=job.verbose)
        files.write(JOB, shown.to_json().encode())
    try:
        yield
    except BaseException:
        with suppress(Exception):
            JobCopy(uri).remove()
        raise


@contextmanager
def copied(folder: JobFolder) -> Iterator[None]:
    """Update the copy of a job during the block, and complete it after the block."""
    uri = folder.submitted.copy
    if uri is None:
        yield
        return
    has_ended, is_complete = threading.Event(), threading.Event()
    writer = _CopyWriter(folder, uri)
    # Daemons: a store that hangs must not keep the driver from ending.
    thread = threading.Thread(target=writer.run, args=(has_ended,), daemon=True)
    # On a thread of its own, since a large log or result takes long.
    beat = threading.Thread(target=_beat, args=(uri, is_complete), daemon=True)
    thread.start()
    beat.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        writer.finish()
        is_complete.set()
        beat.join(job_record.BEAT_SECONDS)  # the store may have stopped responding


def _beat(uri: str, is_complete: threading.Event) -> None:
    files = open_folder(uri)
    while not is_complete.wait(job_record.BEAT_SECONDS):
        with suppress(Exception):  # tried again
            if files.read(JOB) is not None:  # else it was removed
                files.write(_BEAT, str(time.time()).encode())


class _CopyWriter:
    """Writes what is new in a job's folder to its copy, and reads requests from there."""

    def __init__(self, folder: JobFolder, uri: str) -> None:
        self._folder = folder
        self._files = open_folder(uri)
        self._sent = 0

    def run(self, has_ended: threading.Event) -> None:
        while not has_ended.wait(_UPDATE_SECONDS):
            try:
                self._update()
            except Exception as error:  # tried again
                _complain("updated", error)

    def finish(self) -> None:
        # First: the job may be removed in the meantime.
        ended = None if self._folder.is_gone else self._folder.ended
        for attempt in range(_ATTEMPTS):
            time.sleep(attempt * _UPDATE_SECONDS)
            try:
                if self._files.read(JOB) is None:  # the copy was removed
                    return
                self._update()
                if self._folder.result.exists():
                    self._files.write(RESULT, self._folder.result.read_bytes())
                if ended is not None:
                    self._files.write(ENDED, encode(ended).encode())
                return
            except Exception as error:
                _complain("completed", error)

    def _update(self) -> None:
        with suppress(FileNotFoundError):
            # Stores cannot append to a file.
            if os.path.getsize(self._folder.events) > self._sent:
                content = self._folder.events.read_bytes()
                self._files.write(EVENTS, content)
                self._sent = len(content)
        for what in ("cancel", "stop"):
            if self._files.read(what) is not None:
                self._folder.ask(what)


def _complain(what: str, error: Exception) -> None:
    print(hide_password(f"the copy of the job was not {what}: {error}"), flush=True)


@contextmanager
def _reaching(
    uri: str,
    reason: str = "jobs at {} cannot be read or written",
    kind: type[TfdistError] = ClusterError,
) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # each file system has its own errors
        raise kind(hide_password(f"{reason.format(show(uri))}: {error}")) from error
