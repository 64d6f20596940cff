"""What each database provides: a writer of queries, and a connection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pybackend.core.errors import DatabaseError, InputError, TfdistError
from pybackend.sql.operations import (
    Array,
    Graph,
    Linear,
    Node,
    Question,
    Shown,
    WeightsPart,
    free_prefix,
)

# Characters of a statement that errors show.
_SHOWN = 60
# Largest exponent of e that fits into a float32. PostgreSQL raises an error for larger ones.
_MOST = 88.72
# The largest number of float32.
LARGEST = 3.4028234663852886e38
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


@dataclass(frozen=True)
class Words:
    """Names that differ between dialects.

    Attributes
    ----------
    greatest, least
        Functions of several numbers.
    """

    greatest: str = "greatest"
    least: str = "least"

    def apply(self, function: str, constants: tuple[float, ...], x: str) -> str:
        """Return the formula for a function by its name; ``x`` is a name, or in parentheses."""
        return FORMULAS[function](self, x, *(number(c) for c in constants))

    def at_most(self, x: str, most: object) -> str:
        """Return the smaller of two."""
        return f"{self.least}({x}, {most})"

    def at_least(self, x: str, least: object) -> str:
        """Return the larger of two."""
        return f"{self.greatest}({x}, {least})"

    def exp(self, x: str) -> str:
        """Return e to the power of a number that may be large or small."""
        return f"exp({self.clip(x, -_MOST, _MOST)})"

    def fade(self, x: str) -> str:
        """Return e to the power of a number that is not positive."""
        return f"exp({self.at_least(x, -_MOST)})"

    def clip(self, x: str, least: float, most: float) -> str:
        """Limit a number to a range."""
        return self.at_least(self.at_most(x, most), least)


def number(value: float) -> str:
    """Return a number for any dialect of SQL, with all its digits."""
    text = repr(float(value))
    return f"({text})" if text.startswith("-") else text


def _bend(w: Words, x: str, scale: str, alpha: str) -> str:
    below = f"{scale} * {alpha} * ({w.fade(x)} - 1)"
    return f"CASE WHEN {x} > 0 THEN {scale} * {x} ELSE {below} END"


def _softplus(w: Words, x: str) -> str:
    return f"({w.at_least(x, 0)} + ln(1 + {w.fade(f'-abs({x})')}))"


# Coefficients of the error function, in powers of 1 / (1 + p |x|); error below 1.5e-7 (Abramowitz
# and Stegun 1964, formula 7.1.26).
_ERF_P = 0.3275911
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def _gelu(w: Words, x: str) -> str:
    """Return a number times the normal distribution function of that number."""
    t = f"(1 / (1 + {number(_ERF_P / 2**0.5)} * abs({x})))"
    powers = number(_ERF[0])
    for coefficient in _ERF[1:]:
        powers = f"({powers} * {t} + {number(coefficient)})"
    tail = f"0.5 * {powers} * {t} * {w.fade(f'-0.5 * {x} * {x}')}"
    return f"{x} * (CASE WHEN {x} > 0 THEN 1 - {tail} ELSE {tail} END)"


FORMULAS: dict[str, Callable[..., str]] = {
    "celu": lambda w, x, a: (
        f"CASE WHEN {x} > 0 THEN {x} ELSE {a} * ({w.fade(f'{x} / {a}')} - 1) END"
    ),
    "elu": lambda w, x, a: _bend(w, x, "1", a),
    "exponential": lambda w, x: w.exp(x),
    "gelu": _gelu,
    "hard_sigmoid": lambda w, x: f"{w.clip(f'{x} + 3', 0, 6)} / 6",
    "hard_silu": lambda w, x: f"{x} * {w.clip(f'{x} + 3', 0, 6)} / 6",
    "hard_tanh": lambda w, x: w.clip(x, -1, 1),
    "leaky_relu": lambda w, x, a: f"CASE WHEN {x} > 0 THEN {x} ELSE {a} * {x} END",
    "log_sigmoid": lambda w, x: f"{w.at_most(x, 0)} - ln(1 + {w.fade(f'-abs({x})')})",
    "mish": lambda w, x: f"{x} * tanh({_softplus(w, x)})",
    "relu": lambda w, x: w.at_least(x, 0),
    "relu6": lambda w, x: w.clip(x, 0, 6),
    "rsqrt": lambda w, x, a: f"1 / sqrt({x} + {a})",
    "selu": lambda w, x: _bend(w, x, number(_SELU_SCALE), number(_SELU_ALPHA)),
    "sigmoid": lambda w, x: f"1 / (1 + {w.exp(f'-{x}')})",
    "silu": lambda w, x: f"{x} / (1 + {w.exp(f'-{x}')})",
    "softplus": _softplus,
    "softsign": lambda w, x: f"{x} / (1 + abs({x}))",
    "tanh": lambda w, x: f"tanh({x})",
}


_SIGNS = {"add": " + ", "subtract": " - ", "multiply": " * "}


class SqlWriter(ABC):
    """Writer of one query.

    For each operation of `pybackend.sql.operations`, a dialect has a method ``emit_linear``,
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


