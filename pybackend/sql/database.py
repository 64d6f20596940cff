"""Writer of queries and connection: what each database provides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import numpy as np

from pybackend.core.errors import DatabaseError, InputError, TfdistError
from pybackend.sql import operations as ops
from pybackend.sql.operations import Array, Node, Question, Shown, WeightsPart

# Characters of a statement that errors show.
_SHOWN = 60
# Largest exponent of e that fits into a float32. PostgreSQL raises an error for larger ones.
_MOST = 88.72
# The largest number of float32.
LARGEST = 3.4028234663852886e38
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def number(value: float) -> str:
    """Return a number for any dialect of SQL, with all its digits."""
    text = repr(float(value))
    return f"({text})" if text.startswith("-") else text


def _bend(w: SqlWriter, x: str, scale: str, alpha: str) -> str:
    below = f"{scale} * {alpha} * ({w.fade(x)} - 1)"
    return f"CASE WHEN {x} > 0 THEN {scale} * {x} ELSE {below} END"


def _softplus(w: SqlWriter, x: str) -> str:
    return f"({w.at_least(x, 0)} + ln(1 + {w.fade(f'-abs({x})')}))"


# Coefficients of the error function, in powers of 1 / (1 + p |x|); error below 1.5e-7 (Abramowitz
# and Stegun 1964, formula 7.1.26).
_ERF_P = 0.3275911
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def _gelu(w: SqlWriter, x: str) -> str:
    """Return a number times the normal distribution function of that number."""
    t = f"(1 / (1 + {number(_ERF_P / 2**0.5)} * abs({x})))"
    powers = number(_ERF[0])
    for coefficient in _ERF[1:]:
        powers = f"({powers} * {t} + {number(coefficient)})"
    tail = f"0.5 * {powers} * {t} * {w.fade(f'-0.5 * {x} * {x}')}"
    return f"{x} * (CASE WHEN {x} > 0 THEN 1 - {tail} ELSE {tail} END)"


# Functions of one number, by Keras's names, as SQL that does not overflow. The number is a name, or
# in parentheses.
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
    inputs, and returns SQL that is NULL if an input is. ``has_vectors``: PostgreSQL's weights table
    has a column ``kernel`` of pgvector's type.
    """

    # Functions of several numbers, and of the numbers of an array.
    greatest, least = "greatest", "least"
    aggregates: ClassVar = {"sum": "sum", "maximum": "max"}
    # Position of an array's first number.
    first: ClassVar = 1

    def __init__(self, question: Question, has_vectors: bool = False) -> None:
        self.question = question
        self.has_vectors = has_vectors
        self.parts: list[WeightsPart] = []
        self.prefix = ops.free_prefix(question.keys)
        self.keys = [self.quote(name) for name in question.keys]
        self.weights = self.quote(question.weights)

    @staticmethod
    def quote(name: str) -> str:
        return '"' + name.replace('"', '""') + '"'

    @staticmethod
    def text(value: str) -> str:
        return "'" + value.replace("'", "''") + "'"

    @staticmethod
    def array_of(values: Array) -> str:
        """Return an array literal; Oracle has none."""
        return f"[{', '.join(map(number, values))}]"

    @abstractmethod
    def write(self) -> str:
        """Return the query; add the rows of the weights table that it needs to ``parts``."""

    @abstractmethod
    def best(self, value: str) -> str:
        """Return the position of an array's largest number, from 0."""

    @abstractmethod
    def each(self, size: int, x: str, formula: Callable[..., str], *vectors: Array) -> str:
        """Apply a formula to each number of an array, and to those of vectors that repeat."""

    def select_inputs(self) -> dict[str, str]:
        """Return SQL for each input, which is NULL in rows without all of its numbers."""
        found = {}
        for node in self.question.graph.inputs:
            given = self.question.features[node.name]
            if isinstance(given, str):
                value = self.column(given)
            else:
                value = self.join_columns([self.column(name) for name in given])
            found[node.name] = self.check_numbers(value, node.size)
        return found

    def column(self, name: str) -> str:
        return self.quote(name)

    def join_columns(self, columns: Sequence[str]) -> str:
        """Return an array of the numbers in columns."""
        raise NotImplementedError

    def check_numbers(self, value: str, size: int) -> str:
        """Return an array that is NULL unless it has this many finite numbers of float32."""
        raise NotImplementedError

    def emit(self, node: Node, names: Mapping[str, str]) -> str:
        emit: Callable[..., str] = getattr(self, f"emit_{type(node.operation).__name__.lower()}")
        return emit(node.operation, node.size, *(names[name] for name in node.inputs))

    def add_part(self, rows: Array, is_kernel: bool = False) -> str:
        """Add rows to the weights table; return their name, in quotes."""
        name = f"p{len(self.parts)}"
        self.parts.append(WeightsPart(name, rows, is_kernel))
        return self.text(name)

    def emit_map(self, function: ops.Map, size: int, x: str) -> str:
        constants = [number(c) for c in function.constants]
        return self.each(size, x, lambda x: FORMULAS[function.function](self, x, *constants))

    def emit_scale(self, scale: ops.Scale, size: int, x: str) -> str:
        if scale.factor.size == 1:
            factor, shift = number(scale.factor[0]), number(scale.shift[0])
            return self.each(size, x, lambda x: f"{x} * {factor} + {shift}")
        return self.each(size, x, "{} * {} + {}".format, scale.factor, scale.shift)

    def emit_slope(self, slope: ops.Slope, size: int, x: str) -> str:
        formula = "CASE WHEN {0} > 0 THEN {0} ELSE {0} * {1} END"
        return self.each(size, x, formula.format, slope.factor)

    def combine(self, operation: str, *terms: str) -> str:
        if operation in _SIGNS:
            return _SIGNS[operation].join(terms)
        function = {"maximum": self.greatest, "minimum": self.least}[operation]
        return f"{function}({', '.join(terms)})"

    def at_most(self, x: str, most: object) -> str:
        return f"{self.least}({x}, {most})"

    def at_least(self, x: str, least: object) -> str:
        return f"{self.greatest}({x}, {least})"

    def clip(self, x: str, least: float, most: float) -> str:
        return self.at_least(self.at_most(x, most), least)

    def exp(self, x: str) -> str:
        """Return e to the power of a number of any size."""
        return f"exp({self.clip(x, -_MOST, _MOST)})"

    def fade(self, x: str) -> str:
        """Return e to the power of a number that is not positive."""
        return f"exp({self.at_least(x, -_MOST)})"

    def show_outputs(self, values: Sequence[str]) -> list[str]:
        """Return the columns of the result, from SQL for each of the graph's outputs."""
        sizes = [self.question.graph.nodes[name].size for name in self.question.graph.outputs]
        return [
            f"{self.show(c, values[c.output], sizes[c.output])} AS {self.quote(c.name)}"
            for c in self.question.shown
        ]

    def show(self, column: Shown, value: str, size: int) -> str:
        if column.is_class:
            return self.show_class(value, size, column.levels)
        if column.index is None and size > 1:
            return value
        index = column.index or 0
        shown = self.item(value, max(index, 0))
        return f"1 - {shown}" if index < 0 else shown

    def item(self, value: str, place: int) -> str:
        """Return SQL for a number of an array, by its position from 0."""
        return f"{value}[{place + self.first}]"

    def show_class(self, value: str, size: int, levels: Sequence[str] | None) -> str:
        """Return SQL for the class of an output: its name, or its code if there are no names."""
        only = self.item(value, 0)
        likely = f"CASE WHEN {only} > 0.5 THEN 1 WHEN {only} IS NOT NULL THEN 0 END"
        code = likely if size == 1 else self.best(value)
        return code if levels is None else self.name_code(code, levels)

    def name_code(self, code: str, levels: Sequence[str]) -> str:
        cases = " ".join(f"WHEN {n} THEN {self.text(level)}" for n, level in enumerate(levels))
        return f"CASE {code} {cases} END"


