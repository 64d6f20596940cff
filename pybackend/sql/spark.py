"""Spark SQL: a query in levels, each with one operation on arrays, without Python on executors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pybackend.errors import InputError
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

WORDS = Words(double="DOUBLE")
_SIGNS = {"add": "a + b", "subtract": "a - b", "multiply": "a * b"}
_CALLS = {"maximum": "greatest(a, b)", "minimum": "least(a, b)"}


def quote(name: str) -> str:
    """Quote a name.

    Raises
    ------
    InputError
        Spark would replace a part of the name with a setting or an environment variable.
    """
    if "${" in name:
        raise InputError(
            "Spark SQL replaces ${...} with settings and environment variables: "
            f"rename {name!r} (if it comes from a class, pass other `levels`)"
        )
    return "`" + name.replace("`", "``") + "`"


def text(value: str) -> str:
    """Quote a string, as bytes if Spark would read it differently depending on settings.

    Spark replaces ``${env:...}`` and the like in strings, and the meaning of backslashes depends on
    a setting.
    """
    if any(sign in value for sign in "$\\'"):
        return f"CAST(X'{value.encode().hex()}' AS STRING)"
    return f"'{value}'"


def compile_query(question: Question) -> QueryAnswer:
    """Return the query and the weights that it needs."""
    answer = QueryAnswer()
    prefix = free_prefix(question.keys)
    emitter = _SparkEmitter(question, answer, prefix)
    graph, keys = question.graph, [quote(name) for name in question.keys]
    names = {node.name: quote(f"{prefix}{n}") for n, node in enumerate(graph.nodes.values())}
    columns = [
        f"{_select_input(question.features[node.name], node.size)} AS {names[node.name]}"
        for node in graph.inputs
    ]
    query = f"SELECT {', '.join([*keys, *columns])}\nFROM {question.source}"
    last_uses, live = find_last_uses(graph), [node.name for node in graph.inputs]
    for place, node in enumerate(graph.nodes.values()):
        if node.operation is None:
            continue
        tables: dict[str, str] = {}
        value = emitter.emit(graph, node, names, tables)
        live = [name for name in live if last_uses[name] > place]
        chosen = [*keys, *(names[name] for name in live), f"{value} AS {names[node.name]}"]
        # Otherwise Spark may sort and store rows with all weights in each of them.
        hint = f"/*+ BROADCAST({', '.join(tables)}) */ " if tables else ""
        query = f"SELECT {hint}{', '.join(chosen)}\nFROM ({query}){''.join(tables.values())}"
        live.append(node.name)
    outputs = [(names[name], graph.nodes[name].size) for name in graph.outputs]
    shown = [f"{_show(*outputs[c.output], c)} AS {quote(c.name)}" for c in question.shown]
    answer.query = f"SELECT {', '.join([*keys, *shown])}\nFROM ({query})"
    return answer


def _select_input(given: str | tuple[str, ...], size: int) -> str:
    if isinstance(given, str):
        value = quote(given)
    else:
        value = f"array({', '.join(f'CAST({quote(name)} AS DOUBLE)' for name in given)})"
    whole = f"size({value}) = {size} AND forall({value}, x -> x BETWEEN -{LARGEST} AND {LARGEST})"
    return f"CASE WHEN {whole} THEN CAST({value} AS ARRAY<DOUBLE>) END"


def _show(value: str, size: int, column: Shown) -> str:
    if column.is_class:
        if size == 1:
            place = f"CASE WHEN {value}[0] > 0.5 THEN 1 WHEN {value} IS NOT NULL THEN 0 END"
        else:
            place = f"CAST(array_position({value}, array_max({value})) - 1 AS INT)"
        if column.levels is None:
            return place
        return f"get(array({', '.join(map(text, column.levels))}), {place})"
    if column.place is None:
        return f"{value}[0]" if size == 1 else value
    return f"1 - {value}[0]" if column.place < 0 else f"{value}[{column.place}]"


class _SparkEmitter:
    def __init__(self, question: Question, answer: QueryAnswer, prefix: str) -> None:
        self._weights = quote(question.weights)
        self._prefix = prefix
        self._answer = answer
        self._tables: dict[str, str] = {}
        self._lets = 0

    def emit(
        self, graph: Graph, node: Node, names: Mapping[str, str], tables: dict[str, str]
    ) -> str:
        """Return the value of a node; tables to join for it are added to ``tables`` by name."""
        self._tables = tables
        self._row_of = names[node.inputs[0]]
        return self._emit(graph, node, names)

    def _emit(self, graph: Graph, node: Node, names: Mapping[str, str]) -> str:
        kind = type(node.operation).__name__.lower()
        emit: Callable[..., str] = getattr(self, f"_emit_{kind}")
        return emit(node.operation, graph, node, *(names[name] for name in node.inputs))

    def _part(self, rows: Array) -> str:
        """Add rows to the weights table; return the name of an array of arrays."""
        name = f"p{len(self._answer.parts)}"
        self._answer.parts.append(WeightsPart(name, rows))
        alias = f"{self._prefix}{name}"
        rows_sql = "transform(array_sort(collect_list(struct(place, numbers))), r -> r.numbers)"
        # For a cross join, Spark would copy the weights into thousands of rows before it computes
        # with them. A join on equal numbers, not known to be zeros, looks them up row by row.
        self._tables[f"{alias}_table"] = (
            f"\nJOIN (SELECT {rows_sql} AS {alias}, min(place) * 0 AS {alias}_zero "
            f"FROM {self._weights} WHERE part = {text(name)}) AS {alias}_table "
            f"ON {alias}_zero = coalesce(size({self._row_of}) * 0, 0)"
        )
        return alias

    def _row(self, values: Array) -> str:
        return f"{self._part(values[None])}[0]"

    def _emit_linear(self, linear: Linear, graph: Graph, node: Node, x: str) -> str:
        groups, inputs, outputs = linear.kernel.shape
        width, positions = groups * inputs, node.size // (groups * outputs)
        kernel = self._part(linear.kernel.transpose(0, 2, 1).reshape(-1, inputs))
        bias = self._row(linear.bias.ravel())
        start = f"q * {width} + o DIV {outputs} * {inputs} + 1"
        products = f"zip_with(slice({x}, {start}, {inputs}), k, (a, b) -> a * b)"
        total = f"aggregate({products}, CAST({bias}[o] AS DOUBLE), (s, v) -> s + v)"
        if positions == 1:
            total = total.replace("q * ", "0 * ")
            found = f"transform({kernel}, (k, o) -> {total})"
        else:
            found = (
                f"flatten(transform(sequence(0, {positions - 1}), "
                f"q -> transform({kernel}, (k, o) -> {total})))"
            )
        return f"CASE WHEN {x} IS NOT NULL THEN {found} END"

    def _emit_gather(self, gather: Gather, graph: Graph, node: Node, x: str) -> str:
        places = gather.places
        if _is_slice(places):
            return f"slice({x}, {places[0] + 1}, {len(places)})"
        taken = f"{x}[CAST(i AS INT)]"
        if (places < 0).any():
            taken = f"CASE WHEN i < 0 THEN CAST({number(gather.fill)} AS DOUBLE) ELSE {taken} END"
        found = f"transform({self._row(places)}, i -> {taken})"
        return f"CASE WHEN {x} IS NOT NULL THEN {found} END"

    def _emit_map(self, function: Map, graph: Graph, node: Node, x: str) -> str:
        formula = WORDS.apply(function.function, function.constants, "x")
        return f"transform({x}, x -> CAST({formula} AS DOUBLE))"

    def _emit_scale(self, scale: Scale, graph: Graph, node: Node, x: str) -> str:
        factor, shift = (self._row(values) for values in (scale.factor, scale.shift))
        place = f"i % {scale.factor.size}"
        return f"transform({x}, (x, i) -> x * {factor}[{place}] + {shift}[{place}])"

    def _emit_slope(self, slope: Slope, graph: Graph, node: Node, x: str) -> str:
        factor = f"{self._row(slope.factor)}[i % {slope.factor.size}]"
        return f"transform({x}, (x, i) -> CASE WHEN x > 0 THEN x ELSE x * {factor} END)"

    def _emit_combine(self, combine: Combine, graph: Graph, node: Node, *given: str) -> str:
        formula = _SIGNS.get(combine.operation) or _CALLS[combine.operation]
        found = given[0]
        for other in given[1:]:
            found = f"zip_with({found}, {other}, (a, b) -> {formula})"
        return found

    def _emit_concatenate(
        self, concatenate: Concatenate, graph: Graph, node: Node, *given: str
    ) -> str:
        return f"concat({', '.join(given)})"

    def _emit_reduce(self, reduce: Reduce, graph: Graph, node: Node, x: str) -> str:
        part = f"slice({x}, q * {reduce.count} + 1, {reduce.count})"
        if reduce.operation == "sum":
            value = f"aggregate({part}, CAST(0 AS DOUBLE), (s, v) -> s + v)"
        else:
            value = f"array_max({part})"
        found = f"transform(sequence(0, {node.size - 1}), q -> {value})"
        return f"CASE WHEN {x} IS NOT NULL THEN {found} END"

    def _emit_softmax(self, softmax: Softmax, graph: Graph, node: Node, x: str) -> str:
        powers = f"transform(r, x -> {WORDS.fade('x - m')})"
        total = "aggregate(e, CAST(0 AS DOUBLE), (s, v) -> s + v)"
        shares = let("e", powers, let("s", total, "transform(e, x -> x / s)"))
        shares = let("m", "array_max(r)", shares)
        if softmax.count == node.size:
            return let("r", x, shares)
        part = f"slice({x}, q * {softmax.count} + 1, {softmax.count})"
        last = node.size // softmax.count - 1
        found = f"flatten(transform(sequence(0, {last}), q -> {let('r', part, shares)}))"
        return f"CASE WHEN {x} IS NOT NULL THEN {found} END"

    def _emit_lookup(self, lookup: Lookup, graph: Graph, node: Node, x: str) -> str:
        table = self._part(lookup.table)
        known = f"array_min({x}) > -1 AND array_max({x}) < {len(lookup.table)}"
        found = f"flatten(transform({x}, i -> {table}[CAST(i AS INT)]))"
        return f"CASE WHEN {known} THEN CAST({found} AS ARRAY<DOUBLE>) END"

    def _emit_fold(self, fold: Fold, graph: Graph, node: Node, x: str) -> str:
        width = graph.nodes[node.inputs[0]].size // fold.steps
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
            value = self._emit(graph, node, names)
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


def _names_once(operation: object) -> bool:
    """Return whether the SQL for an operation uses its input once, not once per number."""
    if isinstance(operation, Gather):
        return _is_slice(operation.places)
    return isinstance(operation, (Map, Scale, Slope, Combine, Concatenate))


def _is_slice(places: Array) -> bool:
    return bool((np.diff(places) == 1).all() and places[0] >= 0)


def let(name: str, value: str, body: str) -> str:
    """Return an expression in which a name stands for a value that is computed once per row."""
    return f"element_at(transform(array({value}), {name} -> {body}), 1)"


def array_of(values: Array) -> str:
    """Return an array literal of doubles: plain numbers are decimals in Spark."""
    return f"array({', '.join(f'CAST({float(x)!r} AS DOUBLE)' for x in values)})"
