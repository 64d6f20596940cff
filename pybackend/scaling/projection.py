"""Projection of step times to more workers than were measured, with a fitted model.

A worker's own part of a step, which reads data and computes, takes a fixed time plus a time per
row. Communication follows the all-reduce's cost model, whose latency and bandwidth are fitted. All
wait for the slowest worker: if the workers' own times are normal, the largest of N exceeds their
mean by the spread times a factor of N (Blom, "Statistical Estimates and Transformed
Beta-Variables", 1958).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import NormalDist
from typing import Any

import numpy as np

from pybackend.core.collective import CostModel
from pybackend.core.errors import InputError
from pybackend.core.words import term
from pybackend.scaling.measured import MODES, Array, Mode, ScalingRow

# If one number of workers communicates, only a common factor of latency and bandwidth is known.
_TIE = 1e-6


@dataclass(frozen=True)
class StepModel:
    """Model that predicts how many seconds a step takes.

    Attributes
    ----------
    own
        Fixed seconds, and seconds per row, of a worker's own part of a step.
    costs
        Costs of the collectives in a step.
    spread
        Standard deviation of the duration of a worker's own part, relative to its mean.
    buffers
        Bytes of each buffer that a step exchanges.
    """

    own: tuple[float, float]
    costs: CostModel
    spread: float
    buffers: tuple[int, ...]

    def predict(self, workers: int, batch_size: float) -> float:
        """Return the seconds that a step takes with ``batch_size`` rows per worker."""
        fixed, per_row = self.own
        own = (fixed + per_row * batch_size) * (1 + self.spread * expected_excess(workers))
        if workers == 1:
            return own
        costs = self.costs
        return own + sum(
            min(costs.predict_ring(nbytes, workers), costs.predict_doubling(nbytes, workers))
            for nbytes in self.buffers
        )


def expected_excess(workers: int) -> float:
    """Return how far the largest of N normal values lies above their mean, in deviations."""
    return NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))


@dataclass(frozen=True)
class ProjectedRow:
    """Projected step.

    Attributes
    ----------
    mode, workers, batch_size, seconds
        As in `ScalingRow`.
    speedup, efficiency
        Relative to one worker, as predicted by the model.
    """

    mode: Mode
    workers: int
    batch_size: float
    seconds: float
    speedup: float
    efficiency: float


@dataclass(frozen=True)
class Projection:
    """Step times with more workers, predicted by a fitted model.

    Attributes
    ----------
    rows
        Predictions by mode and number of workers.
    model
        The fitted model.
    error
        Typical relative error of the fit: the median over the rows it was fitted to.
    """

    rows: list[ProjectedRow]
    model: StepModel
    error: float

    @property
    def records(self) -> list[dict[str, Any]]:
        """The rows as plain data, for a data frame."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        costs = self.model.costs
        lines = [
            f"Projected (fit: α {costs.latency_seconds * 1e6:.0f} µs, "
            f"β {costs.seconds_per_byte * 1e9:.2f} ns per byte, spread {self.model.spread:.2f}; "
            f"typical error {self.error:.0%})",
            f"{'mode':8}{'workers':>8}{'ms':>10}{'speed-up':>12}{'efficiency':>12}",
        ]
        lines += [
            f"{row.mode:8}{row.workers:8}{row.seconds * 1e3:10.2f}{row.speedup:12.1f}"
            f"{row.efficiency:12.2f}"
            for row in self.rows
        ]
        return "\n".join(lines)


def project_rows(rows: Sequence[ScalingRow], to: int) -> Projection:
    """Fit the model to the measured rows, and predict step times with more workers.

    Rows whose workers share cores are excluded if rows for two numbers of workers remain. If too
    few remain to fit the model, this raises an `InputError`.
    """
    quiet = [row for row in rows if not row.is_crowded]
    rows = quiet if len({row.workers for row in quiet}) > 1 else list(rows)
    known = [row.costs for row in rows if row.costs is not None]
    buffers = max((row.buffers for row in rows), key=len)
    if not known or not buffers or len({row.workers for row in rows}) < 2:
        raise InputError(
            "a projection needs two different numbers of workers, at least one of them above 1, "
            f"and workers that exchange gradients (not {term('LocalSteps')})"
        )
    costs = CostModel(*np.exp(np.log(np.maximum(known, 1e-15)).mean(axis=0)).tolist())
    model = _fit(rows, buffers, costs)
    errors = [abs(row.seconds / model.predict(row.workers, row.batch_size) - 1) for row in rows]
    wanted = _list_targets(rows, to)
    return Projection(
        [_project(model, rows, mode, workers) for mode, workers in wanted],
        model,
        float(np.median(errors)),
    )


