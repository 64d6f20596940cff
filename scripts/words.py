"""Find words that make readers stumble, in documents, R help, docstrings and error messages.

Usage: scripts/words.py [FILE ...]; without files, it reads all texts for users. It ignores code:
blocks, text in backquotes, and names. It prints a line per finding and fails if there are any.
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
# Most words of a sentence in the READMEs.
LONGEST = 40

# Words to avoid, and what to write instead.
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
    r"of (?:the user's|Spark's)(?! \w)": "your; Spark's",
    r"(?<!there )(?:is|are|was|were) no (?!more|longer|less)\w+": "is not a ..., there is no ...",
    r"(?<!there )(?:is|are) (?-i:none)": "there is no ...",
    r"as ever": "unchanged; leave it out",
    r"wish(?:es)?": "request",
    r"goes? on from": "resumes from",
}
# Beginnings of sentences to avoid.
OPENINGS = {r"Of an? ": "say the subject first", r"Who(?:ever)? \w+s ": "say who: you, a worker"}
# Exceptions: the file, and the words as they are reported.
ALLOWED = {
    ("docs/architecture.md", "refused"),  # connections, as in the rest
    ("pybackend/doctor/reach.py", "refused"),
    ("pybackend/core/launchers/spark/barrier_task.py", "refused"),
    ("pybackend/core/net/rendezvous.py", "refused"),
    ("pybackend/core/net/rendezvous.py", "refuses"),
    ("pybackend/core/net/meeting_client.py", "refused"),
}

_WORDS = [(re.compile(rf"\b(?:{words})\b", re.I), better) for words, better in INSTEAD.items()]
_OPENINGS = [(re.compile(rf"(?:^|[.:!?] ){words}"), better) for words, better in OPENINGS.items()]
_CLAUSES = re.compile(r"(?:What|Whether|How|Whose?|Where|Why|See `)\b")
_LINKS = re.compile(r"CODE(?:, CODE)+")
_CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|\\code\{[^}]*\}|<[^>]*>|\[[^\]]*\(\)\]")


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines that are prose."""
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


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of the docstrings of a module, and the messages of the errors that it raises."""
    for first, text in docstrings_in(path):
        lines = enumerate(text.splitlines(), first)
        yield from ((n, line) for n, line in lines if not line.strip().isidentifier())
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def docstrings_in(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings of a module, each with the number of its first line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def clauses_in(path: Path) -> Iterator[tuple[int, str, str]]:
    """Docstrings whose first line is neither an imperative nor a noun."""
    for first, text in docstrings_in(path):
        if found := _CLAUSES.match(text):
            yield first, found[0], "begin with an imperative or a noun"


def findings_in(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    """Yield the line number, the words found, and what to write instead."""
    for number, line in lines:
        text = _CODE.sub("CODE", line)
        for pattern, better in (*_WORDS, *_OPENINGS):
            for found in pattern.finditer(text):
                yield number, found[0].strip(), better


def long_sentences(path: Path) -> Iterator[tuple[int, str, str]]:
    """Find sentences of a page with more than `LONGEST` words."""
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


def main(given: list[str]) -> int:
    pages = [path for pattern in (*DOCUMENTS, *VIGNETTES) for path in sorted(ROOT.glob(pattern))]
    helps = [path for pattern in R_HELP for path in sorted(ROOT.glob(pattern))]
    modules = sorted((ROOT / "pybackend").rglob("*.py"))
    chosen = [Path(name).resolve() for name in given] or [*pages, *helps, *modules]
    count = 0
    for path in chosen:
        is_python = path.suffix == ".py"
        found = [*findings_in(texts_of(path) if is_python else prose_of(path))]
        if is_python:
            found += clauses_in(path)
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
