"""A model as a graph of operations on one row, and the question that a query answers.

Every value is a flat array of a tensor's numbers in row-major order. A dialect of SQL only needs to
implement each of these few operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Linear:
    """Sums of products: from (positions, groups, n_in) to (positions, groups, n_out) numbers."""

    kernel: Array  # (groups, n_in, n_out)
    bias: Array  # (groups, n_out)


@dataclass(frozen=True, eq=False)
class Gather:
    """The numbers at given positions, in this order; position -1 stands for ``fill``."""

    places: Array
    fill: float = 0.0


@dataclass(frozen=True)
class Map:
    """Function applied to each number: Keras's name for the activation, and its constants."""

    function: str
    constants: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Scale:
    """Numbers times a factor plus a shift, both repeated along the array."""

    factor: Array
    shift: Array


@dataclass(frozen=True, eq=False)
class Slope:
    """Negative numbers times a factor, which is repeated along the array."""

    factor: Array


@dataclass(frozen=True)
class Combine:
    """Element-wise "add", "subtract", "multiply", "maximum" or "minimum" of arrays of equal
    length.
    """

    operation: str


@dataclass(frozen=True)
class Concatenate:
    pass


@dataclass(frozen=True)
class Reduce:
    """The "sum" or the "maximum" of every ``count`` consecutive numbers."""

    operation: str
    count: int


@dataclass(frozen=True)
class Softmax:
    """Softmax of every ``count`` consecutive numbers."""

    count: int


@dataclass(frozen=True, eq=False)
class Lookup:
    """Rows of a table of shape (entries, size), looked up by integers."""

    table: Array


@dataclass(frozen=True, eq=False)
class Fold:
    """Graph that is applied to the parts of an array one after another."""

    graph: Graph  # from `state` and `part` to the next state; the first state is zeros
    steps: int  # number of parts, of equal size
    state: int  # size of a state
    # How many numbers at the start of a state form the result: from the last step or, with
    # `keeps_all`, from all steps one after another.
    shown: int
    keeps_all: bool


@dataclass(frozen=True, eq=False)
class Node:
    """Operation on the values of other nodes, or an input."""

    name: str  # of the value: `v0`, `v1`, ..., or the input's name
    operation: Any  # one of the classes above, or of the dialect; None for an input
    inputs: tuple[str, ...]
    size: int  # of the value
    layer: str = ""  # which errors name


@dataclass(eq=False)
class Graph:
    """Nodes, each after its inputs, and the names of the outputs."""

    nodes: dict[str, Node] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()

    @property
    def inputs(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.operation is None]

    def add_input(self, name: str, size: int) -> str:
        self.nodes[name] = Node(name, None, (), size)
        return name

    def add(self, operation: Any, inputs: Sequence[str], size: int, layer: str = "") -> str:
        # Names of inputs are the user's, and may look like these.
        free = (f"v{n}" for n in count(len(self.nodes)))
        name = next(name for name in free if name not in self.nodes)
        self.nodes[name] = Node(name, operation, tuple(inputs), size, layer)
        return name


# A larger shift inside sums of products would add rounding errors.
_MOST_SHIFT = 16.0


def simplify(graph: Graph) -> Graph:
    """Merge scales into the sums of products before or after them, and drop unused nodes."""
    nodes = dict(graph.nodes)
    for name in list(nodes):
        node = nodes[name]
        if isinstance(node.operation, Fold):
            inner = replace(node.operation, graph=simplify(node.operation.graph))
            nodes[name] = replace(node, operation=inner)
            continue
        first = nodes[node.inputs[0]] if node.inputs else node
        merged = _merge(first, node)
        if merged is not None and _count_uses(nodes, graph, first.name) == 1:
            nodes[name] = replace(node, operation=merged, inputs=first.inputs)
            del nodes[first.name]
    return drop_unused(Graph(nodes, graph.outputs))


def unroll(graph: Graph) -> Graph:
    """Return the graph without folds: each operation in each of their steps becomes a node."""
    made = Graph()
    names: dict[str, str] = {}
    for node in graph.nodes.values():
        given = [names[name] for name in node.inputs]
        if node.operation is None:
            names[node.name] = made.add_input(node.name, node.size)
        elif isinstance(node.operation, Fold):
            names[node.name] = _unroll_fold(made, node.operation, given[0], node)
        else:
            names[node.name] = made.add(node.operation, given, node.size, node.layer)
    made.outputs = tuple(names[name] for name in graph.outputs)
    return made


