"""The frame of the page: its head, its sections, and its data for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pybackend.core.api.markup import PAGE

# The page makes no request and runs no script.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


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
    return PAGE.element("header", PAGE.text(title, tag="h1"), PAGE.text(below, "soft"))


def make_tiles(tiles: Sequence[tuple[str, str]]) -> str:
    """Return tiles of pairs: a value and its name."""
    made = (
        PAGE.element("div", PAGE.text(value, tag="b"), PAGE.text(name, tag="span"), kind="tile")
        for value, name in tiles
    )
    return PAGE.element("div", *made, kind="tiles")


def make_section(title: str, *parts: str) -> str:
    """Return a section of the page; an empty string if it has no parts."""
    shown = "".join(parts)
    return PAGE.element("section", PAGE.text(title, tag="h2"), shown) if shown else ""
