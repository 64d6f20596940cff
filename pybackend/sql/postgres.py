"""PostgreSQL: lateral subqueries, each with one operation on arrays.

The query computes each row separately, so a condition on its key is applied before anything is
computed. ``OFFSET 0`` prevents PostgreSQL from recomputing a value each time it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from pybackend.core.errors import DatabaseError, InputError
from pybackend.sql import operations as ops
from pybackend.sql.database import (
    LARGEST,
    Connection,
    SqlWriter,
    is_slice,
    list_rows,
    number,
    read_rows,
)
from pybackend.sql.operations import Array, Graph, Question, WeightsPart

# Number of an advisory lock in PostgreSQL: any that other applications do not use.
_TURN = 7_306_372_281_559_187_053
# Privileges on a view in PostgreSQL.
_GRANTS = (
    "SELECT CASE g.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(g.grantee)) END, "
    "g.privilege_type, g.is_grantable FROM pg_class AS c CROSS JOIN aclexplode(c.relacl) AS g "
    "WHERE c.oid = to_regclass(?)"
)


class PostgresWriter(SqlWriter):
    @staticmethod
    def text(value: str) -> str:
        """Quote a string, independently of the server's setting for backslashes."""
        quoted = "'" + value.replace("'", "''") + "'"
        return " E" + quoted.replace("\\", "\\\\") if "\\" in value else quoted

    def __init__(self, question: Question, has_vectors: bool = False) -> None:
        super().__init__(question, has_vectors)
        self._levels = 0
        self._source = f"{self.prefix}r"

    def write(self) -> str:
        levels, names = self._write_levels(self.question.graph, self.select_inputs())
        shown = self.show_outputs([names[name] for name in self.question.graph.outputs])
        columns = [*(f"{self._source}.{key}" for key in self.keys), *shown]
        source = f"{self.question.source} AS {self._source}"
        return f"SELECT {', '.join(columns)}\nFROM {source}{levels}"

    def column(self, name: str) -> str:
        value, kind = f"{self._source}.{self.quote(name)}", self.question.casts.get(name)
        return value if kind is None else f"CAST({value} AS {kind})"

    def join_columns(self, columns: Sequence[str]) -> str:
        return f"ARRAY[{', '.join(columns)}]"

    def check_numbers(self, value: str, size: int) -> str:
        value = f"CAST({value} AS double precision[])"
        numbers = f"SELECT count(*) FROM unnest({value}) AS u(x)"
        finite = f"{numbers} WHERE u.x BETWEEN -{LARGEST} AND {LARGEST}"
        whole = f"cardinality({value}) = {size} AND ({finite}) = {size}"
        # Arrays may have several dimensions, or other lower bounds than 1.
        flat = f"SELECT u.x FROM unnest({value}) WITH ORDINALITY AS u(x, i) ORDER BY u.i"
        usual = f"WHEN array_dims({value}) = '[1:{size}]' THEN {value}"
        return f"CASE WHEN {whole} THEN CASE {usual} ELSE ARRAY({flat}) END END"

    def best(self, value: str) -> str:
        return f"array_position({value}, (SELECT max(x) FROM unnest({value}) AS u(x))) - 1"

    def name_code(self, code: str, levels: Sequence[str]) -> str:
        return f"(ARRAY[{', '.join(map(self.text, levels))}])[{code} + 1]"

    def _write_levels(self, graph: Graph, inputs: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        """Return lateral subqueries for all values of a graph, and the names of the values."""
        names: dict[str, str] = {}
        levels = ""
        for node in graph.nodes.values():
            is_input = node.operation is None
            value = inputs[node.name] if is_input else self.emit(node, names)
            level = f"{self.prefix}{self._levels}"
            self._levels += 1
            levels += f"\nCROSS JOIN LATERAL (SELECT {value} AS v OFFSET 0) AS {level}"
            names[node.name] = f"{level}.v"
        return levels, names

    def _row(self, values: Array) -> str:
        part = self.add_part(values[None])
        return f"(SELECT w.numbers FROM {self.weights} AS w WHERE w.part = {part})"

    def emit_linear(self, linear: ops.Linear, size: int, x: str) -> str:
        groups, inputs, outputs = linear.kernel.shape
        bias = self._row(linear.bias.ravel())
        width = groups * inputs
        if self.has_vectors and groups == 1 and size == outputs:
            part = f"w.part = {self.add_part(linear.kernel[0].T, is_kernel=True)}"
            products = f"-(w.kernel <#> CAST({x} AS vector))"
            found = (
                f"SELECT array_agg({products} + b.x ORDER BY w.place) FROM {self.weights} AS w "
                f"JOIN unnest({bias}) WITH ORDINALITY AS b(x, o) ON b.o = w.place + 1 WHERE {part}"
            )
            return f"CASE WHEN {x} IS NOT NULL THEN ({found}) END"
        # The table has a row for each input number: its weights for the outputs of its group.
        part = f"w.part = {self.add_part(linear.kernel.reshape(width, outputs))}"
        place = f"(u.i - 1) % {width}"
        out = f"(w.place / {inputs}) * {outputs} + k.o" if groups > 1 else "k.o"
        sums = (
            f"SELECT (u.i - 1) / {width} AS p, {out} AS o, sum(u.x * k.x) AS s "
            f"FROM unnest({x}) WITH ORDINALITY AS u(x, i) "
            f"JOIN {self.weights} AS w ON {part} AND w.place = {place} "
            f"CROSS JOIN LATERAL unnest(w.numbers) WITH ORDINALITY AS k(x, o) "
            f"WHERE u.x <> 0 GROUP BY 1, 2"
        )
        positions = size // (groups * outputs)
        found = (
            f"SELECT array_agg(b.x + coalesce(s.s, 0) ORDER BY q.p, b.o) "
            f"FROM generate_series(0, {positions - 1}) AS q(p) "
            f"CROSS JOIN unnest({bias}) WITH ORDINALITY AS b(x, o) "
            f"LEFT JOIN ({sums}) AS s ON s.p = q.p AND s.o = b.o"
        )
        return f"CASE WHEN {x} IS NOT NULL THEN ({found}) END"

    def emit_gather(self, gather: ops.Gather, size: int, x: str) -> str:
        places = gather.places
        if is_slice(places):
            return f"({x})[{places[0] + 1}:{places[0] + len(places)}]"
        number_at = f"({x})[CAST(g.x AS integer) + 1]"
        if (places < 0).any():
            number_at = f"CASE WHEN g.x < 0 THEN {number(gather.fill)} ELSE {number_at} END"
        rows = f"unnest({self._row(places.astype(np.float64))}) WITH ORDINALITY AS g(x, i)"
        return self._collect(x, number_at, rows, "g.i")

    def _collect(self, x: str, value: str, rows: str, order: str = "u.i") -> str:
        found = f"SELECT array_agg({value} ORDER BY {order}) FROM {rows}"
        return f"CASE WHEN {x} IS NOT NULL THEN ({found}) END"

    def each(self, size: int, x: str, formula: Callable[..., str], *vectors: Array) -> str:
        return self._zip([x], [self._row(np.resize(v, size)) for v in vectors], formula)

    def emit_combine(self, combine: ops.Combine, size: int, *given: str) -> str:
        return self._zip(given, [], partial(self.combine, combine.operation))

    def _zip(self, given: Sequence[str], rows: Sequence[str], formula: Callable[..., str]) -> str:
        names = [f"x{place}" for place in range(len(given) + len(rows))]
        arrays = f"unnest({', '.join([*given, *rows])}) WITH ORDINALITY AS u({', '.join(names)}, i)"
        known = " IS NOT NULL AND ".join(given)
        return self._collect(known, formula(*(f"u.{name}" for name in names)), arrays)

    def emit_concatenate(self, concatenate: ops.Concatenate, size: int, *given: str) -> str:
        known = " IS NOT NULL AND ".join(given)
        return f"CASE WHEN {known} IS NOT NULL THEN {' || '.join(given)} END"

    def emit_reduce(self, reduce: ops.Reduce, size: int, x: str) -> str:
        value = f"{self.aggregates[reduce.operation]}(u.x)"
        groups = (
            f"(SELECT (u.i - 1) / {reduce.count} AS i, {value} AS x "
            f"FROM unnest({x}) WITH ORDINALITY AS u(x, i) GROUP BY 1) AS u"
        )
        return self._collect(x, "u.x", groups)

    def emit_softmax(self, softmax: ops.Softmax, size: int, x: str) -> str:
        group = f"(u.i - 1) / {softmax.count}"
        powers = (
            f"SELECT u.i, {group} AS g, "
            f"{self.fade(f'u.x - max(u.x) OVER (PARTITION BY {group})')} AS x "
            f"FROM unnest({x}) WITH ORDINALITY AS u(x, i)"
        )
        share = "e.x / sum(e.x) OVER (PARTITION BY e.g)"
        return self._collect(x, "u.x", f"(SELECT e.i, {share} AS x FROM ({powers}) AS e) AS u")

    def emit_lookup(self, lookup: ops.Lookup, size: int, x: str) -> str:
        entries = len(lookup.table)
        rows = (
            f"unnest({x}) WITH ORDINALITY AS u(x, i) "
            f"JOIN {self.weights} AS w ON w.part = {self.add_part(lookup.table)} "
            f"AND w.place = CAST(trunc(u.x) AS integer) "
            f"CROSS JOIN LATERAL unnest(w.numbers) WITH ORDINALITY AS k(x, o)"
        )
        known = f"-1 < ALL({x}) AND {entries} > ALL({x})"
        found = f"SELECT array_agg(k.x ORDER BY u.i, k.o) FROM {rows}"
        return f"CASE WHEN {known} THEN ({found}) END"

    def emit_fold(self, fold: ops.Fold, size: int, x: str) -> str:
        width = fold.graph.nodes["part"].size
        name = f"{self.prefix}f{self._levels}"
        part = f"({x})[{name}.t * {width} + 1:({name}.t + 1) * {width}]"
        levels, names = self._write_levels(fold.graph, {"state": f"{name}.s", "part": part})
        zeros = f"array_fill(CAST(0 AS double precision), ARRAY[{fold.state}])"
        steps = (
            f"WITH RECURSIVE {name}(t, s) AS (SELECT 0, {zeros} UNION ALL "
            f"SELECT {name}.t + 1, {names[fold.graph.outputs[0]]} FROM {name}{levels}\n"
            f"WHERE {name}.t < {fold.steps}) "
        )
        shown = f"{name}.s[1:{fold.shown}]"
        if fold.keeps_all:
            found = (
                f"{steps}SELECT array_agg(k.x ORDER BY {name}.t, k.o) FROM {name} "
                f"CROSS JOIN LATERAL unnest({shown}) WITH ORDINALITY AS k(x, o) WHERE {name}.t > 0"
            )
        else:
            found = f"{steps}SELECT {shown} FROM {name} WHERE {name}.t = {fold.steps}"
        return f"CASE WHEN {x} IS NOT NULL THEN ({found}) END"

    @staticmethod
    def array_of(values: Array) -> str:
        return f"ARRAY[{', '.join(map(number, values))}]"


def check_version(version: int) -> None:
    if version < 120000:
        raise InputError(f"PostgreSQL must be 12 or newer, not {version // 10000}")


class PostgresConnection(Connection):
    dialect, writer = "postgresql", PostgresWriter
    _type_of = "CAST(pg_typeof({}) AS text)"

    def check(self) -> None:
        if self.raw.closed:
            raise InputError("`con` is closed: connect again")
        with self._named("SELECT version()"):
            check_version(self.raw.info.server_version)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        if self._is_in_transaction():
            raise InputError("the connection is in a transaction: commit it or roll it back first")
        with self._named("COMMIT"), self.raw.transaction():
            self._prepare()
            yield

    def _prepare(self) -> None:
        """Change settings until the end of the transaction."""
        self.execute("SET LOCAL client_min_messages = warning")  # no notices of existing tables
        known = "SELECT 1 FROM pg_extension WHERE extname = 'vector'"
        self.has_vectors = bool(self.execute(known))
        kernel = ", kernel vector" if self.has_vectors else ""
        key = "PRIMARY KEY (part, place)"
        self._columns = f"(part text, place integer, numbers real[]{kernel}, {key})"

    def create_weights(self, table: str, parts: Sequence[WeightsPart]) -> None:
        super().create_weights(table, parts)
        self.execute(f"ANALYZE {table}")

    def _fill(self, table: str, parts: Sequence[WeightsPart]) -> None:
        self._store_whole(table)
        copying = f"COPY {table} FROM STDIN"
        with self._named("COPY"), self.raw.cursor() as cursor, cursor.copy(copying) as copy:
            for part, place, numbers, is_kernel in list_rows(parts):
                fields = [part, str(place), f"{{{numbers}}}"]
                if self.has_vectors:
                    fields.append(f"[{numbers}]" if is_kernel else "\\N")
                copy.write("\t".join(fields) + "\n")

    def _store_whole(self, table: str) -> None:
        """Store long rows as they are: compressing them, the default, costs more than it saves."""
        self.execute(f"ALTER TABLE {table} ALTER COLUMN numbers SET STORAGE EXTERNAL")

    def take_turns(self) -> None:
        """Take a lock until the end of the transaction."""
        self.execute(f"SELECT pg_advisory_xact_lock({_TURN})")

    def replace_view(self, view: str, query: str) -> None:
        """Replace the query; grants are retained, dependent views only if the columns are equal."""
        grants = self.execute(_GRANTS, [view])
        self.execute("SAVEPOINT tfdist")
        try:
            super().replace_view(view, query)
        except DatabaseError:
            self.execute("ROLLBACK TO tfdist")
            self.execute(f"DROP VIEW {view}")
            self.create_view(view, query)
            for role, privilege, may_grant in grants:
                option = " WITH GRANT OPTION" if may_grant else ""
                self.execute(f"GRANT {privilege} ON {view} TO {role}{option}")

    def _run(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        # Without values the driver does not look for placeholders, which names may contain.
        marked = sql.replace("?", "%s") if values else sql
        return read_rows(self.raw.execute(marked, values or None))

    def _is_in_transaction(self) -> bool:
        return bool(self.raw.info.transaction_status.name != "IDLE")
