"""Errors and warnings raised by tfdist.

TfdistError
├── InputError            an argument is invalid; nothing was started (also a ValueError)
├── ClusterError          the cluster, or its description, cannot run the job
├── WorkerFailedError     a worker failed; carries the root cause and the other ranks' failures
├── PeerLostError         a worker lost the connection to another worker
├── DatabaseError         a database rejected a model, or computes different numbers
├── RError                a function written in R failed, or R cannot run here
└── SerializationError    a model or value cannot be encoded or decoded

UserWarning
└── UnverifiedFileWarning a model file has no digest: damage cannot be detected
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Literal, get_args

from pybackend.core.words import either, show_time

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST_REASON = 200
# Moments of a worker in a message. One that was restarted often has hundreds.
_MOST_SHOWN = 20
# Control characters except tabs and line breaks; also lone surrogates, as in file names that are
# not UTF-8.
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Return text that is safe for a terminal: without colours, with control characters escaped."""
    return _UNSHOWN.sub(lambda found: repr(found[0])[1:-1], _COLOURS.sub("", text))


def skip_frames(frames: TracebackType | None, folders: tuple[str, ...]) -> TracebackType | None:
    """Return the frames of a traceback from the first one whose file is in none of some folders."""
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(folders):
        frames = frames.tb_next
    return frames


class TfdistError(Exception):
    """Base of all errors raised by tfdist."""

    def __str__(self) -> str:
        return printable(super().__str__())

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments that create the same error, in another process and as data."""
        return self.args

    def __reduce__(self) -> tuple[type[TfdistError], tuple[Any, ...], dict[str, Any]]:
        return type(self), self.arguments, vars(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the error as plain data for R, to which no attribute of an exception is passed."""
        return {
            "class": type(self).__name__,
            "message": str(self),
            **{name: getattr(self, name, None) for name in ("rank", "host", "exception_type")},
            "traceback": getattr(self, "worker_traceback", None),
            "log": getattr(self, "log", []),
            "timeline": [asdict(moment) for moment in getattr(self, "timeline", ())],
        }


class InputError(TfdistError, ValueError):
    """An argument is invalid. Raised before any worker is started."""


class ClusterError(TfdistError):
    """The cluster cannot run the job, or its description is invalid."""


class SerializationError(TfdistError):
    """A model or a value cannot be encoded or decoded."""


class DatabaseError(TfdistError):
    """A database rejected a model, or its results differ from those of the model."""


class UnverifiedFileWarning(UserWarning):
    """A model file has no digest, so damage to its weights cannot be detected."""


class RError(TfdistError):
    """A function written in R failed, or R cannot run here.

    Parameters
    ----------
    reason
        R's own message.
    calls
        R's call stack, a numbered line per call; empty if R did not run.
    """

    def __init__(self, reason: str, calls: str = "") -> None:
        self.calls = calls
        super().__init__(reason)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return str(self), self.calls


class PeerLostError(TfdistError):
    """The connection to another worker was closed, or it did not answer for too long.

    Parameters
    ----------
    rank, host
        Rank and host of the lost worker.
    reason
        What was observed, e.g. ``"closed the connection"``.
    """

    def __init__(self, rank: int, host: str, reason: str) -> None:
        self.rank, self.host, self.reason = rank, host, reason
        super().__init__(
            f"lost worker {rank} on {host}: it {reason}. "
            "Look for that worker's own error: it is usually the cause of this one."
        )

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.rank, self.host, self.reason


# Exception types that launchers report for a process that was killed or stopped, or whose machine
# failed.
Loss = Literal[
    "Disrupted",
    "Evicted",
    "ExecutorLost",
    "HostLost",
    "MemoryExceeded",
    "NodeFailed",
    "NodeLost",
    "OutOfMemory",
    "Preempted",
    "ProcessDied",
    "WorkerLost",
    "WorkerStalled",
]
# A training run with checkpoints may reach several time limits.
End = Literal["Cancelled", "Deleted", "TimeLimit"]
# Besides these, `Failure.exception_type` is the class of an exception.
Kind = Literal[Loss, End, "NoPython", "ProcessLost", "Stopped", "Terminated", "UnreadableReport"]

# Errors of TensorFlow's own collectives, and of its coordinator, on the other workers.
_LOST_SERVERS = {
    "AbortedError",
    "CancelledError",
    "InternalError",
    "PSUnavailableError",
    "UnavailableError",
}


