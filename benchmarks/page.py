"""Sections of docs/scaling.md, each written by the benchmark that measured its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"


def write_sections(sections: Mapping[str, Sequence[str]], page: Path = PAGE) -> None:
    """Replace sections by their headings, or add them; "" is the text before the first heading."""
    first, *others = page.read_text().split("\n## ")
    kept = {"": first, **dict(other.split("\n", 1) for other in others)}
    kept |= {heading: "\n".join(["", *lines, ""]) for heading, lines in sections.items() if heading}
    if "" in sections:
        kept[""] = "\n".join([*sections[""], ""])
    parts = [kept.pop(""), *(f"## {heading}\n{text}" for heading, text in kept.items())]
    page.write_text("\n".join(parts).rstrip("\n") + "\n")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """Return the lines of a table whose first columns are text, and the others numbers."""
    marks = "---|" * texts + "---:|" * (len(columns) - texts)
    return [f"| {' | '.join(columns)} |", f"|{marks}", *(f"| {' | '.join(row)} |" for row in rows)]
