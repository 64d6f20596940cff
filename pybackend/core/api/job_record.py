"""Contents of the files of a detached job, in its folder and in a copy of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from pybackend.core.errors import ClusterError, Failure, Moment, SerializationError, TfdistError
from pybackend.core.job.messages import Event, Note, read_event
from pybackend.core.words import Language, call_of

End = Literal["finished", "failed", "cancelled"]
Status = Literal["running", "finished", "failed", "cancelled", "lost", "unreadable"]


_GAP = Note("a part of the log is damaged, and left out")


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
    """The end of a job."""

    status: End
    time: float
    error: JobError | None = None


def describe_error(error: TfdistError) -> JobError:
    """Return an error as data."""
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


def parse_events(content: bytes, start: int) -> tuple[list[Event], int]:
    """Return the complete events in a part of a log, and the position after them.

    A note replaces lines that cannot be read, such as half a line from when the disk was full.
    """
    complete, end, _ = content.rpartition(b"\n")
    events = [_parse_event(line) for line in complete.split(b"\n")] if end else []
    shown = [one for event, same in groupby(events) for one in ([event] if event == _GAP else same)]
    return shown, start + len(complete) + len(end)


def _parse_event(line: bytes) -> Event:
    try:
        return read_event(line)
    except ValueError:
        return _GAP


def next_step(record: Submitted) -> str:
    """Return what to do about a lost job."""
    return (
        f"its driver on {record.host} was killed, or the machine restarted, and its "
        "workers ended with it: make the same call again, with "
        f"`{call_of('Recovery', ..., resume=True)}` if it wrote checkpoints"
    )
