"""Tensors from Arrow batches: every type of column, and errors that name the column and a row."""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pybackend.core.data.arrays import Ragged, to_dense
from pybackend.core.data.arrow import TensorReader, describe_schema
from pybackend.core.data.column_groups import group_columns
from pybackend.core.data.columns import ColumnGroup, ColumnSpec, list_columns
from pybackend.core.errors import InputError

LISTS = pa.list_(pa.float32())


def batch(**columns: Any) -> Any:
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def read(rows: Any, floatx: str = "float32", **choice: Any) -> dict[str, Any]:
    """Return the tensors of one batch, whose columns are in the order of the column_groups."""
    column_groups = group_columns(
        ColumnSpec(**choice), describe_schema(rows.schema), floatx, "data"
    )
    return TensorReader(column_groups).read(rows.select(list_columns(column_groups)))


def floats(values: list[Any]) -> Any:
    return pa.array(values, pa.float32())


def test_scalar_columns_stand_side_by_side() -> None:
    rows = batch(a=floats([1, 2, 3]), b=floats([4, 5, 6]), label=pa.array([0, 1, 0], pa.int64()))
    found = read(rows)
    assert found["x"].tolist() == [[1, 4], [2, 5], [3, 6]]
    assert found["x"].dtype == "float32"
    assert found["y"].tolist() == [0, 1, 0]
    assert found["y"].dtype == "int64"


def test_arrays_and_scalars_mix_in_the_order_of_the_features() -> None:
    rows = batch(
        v=pa.array([[1, 2], [3, 4]], LISTS),
        s=floats([9, 8]),
        label=pa.array([0.5, 1.5], pa.float64()),
    )
    found = read(rows, floatx="float64", features=["s", "v"])
    assert found["x"].tolist() == [[9, 1, 2], [8, 3, 4]]
    assert found["x"].dtype == "float64"
    assert found["y"].dtype == "float64"


def test_whole_numbers_stay_whole_and_exact() -> None:
    large = 2**53 + 1
    rows = batch(id=pa.array([large, 1]), label=pa.array([1, 0], pa.int8()))
    found = read(rows)
    assert found["x"].tolist() == [[large], [1]]
    mixed = batch(a=pa.array([1, 2], pa.int16()), b=pa.array([True, False]), label=floats([0, 1]))
    assert read(mixed)["x"].dtype == "int16"
    assert read(mixed)["x"].tolist() == [[1, 1], [2, 0]]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)), [[1, 2], [3, 4]]),
        (pa.array([[1, 2], [3, 4]], pa.large_list(pa.float64())), [[1, 2], [3, 4]]),
        (pa.array([[[1], [2]], [[3], [4]]], pa.list_(LISTS)), [[1, 2], [3, 4]]),
        (pa.array([b"\x01\x02", b"\x03\x04"], pa.binary(2)), [[1, 2], [3, 4]]),
        (pa.array([b"\x01\x02", b"\x03\x04"], pa.binary()), [[1, 2], [3, 4]]),
        (pa.array([Decimal("1.5"), Decimal("2.5")], pa.decimal128(5, 2)), [[1.5], [2.5]]),
        (pa.array([7, 8]).dictionary_encode(), [[7], [8]]),
    ],
    ids=["fixed lists", "large lists", "nested", "fixed bytes", "bytes", "decimal", "dictionary"],
)
def test_kinds_of_features(column: Any, expected: Any) -> None:
    rows = batch(a=column, label=pa.array([0, 1]))
    assert read(rows)["x"].tolist() == expected
    # A slice's buffers start earlier.
    assert read(rows.slice(1))["x"].tolist() == expected[1:]


def test_bytes_are_read_as_promised() -> None:
    images = np.arange(12, dtype="<i2").reshape(2, 2, 3)
    rows = batch(image=pa.array([i.tobytes() for i in images]), label=pa.array([0, 1]))
    found = read(rows, tensors={"image": ("int16", (2, 3))})
    np.testing.assert_array_equal(found["x"], images)
    assert found["x"].dtype == "int16"


