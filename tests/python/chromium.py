"""A page in a real browser: its elements after loading, and its pixels."""

from __future__ import annotations

import shutil
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

# No access to the network, and nothing shared with other browsers.
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars"),
)


class Elements(HTMLParser):
    """Collect texts of elements by `id`, and cells of tables by the table's `id`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[str] = []
        self._id = self._table = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self._id = given.get("id") or ""
        if tag == "table":
            self._table = self._id
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag == "td":
            self.tables[self._table][-1].append(given.get("data-value") or "")

    def handle_data(self, data: str) -> None:
        if self._id:
            self.texts[self._id] = self.texts.get(self._id, "") + data
        elif self._table and self.lasttag == "td" and not self.tables[self._table][-1][-1]:
            self.tables[self._table][-1][-1] = data

    def handle_endtag(self, tag: str) -> None:
        self._id = ""
        self._table = "" if tag == "table" else self._table


def read_page(page: Path, folder: Path) -> Elements:
    """Return the page's elements after the browser has loaded it."""
    return Elements(_run(page, folder, "--dump-dom"))


def first_pixel(page: Path, folder: Path, is_dark: bool, width: int) -> tuple[int, ...]:
    """Return red, green and blue of the page's corner, for the light or dark color scheme."""
    shot = folder / f"shot-{is_dark}-{width}.png"
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    _run(page, folder, scheme, f"--window-size={width},600", f"--screenshot={shot}")
    content = shot.read_bytes()
    place = content.index(b"IDAT")
    size = int.from_bytes(content[place - 4 : place], "big")
    # The first pixel is stored unchanged, regardless of the first line's filter.
    pixels = zlib.decompressobj().decompress(content[place + 4 : place + 4 + size], 16)
    return tuple(pixels[1:4])


def _run(page: Path, folder: Path, *options: str) -> str:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.fail("chromium is missing: scripts/apt-install.sh browser")
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [browser, *_OPTIONS, profile, *options, page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return shown.stdout
