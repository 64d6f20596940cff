"""DuckDB: a query in levels, each with one operation on lists.

In DuckDB, numbers are vectors over all rows, and values that a lambda captures are copied for every
element. So arrays are combined by zipping them, and sums of products over windows are written out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import Any

import numpy as np

from pybackend.core.errors import InputError
from pybackend.sql import operations as ops
from pybackend.sql.database import LARGEST, Connection, SqlWriter, levels_of, number
from pybackend.sql.operations import Array, Graph, Node, Question, WeightsPart, drop_unused, unroll

# Seconds between two checks for an interrupt, and for its effect.
_PAUSE = 0.05
# Most nested queries; DuckDB's own limit is 1000.
_MOST_LEVELS = 900
# Most products written out in a query; DuckDB parses some thousand per second.
_MOST_PRODUCTS = 40_000


def _check_size(graph: Graph) -> None:
    """Reject a query that DuckDB would reject, or take minutes to parse; name the layer with the
    largest part of it.
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
    def __init__(self, question: Question, has_vectors: bool = False) -> None:
        super().__init__(question, has_vectors)
        self._graph = fuse(unroll(question.graph))
        _check_size(self._graph)
        nodes = list(self._graph.nodes.values())
        self._names = {name: f"{self.prefix}{n}" for n, name in enumerate(self._graph.nodes)}
        self._sizes = {self._names[node.name]: node.size for node in nodes}
        self._multiplied = {n.inputs[0] for n in nodes if isinstance(n.operation, ops.Linear)}
        self._place = 0
        # Tables joined at the innermost level: name, last place of use, and table.
        self._tables: dict[int, tuple[str, int, str]] = {}

    def write(self) -> str:
        levels = list(levels_of(self._graph))
        # From the last level to the first, so that the last use of weights is known.
        values = {place: self._value(place, node) for place, node, _ in reversed(levels)}
        columns = [f"{value} AS {self._names[n]}" for n, value in self.select_inputs().items()]
        query = f"SELECT {', '.join([*self.keys, *columns])}\nFROM {self.question.source}"
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
        key = id(operation)  # the steps of an unrolled recurrent layer have the same operations
        if key not in self._tables:
            alias = f"{self.prefix}w{len(self._tables)}"
            table = (
                f"\nCROSS JOIN (SELECT list(CAST(numbers AS FLOAT[{rows.shape[1]}]) "
                f"ORDER BY place) AS {alias} "
                f"FROM {self.weights} WHERE part = {self.add_part(rows)})"
            )
            self._tables[key] = (alias, self._place, table)
        return self._tables[key][0]

    def join_columns(self, columns: Sequence[str]) -> str:
        return f"[{', '.join(f'CAST({column} AS DOUBLE)' for column in columns)}]"

    def check_numbers(self, value: str, size: int) -> str:
        whole = (
            f"len({value}) = {size} AND list_count({value}) = {size} "
            f"AND list_min({value}) >= -{LARGEST} AND list_max({value}) <= {LARGEST}"
        )
        return f"CASE WHEN {whole} THEN CAST({value} AS FLOAT[{size}]) END"

    def best(self, value: str) -> str:
        return f"CAST(list_position({value}, list_max({value})) - 1 AS INTEGER)"

    def name_code(self, code: str, levels: Sequence[str]) -> str:
        return f"[{', '.join(map(self.text, levels))}][{code} + 1]"

    def emit_linear(self, linear: ops.Linear, size: int, x: str) -> str:
        name = self._join_rows(linear, linear.kernel[0].T)
        sums = [
            f"array_inner_product({x}, {name}[{place}]) + {number(bias)}"
            for place, bias in enumerate(linear.bias[0], 1)
        ]
        found = _floats(f"[{', '.join(sums)}]")
        return f"CASE WHEN {x} IS NOT NULL THEN {found} END"

    def emit_zip(self, zipped: Zip, size: int, x: str) -> str:
        listed = zipped.places.reshape(-1, zipped.places.shape[-1])
        distinct, which = np.unique(listed, axis=0, return_inverse=True)
        lists = ", ".join(self._take(x, places, zipped.fill) for places in distinct)
        formulas = ", ".join(zipped.formulas(which.reshape(zipped.places.shape[:2])))
        return _floats(f"flatten(list_transform(list_zip({lists}), lambda t: [{formulas}]))")

    def emit_gather(self, gather: ops.Gather, size: int, x: str) -> str:
        return self._take(x, gather.places, gather.fill)

    def _take(self, x: str, places: Array, fill: float) -> str:
        """Select numbers in a list by position, from 0; -1 selects the fill value."""
        if (places < 0).any():
            places = np.where(places < 0, self._sizes[x], places)
            x = f"list_append({x}, CAST({number(fill)} AS FLOAT))"
        return _select(x, places)

    def each(self, size: int, x: str, formula: Callable[..., str], *vectors: Array) -> str:
        if not vectors:
            return _floats(f"list_transform({x}, lambda x: {formula('x')})")
        return _zip([x, *(self.array_of(np.resize(v, size)) for v in vectors)], formula)

    def emit_combine(self, combine: ops.Combine, size: int, *given: str) -> str:
        return _zip(given, partial(self.combine, combine.operation))

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
        powers = f"list_transform(r, lambda x: {self.fade('x - list_max(r)')})"
        shares = _let("e", powers, "list_transform(e, lambda x: x / list_sum(e))")
        return _floats(" || ".join(_let("r", part, shares) for part in parts))

    def emit_lookup(self, lookup: ops.Lookup, size: int, x: str) -> str:
        known = f"list_min({x}) > -1 AND list_max({x}) < {len(lookup.table)}"
        places = f"list_transform({x}, lambda x: CAST(trunc(x) AS INTEGER) + 1)"
        chosen = f"list_select({self._join_rows(lookup, lookup.table)}, {places})"
        return f"CASE WHEN {known} THEN {_floats(f'flatten({chosen})')} END"


