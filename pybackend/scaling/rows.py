"""Measurements with one number of workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from pybackend.core.api.scaled import ScaledTraining
from pybackend.core.errors import InputError
from pybackend.core.job.report import PARTS
from pybackend.core.words import setting

Mode = Literal["strong", "weak"]
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
    stretches: Array = field(repr=False, compare=False)
    buffers: tuple[int, ...] = field(repr=False, compare=False)
    costs: tuple[float, ...] | None = field(repr=False, compare=False)


def make_row(mode: Mode, trainings: Sequence[ScaledTraining]) -> ScalingRow:
    """Return the row for one or more training runs of the same kind, still without speed-up.

    Raises
    ------
    InputError
        The training runs have no step times.
    """
    stretches, rows, steps, jitter = [], [], 0, []
    for training in trainings:
        times = [report.step_times for report in training.reports]
        known = [one for one in times if one is not None]
        if len(known) < len(times):
            raise InputError(
                "the workers measured no step times: a training run must take more than 3 steps, "
                f"and use {setting(transport='tcp')}"
            )
        shortest = min(len(one.stretches) for one in known)
        each = np.array([one.stretches[-shortest:] for one in known])
        stretches.append(each.mean(axis=0))
        rows.append(training.rows)
        steps += known[0].steps
        jitter += [one.jitter for one in known]
    whole = np.concatenate(stretches)
    parts = np.mean([part.mean(axis=0) for part in stretches], axis=0)
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
        stretches=whole,
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
