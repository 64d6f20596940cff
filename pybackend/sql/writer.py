"""Base class of the writers of queries: names, weights, and the columns of the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from pybackend.sql.formulas import Words, number
from pybackend.sql.graph import Array, Graph, Linear, Node
from pybackend.sql.query import Question, Shown, WeightsPart, free_prefix

_SIGNS = {"add": " + ", "subtract": " - ", "multiply": " * "}


class SqlWriter(ABC):
    """Writer of one query.

    For each operation of `pybackend.sql.graph`, a dialect has a method ``emit_linear``,
    ``emit_gather`` and so on. It gets the operation, the size of its result, and SQL for its
    inputs, and returns SQL that is NULL if an input is.

    Parameters
    ----------
    question
        Description of the query.
    has_vectors
        True if PostgreSQL's weights table has a column ``kernel`` of pgvector's type.
    """

    words: ClassVar = Words()
    calls: ClassVar = {"maximum": "greatest", "minimum": "least"}
    # Position of an array's first number.
    first: ClassVar = 1

    def __init__(self, question: Question, has_vectors: bool = False) -> None:
        self.question = question
        self.has_vectors = has_vectors
        self.parts: list[WeightsPart] = []
        self.prefix = free_prefix(question.keys)
        self.keys = [self.quote(name) for name in question.keys]
        self.weights = self.quote(question.weights)

    @staticmethod
    def quote(name: str) -> str:
        """Quote a name."""
        return '"' + name.replace('"', '""') + '"'

    @staticmethod
    def text(value: str) -> str:
        """Quote a string."""
        return "'" + value.replace("'", "''") + "'"

    @staticmethod
    def array_of(values: Array) -> str:
        """Return an array literal; unused in Oracle, which has no arrays."""
        return f"[{', '.join(map(number, values))}]"

    @abstractmethod
    def write(self) -> str:
        """Return the query; add the rows of the weights table that it needs to ``parts``."""

    @abstractmethod
    def show_class(self, value: str, size: int, levels: Sequence[str] | None) -> str:
        """Return SQL for the class of an output: its name, or without names its code."""

    def emit(self, node: Node, names: Mapping[str, str]) -> str:
        """Return SQL for an operation on named values."""
        kind = type(node.operation).__name__.lower()
        emit: Callable[..., str] = getattr(self, f"emit_{kind}")
        return emit(node.operation, node.size, *(names[name] for name in node.inputs))

    def add_part(self, rows: Array, is_kernel: bool = False) -> str:
        """Add rows to the weights table; return their name, in quotes."""
        name = f"p{len(self.parts)}"
        self.parts.append(WeightsPart(name, rows, is_kernel))
        return self.text(name)

    def combine(self, operation: str, terms: Sequence[str]) -> str:
        """Return the sum, difference, product, largest or smallest of numbers."""
        if operation in _SIGNS:
            return _SIGNS[operation].join(terms)
        return f"{self.calls[operation]}({', '.join(terms)})"

    def show_outputs(self, values: Sequence[str]) -> list[str]:
        """Return the columns of the result, from SQL for each of the graph's outputs."""
        sizes = [self.question.graph.nodes[name].size for name in self.question.graph.outputs]
        return [
            f"{self.show(c, values[c.output], sizes[c.output])} AS {self.quote(c.name)}"
            for c in self.question.shown
        ]

    def show(self, column: Shown, value: str, size: int) -> str:
        """Return SQL for a column of the result, which shows an output."""
        if column.is_class:
            return self.show_class(value, size, column.levels)
        if column.place is None and size > 1:
            return value
        place = column.place or 0
        shown = self.item(value, max(place, 0))
        return f"1 - {shown}" if place < 0 else shown

    def item(self, value: str, place: int) -> str:
        """Return SQL for a number of an array, by its position from 0."""
        return f"{value}[{place + self.first}]"

    def second_if_likely(self, value: str) -> str:
        """Return the position of the class for an output of one probability."""
        likely = f"{self.item(value, 0)} > 0.5"
        none = f"{value} IS NOT NULL"
        return f"CASE WHEN {likely} THEN {self.first + 1} WHEN {none} THEN {self.first} END"

    def name_code(self, code: str, levels: Sequence[str] | None) -> str:
        """Return SQL for the name of a class, from its code."""
        if levels is None:
            return code
        cases = " ".join(f"WHEN {n} THEN {self.text(level)}" for n, level in enumerate(levels))
        return f"CASE {code} {cases} END"


def levels_of(graph: Graph) -> Iterator[tuple[int, Node, list[str]]]:
    """Yield place and node of each operation, and the values before it that are needed after it."""
    last_uses: dict[str, int] = {}
    for place, node in enumerate(graph.nodes.values()):
        last_uses.setdefault(node.name, place)
        last_uses.update(dict.fromkeys(node.inputs, place))
    last_uses.update(dict.fromkeys(graph.outputs, len(graph.nodes)))
    live = [node.name for node in graph.inputs]
    for place, node in enumerate(graph.nodes.values()):
        if node.operation is not None:
            live = [name for name in live if last_uses[name] > place]
            yield place, node, live
            live = [*live, node.name]


def is_slice(places: Array) -> bool:
    """Return whether positions are consecutive and without -1."""
    return bool((np.diff(places) == 1).all() and places[0] >= 0)


# Rows (i, o, x) of weights tables without arrays.


def matrix_rows(numbers: Array) -> Array:
    """Return a matrix by rows and columns."""
    rows, columns = np.indices(numbers.shape)
    return np.stack([rows.ravel(), columns.ravel(), numbers.ravel()], axis=1)


def kernel_rows(linear: Linear) -> Array:
    """Return the weight of each input number i for each output number o of its group."""
    groups, inputs, outputs = linear.kernel.shape
    i, o = np.indices((groups * inputs, outputs))
    o = o + i // inputs * outputs
    return np.stack([i.ravel(), o.ravel(), linear.kernel.ravel()], axis=1)


def place_rows(places: Array) -> Array:
    """Return for each number o of a result its position i in the array."""
    return np.stack([places, np.arange(len(places)), np.zeros(len(places))], axis=1)