def test_several_named_inputs_with_text_and_ragged_rows() -> None:
    rows = batch(
        a=floats([1, 2]),
        words=pa.array([[1, 2, 3], []], pa.list_(pa.int32())),
        name=pa.array(["x", "größe"]),
        label=pa.array([0, 1]),
        w=floats([1, 0.5]),
    )
    found = read(
        rows,
        features={"numbers": ["a"], "words": "words", "name": "name"},
        tensors={"words": ("int64", (None,))},
        weight="w",
    )
    assert list(found) == ["x/numbers", "x/words", "x/name", "y", "sample_weight"]
    words = found["x/words"]
    assert isinstance(words, Ragged)
    assert words.values.dtype == "int64"
    assert words.offsets.tolist() == [0, 3, 3]
    name = found["x/name"]
    assert isinstance(name, Ragged)
    assert bytes(name.values) == "xgröße".encode()
    assert found["sample_weight"].tolist() == [1, 0.5]


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.large_list(pa.large_string())])
def test_lists_of_text_are_an_input(kind: Any) -> None:
    tags = pa.array([["one"], ["a", "größe"], [], ["b"]], kind).slice(1)
    found = read(batch(a=tags, label=pa.array([0, 1, 2])))["x"]
    assert to_dense(found).tolist() == [[b"a", "größe".encode()], [b"", b""], [b"b", b""]]
    words = batch(a=tags.cast(pa.list_(pa.dictionary(pa.int8(), pa.string()))), label=[0, 1, 2])
    assert to_dense(read(words)["x"]).tolist() == to_dense(found).tolist()
    with pytest.raises(InputError, match=r"column 'a' has 1 null.*in the row \(a=\['x', None\]"):
        read(batch(a=pa.array([["x", None]], kind), label=pa.array([0])))


def test_categories_become_their_positions() -> None:
    rows = batch(
        color=pa.array(["red", "blue"]), size=floats([1, 2]), label=pa.array(["no", "yes"])
    )
    categories = {"color": ["blue", "red"], "label": ["no", "yes"]}
    one = read(rows, features={"color": "color"}, categories=categories)
    assert one["x/color"].tolist() == [[1], [0]]
    assert one["y"].tolist() == [0, 1]
    assert one["y"].dtype == "int64"


def test_categories_stand_beside_numbers_in_one_input() -> None:
    rows = batch(color=pa.array(["red", "blue"]), size=floats([1, 2]), label=pa.array([0, 1]))
    found = read(rows, categories={"color": ["blue", "red"]})
    assert found["x"].tolist() == [[1, 1], [0, 2]]


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.data())
def test_batches_and_slices_of_any_size_give_the_same_rows(
    rows: int, width: int, data: st.DataObject
) -> None:
    matrix = np.arange(rows * width, dtype="float32").reshape(rows, width)
    whole = batch(
        v=pa.array(list(matrix), LISTS),
        t=pa.array([f"text {n}" for n in range(rows)]),
        label=pa.array(np.arange(rows)),
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=5)))
    parts = [whole.slice(a, b - a) for a, b in itertools.pairwise([0, *cuts, rows]) if a < b]
    choice = ColumnSpec(features={"v": "v", "t": "t"})
    column_groups = group_columns(choice, describe_schema(whole.schema), "float32", "data")
    names = list_columns(column_groups)
    reader = TensorReader(column_groups)
    found = [reader.read(part.select(names)) for part in parts]
    np.testing.assert_array_equal(np.concatenate([f["x/v"] for f in found]), matrix)
    np.testing.assert_array_equal(np.concatenate([f["y"] for f in found]), np.arange(rows))
    texts = [
        bytes(f["x/t"].values[a:b]).decode()
        for f in found
        for a, b in itertools.pairwise(f["x/t"].offsets)
    ]
    assert texts == [f"text {n}" for n in range(rows)]


ROW = r"the row \("


