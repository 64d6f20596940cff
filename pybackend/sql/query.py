"""What is asked of a dialect: a graph, the rows it is computed for, and the columns to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pybackend.sql.graph import Array, Graph


@dataclass(frozen=True)
class Shown:
    """A column of the result.

    Attributes
    ----------
    name
        Of the column.
    output
        Which of the graph's outputs it shows.
    place
        Which number of it; -1: the first one's rest to 1; None: all, as an array.
    levels
        For the class of the largest number: the classes' names, or none for their numbers. A class
        of one number is the second one if the number is above one half.
    is_class
        Whether the class is shown.
    """

    name: str
    output: int
    place: int | None = None
    is_class: bool = False
    levels: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Encoding:
    """How a column's categories become numbers.

    Attributes
    ----------
    values
        The categories, in the order of their codes 0, 1, 2, ...
    is_one_hot
        Whether each is a number of its own, 1 where a row has it, and not its code.
    """

    values: tuple[Any, ...]
    is_one_hot: bool

    @property
    def width(self) -> int:
        """How many numbers of a row it makes."""
        return len(self.values) if self.is_one_hot else 1


@dataclass(frozen=True)
class SourceQuery:
    """A query whose rows are asked about, in place of a table."""

    sql: str


@dataclass(frozen=True)
class Question:
    """What to compute.

    Attributes
    ----------
    graph
        By which.
    source
        SQL of a relation: a table's quoted name, or a query in parentheses.
    keys
        Columns of it that are shown as they are.
    features
        By the graph's inputs: a column that holds arrays, or the columns of its numbers.
    shown
        Columns of predictions.
    weights
        Name of the table of weights.
    encodings
        Of the columns of features that hold categories.
    casts
        Types to which columns of features are cast first, where PostgreSQL needs it.
    model
        The Keras model of the graph.
    """

    graph: Graph
    source: str
    keys: tuple[str, ...]
    features: Mapping[str, str | tuple[str, ...]]
    shown: tuple[Shown, ...]
    weights: str
    encodings: Mapping[str, Encoding] = field(default_factory=dict)
    casts: Mapping[str, str] = field(default_factory=dict)
    model: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class WeightsPart:
    """Rows of the table of weights: some numbers each, by their place.

    Attributes
    ----------
    name
        Of these rows.
    numbers
        Of the shape (rows, numbers).
    is_kernel
        Whether products with whole arrays are computed of them.
    """

    name: str
    numbers: Array
    is_kernel: bool = False


@dataclass
class QueryAnswer:
    """A query, and what must be in the table of weights."""

    query: str = ""
    parts: list[WeightsPart] = field(default_factory=list)


def list_columns(features: str | Sequence[str] | Mapping[str, str | Sequence[str]]) -> list[str]:
    """The columns of all inputs, each once."""
    groups = features.values() if isinstance(features, Mapping) else [features]
    listed = [[given] if isinstance(given, str) else given for given in groups]
    return list(dict.fromkeys(column for group in listed for column in group))


def free_prefix(names: Sequence[str]) -> str:
    """What no name begins with, upper or lower case, for columns between."""
    prefix = "_"
    while any(name.lower().startswith(prefix) for name in names):
        prefix += "_"
    return prefix


def find_last_uses(graph: Graph) -> dict[str, int]:
    """The place of the last node that takes each value; behind all for outputs."""
    found: dict[str, int] = {}
    for place, node in enumerate(graph.nodes.values()):
        found.setdefault(node.name, place)
        found.update(dict.fromkeys(node.inputs, place))
    found.update(dict.fromkeys(graph.outputs, len(graph.nodes)))
    return found
