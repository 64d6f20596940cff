"""Every error that tfdist raises.

TfdistError
├── InputError            an argument is wrong; nothing was started (also a ValueError)
├── ClusterError          the cluster, or its description, cannot run the job
├── WorkerFailedError     a worker failed; carries the root cause and the other ranks' failures
├── PeerLostError         a worker lost the connection to another worker
├── RError                a function written in R failed, or R cannot run here
└── SerializationError    a model or value cannot be encoded or decoded
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class TfdistError(Exception):
    """Base of all errors raised by tfdist."""


class InputError(TfdistError, ValueError):
    """An argument is wrong. Raised before any worker is started."""


class ClusterError(TfdistError):
    """The cluster cannot run the job, or its description is invalid."""


class SerializationError(TfdistError):
    """A model or a value cannot be encoded or decoded."""


class RError(TfdistError):
    """A function written in R failed, or there is no R to run it.

    Parameters
    ----------
    reason
        R's own message.
    calls
        R's call stack, a numbered line per call; empty where R did not run.
    """

    def __init__(self, reason: str, calls: str = "") -> None:
        self.calls = calls
        super().__init__(reason)

    def __reduce__(self) -> tuple[type[RError], tuple[str, str]]:
        return type(self), (str(self), self.calls)


class PeerLostError(TfdistError):
    """The connection to another worker was closed, or it was silent for too long.

    Parameters
    ----------
    rank, host
        The worker that was lost.
    reason
        What was observed, e.g. ``"closed the connection"``.
    """

    def __init__(self, rank: int, host: str, reason: str) -> None:
        self.rank = rank
        self.host = host
        self.reason = reason
        super().__init__(
            f"lost worker {rank} on {host}: it {reason}. "
            "Look for that worker's own error: it is usually the cause of this one."
        )

    def __reduce__(self) -> tuple[type[PeerLostError], tuple[int, str, str]]:
        return type(self), (self.rank, self.host, self.reason)


@dataclass(frozen=True)
class Failure:
    """Why a worker failed. ``time`` is in seconds since the epoch, on the worker's clock."""

    rank: int
    host: str
    exception_type: str
    message: str
    traceback: str = ""
    log: tuple[str, ...] = ()
    time: float = 0.0
    advice: str = ""

    @property
    def is_consequence(self) -> bool:
        """Whether another worker's failure must have come first: a lost peer, a forced end."""
        return self.exception_type in ("PeerLostError", "Stopped")


def root_cause_first(failures: Sequence[Failure]) -> list[Failure]:
    """Order failures by time, consequences last, whatever the clocks of two hosts say."""
    return sorted(failures, key=lambda f: (f.is_consequence, f.time))


class WorkerFailedError(TfdistError):
    """At least one worker failed; the first failure by time is the root cause.

    Attributes
    ----------
    rank, host, exception_type, worker_traceback, log
        Of the root cause; ``log`` holds the last lines the worker printed.
    others
        The failures of the other ranks, in order of time.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self._failures = list(failures)
        root, *others = self._failures
        self.rank = root.rank
        self.host = root.host
        self.exception_type = root.exception_type
        self.worker_traceback = root.traceback
        self.log = list(root.log)
        self.others = others
        super().__init__(_describe(root, others))

    def __reduce__(self) -> tuple[type[WorkerFailedError], tuple[list[Failure]]]:
        return type(self), (self._failures,)


def _describe(root: Failure, others: Sequence[Failure]) -> str:
    lines = [
        f"worker {root.rank} on {root.host} failed: {root.exception_type}: {root.message}",
    ]
    if root.traceback:
        lines += ["", f"Traceback of worker {root.rank}:", root.traceback.rstrip()]
    if root.log:
        lines += ["", f"Last lines printed by worker {root.rank}:", *(f"  {x}" for x in root.log)]
    if others:
        lines += ["", "Then, as a consequence or besides:"]
        lines += [
            f"  worker {f.rank} on {f.host}: {f.exception_type}: {f.message.splitlines()[0]}"
            if f.message
            else f"  worker {f.rank} on {f.host}: {f.exception_type}"
            for f in others
        ]
    if root.advice:
        lines += ["", f"What to do: {root.advice}"]
    return "\n".join(lines)
