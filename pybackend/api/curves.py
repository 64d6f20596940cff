"""Curves of a training run's history: which ones to show, and how to draw them as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pybackend.errors import InputError
from pybackend.job.arguments import as_number

_VALIDATION = "val_"


@dataclass(frozen=True)
class Curve:
    """Values of one metric per epoch, for the training or the validation rows.

    Attributes
    ----------
    label
        ``"training"`` or ``"validation"``, with a number if the metric has several values.
    """

    label: str
    epochs: list[int]
    values: list[float]
    is_validation: bool = False

    def smoothed(self, weight: float) -> list[float]:
        """Return exponential moving averages, where ``weight`` is the decay factor of older values.

        The weights always sum to 1, as in TensorBoard, so the first mean is the first value.
        """
        mean, total, found = 0.0, 0.0, []
        for value in self.values:
            mean = weight * mean + (1 - weight) * value
            total = weight * total + (1 - weight)
            found.append(mean / total)
        return found


@dataclass(frozen=True)
class Panel:
    """The curves of one metric."""

    name: str
    curves: tuple[Curve, ...]


def find_panels(
    history: Mapping[str, Sequence[Any]],
    epochs_of: Callable[[str], Sequence[int]],
    metrics: str | Sequence[str] | None = None,
) -> list[Panel]:
    """Return a panel for each metric that has values, with training and validation together.

    Parameters
    ----------
    metrics
        Metrics to show, in this order, without ``val_``; None: all.

    Raises
    ------
    InputError
        There is no metric with that name.
    """
    names = list(dict.fromkeys(name.removeprefix(_VALIDATION) for name in history))
    wanted = [metrics] if isinstance(metrics, str) else metrics
    if wanted is not None:
        wanted = list(wanted)
        unknown = [name for name in wanted if name not in names]
        if unknown or not wanted:
            raise InputError(
                f"`metrics` must be chosen from {', '.join(map(repr, names))}, not {metrics!r}"
            )
    panels = []
    for name in wanted or names:
        keys = [key for key in (name, _VALIDATION + name) if history.get(key)]
        curves = [curve for key in keys for curve in _cut(history[key], list(epochs_of(key)), key)]
        if curves:
            panels.append(Panel(name, tuple(curves)))
    return panels


def check_smoothing(smooth: Any) -> float:
    """Check the argument ``smooth``, a weight of at least 0 and less than 1."""
    weight = as_number(smooth)
    if weight is None or not 0 <= weight < 1:
        raise InputError(f"`smooth` must be at least 0 and below 1, e.g. 0.6, not {smooth!r}")
    return weight


def _cut(series: Sequence[Any], epochs: list[int], key: str) -> Iterator[Curve]:
    """Yield one curve, or one for each of a metric's several values.

    Yield nothing if a callback added values in only some epochs: the history does not record which
    ones.
    """
    if len(series) != len(epochs):
        return
    is_validation = key.startswith(_VALIDATION)
    label = "validation" if is_validation else "training"
    if not isinstance(series[0], Sequence):
        yield Curve(label, epochs, [float(value) for value in series], is_validation)
        return
    for number in range(len(series[0])):
        values = [float(value[number]) for value in series]
        yield Curve(f"{label} {number}", epochs, values, is_validation)


_WIDTH, _HEIGHT = 300, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 26, 30
# Of medium lightness, for contrast with both white and black.
_COLORS = ("#3b82c4", "#e0812b", "#35a06b", "#c9559f", "#8a78d8", "#a8872e")
# A curve with more points is drawn without dots.
_DOTTED = 30


def draw_panels(panels: Sequence[Panel]) -> str:
    """Return the HTML of small charts side by side, one for each metric."""
    charts = "".join(map(_draw_panel, panels))
    return f'<div style="display:flex;flex-wrap:wrap;gap:8px;margin:6px 0">{charts}</div>'


def _draw_panel(panel: Panel) -> str:
    finite = [v for curve in panel.curves for v in curve.values if math.isfinite(v)]
    ticks = find_ticks(min(finite, default=0.0), max(finite, default=1.0))
    epochs = [epoch for curve in panel.curves for epoch in curve.epochs]
    scale = _Scale(min(epochs), max(epochs), ticks[0], ticks[-1])
    curves = "".join(_draw_curve(c, n, scale) for n, c in enumerate(panel.curves))
    name = escape(panel.name)
    return (
        f'<svg role="img" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'style="font:11px sans-serif;color:inherit" fill="currentColor">'
        f"<title>{name} by epoch</title>"
        f'<text x="{_LEFT}" y="14" font-size="12" font-weight="600">{name}</text>'
        f"{_draw_legend(panel.curves)}{_draw_axes(scale, ticks)}{curves}</svg>"
    )


class _Scale:
    """Coordinates of epochs and values in a chart."""

    def __init__(self, first: int, last: int, low: float, high: float) -> None:
        self.first, self.last = first, last
        self._low, self._high = low, high

    def x(self, epoch: float) -> float:
        span = self.last - self.first
        share = (epoch - self.first) / span if span else 0.5
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)


def find_ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Return about ``most`` round numbers, at most two more, that cover ``low`` to ``high``."""
    if high - low <= 1e-12 * max(1.0, abs(low), abs(high)):
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / most
    exponent = math.floor(math.log10(rough))
    power = 10.0**exponent
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Relative to their distance: 3 * 1e-7 is not quite 3e-7.
    return [round(number * step, 12 - exponent) for number in range(first, last + 1)]