def _unroll_fold(made: Graph, fold: Fold, whole: str, node: Node) -> str:
    width = made.nodes[whole].size // fold.steps
    shown = []
    # Operations of the first step on the initial state of zeros are in the graph as well.
    zeros = Scale(np.zeros(1), np.zeros(1))
    taken = made.add(Gather(np.zeros(fold.state, np.int64)), [whole], fold.state, node.layer)
    state = made.add(zeros, [taken], fold.state, node.layer)
    for step in range(fold.steps):
        places = np.arange(step * width, (step + 1) * width)
        names = {"state": state, "part": made.add(Gather(places), [whole], width, node.layer)}
        for inner in fold.graph.nodes.values():
            if inner.operation is not None:
                given = [names[name] for name in inner.inputs]
                names[inner.name] = made.add(inner.operation, given, inner.size, node.layer)
        state = names[fold.graph.outputs[0]]
        if fold.keeps_all or step == fold.steps - 1:
            first = Gather(np.arange(fold.shown))
            is_whole = fold.shown == fold.state
            shown.append(state if is_whole else made.add(first, [state], fold.shown, node.layer))
    return shown[0] if len(shown) == 1 else made.add(Concatenate(), shown, node.size, node.layer)


def _merge(first: Node, second: Node) -> Linear | None:
    """Return one sum of products for two consecutive operations; None if there is none."""
    match first.operation, second.operation:
        case Linear() as linear, Scale() as scale:
            return _scale_after(linear, scale)
        case Scale() as scale, Linear() as linear:
            return _scale_before(linear, scale)
    return None


def _scale_after(linear: Linear, scale: Scale) -> Linear | None:
    groups, _, outputs = linear.kernel.shape
    if groups * outputs % scale.factor.size:
        return None
    factor, shift = (np.resize(x, (groups, outputs)) for x in (scale.factor, scale.shift))
    return Linear(linear.kernel * factor[:, None], linear.bias * factor + shift)


def _scale_before(linear: Linear, scale: Scale) -> Linear | None:
    groups, inputs, _ = linear.kernel.shape
    if groups * inputs % scale.factor.size or np.abs(scale.shift).max() > _MOST_SHIFT:
        return None
    factor, shift = (np.resize(x, (groups, inputs)) for x in (scale.factor, scale.shift))
    bias = linear.bias + np.einsum("gi,gio->go", shift, linear.kernel.astype(np.float64))
    return Linear(linear.kernel * factor[..., None], bias)


def _count_uses(nodes: dict[str, Node], graph: Graph, name: str) -> int:
    return sum(node.inputs.count(name) for node in nodes.values()) + graph.outputs.count(name)


def drop_unused(graph: Graph) -> Graph:
    """Return the graph without the nodes that no output needs."""
    used = set(graph.outputs)
    for node in reversed(list(graph.nodes.values())):
        if node.name in used:
            used.update(node.inputs)
    nodes = {n: node for n, node in graph.nodes.items() if n in used or node.operation is None}
    return Graph(nodes, graph.outputs)


@dataclass(frozen=True)
class Shown:
    """Column of the result."""

    name: str
    output: int  # index of the graph's output
    # Of the number in the output; -1: 1 minus the first number; None: all, as an array.
    index: int | None = None
    is_class: bool = False
    # Names of the classes, for the class of the largest number; None shows its index. For a single
    # number, the class is the second one if the number is above one half.
    levels: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Encoding:
    """Categories of a column, in the order of their codes 0, 1, 2, ...; or with ``is_one_hot`` a
    number for each, 1 in rows that have it.
    """

    values: tuple[Any, ...]
    is_one_hot: bool

    @property
    def width(self) -> int:
        """Numbers per row."""
        return len(self.values) if self.is_one_hot else 1


@dataclass(frozen=True)
class SourceQuery:
    """Query that replaces a table as the source of rows."""

    sql: str


@dataclass(frozen=True)
class Question:
    """Description of a query to generate."""

    graph: Graph
    source: str  # SQL of a relation: a table's quoted name, or a query in parentheses
    keys: tuple[str, ...]  # columns of the source that are shown unchanged
    # By input of the graph: a column of arrays, or the columns that hold its numbers.
    features: Mapping[str, str | tuple[str, ...]]
    shown: tuple[Shown, ...]
    weights: str  # name of the table
    encodings: Mapping[str, Encoding] = field(default_factory=dict)
    # Types to which features are cast first, because PostgreSQL does not do it itself.
    casts: Mapping[str, str] = field(default_factory=dict)
    model: Any = field(default=None, repr=False)  # the Keras model of the graph


@dataclass(frozen=True)
class WeightsPart:
    """Rows of the weights table with one name: an array of shape (rows, numbers), in order.

    ``is_kernel``: they are multiplied with whole arrays, so pgvector has them as vectors, too.
    """

    name: str
    numbers: Array
    is_kernel: bool = False


def list_columns(features: str | Sequence[str] | Mapping[str, str | Sequence[str]]) -> list[str]:
    """Return the columns of all inputs, each once."""
    groups = features.values() if isinstance(features, Mapping) else [features]
    listed = [[given] if isinstance(given, str) else given for given in groups]
    return list(dict.fromkeys(column for group in listed for column in group))


def free_prefix(names: Sequence[str]) -> str:
    """Return a prefix for intermediate columns that no name begins with, ignoring case."""
    prefix = "_"
    while any(name.lower().startswith(prefix) for name in names):
        prefix += "_"
    return prefix
