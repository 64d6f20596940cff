"""HTML elements of pages and notebooks; all text from users and hosts is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import cycle
from typing import Any

from pybackend.core.api.charts import COLORS
from pybackend.core.words import show_number, show_value

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
class Cell:
    """Number in a table, and the text that shows it."""

    value: float | None
    text: str


@dataclass(frozen=True)
class Markup:
    """Writer of elements.

    Attributes
    ----------
    styles
        Styles by class or tag, which elements get in place of a class; empty if the page has a
        style sheet.
    """

    styles: Mapping[str, str] = field(default_factory=dict)

    def element(self, tag: str, *inside: str, kind: str = "", **attributes: str) -> str:
        """Return an element with its content, which is HTML; ``kind`` is its class."""
        if self.styles:
            style = self.styles.get(kind.partition(" ")[0]) or self.styles.get(tag, "")
            given = {"style": style, **attributes}
        else:
            given = {"class": kind, **attributes}
        shown = "".join(
            f' {name.replace("_", "-")}="{escape(text)}"' for name, text in given.items() if text
        )
        return f"<{tag}{shown}>{''.join(inside)}</{tag}>"

    def text(self, text: str, kind: str = "", tag: str = "p") -> str:
        """Return an element with text."""
        return self.element(tag, escape(text), kind=kind)

    def lines(self, lines: Sequence[str]) -> str:
        """Return lines of text, the first in bold."""
        return "".join(
            self.text(line, "later" if number else "first", "div")
            for number, line in enumerate(lines)
        )

    def code(self, text: str) -> str:
        """Return preformatted lines."""
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
        """Return a table of names and texts."""
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
