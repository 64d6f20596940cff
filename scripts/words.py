"""Find words that a reader would stumble over, in documents, R help and Python's docstrings.

Usage: scripts/words.py [FILE ...]; without files, all that users read. Code is left out: blocks,
what stands in backquotes, and names. Prints a line per finding, and fails if there are any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/README.md", "rpkg/README.md"]
VIGNETTES = ["vignettes/*.Rmd"]
R_HELP = ["rpkg/R/*.R"]
# Words of a sentence, where people read to act.
LONGEST = 40

# What not to write, and what to write instead: the field has a word for it, or it is no English.
INSTEAD = {
    r"gangs?": "worker group; generation of an elastic training",
    r"figures": "metrics, values, timings",
    r"told to (?:end|leave|stop)": "preempted; received SIGTERM",
    r"dealt(?: out)?": "sharded, distributed, assigned",
    r"kept": "saved, stored, retained",
    r"gone": "exited, failed, deleted",
    r"done without": "training continues without it",
    r"spools?": "row store",
    r"by value": "pickled",
    r"held[ -]out": "validation",
    r"refus(?:e|es|ed|ing)": "reject; raise an error; not supported",
    r"joined processes": "processes that you start yourself",
    r"anew": "again; leave it out",
    r"somebody|nobody|whoever": "leave it out, or name who",
    r"so many": "name the number",
    r"whatever \S+ (?:says|passes|has)": "say what holds",
    r"of the user's|of Spark's": "your; Spark's",
    r"(?<!there )(?:is|are|was|were) no (?!more|longer|less)\w+": "is not a ..., there is no ...",
    r"(?<!there )(?:is|are) (?-i:none)": "there is no ...",
    r"as ever": "unchanged; leave it out",
    r"wish(?:es)?": "request",
    r"goes? on from": "resumes from",
}
# A sentence does not begin so.
OPENINGS = {r"Of an? ": "say the subject first", r"Who(?:ever)? \w+s ": "say who: you, a worker"}
# Where a word is right after all: the file, and the words around it.
ALLOWED = {
    ("docs/architecture.md", "refused"),  # a connection
}

_WORDS = [(re.compile(rf"\b(?:{words})\b", re.I), better) for words, better in INSTEAD.items()]
_OPENINGS = [(re.compile(rf"(?:^|[.:!?] ){words}"), better) for words, better in OPENINGS.items()]
_LINKS = re.compile(r"CODE(?:, CODE)+")
_CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|\\code\{[^}]*\}|<[^>]*>|\[[^\]]*\(\)\]")


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines that are prose."""
    lines = path.read_text().splitlines()
    if path.suffix == ".R":
        helps = ((n, line) for n, line in enumerate(lines, 1) if line.startswith("#' "))
        is_example = False
        for number, line in helps:
            if line.startswith("#' @"):
                is_example = line.startswith("#' @example")
            if not is_example:
                yield number, line[3:]
        return
    is_code = bool(lines) and lines[0] == "---"
    for number, line in enumerate(lines, 1):
        if line.startswith("```") or (line == "---" and number > 1 and is_code):
            is_code = not is_code
        elif not is_code and not line.startswith("    "):
            yield number, line


def docstrings_of(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of the docstrings of public classes and functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or node.name.startswith("_"):
            continue
        text = ast.get_docstring(node)
        if text:
            first = node.body[0].lineno
            lines = enumerate(text.splitlines(), first)
            yield from ((n, line) for n, line in lines if not line.strip().isidentifier())


def findings_in(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    """Line, what stands there, and what is better."""
    for number, line in lines:
        text = _CODE.sub("CODE", line)
        for pattern, better in (*_WORDS, *_OPENINGS):
            for found in pattern.finditer(text):
                yield number, found[0].strip(), better


def long_sentences(path: Path) -> Iterator[tuple[int, str, str]]:
    """Sentences of a page that are too long to read once."""
    paragraph: list[str] = []
    start = 1
    for number, line in [*prose_of(path), (0, "")]:
        is_start = not line or line.startswith(("|", "#", "- "))
        if is_start and paragraph:
            text = _LINKS.sub(
                "CODE", re.sub(r"\[([^]]*)CODE", "CODE", _CODE.sub("CODE", " ".join(paragraph)))
            )
            for sentence in re.split(r"(?<=[.!?:;]) ", text):
                if len(sentence.split()) > LONGEST:
                    yield start, sentence[:40], f"{len(sentence.split())} words in a sentence"
            paragraph = []
        if line and not line.startswith(("|", "#")):
            start = start if paragraph else number
            paragraph.append(line)


def public_modules() -> list[Path]:
    """The files that define what `pybackend` exports."""
    sys.path.insert(0, str(ROOT))
    import pybackend

    names = [getattr(pybackend, name) for name in pybackend.__all__]
    modules = {getattr(value, "__module__", "") for value in names}
    files = {ROOT / (module.replace(".", "/") + ".py") for module in modules}
    return sorted(path for path in files if path.is_file() and ROOT / "pybackend" in path.parents)


def main(given: list[str]) -> int:
    pages = [path for pattern in (*DOCUMENTS, *VIGNETTES) for path in sorted(ROOT.glob(pattern))]
    helps = [path for pattern in R_HELP for path in sorted(ROOT.glob(pattern))]
    chosen = [Path(name).resolve() for name in given] or [*pages, *helps, *public_modules()]
    count = 0
    for path in chosen:
        is_python = path.suffix == ".py"
        found = [*findings_in(docstrings_of(path) if is_python else prose_of(path))]
        if path.name == "README.md":
            found += long_sentences(path)
        name = str(path.relative_to(ROOT))
        for number, words, better in found:
            if (name, words) not in ALLOWED:
                count += 1
                print(f"{name}:{number}: {words!r}: {better}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
