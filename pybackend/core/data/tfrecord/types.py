"""Types that an Example can hold, the lists for them, and their names in Spark and Arrow."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pybackend.core.errors import InputError
from pybackend.core.words import show

if TYPE_CHECKING:
    import pyarrow as pa

# The numbers of the lists in the message Feature.
BYTES, FLOAT, INT64 = 1, 2, 3
LISTS = {BYTES: "bytes_list", FLOAT: "float_list", INT64: "int64_list"}

_ARROW = {
    "byte": "int8",
    "short": "int16",
    "integer": "int32",
    "long": "int64",
    "boolean": "bool",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "date": "date32",
}
_EXPECTED = (
    "a TFRecord can store numbers, booleans, strings, binary, dates, timestamps, arrays of these "
    "and ML vectors. Drop the column, or split it into several columns"
)


def to_arrow_type(spark: Any, column: str) -> pa.DataType:
    """Convert a type in Spark's JSON format to an Arrow type.

    Raises
    ------
    InputError
        Names the column whose type a record cannot hold.
    """
    import pyarrow as pa

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
    import pyarrow as pa

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
    import pyarrow as pa

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
    import pyarrow as pa

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
    """Return whether values are arrays, in any of Arrow's layouts."""
    import pyarrow as pa

    of = pa.types
    return bool(of.is_list(arrow) or of.is_large_list(arrow) or of.is_fixed_size_list(arrow))


def _name_type(spark: Any) -> str:
    if not isinstance(spark, dict):
        return str(spark)
    if spark.get("type") == "array":
        return f"array<{_name_type(spark['elementType'])}>"
    return str(spark.get("class") or spark.get("type"))