@pytest.mark.parametrize(
    ("columns", "choice", "message"),
    [
        (
            {"a": floats([1, None]), "label": floats([0, 1])},
            {},
            rf"column 'a' has 1 null\(s\), first in {ROW}a=None, label=1.0\): drop or fill",
        ),
        (
            {"a": floats([1, 2]), "label": floats([None, None])},
            {},
            rf"column 'label' has 2 null\(s\), first in {ROW}a=1.0, label=None\)",
        ),
        (
            {"a": pa.array([[1], None], LISTS), "label": floats([0, 7])},
            {},
            rf"column 'a' has 1 null\(s\), first in {ROW}a=None, label=7.0\)",
        ),
        (
            {"a": pa.array([[1, 2], [3, None]], LISTS), "label": floats([0, 7])},
            {},
            rf"column 'a' has 1 null\(s\), first in {ROW}a=\[3.0, None\], label=7.0\)",
        ),
        (
            {"a": pa.array([[1, 2], [3]], LISTS), "label": floats([0, 7])},
            {},
            rf"column 'a' has 1 numbers in {ROW}a=\[3.0\], label=7.0\); expected 2, as in",
        ),
        (
            {"a": pa.array([[1, 2], [3, 4]], LISTS), "label": floats([0, 7])},
            {"tensors": {"a": ("float32", (3,))}},
            rf"column 'a' has 2 numbers in {ROW}a=\[1.0, 2.0\], label=0.0\); expected 3, as ",
        ),
        (
            {"a": pa.array([b"ab", b"abc"]), "label": floats([0, 7])},
            {"tensors": {"a": ("uint8", (2,))}},
            rf"column 'a' has 3 bytes in {ROW}a=b'abc', label=7.0\); expected 2, as in `tensors`",
        ),
        (
            {"a": floats([1, 2]), "label": floats([0, float("nan")])},
            {},
            rf"label column 'label' contains NaN in {ROW}a=2.0, label=nan\): drop or fill",
        ),
        (
            {"a": floats([1, 2]), "label": floats([0, 1]), "w": floats([float("nan"), 1])},
            {"weight": "w"},
            rf"weight column 'w' contains NaN in {ROW}a=1.0, label=0.0, w=nan\)",
        ),
        (
            {"a": pa.array(["red", "pink"]), "label": floats([0, 7])},
            {"categories": {"a": ["red", "blue"]}},
            rf"column 'a' contains 'pink' in {ROW}a='pink', label=7.0\), which is not one of its "
            "categor",
        ),
    ],
    ids=[
        "null",
        "null label",
        "null array",
        "null in array",
        "uneven arrays",
        "promised shape",
        "promised bytes",
        "NaN label",
        "NaN weight",
        "unseen category",
    ],
)
def test_rows_that_cannot_be_trained_on_are_rejected_by_column_and_row(
    columns: Any, choice: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read(batch(**columns), **choice)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([1.0, 300.0], "uint8"), ([1.0, 0.5], "int32"), ([1.0, float("nan")], "int32")],
)
@pytest.mark.parametrize("shape", [(1,), (None,)])
def test_numbers_that_a_promised_type_cannot_hold_are_rejected(
    values: list[float], dtype: str, shape: Any
) -> None:
    rows = batch(a=pa.array([[value] for value in values], LISTS), label=pa.array([0, 7]))
    with pytest.raises(InputError, match=rf"has numbers that do not fit in {dtype} in .*label=7"):
        read(rows, tensors={"a": (dtype, shape)})