def levels_of(graph: ops.Graph) -> Iterator[tuple[int, Node, list[str]]]:
    """Yield place and node of each operation, and the values before it that are needed after it."""
    last_uses: dict[str, int] = {}
    for place, node in enumerate(graph.nodes.values()):
        last_uses |= dict.fromkeys([node.name, *node.inputs], place)
    last_uses |= dict.fromkeys(graph.outputs, len(graph.nodes))
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


def kernel_rows(linear: ops.Linear) -> Array:
    """Return the weight of each input number i for each output number o of its group."""
    groups, inputs, outputs = linear.kernel.shape
    i, o = np.indices((groups * inputs, outputs))
    o = o + i // inputs * outputs
    return np.stack([i.ravel(), o.ravel(), linear.kernel.ravel()], axis=1)


def place_rows(places: Array) -> Array:
    """Return for each number o of a result its position i in the array."""
    return np.stack([places, np.arange(len(places)), np.zeros(len(places))], axis=1)


class Connection:
    """Connection of a driver that follows Python's database API (PEP 249). Its errors become a
    `DatabaseError` that includes the statement. Tables and views are given by their quoted names.
    """

    dialect: str
    writer: type[SqlWriter]
    has_vectors = False
    text_type, double_type = "text", "double precision"
    _columns: str  # of the weights table, in parentheses, and its options
    _type_of, _sample = "typeof({})", "WHERE 1 = 0"

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def quote(self, name: str) -> str:
        return self.writer.quote(name)

    def check(self) -> None:
        """Raise `InputError` if the database is too old for the queries."""

    def execute(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement with values for its question marks, and return its rows."""
        with self._named(sql):
            return self._run(sql, values)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run statements of which all take effect, or none; `InputError` within a transaction."""
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
        self.execute(f"CREATE TABLE {table} {self._columns}")
        self._fill(table, parts)

    def keep_weights(self, table: str, parts: Sequence[WeightsPart]) -> None:
        """Create a weights table that only this connection can see, unless it exists."""
        self.execute(f"CREATE TEMPORARY TABLE IF NOT EXISTS {table} {self._columns}")
        if not self.execute(f"SELECT 1 FROM {table} LIMIT 1"):
            self._fill(table, parts)

    def types_of(self, source: str, columns: Sequence[str]) -> list[str]:
        """Return the names of the types of quoted columns of a table or query."""
        # An outer join has a row even if the table has none, and reads no row of a large table.
        types = ", ".join(self._type_of.format(f"r.{column}") for column in columns)
        rows = f"SELECT {', '.join(columns)} FROM {source} AS s {self._sample}"
        query = f"SELECT {types} FROM (SELECT 1) AS o LEFT JOIN ({rows}) AS r ON 1=1"
        return list(map(str, self.execute(query)[0]))

    def create_view(self, view: str, query: str) -> None:
        """Create a view; raise an error if the name exists."""
        self.execute(f"CREATE VIEW {view} AS {query}")

    def list_columns(self, table: str) -> list[str] | None:
        """Return the columns of a table, or None if only a query can find them. `InputError`: it
        does not exist, or a view cannot read it.
        """
        return None

    def check_free(self, view: str) -> None:
        """Raise `InputError` if a view exists; most databases do so only on creation."""

    def try_view(self, view: str) -> None:
        """Compute a row of a view: some databases look up tables and columns only then."""
        self.execute(f"SELECT * FROM {view} LIMIT 1")

    def take_turns(self) -> None:
        """Wait until other deployments to the database have ended, if it has locks for this."""

    def replace_view(self, view: str, query: str) -> None:
        self.execute(f"CREATE OR REPLACE VIEW {view} AS {query}")

    def _fill(self, table: str, parts: Sequence[WeightsPart]) -> None:
        raise NotImplementedError

    def _run(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        return read_rows(self.raw.execute(sql, values))

    def _is_in_transaction(self) -> bool:
        raise NotImplementedError

    @contextmanager
    def _named(self, sql: str) -> Iterator[None]:
        try:
            yield
        except TfdistError:
            raise
        except Exception as error:
            begun = " ".join(sql[:_SHOWN].split())
            raise DatabaseError(f"{self.dialect} rejected {begun} ...: {error}") from error


def read_rows(cursor: Any) -> list[tuple[Any, ...]]:
    """Return the rows of a cursor; none if its statement returns no table."""
    return [tuple(row) for row in cursor.fetchall()] if cursor.description else []


def list_rows(parts: Sequence[WeightsPart]) -> Iterator[tuple[str, int, str, bool]]:
    """Yield part, place, numbers as comma-separated text, and ``is_kernel`` of each row."""
    for part in parts:
        for place, numbers in enumerate(part.numbers.astype(np.float32)):
            yield part.name, place, ",".join(map(repr, numbers.tolist())), part.is_kernel
