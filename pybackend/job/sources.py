"""Source of user-defined functions, sent with their code.

Tracebacks show its lines, and TensorFlow's AutoGraph reads it: without the source, an ``if`` on a
tensor fails on a machine that lacks the file, and everywhere for a cell of a notebook.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any


def read_source(file: str) -> str:
    """The text of a file or of a notebook's cell; empty if it cannot be read."""
    linecache.checkcache(file)  # it can have been edited
    return "".join(linecache.getlines(file))


def make_code(make: Callable[..., CodeType], parts: tuple[Any, ...], file: str, text: str) -> Any:
    """A code object, whose source this process can read from now on."""
    if read_source(file) != text:
        # Without a time of change it stays, whether or not there is such a file.
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return make(*parts)


def find_annotations(function: FunctionType) -> set[str]:
    """Names in a function's annotations.

    AutoGraph compiles the source, annotations included, while cloudpickle sends only the globals
    that the code reads.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):  # no source, or part of an expression
        return set()
    found: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node.returns)
    names = [n.id for one in found if one for n in ast.walk(one) if isinstance(n, ast.Name)]
    return set(names) - set(vars(builtins))


def set_function(function: FunctionType, state: tuple[Any, Any, set[str]]) -> None:
    """Complete an unpickled function, and give the names in its annotations a meaning."""
    own, set_state, names = state
    set_state(function, own)
    for name in names:
        function.__globals__.setdefault(name, _ANNOTATION)


class _Annotation:
    """Stands for whatever is named in an annotation: what it is need not be installed here."""

    def __getattr__(self, name: str) -> _Annotation:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any) -> _Annotation:
        return self

    __getitem__ = __or__ = __ror__ = __call__


_ANNOTATION = _Annotation()
