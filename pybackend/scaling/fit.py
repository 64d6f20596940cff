"""Model of a step's duration, fitted to measurements with a few numbers of workers.

Computing and waiting for data take a fixed time plus a time per row. Communication follows the
all-reduce's cost model, whose latency and bandwidth are fitted. A step lasts until the slowest
worker has finished: if the workers' own times have a log-normal distribution, this is the mean of
the largest of N (David and Nagaraja, "Order Statistics", 2003).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from pybackend.core.collective import CostModel
from pybackend.scaling.rows import ScalingRow

Array = npt.NDArray[np.float64]

_POINTS = np.linspace(-9.0, 9.0, 1801)
_SPREADS = np.linspace(0.0, 1.5, 301)
# If one number of workers communicates, only a common factor of latency and bandwidth is known.
_TIE = 1e-6


@dataclass(frozen=True)
class StepModel:
    """Model that predicts how many seconds a step takes.

    Attributes
    ----------
    compute, data
        Fixed seconds per batch, and seconds per row.
    costs
        Costs of the collectives in a step.
    spread
        Standard deviation of the logarithm of the duration of a worker's own part of a step.
    buffers
        Bytes of each buffer that a step exchanges.
    """

    compute: tuple[float, float]
    data: tuple[float, float]
    costs: CostModel
    spread: float
    buffers: tuple[int, ...]

    def predict(self, workers: int, batch_size: float) -> float:
        """Return the seconds that a step takes with ``batch_size`` rows per worker."""
        own = self.predict_own(batch_size)
        waiting = own * expected_excess(self.spread, workers)
        return own + waiting + self.predict_communication(workers)

    def predict_own(self, batch_size: float) -> float:
        """Return the seconds that a worker's own part of a step takes."""
        fixed, per_row = np.add(self.compute, self.data)
        return float(fixed + per_row * batch_size)

    def predict_communication(self, workers: int) -> float:
        """Return the seconds that the exchanges take once all workers are ready."""
        return sum(_predict(self.costs, nbytes, workers) for nbytes in self.buffers)


def fit_model(
    rows: Sequence[ScalingRow], buffers: Sequence[int], costs: CostModel, parts: Sequence[Array]
) -> StepModel:
    """Fit the model by least squares of relative errors, with no parameter below zero.

    Parameters
    ----------
    costs
        Costs measured when the workers connected. They determine which algorithm the workers chose;
        the cost of addition is not fitted.
    parts
        For each row, the seconds for data, compute, communication and waiting.
    """
    return StepModel(
        compute=_fit_line(rows, [part[1] for part in parts]),
        data=_fit_line(rows, [part[0] for part in parts], [part.sum() for part in parts]),
        costs=_fit_costs(rows, buffers, costs, [part[2] for part in parts]),
        spread=_fit_spread(rows, parts),
        buffers=tuple(buffers),
    )


def expected_excess(spread: float, workers: int) -> float:
    """Return by how much the largest of N log-normal times with mean 1 exceeds 1, on average."""
    return float(_excesses(workers)[0] @ np.exp(spread * _POINTS - spread**2 / 2)) - 1


@cache
def _excesses(workers: int) -> tuple[Array, Array]:
    """Return the weights of `_POINTS` for the largest of N normal values, and all excesses."""
    below = np.array([NormalDist().cdf(float(point)) for point in _POINTS])
    weights = np.diff(below**workers, prepend=0.0)
    # A weight belongs to the interval before its point.
    centers = _POINTS - (_POINTS[1] - _POINTS[0]) / 2
    weights = np.interp(_POINTS, centers, weights)
    weights /= weights.sum()
    values = np.exp(_SPREADS[:, None] * _POINTS - _SPREADS[:, None] ** 2 / 2)
    return weights, values @ weights - 1


def _predict(costs: CostModel, nbytes: float, workers: int) -> float:
    if workers == 1:
        return 0.0
    return min(costs.predict_ring(nbytes, workers), costs.predict_doubling(nbytes, workers))


def _fit_line(
    rows: Sequence[ScalingRow], seconds: Sequence[float], scale: Sequence[float] | None = None
) -> tuple[float, float]:
    """Return a fixed time and a time per row, which is 0 if all batches have the same size."""
    sizes = np.array([row.batch_size for row in rows])
    weights = 1 / np.maximum(np.array(seconds if scale is None else scale), 1e-12)
    columns = [weights]
    if np.ptp(sizes) > 0.01 * sizes.max():
        columns.append(weights * sizes)
    found = _solve(np.stack(columns, axis=1), np.array(seconds) * weights)
    return float(found[0]), float(found[1]) if len(found) > 1 else 0.0


def _fit_costs(
    rows: Sequence[ScalingRow],
    buffers: Sequence[int],
    costs: CostModel,
    seconds: Sequence[float],
) -> CostModel:
    """Fit latency and bandwidth as multiples of those measured when the workers connected."""
    only_latency = CostModel(costs.latency_seconds, 0.0, 0.0)
    only_bytes = CostModel(0.0, costs.seconds_per_byte, 0.0)
    only_adding = CostModel(0.0, 0.0, costs.add_seconds_per_byte)
    lines, wanted = [], []
    for row, measured in zip(rows, seconds, strict=True):
        if row.workers == 1 or measured <= 0:
            continue
        parts = [
            sum(_predict_as(costs, part, nbytes, row.workers) for nbytes in buffers)
            for part in (only_latency, only_bytes, only_adding)
        ]
        lines.append([parts[0] / measured, parts[1] / measured])
        wanted.append(max(1 - parts[2] / measured, 0.0))
    if not lines:
        return costs
    lines.append([_TIE, -_TIE])
    wanted.append(0.0)
    latency, per_byte = _solve(np.array(lines), np.array(wanted))
    return CostModel(
        float(latency * costs.latency_seconds),
        float(per_byte * costs.seconds_per_byte),
        costs.add_seconds_per_byte,
    )


def _predict_as(chosen_by: CostModel, costs: CostModel, nbytes: float, workers: int) -> float:
    """Predict the seconds for the algorithm that the workers chose according to ``chosen_by``."""
    if chosen_by.choose(nbytes, workers) == "ring":
        return costs.predict_ring(nbytes, workers)
    return costs.predict_doubling(nbytes, workers)


def _fit_spread(rows: Sequence[ScalingRow], parts: Sequence[Array]) -> float:
    """Return the spread whose mean waits are closest to the measured ones."""
    errors = np.zeros(len(_SPREADS))
    for row, part in zip(rows, parts, strict=True):
        if row.workers > 1:
            own = part[0] + part[1]
            errors += ((own * _excesses(row.workers)[1] - part[3]) / part.sum()) ** 2
    return float(_SPREADS[errors.argmin()])


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
