"""DuckDB: a query in levels, each with one operation on lists.

In DuckDB, numbers are vectors over all rows, and values that a lambda captures are copied for every
element. So arrays are combined by zipping them, and sums of products over windows are written out.
"""

from __future__ import annotations

from collections import Counter
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
from pybackend.sql.query import (
    QueryAnswer,
    Question,
    Shown,
    WeightsPart,
    find_last_uses,
    free_prefix,
)
from pybackend.sql.zips import Zip, fuse

WORDS = Words(double="DOUBLE")
_SIGNS = {"add": " + ", "subtract": " - ", "multiply": " * "}
_CALLS = {"maximum": "greatest", "minimum": "least"}
# Most nested queries; DuckDB's own limit is 1000.
_MOST_LEVELS = 900
# Most products written out in a query; DuckDB parses some thousand per second.
_MOST_PRODUCTS = 40_000


def quote(name: str) -> str:
    """Quote a name."""
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    """Quote a string."""
    return "'" + value.replace("'", "''") + "'"


def compile_query(question: Question) -> QueryAnswer:
    """Return the query and the weights that it needs."""
    return _DuckdbCompiler(question).compile()


def _check_size(graph: Graph) -> None:
    """Reject a query that DuckDB would reject, or take minutes to parse.

    Raises
    ------
    InputError
        The message names the layer with the largest part of the query.
    """
    layers = Counter(node.layer for node in graph.nodes.values())
    if len(graph.nodes) > _MOST_LEVELS:
        layer, count = layers.most_common(1)[0]
        raise InputError(
            f"the layer {layer!r} cannot be converted to DuckDB SQL: its steps would be {count} "
            f"nested queries, but at most {_MOST_LEVELS} are possible. Shorten its sequence, or "
            "use another database"
        )
    products = Counter[str]()
    for node in graph.nodes.values():
        if isinstance(node.operation, Zip):
            products[node.layer] += node.operation.linear.kernel.size * len(node.operation.places)
    if products.total() > _MOST_PRODUCTS:
        layer, count = products.most_common(1)[0]
        raise InputError(
            f"the layer {layer!r} cannot be converted to DuckDB SQL: {count} of its products "
            f"would be written out, {products.total()} for the whole model, but DuckDB needs "
            f"minutes to parse more than {_MOST_PRODUCTS}. Use fewer filters, or another database"
        )


class _DuckdbCompiler:
    def __init__(self, question: Question) -> None:
        self._question = question
        self._graph = fuse(unroll(question.graph))
        _check_size(self._graph)
        self._prefix = free_prefix(question.keys)
        self._answer = QueryAnswer()
        self._last_use = find_last_uses(self._graph)
        nodes = enumerate(self._graph.nodes.values())
        self._names = {node.name: f"{self._prefix}{n}" for n, node in nodes}
        self._multiplied = {
            node.inputs[0]
            for node in self._graph.nodes.values()
            if isinstance(node.operation, Linear)
        }
        # Tables joined at the innermost level: name, last place of use, and table.
        self._weights: dict[int, tuple[str, int, str]] = {}

    def compile(self) -> QueryAnswer:
        places = list(enumerate(self._graph.nodes.values()))
        # From the last level to the first, so that the last use of weights is known.
        values = {place: self._emit(place, node) for place, node in reversed(places)}
        query = self._select_inputs()
        tables = "".join(table for _, _, table in self._weights.values())
        live = [node.name for node in self._graph.inputs]
        for place, node in places:
            if node.operation is None:
                continue
            live = [name for name in live if self._last_use[name] > place]
            columns = [*map(quote, self._question.keys), *(self._names[name] for name in live)]
            columns += [name for name, last, _ in self._weights.values() if last > place]
            columns.append(f"{values[place]} AS {self._names[node.name]}")
            query = f"SELECT {', '.join(columns)}\nFROM ({query}){tables}"
            tables = ""
            live.append(node.name)
        shown = [self._show(column) for column in self._question.shown]
        listed = ", ".join([*map(quote, self._question.keys), *shown])
        self._answer.query = f"SELECT {listed}\nFROM ({query})"
        return self._answer

    def _emit(self, place: int, node: Node) -> str:
        if node.operation is None:
            return ""
        given = [self._names[name] for name in node.inputs]
        sizes = [self._graph.nodes[name].size for name in node.inputs]
        value = emit(node, given, sizes, lambda rows: self._add_weights(node, place, rows))
        # Cast once for all sums of products of this value.
        return f"CAST({value} AS FLOAT[{node.size}])" if node.name in self._multiplied else value

    def _add_weights(self, node: Node, place: int, rows: Array) -> str:
        """Add an operation's rows to the weights table once; return the name of their list."""
        key = id(node.operation)
        if key not in self._weights:
            part, alias = f"p{len(self._weights)}", f"{self._prefix}w{len(self._weights)}"
            self._answer.parts.append(WeightsPart(part, rows))
            table = (
                f"\nCROSS JOIN (SELECT list(CAST(numbers AS FLOAT[{rows.shape[1]}]) "
                f"ORDER BY place) AS {alias} "
                f"FROM {quote(self._question.weights)} WHERE part = {text(part)})"
            )
            self._weights[key] = (alias, place, table)
        return self._weights[key][0]

    def _select_inputs(self) -> str:
        columns = [quote(name) for name in self._question.keys]
        for node in self._graph.inputs:
            given = self._question.features[node.name]
            if isinstance(given, str):
                value = quote(given)
            else:
                value = "[" + ", ".join(f"CAST({quote(name)} AS DOUBLE)" for name in given) + "]"
            whole = (
                f"len({value}) = {node.size} AND list_count({value}) = {node.size} "
                f"AND list_min({value}) >= -{LARGEST} AND list_max({value}) <= {LARGEST}"
            )
            columns.append(
                f"CASE WHEN {whole} THEN CAST({value} AS FLOAT[{node.size}]) END "
                f"AS {self._names[node.name]}"
            )
        return f"SELECT {', '.join(columns)}\nFROM {self._question.source}"

    def _show(self, column: Shown) -> str:
        node = self._graph.nodes[self._graph.outputs[column.output]]
        value = self._names[node.name]
        return f"{show(value, node.size, column)} AS {quote(column.name)}"


