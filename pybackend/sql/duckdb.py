"""DuckDB: a query in levels, each with one operation on lists.

In DuckDB, numbers are vectors over all rows, and values that a lambda captures are copied for every
element. So arrays are combined by zipping them, and sums of products over windows are written out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from pybackend.core.errors import InputError
from pybackend.sql import graph as ops
from pybackend.sql.formulas import LARGEST, number
from pybackend.sql.graph import Array, Graph, Node, unroll
from pybackend.sql.query import Question
from pybackend.sql.writer import SqlWriter, levels_of
from pybackend.sql.zips import Zip, fuse

# Most nested queries; DuckDB's own limit is 1000.
_MOST_LEVELS = 900
# Most products written out in a query; DuckDB parses some thousand per second.
_MOST_PRODUCTS = 40_000


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


class DuckdbWriter(SqlWriter):
    """Writer of a query for DuckDB."""

    def __init__(self, question: Question, has_vectors: bool = False) -> None:
        super().__init__(question, has_vectors)
        self._graph = fuse(unroll(question.graph))
        _check_size(self._graph)
        nodes = list(self._graph.nodes.values())
        self._names = {node.name: f"{self.prefix}{n}" for n, node in enumerate(nodes)}
        self._sizes = {self._names[node.name]: node.size for node in nodes}
        self._multiplied = {
            node.inputs[0] for node in nodes if isinstance(node.operation, ops.Linear)
        }
        self._place = 0
        # Tables joined at the innermost level: name, last place of use, and table.
        self._tables: dict[int, tuple[str, int, str]] = {}

    def write(self) -> str:
        levels = list(levels_of(self._graph))
        # From the last level to the first, so that the last use of weights is known.
        values = {place: self._value(place, node) for place, node, _ in reversed(levels)}
        query = self._select_inputs()
        tables = "".join(table for _, _, table in self._tables.values())
        for place, node, live in levels:
            columns = [*self.keys, *(self._names[name] for name in live)]
            columns += [name for name, last, _ in self._tables.values() if last > place]
            columns.append(f"{values[place]} AS {self._names[node.name]}")
            query = f"SELECT {', '.join(columns)}\nFROM ({query}){tables}"
            tables = ""
        shown = self.show_outputs([self._names[name] for name in self._graph.outputs])
        return f"SELECT {', '.join([*self.keys, *shown])}\nFROM ({query})"

    def _value(self, place: int, node: Node) -> str:
        self._place = place
        value = self.emit(node, self._names)
        # Cast once for all sums of products of this value.
        return f"CAST({value} AS FLOAT[{node.size}])" if node.name in self._multiplied else value

    def _join_rows(self, operation: object, rows: Array) -> str:
        """Add an operation's rows to the weights table once; return the name of their list."""
        key = id(operation)
        if key not in self._tables:
            alias = f"{self.prefix}w{len(self._tables)}"
            table = (
                f"\nCROSS JOIN (SELECT list(CAST(numbers AS FLOAT[{rows.shape[1]}]) "
                f"ORDER BY place) AS {alias} "
                f"FROM {self.weights} WHERE part = {self.add_part(rows)})"
            )
            self._tables[key] = (alias, self._place, table)
        return self._tables[key][0]

    def _select_inputs(self) -> str:
        columns = list(self.keys)
        for node in self._graph.inputs:
            given = self.question.features[node.name]
            if isinstance(given, str):
                value = self.quote(given)
            else:
                numbers = (f"CAST({self.quote(name)} AS DOUBLE)" for name in given)
                value = f"[{', '.join(numbers)}]"
            whole = (
                f"len({value}) = {node.size} AND list_count({value}) = {node.size} "
                f"AND list_min({value}) >= -{LARGEST} AND list_max({value}) <= {LARGEST}"
            )
            columns.append(
                f"CASE WHEN {whole} THEN CAST({value} AS FLOAT[{node.size}]) END "
                f"AS {self._names[node.name]}"
            )
        return f"SELECT {', '.join(columns)}\nFROM {self.question.source}"

    def show_class(self, value: str, size: int, levels: Sequence[str] | None) -> str:
        place = f"list_position({value}, list_max({value}))"
        if size == 1:
            place = self.second_if_likely(value)
        if levels is None:
            return f"CAST({place} - 1 AS INTEGER)"
        return f"[{', '.join(map(self.text, levels))}][{place}]"

    def emit_linear(self, linear: ops.Linear, size: int, x: str) -> str:
        name = self._join_rows(linear, linear.kernel[0].T)
        sums = [
            f"array_inner_product({x}, {name}[{place}]) + {number(bias)}"
            for place, bias in enumerate(linear.bias[0], 1)
        ]
        found = _floats(f"[{', '.join(sums)}]")
        return f"CASE WHEN {x} IS NOT NULL THEN {found} END"

    def emit_zip(self, zipped: Zip, size: int, x: str) -> str:
        lists = ", ".join(self._take(x, places, zipped.fill) for places in zipped.lists)
        formulas = ", ".join(zipped.formulas)
        return _floats(f"flatten(list_transform(list_zip({lists}), lambda t: [{formulas}]))")

    def emit_gather(self, gather: ops.Gather, size: int, x: str) -> str:
        return self._take(x, gather.places, gather.fill)

    def _take(self, x: str, places: Array, fill: float) -> str:
        """Select numbers in a list by position, from 0; -1 selects the fill value."""
        if (places < 0).any():
            places = np.where(places < 0, self._sizes[x], places)
            x = f"list_append({x}, CAST({number(fill)} AS FLOAT))"
        return _select(x, places)

    def emit_map(self, function: ops.Map, size: int, x: str) -> str:
        formula = self.words.apply(function.function, function.constants, "x")
        return _floats(f"list_transform({x}, lambda x: {formula})")

    def emit_scale(self, scale: ops.Scale, size: int, x: str) -> str:
        if scale.factor.size == 1:
            (factor,), (shift,) = scale.factor, scale.shift
            formula = f"x * {number(factor)} + {number(shift)}"
            return _floats(f"list_transform({x}, lambda x: {formula})")
        factor, shift = (self.array_of(np.resize(v, size)) for v in (scale.factor, scale.shift))
        return _transform([x, factor, shift], "t[1] * t[2] + t[3]")

    def emit_slope(self, slope: ops.Slope, size: int, x: str) -> str:
        factor = self.array_of(np.resize(slope.factor, size))
        return _transform([x, factor], "CASE WHEN t[1] > 0 THEN t[1] ELSE t[1] * t[2] END")

    def emit_combine(self, combine: ops.Combine, size: int, *given: str) -> str:
        terms = [f"t[{place}]" for place in range(1, len(given) + 1)]
        return _transform(given, self.combine(combine.operation, terms))

    def emit_concatenate(self, concatenate: ops.Concatenate, size: int, *given: str) -> str:
        return " || ".join(given)

    def emit_reduce(self, reduce: ops.Reduce, size: int, x: str) -> str:
        if reduce.count == 1:
            return x
        parts = [_select(x, np.arange(size) * reduce.count + i) for i in range(reduce.count)]
        operation = "add" if reduce.operation == "sum" else reduce.operation
        return self.emit_combine(ops.Combine(operation), size, *parts)

    def emit_softmax(self, softmax: ops.Softmax, size: int, x: str) -> str:
        parts = [f"{x}[{i + 1}:{i + softmax.count}]" for i in range(0, size, softmax.count)]
        powers = f"list_transform(r, lambda x: {self.words.fade('x - list_max(r)')})"
        shares = _let("e", powers, "list_transform(e, lambda x: x / list_sum(e))")
        return _floats(" || ".join(_let("r", part, shares) for part in parts))

    def emit_lookup(self, lookup: ops.Lookup, size: int, x: str) -> str:
        known = f"list_min({x}) > -1 AND list_max({x}) < {len(lookup.table)}"
        places = f"list_transform({x}, lambda x: CAST(trunc(x) AS INTEGER) + 1)"
        chosen = f"list_select({self._join_rows(lookup, lookup.table)}, {places})"
        return f"CASE WHEN {known} THEN {_floats(f'flatten({chosen})')} END"


def _transform(lists: Sequence[str], formula: str) -> str:
    """Apply a formula to the numbers ``t[1]``, ``t[2]``, ... of lists of equal length."""
    return _floats(f"list_transform(list_zip({', '.join(lists)}), lambda t: {formula})")


def _let(name: str, value: str, body: str) -> str:
    """Return an expression in which a name stands for a value that is computed once."""
    return f"list_transform([{value}], lambda {name}: {body})[1]"


def _floats(value: str) -> str:
    """Cast to a list of float32."""
    return f"CAST({value} AS FLOAT[])"


def _select(x: str, places: Array) -> str:
    """Select numbers in a list by position, from 0."""
    first, steps = int(places[0]), np.diff(places)
    if (steps == 1).all():
        return f"({x})[{first + 1}:{first + len(places)}]"
    if (steps == steps[0]).all() and steps[0] != 0:
        last = int(places[-1])
        end = last + (1 if steps[0] > 0 else -1)
        return f"list_select({x}, range({first + 1}, {end + 1}, {int(steps[0])}))"
    return f"list_select({x}, [{', '.join(map(str, places + 1))}])"
