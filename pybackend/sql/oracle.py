"""Oracle: table expressions, each with one operation on rows of one number.

It is standard SQL except for its functions, so other databases can run a translation of it; it was
not tested in Oracle itself. Every expression has the key columns, ``i`` (the position of the
number) and ``x``. The weights table has a row per number, as in `pybackend.sql.sqlite`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate

from pybackend.core.errors import InputError
from pybackend.sql import operations as ops
from pybackend.sql.database import (
    LARGEST,
    SqlWriter,
    is_slice,
    kernel_rows,
    matrix_rows,
    number,
    place_rows,
)
from pybackend.sql.operations import Array, Node, Question, Shown, unroll

COLUMNS = "part VARCHAR2(30), i NUMBER(10), o NUMBER(10), x BINARY_DOUBLE"


class OracleWriter(SqlWriter):
    def __init__(self, question: Question, has_vectors: bool = False) -> None:
        super().__init__(question, has_vectors)
        self._graph = unroll(question.graph)
        # A name in Oracle cannot begin with an underscore unless it is quoted.
        self.prefix = self.prefix.replace("_", "t_")
        self._parts: dict[int, str] = {}
        self._levels: list[str] = []
        self._sizes: dict[str, int] = {}

    @staticmethod
    def quote(name: str) -> str:
        """Quote a name. Oracle allows no double quotes in names, and its clients replace ``&name``
        in names and end statements at certain lines.
        """
        if any(sign in '"&' or not sign.isprintable() for sign in name):
            raise InputError(
                f"names in Oracle cannot contain double quotes, ampersands or line breaks: {name!r}"
            )
        return f'"{name}"'

    @staticmethod
    def text(value: str) -> str:
        """Quote a string, with CHR for characters that Oracle's clients interpret."""
        quoted = "'" + value.replace("'", "''") + "'"
        return re.sub(r"[&\x00-\x1f]", lambda sign: f"' || CHR({ord(sign[0])}) || '", quoted)

    def write(self) -> str:
        source = self.prefix + "source"
        self._levels.append(f"{source} AS (SELECT * FROM {self.question.source})")
        whole = self._add_whole(source)
        names: dict[str, str] = {}
        for node in self._graph.nodes.values():
            is_input = node.operation is None
            query = self._select_input(whole, node) if is_input else self.emit(node, names)
            names[node.name] = self._add(query)
            self._sizes[names[node.name]] = node.size
        pivots = [self._pivot(names[name]) for name in self._graph.outputs]
        columns = [*(f"{source}.{key}" for key in self.keys), *self.show_outputs(pivots)]
        joined = "".join(f"\nLEFT JOIN {name} ON {self._same(source, name)}" for name in pivots)
        levels = ",\n".join(self._levels)
        return f"WITH {levels}\nSELECT {', '.join(columns)}\nFROM {source}{joined}"

    def _add(self, query: str) -> str:
        name = f"{self.prefix}{len(self._levels)}"
        self._levels.append(f"{name} AS ({query})")
        return name

    def _add_whole(self, source: str) -> str:
        """Select the rows that have all features, because maxima would ignore missing numbers."""
        given = self.question.features.values()
        columns = {name: None for names in given if not isinstance(names, str) for name in names}
        finite = [f"{self.quote(name)} BETWEEN -{LARGEST} AND {LARGEST}" for name in columns]
        chosen = f" WHERE {' AND '.join(finite)}" if finite else ""
        return self._add(f"SELECT * FROM {source}{chosen}")

    def _select_input(self, source: str, node: Node) -> str:
        given = self.question.features[node.name]
        keys = ", ".join(self.keys)
        if isinstance(given, str):
            raise InputError(
                "for Oracle, which has no arrays, `features` must be a list of columns with one "
                f"number each; {given!r} is a single column"
            )
        return " UNION ALL ".join(
            f"SELECT {keys}, {place} AS i, CAST({self.quote(name)} AS BINARY_DOUBLE) AS x "
            f"FROM {source}"
            for place, name in enumerate(given)
        )

    def _pivot(self, name: str) -> str:
        """Select an output's numbers as columns, one row per key, for complete outputs only."""
        size, keys = self._sizes[name], ", ".join(self.keys)
        numbers = ", ".join(f"MAX(CASE WHEN i = {i} THEN x END) AS x{i}" for i in range(size))
        ranked = (
            f"SELECT {keys}, i, x, ROW_NUMBER() OVER (PARTITION BY {keys} ORDER BY x DESC, i) AS r "
            f"FROM {name}"
        )
        best = "MAX(CASE WHEN r = 1 THEN i END) AS best"
        return self._add(
            f"SELECT {keys}, {numbers}, {best} FROM ({ranked}) t GROUP BY {keys} "
            f"HAVING COUNT(x) = {size}"
        )

    def _same(self, one: str, other: str) -> str:
        return " AND ".join(f"{one}.{key} = {other}.{key}" for key in self.keys)

    def _of(self, alias: str) -> str:
        return ", ".join(f"{alias}.{key}" for key in self.keys)

    def _part(self, key: object, rows: Array, alias: str = "w") -> str:
        """Add rows (i, o, x) to the weights table once; return the condition for them."""
        # An unrolled recurrent layer has the same weights in each of its steps.
        if id(key) not in self._parts:
            self._parts[id(key)] = self.add_part(rows)
        return f"{alias}.part = {self._parts[id(key)]}"

    def _join(self, condition: str, place: str, alias: str = "w") -> str:
        return f"JOIN {self.weights} {alias} ON {condition} AND {alias}.i = {place}"

    def _join_vector(self, values: Array, v: str, alias: str) -> str:
        part = self._part(values, matrix_rows(values.reshape(-1, 1)), alias)
        return self._join(part, f"MOD({v}.i, {values.size})", alias)

    def emit_linear(self, linear: ops.Linear, size: int, v: str) -> str:
        groups, inputs, outputs = linear.kernel.shape
        width, whole = groups * inputs, groups * outputs
        kernel = self._part(linear.kernel, kernel_rows(linear))
        place = f"FLOOR(v.i / {width}) * {whole} + w.o"
        sums = (
            f"SELECT {self._of('v')}, {place} AS i, SUM(v.x * w.x) AS x FROM {v} v "
            f"{self._join(kernel, f'MOD(v.i, {width})')} GROUP BY {self._of('v')}, {place} "
            f"HAVING COUNT(v.x) = {inputs}"
        )
        joined = self._join_vector(linear.bias, "s", "b")
        return f"SELECT {self._of('s')}, s.i, s.x + b.x AS x FROM ({sums}) s {joined}"

    def emit_gather(self, gather: ops.Gather, size: int, v: str) -> str:
        places = gather.places
        if is_slice(places):
            inside = f"v.i BETWEEN {places[0]} AND {places[-1]}"
            return f"SELECT {self._of('v')}, v.i - {places[0]} AS i, v.x FROM {v} v WHERE {inside}"
        part = self._part(gather, place_rows(places))
        taken = f"SELECT {self._of('v')}, w.o AS i, v.x AS x FROM {v} v {self._join(part, 'v.i')}"
        if (places < 0).any():
            keys = f"SELECT DISTINCT {self._of('v')} FROM {v} v"
            fill = f"SELECT {self._of('k')}, w.o AS i, {number(gather.fill)} AS x"
            taken += f" UNION ALL {fill} FROM ({keys}) k {self._join(part, '-1')}"
        return taken

    def each(self, size: int, v: str, formula: Callable[..., str], *vectors: Array) -> str:
        rows, names = f"{v} v", ["v.x"]
        for vector, alias in zip(vectors, "ab", strict=False):
            rows += f" {self._join_vector(vector, 'v', alias)}"
            names.append(f"{alias}.x")
        return f"SELECT {self._of('v')}, v.i, {formula(*names)} AS x FROM {rows}"

    def emit_combine(self, combine: ops.Combine, size: int, *given: str) -> str:
        names = [f"v{number}" for number in range(len(given))]
        formula = self.combine(combine.operation, *(f"{name}.x" for name in names))
        joined = " ".join(
            f"JOIN {v} {name} ON {self._same('v0', name)} AND v0.i = {name}.i"
            for v, name in zip(given[1:], names[1:], strict=True)
        )
        return f"SELECT {self._of('v0')}, v0.i, {formula} AS x FROM {given[0]} v0 {joined}"

    def emit_concatenate(self, concatenate: ops.Concatenate, size: int, *given: str) -> str:
        starts = accumulate((self._sizes[v] for v in given), initial=0)
        return " UNION ALL ".join(
            f"SELECT {self._of('v')}, v.i + {start} AS i, v.x AS x FROM {v} v"
            for v, start in zip(given, starts, strict=False)
        )

    def emit_reduce(self, reduce: ops.Reduce, size: int, v: str) -> str:
        place, value = f"FLOOR(v.i / {reduce.count})", f"{self.aggregates[reduce.operation]}(v.x)"
        return (
            f"SELECT {self._of('v')}, {place} AS i, {value} AS x FROM {v} v "
            f"GROUP BY {self._of('v')}, {place} HAVING COUNT(v.x) = {reduce.count}"
        )

    def emit_softmax(self, softmax: ops.Softmax, size: int, v: str) -> str:
        group = f"PARTITION BY {self._of('v')}, FLOOR(v.i / {softmax.count})"
        power = self.fade(f"v.x - MAX(v.x) OVER ({group})")
        powers = f"SELECT {self._of('v')}, v.i, {power} AS x FROM {v} v"
        return f"SELECT {self._of('v')}, v.i, v.x / SUM(v.x) OVER ({group}) AS x FROM ({powers}) v"

    def emit_lookup(self, lookup: ops.Lookup, size: int, v: str) -> str:
        joined = self._join(self._part(lookup.table, matrix_rows(lookup.table)), "TRUNC(v.x)")
        place = f"v.i * {lookup.table.shape[1]} + w.o"
        return f"SELECT {self._of('v')}, {place} AS i, w.x AS x FROM {v} v {joined}"

    def show(self, column: Shown, value: str, size: int) -> str:
        if column.index is None and size > 1 and not column.is_class:
            raise InputError(
                f"the output {column.name!r} has {size} numbers, but Oracle has no arrays: each "
                "output must have one number, or one number per class"
            )
        return super().show(column, value, size)

    def item(self, value: str, place: int) -> str:
        return f"{value}.x{place}"

    def best(self, value: str) -> str:
        return f"{value}.best"


