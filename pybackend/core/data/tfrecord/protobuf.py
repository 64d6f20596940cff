"""Protocol buffers, many at a time: rows of bytes, varints, and messages.

Also the types that the message Example can hold, and their names in Spark and Arrow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pybackend.core.data.tfrecord.framing import Bytes, Flags, Index
from pybackend.core.errors import InputError
from pybackend.core.words import show

# For 64 bits; a negative number uses all of them.
MOST_BYTES = 10
_LOW = np.uint64(0x7F)
VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
# The numbers of the lists in the message Feature.
BYTES, FLOAT, INT64 = 1, 2, 3
LISTS = {BYTES: "bytes_list", FLOAT: "float_list", INT64: "int64_list"}
# Arrow's names, by Spark's; the last ones are the same.
_ARROW = {"byte": "int8", "short": "int16", "integer": "int32", "long": "int64", "boolean": "bool"}
_ARROW |= {"date": "date32", **{name: name for name in ("float", "double", "string", "binary")}}
_EXPECTED = (
    "a TFRecord can store numbers, booleans, strings, binary, dates, timestamps, arrays of these "
    "and ML vectors. Drop the column, or split it into several columns"
)


def split_bytes(content: Bytes, offsets: Index) -> pa.LargeBinaryArray:
    """Return consecutive bytes as rows, without a copy."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def cut_bytes(content: Bytes, starts: Index, ends: Index) -> pa.LargeBinaryArray:
    """Return rows ``content[start:end]``, which must be in order but may have gaps between them."""
    # The gaps between rows are rows of the array, too, so that its offsets are consecutive.
    offsets = np.empty(2 * len(starts) + 1, np.int64)
    offsets[0:-1:2], offsets[1::2] = starts, ends
    offsets[-1] = ends[-1] if len(ends) else 0
    return split_bytes(content, offsets).take(pa.array(np.arange(0, 2 * len(starts), 2)))


def join_columns(columns: Sequence[pa.Array]) -> pa.LargeBinaryArray:
    """Row by row."""
    return pc.binary_join_element_wise(*columns, pa.scalar(b"", pa.large_binary()))


def build_per_size(sizes: Index, build: Callable[[Index], Iterable[bytes]]) -> pa.LargeBinaryArray:
    """Build rows that depend only on a size, once per distinct size.

    The rows of a buffer of n bytes have at most sqrt(2 n) distinct sizes.
    """
    if len(sizes) and (sizes == sizes[0]).all():
        (only,) = build(sizes[:1])
        return pa.repeat(pa.scalar(only, pa.large_binary()), len(sizes))
    coded = pa.array(sizes).dictionary_encode()
    made = pa.array(list(build(coded.dictionary.to_numpy())), pa.large_binary())
    return made.take(coded.indices)


