"""Arrow batches from records, in any order and encoding of protobuf; rejected records."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import entry, example, field, frame

from pybackend import InputError
from pybackend.core.data.tfrecord.decode import decode_chunk
from pybackend.core.data.tfrecord.encode import encode_batch
from pybackend.core.data.tfrecord.framing import Chunk, find_records
from pybackend.core.data.tfrecord.protobuf import BYTES, FLOAT, INT64, encode_one, encode_varints

VALUES: list[tuple[pa.DataType, Any]] = [
    (pa.int8(), st.integers(-128, 127)),
    (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.bool_(), st.booleans()),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(width=32, allow_nan=False)),
    (pa.decimal128(6, 2), st.decimals(-999, 999, places=2)),
    (pa.string(), st.text(max_size=200)),
    (pa.binary(), st.binary(max_size=200)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes()),
]


def chunk(*records: bytes) -> Chunk:
    """Return records as they are read from a file."""
    content = b"".join(records)
    starts, lengths, end = find_records(content)
    assert end == len(content)
    return Chunk("a.tfrecord", 0, 0, content, starts, lengths)


def rows(schema: pa.Schema, *records: bytes) -> list[dict[str, Any]]:
    """Return the rows of these messages."""
    found: list[dict[str, Any]] = decode_chunk(chunk(*map(frame, records)), schema).to_pylist()
    return found


@st.composite
def columns(draw: Any) -> pa.Array:
    kind, values = draw(st.sampled_from(VALUES))
    if draw(st.booleans()):
        kind, values = pa.list_(kind), st.lists(values, max_size=5)
    return pa.array(draw(st.lists(st.none() | values, min_size=6, max_size=6)), kind)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=9), columns(), max_size=5))
def test_what_was_encoded_comes_back(data: dict[str, pa.Array]) -> None:
    batch = pa.record_batch({**data, "#": pa.array(range(6))})
    content = encode_batch(batch).content
    found = decode_chunk(chunk(content.tobytes()), batch.schema)
    found.validate(full=True)
    assert found.equals(batch)
    backwards = pa.schema(list(batch.schema)[::-1])
    assert decode_chunk(chunk(content.tobytes()), backwards).equals(batch.select(backwards.names))


NUMBERS = pa.schema([("i", pa.list_(pa.int64())), ("f", pa.list_(pa.float32()))])


@given(
    st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6), max_size=6),
    st.lists(st.booleans(), min_size=36, max_size=36),
)
def test_numbers_may_be_packed_or_not_and_in_several_pieces(
    lists: list[list[int]], packed: list[bool]
) -> None:
    flags = iter(packed)
    records = []
    for values in lists:
        integers, floats = b"", b""
        for value in values:
            data = encode_varints(np.array([value], np.int64))[0].tobytes()
            number = struct.pack("<f", value)
            is_packed = next(flags)
            integers += field(1, data) if is_packed else b"\x08" + data
            floats += field(1, number) if is_packed else b"\x0d" + number
        records.append(example(entry("f", FLOAT, floats), entry("i", INT64, integers)))
    expected = [{"i": v, "f": [float(np.float32(x)) for x in v]} for v in lists]
    assert rows(NUMBERS, *records) == expected


ONE = pa.schema([("x", pa.int64())])
X = entry("x", INT64, field(1, b"\x07"))


@pytest.mark.parametrize(
    ("record", "value"),
    [
        (example(X), 7),
        (example(entry("y", FLOAT, b""), X, entry("z", BYTES, field(1, b"a"))), 7),
        (example() + example(X), 7),  # concatenated messages are merged
        (example(X, entry("x", INT64, field(1, b"\x08"))), 8),  # the last one counts
        (field(2, b"unknown") + b"\x18\x05" + example(X) + b"\x25abcd\x29abcdefgh", 7),
        (example(field(9, b"?") + X), 7),
        (example(field(1, field(2, field(INT64, field(1, b"\x07"))) + field(1, b"x"))), 7),
        (example(entry("x", INT64, b"\x10\x01" + field(1, b"\x07"))), 7),
        (example(field(1, field(1, b"x") + field(2, b""))), None),  # a Feature without a list
        (example(field(1, field(1, b"x"))), None),
        (example(), None),
        (b"", None),
    ],
)
def test_what_protobuf_allows_is_understood(record: bytes, value: int | None) -> None:
    assert rows(ONE, example(X), record) == [{"x": 7}, {"x": value}]


@pytest.mark.parametrize(
    "record",
    [
        b"\x0a",  # no length
        b"\x0a\x05abc",  # longer than the record
        b"\x0b",  # groups are obsolete
        b"\x02\x01a",  # the field number 0
        b"\xff" * 11,  # a tag of more than 64 bits
        b"\x0a" + b"\xff" * 9 + b"\x01",  # a length of 2^64 - 1
        example(field(1, b"\x0a\x09x")),
        example(entry("x", INT64, field(1, b"\x80"))),  # half a number
        example(entry("x", INT64, field(1, b"\xff" * 11 + b"\x00"))),
        example(entry("x", INT64, b"\x0dabcd")),  # a float
    ],
)
def test_what_is_not_an_example_is_rejected(record: bytes) -> None:
    with pytest.raises(
        InputError, match=r"record 1 of a.tfrecord \(at byte .* not a tf.train.Exam"
    ):
        rows(ONE, example(X), record, example(X))


def test_half_a_float_is_rejected() -> None:
    with pytest.raises(InputError, match=r"record 0 of a.tfrecord .* is not a tf.train.Example"):
        rows(NUMBERS, example(entry("f", FLOAT, field(1, b"abc"))))


@pytest.mark.parametrize(
    ("kind", "record", "expected"),
    [
        (pa.float32(), example(X), "'x' as int64_list, but a column of float needs float_list"),
        (pa.int64(), example(entry("x", INT64, field(1, b"\x01\x02"))), "has 2 values"),
        (pa.int64(), example(entry("x", INT64, b"")), "has 0 values .* '\\[\\]' after"),
        (pa.int8(), example(entry("x", INT64, field(1, encode_one(300)))), "fit in int8: .*300"),
        (pa.string(), example(entry("x", BYTES, field(1, b"\xff"))), "fit in string: .*UTF8"),
        (
            pa.list_(pa.int8()),
            example(entry("x", INT64, field(1, b"\x01" + encode_one(300)))),
            "fit in int8",
        ),
    ],
)
def test_what_does_not_fit_the_column_is_rejected_by_name(
    kind: pa.DataType, record: bytes, expected: str
) -> None:
    with pytest.raises(InputError, match=f"record 1 of a.tfrecord .*{expected}") as caught:
        rows(pa.schema([("x", kind)]), example(), record)
    assert "'x'" in str(caught.value)


def test_many_features_with_names_of_one_length() -> None:
    batch = pa.record_batch({f"f{number:02}": pa.array([number, None]) for number in range(99)})
    content = encode_batch(batch).content
    schema = pa.schema([("f98", pa.int64()), ("f9", pa.int64()), ("f07", pa.int64())])
    assert decode_chunk(chunk(content.tobytes()), schema).to_pylist() == [
        {"f98": 98, "f9": None, "f07": 7},
        {"f98": None, "f9": None, "f07": None},
    ]


def test_no_column_is_rows_without_any(tmp_path: Path) -> None:
    assert decode_chunk(chunk(frame(example(X))), pa.schema([])).num_columns == 0
