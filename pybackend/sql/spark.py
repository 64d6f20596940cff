"""Spark SQL: a query in levels, each with one operation on arrays, without Python on executors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from typing import Any, ClassVar

import numpy as np

from pybackend.core.errors import DatabaseError, InputError
from pybackend.core.words import either
from pybackend.sql import operations as ops
from pybackend.sql.database import LARGEST, Connection, SqlWriter, is_slice, levels_of, number
from pybackend.sql.operations import Array, Graph, Question, WeightsPart


class SparkWriter(SqlWriter):
    first: ClassVar = 0

    def __init__(self, question: Question, has_vectors: bool = False) -> None:
        super().__init__(question, has_vectors)
        # Tables to join at a level, by name, and an array of a row at this level.
        self._tables: dict[str, str] = {}
        self._row_of = ""
        self._lets = 0

    @staticmethod
    def quote(name: str) -> str:
        """Quote a name; `InputError` if Spark would replace a part of it with a setting or a
        variable.
        """
        if "${" in name:
            raise InputError(
                "Spark SQL replaces ${...} with settings and environment variables: "
                f"rename {name!r} (if it comes from a class, pass other `levels`)"
            )
        return "`" + name.replace("`", "``") + "`"

    @staticmethod
    def text(value: str) -> str:
        """Quote a string, as bytes if Spark would read it differently: it replaces ``${env:...}``
        and the like in strings, and the meaning of backslashes depends on a setting.
        """
        if any(sign in value for sign in "$\\'"):
            return f"CAST(X'{value.encode().hex()}' AS STRING)"
        return f"'{value}'"

    def write(self) -> str:
        graph = self.question.graph
        names = {name: self.quote(f"{self.prefix}{n}") for n, name in enumerate(graph.nodes)}
        columns = [f"{value} AS {names[name]}" for name, value in self.select_inputs().items()]
        query = f"SELECT {', '.join([*self.keys, *columns])}\nFROM {self.question.source}"
        for _, node, live in levels_of(graph):
            self._tables, self._row_of = {}, names[node.inputs[0]]
            value = self.emit(node, names)
            live_names = (names[name] for name in live)
            chosen = ", ".join([*self.keys, *live_names, f"{value} AS {names[node.name]}"])
            # Otherwise Spark may sort and store rows with all weights in each of them.
            hint = f"/*+ BROADCAST({', '.join(self._tables)}) */ " if self._tables else ""
            query = f"SELECT {hint}{chosen}\nFROM ({query}){''.join(self._tables.values())}"
        shown = self.show_outputs([names[name] for name in graph.outputs])
        return f"SELECT {', '.join([*self.keys, *shown])}\nFROM ({query})"

    def join_columns(self, columns: Sequence[str]) -> str:
        return f"array({', '.join(f'CAST({column} AS DOUBLE)' for column in columns)})"

    def check_numbers(self, value: str, size: int) -> str:
        finite = f"forall({value}, x -> x BETWEEN -{LARGEST} AND {LARGEST})"
        return (
            f"CASE WHEN size({value}) = {size} AND {finite} THEN CAST({value} AS ARRAY<DOUBLE>) END"
        )

    def best(self, value: str) -> str:
        return f"CAST(array_position({value}, array_max({value})) - 1 AS INT)"

    def name_code(self, code: str, levels: Sequence[str]) -> str:
        return f"get(array({', '.join(map(self.text, levels))}), {code})"

    def _part(self, rows: Array) -> str:
        """Add rows to the weights table; return the name of an array of arrays."""
        alias = f"{self.prefix}p{len(self.parts)}"
        rows_sql = "transform(array_sort(collect_list(struct(place, numbers))), r -> r.numbers)"
        # For a cross join, Spark would copy the weights into thousands of rows before it computes
        # with them. A join on equal numbers, not known to be zeros, looks them up row by row.
        self._tables[f"{alias}_table"] = (
            f"\nJOIN (SELECT {rows_sql} AS {alias}, min(place) * 0 AS {alias}_zero "
            f"FROM {self.weights} WHERE part = {self.add_part(rows)}) AS {alias}_table "
            f"ON {alias}_zero = coalesce(size({self._row_of}) * 0, 0)"
        )
        return alias

    def _row(self, values: Array) -> str:
        return f"{self._part(values[None])}[0]"

    def emit_linear(self, linear: ops.Linear, size: int, x: str) -> str:
        groups, inputs, outputs = linear.kernel.shape
        width, positions = groups * inputs, size // (groups * outputs)
        kernel = self._part(linear.kernel.transpose(0, 2, 1).reshape(-1, inputs))
        bias = self._row(linear.bias.ravel())
        position = "0" if positions == 1 else "q"
        start = f"{position} * {width} + o DIV {outputs} * {inputs} + 1"
        products = f"zip_with(slice({x}, {start}, {inputs}), k, (a, b) -> a * b)"
        total = f"aggregate({products}, CAST({bias}[o] AS DOUBLE), (s, v) -> s + v)"
        found = f"transform({kernel}, (k, o) -> {total})"
        if positions > 1:
            found = f"flatten(transform(sequence(0, {positions - 1}), q -> {found}))"
        return f"CASE WHEN {x} IS NOT NULL THEN {found} END"

    def emit_gather(self, gather: ops.Gather, size: int, x: str) -> str:
        places = gather.places
        if is_slice(places):
            return f"slice({x}, {places[0] + 1}, {len(places)})"
        taken = f"{x}[CAST(i AS INT)]"
        if (places < 0).any():
            taken = f"CASE WHEN i < 0 THEN CAST({number(gather.fill)} AS DOUBLE) ELSE {taken} END"
        found = f"transform({self._row(places)}, i -> {taken})"
        return f"CASE WHEN {x} IS NOT NULL THEN {found} END"

    def each(self, size: int, x: str, formula: Callable[..., str], *vectors: Array) -> str:
        found = formula("x", *(f"{self._row(v)}[i % {v.size}]" for v in vectors))
        return f"transform({x}, (x, i) -> CAST({found} AS DOUBLE))"

    def emit_combine(self, combine: ops.Combine, size: int, *given: str) -> str:
        formula = self.combine(combine.operation, "a", "b")
        return reduce(lambda one, other: f"zip_with({one}, {other}, (a, b) -> {formula})", given)

    def emit_concatenate(self, concatenate: ops.Concatenate, size: int, *given: str) -> str:
        return f"concat({', '.join(given)})"

    def emit_reduce(self, reduce: ops.Reduce, size: int, x: str) -> str:
        part = f"slice({x}, q * {reduce.count} + 1, {reduce.count})"
        if reduce.operation == "sum":
            value = f"aggregate({part}, CAST(0 AS DOUBLE), (s, v) -> s + v)"
        else:
            value = f"array_max({part})"
        found = f"transform(sequence(0, {size - 1}), q -> {value})"
        return f"CASE WHEN {x} IS NOT NULL THEN {found} END"

    def emit_softmax(self, softmax: ops.Softmax, size: int, x: str) -> str:
        powers = f"transform(r, x -> {self.fade('x - m')})"
        total = "aggregate(e, CAST(0 AS DOUBLE), (s, v) -> s + v)"
        shares = let("e", powers, let("s", total, "transform(e, x -> x / s)"))
        shares = let("m", "array_max(r)", shares)
        if softmax.count == size:
            return let("r", x, shares)
        part = f"slice({x}, q * {softmax.count} + 1, {softmax.count})"
        last = size // softmax.count - 1
        found = f"flatten(transform(sequence(0, {last}), q -> {let('r', part, shares)}))"
        return f"CASE WHEN {x} IS NOT NULL THEN {found} END"

    def emit_lookup(self, lookup: ops.Lookup, size: int, x: str) -> str:
        table = self._part(lookup.table)
        known = f"array_min({x}) > -1 AND array_max({x}) < {len(lookup.table)}"
        found = f"flatten(transform({x}, i -> {table}[CAST(i AS INT)]))"
        return f"CASE WHEN {known} THEN CAST({found} AS ARRAY<DOUBLE>) END"

    def emit_fold(self, fold: ops.Fold, size: int, x: str) -> str:
        width = fold.graph.nodes["part"].size
        depth, self._lets = self._lets, self._lets + 1
        state, step = f"s{depth}", f"t{depth}"
        last = f"slice({state}, -{fold.state}, {fold.state})" if fold.keeps_all else state
        part = f"slice({x}, {step} * {width} + 1, {width})"
        body = self._emit_lets(fold.graph, {"state": last, "part": part})
        if fold.keeps_all:
            body = f"concat({state}, {body})"
        zeros = f"CAST(array_repeat(0, {fold.state}) AS ARRAY<DOUBLE>)"
        steps = f"sequence(0, {fold.steps - 1})"
        found = f"aggregate({steps}, {zeros}, ({state}, {step}) -> {body})"
        if fold.keeps_all:  # the first state is the initial one
            part = f"slice(r, q * {fold.state} + 1, {fold.shown})"
            parts = f"flatten(transform(sequence(1, {fold.steps}), q -> {part}))"
            found = let("r", found, parts)
        elif fold.shown < fold.state:
            found = f"slice({found}, 1, {fold.shown})"
        return f"CASE WHEN {x} IS NOT NULL THEN {found} END"

    def _emit_lets(self, graph: Graph, inputs: Mapping[str, str]) -> str:
        """Return a graph as one expression, in which values that are used twice have names.

        Each name nests the rest one level deeper, and Spark resolves about fifty levels of a query.
        """
        depth, self._lets = self._lets, self._lets + 1
        uses = [name for node in graph.nodes.values() for name in node.inputs]
        names = dict(inputs)
        steps = []
        for node in graph.nodes.values():
            if node.operation is None:
                continue
            value = self.emit(node, names)
            takers = [n.operation for n in graph.nodes.values() if node.name in n.inputs]
            if uses.count(node.name) == 1 and _names_once(takers[0]):
                names[node.name] = value
                continue
            names[node.name] = f"v{depth}_{node.name}"
            steps.append((names[node.name], value))
        body = names[graph.outputs[0]]
        for name, value in reversed(steps):
            body = value if body == name else let(name, value, body)
        return body

    @staticmethod
    def array_of(values: Array) -> str:
        """Return an array literal of doubles: plain numbers are decimals in Spark."""
        return f"array({', '.join(f'CAST({float(x)!r} AS DOUBLE)' for x in values)})"


def _names_once(operation: object) -> bool:
    """Return whether the SQL for an operation uses its input once, not once per number."""
    if isinstance(operation, ops.Gather):
        return is_slice(operation.places)
    return isinstance(operation, (ops.Map, ops.Scale, ops.Slope, ops.Combine, ops.Concatenate))


def let(name: str, value: str, body: str) -> str:
    """Return an expression in which a name stands for a value that is computed once per row."""
    return f"element_at(transform(array({value}), {name} -> {body}), 1)"


class SparkConnection(Connection):
    """Spark session, classic or Connect; after a failure, changes are undone one by one."""

    dialect, writer = "spark", SparkWriter
    text_type, double_type = "string", "double"

    def __init__(self, raw: Any) -> None:
        super().__init__(raw)
        self._undo: list[str] = []

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Undo each statement after a failure, because Spark has no transactions."""
        self._undo.clear()
        try:
            yield
        except BaseException:
            for statement in reversed(self._undo):
                with suppress(DatabaseError):
                    self.execute(statement)
            raise

    def types_of(self, source: str, columns: Sequence[str]) -> list[str]:
        """Return the types, which Spark knows without running a job."""
        query = f"SELECT {', '.join(columns)} FROM {source}"
        with self._named(query):
            return [kind for _, kind in self.raw.sql(query).dtypes]

    def list_columns(self, table: str) -> list[str]:
        """Look the table up in the catalog, because a failed query would print Spark's log."""
        if table.startswith("("):
            return list(self.raw.sql(f"SELECT * FROM {table}").columns)
        with self._named(f"DESCRIBE {table}"):
            if not self.raw.catalog.tableExists(table):
                raise InputError(f"`table`: Spark has no table or view {table}")
            if self.raw.catalog.getTable(table).isTemporary:
                in_r = "sparklyr::spark_write_table(data, name)"
                raise InputError(
                    f"`table`: {table} is a temporary view, which no other view can read: write "
                    f"its rows into a table, with {either('df.write.saveAsTable(name)', in_r)}"
                )
            return list(self.raw.table(table).columns)

    def check_free(self, view: str) -> None:
        """Look the name up now: Spark would find it only seconds later, after the weights."""
        with self._named(f"DESCRIBE {view}"):
            if self.raw.catalog.tableExists(view):
                raise InputError(
                    f"`name`: a table or view {view} already exists in Spark: choose another name"
                )

    def create_weights(self, table: str, parts: Sequence[WeightsPart]) -> None:
        self._undo.append(f"DROP TABLE IF EXISTS {table}")
        with self._named("CREATE TABLE"):
            self._make_frame(parts).write.saveAsTable(table)

    def keep_weights(self, table: str, parts: Sequence[WeightsPart]) -> None:
        self._make_frame(parts).createOrReplaceTempView(table.strip("`"))

    def _make_frame(self, parts: Sequence[WeightsPart]) -> Any:
        rows = [
            (part.name, place, row.tolist())
            for part in parts
            for place, row in enumerate(part.numbers.astype(np.float64))
        ]
        schema = "part string, place int, numbers array<double>"
        return self.raw.createDataFrame(rows, schema).coalesce(1)

    def create_view(self, view: str, query: str) -> None:
        super().create_view(view, query)
        self._undo.append(f"DROP VIEW IF EXISTS {view}")

    def replace_view(self, view: str, query: str) -> None:
        before = self.execute(f"SHOW CREATE TABLE {view}")[0][0]
        super().replace_view(view, query)
        self._undo.append(before.replace("CREATE VIEW", "CREATE OR REPLACE VIEW", 1))

    def _run(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.raw.sql(sql, args=list(values) or None).collect()]
