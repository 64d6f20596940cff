"""Check that a model computes the same in a database as in Keras."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import numpy as np

from pybackend.core.errors import DatabaseError
from pybackend.core.quiet import quiet_about_traces
from pybackend.sql.compile import DIALECTS, answer
from pybackend.sql.connections import Connection
from pybackend.sql.graph import Array, Concatenate, Gather, Graph, Lookup
from pybackend.sql.query import Question, Shown

_ROWS = 3
# Most numbers of an output that are compared, evenly spread.
_MOST_NUMBERS = 32
# Sums in another order differ by about 1e-6; a wrong formula or weight by more than these.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4


class DatabaseCheck:
    """Random rows for a model, and Keras's predictions for them.

    Parameters
    ----------
    model
        A Keras model.
    graph
        The model's graph.
    """

    def __init__(self, model: Any, graph: Graph) -> None:
        rng = np.random.default_rng(0)
        self._graph = graph
        self._rows = [
            _draw(rng, _count_entries(graph, node.name), node.size, tensor.dtype)
            for node, tensor in zip(graph.inputs, model.inputs, strict=True)
        ]
        shaped = [
            rows.reshape(_ROWS, *tensor.shape[1:]).astype(tensor.dtype)
            for rows, tensor in zip(self._rows, model.inputs, strict=True)
        ]
        given = shaped[0] if len(shaped) == 1 else keras.tree.pack_sequence_as(model.input, shaped)
        with quiet_about_traces():
            outputs = keras.tree.flatten(model.predict(given, verbose=0))
        self._expected = [np.asarray(output, np.float64).reshape(_ROWS, -1) for output in outputs]

    def compare(self, database: Connection, question: Question) -> float:
        """Return the largest difference between the database's numbers and Keras's.

        Raises
        ------
        DatabaseError
            The difference is larger than a rounding error.
        """
        shown, wanted = list[Shown](), list[Array]()
        for number, values in enumerate(self._expected):
            count = values.shape[1]
            for place in np.unique(np.linspace(0, count - 1, _MOST_NUMBERS, dtype=np.int64)):
                shown.append(Shown(f"x{len(shown)}", number, int(place)))
                wanted.append(values[:, place])
        features = {node.name: f"i{n}" for n, node in enumerate(self._graph.inputs)}
        tried = replace(
            question,
            source=self._write_source(database.dialect),
            keys=("n",),
            features=features,
            encodings={},
            casts={},
            shown=tuple(shown),
        )
        made = answer(database.dialect, tried, database.has_vectors)
        found = sorted(database.execute(made.query), key=lambda row: int(row[0]))
        got = np.array([row[1:] for row in found], np.float64).T
        return _compare(database.dialect, got, np.array(wanted))

    def _write_source(self, dialect: str) -> str:
        array_of = DIALECTS[dialect].array_of
        rows = []
        for number in range(_ROWS):
            arrays = [f"{array_of(x[number])} AS i{n}" for n, x in enumerate(self._rows)]
            rows.append(f"SELECT {number} AS n, {', '.join(arrays)}")
        return f"({' UNION ALL '.join(rows)})"


def _draw(rng: np.random.Generator, entries: int | None, size: int, dtype: str) -> Array:
    """Draw random numbers for an input; integers for integer inputs and lookups."""
    if entries is None and not dtype.startswith("float"):
        entries = 2 if dtype == "bool" else 100
    if entries is None:
        return rng.normal(size=(_ROWS, size)).astype(np.float32)
    return rng.integers(0, entries, (_ROWS, size)).astype(np.float32)


def _count_entries(graph: Graph, name: str) -> int | None:
    """Return the size of the smallest table in which an input's numbers are looked up."""
    found: list[int | None] = []
    for node in graph.nodes.values():
        if name not in node.inputs:
            continue
        if isinstance(node.operation, Lookup):
            found.append(len(node.operation.table))
        elif isinstance(node.operation, (Gather, Concatenate)):
            found.append(_count_entries(graph, node.name))
    known = [count for count in found if count is not None]
    return min(known, default=None)


def _compare(dialect: str, got: Array, wanted: Array) -> float:
    if got.shape == wanted.shape and np.allclose(got, wanted, _RELATIVE, _ABSOLUTE):
        return float(np.abs(got - wanted).max())
    if got.shape != wanted.shape:
        said = f"{got.shape[-1]} of {wanted.shape[1]} rows"
    else:
        place = np.unravel_index(np.argmax(np.abs(got - wanted)), got.shape)
        said = f"{got[place]} instead of Keras's {wanted[place]}"
    raise DatabaseError(
        f"{dialect} does not compute what Keras does: {said}. Nothing was deployed. Check whether "
        "Keras predicts the same with TF_ENABLE_ONEDNN_OPTS=0 in the environment: some TensorFlow "
        "2.21 kernels are wrong for single-channel convolutions with strides. If it does, report "
        "this, with the model's summary"
    )
