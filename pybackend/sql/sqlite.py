"""SQLite: common table expressions, each with one operation on arrays as JSON text.

``MATERIALIZED`` prevents SQLite from recomputing a value each time it is used. The weights table
has a row per number: the weight of input number ``i`` for output number ``o``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import repeat

import numpy as np

from pybackend.core.errors import DatabaseError, InputError
from pybackend.sql import operations as ops
from pybackend.sql.database import (
    LARGEST,
    Connection,
    SqlWriter,
    is_slice,
    kernel_rows,
    levels_of,
    matrix_rows,
    number,
    place_rows,
)
from pybackend.sql.operations import Array, Graph, Question, WeightsPart

_MATHEMATICAL = {"exp": math.exp, "ln": math.log, "sqrt": math.sqrt, "tanh": math.tanh}
# Maximum number of a function's arguments.
_MOST_ARGUMENTS = 100


class SqliteWriter(SqlWriter):
    greatest, least = "max", "min"

    def __init__(self, question: Question, has_vectors: bool = False) -> None:
        super().__init__(question, has_vectors)
        self._count = 0
        self._source = f"{self.prefix}r"

    @staticmethod
    def quote(name: str) -> str:
        """Quote a name, but not in double quotes, in which SQLite treats unknown names as text."""
        return "`" + name.replace("`", "``") + "`"

    def write(self) -> str:
        graph, origin = self.question.graph, f"{self.question.source} AS {self._source}"
        levels, last, names = self._write_levels(graph, self.keys, origin, self.select_inputs())
        shown = self.show_outputs([names[name] for name in graph.outputs])
        return f"WITH {levels}\nSELECT {', '.join([*self.keys, *shown])} FROM {last}"

    def column(self, name: str) -> str:
        # JSON functions have columns of their own, such as `value`.
        return f"{self._source}.{self.quote(name)}"

    def join_columns(self, columns: Sequence[str]) -> str:
        parts = [
            f"trim(json_array({', '.join(columns[start : start + _MOST_ARGUMENTS])}), '[]')"
            for start in range(0, len(columns), _MOST_ARGUMENTS)
        ]
        return " || ".join(["'['", " || ',' || ".join(parts), "']'"])

    def check_numbers(self, value: str, size: int) -> str:
        finite = f"type IN ('integer', 'real') AND value BETWEEN -{LARGEST} AND {LARGEST}"
        numbers = f"SELECT count(*) FROM json_each({value}) WHERE {finite}"
        whole = f"json_valid({value}) AND json_array_length({value}) = {size}"
        return f"CASE WHEN {whole} AND ({numbers}) = {size} THEN {value} END"

    def item(self, value: str, place: int) -> str:
        return f"json_extract({value}, '$[{place}]')"

    def best(self, value: str) -> str:
        return f"(SELECT key FROM json_each({value}) ORDER BY value DESC, key LIMIT 1)"

    def _write_levels(
        self, graph: Graph, kept: list[str], source: str, inputs: Mapping[str, str]
    ) -> tuple[str, str, dict[str, str]]:
        """Return table expressions in order, the name of the last one, and the values' names.

        All levels have the columns ``kept`` of the relation ``source``, which may be empty;
        ``inputs`` is SQL for the graph's inputs in it.
        """
        columns = {name: self._new() for name in inputs}
        first = [*kept, *(f"{value} AS {columns[name]}" for name, value in inputs.items())]
        previous = self._new()
        origin = f" FROM {source}" if source else ""
        levels = [f"{previous} AS MATERIALIZED (SELECT {', '.join(first)}{origin})"]
        for _, node, live in levels_of(graph):
            value = self.emit(node, columns)
            columns[node.name] = self._new()
            chosen = [*kept, *(columns[name] for name in live), f"{value} AS {columns[node.name]}"]
            level = self._new()
            levels.append(f"{level} AS MATERIALIZED (SELECT {', '.join(chosen)} FROM {previous})")
            previous = level
        return ",\n".join(levels), previous, columns

    def _new(self) -> str:
        self._count += 1
        return f"{self.prefix}{self._count}"

    def _join(self, part: str, place: str, alias: str = "w") -> str:
        chosen = f"{alias}.part = {part} AND {alias}.i = {place}"
        return f"CROSS JOIN {self.weights} AS {alias} ON {chosen}"

    def _add_matrix(self, numbers: Array) -> str:
        return self.add_part(matrix_rows(numbers))

    def emit_linear(self, linear: ops.Linear, size: int, x: str) -> str:
        groups, inputs, outputs = linear.kernel.shape
        width, positions = groups * inputs, size // (groups * outputs)
        kernel = self.add_part(kernel_rows(linear))
        products = (
            f"SELECT u.key / {width} AS p, w.o AS o, u.value * w.x AS x FROM json_each({x}) AS u "
            f"{self._join(kernel, f'u.key % {width}')} WHERE u.value <> 0"
        )
        starts = ",".join(map(str, range(positions)))
        biases = (
            f"SELECT q.value, w.o, w.x FROM json_each('[{starts}]') AS q "
            f"{self._join(self._add_matrix(linear.bias.reshape(1, -1)), '0')}"
        )
        terms = f"({products} UNION ALL {biases})"
        return self._collect(x, f"SELECT sum(x) AS x FROM {terms} GROUP BY p, o ORDER BY p, o")

    def _collect(self, x: str, rows: str) -> str:
        """Collect a query's numbers into an array, in the query's order."""
        return f"CASE WHEN {x} IS NOT NULL THEN (SELECT json_group_array(x) FROM ({rows})) END"

    def emit_gather(self, gather: ops.Gather, size: int, x: str) -> str:
        places = gather.places
        if is_slice(places):
            inside = f"u.key BETWEEN {places[0]} AND {places[-1]}"
            rows = f"SELECT u.value AS x FROM json_each({x}) AS u WHERE {inside} ORDER BY u.key"
            return self._collect(x, rows)
        part = self.add_part(place_rows(places))
        joined = self._join(part, "u.key")
        taken = f"SELECT w.o AS o, u.value AS x FROM json_each({x}) AS u {joined}"
        if (places < 0).any():
            outside = f"FROM {self.weights} AS w WHERE w.part = {part} AND w.i = -1"
            taken = f"{taken} UNION ALL SELECT w.o, {number(gather.fill)} {outside}"
        return self._collect(x, f"SELECT x FROM ({taken}) ORDER BY o")

    def each(self, size: int, x: str, formula: Callable[..., str], *vectors: Array) -> str:
        # Without the cast, integers would be divided as integers.
        rows = f"(SELECT u.key, CAST(u.value AS REAL) AS value FROM json_each({x}) AS u) AS u"
        names = ["u.value"]
        for vector, alias in zip(vectors, "ab", strict=False):
            part = self._add_matrix(vector[:, None])
            rows += f" {self._join(part, f'u.key % {vector.size}', alias)}"
            names.append(f"{alias}.x")
        return self._collect(x, f"SELECT {formula(*names)} AS x FROM {rows} ORDER BY u.key")

    def emit_combine(self, combine: ops.Combine, size: int, *given: str) -> str:
        columns = [f"max(CASE WHEN n = {n} THEN x END)" for n in range(len(given))]
        formula = self.combine(combine.operation, *columns)
        rows = f"SELECT {formula} AS x FROM ({self._stack(given)}) GROUP BY key ORDER BY key"
        return self._collect(" + ".join(given), rows)

    def _stack(self, given: tuple[str, ...]) -> str:
        return " UNION ALL ".join(
            f"SELECT {n} AS n, u.key AS key, u.value AS x FROM json_each({x}) AS u"
            for n, x in enumerate(given)
        )

    def emit_concatenate(self, concatenate: ops.Concatenate, size: int, *given: str) -> str:
        rows = f"SELECT x FROM ({self._stack(given)}) ORDER BY n, key"
        return self._collect(" + ".join(given), rows)

    def emit_reduce(self, reduce: ops.Reduce, size: int, x: str) -> str:
        value, group = f"{self.aggregates[reduce.operation]}(u.value)", f"u.key / {reduce.count}"
        rows = f"SELECT {value} AS x FROM json_each({x}) AS u GROUP BY {group} ORDER BY {group}"
        return self._collect(x, rows)

    def emit_softmax(self, softmax: ops.Softmax, size: int, x: str) -> str:
        group = f"u.key / {softmax.count}"
        largest = f"max(u.value) OVER (PARTITION BY {group})"
        powers = (
            f"SELECT u.key AS key, {group} AS g, {self.fade(f'u.value - {largest}')} AS e "
            f"FROM json_each({x}) AS u"
        )
        shares = f"SELECT e / sum(e) OVER (PARTITION BY g) AS x FROM ({powers}) ORDER BY key"
        return self._collect(x, shares)

    def emit_lookup(self, lookup: ops.Lookup, size: int, x: str) -> str:
        joined = self._join(self._add_matrix(lookup.table), "CAST(u.value AS INTEGER)")
        rows = f"SELECT w.x AS x FROM json_each({x}) AS u {joined} ORDER BY u.key, w.o"
        wrong = f"u.value <= -1 OR u.value >= {len(lookup.table)}"
        known = f"NOT EXISTS (SELECT 1 FROM json_each({x}) AS u WHERE {wrong})"
        return f"CASE WHEN {known} THEN {self._collect(x, rows)} END"

    def emit_fold(self, fold: ops.Fold, size: int, x: str) -> str:
        width = fold.graph.nodes["part"].size
        name = self._new()
        inside = f"u.key >= {name}.t * {width} AND u.key < ({name}.t + 1) * {width}"
        part = (
            f"(SELECT json_group_array(x) FROM (SELECT u.value AS x FROM json_each({x}) AS u "
            f"WHERE {inside} ORDER BY u.key))"
        )
        inputs = {"state": f"{name}.s", "part": part}
        levels, last, names = self._write_levels(fold.graph, [], "", inputs)
        step = f"(WITH {levels} SELECT {names[fold.graph.outputs[0]]} FROM {last})"
        zeros = ",".join(["0.0"] * fold.state)
        steps = (
            f"WITH RECURSIVE {name}(t, s) AS (SELECT 0, '[{zeros}]' UNION ALL "
            f"SELECT {name}.t + 1, {step} FROM {name} WHERE {name}.t < {fold.steps}) "
        )
        chosen = f"{name}.t > 0" if fold.keeps_all else f"{name}.t = {fold.steps}"
        shown = (
            f"SELECT u.value AS x FROM {name} CROSS JOIN json_each({name}.s) AS u "
            f"WHERE {chosen} AND u.key < {fold.shown} ORDER BY {name}.t, u.key"
        )
        found = f"({steps}SELECT json_group_array(x) FROM ({shown}))"
        return f"CASE WHEN {x} IS NOT NULL THEN {found} END"

    @staticmethod
    def array_of(values: Array) -> str:
        return f"'[{', '.join(repr(float(x)) for x in values)}]'"


class SqliteConnection(Connection):
    dialect, writer = "sqlite", SqliteWriter
    _columns = "(part TEXT, i INTEGER, o INTEGER, x REAL, PRIMARY KEY (part, i, o)) WITHOUT ROWID"
    # In SQLite, values have types; columns do not.
    _sample = "LIMIT 1"

    def check(self) -> None:
        version = self.execute("SELECT sqlite_version()")[0][0]
        if tuple(map(int, version.split("."))) < (3, 38):
            raise InputError(f"SQLite must be 3.38 or newer, not {version}")
        self._add_functions()

    def _add_functions(self) -> None:
        """Add mathematical functions, which the SQLite in TensorFlow lacks."""
        for name, function in _MATHEMATICAL.items():
            with suppress(DatabaseError):
                self.execute(f"SELECT {name}(1.0)")
                continue
            self.raw.create_function(name, 1, function, deterministic=True)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        # Otherwise Python begins and ends transactions implicitly.
        before = self.raw.isolation_level
        if not self._is_in_transaction():
            self.raw.isolation_level = None
        try:
            with super().transaction():
                yield
        finally:
            self.raw.isolation_level = before

    def _fill(self, table: str, parts: Sequence[WeightsPart]) -> None:
        insert = f"INSERT INTO {table} VALUES (?, ?, ?, ?)"
        for part in parts:
            places = part.numbers[:, :2].astype(np.int64).T.tolist()
            numbers = part.numbers[:, 2].tolist()
            with self._named(insert):
                self.raw.executemany(insert, zip(repeat(part.name), *places, numbers))

    def try_view(self, view: str) -> None:
        """Only plan the query: SQLite would compute all rows before it returns one."""
        self.execute(f"EXPLAIN SELECT * FROM {view}")

    def replace_view(self, view: str, query: str) -> None:
        self.execute(f"DROP VIEW IF EXISTS {view}")
        self.create_view(view, query)

    def _is_in_transaction(self) -> bool:
        return bool(self.raw.in_transaction)
