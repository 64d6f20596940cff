"""What a trained network computes for one row, as a few kinds of operations on flat arrays.

Every value is an array of numbers, a tensor's in row-major order. So a dialect of SQL need only
know how to compute each of these operations.
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
    """Sums of products: of (positions, groups, n_in) numbers are (positions, groups, n_out).

    Attributes
    ----------
    kernel
        Of the shape (groups, n_in, n_out).
    bias
        Of the shape (groups, n_out).
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
    """A function of each number, by Keras's name of the activation, with its constants."""

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
    """Arrays of one length, number by number.

    Attributes
    ----------
    operation
        "add", "subtract", "multiply", "maximum" or "minimum".
    """

    operation: str


@dataclass(frozen=True)
class Concatenate:
    """Arrays one after the other."""


@dataclass(frozen=True)
class Reduce:
    """The "sum" or the "maximum" of every ``count`` numbers that follow each other."""

    operation: str
    count: int


@dataclass(frozen=True)
class Softmax:
    """Probabilities of every ``count`` numbers that follow each other."""

    count: int


@dataclass(frozen=True, eq=False)
class Lookup:
    """Rows of a table (entries, size), by whole numbers."""

    table: Array


@dataclass(frozen=True, eq=False)
class Fold:
    """A graph that is computed for one part of an array after the other.

    Attributes
    ----------
    graph
        Takes ``state`` and ``part``, and gives the next state; the first one is zeros.
    steps
        How many parts of equal size the array has.
    state
        How many numbers a state has.
    shown
        How many of them, the first ones, are the result: of the last step, or with ``keeps_all``
        of all steps one after the other.
    """

    graph: Graph
    steps: int
    state: int
    shown: int
    keeps_all: bool


@dataclass(frozen=True, eq=False)
class Node:
    """An operation on the values of other nodes, or an input.

    Attributes
    ----------
    name
        Of the value: ``v0``, ``v1``, ..., or that of the input.
    operation
        One of the classes above, or a dialect's own; None for an input.
    size
        How many numbers the value has.
    layer
        Name of the layer that it is of.
    """

    name: str
    operation: Any
    inputs: tuple[str, ...]
    size: int
    layer: str = ""


@dataclass(eq=False)
class Graph:
    """Nodes, each after those that it takes, and the values that are outputs."""

    nodes: dict[str, Node] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()

    @property
    def inputs(self) -> list[Node]:
        """The nodes that are inputs, in their order."""
        return [node for node in self.nodes.values() if node.operation is None]

    def add_input(self, name: str, size: int) -> str:
        """Add an input by its own name."""
        self.nodes[name] = Node(name, None, (), size)
        return name

    def add(self, operation: Any, inputs: Sequence[str], size: int, layer: str = "") -> str:
        """Add an operation; the name of its value."""
        # Inputs have names of their own, which may look like these.
        free = (f"v{n}" for n in count(len(self.nodes)))
        name = next(name for name in free if name not in self.nodes)
        self.nodes[name] = Node(name, operation, tuple(inputs), size, layer)
        return name
