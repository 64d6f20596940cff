"""PostgreSQL: lateral subqueries, each with one operation on arrays.

The query computes each row separately, so a condition on its key is applied before anything is
computed. ``OFFSET 0`` prevents PostgreSQL from recomputing a value each time it is used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pybackend.sql.formulas import LARGEST, Words, number
from pybackend.sql.graph import (
    Array,
    Combine,
    Concatenate,
    Fold,
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
)
from pybackend.sql.query import QueryAnswer, Question, Shown, WeightsPart, free_prefix

WORDS = Words()
_SIGNS = {"add": " + ", "subtract": " - ", "multiply": " * "}
_CALLS = {"maximum": "greatest", "minimum": "least"}


def quote(name: str) -> str:
    """Quote a name."""
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    """Quote a string, independently of the server's setting for backslashes."""
    quoted = "'" + value.replace("'", "''") + "'"
    return " E" + quoted.replace("\\", "\\\\") if "\\" in value else quoted


def compile_query(question: Question, *, has_vectors: bool = False) -> QueryAnswer:
    """Return the query and the weights that it needs.

    Parameters
    ----------
    has_vectors
        True if the weights table has a column ``kernel`` of pgvector's type.
    """
    answer = QueryAnswer()
    prefix = free_prefix(question.keys)
    source = f"{prefix}r"
    inputs = {
        node.name: _select_input(source, question, question.features[node.name], node.size)
        for node in question.graph.inputs
    }
    emitter = _PostgresEmitter(question, answer, prefix, has_vectors)
    levels, names = emitter.emit_levels(question.graph, inputs)
    outputs = [(names[name], question.graph.nodes[name].size) for name in question.graph.outputs]
    columns = [f"{source}.{quote(name)}" for name in question.keys]
    columns += [f"{_show(*outputs[c.output], c)} AS {quote(c.name)}" for c in question.shown]
    answer.query = f"SELECT {', '.join(columns)}\nFROM {question.source} AS {source}{levels}"
    return answer


def _select_input(source: str, question: Question, given: str | tuple[str, ...], size: int) -> str:
    def select(name: str) -> str:
        value, kind = f"{source}.{quote(name)}", question.casts.get(name)
        return value if kind is None else f"CAST({value} AS {kind})"

    if isinstance(given, str):
        value = select(given)
    else:
        value = f"ARRAY[{', '.join(map(select, given))}]"
    value = f"CAST({value} AS double precision[])"
    finite = (
        f"SELECT count(*) FROM unnest({value}) AS u(x) WHERE u.x BETWEEN -{LARGEST} AND {LARGEST}"
    )
    whole = f"cardinality({value}) = {size} AND ({finite}) = {size}"
    # Arrays may have several dimensions, or other lower bounds than 1.
    flat = f"SELECT u.x FROM unnest({value}) WITH ORDINALITY AS u(x, i) ORDER BY u.i"
    usual = f"WHEN array_dims({value}) = '[1:{size}]' THEN {value}"
    return f"CASE WHEN {whole} THEN CASE {usual} ELSE ARRAY({flat}) END END"


def _show(value: str, size: int, column: Shown) -> str:
    if column.is_class:
        if size == 1:
            place = f"CASE WHEN {value}[1] > 0.5 THEN 2 WHEN {value} IS NOT NULL THEN 1 END"
        else:
            largest = f"(SELECT max(x) FROM unnest({value}) AS u(x))"
            place = f"array_position({value}, {largest})"
        if column.levels is None:
            return f"{place} - 1"
        return f"(ARRAY[{', '.join(map(text, column.levels))}])[{place}]"
    if column.place is None:
        return f"{value}[1]" if size == 1 else value
    return f"1 - {value}[1]" if column.place < 0 else f"{value}[{column.place + 1}]"


