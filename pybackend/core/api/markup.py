"""HTML elements and SVG charts of pages and notebooks.

All text from users and hosts is escaped here. What notebooks show is styled by attributes. The
style sheet of a page takes precedence over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import cycle
from typing import Any

from pybackend.core.words import show_number, show_value

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
_RULE = "border-bottom:1px solid rgba(128,128,128,0.35)"
_CELL = f"padding:2px 12px 2px 0;{_RULE};color:inherit;text-align"
# By class or, without one, by tag. The text has the notebook's own color.
_STYLES = {
    "block": "color:inherit;max-width:60em",
    "charts": "display:flex;flex-wrap:wrap;gap:8px;margin:6px 0",
    "details": "margin:6px 0",
    "figure": "margin:0",
    "first": "font-weight:600",
    "h3": "font-size:1em;margin:4px 0",
    "later": "opacity:0.85",
    "number": f"{_CELL}:right",
    "pre": "color:inherit;background:rgba(128,128,128,0.12);padding:8px;overflow:auto;"
    "max-height:28em;font-size:0.88em",
    "summary": "cursor:pointer",
    "table": "border-collapse:collapse;background:none;color:inherit;font-size:0.92em",
    "td": f"{_CELL}:left",
    "th": f"{_CELL}:left",
}


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

    ``title`` is the alternative text for screen readers. ``key`` identifies the chart on its page;
    notebooks have none.
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

    shown = range(first, last + 1, max(1, -(-(last - first) // 8)))
    drawn = [_rule(_LEFT, at_y(tick), _WIDTH - _RIGHT, at_y(tick), "grid") for tick in ticks]
    drawn += [_text(_LEFT - 7, at_y(tick) + 4, show_number(tick), "end") for tick in ticks]
    drawn += [_text(at_x(one), _HEIGHT - _BOTTOM + 17, str(one)) for one in shown]
    drawn.append(_text(_LEFT + wide / 2, _HEIGHT - 3, "epoch"))
    for number, line in enumerate(lines):
        color = COLORS[number % len(COLORS)]
        dashes = ' stroke-dasharray="5 3"' if line.kind == "validation" else ""
        values = list(zip(line.x, line.y, strict=False))
        points = [(at_x(x), at_y(y) if math.isfinite(y) else y) for x, y in values]
        drawn.append(
            f'<path class="line {line.kind}" fill="none" stroke="{color}" stroke-width="2"{dashes} '
            f'd="{_join(points)}"/>'
        )
        if len(points) <= _MOST_DOTS:
            drawn += [
                f'<circle class="dot {line.kind}" cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{color}">'
                f"<title>epoch {x}: {escape(line.name)} {show_number(y)}</title></circle>"
                for (px, py), (x, y) in zip(points, values, strict=True)
                if math.isfinite(py)
            ]
    return _svg(title, _HEIGHT, drawn, key)


def draw_bars(title: str, bars: Sequence[Bar], show: Show, key: str) -> str:
    totals = [sum(value for _, value in bar.parts) for bar in bars]
    ticks = find_ticks(0.0, max(totals) or 1.0)
    rows = _Rows([bar.label for bar in bars], ticks, show)
    drawn = list(rows.drawn)
    for row, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        begin = 0.0
        for kind, value in bar.parts:
            x, end = rows.at(begin), rows.at(begin + value)
            named = f"{bar.label}, {kind}" if len(bar.parts) > 1 else bar.label
            drawn.append(
                f'<rect class="bar {kind}" x="{x:.1f}" y="{rows.top(row):.1f}" '
                f'width="{max(0.0, end - x):.1f}" height="{rows.thick:.1f}">'
                f"<title>{escape(named)}: {show(value)}</title></rect>"
            )
            begin += value
        if rows.is_labelled(row):
            drawn.append(rows.value(row, total, show(total)))
    return _svg(title, rows.height, drawn, key)


def draw_boxes(title: str, boxes: Sequence[Box], show: Show, key: str) -> str:
    """Draw boxes between the quartiles with the median, whiskers from 5 % to 95 %, and extremes."""
    highest = max(box.quantiles[5] for box in boxes)
    far = max(box.quantiles[6] for box in boxes)
    # One long step must not compress the scale of all others, so it is not drawn.
    ticks = find_ticks(0.0, far if far <= 2 * highest else highest * 1.1)
    rows = _Rows([box.label for box in boxes], ticks, show)
    drawn = list(rows.drawn)
    for row, box in enumerate(boxes):
        least, low, first, median, third, high, most = box.quantiles
        top, thick, middle = rows.top(row), rows.thick, rows.top(row) + rows.thick / 2
        drawn.append(_rule(rows.at(low), middle, rows.at(high), middle, "whisker"))
        drawn.append(
            f'<rect class="box" x="{rows.at(first):.1f}" y="{top:.1f}" '
            f'width="{max(1.0, rows.at(third) - rows.at(first)):.1f}" height="{thick:.1f}">'
            f"<title>{escape(box.label)}: median {show(median)}, 50 % of the steps from "
            f"{show(first)} to {show(third)}, 90 % from {show(low)} to {show(high)}</title></rect>"
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
            _text(self._left - 7, self.top(row) + self.thick / 2 + 4, label, "end")
            for row, label in enumerate(labels)
            if self.is_labelled(row)
        ]

    def at(self, value: float) -> float:
        return self._left + (_WIDTH - 46 - self._left) * value / self._ticks[-1]

    def top(self, row: int) -> float:
        return _TOP + self._step * (row + 0.17)

    def is_labelled(self, row: int) -> bool:
        return row % self._every == 0

    def value(self, row: int, at: float, text: str) -> str:
        return _text(self.at(at) + 5, self.top(row) + self.thick / 2 + 4, text, "start")


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


@dataclass(frozen=True)
class Cell:
    """Number in a table, and the text that shows it."""

    value: float | None
    text: str


@dataclass(frozen=True)
class Markup:
    """Writer of elements.

    ``styles``, by class or tag, are what elements get in place of a class; empty if the page has a
    style sheet.
    """

    styles: Mapping[str, str] = field(default_factory=dict)

    def element(self, tag: str, *inside: str, kind: str = "", **attributes: str) -> str:
        """Return an element with its content, which is HTML; ``kind`` is its class."""
        style = self.styles.get(kind.partition(" ")[0]) or self.styles.get(tag, "")
        own = {"style": style} if self.styles else {"class": kind}
        given = {**own, **attributes}
        shown = "".join(
            f' {name.replace("_", "-")}="{escape(text)}"' for name, text in given.items() if text
        )
        return f"<{tag}{shown}>{''.join(inside)}</{tag}>"

    def text(self, text: str, kind: str = "", tag: str = "p") -> str:
        return self.element(tag, escape(text), kind=kind)

    def lines(self, lines: Sequence[str]) -> str:
        """Return lines of text, the first in bold."""
        return "".join(
            self.text(line, "later" if number else "first", "div")
            for number, line in enumerate(lines)
        )

    def code(self, text: str) -> str:
        return self.element("pre", escape(text), tabindex="0")

    def folded(self, title: str, inside: str) -> str:
        """Return content that is hidden until its title is clicked."""
        return self.element("details", self.text(title, tag="summary"), inside)

    def figure(self, title: str, svg: str, below: str = "", kinds: Iterable[str] = ()) -> str:
        """Return a chart with its title, the key of its colours, and a caption."""
        key = ""
        for kind, color in zip(kinds, cycle(COLORS), strict=False):
            tint = {"style": f"color:{color};margin-right:12px"} if self.styles else {}
            key += self.element("span", escape(kind), kind=f"key {kind}", **tint)
        caption = self.element("figcaption", key, escape(below))
        return self.element("figure", self.text(title, tag="h3"), svg, caption)

    def charts(self, figures: Iterable[str]) -> str:
        """Return charts that are side by side if there is room."""
        shown = "".join(figures)
        return self.element("div", shown, kind="charts") if shown else ""

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        caption: str = "",
        key: str = "",
    ) -> str:
        """Return a table of text and numbers; ``data-value`` of a cell is its unrounded number."""
        numeric = [any(map(_is_number, column)) for column in zip(*rows, strict=True)]
        head = (
            self.element("th", escape(name), kind="number" * is_number, scope="col")
            for name, is_number in zip(columns, numeric or [False] * len(columns), strict=True)
        )
        body = (self.element("tr", *map(self._cell, row, numeric)) for row in rows)
        return self._scrolled(
            self.element("caption", escape(caption)) if caption else "",
            self.element("thead", self.element("tr", *head)),
            self.element("tbody", *body),
            key=key,
        )

    def pairs(self, pairs: Iterable[tuple[str, str]], key: str = "") -> str:
        rows = (
            self.element("tr", self.element("th", escape(name), scope="row"), self._cell(text))
            for name, text in pairs
        )
        return self._scrolled(self.element("tbody", *rows), key=key, kind="pairs")

    def _scrolled(self, *parts: str, key: str, kind: str = "") -> str:
        table = self.element("table", *parts, kind=kind, id=key)
        return self.element("div", table, kind="scroll", tabindex="0")

    def _cell(self, value: Any, is_numeric: bool = False) -> str:
        number, text = (value.value, value.text) if isinstance(value, Cell) else (value, None)
        if _is_number(number):
            shown = escape(show_number(number) if text is None else text)
            return self.element("td", shown, kind="number", data_value=repr(number))
        shown = escape("–" if number is None else show_value(number))
        return self.element("td", shown, kind="number" * is_numeric)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Cell)) and not isinstance(value, bool)


PAGE = Markup()
# Some notebooks remove style sheets.
NOTEBOOK = Markup(_STYLES)
