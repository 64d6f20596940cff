"""SQLite: common table expressions, each with one operation on arrays as JSON text.

``MATERIALIZED`` prevents SQLite from recomputing a value each time it is used. The weights table
has a row per number: the weight of input number ``i`` for output number ``o``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
from pybackend.sql.query import (
    QueryAnswer,
    Question,
    Shown,
    WeightsPart,
    find_last_uses,
    free_prefix,
)

WORDS = Words(greatest="max", least="min")
# Maximum number of a function's arguments.
_MOST_ARGUMENTS = 100
_SIGNS = {"add": " + ", "subtract": " - ", "multiply": " * "}
_CALLS = {"maximum": "max", "minimum": "min"}


def quote(name: str) -> str:
    """Quote a name, but not in double quotes, in which SQLite treats unknown names as text."""
    return "`" + name.replace("`", "``") + "`"


def text(value: str) -> str:
    """Quote a string."""
    return "'" + value.replace("'", "''") + "'"


def compile_query(question: Question) -> QueryAnswer:
    """Return the query and the weights that it needs."""
    answer = QueryAnswer()
    prefix = free_prefix(question.keys)
    emitter = _SqliteEmitter(question, answer, prefix)
    # JSON functions have their own columns such as `value`, so the table's columns are qualified.
    source = f"{prefix}r"
    inputs = {
        node.name: _select_input(source, question.features[node.name], node.size)
        for node in question.graph.inputs
    }
    keys = [quote(name) for name in question.keys]
    origin = f"{question.source} AS {source}"
    levels, last, names = emitter.emit_levels(question.graph, keys, origin, inputs)
    outputs = [(names[name], question.graph.nodes[name].size) for name in question.graph.outputs]
    shown = [f"{_show(*outputs[c.output], c)} AS {quote(c.name)}" for c in question.shown]
    answer.query = f"WITH {levels}\nSELECT {', '.join([*keys, *shown])} FROM {last}"
    return answer


def _select_input(source: str, given: str | tuple[str, ...], size: int) -> str:
    if isinstance(given, str):
        value = f"{source}.{quote(given)}"
    else:
        columns = [f"{source}.{quote(name)}" for name in given]
        parts = [
            f"trim(json_array({', '.join(columns[start : start + _MOST_ARGUMENTS])}), '[]')"
            for start in range(0, len(columns), _MOST_ARGUMENTS)
        ]
        listed = " || ',' || ".join(parts)
        value = f"'[' || {listed} || ']'"
    finite = f"type IN ('integer', 'real') AND value BETWEEN -{LARGEST} AND {LARGEST}"
    numbers = f"SELECT count(*) FROM json_each({value}) WHERE {finite}"
    whole = f"json_valid({value}) AND json_array_length({value}) = {size}"
    return f"CASE WHEN {whole} AND ({numbers}) = {size} THEN {value} END"


def _show(value: str, size: int, column: Shown) -> str:
    if column.is_class:
        if size == 1:
            place = f"(json_extract({value}, '$[0]') > 0.5)"
        else:
            place = f"(SELECT key FROM json_each({value}) ORDER BY value DESC, key LIMIT 1)"
        if column.levels is None:
            return place
        cases = " ".join(f"WHEN {n} THEN {text(level)}" for n, level in enumerate(column.levels))
        return f"CASE {place} {cases} END"
    if column.place is None:
        return f"json_extract({value}, '$[0]')" if size == 1 else value
    shown = f"json_extract({value}, '$[{max(column.place, 0)}]')"
    return f"1 - {shown}" if column.place < 0 else shown


class _SqliteEmitter:
    def __init__(self, question: Question, answer: QueryAnswer, prefix: str) -> None:
        self._answer = answer
        self._prefix = prefix
        self._weights = quote(question.weights)
        self._count = 0

    def emit_levels(
        self, graph: Graph, kept: list[str], source: str, inputs: Mapping[str, str]
    ) -> tuple[str, str, dict[str, str]]:
        """Return table expressions in order, the name of the last one, and the values' names.

        Parameters
        ----------
        kept
            Columns of the source that all levels have.
        source
            Relation from which the first level selects; may be empty.
        inputs
            SQL for the graph's inputs in the source.
        """
        last_uses = find_last_uses(graph)
        columns = {name: self._new() for name in inputs}
        first = [*kept, *(f"{value} AS {columns[name]}" for name, value in inputs.items())]
        previous = self._new()
        origin = f" FROM {source}" if source else ""
        levels = [f"{previous} AS MATERIALIZED (SELECT {', '.join(first)}{origin})"]
        live = list(inputs)
        for place, node in enumerate(graph.nodes.values()):
            if node.operation is None:
                continue
            kind = type(node.operation).__name__.lower()
            emit: Callable[..., str] = getattr(self, f"_emit_{kind}")
            value = emit(node.operation, graph, node, *(columns[name] for name in node.inputs))
            live = [name for name in live if last_uses[name] > place]
            columns[node.name] = self._new()
            chosen = [*kept, *(columns[name] for name in live), f"{value} AS {columns[node.name]}"]
            level = self._new()
            levels.append(f"{level} AS MATERIALIZED (SELECT {', '.join(chosen)} FROM {previous})")
            previous = level
            live.append(node.name)
        return ",\n".join(levels), previous, columns

    def _new(self) -> str:
        self._count += 1
        return f"{self._prefix}{self._count}"

    def _part(self, rows: Array) -> str:
        """Add rows (i, o, x) to the weights table; return the condition for them."""
        name = f"p{len(self._answer.parts)}"
        self._answer.parts.append(WeightsPart(name, rows))
        return f"w.part = {text(name)}"

    def _matrix(self, numbers: Array) -> str:
        """Add a matrix to the weights table by rows and columns; return the condition for it."""
        rows, columns = np.indices(numbers.shape)
        return self._part(np.stack([rows.ravel(), columns.ravel(), numbers.ravel()], axis=1))

    def _join_weights(self, condition: str, place: str, alias: str = "w") -> str:
        part = condition.replace("w.part", f"{alias}.part")
        return f"CROSS JOIN {self._weights} AS {alias} ON {part} AND {alias}.i = {place}"

    def _emit_linear(self, linear: Linear, graph: Graph, node: Node, x: str) -> str:
        groups, inputs, outputs = linear.kernel.shape
        width, positions = groups * inputs, node.size // (groups * outputs)
        i, o = np.indices((width, outputs))
        o = o + i // inputs * outputs  # of its group
        kernel = np.stack([i.ravel(), o.ravel(), linear.kernel.ravel()], axis=1)
        products = (
            f"SELECT u.key / {width} AS p, w.o AS o, u.value * w.x AS x FROM json_each({x}) AS u "
            f"{self._join_weights(self._part(kernel), f'u.key % {width}')} WHERE u.value <> 0"
        )
        starts = ",".join(map(str, range(positions)))
        biases = (
            f"SELECT q.value, w.o, w.x FROM json_each('[{starts}]') AS q "
            f"{self._join_weights(self._matrix(linear.bias.reshape(1, -1)), '0')}"
        )
        sums = (
            f"SELECT sum(x) AS x FROM ({products} UNION ALL {biases}) GROUP BY p, o ORDER BY p, o"
        )
        return self._collect(x, sums)

    def _collect(self, x: str, rows: str) -> str:
        """Collect a query's numbers into an array, in the query's order."""
        return f"CASE WHEN {x} IS NOT NULL THEN (SELECT json_group_array(x) FROM ({rows})) END"

    def _emit_gather(self, gather: Gather, graph: Graph, node: Node, x: str) -> str:
        places = gather.places
        if (np.diff(places) == 1).all() and places[0] >= 0:
            inside = f"u.key BETWEEN {places[0]} AND {places[-1]}"
            return self._collect(
                x, f"SELECT u.value AS x FROM json_each({x}) AS u WHERE {inside} ORDER BY u.key"
            )
        order = np.arange(len(places))
        part = self._part(np.stack([places, order, np.zeros(len(places))], axis=1))
        joined = self._join_weights(part, "u.key")
        taken = f"SELECT w.o AS o, u.value AS x FROM json_each({x}) AS u {joined}"
        if (places < 0).any():
            outside = f"FROM {self._weights} AS w WHERE {part} AND w.i = -1"
            taken = f"{taken} UNION ALL SELECT w.o, {number(gather.fill)} {outside}"
        return self._collect(x, f"SELECT x FROM ({taken}) ORDER BY o")

    def _each(self, x: str, formula: str, joined: str = "") -> str:
        rows = f"SELECT {formula} AS x FROM json_each({x}) AS u {joined} ORDER BY u.key"
        return self._collect(x, rows)

    def _emit_map(self, function: Map, graph: Graph, node: Node, x: str) -> str:
        # Without the cast, integers would be divided as integers.
        reals = f"(SELECT u.key, CAST(u.value AS REAL) AS value FROM json_each({x}) AS u)"
        formula = WORDS.apply(function.function, function.constants, "u.value")
        return self._collect(x, f"SELECT {formula} AS x FROM {reals} AS u ORDER BY u.key")

    def _emit_scale(self, scale: Scale, graph: Graph, node: Node, x: str) -> str:
        period = scale.factor.size
        part = self._matrix(np.stack([scale.factor, scale.shift], axis=1))
        joins = [
            f"{self._join_weights(part, f'u.key % {period}', alias)} AND {alias}.o = {o}"
            for o, alias in enumerate("ab")
        ]
        return self._each(x, "u.value * a.x + b.x", " ".join(joins))

    def _emit_slope(self, slope: Slope, graph: Graph, node: Node, x: str) -> str:
        joined = self._join_weights(
            self._matrix(slope.factor[:, None]), f"u.key % {slope.factor.size}"
        )
        return self._each(x, "CASE WHEN u.value > 0 THEN u.value ELSE u.value * w.x END", joined)

    def _emit_combine(self, combine: Combine, graph: Graph, node: Node, *given: str) -> str:
        columns = [f"max(CASE WHEN n = {n} THEN x END)" for n in range(len(given))]
        if combine.operation in _SIGNS:
            formula = _SIGNS[combine.operation].join(columns)
        else:
            formula = f"{_CALLS[combine.operation]}({', '.join(columns)})"
        rows = f"SELECT {formula} AS x FROM ({self._stack(given)}) GROUP BY key ORDER BY key"
        return self._collect(" + ".join(given), rows)

    def _stack(self, given: tuple[str, ...]) -> str:
        return " UNION ALL ".join(
            f"SELECT {n} AS n, u.key AS key, u.value AS x FROM json_each({x}) AS u"
            for n, x in enumerate(given)
        )

    def _emit_concatenate(
        self, concatenate: Concatenate, graph: Graph, node: Node, *given: str
    ) -> str:
        return self._collect(
            " + ".join(given), f"SELECT x FROM ({self._stack(given)}) ORDER BY n, key"
        )

    def _emit_reduce(self, reduce: Reduce, graph: Graph, node: Node, x: str) -> str:
        name = {"sum": "sum", "maximum": "max"}[reduce.operation]
        group = f"u.key / {reduce.count}"
        return self._collect(
            x,
            f"SELECT {name}(u.value) AS x FROM json_each({x}) AS u "
            f"GROUP BY {group} ORDER BY {group}",
        )

    def _emit_softmax(self, softmax: Softmax, graph: Graph, node: Node, x: str) -> str:
        group = f"u.key / {softmax.count}"
        largest = f"max(u.value) OVER (PARTITION BY {group})"
        powers = (
            f"SELECT u.key AS key, {group} AS g, {WORDS.fade(f'u.value - {largest}')} AS e "
            f"FROM json_each({x}) AS u"
        )
        shares = f"SELECT e / sum(e) OVER (PARTITION BY g) AS x FROM ({powers}) ORDER BY key"
        return self._collect(x, shares)

    def _emit_lookup(self, lookup: Lookup, graph: Graph, node: Node, x: str) -> str:
        joined = self._join_weights(self._matrix(lookup.table), "CAST(u.value AS INTEGER)")
        rows = f"SELECT w.x AS x FROM json_each({x}) AS u {joined} ORDER BY u.key, w.o"
        wrong = f"u.value <= -1 OR u.value >= {len(lookup.table)}"
        known = f"NOT EXISTS (SELECT 1 FROM json_each({x}) AS u WHERE {wrong})"
        return f"CASE WHEN {known} THEN {self._collect(x, rows)} END"

    def _emit_fold(self, fold: Fold, graph: Graph, node: Node, x: str) -> str:
        width = graph.nodes[node.inputs[0]].size // fold.steps
        name = self._new()
        inside = f"u.key >= {name}.t * {width} AND u.key < ({name}.t + 1) * {width}"
        part = (
            f"(SELECT json_group_array(x) FROM (SELECT u.value AS x FROM json_each({x}) AS u "
            f"WHERE {inside} ORDER BY u.key))"
        )
        inputs = {"state": f"{name}.s", "part": part}
        levels, last, names = self.emit_levels(fold.graph, [], "", inputs)
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


def array_of(values: Array) -> str:
    """Return an array literal: JSON text."""
    return f"'[{', '.join(repr(float(x)) for x in values)}]'"
