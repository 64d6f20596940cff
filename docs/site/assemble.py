"""Writes the sources of the site. usage: assemble.py WORK

WORK has the folders `vignettes` and `pkgdown` that scripts/docs.sh has filled, and gets `source`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import benchmarks_page
import chart
import python_pages
import r_pages

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Where the site has what lies elsewhere in the repository.
PLACES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "rpkg/NEWS.md": "r/news/index.md",
    "examples/README.md": "guides/examples.md",
    "docs/coming-from.md": "coming-from/index.md",
    "docs/architecture.md": "project/architecture.md",
    "docs/migrating": "coming-from/index.md",
}
# The guides in their order, by what they are for. Those that are not named here follow.
GUIDES = {
    "How-to guides": {
        "choose": "Choose a launcher",
        "training": "Train a model",
        "data": "Data",
        "lakes": "Delta, Iceberg, Hugging Face, web data",
        "detached": "Leave a job running",
        "monitoring": "Monitor",
        "tuning": "Tune",
        "spark": "Spark",
        "machines": "Your own machines",
        "recovery": "Recover from failures",
        "slow-networks": "Slow networks",
        "bench-scale": "Measure scaling",
        "databases": "Models as SQL",
        "functions": "Your own functions",
    },
    "Explanations": {
        "exact-training": "Exact training",
        "strategies": "Strategies",
        "security": "Security",
        "supply-chain": "Supply chain",
    },
    "Reference": {
        "platforms": "Platforms",
        "exactness": "Exactness, case by case",
        "keras_examples": "Keras's code examples",
        "benchmarks": "Benchmarks",
        "scaling": "Scaling",
        "glossary": "Glossary",
    },
    "Help": {"troubleshooting": "Troubleshooting", "faq": "FAQ"},
    "Examples": {"examples": "Examples", "particles": "Example: particles"},
}
_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def place_of(path: str) -> str | None:
    """The page of the site that shows a file of the repository."""
    if path in PLACES:
        return PLACES[path]
    folder, _, name = path.rpartition("/")
    if name == "README.md" and folder.startswith("examples/"):
        return f"guides/{folder.removeprefix('examples/')}.md"
    pages = {
        "docs": f"guides/{name}",
        "docs/migrating": f"coming-from/{name}",
        "vignettes": f"r/articles/{name.removesuffix('.Rmd')}.md",
    }
    return pages.get(folder)


def move_links(text: str, path: str, page: str) -> str:
    """The text of a file of the repository, with links that lead to the site.

    What is no page of it, such as a notebook, is a file to download.
    """

    def move(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(path), link[1]))
        if not (ROOT / target).exists():
            raise SystemExit(f"{path} links to {link[1]}, which is not there")
        place = place_of(target) or f"files/{target}"
        return f"]({os.path.relpath(place, os.path.dirname(page))}{link[2] or ''})"

    return _LINK.sub(move, text)


def _contents(entries: list[str], *options: str) -> str:
    return "\n".join(["", "", "```{toctree}", *options, "", *entries, "```", ""])


def list_guides(there: Sequence[str]) -> str:
    """Tables of contents of the guides that are there, one for each purpose."""
    named = {page for pages in GUIDES.values() for page in pages}
    others = {page: page for page in there if page not in named and page != "index"}
    parts = []
    for purpose, pages in {**GUIDES, "More": others}.items():
        listed = [f"{title} <{page}>" for page, title in pages.items() if page in there]
        if listed:
            parts.append(_contents(listed, f":caption: {purpose}", ":maxdepth: 1"))
    return "".join(parts)


def copy_files(source: Path) -> None:
    """The files to which the documents link."""
    for path in source.rglob("*.md"):
        for link in _LINK.finditer(path.read_text()):
            place = os.path.relpath(path.parent / link[1], source)
            if place.startswith("files/") and not (source / place).exists():
                (source / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / place.removeprefix("files/"), source / place)


def write_documents(source: Path) -> None:
    """The Markdown files of the repository."""
    patterns = ("*.md", "docs/*.md", "docs/migrating/*.md", "examples/**/README.md")
    files = [str(path.relative_to(ROOT)) for one in patterns for path in sorted(ROOT.glob(one))]
    for path in files:
        page = place_of(path)
        if page is None or path == "README.md":  # whose place is the landing page
            continue
        text = move_links((ROOT / path).read_text(), path, page)
        if page == "coming-from/index.md":
            names = sorted(path.stem for path in ROOT.glob("docs/migrating/*.md"))
            text += _contents(names, ":hidden:")
        (source / page).parent.mkdir(parents=True, exist_ok=True)
        (source / page).write_text(text)
    (source / "guides/benchmarks.md").write_text(benchmarks_page.write_page())


def write_start(source: Path) -> None:
    """The landing page, with the README's first example and the chart, and the sections' starts."""
    example = re.search(r"```python\n.*?```", (ROOT / "README.md").read_text(), re.S)
    assert example is not None
    steps = chart.read_steps()
    filled = {
        "@example@": example[0],
        "@measured@": chart.MEASURED.removeprefix("step, "),
        "@machine@": chart.name_machine(),
    }
    text = (HERE / "index.md").read_text()
    for mark, value in filled.items():
        text = text.replace(mark, value)
    (source / "index.md").write_text(text)
    (source / "chart.svg").write_text(chart.draw(steps))
    (source / "runs.svg").write_text((HERE / "runs.svg").read_text())
    there = sorted(path.stem for path in (source / "guides").glob("*.md"))
    (source / "guides/index.md").write_text("# Guides" + list_guides(there))
    parts = ["changelog", "architecture", "contributing"]
    project = (HERE / "project.md").read_text() + _contents(parts, ":hidden:")
    (source / "project/index.md").write_text(project)


def main(work: Path) -> None:
    """Write all sources into WORK/source."""
    source = work / "source"
    source.mkdir()
    r_pages.write_pages(work, source / "r")
    python_pages.write_pages(source / "python")
    write_documents(source)
    write_start(source)
    copy_files(source)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