def _zip(lists: Sequence[str], formula: Callable[..., str]) -> str:
    """Apply a formula to the numbers of lists of equal length."""
    found = formula(*(f"t[{place}]" for place in range(1, len(lists) + 1)))
    return _floats(f"list_transform(list_zip({', '.join(lists)}), lambda t: {found})")


def _let(name: str, value: str, body: str) -> str:
    """Return an expression in which a name stands for a value that is computed once."""
    return f"list_transform([{value}], lambda {name}: {body})[1]"


def _floats(value: str) -> str:
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


# Windows that move over an array as zipped lists, which DuckDB computes in one operation.

_RELU = ops.Map("relu")
# Pooled sums are written out for every spot of the pooling's window.
_MOST_SPOTS = 9
_MOST_POOLED_PRODUCTS = 20_000


@dataclass(frozen=True, eq=False)
class Zip:
    """Sums of products of the numbers in a window, at each position of the window."""

    # Positions of the numbers in a window, for each of the pooled spots: an array of shape (spots,
    # numbers of a window, positions of the window). Position -1 stands for `fill`.
    places: Array
    fill: float
    linear: ops.Linear
    is_positive: bool = False  # sums below zero count as zero
    pooling: str | None = None  # "maximum" or "sum" of the spots; None for a single spot

    def formulas(self, lists: Array) -> Iterator[str]:
        """Yield formulas of ``t[1]``, ``t[2]``, ..., the numbers of zipped lists at one position.

        ``lists`` has the index of the list for each spot and number of a window.
        """
        groups = len(self.linear.kernel)
        each = np.split(lists, groups, axis=1), self.linear.kernel, self.linear.bias
        for taken, kernel, biases in zip(*each, strict=True):
            for weights, bias in zip(kernel.T, biases, strict=True):
                yield self._pool([_sum(spot, weights, bias) for spot in taken])

    def _pool(self, sums: list[str]) -> str:
        if self.pooling == "sum":
            return " + ".join(f"greatest({x}, 0)" if self.is_positive else x for x in sums)
        if self.is_positive:
            sums = [*sums, "0"]
        return sums[0] if len(sums) == 1 else f"greatest({', '.join(sums)})"


def fuse(graph: Graph) -> Graph:
    """Fuse sums of products at several positions, and adjacent operations, into zips."""
    uses = [name for node in graph.nodes.values() for name in node.inputs]
    once = {name for name in graph.nodes if [*uses, *graph.outputs].count(name) == 1}
    made = dict(graph.nodes)
    for node in graph.nodes.values():
        fused = _fuse_linear(made, once, node) or _fuse_relu(made, once, node)
        fused = fused or _fuse_pooling(made, once, node)
        if fused is not None:
            made[node.name] = fused
    return drop_unused(Graph(made, graph.outputs))


def _before(nodes: dict[str, Node], once: set[str], node: Node, kind: type) -> Node | None:
    """Return a node's input if it is an operation of some kind that no other node uses."""
    found = nodes[node.inputs[0]] if node.inputs and node.inputs[0] in once else None
    return found if found is not None and isinstance(found.operation, kind) else None


