"""What each worker reports when it has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pybackend.errors import ClusterError, Failure
from pybackend.job.codec import decode

_ADVICE = (
    "what it has sent was cut off or altered on its way, or another release of tfdist has written "
    "it: install the same one on all machines, and start again"
)

# Of a training's seconds: workers wait for each other a little all the time.
_SHARE_OF_NOTE = 0.05

PARTS = ("data", "compute", "communication", "waiting")
"""Of a step, in the order in which `StepTimes` lists them."""


@dataclass(frozen=True)
class StepTimes:
    """Where the time of a worker's steps went, in seconds per step; the four parts are all of it.

    Measured over the last 512 steps, or executions of several steps, but the first ones.

    Attributes
    ----------
    steps
        How many were measured.
    data
        Waiting for the next batch.
    compute
        All that is none of the others: gradients, the update, callbacks.
    communication
        Exchanging with the other workers once all of them have come to it.
    waiting
        Waiting until they have.
    jitter
        Standard deviation of the logarithm of what a step took without the exchange.
    stretches
        The four parts of up to ten stretches of steps, one after the other.
    buffers
        Bytes of the buffers that a step exchanges, each by itself.
    costs
        Seconds of an empty message, of each byte, and of adding each byte, as measured when the
        workers met; None for one worker.
    cores
        Of the worker's machine.
    machine
        Identifies it, for containers and network namespaces alike; empty if that is not known.
    quantiles
        Of what a step took, in seconds: 21 of them, from the shortest step over each twentieth of
        all steps to the longest. Several steps per execution count as equally long.
    """

    steps: int
    data: float
    compute: float
    communication: float
    waiting: float
    jitter: float = 0.0
    stretches: list[list[float]] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)
    costs: list[float] | None = None
    cores: int = 0
    machine: str = ""
    quantiles: list[float] = field(default_factory=list)


@dataclass
class Audit:
    """Steps of a training that were repeated as one process takes them.

    Attributes
    ----------
    steps, rows
        How many were compared, and rows of their global batches.
    weights
        The largest difference of a variable of the model or an optimizer, as a part of its change
        in the step.
    metrics
        The same of a metric's variable.
    skipped
        Why steps that were chosen were not compared.
    differences
        What differed, with ``audit="warn"``.
    """

    steps: int = 0
    rows: int = 0
    weights: float = 0.0
    metrics: float = 0.0
    skipped: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


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
    step_times
        Where the time of its steps went (training); None if that is not known, as above, or if
        there were too few steps.
    audit
        Of its steps, what was compared with one process (training, rank 0).
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
    step_times: StepTimes | None = None
    audit: Audit | None = None
    value: Any = None
    weights_sha256: str | None = None
    model_sha256: str | None = None
    inputs: Any = None
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        """Whether the worker succeeded."""
        return self.failure is None


@dataclass(frozen=True)
class Gang:
    """The workers of a stretch of an elastic training.

    Attributes
    ----------
    epoch
        The first that they train, from 1.
    workers
        Their numbers, by rank. A number stays a worker's own, and is never given again.
    joined
        Those of them that are new.
    left
        Why workers of the gang before are no longer there, by their numbers as text.
    """

    epoch: int
    workers: list[int]
    joined: list[int] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Restart:
    """Workers that were started again in the middle of a training.

    Attributes
    ----------
    time
        When the loss was noticed, in seconds since 1970.
    lost
        What was lost: the first line of the error.
    checkpoint
        From where the training went on, e.g. ``"epoch 2, step 5"``; None: from its beginning.
    """

    time: float
    lost: str
    checkpoint: str | None = None


def count_by_epoch(gangs: Sequence[Gang], last: int) -> list[int]:
    """How many workers each epoch had from the first one to the ``last``, which counts from 1."""
    counts: dict[int, int] = {}
    # A gang trains all from its first epoch on, also what one before it has trained.
    for gang in gangs:
        counts |= dict.fromkeys(range(gang.epoch, last + 1), len(gang.workers))
    return list(counts.values())


def find_straggler(reports: Sequence[WorkerReport]) -> tuple[int, float] | None:
    """The rank for which the others waited, and for how many seconds each; None if for none.

    The worker that all wait for waits least itself: what is shown is by how much.
    """
    waits = [report.waited for report in reports if report.waited is not None]
    if len(waits) < max(2, len(reports)):
        return None
    least = min(waits)
    rank = waits.index(least)
    excess = median(waits[:rank] + waits[rank + 1 :]) - least
    is_worth_a_word = excess >= max(1.0, _SHARE_OF_NOTE * reports[rank].seconds)
    return (reports[rank].rank, excess) if is_worth_a_word else None


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
