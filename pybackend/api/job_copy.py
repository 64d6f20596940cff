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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from pybackend.api.job_folder import (
    BEAT_SECONDS,
    EVENTS,
    LOST_SECONDS,
    Ended,
    JobFolder,
    Root,
    Status,
    Submitted,
    list_folders,
    parse_events,
)
from pybackend.api.result import TrainResult
from pybackend.data.files import open_folder
from pybackend.errors import ClusterError, InputError
from pybackend.job.codec import decode, encode
from pybackend.job.job import Job
from pybackend.job.messages import Event
from pybackend.words import show

_BEAT = "beat"
_RESULT = "result.json"
_ENDED = "ended.json"
_SUBMITTED = "submitted.json"
_JOB = "job.json"
_UPDATE_SECONDS = 3.0
# A store that is overloaded for a moment must not lose a result.
_ATTEMPTS = 5


@dataclass(frozen=True)
class JobCopy:
    """The copy of a job, as a session on another machine reads it; see `JobFolder`."""

    uri: str

    look_seconds: ClassVar[float] = 2.0

    @property
    def id(self) -> str:
        return posixpath.basename(self.uri)

    @property
    def place(self) -> str:
        return self.uri

    @property
    def exists(self) -> bool:
        return self._read(_JOB) is not None

    @property
    def submitted(self) -> Submitted:
        return decode(self._read(_SUBMITTED) or b"", Submitted)

    @property
    def ended(self) -> Ended | None:
        content = self._read(_ENDED)
        return None if content is None else decode(content, Ended)

    @property
    def status(self) -> Status:
        if (ended := self.ended) is not None:
            return ended.status
        beat = float(self._read(_BEAT) or 0)
        return "running" if time.time() - beat < LOST_SECONDS else "lost"

    def read_job(self) -> Job:
        return Job.from_json((self._read(_JOB) or b"").decode())

    def read_events(self, start: int) -> tuple[list[Event], int]:
        return parse_events((self._read(EVENTS) or b"")[start:], start)

    def load_result(self) -> TrainResult:
        with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
            path = Path(folder, _RESULT)
            path.write_bytes(self._read(_RESULT) or b"")
            return TrainResult.load(path)

    def ask(self, what: Literal["cancel", "stop"]) -> None:
        with _reaching(self.uri):
            open_folder(self.uri).write(what, b"1")

    def remove(self) -> None:
        root, _, name = self.uri.rpartition("/")
        with _reaching(self.uri):
            open_folder(root).remove(name)

    def _read(self, name: str) -> bytes | None:
        with _reaching(self.uri):
            return open_folder(self.uri).read(name)


def list_jobs(root: Root) -> list[JobFolder | JobCopy]:
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

    Raises
    ------
    InputError
        The URI cannot be written to.
    """
    uri = folder.submitted.copy
    if uri is None:
        yield
        return
    try:
        files = open_folder(uri)
        files.make()
        # The URI itself may have a password.
        files.write(_SUBMITTED, encode(replace(folder.submitted, copy=None)).encode())
        files.write(_BEAT, str(time.time()).encode())
        files.write(_JOB, folder.job.read_bytes())  # last: now it exists
    except InputError:
        raise
    except Exception as error:  # each file system has its own errors
        raise InputError(f"jobs cannot be written to {show(uri)}: {error}") from error
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
    has_ended = threading.Event()
    writer = _Writer(folder, uri)
    thread = threading.Thread(target=writer.run, args=(has_ended,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        writer.finish()


class _Writer:
    """Writes what is new in a job's folder to its copy, and reads requests from there."""

    def __init__(self, folder: JobFolder, uri: str) -> None:
        self._folder = folder
        self._files = open_folder(uri)
        self._sent = 0
        self._beat = 0.0

    def run(self, has_ended: threading.Event) -> None:
        while not has_ended.wait(_UPDATE_SECONDS):
            try:
                self._update()
            except Exception as error:  # tried again
                print(f"the copy of the job was not updated: {error}", flush=True)

    def finish(self) -> None:
        for attempt in range(_ATTEMPTS):
            time.sleep(attempt * _UPDATE_SECONDS)
            try:
                self._update()
                if self._folder.result.exists():
                    self._files.write(_RESULT, self._folder.result.read_bytes())
                if (ended := self._folder.ended) is not None:
                    self._files.write(_ENDED, encode(ended).encode())
                return
            except Exception as error:
                print(f"the copy of the job was not completed: {error}", flush=True)

    def _update(self) -> None:
        if time.monotonic() - self._beat > BEAT_SECONDS:
            self._files.write(_BEAT, str(time.time()).encode())
            self._beat = time.monotonic()
        with suppress(FileNotFoundError):
            # Stores cannot append to a file.
            if os.path.getsize(self._folder.events) > self._sent:
                content = self._folder.events.read_bytes()
                self._files.write(EVENTS, content)
                self._sent = len(content)
        for what in ("cancel", "stop"):
            if self._files.read(what) is not None:
                self._folder.ask(what)


@contextmanager
def _reaching(uri: str) -> Iterator[None]:
    """Turn errors of a store into `ClusterError`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # each file system has its own errors
        raise ClusterError(f"jobs at {show(uri)} cannot be read or written: {error}") from error
