"""The folder of a training run whose driver does not belong to a session.

A submission writes it under a temporary name, and the driver renames it: so a job exists as a whole
or not at all. Both hold a lock on a file in it, which the system releases when a process ends for
any reason.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import pickle
import pwd
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, TypeVar

from pybackend.core.api import job_record
from pybackend.core.api.job_record import ENDED, EVENTS, JOB, RESULT, SUBMITTED, JobFiles
from pybackend.core.data.files import hide_password, is_remote, local_path, write_whole
from pybackend.core.errors import ClusterError, InputError, SerializationError, TfdistError
from pybackend.core.job.codec import encode, encode_line
from pybackend.core.job.messages import Announced, Event, EventBytes, Note, StepEnded
from pybackend.core.words import show, spoken

VARIABLE = "TFDIST_JOBS"
Result = TypeVar("Result")

_UNFINISHED = ".new-"
_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_STEP_SECONDS = 1.0
_GAP = Note("lines are missing here: the log could not be written, perhaps because a disk was full")


@dataclass(frozen=True)
class JobStore:
    """The folder of all jobs on this machine, and the URI of their copies, if there is one."""

    path: Path
    copies: str | None = None

    def __str__(self) -> str:
        return hide_password(self.copies or str(self.path))


def find_store(place: Any = None) -> JobStore:
    """Return where all jobs are: ``place``, ``TFDIST_JOBS``, or a folder in the home folder."""
    if place is not None and (not isinstance(place, (str, os.PathLike)) or not os.fspath(place)):
        raise InputError(f"`folder` must be a path or a URI, not {show(place)}")
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    usual = os.environ.get(VARIABLE) or ""
    chosen = os.fspath(place or usual or Path(state, "tfdist", "jobs"))
    copies = chosen.rstrip("/") if is_remote(chosen) else None
    if chosen.startswith("memory:"):
        raise InputError(f"jobs cannot be in {show(chosen)}: other processes cannot read it")
    if copies:
        chosen = usual if usual and not is_remote(usual) else str(Path(state, "tfdist", "jobs"))
    return JobStore(Path(local_path(os.path.expanduser(chosen))), copies)


@dataclass(frozen=True)
class _File:
    """Attribute of a `JobFolder`: the path of a file in it."""

    name: str

    def __get__(self, folder: JobFolder, kind: object = None) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class JobFolder(JobFiles):
    """All files of a job."""

    path: Path

    look_seconds: ClassVar[float] = 0.2
    """Seconds between two looks at a job that is running."""

    @property
    def id(self) -> str:
        return self.path.name

    job = _File(JOB)  # the `Job`
    request = _File("request")  # a folder with the model, rows and launcher, for the driver
    result = _File(RESULT)  # as `TrainResult.save` writes it
    decoder = _File("decoder.pickle")  # builds the model from the file in the result
    output = _File("driver.log")  # of the driver; empty if all goes well
    events = _File(EVENTS)
    lock = _File("lock")
    record = _File(SUBMITTED)

    def submit(self, where: str, workers: int, epochs: int, copies: str | None) -> None:
        """Write the description of the job, whose copy is in a folder at the URI ``copies``."""
        copy = None if copies is None else f"{copies}/{self.published.id}"
        host = socket.gethostname()
        record = job_record.Submitted(time.time(), host, where, workers, epochs, spoken(), copy)
        self.record.write_text(encode(record))

    @property
    def place(self) -> str:
        return str(self.path)

    @property
    def is_gone(self) -> bool:
        """True if the folder, or its content, was deleted; False while its disk is away."""
        try:
            self.lock.lstat()
        except OSError as error:
            return isinstance(error, FileNotFoundError | NotADirectoryError)
        return False

    @property
    def is_job(self) -> bool:
        """True for the folder of a job, even if it is damaged."""
        return _ID.fullmatch(self.id) is not None or (
            not self.id.startswith(".") and os.path.lexists(self.job)
        )

    @property
    def exists(self) -> bool:
        return os.path.lexists(self.path)

    def read_events(self, start: int) -> tuple[list[Event], int]:
        """Return the complete events in the log from a position on, and the position after them."""
        try:
            with job_record.naming_damage(EVENTS), self._open(self.events) as file:
                file.seek(start)
                return job_record.parse_events(file.read(), start)
        except SerializationError as error:
            if not os.path.lexists(self.events):
                return [], start
            # The result may still be there.
            return ([] if start else [Note(str(error))]), max(start, 1)

    def load_result(self, load: Callable[[Path], Result]) -> Result:
        """Return the result that ``load`` reads, with the parts of the model that no file holds."""
        self.check_private()
        with job_record.naming_damage(self.decoder.name):
            decode = partial(_decode, self.read(self.decoder.name))
        return replace(load(self.result), decode=decode)  # type: ignore[type-var]

    def end(self, status: job_record.End, error: job_record.JobError | None = None) -> None:
        """Remove what only the driver needed, and write the end of the job."""
        self.free()
        if not self.is_gone:  # writing would create the folder again
            ended = job_record.Ended(status, time.time(), error)
            write_whole(str(self.path / ENDED), encode(ended).encode())

    def free(self) -> None:
        shutil.rmtree(self.request, ignore_errors=True)

    @property
    def status(self) -> job_record.Status:
        """The status, of which the caller knows ``"unreadable"`` by an error."""
        self.read_job()
        host = self.submitted.host
        # The end is looked up again, since a driver may end in between.
        ended = self.ended or (None if self._has_driver(host) else self.ended)
        if ended is not None:
            return ended.status
        if self._has_driver(host):
            return "running"
        if host == socket.gethostname():  # where the lock is certain
            self.free()
        return "lost"

    def may_run(self) -> bool:
        """Return whether an unreadable job may be running, as far as its files show it."""
        host = None
        with suppress(SerializationError):
            if self.ended is not None:
                return False
        with suppress(SerializationError):
            host = self.submitted.host
        with suppress(SerializationError):
            return self._has_driver(host)
        return False

    def _has_driver(self, host: str | None) -> bool:
        """Return whether a driver is alive; ``host`` is its machine, if it is known."""
        if self.is_locked():
            return True
        if host == socket.gethostname():
            return False
        with job_record.naming_damage(self.lock.name):
            beat = self.lock.stat().st_mtime_ns
        age = job_record.age_of_beat(
            self.place, beat, lambda: job_record.time_of_disk(self.path) - beat / 1e9
        )
        return age < job_record.LOST_SECONDS

    @property
    def watched_seconds(self) -> float:
        """For how long this session has seen the same beat; the lock is certain at once."""
        is_here = self.submitted.host == socket.gethostname()
        return math.inf if is_here else job_record.watched_seconds(self.place)

    def is_locked(self) -> bool:
        """Return whether a submission or a driver on this machine holds the lock."""
        with job_record.naming_damage(self.lock.name), self._open(self.lock) as file:
            try:
                # A shared lock, so that two sessions that look do not see each other.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    def _open(self, path: Path) -> BinaryIO:
        """Open one of the files, not what else another user may have put in its place."""
        self.check_own()
        # Opening a named pipe would wait for its writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise SerializationError(f"{path.name} is not a regular file")
        return os.fdopen(descriptor, "rb")

    def read(self, name: str) -> bytes:
        with self._open(self.path / name) as file:
            return file.read()

    def beat(self) -> None:
        with suppress(OSError):  # tried again
            os.utime(self.lock)

    def ask(self, what: Literal["cancel", "stop"]) -> None:
        """Ask the driver to end the job, or to stop the training and return its result."""
        self.check_own()
        # A link here would create a file elsewhere.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        reason = f"the job {self.id} cannot be reached: {self.path} cannot be written to"
        with _naming(reason, kind=ClusterError):
            os.close(os.open(self.path / what, flags, 0o600))

    def is_asked(self, what: Literal["cancel", "stop"]) -> bool:
        return os.path.exists(self.path / what)

    def check_own(self) -> None:
        """Check that the folder, and a link to it, belong to this user.

        Another user's raises an `InputError`, and what is not a folder a `SerializationError`.
        """
        with job_record.naming_damage(str(self.path)):
            _check_owner(self.path)
            if not stat.S_ISDIR(self.path.stat().st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    def check_private(self) -> None:
        """Check that only this user can have written the folder, before code in it is run."""
        for path in (self.path.parent, self.path):
            found = path.stat()
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
                raise InputError(
                    f"{path} must belong to you, and only you may write to it: "
                    f"chmod 700 {path}, or choose another folder with {VARIABLE}"
                )

    def remove(self) -> None:
        """Remove the folder, also behind a link, or the file in its place."""
        _check_owner(self.path)
        with _naming(f"{self.path} cannot be removed", kind=ClusterError):
            if self.path.is_dir():
                # A folder may have been moved to another disk, behind a link, which rmtree rejects.
                shutil.rmtree(os.path.realpath(self.path))
            if os.path.lexists(self.path):
                self.path.unlink()

    @property
    def published(self) -> JobFolder:
        return JobFolder(self.path.with_name(self.id.removeprefix(_UNFINISHED)))

    def publish(self) -> JobFolder:
        """Give the folder its final name: from now on, the job exists."""
        self.path.rename(self.published.path)
        return self.published


@contextmanager
def new_folder(root: Path) -> Iterator[tuple[JobFolder, int]]:
    """Create a folder for a job, and lock it; it is removed if the block raises an error.

    Yields the folder, and the descriptor of the lock, which is closed after the block.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    folder = JobFolder(root / f"{_UNFINISHED}{name}")
    with _naming(
        f"the files of a job cannot be written to {show(str(root))}",
        f": pass another `folder`, or set {VARIABLE} to it",
    ):
        root.mkdir(0o700, parents=True, exist_ok=True)
        remove_unfinished(root)
        folder.path.mkdir(0o700)
    try:
        # Who can write to the folder of all jobs could replace this one.
        folder.check_private()
        descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Some network file systems have no locks.
            advice = f": set {VARIABLE} to a folder on another disk"
            with _naming(f"files in {root} cannot be locked", advice):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield folder, descriptor
        finally:
            os.close(descriptor)
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise


@contextmanager
def _naming(reason: str, advice: str = "", kind: type[TfdistError] = InputError) -> Iterator[None]:
    """Raise another error in place of one of the file system."""
    try:
        yield
    except OSError as error:
        raise kind(f"{reason} ({error.strerror}){advice}") from error


def remove_unfinished(root: Path) -> None:
    """Remove folders of submissions on this machine that were killed."""
    for path in root.glob(f"{_UNFINISHED}*"):
        folder = JobFolder(path)
        with suppress(OSError, TfdistError):
            if folder.record.exists():
                is_left = folder.submitted.host == socket.gethostname()
            else:  # perhaps just created, and not yet locked
                age = job_record.time_of_disk(root) - path.stat().st_mtime
                is_left = age > job_record.LOST_SECONDS
            if is_left and not (folder.lock.exists() and folder.is_locked()):
                folder.remove()


def list_folders(root: Path) -> list[JobFolder]:
    with _naming(f"{root}, the folder with all jobs, cannot be read"):
        if not root.is_dir():
            return []
        remove_unfinished(root)
        return [found for found in map(JobFolder, sorted(root.iterdir())) if found.is_job]


class EventLog:
    """Append events to the log of a job, each with one write."""

    def __init__(self, folder: JobFolder) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(folder.events, flags, 0o600)
        self._last_step = 0.0
        self._has_gap = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, EventBytes | Announced):  # not for display, and long
            return
        if isinstance(event, StepEnded):
            if time.monotonic() - self._last_step < _STEP_SECONDS:
                return
            self._last_step = time.monotonic()
        content = (encode_line(_GAP) if self._has_gap else b"") + encode_line(event)
        size = os.fstat(self._descriptor).st_size
        self._has_gap = True
        with suppress(OSError):  # a full disk must not end a training
            self._has_gap = os.write(self._descriptor, content) < len(content)
        if self._has_gap:
            with suppress(OSError):
                # Half a line would damage the next one, too.
                os.ftruncate(self._descriptor, size)


def _check_owner(path: Path) -> None:
    """Raise `InputError` if a path, or what it links to, belongs to another user."""
    owners = {path.lstat().st_uid}
    with suppress(FileNotFoundError):
        owners.add(path.stat().st_uid)
    for owner in owners - {os.getuid()}:
        name = f"the user {owner}"
        with suppress(KeyError):
            name = pwd.getpwuid(owner).pw_name
        raise InputError(f"{path} belongs to {name}, not to you")


def _decode(decoder: bytes, content: bytes) -> Any:
    try:
        rebuild = pickle.loads(decoder)  # noqa: S301
    except (pickle.UnpicklingError, EOFError) as error:
        raise SerializationError(f"decoder.pickle is damaged ({error})") from error
    except (ImportError, AttributeError) as error:
        raise SerializationError(
            f"the job was made by another version of tfdist ({error}): get its result with that one"
        ) from error
    return rebuild(content)
