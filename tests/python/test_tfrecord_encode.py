"""Records from Arrow batches: byte for byte equal to TensorFlow's serialized messages."""

from __future__ import annotations

import datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from pybackend import InputError
from pybackend.core.data.tfrecord.encode import encode_batch

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
MICROSECOND = datetime.timedelta(microseconds=1)

int64 = st.integers(-(2**63), 2**63 - 1)
float32 = st.floats(width=32)
# Types and values of one row.
SCALARS: list[tuple[Any, Any]] = [
    (pa.int8(), st.integers(-128, 127)),
    (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.int64(), int64),
    (pa.uint8(), st.integers(0, 255)),
    (pa.bool_(), st.booleans()),
    (pa.float32(), float32),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.decimal128(9, 3), st.decimals(-99999, 99999, places=3)),
    (pa.string(), st.text(max_size=200)),
    (pa.large_string(), st.text(max_size=5)),
    (pa.binary(), st.binary(max_size=200)),
    (pa.large_binary(), st.binary(max_size=5)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(datetime.UTC))),
]


@st.composite
def columns(draw: Any) -> pa.Array:
    """Draw a column of any type, with nulls, sliced from a longer one."""
    kind, values = draw(st.sampled_from(SCALARS))
    shape = draw(st.sampled_from(["scalar", "list", "large_list", "fixed"]))
    if shape == "list":
        kind, values = pa.list_(kind), st.lists(values, max_size=5)
    elif shape == "large_list":
        kind, values = pa.large_list(kind), st.lists(values, max_size=5)
    elif shape == "fixed":
        kind, values = pa.list_(kind, 2), st.lists(values, min_size=2, max_size=2)
    rows = draw(st.lists(st.none() | values, min_size=8, max_size=8))
    return pa.array(rows, kind).slice(2, 5)


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=150)


@given(st.dictionaries(names, columns(), max_size=4))
def test_the_bytes_are_those_of_protobuf(data: dict[str, pa.Array]) -> None:
    batch = pa.record_batch({**data, "#": pa.array(range(5))})
    assert records(batch) == [example(row, batch.schema) for row in batch.to_pylist()]


def records(batch: pa.RecordBatch) -> list[bytes]:
    """Return the data of a batch's records; their frames are TensorFlow's own."""
    content, offsets, _ = encode_batch(batch)
    found = []
    for first, last in pairwise(offsets):
        frame = content[first:last].tobytes()
        assert int.from_bytes(frame[:8], "little") == len(frame) - 16
        found.append(frame[12:-4])
    return found


def example(row: dict[str, Any], schema: pa.Schema) -> bytes:
    """Return the serialization of TensorFlow's own message."""
    features = {
        name: feature(value if isinstance(value, list) else [value], schema.field(name).type)
        for name, value in row.items()
        if value is not None
    }
    message = tf.train.Example(features=tf.train.Features(feature=features))
    return bytes(message.SerializeToString(deterministic=True))


def feature(values: list[Any], kind: Any) -> Any:
    kind = getattr(kind, "value_type", kind)
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return tf.train.Feature(float_list=tf.train.FloatList(value=[float(v) for v in values]))
    if kind in (pa.string(), pa.large_string()):
        values = [value.encode() for value in values]
    if any(isinstance(value, bytes) for value in values) or is_bytes(kind):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[as_int(v) for v in values]))


def is_bytes(kind: Any) -> bool:
    of = pa.types
    return any(
        (
            of.is_binary(kind),
            of.is_large_binary(kind),
            of.is_fixed_size_binary(kind),
            of.is_string(kind),
            of.is_large_string(kind),
        )
    )


def as_int(value: Any) -> int:
    if isinstance(value, datetime.datetime):
        return (value.replace(tzinfo=datetime.UTC) - EPOCH) // MICROSECOND
    if isinstance(value, datetime.date):
        return (value - EPOCH.date()).days
    return int(value)


def test_an_empty_array_is_a_list_of_its_kind() -> None:
    batch = pa.record_batch({"x": pa.array([[]], pa.list_(pa.float32()))})
    expected = {"x": tf.train.Feature(float_list=tf.train.FloatList(value=[]))}
    message = tf.train.Example(features=tf.train.Features(feature=expected))
    assert records(batch) == [message.SerializeToString()]


def test_a_double_beyond_float32_is_infinite() -> None:
    batch = pa.record_batch({"x": pa.array([1e300, -1e300, 1 / 3])})
    parsed = [tf.train.Example.FromString(record) for record in records(batch)]
    found = [message.features.feature["x"].float_list.value[0] for message in parsed]
    assert found == [np.inf, -np.inf, np.float32(1 / 3)]


def test_a_null_in_an_array_is_rejected_by_column_and_row() -> None:
    column = pa.array([None, [1], [2, None], [None]], pa.list_(pa.int64()))
    with pytest.raises(InputError, match=r"column 'x' .* array of row 12 .*array_compact"):
        encode_batch(pa.record_batch({"x": column}), first_row=10)


def test_a_type_that_no_record_can_hold_is_rejected() -> None:
    with pytest.raises(InputError, match=r"column 'x' has the type struct"):
        encode_batch(pa.record_batch({"x": pa.array([{"a": 1}])}))


def test_no_rows_are_no_bytes() -> None:
    content, offsets, _ = encode_batch(pa.record_batch({"x": pa.array([], pa.binary())}))
    assert len(content) == 0
    assert offsets.tolist() == [0]


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 3_000_000])
def test_lengths_of_all_sizes_fit(size: int) -> None:
    numbers = pa.array([range(size // 9)], pa.list_(pa.int64()))
    batch = pa.record_batch({"x": [b"a" * size], "y": numbers})
    assert records(batch) == [example(row, batch.schema) for row in batch.to_pylist()]