def _fuse_linear(nodes: dict[str, Node], once: set[str], node: Node) -> Node | None:
    linear = node.operation
    if not isinstance(linear, ops.Linear):
        return None
    groups, inputs, outputs = linear.kernel.shape
    positions = node.size // (groups * outputs)
    if groups == positions == 1:
        return None
    places = np.arange(positions * groups * inputs).reshape(1, positions, -1).swapaxes(1, 2)
    gathered = _before(nodes, once, node, ops.Gather)
    if gathered is None:
        return replace(node, operation=Zip(places, 0.0, linear))
    gather = gathered.operation
    zipped = Zip(gather.places[places], gather.fill, linear)
    return replace(node, operation=zipped, inputs=gathered.inputs)


def _fuse_relu(nodes: dict[str, Node], once: set[str], node: Node) -> Node | None:
    zipped = _before(nodes, once, node, Zip)
    if node.operation != _RELU or zipped is None or zipped.operation.pooling == "sum":
        return None
    operation = replace(zipped.operation, is_positive=True)
    return replace(node, operation=operation, inputs=zipped.inputs, layer=zipped.layer)


def _fuse_pooling(nodes: dict[str, Node], once: set[str], node: Node) -> Node | None:
    """Fuse a pooling of sums, if its windows have the same positions in all channels."""
    reduce = node.operation
    gathered = _before(nodes, once, node, ops.Gather) if isinstance(reduce, ops.Reduce) else None
    zipped = _before(nodes, once, gathered, Zip) if gathered is not None else None
    if gathered is None or zipped is None or zipped.operation.pooling is not None:
        return None
    linear, channels = zipped.operation.linear, zipped.operation.linear.bias.size
    products = linear.kernel.size * reduce.count
    is_small = reduce.count <= _MOST_SPOTS and products <= _MOST_POOLED_PRODUCTS
    places = gathered.operation.places
    if not is_small or (places < 0).any() or node.size % channels:
        return None
    spots, channel = np.divmod(places.reshape(-1, channels, reduce.count), channels)
    is_same = (spots == spots[:, :1]).all() and (channel == np.arange(channels)[:, None]).all()
    if not is_same:
        return None
    moved = zipped.operation.places[0][:, spots[:, 0].T].swapaxes(0, 1)
    operation = replace(zipped.operation, places=moved, pooling=reduce.operation)
    return replace(node, operation=operation, inputs=zipped.inputs, layer=zipped.layer)


def _sum(taken: Array, weights: Array, bias: float) -> str:
    products = [f"t[{i + 1}] * {number(w)}" for i, w in zip(taken, weights, strict=True)]
    return " + ".join([*products, number(bias)])


class DuckdbConnection(Connection):
    dialect, writer = "duckdb", DuckdbWriter
    _columns = "(part VARCHAR, place INTEGER, numbers FLOAT[])"

    def check(self) -> None:
        version = self.execute("SELECT version()")[0][0]
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < (1, 3):
            raise InputError(f"DuckDB must be 1.3 or newer, not {version}")

    def _run(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        # On a thread, so that Ctrl-C can interrupt all threads of DuckDB. DuckDB's own handling of
        # Ctrl-C waits until its other threads have finished their parts of the statement.
        rows: Future[list[Any]] = Future()

        def run() -> None:
            if not rows.set_running_or_notify_cancel():
                return
            try:
                rows.set_result(self.raw.execute(sql, list(values)).fetchall())
            except BaseException as error:
                rows.set_exception(error)

        try:
            Thread(target=run).start()
            while wait([rows], _PAUSE).not_done:
                pass  # a signal that arrives just before a wait does not end it
            return [tuple(row) for row in rows.result()]
        except KeyboardInterrupt:
            if not rows.cancel():
                while wait([rows], _PAUSE).not_done:
                    self.raw.interrupt()  # has no effect before the statement has begun
            raise

    def _is_in_transaction(self) -> bool:
        """Compare two transaction ids, which differ outside a transaction."""
        numbers = {self._run("SELECT txid_current()", ())[0][0] for _ in range(2)}
        return len(numbers) == 1

    def _fill(self, table: str, parts: Sequence[WeightsPart]) -> None:
        import pyarrow as pa

        for part in parts:
            rows, width = part.numbers.shape
            offsets = np.arange(rows + 1, dtype=np.int32) * width
            numbers = pa.array(np.ascontiguousarray(part.numbers, np.float32).ravel())
            staged = pa.table(
                {
                    "place": pa.array(np.arange(rows, dtype=np.int32)),
                    "numbers": pa.ListArray.from_arrays(pa.array(offsets), numbers),
                }
            )
            name = "tfdist_staged_weights"
            self.raw.register(name, staged)
            try:
                filling = f"INSERT INTO {table} SELECT ?, place, numbers FROM {name}"
                self.execute(filling, [part.name])
            finally:
                self.raw.unregister(name)