class Connection:
    """Connection of a driver that follows Python's database API (PEP 249).

    Attributes
    ----------
    dialect
        SQL dialect of the database.
    has_vectors
        True if the weights table has a column of pgvector's type.
    text_type, double_type
        Names of the types in the database.
    """

    dialect: str
    has_vectors = False
    text_type, double_type = "text", "double precision"

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def check(self) -> None:
        """Reject a database that is too old for the queries.

        Raises
        ------
        InputError
            The database is too old.
        """

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement with values for its question marks, and return its rows.

        Raises
        ------
        DatabaseError
            The database rejected the statement.
        """
        with self._named(sql):
            return self._run(sql, values)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run statements in a transaction: all of them take effect, or none.

        Raises
        ------
        InputError
            The connection is already within a transaction.
        """
        if self._is_in_transaction():
            raise InputError("the connection is in a transaction: commit it or roll it back first")
        self.execute("BEGIN")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            with suppress(DatabaseError):  # the database may have rolled back already
                self.execute("ROLLBACK")
            raise

    def create_weights(self, table: str, parts: Sequence[WeightsPart]) -> None:
        """Create the weights table, by its quoted name, and fill it."""
        self.execute(f"CREATE TABLE {table} ({self._columns}){self._options}")
        self._fill(table, parts)

    def keep_weights(self, table: str, parts: Sequence[WeightsPart]) -> None:
        """Create a weights table that only this connection can see, unless it exists."""
        self.execute(
            f"CREATE TEMPORARY TABLE IF NOT EXISTS {table} ({self._columns}){self._options}"
        )
        if not self.execute(f"SELECT 1 FROM {table} LIMIT 1"):
            self._fill(table, parts)

    def types_of(self, source: str, columns: Sequence[str]) -> list[str]:
        """Return the names of the types of quoted columns of a table or query."""
        types = ", ".join(self._type_of.format(f"r.{column}") for column in columns)
        rows = f"SELECT {', '.join(columns)} FROM {source} AS s {self._sample}"
        # This always has a row.
        (found,) = self.execute(
            f"SELECT {types} FROM (SELECT 1) AS o LEFT JOIN ({rows}) AS r ON 1=1"
        )
        return [str(kind) for kind in found]

    _type_of, _sample = "typeof({})", "WHERE 1 = 0"

    def create_view(self, view: str, query: str) -> None:
        """Create a view by its quoted name; raise an error if the name exists."""
        self.execute(f"CREATE VIEW {view} AS {query}")

    def list_columns(self, table: str) -> list[str] | None:
        """Return the columns of a table by its quoted name; None if only a query can find them.

        Raises
        ------
        InputError
            The table does not exist, or a view cannot read it.
        """
        return None

    def check_free(self, view: str) -> None:
        """Reject the quoted name of a view if it exists; most databases do so on creation.

        Raises
        ------
        InputError
            The name exists.
        """

    def try_view(self, view: str) -> None:
        """Compute a row of a view: some databases look up tables and columns only then."""
        self.execute(f"SELECT * FROM {view} LIMIT 1")

    def take_turns(self) -> None:
        """Wait until other deployments to the database have ended, if it has locks for this."""

    def replace_view(self, view: str, query: str) -> None:
        """Replace the query of a view."""
        self.execute(f"CREATE OR REPLACE VIEW {view} AS {query}")

    @property
    def _columns(self) -> str:
        """Columns of the weights table."""
        raise NotImplementedError

    _options = ""

    def _fill(self, table: str, parts: Sequence[WeightsPart]) -> None:
        raise NotImplementedError

    def _run(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        cursor = self.raw.execute(sql, values)
        return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    def _is_in_transaction(self) -> bool:
        raise NotImplementedError

    @contextmanager
    def _named(self, sql: str) -> Iterator[None]:
        """Convert the driver's errors to a `DatabaseError` that includes the statement."""
        try:
            yield
        except TfdistError:
            raise
        except Exception as error:
            begun = " ".join(sql[:_SHOWN].split())
            raise DatabaseError(f"{self.dialect} rejected {begun} ...: {error}") from error


@dataclass(frozen=True)
class Row:
    """Row of the weights table, with its numbers as comma-separated text."""

    part: str
    place: int
    numbers: str
    is_kernel: bool


def list_rows(parts: Sequence[WeightsPart]) -> Iterator[Row]:
    """Yield all rows of parts."""
    for part in parts:
        for place, numbers in enumerate(part.numbers.astype(np.float32)):
            yield Row(part.name, place, ",".join(map(repr, numbers.tolist())), part.is_kernel)
