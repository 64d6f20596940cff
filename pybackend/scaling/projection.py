"""Projection of step times to more workers than were measured, with confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pybackend.core.collective import CostModel
from pybackend.core.errors import InputError
from pybackend.core.words import term
from pybackend.scaling.fit import StepModel, fit_model
from pybackend.scaling.rows import Mode, ScalingRow

_SAMPLES = 400
Target = tuple[Mode, int]
Seconds = Mapping[Target, float]
METHOD = (
    "bootstrap: stretches of consecutive steps are resampled (Künsch 1989); for each row, a "
    "relative error of computing and one of communication are drawn from those of the fit (Efron "
    "and Tibshirani 1993), scaled up for its degrees of freedom; the model is fitted again, and an "
    "error of the same kind is drawn for its prediction"
)


@dataclass(frozen=True)
class ProjectedRow:
    """Projected step; ``low`` and ``high`` are the ends of the interval.

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
    seconds_low: float
    seconds_high: float
    speedup: float
    speedup_low: float
    speedup_high: float
    efficiency: float
    efficiency_low: float
    efficiency_high: float


@dataclass(frozen=True)
class Beside:
    """Published efficiency, and the projected efficiency of weak scaling with as many workers."""

    source: str
    what: str
    workers: int
    base: int
    published: float
    projected: float
    projected_low: float
    projected_high: float


@dataclass(frozen=True)
class Projection:
    """Step times with more workers, predicted by a fitted model.

    Attributes
    ----------
    rows
        Predictions by mode and number of workers.
    model
        The fitted model.
    confidence
        Confidence level of the intervals.
    error
        Typical relative error of the fit: the median over the rows it was fitted to.
    beside
        Published efficiencies, each with the one projected for this training run; empty without
        weak scaling.
    """

    rows: list[ProjectedRow]
    model: StepModel
    confidence: float
    error: float
    beside: list[Beside]

    @property
    def records(self) -> list[dict[str, Any]]:
        """The rows as plain data, for a data frame."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        costs = self.model.costs
        lines = [
            f"Projected (fit: α {costs.latency_seconds * 1e6:.0f} µs, "
            f"β {costs.seconds_per_byte * 1e9:.2f} ns per byte, spread {self.model.spread:.2f}; "
            f"typical error {self.error:.0%}; {self.confidence:.0%} intervals)",
            f"{'mode':8}{'workers':>8}{'ms':>10}{'speed-up':>28}{'efficiency':>24}",
        ]
        lines += [
            f"{row.mode:8}{row.workers:8}{row.seconds * 1e3:10.2f}"
            + f"{row.speedup:12.1f} ({row.speedup_low:.1f} to {row.speedup_high:.1f})".rjust(28)
            + f"{row.efficiency:.2f} ({row.efficiency_low:.2f} to {row.efficiency_high:.2f})".rjust(
                24
            )
            for row in self.rows
        ]
        if self.beside:
            lines.append(
                "Published weak-scaling efficiencies, and the projection for this training run:"
            )
        for one in self.beside:
            lines.append(
                f"  {one.what}, {one.workers} GPUs, relative to {one.base}: {one.published:.2f}; "
                f"here {one.projected:.2f} ({one.projected_low:.2f} to {one.projected_high:.2f})  "
                f"[{one.source}]"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class _Estimate:
    """Seconds per step by target: the best estimate, and estimates from resampled data."""

    rows: Sequence[ScalingRow]
    best: Seconds
    samples: Sequence[Seconds]
    confidence: float

    def seconds(self, target: Target) -> tuple[float, float, float]:
        """Return the seconds per step, and the ends of the interval."""
        return self._with_interval(self.best[target], [one[target] for one in self.samples])

    def efficiency(self, target: Target, base: int = 1) -> tuple[float, float, float]:
        """Return the efficiency relative to ``base`` workers, and the ends of the interval."""
        mode, _ = target
        share = find_batch_size(self.rows, target) / find_batch_size(self.rows, (mode, base))
        values = [share * one[mode, base] / one[target] for one in (self.best, *self.samples)]
        return self._with_interval(values[0], values[1:])

    def _with_interval(self, value: float, others: Sequence[float]) -> tuple[float, float, float]:
        tail = (1 - self.confidence) / 2
        low, high = np.quantile(others, [tail, 1 - tail])
        return value, float(low), float(high)


def project_rows(rows: Sequence[ScalingRow], to: int, confidence: float) -> Projection:
    """Fit the model to the measured rows, and predict step times with more workers.

    Rows whose workers share cores are excluded if rows for two numbers of workers remain.

    Raises
    ------
    InputError
        There are not enough rows to fit the model.
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
    wanted = _list_targets(rows, to)
    published = PUBLISHED if any(row.mode == "weak" for row in rows) else ()
    targets: set[Target] = {*wanted, *((row.mode, n) for row in rows for n in (1, row.workers))}
    targets |= {("weak", n) for one in published for n in (one.base, one.workers)}

    def fit(parts: Sequence[Any]) -> tuple[StepModel, Seconds]:
        model = fit_model(rows, buffers, costs, parts)
        return model, {t: model.predict(t[1], find_batch_size(rows, t)) for t in targets}

    parts = [row.stretches.mean(axis=0) for row in rows]
    model, best = fit(parts)
    errors = np.log([row.seconds / best[row.mode, row.workers] for row in rows])
    noise = _Noise(_find_errors(model, rows, parts))
    samples: list[Seconds] = []
    for _ in range(_SAMPLES):
        _, found = fit([noise.disturb(row.stretches) for row in rows])
        samples.append({t: s * float(noise.draw()) for t, s in found.items()})
    estimate = _Estimate(rows, best, samples, confidence)
    return Projection(
        [_describe(estimate, target) for target in wanted],
        model,
        confidence,
        float(np.median(np.abs(np.expm1(errors)))),
        [
            Beside(
                one.source,
                one.what,
                one.workers,
                one.base,
                one.efficiency,
                *estimate.efficiency(("weak", one.workers), one.base),
            )
            for one in published
        ],
    )


