"""Pages of the R package: what pkgdown and R CMD build have made, as sources for the site.

Headings become headings of the page, which gives it a table of contents and the search its
sections; all between them stays as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from bs4 import BeautifulSoup, NavigableString, Tag

_HEADINGS = {"h2": "##", "h3": "###", "h4": "####"}
# Longer than any that a page might contain.
_FENCE = "`" * 12
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#$])")


@dataclass
class Section:
    """A heading in Markdown, empty for what stands before the first one, and the HTML below it."""

    heading: str
    html: list[str] = field(default_factory=list)


def escape(text: str) -> str:
    """Text as Markdown that shows it."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _flatten(parent: Tag, sections: list[Section]) -> None:
    for child in list(parent.children):
        if not isinstance(child, Tag):
            if type(child) is NavigableString and child.strip():
                sections[-1].html.append(str(child))
        elif child.name in _HEADINGS:
            sections.append(Section(f"{_HEADINGS[child.name]} {escape(child.get_text())}"))
        elif child.name == "div" and "section" in child.get("class", []):
            _flatten(child, sections)
        elif child.name not in ("script", "style", "h1"):
            sections[-1].html.append(str(child))


def to_markdown(title: str, body: Tag, lead: str = "") -> str:
    """A page of this title, from the element that holds its text."""
    for numbered in body.select("pre a[aria-hidden]"):  # a link for each line of code
        numbered.decompose()
    for hidden in body.select(".page-header, h1, #TOC"):  # the site has contents of its own
        hidden.decompose()
    sections = [Section(f"# {escape(title)}")]
    if lead:
        sections[0].html.append(f'<p class="lead">{lead}</p>')
    _flatten(body, sections)
    # An index has one after another, the second without a heading's text.
    parts = []
    for section in sections:
        html = "".join(section.html)
        parts.append(f"{section.heading}\n")
        if html.strip():
            parts.append(f"{_FENCE}{{raw}} html\n{html}\n{_FENCE}\n")
    return "\n".join(parts)


def _read(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(), "html.parser")


def _contents(entries: list[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", "", *entries, "```", ""])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_articles(vignettes: Path, source: Path) -> list[tuple[str, str]]:
    """The rendered vignettes; returns their names and titles."""
    written = []
    for path in sorted(vignettes.glob("*.html")):
        page = _read(path)
        title = page.find("h1").get_text()
        written.append((path.stem, title))
        _write(source / "articles" / f"{path.stem}.md", to_markdown(title, page.body))
    return written


def write_reference(pkgdown: Path, source: Path) -> None:
    """Pkgdown's topics, their index and the news."""
    entries = []
    index = _read(pkgdown / "reference/index.html").find("main")
    shown = [Path(link["href"]).stem for link in index.select("dt a")]
    for name in dict.fromkeys(shown):
        main = _read(pkgdown / f"reference/{name}.html").find("main")
        lead = main.find("h1").decode_contents()
        label = name if name in ("tfdist_error", "tfdist_fit", "tfdist-package") else f"{name}()"
        entries.append(f"{label} <{name}>")
        title = f"tfdist::{label}" if label.endswith("()") else label
        _write(source / "reference" / f"{name}.md", to_markdown(title, main, lead))
    _write(source / "reference/index.md", to_markdown("R reference", index) + _contents(entries))
    news = _read(pkgdown / "news/index.html").find("main")
    _write(source / "news/index.md", to_markdown("News of the R package", news))


def write_pages(work: Path, source: Path) -> None:
    """All pages of the R package below `source`."""
    articles = write_articles(work / "vignettes", source)
    write_reference(work / "pkgdown", source)
    shown = "\n".join(f"- [{escape(title)}](articles/{name}.md)" for name, title in articles)
    entries = [f"{escape(title)} <articles/{name}>" for name, title in articles]
    start = (Path(__file__).parent / "r.md").read_text().replace("@articles@", shown)
    _write(source / "index.md", start + _contents([*entries, "reference/index", "news/index"]))
