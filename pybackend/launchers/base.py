"""What every launcher is, what it returns, and how it raises a failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pybackend.errors import WorkerFailedError, root_cause_first
from pybackend.job.job import Job
from pybackend.job.report import WorkerReport

Emit = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class Outcome:
    """Reports by rank, and format and content of the model that rank 0 wrote."""

    reports: list[WorkerReport]
    model: tuple[str, bytes] | None = None


@runtime_checkable
class Launcher(Protocol):
    """Starts the workers of a job somewhere, and stays with them to their end."""

    @property
    def session(self) -> Any:
        """The Spark session whose DataFrames the workers can be fed with; None: none."""

    def launch(
        self,
        job: Job,
        files: Mapping[str, bytes],
        datasets: Mapping[str, Any],
        on_event: Emit,
    ) -> Outcome:
        """Run a job to its end.

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


def raise_first_failure(reports: Sequence[WorkerReport]) -> None:
    """Raise `WorkerFailedError` where any worker failed, the first by time as the cause."""
    failures = [r.failure for r in reports if r.failure is not None]
    if failures:
        raise WorkerFailedError(root_cause_first(failures))
