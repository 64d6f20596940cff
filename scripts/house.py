"""Print the size of the Python package and its repetitions; part of `make lint`.

The numbers are for comparison before and after a change of the structure, not limits.
"""

from __future__ import annotations

import ast
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "pybackend"
SMALL_FILE, LONG_FUNCTION, MANY_ARGUMENTS, MANY_LINES = 60, 60, 8, 6
Function = ast.FunctionDef | ast.AsyncFunctionDef


def lines_of(node: ast.AST) -> int:
    """Return the number of lines of a statement."""
    return (node.end_lineno or node.lineno) - node.lineno + 1  # type: ignore[attr-defined]


def parameters_of(function: Function) -> int:
    """Return the number of a function's parameters, without `*args` and `**kwargs`."""
    given = function.args
    return len([*given.posonlyargs, *given.args, *given.kwonlyargs])


def is_name(node: ast.AST, name: str) -> bool:
    """Return whether an expression is a variable of this name."""
    return isinstance(node, ast.Name) and node.id == name


def shared_places(texts: dict[Path, str]) -> int:
    """Count places that share six lines or more with another, without imports and blank lines."""
    found: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path, text in texts.items():
        lines = [line.strip() for line in text.splitlines()]
        code = [line for line in lines if line and not line.startswith(("import ", "from ", "#"))]
        for first in range(len(code) - MANY_LINES + 1):
            found[tuple(code[first : first + MANY_LINES])].append((path, first))
    starts = {place for places in found.values() if len(places) > 1 for place in places}
    return sum((path, first - 1) not in starts for path, first in starts)


def figures() -> Iterator[tuple[str, object]]:
    """Yield the name and value of each number."""
    texts = {path: path.read_text() for path in sorted(ROOT.rglob("*.py"))}
    nodes = [node for text in texts.values() for node in ast.walk(ast.parse(text))]
    counts = [len(text.splitlines()) for text in texts.values()]
    yield "files", len(texts)
    yield "lines", sum(counts)
    yield "median lines of a file", int(statistics.median(counts))
    yield f"files under {SMALL_FILE} lines", sum(count < SMALL_FILE for count in counts)
    imports = [lines_of(n) for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom))]
    yield "share of lines that import", f"{sum(imports) / sum(counts):.1%}"
    files = Counter(path.name for path in texts if path.name != "__init__.py")
    yield "file names that repeat", sum(count > 1 for count in files.values())
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    yield "class names that repeat", sum(count > 1 for count in classes.values())
    functions = [node for node in nodes if isinstance(node, Function)]
    long = [node for node in functions if lines_of(node) > LONG_FUNCTION]
    yield f"functions of more than {LONG_FUNCTION} lines", len(long)
    most = max(functions, key=parameters_of)
    yield "most parameters", f"{parameters_of(most)} ({most.name})"
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    many = sum(len(call.args) > MANY_ARGUMENTS for call in calls)
    yield f"calls with more than {MANY_ARGUMENTS} positional arguments", many
    yield "dict(locals())", sum(ast.unparse(call) == "dict(locals())" for call in calls)
    looked_up = [
        node
        for node in nodes
        if isinstance(node, ast.Subscript)
        and is_name(node.value, "arguments")
        and isinstance(node.slice, ast.Constant)
    ]
    yield "arguments looked up by name", len(looked_up)
    yield f"places that share {MANY_LINES} lines or more", shared_places(texts)


if __name__ == "__main__":
    for name, value in figures():
        print(f"{value!s:>24}  {name}")