def _project(
    model: StepModel, rows: Sequence[ScalingRow], mode: Mode, workers: int
) -> ProjectedRow:
    size, alone = (_find_batch_size(rows, mode, count) for count in (workers, 1))
    seconds = model.predict(workers, size)
    efficiency = size / alone * model.predict(1, alone) / seconds
    return ProjectedRow(mode, workers, size, seconds, workers * efficiency, efficiency)


def _find_batch_size(rows: Sequence[ScalingRow], mode: Mode, workers: int) -> float:
    """Return the number of rows per worker: as measured, or derived from other measurements."""
    own = [row for row in rows if row.mode == mode]
    for row in own:
        if row.workers == workers:
            return row.batch_size
    base = min(own, key=lambda row: row.workers)
    return base.batch_size * base.workers / workers if mode == "strong" else base.batch_size


def _list_targets(rows: Sequence[ScalingRow], to: int) -> list[tuple[Mode, int]]:
    """Return the powers of two above the measured numbers of workers, and the largest one wanted.

    With a shared batch, there are at most as many workers as the batch has rows.
    """
    found: list[tuple[Mode, int]] = []
    for mode in MODES:
        own = [row.workers for row in rows if row.mode == mode]
        if own:
            last = to if mode == "weak" else min(to, int(_find_batch_size(rows, mode, 1)))
            counts = {2**k for k in range(1, 20)} | {last}
            found += [(mode, n) for n in sorted(counts) if max(own) < n <= last]
    return found


def _fit(rows: Sequence[ScalingRow], buffers: Sequence[int], costs: CostModel) -> StepModel:
    """Fit by least squares of relative errors, with no parameter below zero.

    The ``costs`` measured when the workers connected determine which algorithm the workers chose;
    the cost of addition is not fitted.
    """
    own = np.array([row.data + row.compute for row in rows])
    excess = np.array([expected_excess(row.workers) for row in rows])
    waiting = np.array([row.waiting for row in rows])
    total = np.array([row.seconds for row in rows])
    return StepModel(
        own=_fit_line(np.array([row.batch_size for row in rows]), np.maximum(own, 1e-12)),
        costs=_fit_costs(rows, buffers, costs),
        spread=float(_solve((own * excess / total)[:, None], waiting / total)[0]),
        buffers=tuple(buffers),
    )


def _fit_line(sizes: Array, seconds: Array) -> tuple[float, float]:
    """Return a fixed time and a time per row, which is 0 if all batches have the same size."""
    columns = [1 / seconds]
    if np.ptp(sizes) > 0.01 * sizes.max():
        columns.append(sizes / seconds)
    fixed, *per_row = _solve(np.stack(columns, axis=1), np.ones(len(sizes))).tolist()
    return fixed, per_row[0] if per_row else 0.0


def _fit_costs(rows: Sequence[ScalingRow], buffers: Sequence[int], costs: CostModel) -> CostModel:
    """Fit latency and bandwidth as multiples of those measured when the workers connected."""
    only = (
        CostModel(costs.latency_seconds, 0.0, 0.0),
        CostModel(0.0, costs.seconds_per_byte, 0.0),
        CostModel(0.0, 0.0, costs.add_seconds_per_byte),
    )
    lines, wanted = [[_TIE, -_TIE]], [0.0]
    for row in rows:
        if row.workers > 1 and row.communication > 0:
            latency, per_byte, adding = (
                sum(_predict_as(costs, one, nbytes, row.workers) for nbytes in buffers)
                / row.communication
                for one in only
            )
            lines.append([latency, per_byte])
            wanted.append(max(1 - adding, 0.0))
    if len(lines) == 1:
        return costs
    latency, per_byte = _solve(np.array(lines), np.array(wanted)).tolist()
    return CostModel(
        latency * costs.latency_seconds,
        per_byte * costs.seconds_per_byte,
        costs.add_seconds_per_byte,
    )


def _predict_as(chosen_by: CostModel, costs: CostModel, nbytes: float, workers: int) -> float:
    """Predict the seconds for the algorithm that the workers chose according to ``chosen_by``."""
    if chosen_by.choose(nbytes, workers) == "ring":
        return costs.predict_ring(nbytes, workers)
    return costs.predict_doubling(nbytes, workers)


def _solve(lines: Array, wanted: Array) -> Array:
    """Solve least squares with no value below zero, by trying every choice of zero values."""
    count = lines.shape[1]
    best, least = np.zeros(count), float((wanted**2).sum())
    for size in range(1, count + 1):
        for free in combinations(range(count), size):
            chosen = lines[:, free]
            values = np.linalg.lstsq(chosen, wanted, rcond=None)[0]
            error = float(((chosen @ values - wanted) ** 2).sum())
            if (values >= 0).all() and error < least:
                best, least = np.zeros(count), error
                best[list(free)] = values
    return best
