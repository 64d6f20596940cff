"""Records of a detached job, in its folder and in its copy, and the signs of life of its driver.

A driver counts as lost if its beat does not change while this session watches, for as long as
`LOST_SECONDS`. The first look has nothing to compare with: it takes the beat's age from a clock,
which may differ between machines.
"""

from __future__ import annotations

import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal

from pybackend.core.errors import ClusterError, Failure, Moment, SerializationError, TfdistError
from pybackend.core.job.codec import decode
from pybackend.core.job.job import Job
from pybackend.core.job.messages import Event, Note, read_event
from pybackend.core.words import Language, call_of

End = Literal["finished", "failed", "cancelled"]
Status = Literal["running", "finished", "failed", "cancelled", "lost", "unreadable"]
JOB, SUBMITTED, ENDED = "job.json", "submitted.json", "ended.json"
EVENTS, RESULT = "events.jsonl", "result.json"
_GAP = Note("a part of the log is damaged, and left out")
BEAT_SECONDS = 10.0
"""Seconds between two signs of life of a driver."""
LOST_SECONDS = 120.0
"""On another machine, a driver counts as lost if its last beat is older."""


@dataclass(frozen=True)
class Submitted:
    """A job as it was submitted: ``time`` in seconds since 1970, ``where`` its workers run.

    ``copy`` is the URI to which its driver copies it for sessions on other machines.
    """

    time: float
    host: str
    where: str
    workers: int
    epochs: int
    language: Language
    copy: str | None = None


@dataclass(frozen=True)
class JobError:
    """An error as data: the name of its class, its text, and the arguments that create it."""

    kind: str
    message: str
    arguments: list[list[Failure] | list[Moment] | int | str]


@dataclass(frozen=True)
class Ended:
    status: End
    time: float
    error: JobError | None = None


def describe_error(error: TfdistError) -> JobError:
    return JobError(type(error).__name__, str(error), list(error.arguments))


def restore_error(error: JobError) -> TfdistError:
    """Return the error that `describe_error` described."""
    kinds = {kind.__name__: kind for kind in TfdistError.__subclasses__()}
    try:
        return kinds[error.kind](*error.arguments)
    except (KeyError, TypeError, ValueError, AttributeError):  # from another version
        return ClusterError(error.message)


@contextmanager
def naming_damage(name: str) -> Iterator[None]:
    """Raise `SerializationError` with the name of a file if it cannot be read or decoded."""
    try:
        yield
    except TfdistError:
        raise
    except FileNotFoundError as error:
        raise SerializationError(f"{name} is missing") from error
    except OSError as error:
        raise SerializationError(f"{name} cannot be read ({error.strerror})") from error
    except Exception as error:  # also what unpickling raises
        raise SerializationError(
            f"{name} is damaged, or another version of tfdist wrote it "
            f"({type(error).__name__}: {error})"
        ) from error


class JobFiles(ABC):
    """Files of a job, which a session reads in its folder or in a copy of that."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of a file; `FileNotFoundError`: it is missing."""

    @property
    def submitted(self) -> Submitted:
        with naming_damage(SUBMITTED):
            return decode(self.read(SUBMITTED), Submitted)

    @property
    def ended(self) -> Ended | None:
        """The end of the job; None before."""
        with naming_damage(ENDED), suppress(FileNotFoundError):
            return decode(self.read(ENDED), Ended)
        return None

    def read_job(self) -> Job:
        with naming_damage(JOB):
            return Job.from_json(self.read(JOB).decode())


def parse_events(content: bytes, start: int) -> tuple[list[Event], int]:
    """Return the complete events in a part of a log, and the position after them.

    A note replaces lines that cannot be read, such as half a line from when the disk was full.
    """
    complete, end, _ = content.rpartition(b"\n")
    events: list[Event] = []
    for line in complete.split(b"\n") if end else ():
        try:
            events.append(read_event(line))
        except ValueError:
            events.append(_GAP)
    shown = [one for event, same in groupby(events) for one in ([event] if event == _GAP else same)]
    return shown, start + len(complete) + len(end)


def next_step(record: Submitted) -> str:
    """Return what to do about a lost job."""
    return (
        f"its driver on {record.host} was killed, or the machine restarted, and its "
        "workers ended with it: make the same call again, with "
        f"`{call_of('Recovery', ..., resume=True)}` if it wrote checkpoints"
    )


@dataclass(frozen=True)
class _Seen:
    """A beat that this session saw: first and last time by `time.monotonic`, and its first age."""

    beat: Hashable
    first: float
    last: float
    age: float


_SEEN: dict[str, _Seen] = {}


def age_of_beat(where: str, beat: Hashable, find_age: Callable[[], float]) -> float:
    """Return the age in seconds of the last beat of the job at a path or URI.

    ``beat`` is a value that changes with each beat; ``find_age`` returns the age by clocks that may
    differ.
    """
    now, seen = time.monotonic(), _SEEN.get(where)
    if seen is None or seen.beat != beat:
        # A beat that changed is not older than the last look.
        age = min(max(0.0, find_age()), now - seen.last if seen else float("inf"))
        seen = _Seen(beat, now, now, age)
    _SEEN[where] = replace(seen, last=now)
    return seen.age + now - seen.first


def watched_seconds(where: str) -> float:
    """Return for how long this session has seen the same beat of a job."""
    seen = _SEEN.get(where)
    return seen.last - seen.first if seen else 0.0


def time_of_disk(folder: Path) -> float:
    """Return the time by the clock that dates the files in a folder, such as a file server's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # read-only
        return time.time()
