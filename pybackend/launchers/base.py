"""What every launcher is, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pybackend.job.job import Job
from pybackend.job.messages import Emit
from pybackend.job.report import Gang, Restart, WorkerReport


@dataclass(frozen=True)
class Outcome:
    """Reports by rank, and format and content of the model that rank 0 wrote.

    ``job`` is the one that the workers have done, if it is not the one that they were given: the
    first of several processes decides on the seed, and on where the model is written. ``gangs`` are
    those of an elastic training, one after the other; ``restarts`` are those that a call has made.
    """

    reports: list[WorkerReport]
    model: tuple[str, bytes] | None = None
    job: Job | None = None
    gangs: tuple[Gang, ...] = ()
    restarts: tuple[Restart, ...] = ()


@dataclass(frozen=True)
class Submission:
    """What a launcher would start.

    Attributes
    ----------
    places
        Where each worker would run, by rank, in words.
    documents
        What would be submitted to a cluster, as text by the name of its file.
    later
        What is known only when it is started, in sentences.
    """

    places: tuple[str, ...]
    documents: Mapping[str, str] = field(default_factory=dict)
    later: tuple[str, ...] = ()


@runtime_checkable
class Checking(Protocol):
    """A launcher that can tell that it cannot run a job before it starts anything."""

    def check(self, job: Job) -> None:
        """Raise what `Launcher.launch` would."""


@runtime_checkable
class Launcher(Protocol):
    """Starts the workers of a job somewhere, and stays with them to their end."""

    @property
    def where(self) -> str:
        """What its workers are, in words: "processes of this machine"."""

    @property
    def is_here(self) -> bool:
        """Whether its workers, rank 0's at least, run in this process's folder."""

    @property
    def session(self) -> Any:
        """The Spark session whose DataFrames the workers can be fed with; None: none."""

    @property
    def workers(self) -> int | None:
        """How many workers there always are; None: as many as a call wants."""

    @property
    def why_fixed(self) -> str | None:
        """Why its workers stay the same during a training; None: they may go and come."""

    def launch(
        self,
        job: Job,
        files: Mapping[str, bytes],
        datasets: Mapping[str, Any],
        on_event: Emit,
    ) -> Outcome:
        """Run a job to its end, and leave nothing behind: it can be called again, for a restart.

        Parameters
        ----------
        files
            Name and content of the files that every worker gets.
        datasets
            ``"train"`` and ``"validation"`` rows: columns of arrays, or `DataFrameRows`; none of
            those that workers read for themselves.
        on_event
            Receives the workers' events.

        Raises
        ------
        InputError, ClusterError
            The job cannot be run here.
        WorkerFailedError
            A worker failed; all others are ended first.
        """


@runtime_checkable
class Describing(Protocol):
    """A launcher that can say what it would start, and starts nothing then."""

    def describe(self, job: Job) -> Submission:
        """What `launch` would start for a job, after the checks that it makes before.

        Raises
        ------
        InputError, ClusterError
            The job cannot be run here.
        """


@runtime_checkable
class Slotted(Protocol):
    """A launcher that knows how many workers it can start before it starts anything."""

    def count_workers(self, wanted: Any) -> Any:
        """How many workers a call gets that wants so many, or does not say (None).

        None: as many as a call gets by default.

        Raises
        ------
        InputError
            It wants more than there can be.
        """
