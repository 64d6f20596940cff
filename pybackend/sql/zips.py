"""Windows that move over an array as zipped lists, which DuckDB computes in one operation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pybackend.sql.formulas import number
from pybackend.sql.graph import Array, Gather, Graph, Linear, Map, Node, Reduce, drop_unused

_RELU = Map("relu")
# Pooled sums are written out for every spot of the pooling's window.
_MOST_SPOTS = 9
_MOST_PRODUCTS = 20_000


@dataclass(frozen=True, eq=False)
class Zip:
    """Sums of products of the numbers in a window, at each position of the window.

    Attributes
    ----------
    places
        Array of shape (spots, numbers of a window, positions): positions of the numbers in a
        window, for each of the pooled spots.
    fill
        The number that position -1 stands for.
    linear
        The sums of products.
    is_positive
        True if sums below zero count as zero.
    pooling
        "maximum" or "sum" of the spots; None for a single spot.
    """

    places: Array
    fill: float
    linear: Linear
    is_positive: bool = False
    pooling: str | None = None

    @cached_property
    def _distinct(self) -> tuple[Array, Array]:
        """Distinct lists, and for each number in a window the index of its list."""
        lists, which = np.unique(
            self.places.reshape(-1, self.places.shape[-1]), axis=0, return_inverse=True
        )
        return lists, which.reshape(self.places.shape[:2])

    @property
    def lists(self) -> Array:
        """Positions in the zipped lists, of shape (lists, positions)."""
        return self._distinct[0]

    @property
    def formulas(self) -> Iterator[str]:
        """Formulas of ``t[1]``, ``t[2]``, ..., the numbers of the lists at one position."""
        _, inputs, _ = self.linear.kernel.shape
        for group, (kernel, biases) in enumerate(
            zip(self.linear.kernel, self.linear.bias, strict=True)
        ):
            taken = self._distinct[1][:, group * inputs : (group + 1) * inputs]
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
    if not isinstance(linear, Linear):
        return None
    groups, inputs, outputs = linear.kernel.shape
    positions = node.size // (groups * outputs)
    if groups == positions == 1:
        return None
    places = np.arange(positions * groups * inputs).reshape(1, positions, -1).swapaxes(1, 2)
    gathered = _before(nodes, once, node, Gather)
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
    gathered = _before(nodes, once, node, Gather) if isinstance(reduce, Reduce) else None
    zipped = _before(nodes, once, gathered, Zip) if gathered is not None else None
    if gathered is None or zipped is None or zipped.operation.pooling is not None:
        return None
    linear, channels = zipped.operation.linear, zipped.operation.linear.bias.size
    products = linear.kernel.size * reduce.count
    is_small = reduce.count <= _MOST_SPOTS and products <= _MOST_PRODUCTS
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
