"""Oracle: table expressions, each with one operation on rows of one number.

It is standard SQL except for its functions, so other databases can run a translation of it; it was
not tested in Oracle itself. Every expression has the key columns, ``i`` (the position of the
number) and ``x``. The weights table has a row per number, as in `pybackend.sql.sqlite`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from pybackend.errors import InputError
from pybackend.sql.formulas import LARGEST, Words, number
from pybackend.sql.graph import (
    Array,
    Combine,
    Concatenate,
    Gather,
    Graph,
    Linear,
    Lookup,
    Map,
    Node,
    Reduce,
    Scale,
    Slope,
    Softmax,
    unroll,
)
from pybackend.sql.query import QueryAnswer, Question, Shown, WeightsPart, free_prefix

WORDS = Words(double="BINARY_DOUBLE")
COLUMNS = "part VARCHAR2(30), i NUMBER(10), o NUMBER(10), x BINARY_DOUBLE"
_SIGNS = {"add": " + ", "subtract": " - ", "multiply": " * "}
_CALLS = {"maximum": "GREATEST", "minimum": "LEAST"}


def quote(name: str) -> str:
    """Quote a name.

    Raises
    ------
    InputError
        Oracle allows no double quotes in names, and its clients replace ``&name`` in names and end
        statements at certain lines.
    """
    if any(sign in '"&' or not sign.isprintable() for sign in name):
        raise InputError(
            f"names in Oracle cannot contain double quotes, ampersands or line breaks: {name!r}"
        )
    return f'"{name}"'


def text(value: str) -> str:
    """Quote a string, with CHR for characters that Oracle's clients interpret."""
    quoted = "'" + value.replace("'", "''") + "'"
    return re.sub(r"[&\x00-\x1f]", lambda sign: f"' || CHR({ord(sign[0])}) || '", quoted)


def compile_query(question: Question) -> QueryAnswer:
    """Return the query and the weights that it needs."""
    return _OracleCompiler(question).compile()


def write_package(name: str, query: str, key: str, shown: str, weights: str, count: int) -> str:
    """Return a package with INIT, which checks the weights, and SCORE, which computes one row.

    Parameters
    ----------
    name
        Name of the package.
    query, key, shown
        The query, its key column, and the column to return.
    weights, count
        Name of the weights table, and its required number of rows.
    """
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


