"""What each worker reports when it has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pybackend.errors import ClusterError, Failure
from pybackend.job.codec import decode

_ADVICE = (
    "what it has sent was cut off or altered on its way, or another release of tfdist has written "
    "it: install the same one on all machines, and start again"
)


@dataclass(frozen=True)
class WorkerReport:
    """What one worker did.

    Attributes
    ----------
    rank, host, pid
        Which process it was.
    rows
        Rows of its shard: each is used exactly once per epoch, unless ``steps_per_epoch`` ends
        the epochs earlier.
    steps
        Optimizer steps taken.
    seconds
        Wall time of the training itself, without start-up.
    waited
        Of these the seconds in which it waited for other workers (training); None if that is not
        known: TensorFlow's own collectives do not tell.
    value
        What the function returned (`barrier_run`), or the history (training).
    weights_sha256
        Digest of the final weights, equal on all ranks after a training.
    model_sha256
        Digest of the model file, on the rank that wrote it.
    inputs
        Shape and type of each input of a row, nested as the model has them (training).
    failure
        None if the worker succeeded.
    """

    rank: int
    host: str
    pid: int
    rows: int = 0
    steps: int = 0
    seconds: float = 0.0
    waited: float | None = None
    value: Any = None
    weights_sha256: str | None = None
    model_sha256: str | None = None
    inputs: Any = None
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        """Whether the worker succeeded."""
        return self.failure is None


def read_report(text: str | bytes | None, rank: int, host: str) -> WorkerReport:
    """The report that `encode` wrote; of one that cannot be read, a report of that failure.

    Parameters
    ----------
    rank, host
        The worker that it has to be of.
    """
    try:
        if not text:
            raise ValueError("it is empty")
        report = decode(text, WorkerReport)
        if report.rank != rank:
            raise ValueError(f"it is of worker {report.rank}")
    except ValueError as error:
        return WorkerReport(rank, host, 0, failure=_describe(rank, host, error))
    return report


def read_figures(report: WorkerReport, kind: type | tuple[type, ...]) -> dict[str, Any]:
    """The figures that a worker has reported, by name: each of a kind.

    Raises
    ------
    ClusterError
        Its value is something else.
    """
    value = report.value
    if not isinstance(value, Mapping) or not all(isinstance(v, kind) for v in value.values()):
        shown = repr(value)[:80]
        raise ClusterError(
            f"worker {report.rank} on {report.host} has reported {shown} in place of figures by "
            f"name: {_ADVICE}"
        )
    return dict(value)


def _describe(rank: int, host: str, error: ValueError) -> Failure:
    return Failure(
        rank,
        host,
        exception_type="UnreadableReport",
        message=f"its report cannot be read: {error}",
        time=time.time(),
        advice=_ADVICE,
    )
