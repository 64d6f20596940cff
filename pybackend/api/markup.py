"""Pieces of HTML for notebooks; all text from users or hosts is escaped.

Styles are inline and use the page's own text colour, because notebooks are light or dark, and some
remove style sheets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_LINE = "border-bottom:1px solid rgba(128,128,128,0.35)"
_CELL = f"padding:2px 12px 2px 0;{_LINE};color:inherit"


def write_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table; numbers are aligned to the right."""
    first = "".join(f'<th style="{_CELL};text-align:left">{escape(head)}</th>' for head in heads)
    lines = "".join(f"<tr>{''.join(map(_write_cell, row))}</tr>" for row in rows)
    return (
        '<table style="border-collapse:collapse;background:none;color:inherit;font-size:0.92em">'
        f"<thead><tr>{first}</tr></thead><tbody>{lines}</tbody></table>"
    )


def write_folded(title: str, inside: str) -> str:
    """Return content that is shown when its title is clicked."""
    return (
        '<details style="margin:6px 0"><summary style="cursor:pointer">'
        f"{escape(title)}</summary>{inside}</details>"
    )


def write_settings(settings: Mapping[str, Any]) -> str:
    """Return a table of the settings that are not None."""
    rows = [(name, _show(value)) for name, value in settings.items() if _is_set(value)]
    return write_table(("setting", "value"), rows)


def write_text(text: str) -> str:
    """Return a document with its own line breaks."""
    return (
        '<pre style="color:inherit;background:rgba(128,128,128,0.12);padding:8px;overflow:auto;'
        f'max-height:28em;font-size:0.88em">{escape(text)}</pre>'
    )


def write_lines(lines: Sequence[str]) -> str:
    """Return lines of text, the first in bold."""
    return "".join(
        f'<div style="{"font-weight:600" if number == 0 else "opacity:0.85"}">{escape(line)}</div>'
        for number, line in enumerate(lines)
    )


def write_block(*parts: str) -> str:
    """Return the parts as one block, for a cell of a notebook."""
    return f'<div style="color:inherit;max-width:60em">{"".join(parts)}</div>'


def list_settings(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that are not None as lines of text."""
    return [f"{name}: {_show(value)}" for name, value in settings.items() if _is_set(value)]


def _write_cell(value: Any) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    side = "right" if is_number else "left"
    return f'<td style="{_CELL};text-align:{side}">{escape(_show(value))}</td>'


def _is_set(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else [value]
    return any(one is not None for one in inner)


def _show(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_show(one)}" for name, one in value.items() if one is not None)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value}"
    return str(value)