def _draw_axes(scale: _Scale, ticks: Sequence[float]) -> str:
    lines = []
    for tick in ticks:
        y = scale.y(tick)
        lines.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" '
            'stroke="currentColor" stroke-opacity="0.15"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end" fill-opacity="0.75">'
            f"{tick:.6g}</text>"
        )
    bottom = _HEIGHT - _BOTTOM
    for epoch in find_epochs(scale.first, scale.last):
        lines.append(
            f'<text x="{scale.x(epoch)}" y="{bottom + 15}" text-anchor="middle" '
            f'fill-opacity="0.75">{epoch}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    label = f'<text x="{middle}" y="{_HEIGHT - 3}" text-anchor="middle" fill-opacity="0.75">epoch'
    return "".join(lines) + label + "</text>"


def find_epochs(first: int, last: int, most: int = 5) -> list[int]:
    """Return evenly spaced epochs for the axis, about ``most`` of them."""
    step = max(1, -(-(last - first) // most))
    return list(range(first, last + 1, step))


def _draw_curve(curve: Curve, number: int, scale: _Scale) -> str:
    color = _COLORS[number % len(_COLORS)]
    points = [
        (scale.x(epoch), scale.y(value), epoch, value)
        for epoch, value in zip(curve.epochs, curve.values, strict=True)
        if math.isfinite(value)
    ]
    path = " ".join(f"{x},{y}" for x, y, _, _ in points)
    dashes = ' stroke-dasharray="5 3"' if curve.is_validation else ""
    line = f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>'
    if len(points) > _DOTTED:
        return line
    dots = (
        f'<circle cx="{x}" cy="{y}" r="2.6" fill="{color}"><title>{escape(curve.label)}, '
        f"epoch {epoch}: {value:.6g}</title></circle>"
        for x, y, epoch, value in points
    )
    return line + "".join(dots)


def _draw_legend(curves: Sequence[Curve]) -> str:
    """Return the legend, aligned to the right; empty for one curve, or if the names do not fit."""
    if not 2 <= len(curves) <= 3:
        return ""
    found, x = [], float(_WIDTH - _RIGHT)
    for number, curve in reversed(list(enumerate(curves))):
        color = _COLORS[number % len(_COLORS)]
        found.append(
            f'<text x="{x}" y="14" text-anchor="end" fill="{color}">{escape(curve.label)}</text>'
        )
        x -= 6.2 * len(curve.label) + 8
    return "".join(found)
