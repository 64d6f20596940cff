"""In-memory data: checks, flattening, distribution, and reassembly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pybackend.core.data.arrays import (
    Ragged,
    check_enough_rows,
    count_rows,
    flatten,
    flatten_data,
    nest,
    shard,
    to_dense,
)
from pybackend.core.errors import InputError

X = np.arange(12.0).reshape(6, 2)
Y = np.arange(6)

names = st.text(min_size=1, max_size=5).filter(lambda name: "/" not in name and name[0] != "#")


@st.composite
def datasets(draw: Any) -> tuple[Any, ...]:
    """(x, y) or (x, y, sample_weight), each part an array, a tuple or a dict of arrays."""
    rows = draw(st.integers(1, 20))
    dtypes = st.sampled_from(["float32", "int32", "int64", "uint8", "bool"])

    def array() -> Any:
        tail = draw(hnp.array_shapes(min_dims=0, max_dims=2, max_side=3))
        return np.zeros((rows, *tail), draw(dtypes)) + np.asarray(draw(st.integers(0, 1)), "uint8")

    def part() -> Any:
        kind = draw(st.sampled_from(["array", "tuple", "dict"]))
        if kind == "array":
            return array()
        if kind == "tuple":
            return tuple(array() for _ in range(draw(st.integers(1, 3))))
        return {
            name: array() for name in draw(st.lists(names, min_size=1, max_size=3, unique=True))
        }

    return (part(), part(), np.ones(rows, "float32"))[: draw(st.integers(2, 3))]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    return one.dtype == other.dtype and bool(np.array_equal(one, other))


@settings(deadline=None)
@given(datasets())
def test_structure_undoes_columns(data: tuple[Any, ...]) -> None:
    assert equal(nest(flatten_data(data)), data)


@settings(deadline=None)
@given(datasets(), st.integers(1, 6))
def test_shards_hold_every_row_once(data: tuple[Any, ...], workers: int) -> None:
    columns = flatten_data(data)
    parts = [shard(columns, workers, rank) for rank in range(workers)]
    assert sum(count_rows(part) for part in parts) == count_rows(columns)
    for key, array in columns.items():
        assert all(np.shares_memory(part[key], array) for part in parts if part[key].size)
        together = np.concatenate([part[key] for part in parts])
        order = np.concatenate([np.arange(len(array))[r::workers] for r in range(workers)])
        np.testing.assert_array_equal(together, array[order])


def test_columns_are_named_after_their_place() -> None:
    columns = flatten_data(({"left": X, "right": X}, [Y, Y, Y], np.ones(6)))
    assert list(columns) == ["x/left", "x/right", "y/#0", "y/#1", "y/#2", "sample_weight"]
    assert count_rows(columns) == 6


def test_a_dict_with_numbers_as_names_stays_a_dict() -> None:
    x, _ = nest(flatten_data(({"0": X, "1": X}, Y)))
    assert list(x) == ["0", "1"]


@pytest.mark.parametrize("floatx", ["float16", "float32", "float64"])
def test_floats_become_keras_float_type_and_the_rest_keeps_its_own(floatx: str) -> None:
    columns = flatten_data(
        ({"a": X.astype("float64"), "b": X.astype("float16"), "c": X.astype("uint8")}, Y > 2),
        floatx,
    )
    assert {key: str(array.dtype) for key, array in columns.items()} == {
        "x/a": floatx,
        "x/b": floatx,
        "x/c": "uint8",
        "y": "bool",
    }


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (X.tolist(), Y.tolist()),
        ([tuple(row) for row in X.tolist()], tuple(Y.tolist())),
        (pd.DataFrame(X, columns=["a", "b"]), pd.Series(Y)),
        (np.asfortranarray(X), Y[::-1][::-1]),
        (X, list(Y)),  # numpy's own numbers, as in [labels[i] for i in chosen]
    ],
    ids=["lists", "tuples", "pandas", "column-major", "numpy numbers"],
)
def test_other_ways_to_write_the_same_data(x: Any, y: Any) -> None:
    columns = flatten_data((x, y))
    np.testing.assert_array_equal(columns["x"], X)
    np.testing.assert_array_equal(columns["y"], Y)


@pytest.mark.parametrize("data", [X, (X,), [X], (X, None), pd.Series(Y)])
def test_x_alone_is_what_keras_s_fit_makes_of_it(data: Any) -> None:
    columns = flatten_data(data)
    assert list(columns) == ["x"]
    assert nest(columns) is columns["x"]


def test_several_inputs_alone_are_what_keras_s_fit_makes_of_them() -> None:
    assert equal(nest(flatten_data({"a": Y, "b": Y})), {"a": Y, "b": Y})
    assert equal(nest(flatten_data(([Y, Y],))), ((Y, Y),))


@pytest.mark.parametrize(
    "batch",
    [X, (X,), {"a": X}, ((X, Y),), (X, Y), ((X, X), Y), (X, Y, Y)],
    ids=["x", "(x,)", "named", "list", "x, y", "list, y", "weights"],
)
def test_a_batch_keeps_its_structure(batch: Any) -> None:
    assert equal(nest(flatten(batch)), batch)


def test_the_absent_weight_may_be_none() -> None:
    assert len(nest(flatten_data((X, Y, None)))) == 2
    assert len(nest(flatten_data([X, Y]))) == 2


def test_missing_values_may_be_in_the_inputs_only() -> None:
    x = np.where(X == 3, np.nan, X)
    assert np.isnan(flatten_data((x, Y))["x"]).sum() == 1


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: None, r"`data` must be x, \(x, y\) or .*, not builtins\.NoneType"),
    "text": (lambda: "train.csv", r"`data` must be .*, not builtins\.str"),
    "no parts": (lambda: (), r"`data` must be .*, not a tuple of 0"),
    "four parts": (lambda: [X, Y, Y, Y], r"`data` must be .*, not a list of 4"),
    "weights alone": (lambda: (X, None, Y), "`data` has sample weights but no labels"),
    "no inputs": (lambda: (None, Y), r"`data` has no inputs: pass x or \(x, y\)"),
    "no named input": (lambda: ({}, Y), r"`data` has no inputs: pass x or \(x, y\)"),
    "ragged tensor": (
        lambda: (tf.ragged.constant([[1.0], []]), Y),
        r"RaggedTensor: pass x\.to_tensor",
    ),
    "a number": (lambda: (3, Y), r"`x` of `data` is a single value"),
    "ragged": (lambda: ([[1, 2], [3]], [0, 1]), r"`x` of `data` is not a rectangular array"),
    "text columns": (lambda: (X, ["a"] * 6), r"`y` of `data` has dtype <U1; expected numbers"),
    "objects": (lambda: (X.astype(object), Y), r"`x` of `data` has dtype object"),
    "complex": (lambda: (X.astype(complex), Y), r"`x` of `data` has dtype complex128"),
    "dates": (lambda: (X.astype("M8[s]"), Y), r"`x` of `data` has dtype datetime64"),
    "lengths": (lambda: (X, Y[:5]), r"differ in their number of rows \(x: 6, y: 5\)"),
    "weights": (lambda: (X, Y, Y[1:]), r"\(x: 6, y: 6, sample_weight: 5\)"),
    "input lengths": (lambda: ([X, X[1:]], Y), r"\(x/#0: 6, x/#1: 5, y: 6\)"),
    "NaN label": (
        lambda: (X, [0, 1, np.nan, 3, np.nan, 5]),
        r"`y` of `data` has a NaN in row 2 \(counting from 0\)",
    ),
    "NaN weight": (lambda: (X, Y, [1, 1, 1, 1, 1, np.nan]), r"`sample_weight` .* NaN in row 5"),
    "slash": (lambda: ({"a/b": X}, Y), r"`x` has an input named 'a/b': use names without '/'"),
    "number sign": (
        lambda: ({"#0": X}, Y),
        r"named '#0': use names without '/' that do not begin with '#'",
    ),
    "empty name": (lambda: ({"": X}, Y), r"`x` has an input named ''"),
    "number as name": (lambda: (X, {0: Y}), r"`y` has an input named 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_data_are_rejected_by_name(case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(InputError, match=message):
        flatten_data(make())


def test_the_message_names_the_argument_itself() -> None:
    with pytest.raises(InputError, match=r"`y` of `validation_data` is a single value"):
        flatten_data((X, 1), name="validation_data")


@pytest.mark.parametrize(
    ("rows", "workers", "message"),
    [
        (0, 1, r"^`data` has no rows$"),
        (1, 2, r"^`data` has 1 row, fewer than workers=2: use at most 1 worker$"),
        (3, 4, r"^`data` has 3 rows, fewer than workers=4: use at most 3 workers$"),
    ],
)
def test_too_few_rows_are_rejected(rows: int, workers: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_enough_rows(rows, workers)


@settings(deadline=None)
@given(st.integers(1, 99), st.integers(0, 99))
def test_a_row_per_worker_is_enough(workers: int, more: int) -> None:
    check_enough_rows(workers + more, workers)


def test_numbers_of_another_byte_order_become_native() -> None:
    columns = flatten_data((np.array([[1], [2]], ">u2"), np.array([0, 1], ">i8")))
    assert columns["x"].tolist() == [[1], [2]]
    assert columns["y"].tolist() == [0, 1]
    assert all(array.dtype.isnative for array in columns.values())


def test_text_inputs_are_ragged() -> None:
    texts = ["", "a b", "\N{SNOWMAN}"]
    for x in (np.array(texts), np.array(texts, object)[:, None], np.array(texts, object)):
        column: Any = flatten_data((x, [0, 1, 2]))["x"]
        assert isinstance(column, Ragged)
        assert [text.decode() for text in to_dense(column)[:, 0]] == texts


def test_masked_values_are_named() -> None:
    masked = np.ma.masked_equal(np.array([[1.0, 2.0], [3.0, 0.0]]), 0.0)
    with pytest.raises(InputError, match="`x` of `data` has masked values, first in row 1"):
        flatten_data((masked, np.arange(2)), "float32", "data")
    whole = np.ma.masked_equal(np.array([[1.0], [3.0]]), 0.0)
    assert flatten_data((whole, np.arange(2)), "float32", "data")["x"].tolist() == [[1.0], [3.0]]


@pytest.mark.parametrize("key", ["x", "y"])
def test_numbers_beyond_the_type_that_is_fed_are_named(key: str) -> None:
    good, bad = np.array([1.0, np.inf, 2.0]), np.array([1.0, 2.0, -1e300])
    data = (bad, good) if key == "x" else (good, bad)
    message = (
        f"`{key}` of `data` in row 2 has the number -1e.300, which is out of range for float32"
    )
    with pytest.raises(InputError, match=message):
        flatten_data(data, "float32", "data")
    assert flatten_data(data, "float64", "data")[key].tolist() == bad.tolist()
