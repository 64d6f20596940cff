"""Items are sent as Arrow data and arrive unchanged."""

from __future__ import annotations

import datetime
import decimal
import math
from fractions import Fraction
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybackend.core.errors import InputError, SerializationError
from pybackend.tfos.feed.items import (
    decode_items,
    encode_items,
    frame_items,
    read_batch,
    stack_columns,
    write_batch,
)


class Pair(NamedTuple):
    x: Any
    y: Any


_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
    | st.binary()
)
_ITEMS = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)


def there_and_back(items: list[Any]) -> list[Any]:
    return decode_items(read_batch(write_batch(encode_items(items))))


@given(st.lists(_ITEMS, max_size=6))
def test_any_items_come_back(items: list[Any]) -> None:
    # Their text also distinguishes types, which equality does not: 1, 1.0 and True are equal.
    assert repr(there_and_back(items)) == repr(items)


@given(_ITEMS, st.integers(2, 4))
def test_items_that_are_alike_come_back_and_so_do_parts_of_them(item: Any, count: int) -> None:
    batch = encode_items([item] * count)
    assert repr(decode_items(batch.slice(1))) == repr([item] * (count - 1))


@pytest.mark.parametrize(
    "items",
    [
        [datetime.datetime(2020, 1, 2, 3, 4, 5, 6), datetime.datetime(1, 1, 1)],
        [datetime.date(2020, 1, 2)],
        [decimal.Decimal("1.10"), decimal.Decimal("1.1")],
        [bytearray(b"a"), bytearray()],
        [np.float32(0.1), np.float32(2)],
        [2**70, -1],
        [1, "a", None, 2.5, (1, "b"), None, [3]],
        [(None, [1, None, "a"]), (2, ["b", None])],
        [None, None],
        [Fraction(1, 2), Fraction(2**70, 3)],
        [Pair(1, "a"), Pair(2, "b"), Pair(None, (1,))],
        [{1}, {2, 3}, set()],
        [datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin"))] * 2,
        ["\ud800"],
    ],
)
def test_other_types_come_back(items: list[Any]) -> None:
    found = there_and_back(items)
    assert repr(found) == repr(items)
    assert list(map(type, found)) == list(map(type, items))
    for start in range(1, len(items)):
        part = decode_items(read_batch(write_batch(encode_items(items).slice(start))))
        assert repr(part) == repr(items[start:])


def test_arrays_come_back_whatever_their_shapes() -> None:
    alike = [np.arange(6, dtype="int16").reshape(2, 3) * n for n in range(3)]
    ragged = [np.arange(n, dtype=">i4") for n in (2, 0, 3)]
    for items in (alike, ragged, [np.zeros((1, 2)), np.ones((2, 1))], [np.zeros((0, 2))] * 2):
        for found, sent in zip(there_and_back(items), items, strict=True):
            np.testing.assert_array_equal(found, sent, strict=True)
    found = there_and_back(alike)
    found[0][:] = 9  # the same object


def test_not_a_number_comes_back() -> None:
    assert math.isnan(there_and_back([[1.0, math.nan]])[0][1])


def test_rows_and_vectors_of_spark_come_back() -> None:
    from pyspark.ml.linalg import Vectors
    from pyspark.sql import Row

    items = [Row(a=1, b=[0.5]), Row(a=2, b=[])]
    assert repr(there_and_back(items)) == repr(items)
    assert there_and_back([Vectors.dense(1, 2)]) == [Vectors.dense(1, 2)]
    dense, sparse, empty = (
        Vectors.dense(1, 0.1),
        Vectors.sparse(2, [1], [0.1]),
        Vectors.sparse(2, []),
    )
    for vectors in ([sparse, empty], [dense, sparse, empty], [dense, Vectors.dense(1, 2, 3)]):
        assert repr(there_and_back(vectors)) == repr(vectors)


def table(**columns: Any) -> Any:
    """Return a batch of a DataFrame as it arrives; its columns become arrays."""
    return read_batch(write_batch(frame_items(pa.record_batch(columns), gives_arrays=True)))


def test_a_table_of_a_dataframe_is_rows_and_columns() -> None:
    columns = {
        "x": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float32())),
        "n": pa.array([1, 2, 3], pa.int16()),
        "t": pa.array(["a", "b", "c"]),
    }
    batch = table(**columns)
    from pyspark.sql import Row

    rows = [Row(x=[1.0, 2.0], n=1, t="a"), Row(x=[3.0, 4.0], n=2, t="b")]
    assert decode_items(batch.slice(0, 2)) == rows
    x, n, t = stack_columns([batch.slice(1, 1), batch.slice(2), batch.slice(0, 1)], 3) or []
    wanted = np.array([[3, 4], [5, 6], [1, 2]], "float32")
    np.testing.assert_array_equal(x, wanted, strict=True)
    np.testing.assert_array_equal(n, np.array([2, 3, 1], "int16"), strict=True)
    assert t.tolist() == ["b", "c", "a"]
    x[0] = n[0] = 0  # not Arrow's memory, which is read-only

    lists = frame_items(pa.record_batch(columns))
    assert stack_columns([batch, lists], 3) is stack_columns([encode_items(rows)], 3) is None
    with pytest.raises(InputError, match="has 4 columns, but the rows have 3"):
        stack_columns([batch], 4)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([[1, None]], "nulls"),
        ([[[1, 2], [3]]], "lists of different lengths"),
        ([[[1, None], [3, 4]]], "nulls"),
        ([[[1]], [[2, 3]]], r"int64 of shape \[1\] per row and int64 of shape \[2\] per row"),
        ([[1], [0.5]], "int64 of shape .* and float64 of shape"),
    ],
)
def test_a_column_that_is_no_array_is_refused_by_name(parts: list[Any], words: str) -> None:
    batches = [table(a=list(range(len(part))), b=part) for part in parts]
    with pytest.raises(InputError, match=f"'b' has .*{words}"):
        stack_columns(batches, 2)
    assert len(stack_columns(batches, 1) or []) == 1


@pytest.mark.parametrize("dtype", [">i4", ">f4", ">c16", "<i2"])
def test_arrays_keep_their_order_of_bytes(dtype: str) -> None:
    sent = [np.array([[1, 2], [3, 4]], dtype), np.array([[5, 6], [7, 8]], dtype).T]
    for found, wanted in zip(there_and_back(sent), sent, strict=True):
        np.testing.assert_array_equal(found, wanted, strict=True)
        assert found.dtype.str == wanted.dtype.str


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(SerializationError, match="object"):
        encode_items([(1, object())])
    with pytest.raises(SerializationError, match="damaged"):
        read_batch(b"nothing of the kind")
    batch = encode_items([1])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema):
        pass  # no batch
    with pytest.raises(SerializationError, match="damaged"):
        read_batch(sink.getvalue())
    with pytest.raises(SerializationError, match="damaged"):
        decode_items(batch.replace_schema_metadata({b"tfdist.kind": b'["list", ["int"]]'}))
