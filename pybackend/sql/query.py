"""Input of a dialect (a graph, its rows, the columns to show), and its output (a query)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pybackend.sql.graph import Array, Graph


@dataclass(frozen=True)
class Shown:
    """Column of the result.

    Attributes
    ----------
    name
        Name of the column.
    output
        Index of the graph's output that it shows.
    place
        Index of the number in the output; -1: 1 minus the first number; None: all numbers, as an
        array.
    levels
        Names of the classes, for the class of the largest number; None shows its index. For a
        single number, the class is the second one if the number is above one half.
    is_class
        True if the class is shown.
    """

    name: str
    output: int
    place: int | None = None
    is_class: bool = False
    levels: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Encoding:
    """Encoding of a column's categories as numbers.

    Attributes
    ----------
    values
        The categories, in the order of their codes 0, 1, 2, ...
    is_one_hot
        True if each category is a separate number, 1 in rows that have it, instead of a code.
    """

    values: tuple[Any, ...]
    is_one_hot: bool

    @property
    def width(self) -> int:
        """Numbers per row."""
        return len(self.values) if self.is_one_hot else 1


@dataclass(frozen=True)
class SourceQuery:
    """Query that replaces a table as the source of rows."""

    sql: str


@dataclass(frozen=True)
class Question:
    """Description of a query to generate.

    Attributes
    ----------
    graph
        The computation for one row.
    source
        SQL of a relation: a table's quoted name, or a query in parentheses.
    keys
        Columns of the source that are shown unchanged.
    features
        For each input of the graph: a column that holds arrays, or the columns that hold its
        numbers.
    shown
        Prediction columns.
    weights
        Name of the weights table.
    encodings
        Encodings of the feature columns that hold categories.
    casts
        Types to which feature columns are cast first, where PostgreSQL needs it.
    model
        The Keras model that the graph represents.
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
    """Rows of the weights table, each an array of numbers, by position.

    Attributes
    ----------
    name
        Name of these rows.
    numbers
        Array of shape (rows, numbers).
    is_kernel
        True if they are multiplied with whole arrays.
    """

    name: str
    numbers: Array
    is_kernel: bool = False


def list_columns(features: str | Sequence[str] | Mapping[str, str | Sequence[str]]) -> list[str]:
    """Return the columns of all inputs, each once."""
    groups = features.values() if isinstance(features, Mapping) else [features]
    listed = [[given] if isinstance(given, str) else given for given in groups]
    return list(dict.fromkeys(column for group in listed for column in group))


def free_prefix(names: Sequence[str]) -> str:
    """Return a prefix for intermediate columns that no name begins with, ignoring case."""
    prefix = "_"
    while any(name.lower().startswith(prefix) for name in names):
        prefix += "_"
    return prefix
