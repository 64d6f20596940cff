"""Reports from the workers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from pybackend.core.errors import ClusterError, Failure
from pybackend.core.job.codec import decode

_ADVICE = (
    "it was truncated or altered in transit, or written by another release of tfdist: install the "
    "same release on all machines, and start again"
)

# Share of a training run's time: workers always wait for each other a little.
_SHARE_OF_NOTE = 0.05

PARTS = ("data", "compute", "communication", "waiting")
"""Parts of a step, in the order of `StepTimes`."""


@dataclass(frozen=True)
class StepTimes:
    """Time of a worker's steps by part, in seconds per step. The four parts add up to a step.

    Measured over the last 512 steps, or executions of several steps. The first ones are excluded.

    Attributes
    ----------
    steps
        Number of measured steps.
    data
        Waiting for the next batch.
    compute
        All other time: gradients, the update, callbacks.
    communication
        Exchange with the other workers, from the time when all of them have arrived.
    waiting
        Waiting for the other workers to arrive.
    jitter
        Standard deviation of the logarithm of a step's duration without the exchange.
    stretches
        The four parts in up to ten successive stretches of steps.
    buffers
        Bytes of each buffer that a step exchanges.
    costs
        Seconds per empty message, per byte, and per added byte, measured when the workers
        connected. None for one worker.
    route
        What large sums went through: ``"shared memory"``, ``"sockets"``, ``"encrypted sockets"``,
        or memory on each host and sockets between hosts, such as ``"shared memory and encrypted
        sockets"``. Empty for one worker.
    cores
        Number of cores of the worker's machine.
    machine
        Identifier of the machine, which is the same in all of its containers and network
        namespaces; empty if unknown.
    quantiles
        21 quantiles of a step's duration in seconds, from the shortest step to the longest, 5 %
        apart. Several steps in one execution count as equally long.
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
    route: str = ""
    cores: int = 0
    machine: str = ""
    quantiles: list[float] = field(default_factory=list)


@dataclass
class Audit:
    """Comparison of some steps of a training run with the same steps in one process.

    Attributes
    ----------
    steps, rows
        Number of compared steps, and of rows in their global batches.
    weights
        Largest difference in a gradient, relative to its size, or in a variable of the model or an
        optimizer, relative to its change in the step. 0 only if all were equal bit for bit.
    metrics
        The same for the variables of the metrics.
    zeros
        Largest difference in gradients that are zero except for rounding errors, such as that of a
        bias before a normalization, relative to the norm of the whole gradient.
    undecided
        Number of chosen steps that could not be compared, for the reasons in ``skipped``.
    skipped
        Reasons why chosen steps, or all steps, were not compared.
    left_out
        Variables that were not compared in the steps.
    differences
        The differences found, with ``audit="warn"``.
    """

    steps: int = 0
    rows: int = 0
    weights: float = 0.0
    metrics: float = 0.0
    zeros: float = 0.0
    undecided: int = 0
    skipped: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class WorkerReport:
    """Report from one worker.

    Attributes
    ----------
    rank, host, pid
        Rank, host name and process ID.
    rows
        Number of rows in its shard. Each row is used exactly once per epoch, unless
        ``steps_per_epoch`` ends epochs earlier.
    steps
        Number of optimizer steps. In asynchronous training, the chief has those of all workers.
    by_worker
        Steps of each worker, in the chief's report of asynchronous training; empty in a result.
    seconds
        Wall time of the work itself, without start-up.
    waited
        Seconds of that time spent waiting for other workers (training). None if unknown:
        TensorFlow's own collectives do not report it.
    step_times
        Duration of its steps by part (training). None if unknown, as above, or if there were too
        few steps.
    audit
        Comparison of steps with one process (training, rank 0).
    value
        Return value of the function (`barrier_run`), or the history (training).
    weights_sha256
        Digest of the final weights, equal on all ranks after training.
    model_sha256
        Digest of the model file, on the rank that wrote it.
    inputs
        Shape and dtype of each input of a row, nested as in the model (training).
    failure
        The `Failure` of the worker. None if it succeeded.
    """

    rank: int
    host: str
    pid: int
    rows: int = 0
    steps: int = 0
    by_worker: tuple[int, ...] = ()
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
        return self.failure is None


@dataclass(frozen=True)
class Generation:
    """Worker group of an elastic training run, for some of its epochs.

    Attributes
    ----------
    epoch
        First epoch that it trains, from 1.
    workers
        Numbers of its workers, by rank. A worker keeps its number, which is not reused in a call.
    joined
        Numbers of the new workers. All workers are new where a call resumed from a checkpoint; that
        call numbers its workers from 0 again.
    left
        Maps the numbers, as text, of workers that left the previous group to the reasons.
    step
        First step that it takes in that epoch, from 1. More than 1: earlier groups took the steps
        before it, and this group shares the rest of the epoch's rows.
    """

    epoch: int
    workers: list[int]
    joined: list[int] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    step: int = 1