def encode_one(value: int) -> bytes:
    """Encode one non-negative number."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def encode_varints(values: Index) -> tuple[Bytes, Index]:
    """Return the consecutive bytes of numbers, and the start of each; the last entry is the end."""
    left = values.view(np.uint64)
    if not (left > _LOW).any():
        return values.astype(np.uint8), np.arange(len(values) + 1, dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(_measure(left))])
    found = np.empty(offsets[-1], np.uint8)
    at = offsets[:-1]
    while len(left):
        more = left > _LOW
        found[at] = (left & _LOW).astype(np.uint8) | (more.astype(np.uint8) << 7)
        left, at = left[more] >> np.uint64(7), at[more] + 1
    return found, offsets


def _measure(values: npt.NDArray[np.uint64]) -> Index:
    sizes = np.ones(len(values), np.int64)
    for byte in range(1, MOST_BYTES):
        longer = values >= np.uint64(1 << 7 * byte)
        if not longer.any():
            break
        sizes += longer
    return sizes


def decode_varints(data: Bytes, begins: Index) -> tuple[Index, Index, Flags]:
    """Return the number at each position, where it ends, and whether it fits into 10 bytes."""
    first = data.take(begins, mode="clip")
    values = (first & 0x7F).astype(np.uint64)
    ends = begins + 1
    rows = np.flatnonzero(first > 0x7F)
    for byte in range(1, MOST_BYTES):
        if not len(rows):
            break
        following = data.take(ends[rows], mode="clip")
        values[rows] |= (following & 0x7F).astype(np.uint64) << np.uint64(7 * byte)
        ends[rows] += 1
        rows = rows[following > 0x7F]
    whole = ends <= len(data)
    whole[rows] = False
    return values.view(np.int64), ends, whole


class Malformed(Exception):
    """Bytes that are not a message; the argument is the index of the first such message."""


class Fields(NamedTuple):
    """Fields of many messages, in the order in which they are stored."""

    owners: Index  # index of the field's message
    numbers: Index  # number of the field
    wires: Index  # its wire type
    starts: Index  # of its content, after the tag and the length, if it has one
    ends: Index

    def where(self, chosen: Flags | Index) -> Fields:
        return Fields(*(column[chosen] for column in self))

    def messages(self, number: int) -> Fields:
        """Return the fields with a given number that are messages or bytes."""
        chosen = (self.numbers == number) & (self.wires == LENGTH_DELIMITED)
        return self if chosen.all() else self.where(chosen)


def parse_fields(data: Bytes, starts: Index, ends: Index) -> Fields:
    """The messages are ``data[start:end]``, in order; raise `Malformed` if one is not a message."""
    steps: list[Fields] = []
    owners, at, limits = np.arange(len(starts)), starts, ends
    while True:
        left = at < limits
        if not left.all():
            owners, at, limits = owners[left], at[left], limits[left]
        if not len(owners):
            break
        step = _next_field(data, owners, at, limits)
        steps.append(step)
        at = step.ends
    return _merge(steps)


def _next_field(data: Bytes, owners: Index, at: Index, limits: Index) -> Fields:
    tags, after, whole = decode_varints(data, at)
    numbers, wires = tags >> 3, tags & 7
    # A tag is followed by a number or by a length.
    values, begins, whole_value = decode_varints(data, after)
    if (wires == LENGTH_DELIMITED).all():
        ends = begins + values
        valid = whole & whole_value & (values >= 0) & (values <= len(data)) & (ends <= limits)
    else:
        kinds = [wires == VARINT, wires == FIXED64, wires == LENGTH_DELIMITED, wires == FIXED32]
        has_length = kinds[2] & (values >= 0) & (values <= len(data))
        ends = np.select(
            [kinds[0], kinds[1], has_length, kinds[3]],
            [begins, after + 8, begins + values, after + 4],
            len(data) + 1,
        )
        begins = np.where(kinds[2], begins, after)
        valid = whole & (whole_value | kinds[1] | kinds[3]) & (ends <= limits)
    valid &= numbers > 0
    if not valid.all():
        raise Malformed(int(owners[np.argmin(valid)]))
    return Fields(owners, numbers, wires, begins, ends)


def _merge(steps: list[Fields]) -> Fields:
    """Sorted by position."""
    if len(steps) == 1:
        return steps[0]
    nothing = Fields(*[np.empty(0, np.int64)] * 5)
    fields = Fields(*map(np.concatenate, zip(nothing, *steps, strict=True)))
    return fields.where(np.argsort(fields.starts, kind="stable"))


def to_arrow_type(spark: Any, column: str) -> pa.DataType:
    """From Spark's JSON format; an `InputError` names a column that a record cannot hold."""
    if isinstance(spark, dict) and spark.get("type") == "array":
        element = to_arrow_type(spark["elementType"], column)
        if not is_list(element):
            return pa.list_(element)
    elif isinstance(spark, str):
        if spark in _ARROW:
            return pa.type_for_alias(_ARROW[spark])
        if spark in ("timestamp", "timestamp_ntz"):
            return pa.timestamp("us", "UTC" if spark == "timestamp" else None)
        if decimal := re.fullmatch(r"decimal\((\d+),\s*(-?\d+)\)", spark):
            return pa.decimal128(int(decimal[1]), int(decimal[2]))
    raise InputError(f"column {show(column)} has the type {_name_type(spark)}: {_EXPECTED}")


def to_spark_type(arrow: pa.DataType) -> Any:
    """Convert an Arrow type that `to_arrow_type` returned to a type in Spark's JSON format."""
    if is_list(arrow):
        element = to_spark_type(arrow.value_type)
        return {"type": "array", "elementType": element, "containsNull": True}
    if pa.types.is_timestamp(arrow):
        return "timestamp" if arrow.tz else "timestamp_ntz"
    if pa.types.is_decimal(arrow):
        return f"decimal({arrow.precision},{arrow.scale})"
    return next(name for name, alias in _ARROW.items() if pa.type_for_alias(alias) == arrow)


def to_schema(fields: Any) -> pa.Schema:
    """Convert a struct in Spark's JSON to an Arrow schema; raise `InputError` if unsupported."""
    names = [field["name"] for field in fields["fields"]]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            f"there are several columns named {show(twice[0])}, but each name can occur only once "
            "in a TFRecord: rename them"
        )
    types = [to_arrow_type(field["type"], field["name"]) for field in fields["fields"]]
    return pa.schema(list(zip(names, types, strict=True)))


def to_spark_fields(schema: pa.Schema) -> dict[str, Any]:
    """Convert a schema to a struct in Spark's JSON.

    Every column is nullable, because any feature may be absent.
    """
    fields = [
        {"name": field.name, "type": to_spark_type(field.type), "nullable": True, "metadata": {}}
        for field in schema
    ]
    return {"type": "struct", "fields": fields}


def choose_list(arrow: pa.DataType) -> int | None:
    """Return the kind of list for values of a type, or of its elements; None if not supported."""
    of = pa.types
    if is_list(arrow):
        return None if is_list(arrow.value_type) else choose_list(arrow.value_type)
    whole = of.is_integer(arrow) or of.is_boolean(arrow) or of.is_date(arrow)
    if whole or of.is_timestamp(arrow):
        return INT64
    if of.is_floating(arrow) or of.is_decimal(arrow):
        return FLOAT
    text = of.is_string(arrow) or of.is_large_string(arrow)
    data = of.is_binary(arrow) or of.is_large_binary(arrow) or of.is_fixed_size_binary(arrow)
    return BYTES if text or data else None


def is_list(arrow: pa.DataType) -> bool:
    """True for arrays in any of Arrow's layouts."""
    of = pa.types
    return bool(of.is_list(arrow) or of.is_large_list(arrow) or of.is_fixed_size_list(arrow))


def _name_type(spark: Any) -> str:
    if not isinstance(spark, dict):
        return str(spark)
    if spark.get("type") == "array":
        return f"array<{_name_type(spark['elementType'])}>"
    return str(spark.get("class") or spark.get("type"))