def find_batch_size(rows: Sequence[ScalingRow], target: Target) -> float:
    """Return the number of rows per worker: as measured, or derived from other measurements."""
    mode, workers = target
    own = [row for row in rows if row.mode == mode]
    exact = next((row.batch_size for row in own if row.workers == workers), None)
    if exact is not None:
        return exact
    base = min(own, key=lambda row: row.workers)
    return base.batch_size * base.workers / workers if mode == "strong" else base.batch_size


def _describe(estimate: _Estimate, target: Target) -> ProjectedRow:
    mode, workers = target
    efficiency, low, high = estimate.efficiency(target)
    return ProjectedRow(
        mode,
        workers,
        find_batch_size(estimate.rows, target),
        *estimate.seconds(target),
        workers * efficiency,
        workers * low,
        workers * high,
        efficiency,
        low,
        high,
    )


class _Noise:
    """Random errors of measurements, drawn from a fixed seed."""

    def __init__(self, errors: Sequence[float]) -> None:
        self._errors = np.array(errors)
        self._generator = np.random.default_rng(0)

    def draw(self, count: int | None = None) -> Any:
        """Draw factors that differ from 1 as much as measured values differ from fitted ones."""
        signs = self._generator.choice([-1.0, 1.0], count)
        return np.exp(signs * self._generator.choice(self._errors, count))

    def disturb(self, stretches: Any) -> Any:
        """Resample the seconds for each part of a measured row."""
        count = len(stretches)
        drawn = stretches[self._generator.integers(0, count, count)].mean(axis=0)
        own, communication = self.draw(2)
        return drawn * np.array([own, own, communication, own])


def _find_errors(model: StepModel, rows: Sequence[ScalingRow], parts: Sequence[Any]) -> list[float]:
    """Return logarithms of measured over fitted values, scaled up as for unseen rows."""
    own = [
        (part[0] + part[1], model.predict_own(row.batch_size))
        for row, part in zip(rows, parts, strict=True)
    ]
    others = [
        (part[2], model.predict_communication(row.workers))
        for row, part in zip(rows, parts, strict=True)
        if row.workers > 1
    ]
    found = [float(np.log(seen / said)) for seen, said in [*own, *others] if min(seen, said) > 0]
    # Parameters: a fixed time and one per row, latency and bandwidth, if the rows determine them.
    sizes = len({round(row.batch_size) for row in rows})
    counts = len({row.workers for row in rows if row.workers > 1})
    free = max(1, len(found) - min(2, sizes) - min(2, counts))
    return [error * float(np.sqrt(len(found) / free)) for error in found]


def _list_targets(rows: Sequence[ScalingRow], to: int) -> list[Target]:
    """Return the powers of two above the measured numbers of workers, and the largest one wanted.

    With a shared batch, there are at most as many workers as the batch has rows.
    """
    found: list[Target] = []
    modes: tuple[Mode, ...] = ("strong", "weak")
    for mode in modes:
        own = [row.workers for row in rows if row.mode == mode]
        if own:
            last = to if mode == "weak" else min(to, int(find_batch_size(rows, (mode, 1))))
            counts = {2**k for k in range(1, 20)} | {last}
            found += [(mode, n) for n in sorted(counts) if max(own) < n <= last]
    return found


# Published scaling efficiencies of synchronous training with growing batches.


@dataclass(frozen=True)
class Published:
    """Published scaling efficiency.

    Attributes
    ----------
    source, what
        The publication, and the trained model.
    workers, base
        Number of GPUs, and the number that the efficiency is relative to.
    efficiency
        Between 0 and 1.
    """

    source: str
    what: str
    workers: int
    base: int
    efficiency: float


_HOROVOD = "Horovod's documentation, Benchmarks: 4 GPUs a server, 25 Gbit/s"
_MXNET = "MXNet's image classification example: 16 GPUs a server, AWS p2.16xlarge"
PUBLISHED = (
    Published(
        "Goyal et al. 2017, Accurate, Large Minibatch SGD",
        "ResNet-50",
        256,
        8,
        0.90,
    ),
    Published(_HOROVOD, "Inception V3", 512, 1, 0.90),
    Published(_HOROVOD, "ResNet-101", 512, 1, 0.90),
    Published(_HOROVOD, "VGG-16", 512, 1, 0.68),
    Published(_MXNET, "ResNet-152", 256, 1, 0.87),  # 4,630 images per second, of 20.8 on one
    Published(_MXNET, "AlexNet", 256, 1, 0.53),  # 61,938, of 457
)