class _OracleCompiler:
    def __init__(self, question: Question) -> None:
        self._question = question
        self._graph = unroll(question.graph)
        self._prefix = free_prefix(question.keys).replace("_", "t_")
        self._keys = [quote(name) for name in question.keys]
        self._answer = QueryAnswer()
        self._parts: dict[int, str] = {}
        self._levels: list[str] = []

    def compile(self) -> QueryAnswer:
        source = self._prefix + "source"
        self._levels.append(f"{source} AS (SELECT * FROM {self._question.source})")
        whole = self._add_whole(source)
        names: dict[str, str] = {}
        for node in self._graph.nodes.values():
            if node.operation is None:
                query = self._select_input(whole, node)
            else:
                given = [names[name] for name in node.inputs]
                query = _EMIT[type(node.operation)](self, node.operation, self._graph, node, *given)
            names[node.name] = self._add(query)
        outputs = [(names[name], self._graph.nodes[name].size) for name in self._graph.outputs]
        pivots = [self._pivot(number, outputs) for number in range(len(outputs))]
        columns = [f"{source}.{key}" for key in self._keys]
        columns += [f"{_show(pivots, outputs, c)} AS {quote(c.name)}" for c in self._question.shown]
        joined = "".join(f"\nLEFT JOIN {name} ON {self._same(source, name)}" for name in pivots)
        levels = ",\n".join(self._levels)
        self._answer.query = f"WITH {levels}\nSELECT {', '.join(columns)}\nFROM {source}{joined}"
        return self._answer

    def _add(self, query: str) -> str:
        name = f"{self._prefix}{len(self._levels)}"
        self._levels.append(f"{name} AS ({query})")
        return name

    def _add_whole(self, source: str) -> str:
        """Select the rows that have all features, because maxima would ignore missing numbers."""
        given = self._question.features.values()
        columns = {name: None for names in given if not isinstance(names, str) for name in names}
        finite = [f"{quote(name)} BETWEEN -{LARGEST} AND {LARGEST}" for name in columns]
        chosen = f" WHERE {' AND '.join(finite)}" if finite else ""
        return self._add(f"SELECT * FROM {source}{chosen}")

    def _select_input(self, source: str, node: Node) -> str:
        given = self._question.features[node.name]
        keys = ", ".join(self._keys)
        if isinstance(given, str):
            raise InputError(
                "for Oracle, which has no arrays, `features` must be a list of columns with one "
                f"number each; {given!r} is a single column"
            )
        rows = " UNION ALL ".join(
            f"SELECT {keys}, {place} AS i, CAST({quote(name)} AS BINARY_DOUBLE) AS x FROM {source}"
            for place, name in enumerate(given)
        )
        return rows

    def _pivot(self, number: int, outputs: Sequence[tuple[str, int]]) -> str:
        """Select an output's numbers as columns, one row per key, for complete outputs only."""
        name, size = outputs[number]
        keys = ", ".join(self._keys)
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
        return " AND ".join(f"{one}.{key} = {other}.{key}" for key in self._keys)

    def _of(self, alias: str) -> str:
        return ", ".join(f"{alias}.{key}" for key in self._keys)

    def _part(self, key: object, rows: Array, alias: str = "w") -> str:
        """Add rows (i, o, x) to the weights table once; return the condition for them."""
        if id(key) not in self._parts:
            self._parts[id(key)] = f"p{len(self._parts)}"
            self._answer.parts.append(WeightsPart(self._parts[id(key)], rows))
        return f"{alias}.part = {text(self._parts[id(key)])}"

    def _join(self, condition: str, place: str, alias: str = "w") -> str:
        weights = quote(self._question.weights)
        return f"JOIN {weights} {alias} ON {condition} AND {alias}.i = {place}"

    def linear(self, linear: Linear, graph: Graph, node: Node, v: str) -> str:
        groups, inputs, outputs = linear.kernel.shape
        width, whole = groups * inputs, groups * outputs
        i, o = np.indices((width, outputs))
        o = o + i // inputs * outputs  # of its group
        kernel = self._part(
            linear.kernel, np.stack([i.ravel(), o.ravel(), linear.kernel.ravel()], axis=1)
        )
        place = f"FLOOR(v.i / {width}) * {whole} + w.o"
        sums = (
            f"SELECT {self._of('v')}, {place} AS i, SUM(v.x * w.x) AS x FROM {v} v "
            f"{self._join(kernel, f'MOD(v.i, {width})')} GROUP BY {self._of('v')}, {place} "
            f"HAVING COUNT(v.x) = {inputs}"
        )
        bias = self._part(linear.bias, _matrix(linear.bias.reshape(-1, 1)), "b")
        joined = self._join(bias, f"MOD(s.i, {whole})", "b")
        return f"SELECT {self._of('s')}, s.i, s.x + b.x AS x FROM ({sums}) s {joined}"

    def gather(self, gather: Gather, graph: Graph, node: Node, v: str) -> str:
        places = gather.places
        if (np.diff(places) == 1).all() and places[0] >= 0:
            inside = f"v.i BETWEEN {places[0]} AND {places[-1]}"
            return f"SELECT {self._of('v')}, v.i - {places[0]} AS i, v.x FROM {v} v WHERE {inside}"
        rows = np.stack([places, np.arange(len(places)), np.zeros(len(places))], axis=1)
        part = self._part(gather, rows)
        taken = f"SELECT {self._of('v')}, w.o AS i, v.x AS x FROM {v} v {self._join(part, 'v.i')}"
        if (places < 0).any():
            keys = f"SELECT DISTINCT {self._of('v')} FROM {v} v"
            fill = f"SELECT {self._of('k')}, w.o AS i, {number(gather.fill)} AS x"
            taken += f" UNION ALL {fill} FROM ({keys}) k {self._join(part, '-1')}"
        return taken

    def map(self, function: Map, graph: Graph, node: Node, v: str) -> str:
        return self._each(v, WORDS.apply(function.function, function.constants, "v.x"))

    def _each(self, v: str, formula: str, joined: str = "") -> str:
        return f"SELECT {self._of('v')}, v.i, {formula} AS x FROM {v} v {joined}"

    def scale(self, scale: Scale, graph: Graph, node: Node, v: str) -> str:
        place = f"MOD(v.i, {scale.factor.size})"
        joined = " ".join(
            self._join(self._part(values, _matrix(values.reshape(-1, 1)), alias), place, alias)
            for values, alias in ((scale.factor, "a"), (scale.shift, "b"))
        )
        return self._each(v, "v.x * a.x + b.x", joined)

    def slope(self, slope: Slope, graph: Graph, node: Node, v: str) -> str:
        part = self._part(slope.factor, _matrix(slope.factor.reshape(-1, 1)))
        joined = self._join(part, f"MOD(v.i, {slope.factor.size})")
        return self._each(v, "CASE WHEN v.x > 0 THEN v.x ELSE v.x * w.x END", joined)

    def combine(self, combine: Combine, graph: Graph, node: Node, *given: str) -> str:
        names = [f"v{number}" for number in range(len(given))]
        columns = [f"{name}.x" for name in names]
        if combine.operation in _SIGNS:
            formula = _SIGNS[combine.operation].join(columns)
        else:
            formula = f"{_CALLS[combine.operation]}({', '.join(columns)})"
        joined = " ".join(
            f"JOIN {v} {name} ON {self._same('v0', name)} AND v0.i = {name}.i"
            for v, name in zip(given[1:], names[1:], strict=True)
        )
        return f"SELECT {self._of('v0')}, v0.i, {formula} AS x FROM {given[0]} v0 {joined}"

    def join(self, join: Concatenate, graph: Graph, node: Node, *given: str) -> str:
        starts = np.cumsum([0, *(graph.nodes[name].size for name in node.inputs)])
        return " UNION ALL ".join(
            f"SELECT {self._of('v')}, v.i + {start} AS i, v.x AS x FROM {v} v"
            for v, start in zip(given, starts, strict=False)
        )

    def reduce(self, reduce: Reduce, graph: Graph, node: Node, v: str) -> str:
        name = {"sum": "SUM", "maximum": "MAX"}[reduce.operation]
        place = f"FLOOR(v.i / {reduce.count})"
        return (
            f"SELECT {self._of('v')}, {place} AS i, {name}(v.x) AS x FROM {v} v "
            f"GROUP BY {self._of('v')}, {place} HAVING COUNT(v.x) = {reduce.count}"
        )

    def softmax(self, softmax: Softmax, graph: Graph, node: Node, v: str) -> str:
        group = f"PARTITION BY {self._of('v')}, FLOOR(v.i / {softmax.count})"
        power = WORDS.fade(f"v.x - MAX(v.x) OVER ({group})")
        powers = f"SELECT {self._of('v')}, v.i, {power} AS x FROM {v} v"
        return f"SELECT {self._of('v')}, v.i, v.x / SUM(v.x) OVER ({group}) AS x FROM ({powers}) v"

    def lookup(self, lookup: Lookup, graph: Graph, node: Node, v: str) -> str:
        joined = self._join(self._part(lookup.table, _matrix(lookup.table)), "TRUNC(v.x)")
        place = f"v.i * {lookup.table.shape[1]} + w.o"
        return f"SELECT {self._of('v')}, {place} AS i, w.x AS x FROM {v} v {joined}"