def test_ragged_rows_may_all_be_empty() -> None:
    rows = batch(a=pa.array([[], []], LISTS), label=pa.array([0, 1]))
    found = read(rows, tensors={"a": ("int32", (None,))})["x"]
    assert isinstance(found, Ragged)
    assert found.values.dtype == "int32"
    assert found.offsets.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("column", "shape", "expected"),
    [
        (pa.array([[[1, 2], [3, 4]], [], [[5, 6]]], pa.list_(LISTS)), (None, 2), [4, 2]),
        (pa.array([[1, 2, 3, 4], [], [5, 6]], LISTS), (None, 2), [4, 2]),
        (
            pa.array([[[[1], [2]]], [], [[[3], [4]]] * 2], pa.list_(pa.list_(LISTS))),
            (None, 2, 1),
            [2, 4],
        ),
    ],
    ids=["vectors", "in row-major order", "matrices"],
)
def test_rows_may_be_lists_of_vectors(column: Any, shape: Any, expected: list[int]) -> None:
    rows = batch(a=column, label=pa.array([0, 1, 2]))
    found = read(rows, tensors={"a": ("float64", shape)})["x"]
    assert found.values.shape == (sum(expected) // 2, *shape[1:])
    assert found.lengths.tolist() == [expected[0] // 2, 0, expected[1] // 2]
    assert (
        found.values.reshape(-1).tolist()
        == pa.compute.list_flatten(column, recursive=True).to_pylist()
    )


NESTED = pa.list_(LISTS)


@pytest.mark.parametrize(
    ("column", "tensors", "message"),
    [
        (
            pa.array([[[1, 2]], [[1, 2], [3, 4]]], NESTED),
            None,
            "column 'a' has 4 numbers in the row (a=[[1.0, 2.0], [3.0, 4.0]], label=1); expected "
            "2, as in earlier rows. For rows of varying length, pass "
            "tensors={'a': (dtype, (None, 2))}",
        ),
        (
            pa.array([[[1, 2]], [[1], [3, 4, 5]]], NESTED),
            None,
            "the inner arrays of column 'a' have 1, 2, 3 numbers; expected one width. Pad them to "
            "one width, or join those of each row (Spark: flatten()) and pass "
            "tensors={'a': (dtype, (None,))}",
        ),
        (
            pa.array([[[1, 2, 3]], [[1], [3, 4]]], NESTED),
            (None, 3),
            "the inner arrays of column 'a' have 1, 2, 3 numbers; expected 3, as in `tensors`. Pad "
            "them to one width, or join those of each row (Spark: flatten()) and pass "
            "tensors={'a': (dtype, (None,))}",
        ),
        (
            pa.array([[1, 2, 3], [1, 2, 3, 4]], LISTS),
            (None, 3),
            "column 'a' has 4 numbers in the row (a=[1.0, 2.0, 3.0, 4.0], label=1); expected a "
            "multiple of 3, because of its shape (None, 3) in `tensors`",
        ),
        (
            pa.array([[[1, 2]], [[1, 2]]], NESTED),
            (None,),
            "column 'a' of `data` has type list<item: list<item: float>>; expected arrays of the "
            "shape (None,) in `tensors`. For arrays of arrays, a shape has None and the lengths "
            "of the inner arrays, e.g. tensors={'a': ('float32', (None, 3))}",
        ),
        (
            pa.array([b"ab", b"abc"]),
            None,
            "column 'a' has 3 bytes in the row (a=b'abc', label=1); expected 2, as in earlier "
            "rows. Make them equally long, or convert them to arrays of numbers",
        ),
    ],
    ids=["no shape", "widths", "widths and shape", "row-major", "no widths", "bytes"],
)
def test_arrays_of_other_widths_are_rejected_with_what_helps(
    column: Any, tensors: Any, message: str
) -> None:
    given = tensors and {"a": ("float32", tensors)}
    with pytest.raises(InputError) as caught:
        read(batch(a=column, label=pa.array([0, 1])), tensors=given)
    assert str(caught.value) == message


def test_another_byte_order_is_read_as_promised() -> None:
    values = np.array([[1, 2], [3, 400]], ">i2")
    rows = batch(a=pa.array([row.tobytes() for row in values]), label=pa.array([0, 1]))
    found = read(rows, tensors={"a": (">i2", (2,))})
    assert found["x"].tolist() == [[1, 2], [3, 400]]
    assert found["x"].dtype.isnative


def test_arrays_whose_length_differs_between_batches_are_rejected() -> None:
    parts = [batch(a=pa.array([r], LISTS), label=pa.array([0])) for r in ([1, 2], [1, 2, 3])]
    column_groups = group_columns(ColumnSpec(), describe_schema(parts[0].schema), "float32", "data")
    reader = TensorReader(column_groups)
    reader.read(parts[0])
    with pytest.raises(InputError, match=r"column 'a' has 3 numbers in .*; expected 2, as in"):
        reader.read(parts[1])


def test_missing_values_of_floats_may_be_in_the_features() -> None:
    rows = batch(a=floats([float("nan"), 1]), label=pa.array([0, 1]))
    assert np.isnan(read(rows)["x"]).tolist() == [[True], [False]]


def test_long_values_are_told_in_short() -> None:
    rows = batch(a=pa.array([[0.5] * 500, None], LISTS), label=floats([0, 7]))
    with pytest.raises(InputError) as caught:
        read(rows.slice(0, 2))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array([1.5, np.nan, None]), [True, False, False]),
        (pa.array([1.5, np.inf, -np.inf]), [True, False, False]),
        (pa.array([], pa.float32()), []),
        (pa.array([1, 2]), [True] * 2),
        (pa.array(["a", None, ""]), [True, False, True]),
        (pa.array([[1.0], [], [np.inf, 2.0]]), [True, True, False]),
        (pa.array([[1.0], None, [np.nan, 2.0], [3.0]]), [True, False, False, True]),
        (pa.array([[1.0], [None, 2.0]], pa.list_(pa.float32())), [True, False]),
        (pa.array([[1.0, 2.0], [3.0, np.nan]], pa.list_(pa.float64(), 2)), [True, False]),
        (pa.array([np.float16(1), np.float16("nan")], pa.float16()), [True, False]),
        (pa.array(["b", None]).dictionary_encode(), [True, False]),
    ],
)
def test_rows_of_finite_values_are_found(values: pa.Array, expected: list[bool]) -> None:
    reader = TensorReader([ColumnGroup("x", ("a",), "float32")])
    rows = batch(a=values)
    assert reader.find_complete(rows).tolist() == expected
    assert reader.find_complete(rows.slice(1)).tolist() == expected[1:]


def test_the_widths_of_inner_arrays_are_those_of_earlier_batches() -> None:
    nested = pa.list_(LISTS)
    first, second = (
        batch(v=pa.array([value], nested))
        for value in ([[1, 2], [3, 4], [5, 6]], [[1, 2, 3], [4, 5, 6]])
    )
    spec = ColumnSpec(label=None)
    groups = group_columns(spec, describe_schema(first.schema), "float32", "data")
    names = list_columns(groups)
    reader = TensorReader(groups)
    assert reader.read(first.select(names))["x"].shape == (1, 6)
    with pytest.raises(InputError, match="inner arrays of column 'v' have 2, 3 numbers; expected"):
        reader.read(second.select(names))