def show(value: str, size: int, column: Shown) -> str:
    """Return the expression for a column of the result."""
    if column.is_class:
        if size == 1:
            place = f"CASE WHEN {value}[1] > 0.5 THEN 2 WHEN {value} IS NOT NULL THEN 1 END"
        else:
            place = f"list_position({value}, list_max({value}))"
        if column.levels is None:
            return f"CAST({place} - 1 AS INTEGER)"
        return f"[{', '.join(map(text, column.levels))}][{place}]"
    if column.place is None:
        return f"{value}[1]" if size == 1 else value
    return f"1 - {value}[1]" if column.place < 0 else f"{value}[{column.place + 1}]"


AddWeights = Callable[[Array], str]


def emit(node: Node, given: Sequence[str], sizes: Sequence[int], add: AddWeights) -> str:
    """Return the expression for an operation, which is NULL if its inputs are.

    Parameters
    ----------
    given, sizes
        SQL of the operation's inputs, and their sizes.
    add
        Function that adds an array of shape (rows, numbers) to the weights table, and returns the
        name of a list of its rows.
    """
    return _EMIT[type(node.operation)](node.operation, node.size, given, sizes, add)


def _linear(linear: Linear, size: int, given: Sequence[str], _: object, add: AddWeights) -> str:
    (x,) = given
    name = add(linear.kernel[0].T)
    sums = [
        f"array_inner_product({x}, {name}[{place}]) + {number(bias)}"
        for place, bias in enumerate(linear.bias[0], 1)
    ]
    return _unless_null(x, floats(f"[{', '.join(sums)}]"))


def _zip(zipped: Zip, size: int, given: Sequence[str], sizes: Sequence[int], _: object) -> str:
    lists = [_take(given[0], places, zipped.fill, sizes[0]) for places in zipped.lists]
    formulas = ", ".join(zipped.formulas)
    return floats(f"flatten(list_transform(list_zip({', '.join(lists)}), lambda t: [{formulas}]))")


def _gather(
    gather: Gather, size: int, given: Sequence[str], sizes: Sequence[int], _: object
) -> str:
    return _take(given[0], gather.places, gather.fill, sizes[0])


def _take(x: str, places: Array, fill: float, size: int) -> str:
    """Select numbers in a list by position, from 0; -1 selects the fill value."""
    if (places < 0).any():
        x = f"list_append({x}, CAST({number(fill)} AS FLOAT))"
        places = np.where(places < 0, size, places)
    return select(x, places)


def _map(function: Map, size: int, given: Sequence[str], *_: object) -> str:
    formula = WORDS.apply(function.function, function.constants, "x")
    return floats(f"list_transform({given[0]}, lambda x: {formula})")


