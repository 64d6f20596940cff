"""A worker's rows of a DataFrame, from Arrow batches to arrays; no Spark is needed for that."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pybackend.data.dataframe import columns_from_arrow
from pybackend.errors import InputError

LISTS = pa.list_(pa.float32())


def batch(**columns: Any) -> Any:
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def floats(values: list[Any]) -> Any:
    return pa.array(values, pa.float32())


def test_scalar_columns_stand_side_by_side() -> None:
    rows = batch(a=floats([1, 2, 3]), b=floats([4, 5, 6]), y=pa.array([0, 1, 0], pa.int64()))
    columns = columns_from_arrow([rows], ["a", "b"], "y", "float32")
    assert columns["x"].tolist() == [[1, 4], [2, 5], [3, 6]]
    assert columns["x"].dtype == "float32"
    assert columns["y"].tolist() == [0, 1, 0]
    assert columns["y"].dtype == "int64"


def test_arrays_and_scalars_mix_in_the_order_of_the_features() -> None:
    rows = batch(
        v=pa.array([[1, 2], [3, 4]], LISTS), s=floats([9, 8]), y=pa.array([0.5, 1.5], pa.float64())
    )
    columns = columns_from_arrow([rows], ["v", "s"], "y", "float64")
    assert columns["x"].tolist() == [[1, 2, 9], [3, 4, 8]]
    assert columns["x"].dtype == "float64"
    assert columns["y"].dtype == "float64"


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.data())
def test_batches_and_slices_of_any_size_give_the_same_rows(
    rows: int, width: int, data: st.DataObject
) -> None:
    matrix = np.arange(rows * width, dtype="float32").reshape(rows, width)
    whole = batch(
        v=pa.array(list(matrix), LISTS), s=floats(list(range(rows))), y=pa.array(np.arange(rows))
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=5)))
    edges = [0, *cuts, rows]
    parts = [whole.slice(a, b - a) for a, b in itertools.pairwise(edges)]
    columns = columns_from_arrow(parts, ["v", "s"], "y", "float32")
    np.testing.assert_array_equal(columns["x"][:, :width], matrix)
    np.testing.assert_array_equal(columns["x"][:, width], np.arange(rows))
    np.testing.assert_array_equal(columns["y"], np.arange(rows))


@pytest.mark.parametrize("batches", [0, 1, 2])
def test_a_worker_without_rows_has_no_columns(batches: int) -> None:
    empty = batch(v=pa.array([], LISTS), y=pa.array([], pa.int64()))
    assert columns_from_arrow([empty] * batches, ["v"], "y", "float32") == {}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"a": floats([1, None]), "y": floats([0, 1])},
            r"column 'a' holds 1 null\(s\): drop or fill",
        ),
        ({"a": floats([1, 2]), "y": floats([None, None])}, r"column 'y' holds 2 null\(s\)"),
        ({"a": pa.array([[1], None], LISTS), "y": floats([0, 1])}, r"column 'a' holds 1 null\(s\)"),
        (
            {"a": pa.array([[1, 2], [3, None]], LISTS), "y": floats([0, 1])},
            r"column 'a' holds 1 null\(s\)",
        ),
        (
            {"a": pa.array([[1, 2], [3]], LISTS), "y": floats([0, 1])},
            r"column 'a' holds arrays of 1 to 2 numbers",
        ),
        (
            {"a": floats([1, 2]), "y": floats([0, float("nan")])},
            r"label column 'y' holds NaN: drop or fill",
        ),
    ],
    ids=["null", "null label", "null array", "null in array", "uneven arrays", "NaN label"],
)
def test_rows_that_cannot_be_trained_on_are_refused_by_column(columns: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        columns_from_arrow([batch(**columns)], ["a"], "y", "float32")


def test_arrays_whose_length_differs_between_batches_are_refused() -> None:
    parts = [
        batch(a=pa.array([row], LISTS), y=pa.array([0], pa.int64())) for row in ([1, 2], [1, 2, 3])
    ]
    with pytest.raises(InputError, match=r"the arrays in a have different lengths \(\[2, 3\]\)"):
        columns_from_arrow(parts, ["a"], "y", "float32")


def test_missing_values_of_floats_may_be_in_the_features() -> None:
    rows = batch(a=floats([float("nan"), 1]), y=pa.array([0, 1], pa.int64()))
    assert np.isnan(columns_from_arrow([rows], ["a"], "y", "float32")["x"]).tolist() == [
        [True],
        [False],
    ]
