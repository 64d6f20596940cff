"""Charts as inline SVG, for notebooks and pages.

What notebooks show is styled by attributes. The style sheet of a page takes precedence over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from pybackend.core.words import show_number

# Two of them are side by side in a notebook.
_WIDTH, _HEIGHT = 400, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 12, 34
_ROW, _MOST_HEIGHT = 24.0, 720.0
_LABEL_HEIGHT = 13.0
# With more epochs, dots would overlap.
_MOST_DOTS = 60

# Of medium lightness, for contrast with both white and black.
COLORS = ("#3b82c4", "#e0812b", "#35a06b", "#c9559f", "#8a78d8", "#a8872e")

Show = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """Series of a line chart; ``kind`` is the CSS class that sets its colour on a page."""

    name: str
    kind: str
    x: Sequence[int]
    y: Sequence[float]


@dataclass(frozen=True)
class Bar:
    """Row of a bar chart: pairs of a kind, which sets the colour, and a value, side by side."""

    label: str
    parts: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Box:
    """Row of a box chart: minimum, 5th, 25th, 50th, 75th, 95th percentile and maximum."""

    label: str
    quantiles: Sequence[float]


def draw_lines(title: str, lines: Sequence[Line], key: str = "") -> str:
    """Draw values by epoch; NaN and infinity leave a gap.

    Parameters
    ----------
    title
        Alternative text for the chart, for screen readers.
    key
        Identifier of the chart, unique on the page; notebooks have none.
    """
    known = [value for line in lines for value in line.y if math.isfinite(value)]
    epochs = [epoch for line in lines for epoch in line.x]
    ticks = find_ticks(min(known), max(known), 5) if known else [0.0, 1.0]
    first, last = min(epochs), max(epochs)
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at_x(epoch: float) -> float:
        return _LEFT + (wide * (epoch - first) / (last - first) if last > first else wide / 2)

    def at_y(value: float) -> float:
        return _TOP + high * (ticks[-1] - value) / (ticks[-1] - ticks[0])

    drawn = [_rule(_LEFT, at_y(tick), _WIDTH - _RIGHT, at_y(tick), "grid") for tick in ticks]
    drawn += [_text(_LEFT - 7, at_y(tick) + 4, show_number(tick), "end") for tick in ticks]
    drawn += [
        _text(at_x(one), _HEIGHT - _BOTTOM + 17, str(one)) for one in find_epochs(first, last, 8)
    ]
    drawn.append(_text(_LEFT + wide / 2, _HEIGHT - 3, "epoch"))
    for number, line in enumerate(lines):
        color = COLORS[number % len(COLORS)]
        dashes = ' stroke-dasharray="5 3"' if line.kind == "validation" else ""
        points = [
            (at_x(x), at_y(y) if math.isfinite(y) else y)
            for x, y in zip(line.x, line.y, strict=False)
        ]
        drawn.append(
            f'<path class="line {line.kind}" fill="none" stroke="{color}" stroke-width="2"{dashes} '
            f'd="{_join(points)}"/>'
        )
        if len(points) <= _MOST_DOTS:
            drawn += [
                f'<circle class="dot {line.kind}" cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{color}">'
                f"<title>epoch {x}: {escape(line.name)} {show_number(y)}</title></circle>"
                for (px, py), x, y in zip(points, line.x, line.y, strict=False)
                if math.isfinite(py)
            ]
    return _svg(title, _HEIGHT, drawn, key)


def draw_bars(title: str, bars: Sequence[Bar], show: Show, key: str) -> str:
    """Draw a horizontal bar for each label, with one or more parts."""
    totals = [sum(value for _, value in bar.parts) for bar in bars]
    ticks = find_ticks(0.0, max(totals) or 1.0)
    rows = _Rows([bar.label for bar in bars], ticks, show)
    drawn = list(rows.drawn)
    for place, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        begin = 0.0
        for kind, value in bar.parts:
            x, end = rows.at(begin), rows.at(begin + value)
            named = f"{bar.label}, {kind}" if len(bar.parts) > 1 else bar.label
            drawn.append(
                f'<rect class="bar {kind}" x="{x:.1f}" y="{rows.top(place):.1f}" '
                f'width="{max(0.0, end - x):.1f}" height="{rows.thick:.1f}">'
                f"<title>{escape(named)}: {show(value)}</title></rect>"
            )
            begin += value
        if rows.is_labelled(place):
            drawn.append(rows.value(place, total, show(total)))
    return _svg(title, rows.height, drawn, key)


def draw_boxes(title: str, boxes: Sequence[Box], show: Show, key: str) -> str:
    """Draw boxes between the quartiles with the median, whiskers from 5 % to 95 %, and extremes."""
    highest = max(box.quantiles[5] for box in boxes)
    far = max(box.quantiles[6] for box in boxes)
    # One long step must not compress the scale of all others, so it is not drawn.
    ticks = find_ticks(0.0, far if far <= 2 * highest else highest * 1.1)
    rows = _Rows([box.label for box in boxes], ticks, show)
    drawn = list(rows.drawn)
    for place, box in enumerate(boxes):
        least, low, first, median, third, high, most = box.quantiles
        top, thick, middle = rows.top(place), rows.thick, rows.top(place) + rows.thick / 2
        drawn.append(_rule(rows.at(low), middle, rows.at(high), middle, "whisker"))
        drawn.append(
            f'<rect class="box" x="{rows.at(first):.1f}" y="{top:.1f}" '
            f'width="{max(1.0, rows.at(third) - rows.at(first)):.1f}" height="{thick:.1f}">'
            f"<title>{escape(box.label)}: median {show(median)}, 50 % of the steps from "
            f"{show(first)} to {show(third)}, 90 % from {show(low)} to {show(high)}"
            "</title></rect>"
        )
        drawn.append(_rule(rows.at(median), top, rows.at(median), top + thick, "median"))
        drawn += [
            f'<circle class="extreme" cx="{rows.at(one):.1f}" cy="{middle:.1f}" r="2">'
            f"<title>{escape(box.label)}: {name} {show(one)}</title></circle>"
            for name, one in (("shortest", least), ("longest", most))
            if one <= ticks[-1]
        ]
    return _svg(title, rows.height, drawn, key)


class _Rows:
    """Rows and horizontal axis of a chart with one row per label."""

    def __init__(self, labels: Sequence[str], ticks: Sequence[float], show: Show) -> None:
        self._ticks = ticks
        self._step = min(_ROW, _MOST_HEIGHT / len(labels))
        self._every = max(1, math.ceil(_LABEL_HEIGHT / self._step))
        self.thick = self._step * 0.66
        self._left = 16 + 6.3 * max(len(label) for label in labels)
        bottom = _TOP + self._step * len(labels)
        self.height = bottom + 26
        self.drawn = [_rule(self.at(t), _TOP - 4, self.at(t), bottom, "grid") for t in ticks]
        self.drawn += [_text(self.at(t), bottom + 17, show(t)) for t in ticks]
        self.drawn += [
            _text(self._left - 7, self.top(place) + self.thick / 2 + 4, label, "end")
            for place, label in enumerate(labels)
            if self.is_labelled(place)
        ]

    def at(self, value: float) -> float:
        return self._left + (_WIDTH - 46 - self._left) * value / self._ticks[-1]

    def top(self, place: int) -> float:
        return _TOP + self._step * (place + 0.17)

    def is_labelled(self, place: int) -> bool:
        return place % self._every == 0

    def value(self, place: int, at: float, text: str) -> str:
        return _text(self.at(at) + 5, self.top(place) + self.thick / 2 + 4, text, "start")


def _join(points: Sequence[tuple[float, float]]) -> str:
    """Return a path through the points, with gaps at NaN and infinity."""
    parts, is_down = [], False
    for x, y in points:
        if math.isfinite(y):
            parts.append(f"{'L' if is_down else 'M'}{x:.1f} {y:.1f}")
        is_down = math.isfinite(y)
    return " ".join(parts)


def _rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return (
        f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        'stroke="rgba(128,128,128,0.35)"/>'
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, height: float, drawn: Sequence[str], key: str) -> str:
    named, by = (f' id="{key}"', f' aria-labelledby="{key}"') if key else ("", "")
    return (
        f'<svg role="img"{by} width="{_WIDTH}" height="{height:.0f}" fill="currentColor" '
        f'font-family="sans-serif" font-size="11" viewBox="0 0 {_WIDTH} {height:.0f}">'
        f"<title{named}>{escape(title)}</title>{''.join(drawn)}</svg>"
    )


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


def find_epochs(first: int, last: int, most: int = 5) -> list[int]:
    """Return evenly spaced epochs for the axis, about ``most`` of them."""
    step = max(1, -(-(last - first) // most))
    return list(range(first, last + 1, step))
