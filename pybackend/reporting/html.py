"""Elements of the page. All text from a training run is escaped here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pybackend.figures import show_number

# The page makes no request and runs no script.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class Cell:
    """Number in a table, and the text that shows it."""

    value: float | int | None
    text: str


def make_page(title: str, body: Sequence[str], data: Mapping[str, Any]) -> str:
    """Return the page, with its data for programs in the element ``tfdist-run``."""
    style = Path(__file__).with_name("page.css").read_text()
    # Only this character could end the script element.
    embedded = json.dumps(data).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + '\n</main>\n<script type="application/json" id="tfdist-run">'
        + embedded
        + "</script>\n</body>\n</html>\n"
    )


def make_header(title: str, below: str) -> str:
    """Return the title of the page and a line below it."""
    return f'<header><h1>{escape(title)}</h1><p class="soft">{escape(below)}</p></header>'


def make_tiles(tiles: Sequence[tuple[str, str]]) -> str:
    """Return tiles of pairs: a value and its name."""
    made = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for value, name in tiles
    )
    return f'<div class="tiles">{"".join(made)}</div>'


def make_section(title: str, *parts: str) -> str:
    """Return a section of the page; an empty string if it has no parts."""
    shown = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>{shown}</section>" if shown else ""


def make_text(text: str, kind: str = "") -> str:
    """Return a paragraph."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def make_code(text: str) -> str:
    """Return preformatted lines."""
    return f'<pre tabindex="0">{escape(text)}</pre>'


def make_figure(title: str, svg: str, below: str = "", kinds: Sequence[str] = ()) -> str:
    """Return a chart with its title, the key of its colours, and a caption."""
    key = "".join(f'<span class="key {kind}">{kind}</span>' for kind in kinds)
    return (
        f"<figure><h3>{escape(title)}</h3>{svg}<figcaption>{key}{escape(below)}</figcaption>"
        "</figure>"
    )


def make_charts(figures: Sequence[str]) -> str:
    """Return charts that are side by side if the screen is wide enough."""
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def make_table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], key: str
) -> str:
    """Return a table of text and numbers; ``data-value`` of a cell is its unrounded number."""
    numeric = [
        any(isinstance(row[n], (int, float, Cell)) for row in rows) for n in range(len(columns))
    ]
    head = "".join(
        f'<th scope="col"{_kind(is_number)}>{escape(name)}</th>'
        for name, is_number in zip(columns, numeric, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(_cell(*one) for one in zip(row, numeric, strict=True))}</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table id="{key}"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def make_pairs(pairs: Sequence[tuple[str, str]], key: str) -> str:
    """Return a table of names and texts."""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>'
        for name, text in pairs
    )
    return (
        f'<div class="scroll"><table class="pairs" id="{key}"><tbody>{rows}</tbody></table></div>'
    )


def _kind(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _cell(value: Any, is_number: bool) -> str:
    number, text = value, None
    if isinstance(value, Cell):
        number, text = value.value, value.text
    if isinstance(number, (int, float)):
        shown = show_number(number) if text is None else text
        return f'<td class="number" data-value="{number!r}">{escape(shown)}</td>'
    return f"<td{_kind(is_number)}>{escape('–' if number is None else str(number))}</td>"
