"""Check the built site. usage: check_site.py FOLDER

Internal links must work, no page may load anything from other hosts, every export of both languages
must have a page that the search finds, and the landing page must show the benchmark's results.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup

import pybackend

ROOT = Path(__file__).parents[1]
MEASURED = "step, 2 workers x 1 thread, 64 images each"
# Attributes that a browser loads when it shows a page; `a` and `link rel=canonical` are not.
_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_REMOTE = re.compile(r"^(https?:)?//")
_REMOTE_STYLE = re.compile(r"""(?:@import\s+|url\()\s*["']?((?:https?:)?//[^"')\s]+)""")


def read_pages(folder: Path) -> dict[Path, BeautifulSoup]:
    """Read all pages, by their paths."""
    return {
        path.resolve(): BeautifulSoup(path.read_text(), "html.parser")
        for path in sorted(folder.rglob("*.html"))
        if "_static" not in path.parts
    }


def broken_links(pages: Mapping[Path, BeautifulSoup]) -> Iterator[str]:
    """Find links to files or anchors that do not exist."""
    anchors = {
        path: {tag["id"] for tag in page.find_all(id=True)}
        | {tag["name"] for tag in page.find_all("a", attrs={"name": True})}
        for path, page in pages.items()
    }
    for path, page in pages.items():
        for tag in page.find_all(href=True) + page.find_all(src=True):
            link = tag.get("href") or tag.get("src") or ""
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{path.name} links to {link}, which does not exist"
            elif parts.fragment and unquote(parts.fragment) not in anchors.get(target, set()):
                yield f"{path.name} links to {link}, and that page has no such anchor"


def remote_assets(folder: Path, pages: Mapping[Path, BeautifulSoup]) -> Iterator[str]:
    """Find what a page or a style sheet would load from another host."""
    for path, page in pages.items():
        for name, attribute in _LOADED.items():
            for tag in page.find_all(name):
                if _REMOTE.match(tag.get(attribute) or "") and "canonical" not in tag.get(
                    "rel", []
                ):
                    yield f"{path.name} loads {tag[attribute]}"
    for path in folder.rglob("*.css"):
        for found in _REMOTE_STYLE.findall(path.read_text()):
            yield f"{path.name} loads {found}"


def r_exports() -> list[str]:
    """Return functions that the R package exports, except those for other packages only."""
    topics = [path.read_text() for path in (ROOT / "rpkg/man").glob("*.Rd")]
    internal = [topic for topic in topics if "\\keyword{internal}" in topic]
    hidden = {name for topic in internal for name in re.findall(r"\\alias\{(\S+)\}", topic)}
    names = re.findall(r"^export\((\w+)\)", (ROOT / "rpkg/NAMESPACE").read_text(), re.M)
    return [name for name in names if name not in hidden]


def missing_from_reference(folder: Path, pages: Mapping[Path, BeautifulSoup]) -> Iterator[str]:
    """Find exports that have no page."""
    r_index = pages[(folder / "r/reference/index.html").resolve()]
    in_r = {code.get_text().removesuffix("()") for code in r_index.select("dt code")}
    for name in r_exports():
        if name not in in_r:
            yield f"R's {name}() is not in the reference"
    described = {
        tag["id"]
        for path, page in pages.items()
        if "python" in path.parts
        for tag in page.select("dt[id]")
    }
    for name in pybackend.__all__:
        if f"pybackend.{name}" not in described:
            yield f"Python's {name} is not in the reference"


def missing_from_search(folder: Path) -> Iterator[str]:
    """Find exports that the search does not find in the reference of their language."""
    from sphinx.search.en import SearchEnglish  # only this check needs it

    text = (folder / "searchindex.js").read_text()
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    stem = SearchEnglish({}).stem
    for language, names in {"r": r_exports(), "python": pybackend.__all__}.items():
        for name in names:
            word = stem(name.lower())
            found = [index["terms"].get(word, []), index["titleterms"].get(word, [])]
            numbers = [n for one in found for n in (one if isinstance(one, list) else [one])]
            names_found = [index["docnames"][number] for number in numbers]
            if language == "python":
                names_found += _pages_of_object(index, name)
            if not any(page.startswith(f"{language}/reference/") for page in names_found):
                yield f"a search for {name} finds no page of {language}"


def _pages_of_object(index: dict, name: str) -> list[str]:
    objects = index["objects"].get("pybackend", [])
    return [index["docnames"][entry[0]] for entry in objects if entry[4] == name]


def wrong_numbers(folder: Path, pages: Mapping[Path, BeautifulSoup]) -> Iterator[str]:
    """Find bars of the landing page that differ from the benchmark's results."""
    rows = json.loads((ROOT / "benchmarks/results.json").read_text())[MEASURED]
    chart = pages[(folder / "index.html").resolve()].select_one("svg.chart")
    shown = [text.get_text() for text in chart.find_all("text")] if chart else []
    lengths = [float(bar["width"]) for bar in chart.find_all("rect")] if chart else []
    if len(shown) != 2 * len(rows) or len(lengths) != len(rows):
        yield f"the landing page's chart has {len(lengths)} bars for {len(rows)} measurements"
        return
    longest = max(row["ms_per_step"] for row in rows.values())
    for place, (name, row) in enumerate(rows.items()):
        label, value = shown[2 * place : 2 * place + 2]
        if not label.startswith(name) or not value.startswith(f"{row['ms_per_step']:.1f} ms"):
            yield f"the chart shows {label}: {value} for {name}: {row['ms_per_step']} ms"
        if abs(lengths[place] / max(lengths) - row["ms_per_step"] / longest) > 0.01:
            yield f"the bar of {name} has the wrong length"


def problems_of(folder: Path) -> list[str]:
    """Return all problems of a built site."""
    pages = read_pages(folder)
    return [
        *broken_links(pages),
        *remote_assets(folder, pages),
        *missing_from_reference(folder, pages),
        *missing_from_search(folder),
        *wrong_numbers(folder, pages),
    ]


def main(folder: Path) -> int:
    """Print the problems and return 1 if there are any."""
    problems = problems_of(folder)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(list(folder.rglob('*.html')))} pages in {folder}, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