@dataclass(frozen=True)
class Restart:
    """Restart of the workers in the middle of training.

    Attributes
    ----------
    time
        Time at which the loss was noticed, in seconds since 1970.
    lost
        First line of the error that reported the loss.
    checkpoint
        Checkpoint from which the training resumed, e.g. ``"epoch 2, step 5"``. None: it started
        from the beginning.
    """

    time: float
    lost: str
    checkpoint: str | None = None


def list_groups(generations: Sequence[Generation], epoch: int) -> list[tuple[int, int]]:
    """Return the worker groups that trained parts of an epoch, counted from 1, in order.

    Each has the number of its workers, and the number of steps that it took; 0: to the end of the
    epoch.
    """
    found: list[tuple[int, int]] = []  # first step, workers
    for generation in generations:
        first = generation.step if generation.epoch == epoch else 1
        if generation.epoch <= epoch:  # it repeats the steps from its first one on
            found = [(step, workers) for step, workers in found if step < first]
            found.append((first, len(generation.workers)))
    ends = [first for first, _ in found[1:]]
    steps = [end - first for (first, _), end in zip(found, ends, strict=False)]
    return [(workers, n) for (_, workers), n in zip(found, [*steps, 0], strict=False)]


def find_groups_before(
    generations: Sequence[Generation], epoch: int, step: int
) -> tuple[tuple[int, int], ...]:
    """Return the groups of `list_groups` for the first ``step`` steps of an epoch, from 0."""
    if not step:
        return ()
    *earlier, (last, _) = list_groups(generations, epoch + 1)
    return (*earlier, (last, step - sum(steps for _, steps in earlier)))


def resume_generations(
    saved: Sequence[Generation], own: Sequence[Generation], epoch: int, step: int
) -> tuple[Generation, ...]:
    """Return the generations of a training run that resumes from a checkpoint.

    ``saved`` are those before the checkpoint, ``own`` those since the call that resumes; none of
    these has trained yet. The checkpoint has ``epoch`` completed epochs, and ``step`` completed
    steps of the next one.
    """
    since = [replace(one, epoch=epoch + 1, step=step + 1, joined=one.workers) for one in own]
    return (*saved, *since)


def count_by_epoch(generations: Sequence[Generation], last: int) -> list[int]:
    """Return the number of workers at the end of each epoch, from epoch 1 to ``last``."""
    counts: dict[int, int] = {}
    # A generation trains all epochs from its first one on, also those of the generation before.
    for generation in generations:
        counts |= dict.fromkeys(range(generation.epoch, last + 1), len(generation.workers))
    return list(counts.values())


def find_straggler(reports: Sequence[WorkerReport]) -> tuple[int, float] | None:
    """Return the rank that the others waited for, and how many seconds each waited, or None.

    That worker itself waits least. The seconds are the difference from the others.
    """
    waits = [report.waited for report in reports if report.waited is not None]
    if len(waits) < max(2, len(reports)):
        return None
    least = min(waits)
    rank = waits.index(least)
    excess = median(waits[:rank] + waits[rank + 1 :]) - least
    is_notable = excess >= max(1.0, _SHARE_OF_NOTE * reports[rank].seconds)
    return (reports[rank].rank, excess) if is_notable else None


def read_report(text: str | bytes | None, rank: int, host: str) -> WorkerReport:
    """Read the report that a rank must have written; return a failed one if it cannot be read."""
    kind = "UnreadableReport"
    try:
        if not text:
            raise ValueError("it is empty")
        report = decode(text, WorkerReport)
        if report.rank != rank:
            raise ValueError(f"it is from worker {report.rank}")
    except ValueError as error:
        why = f"its report cannot be read: {error}"
        failure = Failure(rank, host, kind, why, time=time.time(), advice=_ADVICE)
        return WorkerReport(rank, host, 0, failure=failure)
    return report


def read_metrics(report: WorkerReport, kind: type | tuple[type, ...]) -> dict[str, Any]:
    """Return the metrics that a worker reported, by name; raise `ClusterError` for other values."""
    # The worker is ours, but its report crosses machines: another release may have written it.
    value = report.value
    if not isinstance(value, Mapping) or not all(isinstance(v, kind) for v in value.values()):
        said = f"reported {repr(value)[:80]} instead of named metrics"
        raise ClusterError(f"worker {report.rank} on {report.host} {said}: {_ADVICE}")
    return dict(value)