def _scale(scale: Scale, size: int, given: Sequence[str], *_: object) -> str:
    if scale.factor.size == 1:
        (factor,), (shift,) = scale.factor, scale.shift
        formula = f"x * {number(factor)} + {number(shift)}"
        return floats(f"list_transform({given[0]}, lambda x: {formula})")
    factor, shift = (array_of(np.resize(values, size)) for values in (scale.factor, scale.shift))
    return _transform([given[0], factor, shift], "t[1] * t[2] + t[3]")


def _slope(slope: Slope, size: int, given: Sequence[str], *_: object) -> str:
    factor = array_of(np.resize(slope.factor, size))
    return _transform([given[0], factor], "CASE WHEN t[1] > 0 THEN t[1] ELSE t[1] * t[2] END")


def _combine(combine: Combine, size: int, given: Sequence[str], *_: object) -> str:
    return _transform(given, join_terms(combine.operation, len(given)))


def join_terms(operation: str, count: int) -> str:
    """Return the formula that combines zipped numbers."""
    names = [f"t[{place + 1}]" for place in range(count)]
    if operation in _SIGNS:
        return _SIGNS[operation].join(names)
    return f"{_CALLS[operation]}({', '.join(names)})"


def _join(join: Concatenate, size: int, given: Sequence[str], *_: object) -> str:
    return " || ".join(given)


def _reduce(reduce: Reduce, size: int, given: Sequence[str], *_: object) -> str:
    (x,) = given
    if reduce.count == 1:
        return x
    parts = [select(x, np.arange(size) * reduce.count + i) for i in range(reduce.count)]
    operation = {"sum": "add"}.get(reduce.operation, reduce.operation)
    return _transform(parts, join_terms(operation, reduce.count))


def _softmax(softmax: Softmax, size: int, given: Sequence[str], *_: object) -> str:
    (x,) = given
    parts = [f"{x}[{i + 1}:{i + softmax.count}]" for i in range(0, size, softmax.count)]
    powers = f"list_transform(r, lambda x: {WORDS.fade('x - list_max(r)')})"
    shares = let("e", powers, "list_transform(e, lambda x: x / list_sum(e))")
    return floats(" || ".join(let("r", part, shares) for part in parts))


def _lookup(lookup: Lookup, size: int, given: Sequence[str], _: object, add: AddWeights) -> str:
    (x,) = given
    known = f"list_min({x}) > -1 AND list_max({x}) < {len(lookup.table)}"
    places = f"list_transform({x}, lambda x: CAST(trunc(x) AS INTEGER) + 1)"
    chosen = f"list_select({add(lookup.table)}, {places})"
    return f"CASE WHEN {known} THEN {floats(f'flatten({chosen})')} END"


_EMIT: dict[type, Callable[..., str]] = {
    Combine: _combine,
    Gather: _gather,
    Concatenate: _join,
    Linear: _linear,
    Lookup: _lookup,
    Map: _map,
    Reduce: _reduce,
    Scale: _scale,
    Slope: _slope,
    Softmax: _softmax,
    Zip: _zip,
}


def _transform(lists: Sequence[str], formula: str) -> str:
    """Apply a formula to the numbers ``t[1]``, ``t[2]``, ... of lists of equal length."""
    return floats(f"list_transform(list_zip({', '.join(lists)}), lambda t: {formula})")


def let(name: str, value: str, body: str) -> str:
    """Return an expression in which a name stands for a value that is computed once."""
    return f"list_transform([{value}], lambda {name}: {body})[1]"


def floats(value: str) -> str:
    """Cast to a list of float32."""
    return f"CAST({value} AS FLOAT[])"


def select(x: str, places: Array) -> str:
    """Select numbers in a list by position, from 0."""
    first, steps = int(places[0]), np.diff(places)
    if (steps == 1).all():
        return f"({x})[{first + 1}:{first + len(places)}]"
    if (steps == steps[0]).all() and steps[0] != 0:
        last = int(places[-1])
        end = last + (1 if steps[0] > 0 else -1)
        return f"list_select({x}, range({first + 1}, {end + 1}, {int(steps[0])}))"
    return f"list_select({x}, [{', '.join(map(str, places + 1))}])"


def _unless_null(x: str, value: str) -> str:
    return f"CASE WHEN {x} IS NOT NULL THEN {value} END"


def array_of(values: Array) -> str:
    """Return an array literal."""
    return f"[{', '.join(number(x) for x in values)}]"