def write_package(name: str, query: str, key: str, shown: str, weights: str, count: int) -> str:
    """Return a package with INIT, which checks the number of weights, and SCORE, which computes one
    row.
    """
    quote = OracleWriter.quote
    package = quote(name)
    return f"""-- Generated; not executed in Oracle by its author.
CREATE TABLE {quote(weights)} ({COLUMNS}, PRIMARY KEY (part, i, o));
CREATE OR REPLACE PACKAGE {package} AS
  PROCEDURE init;
  FUNCTION score(p_key IN VARCHAR2) RETURN VARCHAR2;
END {package};
/
CREATE OR REPLACE PACKAGE BODY {package} AS
  PROCEDURE init IS
    found NUMBER;
  BEGIN
    SELECT COUNT(*) INTO found FROM {quote(weights)};
    IF found <> {count} THEN
      RAISE_APPLICATION_ERROR(-20001, 'the weights have ' || found || ' rows, not {count}');
    END IF;
  END init;

  FUNCTION score(p_key IN VARCHAR2) RETURN VARCHAR2 IS
    result VARCHAR2(4000);
  BEGIN
    SELECT {quote(shown)} INTO result FROM ({query}) WHERE {quote(key)} = p_key;
    RETURN result;
  END score;
END {package};
/
"""