@dataclass(frozen=True)
class Failure:
    """Failure of one worker. ``time`` is in seconds since 1970, on the worker's clock."""

    rank: int
    host: str
    exception_type: str
    message: str
    traceback: str = ""
    log: tuple[str, ...] = ()
    time: float = 0.0
    advice: str = ""

    def __post_init__(self) -> None:
        for name in ("message", "traceback"):
            object.__setattr__(self, name, printable(getattr(self, name)))
        object.__setattr__(self, "log", tuple(map(printable, self.log)))

    @property
    def is_loss(self) -> bool:
        """True if the process was lost for a reason outside the code that it ran."""
        return self.exception_type in get_args(Loss)

    @property
    def is_end_of_job(self) -> bool:
        """True if the worker's own job was ended, without affecting workers in other jobs."""
        return self.exception_type in get_args(End)

    @property
    def is_consequence(self) -> bool:
        """True if another worker's failure must have come first: a lost peer, or a forced exit."""
        return self.exception_type in ("PeerLostError", "Stopped")

    @property
    def may_be_consequence(self) -> bool:
        """True if another worker's failure may have come first, as with some TensorFlow errors."""
        return self.is_consequence or self.exception_type in _LOST_SERVERS

    def follows(self, are_lost: bool) -> bool:
        """Return whether another worker's failure came first, given whether processes were lost."""
        return self.may_be_consequence if are_lost else self.is_consequence


@dataclass(frozen=True)
class Moment:
    """Change in the life of a worker: a row of the timeline of a call.

    Attributes
    ----------
    time
        Seconds since 1970, on the worker's clock.
    state
        What it did from then on, such as ``"started"`` or ``"reading the data"``.
    reason
        Detail, such as ``"PID 4711"``, or why it ended.
    rank, host
        The worker; in elastic training, its number and host.
    """

    time: float
    state: str
    reason: str = ""
    rank: int = 0
    host: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason)[:_LONGEST_REASON])

    def __str__(self) -> str:
        return f"{show_time(self.time)}  {self.state}{self.reason and f' ({self.reason})'}"


def root_cause_first(failures: Sequence[Failure]) -> list[Failure]:
    """Order failures by time, with consequences last, because the clocks of two hosts may differ.

    If a process was lost, TensorFlow's errors about other workers are consequences.
    """
    are_lost = any(failure.is_loss for failure in failures)
    return sorted(failures, key=lambda failure: (failure.follows(are_lost), failure.time))


class WorkerFailedError(TfdistError):
    """At least one worker failed. The first failure by time is the root cause.

    Attributes
    ----------
    rank, host, exception_type, worker_traceback, log
        Details of the root cause; ``log`` holds the last lines that the worker printed.
    others
        Failures of the other ranks, in order of time.
    failures
        All failures, the root cause first.
    timeline
        What all workers did and when, by rank: a `Moment` for each change, as far as it is known.
    values
        Return values of `barrier_run` by rank, if all functions returned but some values could not
        be sent; these are None. Otherwise empty.
    """

    def __init__(
        self,
        failures: Sequence[Failure],
        values: Sequence[Any] = (),
        timeline: Sequence[Moment] = (),
    ) -> None:
        self.failures, self.values, self.timeline = [*failures], [*values], [*timeline]
        root, *others = self.failures
        self.rank, self.host, self.exception_type = root.rank, root.host, root.exception_type
        self.worker_traceback, self.log, self.others = root.traceback, list(root.log), others
        own = [moment for moment in self.timeline if moment.rank == root.rank]
        super().__init__(_describe(root, others, own[-_MOST_SHOWN:]))

    def is_loss(self, is_kept: bool) -> bool:
        """Return whether workers were lost, and no worker failed because of the code that it ran.

        If there are checkpoints (``is_kept``), reaching a time limit also counts as a loss.
        """
        ends = ("TimeLimit",) if is_kept else ()
        others = [f for f in self.failures if not (f.is_loss or f.exception_type in ends)]
        are_lost = len(others) < len(self.failures)
        return all(failure.follows(are_lost) for failure in others)

    def advise(self, advice: str) -> WorkerFailedError:
        """Return the same error with different advice in its last paragraph."""
        root, *others = self.failures
        known = f"{root.advice}. " if root.advice else ""
        failures = [replace(root, advice=known + advice), *others]
        return WorkerFailedError(failures, self.values, self.timeline)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.failures, self.values, self.timeline


def _name_type(failure: Failure) -> str:
    """Return the class of an exception, except in R of tfdist's own, which R names otherwise."""
    kind = failure.exception_type
    return either(f"{kind}: ", "" if kind in _NAMES else f"{kind}: ")


def _describe(root: Failure, others: Sequence[Failure], timeline: Sequence[Moment]) -> str:
    lines = [f"worker {root.rank} on {root.host} failed: {_name_type(root)}{root.message}"]
    if root.traceback:
        lines += ["", f"Traceback of worker {root.rank}:", root.traceback.rstrip()]
    if root.log:
        lines += ["", f"Last lines printed by worker {root.rank}:", *(f"  {x}" for x in root.log)]
    if timeline:
        lines += ["", f"Timeline of worker {root.rank}:", *(f"  {x}" for x in timeline)]
    if others:
        lines += ["", "Other workers:"]
        for other in others:
            # The first line: the others' tracebacks would hide the root cause.
            what = f"{_name_type(other)}{other.message.splitlines()[0]}" if other.message else ""
            lines.append(f"  worker {other.rank} on {other.host}: {what or other.exception_type}")
    if root.advice:
        lines += ["", f"What to do: {root.advice}"]
    return "\n".join(lines)


_NAMES = {kind.__name__ for kind in TfdistError.__subclasses__()}