class _PostgresEmitter:
    def __init__(
        self, question: Question, answer: QueryAnswer, prefix: str, has_vectors: bool
    ) -> None:
        self._answer = answer
        self._prefix = prefix
        self._weights = quote(question.weights)
        self._has_vectors = has_vectors
        self._levels = 0

    def emit_levels(self, graph: Graph, inputs: dict[str, str]) -> tuple[str, dict[str, str]]:
        """Return lateral subqueries for all values of a graph, and the names of the values."""
        names: dict[str, str] = {}
        levels = ""
        for node in graph.nodes.values():
            if node.operation is None:
                value = inputs[node.name]
            else:
                kind = type(node.operation).__name__.lower()
                emit: Callable[..., str] = getattr(self, f"_emit_{kind}")
                value = emit(node.operation, graph, node, *(names[name] for name in node.inputs))
            level = f"{self._prefix}{self._levels}"
            self._levels += 1
            levels += f"\nCROSS JOIN LATERAL (SELECT {value} AS v OFFSET 0) AS {level}"
            names[node.name] = f"{level}.v"
        return levels, names

    def _part(self, numbers: Array, is_kernel: bool = False) -> str:
        """Add rows to the weights table; return the condition for them."""
        name = f"p{len(self._answer.parts)}"
        self._answer.parts.append(WeightsPart(name, numbers, is_kernel))
        return f"w.part = {text(name)}"

    def _row(self, values: Array) -> str:
        """Return an expression for one array in the weights table."""
        return f"(SELECT w.numbers FROM {self._weights} AS w WHERE {self._part(values[None])})"

    def _emit_linear(self, linear: Linear, graph: Graph, node: Node, x: str) -> str:
        groups, inputs, outputs = linear.kernel.shape
        bias = self._row(linear.bias.ravel())
        width = groups * inputs
        if self._has_vectors and groups == 1 and node.size == outputs:
            part = self._part(linear.kernel[0].T, is_kernel=True)
            products = f"-(w.kernel <#> CAST({x} AS vector))"
            found = (
                f"SELECT array_agg({products} + b.x ORDER BY w.place) FROM {self._weights} AS w "
                f"JOIN unnest({bias}) WITH ORDINALITY AS b(x, o) ON b.o = w.place + 1 WHERE {part}"
            )
            return f"CASE WHEN {x} IS NOT NULL THEN ({found}) END"
        # The table has a row for each input number: its weights for the outputs of its group.
        part = self._part(linear.kernel.reshape(width, outputs))
        place = f"(u.i - 1) % {width}"
        out = f"(w.place / {inputs}) * {outputs} + k.o" if groups > 1 else "k.o"
        sums = (
            f"SELECT (u.i - 1) / {width} AS p, {out} AS o, sum(u.x * k.x) AS s "
            f"FROM unnest({x}) WITH ORDINALITY AS u(x, i) "
            f"JOIN {self._weights} AS w ON {part} AND w.place = {place} "
            f"CROSS JOIN LATERAL unnest(w.numbers) WITH ORDINALITY AS k(x, o) "
            f"WHERE u.x <> 0 GROUP BY 1, 2"
        )
        positions = node.size // (groups * outputs)
        found = (
            f"SELECT array_agg(b.x + coalesce(s.s, 0) ORDER BY q.p, b.o) "
            f"FROM generate_series(0, {positions - 1}) AS q(p) "
            f"CROSS JOIN unnest({bias}) WITH ORDINALITY AS b(x, o) "
            f"LEFT JOIN ({sums}) AS s ON s.p = q.p AND s.o = b.o"
        )
        return f"CASE WHEN {x} IS NOT NULL THEN ({found}) END"

    def _emit_gather(self, gather: Gather, graph: Graph, node: Node, x: str) -> str:
        places = gather.places
        if (np.diff(places) == 1).all() and places[0] >= 0:
            return f"({x})[{places[0] + 1}:{places[0] + len(places)}]"
        number_at = f"({x})[CAST(g.x AS integer) + 1]"
        if (places < 0).any():
            number_at = f"CASE WHEN g.x < 0 THEN {number(gather.fill)} ELSE {number_at} END"
        rows = f"unnest({self._row(places.astype(np.float64))}) WITH ORDINALITY AS g(x, i)"
        return self._collect(x, number_at, rows, "g.i")

    def _collect(self, x: str, value: str, rows: str, order: str = "u.i") -> str:
        found = f"SELECT array_agg({value} ORDER BY {order}) FROM {rows}"
        return f"CASE WHEN {x} IS NOT NULL THEN ({found}) END"

    def _emit_map(self, function: Map, graph: Graph, node: Node, x: str) -> str:
        formula = WORDS.apply(function.function, function.constants, "u.x")
        return self._collect(x, formula, f"unnest({x}) WITH ORDINALITY AS u(x, i)")

    def _emit_scale(self, scale: Scale, graph: Graph, node: Node, x: str) -> str:
        if scale.factor.size == 1:
            (factor,), (shift,) = scale.factor, scale.shift
            formula = f"u.x * {number(factor)} + {number(shift)}"
            return self._collect(x, formula, f"unnest({x}) WITH ORDINALITY AS u(x, i)")
        factor, shift = (self._row(np.resize(v, node.size)) for v in (scale.factor, scale.shift))
        rows = f"unnest({x}, {factor}, {shift}) WITH ORDINALITY AS u(x, a, b, i)"
        return self._collect(x, "u.x * u.a + u.b", rows)

    def _emit_slope(self, slope: Slope, graph: Graph, node: Node, x: str) -> str:
        rows = f"unnest({x}, {self._row(np.resize(slope.factor, node.size))}) WITH ORDINALITY"
        formula = "CASE WHEN u.x > 0 THEN u.x ELSE u.x * u.a END"
        return self._collect(x, formula, f"{rows} AS u(x, a, i)")

    def _emit_combine(self, combine: Combine, graph: Graph, node: Node, *given: str) -> str:
        names = [f"x{place}" for place in range(len(given))]
        columns = [f"u.{name}" for name in names]
        if combine.operation in _SIGNS:
            formula = _SIGNS[combine.operation].join(columns)
        else:
            formula = f"{_CALLS[combine.operation]}({', '.join(columns)})"
        rows = f"unnest({', '.join(given)}) WITH ORDINALITY AS u({', '.join(names)}, i)"
        whole = " IS NOT NULL AND ".join(given)
        return self._collect(whole, formula, rows)

    def _emit_concatenate(
        self, concatenate: Concatenate, graph: Graph, node: Node, *given: str
    ) -> str:
        whole = " IS NOT NULL AND ".join(given)
        return f"CASE WHEN {whole} IS NOT NULL THEN {' || '.join(given)} END"

    def _emit_reduce(self, reduce: Reduce, graph: Graph, node: Node, x: str) -> str:
        name = {"sum": "sum", "maximum": "max"}[reduce.operation]
        groups = (
            f"(SELECT (u.i - 1) / {reduce.count} AS i, {name}(u.x) AS x "
            f"FROM unnest({x}) WITH ORDINALITY AS u(x, i) GROUP BY 1) AS u"
        )
        return self._collect(x, "u.x", groups)

    def _emit_softmax(self, softmax: Softmax, graph: Graph, node: Node, x: str) -> str:
        group = f"(u.i - 1) / {softmax.count}"
        powers = (
            f"SELECT u.i, {group} AS g, "
            f"{WORDS.fade(f'u.x - max(u.x) OVER (PARTITION BY {group})')} AS x "
            f"FROM unnest({x}) WITH ORDINALITY AS u(x, i)"
        )
        shares = (
            f"(SELECT e.i, e.x / sum(e.x) OVER (PARTITION BY e.g) AS x FROM ({powers}) AS e) AS u"
        )
        return self._collect(x, "u.x", shares)

    def _emit_lookup(self, lookup: Lookup, graph: Graph, node: Node, x: str) -> str:
        entries = len(lookup.table)
        rows = (
            f"unnest({x}) WITH ORDINALITY AS u(x, i) "
            f"JOIN {self._weights} AS w ON {self._part(lookup.table)} "
            f"AND w.place = CAST(trunc(u.x) AS integer) "
            f"CROSS JOIN LATERAL unnest(w.numbers) WITH ORDINALITY AS k(x, o)"
        )
        known = f"-1 < ALL({x}) AND {entries} > ALL({x})"
        found = f"SELECT array_agg(k.x ORDER BY u.i, k.o) FROM {rows}"
        return f"CASE WHEN {known} THEN ({found}) END"

    def _emit_fold(self, fold: Fold, graph: Graph, node: Node, x: str) -> str:
        width = graph.nodes[node.inputs[0]].size // fold.steps
        name = f"{self._prefix}f{self._levels}"
        part = f"({x})[{name}.t * {width} + 1:({name}.t + 1) * {width}]"
        levels, names = self.emit_levels(fold.graph, {"state": f"{name}.s", "part": part})
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


def array_of(values: Array) -> str:
    """Return an array literal."""
    return f"ARRAY[{', '.join(number(x) for x in values)}]"
