"""Computation of a trained network for one row, as a few kinds of operations on flat arrays.

Every value is a flat array of a tensor's numbers in row-major order. A dialect of SQL only needs to
implement each of these operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Linear:
    """Sums of products: from (positions, groups, n_in) to (positions, groups, n_out) numbers.

    Attributes
    ----------
    kernel
        Array of shape (groups, n_in, n_out).
    bias
        Array of shape (groups, n_out).
    """

    kernel: Array
    bias: Array


@dataclass(frozen=True, eq=False)
class Gather:
    """The numbers at some places, in this order; a place of -1 gives ``fill``."""

    places: Array
    fill: float = 0.0


@dataclass(frozen=True)
class Map:
    """Function of each number, by Keras's name of the activation, with its constants."""

    function: str
    constants: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Scale:
    """Numbers times a factor plus a shift; both repeat along the array."""

    factor: Array
    shift: Array


@dataclass(frozen=True, eq=False)
class Slope:
    """Negative numbers times a factor, which repeats along the array."""

    factor: Array


@dataclass(frozen=True)
class Combine:
    """Element-wise combination of arrays of equal length.

    Attributes
    ----------
    operation
        "add", "subtract", "multiply", "maximum" or "minimum".
    """

    operation: str


@dataclass(frozen=True)
class Concatenate:
    """Concatenation of arrays."""


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
    """Rows of a table (entries, size), by integers."""

    table: Array


@dataclass(frozen=True, eq=False)
class Fold:
    """Graph that is applied to one part of an array after the other.

    Attributes
    ----------
    graph
        Graph from ``state`` and ``part`` to the next state; the first state is zeros.
    steps
        Number of parts of the array, which have equal size.
    state
        Size of a state.
    shown
        Number of the first numbers of a state that are the result: of the last step, or with
        ``keeps_all`` of all steps one after the other.
    """

    graph: Graph
    steps: int
    state: int
    shown: int
    keeps_all: bool


@dataclass(frozen=True, eq=False)
class Node:
    """Operation on the values of other nodes, or an input.

    Attributes
    ----------
    name
        Name of the value: ``v0``, ``v1``, ..., or the input's name.
    operation
        One of the classes above, or a class of the dialect; None for an input.
    size
        Size of the value.
    layer
        Name of the operation's layer.
    """

    name: str
    operation: Any
    inputs: tuple[str, ...]
    size: int
    layer: str = ""


@dataclass(eq=False)
class Graph:
    """Nodes, each after its inputs, and the names of the outputs."""

    nodes: dict[str, Node] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()

    @property
    def inputs(self) -> list[Node]:
        """Input nodes, in their order."""
        return [node for node in self.nodes.values() if node.operation is None]

    def add_input(self, name: str, size: int) -> str:
        """Add an input by its name."""
        self.nodes[name] = Node(name, None, (), size)
        return name

    def add(self, operation: Any, inputs: Sequence[str], size: int, layer: str = "") -> str:
        """Add an operation and return the name of its value."""
        # Names of inputs may look like these.
        free = (f"v{n}" for n in count(len(self.nodes)))
        name = next(name for name in free if name not in self.nodes)
        self.nodes[name] = Node(name, operation, tuple(inputs), size, layer)
        return name
