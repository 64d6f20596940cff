"""Protocols of launchers, the results that they return, and how another thread stops them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from pybackend.core.errors import InputError, Moment
from pybackend.core.job.job import Job
from pybackend.core.job.messages import Emit
from pybackend.core.job.report import Generation, Restart, WorkerReport
from pybackend.core.words import call_of

Value = TypeVar("Value")
# Contents by name, of files that every worker gets.
Files = Mapping[str, bytes]
# "train" and "validation" rows: columns of arrays, or `DataFrameRows`.
DataSets = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Reports by rank, and the format and content of the model that rank 0 wrote.

    ``job`` is the job that the workers ran, if it differs from the given one: the first of several
    processes chooses the seed and the path of the model. ``generations`` lists the generations of
    elastic training, in order; ``restarts`` lists the restarts in a call, and ``timeline`` what the
    workers did and when.
    """

    reports: list[WorkerReport]
    model: tuple[str, bytes] | None = None
    job: Job | None = None
    generations: tuple[Generation, ...] = ()
    restarts: tuple[Restart, ...] = ()
    timeline: tuple[Moment, ...] = ()


@dataclass(frozen=True)
class Submission:
    """Plan of a launcher.

    Attributes
    ----------
    places
        Host of each worker, by rank, as text.
    documents
        Texts that would be submitted to a cluster, by file name.
    later
        Sentences about what is known only at the start.
    """

    places: tuple[str, ...]
    documents: Mapping[str, str] = field(default_factory=dict)
    later: tuple[str, ...] = ()


@runtime_checkable
class Checking(Protocol):
    """A launcher that can reject a job before it starts anything."""

    def check(self, job: Job) -> None:
        """Raise the input errors that `Launcher.launch` would raise."""


@runtime_checkable
class Warming(Protocol):
    """A launcher that can start in advance what makes the first workers start sooner."""

    def warm_up(self) -> None:
        """Start it, without waiting for it."""


def warm_up(launcher: Launcher, resources: Any) -> None:
    """Let a launcher import TensorFlow while the call checks its arguments and reads its data.

    ``resources`` are the call's `Resources`, not yet checked; None: the default.
    """
    if isinstance(launcher, Warming) and getattr(resources, "fork_server", None) is not False:
        launcher.warm_up()


def reject_environment(job: Job, reason: str) -> None:
    """Raise `InputError` if a job names a Python environment, which a launcher cannot send."""
    if job.resources.environment is not None:
        raise InputError(
            f"`environment` ({call_of('Resources', environment=...)}) is for Spark, hosts(), "
            f"slurm() and kubernetes(): {reason}"
        )


def reject_fork_server(job: Job) -> None:
    """Raise `InputError` if a job wants a fork server, whose workers all end with their call."""
    if job.resources.fork_server:
        raise InputError(
            f"`fork_server` ({call_of('Resources', fork_server=True)}) is for this machine, Spark "
            "and hosts(): elsewhere, no process outlives a call"
        )


@runtime_checkable
class Launcher(Protocol):
    """Object that starts the workers of a job, and waits until all have ended."""

    @property
    def where(self) -> str:
        """Description of its workers, such as "processes of this machine"."""

    @property
    def is_here(self) -> bool:
        """True if its workers (at least rank 0) run in this process's working directory."""

    @property
    def session(self) -> Any:
        """Spark session whose DataFrames the workers can read; None: there is no session."""

    @property
    def workers(self) -> int | None:
        """Fixed number of workers; None: the call chooses the number."""

    @property
    def why_fixed(self) -> str | None:
        """Reason why workers cannot leave or join during training; None: they can."""

    def launch(self, job: Job, files: Files, datasets: DataSets, on_event: Emit) -> Outcome:
        """Run a job to completion, and clean up. It can be called again for a restart.

        ``datasets`` has no rows that the workers read themselves. ``on_event`` receives the
        workers' events.

        Raises
        ------
        InputError, ClusterError
            The job cannot be run here.
        WorkerFailedError
            A worker failed. By then, all others have been stopped.
        """


@runtime_checkable
class Bound(Protocol):
    """A launcher whose workers may end with the process that made it."""

    @property
    def why_bound(self) -> str | None:
        """Reason why another process cannot launch its workers, and what to do; None: it can."""


@runtime_checkable
class Describing(Protocol):
    """A launcher that can describe its plan without starting anything."""

    def describe(self, job: Job) -> Submission:
        """Run the checks of `launch`, and return what it would start."""


@runtime_checkable
class Slotted(Protocol):
    """A launcher that knows in advance how many workers it can start."""

    def count_workers(self, wanted: Any) -> Any:
        """Return the number of workers of a call that requests ``wanted``; None: the default.

        ``wanted`` is None if the call does not specify it. `InputError` if it requests more workers
        than this launcher can start.
        """


@runtime_checkable
class Dividing(Protocol):
    """A launcher that can run several jobs at once, each on its own part of the slots."""

    def divide(
        self, job: Job, most: int, parallelism: int | None
    ) -> AbstractContextManager[Sequence[Launcher]]:
        """Return launchers for jobs like ``job``, which may be used on different threads at once.

        There are at most ``most``, as there are no more jobs, and ``parallelism`` of them; None: as
        many as there are slots for, and at least 1. `InputError` or `ClusterError` if there are
        fewer slots than that.
        """


# Number of jobs that wait in the queue of a cluster at once, unless the user wants another.
_QUEUED = 32


class QueuedLauncher:
    """Base of launchers for a cluster that itself assigns slots to each job, from a queue."""

    is_here = False
    session = None
    workers: int | None = None
    why_fixed: str | None = None

    @contextmanager
    def divide(self, job: Job, most: int, parallelism: int | None) -> Iterator[Sequence[Self]]:
        """Return this launcher several times: the cluster queues jobs for which it has no room."""
        yield [self] * min(most, parallelism or _QUEUED)


_EVENT: ContextVar[threading.Event | None] = ContextVar("_EVENT", default=None)


@contextmanager
def holding(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Give a variable a value in this block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class StopRequestedError(BaseException):
    """Another thread stopped the workers of this one, as Ctrl-C does."""


@contextmanager
def stopped_by(event: threading.Event) -> Iterator[None]:
    """Have launchers in this context stop their workers once the event is set."""
    with holding(_EVENT, event):
        yield


def check_stop() -> None:
    """Raise `StopRequestedError` if another thread stopped this one; launchers call it often."""
    event = _EVENT.get()
    if event is not None and event.is_set():
        raise StopRequestedError
