"""Records by Spark's tasks: a DataFrame into files, and files into a DataFrame."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pybackend.data.tfrecord.compression import Compression
from pybackend.data.tfrecord.files import RecordFiles
from pybackend.data.tfrecord.manifest import Manifest
from pybackend.data.tfrecord.part import Part
from pybackend.data.tfrecord.publish import begin, discard, finish
from pybackend.data.tfrecord.types import to_schema, to_spark_fields
from pybackend.errors import InputError
from pybackend.launchers.spark.explain import explain_spark_error
from pybackend.launchers.spark.python import driver_python
from pybackend.launchers.spark.records_task import SCHEMA, CallTask, ReadTask, WriteTask, refused
from pybackend.launchers.spark.session import is_connect
from pybackend.launchers.spark.shipping import ship_package
from pybackend.launchers.spark.slots import slots_of
from pybackend.net.rendezvous import new_token

# What a task reads: enough for its start not to count, little enough for all tasks to have some.
_LEAST_BYTES, _MOST_BYTES = 4 << 20, 128 << 20
_VECTOR = "VectorUDT"


def storable(frame: Any) -> tuple[Any, dict[str, Any]]:
    """A DataFrame whose ML vectors have become arrays, and its columns as Spark's JSON.

    Its columns have names of its own, as Spark takes dots and backticks for more than a name.

    Raises
    ------
    InputError
        Names the column that no record can hold.
    """
    fields = json.loads(frame.schema.json())
    vectors = [f.name for f in frame.schema.fields if type(f.dataType).__name__ == _VECTOR]
    for field in fields["fields"]:
        if field["name"] in vectors:
            field["type"] = {"type": "array", "elementType": "float", "containsNull": False}
    to_schema(fields)
    if not fields["fields"]:
        raise InputError("`df` has no columns: a record needs a feature at least")
    frame = frame.toDF(*(f"column_{place}" for place in range(len(fields["fields"]))))
    for place, field in enumerate(fields["fields"]):
        if field["name"] in vectors:
            frame = _with_array(frame, f"column_{place}")
    return frame, fields


def write(
    frame: Any, fields: dict[str, Any], uri: str, compression: Compression, overwrite: bool
) -> Manifest:
    """Write a `storable` DataFrame, each partition into a file of its own.

    Raises
    ------
    InputError
        Where the folder cannot be used, or a row cannot be written.
    ClusterError
        Spark's own failure.
    """
    session, token = frame.sparkSession, new_token()
    ship_package(session)
    is_new = _where_tasks_see(session, begin, uri, token, overwrite)
    try:
        names = tuple(field["name"] for field in fields["fields"])
        task = WriteTask(uri, token, compression, names)
        parts = [Part(**told) for told in _reports(session, frame, task)]
        parts.sort(key=lambda part: part.name)  # by the partition's number
        manifest = Manifest(fields, compression, tuple(parts)).to_json()
        told = _where_tasks_see(session, finish, uri, token, manifest, overwrite)
    except BaseException:
        with suppress(Exception):  # what failed first is the cause
            _where_tasks_see(session, discard, uri, token, is_new)
        raise
    return Manifest.from_json(told)


def read(session: Any, uri: str, spec: Mapping[str, str] | None) -> Any:
    """A DataFrame of the records at a path or URI; only their places are looked up."""
    from pyspark.sql.types import StructType

    ship_package(session)
    spec = dict(spec) if spec is not None else None
    files = RecordFiles.from_json(_where_tasks_see(session, _found, uri, spec))
    share = sum(files.sizes) // (2 * slots_of(session))
    ranges = files.ranges(min(max(share, _LEAST_BYTES), _MOST_BYTES))
    kind = StructType.fromJson(to_spark_fields(files.schema))
    if not ranges:
        return session.createDataFrame([], kind)
    numbers = session.range(0, len(ranges), 1, len(ranges))
    with driver_python(session):
        return numbers.mapInArrow(ReadTask(files, tuple(ranges)), kind)


def _found(uri: str, spec: Mapping[str, str] | None) -> dict[str, Any]:
    return RecordFiles.at(uri, spec, "path").to_json()


def _where_tasks_see(session: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function where the folder is: a client of Connect may be on another machine."""
    if not is_connect(session):
        return function(*arguments)
    (value,) = _reports(session, session.range(0, 1, 1, 1), CallTask(function, arguments))
    return value


def _reports(session: Any, frame: Any, task: Any) -> list[Any]:
    try:
        with driver_python(session):
            rows = frame.mapInArrow(task, SCHEMA).collect()
    except Exception as error:
        raise refused(str(error)) or explain_spark_error(error) from error
    return [json.loads(row["report"]) for row in rows]


def _with_array(frame: Any, column: str) -> Any:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql.functions import when

    # Spark's own function fails at a null.
    array = when(frame[column].isNotNull(), vector_to_array(frame[column], "float32"))
    return frame.withColumn(column, array)
