"""Measurements of training runs, and a row of them for each number of workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from pybackend.core.api.train_result import TrainResult
from pybackend.core.errors import InputError
from pybackend.core.job.report import PARTS, WorkerReport
from pybackend.core.words import setting

Mode = Literal["strong", "weak"]
MODES: tuple[Mode, ...] = ("strong", "weak")
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ScalingRow:
    """Step time with one number of workers. All times are in seconds per step.

    Attributes
    ----------
    mode
        ``"strong"``: all workers share one batch. ``"weak"``: each has its own batch.
    workers
        Number of workers.
    batch_size
        Rows per step and worker.
    seconds
        Time of a step: the sum of the four parts of `StepTimes`, as means over the workers.
    data, compute, communication, waiting
        Parts of a step, as in `StepTimes`.
    rows_per_second
        Rows per second of all workers together.
    speedup
        Rows per second, relative to the smallest measured number of workers, times that number.
    efficiency
        Speed-up per worker: 1 is linear scaling.
    is_crowded
        True if there are more workers than cores, so that they slow each other down.
    steps
        Number of measured steps in all runs.
    jitter
        Standard deviation of the logarithm of the duration of a worker's own part of a step.
    """

    mode: Mode
    workers: int
    batch_size: float
    seconds: float
    data: float
    compute: float
    communication: float
    waiting: float
    rows_per_second: float
    speedup: float
    efficiency: float
    is_crowded: bool
    steps: int
    jitter: float
    buffers: tuple[int, ...] = field(repr=False, compare=False)
    costs: tuple[float, ...] | None = field(repr=False, compare=False)


@dataclass(frozen=True)
class ScaledTraining:
    """Measurements of a training run.

    Attributes
    ----------
    rows
        Rows per step, over all workers.
    batch_size
        Rows in the batch that the workers share, or in each worker's own batch.
    reports
        Reports of all workers.
    """

    rows: float
    batch_size: int
    reports: list[WorkerReport]


def share_batch(batch_size: int, workers: int) -> int:
    """Return each worker's number of rows in a batch that they share, or raise an `InputError`."""
    if batch_size % workers:
        raise InputError(
            f"a batch of {batch_size} rows cannot be shared equally by {workers} workers, as "
            "strong scaling requires: choose a `batch_size` that is a multiple of each number of "
            "workers"
        )
    return batch_size // workers


def count_rows(result: TrainResult, batch_size: int | None) -> float:
    """Return the rows per step over all workers; at most ``batch_size`` per worker, if known."""
    steps = result.workers[0].steps
    if not steps:
        raise InputError("training took no steps: there is nothing to measure")
    counted = sum(worker.rows for worker in result.workers) * result.epochs / steps
    # Epochs of fewer steps do not use all rows.
    return counted if batch_size is None else min(counted, batch_size * len(result.workers))


def make_row(mode: Mode, trainings: Sequence[ScaledTraining]) -> ScalingRow:
    """Return the row for one or more training runs of the same kind, still without speed-up.

    Training runs without step times raise an `InputError`.
    """
    each, rows, steps, jitter = [], [], 0, []
    for training in trainings:
        times = [report.step_times for report in training.reports]
        known = [one for one in times if one is not None]
        if len(known) < len(times):
            raise InputError(
                "the workers measured no step times: a training run must take more than 3 steps, "
                f"and use {setting(transport='tcp')}"
            )
        # The last stretches that all workers have: a worker may have measured one more.
        shortest = min(len(one.stretches) for one in known)
        each.append(np.mean([one.stretches[-shortest:] for one in known], axis=(0, 1)))
        rows.append(training.rows)
        steps += known[0].steps
        jitter += [one.jitter for one in known]
    parts = np.mean(each, axis=0)
    seconds = float(parts.sum())
    workers, first = len(trainings[0].reports), known[0]
    machines = Counter(one.machine for one in known if one.machine)
    return ScalingRow(
        mode=mode,
        workers=workers,
        batch_size=float(np.mean(rows)) / workers,
        seconds=seconds,
        **dict(zip(PARTS, parts.tolist(), strict=True)),
        rows_per_second=float(np.mean(rows)) / seconds,
        speedup=float("nan"),
        efficiency=float("nan"),
        is_crowded=max(machines.values(), default=0) > first.cores,
        steps=steps,
        jitter=float(np.mean(jitter)),
        buffers=tuple(first.buffers),
        costs=None if first.costs is None else tuple(first.costs),
    )


def compare_rows(rows: Sequence[ScalingRow]) -> list[ScalingRow]:
    """Return the rows with speed-ups relative to the fewest workers of the same mode."""
    compared = []
    for row in rows:
        base = min((r for r in rows if r.mode == row.mode), key=lambda r: r.workers)
        speedup = row.rows_per_second / base.rows_per_second * base.workers
        compared.append(replace(row, speedup=speedup, efficiency=speedup / row.workers))
    return compared