_EMIT: dict[type, Callable[..., str]] = {
    Combine: _OracleCompiler.combine,
    Gather: _OracleCompiler.gather,
    Concatenate: _OracleCompiler.join,
    Linear: _OracleCompiler.linear,
    Lookup: _OracleCompiler.lookup,
    Map: _OracleCompiler.map,
    Reduce: _OracleCompiler.reduce,
    Scale: _OracleCompiler.scale,
    Slope: _OracleCompiler.slope,
    Softmax: _OracleCompiler.softmax,
}


def _show(pivots: Sequence[str], outputs: Sequence[tuple[str, int]], column: Shown) -> str:
    name, size = pivots[column.output], outputs[column.output][1]
    if column.is_class:
        place = f"{name}.best"
        if size == 1:
            place = f"CASE WHEN {name}.x0 > 0.5 THEN 1 WHEN {name}.x0 <= 0.5 THEN 0 END"
        if column.levels is None:
            return place
        cases = " ".join(f"WHEN {n} THEN {text(level)}" for n, level in enumerate(column.levels))
        return f"CASE {place} {cases} END"
    if column.place is None and size > 1:
        raise InputError(
            f"the output {column.name!r} has {size} numbers, but Oracle has no arrays: each "
            "output must have one number, or one number per class"
        )
    chosen = column.place or 0
    return f"1 - {name}.x0" if chosen < 0 else f"{name}.x{chosen}"


def _matrix(numbers: Array) -> Array:
    """Return rows (i, o, x) of a matrix."""
    rows, columns = np.indices(numbers.shape)
    return np.stack([rows.ravel(), columns.ravel(), numbers.ravel()], axis=1)
