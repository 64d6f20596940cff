"""TFRecord files of tf.train.Example as DataFrames with TensorFlowOnSpark's types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from pybackend.core.api.tfrecords import read_tfrecords, write_tfrecords
from pybackend.core.data.tfrecord.decode import decode_chunk, infer_spec, spec_to_schema
from pybackend.core.data.tfrecord.encode import encode_batch
from pybackend.core.data.tfrecord.framing import FOOT, HEAD, Chunk
from pybackend.core.errors import InputError
from pybackend.tfos.util import session_of

loadedDF: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""DataFrames of `loadTFRecords`, and the paths from which they were loaded."""

_ROWS_AT_ONCE = 1000
DTypes = Sequence[tuple[str, str]]
Serialized = tuple[bytearray, None]
# Names of types in `DataFrame.dtypes` and in Arrow.
_WHOLE = {"boolean": "bool", "tinyint": "int8", "smallint": "int16", "int": "int32"}
_WHOLE |= {"bigint": "int64", "long": "int64"}
_LOADED = {**dict.fromkeys(_WHOLE, "bigint"), "float": "double", "double": "double"}
_ARROW_TYPES = _WHOLE | {name: name for name in ("float", "double", "string", "binary")}


def isLoadedDF(df: Any) -> bool:
    return df in loadedDF


def saveAsTFRecords(df: Any, output_dir: str, overwrite: bool = False) -> None:
    """Write a DataFrame as TFRecord files into a folder, new or empty, or else with ``overwrite``.

    Errors are those of `write_tfrecords`.
    """
    write_tfrecords(df, output_dir, overwrite=overwrite)


def loadTFRecords(sc: Any, input_dir: str, binary_features: Sequence[str] = ()) -> Any:
    """Read TFRecord files as a DataFrame, its columns sorted by name.

    Whole numbers are ``bigint``, others ``double``, bytes are text unless ``binary_features`` names
    them; features with several values are arrays of these. ``sc`` may also be a SparkSession, and
    ``input_dir`` a file. Errors are those of `read_tfrecords`.
    """
    frame = read_tfrecords(session_of(sc), input_dir)
    types = dict(frame.dtypes)
    columns = []
    for name in sorted(types):
        column = frame["`" + name.replace("`", "``") + "`"]
        element = types[name].removeprefix("array<").removesuffix(">")
        wanted = _loaded_type(name, element, binary_features)
        is_list = types[name] != element
        columns.append(column.cast(f"array<{wanted}>" if is_list else wanted).alias(name))
    loaded = frame.select(*columns)
    loadedDF[loaded] = input_dir
    return loaded


def _loaded_type(name: str, element: str, binary_features: Sequence[str]) -> str:
    return "binary" if name in binary_features else _LOADED.get(element, "string")


def toTFExample(dtypes: DTypes) -> Callable[[Iterable[Any]], Iterator[Serialized]]:
    """Return a function for ``mapPartitions``: rows to pairs of a serialized Example and None.

    ``dtypes`` are ``DataFrame.dtypes`` of the rows. Raises `InputError` for a type that a record
    cannot hold.
    """
    return partial(_encode_rows, [(name, kind) for name, kind in dtypes if _arrow_type(name, kind)])


def _encode_rows(dtypes: DTypes, rows: Iterable[Any]) -> Iterator[Serialized]:
    import pyarrow as pa

    schema = pa.schema([(name, _arrow_type(name, kind)) for name, kind in dtypes])
    waiting = iter(rows)
    while some := list(islice(waiting, _ROWS_AT_ONCE)):
        columns = [pa.array([row[field.name] for row in some], field.type) for field in schema]
        content, offsets, _ = encode_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        for first, last in zip(offsets[:-1] + HEAD, offsets[1:] - FOOT, strict=True):
            yield bytearray(content[first:last].tobytes()), None


def _arrow_type(name: str, kind: str) -> Any:
    import pyarrow as pa

    element = kind.removeprefix("array<").removesuffix(">")
    if element not in _ARROW_TYPES:
        raise InputError(f"column {name!r} has the type {kind}, which a TFRecord cannot store")
    found = pa.type_for_alias(_ARROW_TYPES[element])
    return found if element == kind else pa.list_(found)


def fromTFExample(iter: Iterable[Any], binary_features: Sequence[str] = ()) -> list[Any]:
    """Convert serialized tf.train.Example records to rows of features, for ``mapPartitions``.

    ``iter`` yields pairs that begin with the bytes of an example. Features in ``binary_features``
    stay bytes; all other byte features are UTF-8 text. Returns a ``pyspark.sql.Row`` for each
    example; a feature is one value, a list of several, or None. Raises `InputError` if an example
    is invalid, or two examples have the same feature in different kinds of lists.
    """
    from pyspark.sql import Row

    examples = [bytes(record[0]) for record in iter]
    if not examples:
        return []
    lengths = np.array([len(example) for example in examples], np.int64)
    content = b"".join(examples)
    chunk = Chunk("the examples", 0, 0, content, np.cumsum(lengths) - lengths, lengths)
    spec = {
        name: kind if name in binary_features else kind.replace("bytes", "string")
        for name, kind in infer_spec([chunk]).items()
    }
    rows = decode_chunk(chunk, spec_to_schema(spec)).to_pylist()
    return [Row(**{name: _python_value(value) for name, value in row.items()}) for row in rows]


def _python_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_python_value(item) for item in value] or None
    return bytearray(value) if isinstance(value, bytes) else value


def infer_schema(example: Any, binary_features: Sequence[str] = ()) -> Any:
    """Return the ``StructType`` of the rows that `fromTFExample` makes from examples like this."""
    from pyspark.sql import types

    def infer(name: str, feature: Any) -> Any:
        found = feature.bytes_list.value
        kind: Any = types.BinaryType() if name in binary_features else types.StringType()
        if feature.int64_list.value:
            found, kind = feature.int64_list.value, types.LongType()
        elif feature.float_list.value:
            found, kind = feature.float_list.value, types.DoubleType()
        return types.ArrayType(kind) if len(found) > 1 else kind

    features = sorted(example.features.feature.items())
    return types.StructType([types.StructField(name, infer(name, item)) for name, item in features])
