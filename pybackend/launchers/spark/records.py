"""Records by Spark's tasks: a DataFrame into files, and files into a DataFrame."""

from __future__ import annotations

import json
import math
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
from pybackend.launchers.spark.jobs import run_watched
from pybackend.launchers.spark.log import quiet_log
from pybackend.launchers.spark.python import driver_python
from pybackend.launchers.spark.records_task import (
    SCHEMA,
    CallTask,
    ReadTask,
    WriteTask,
    read_refusal,
)
from pybackend.launchers.spark.session import ask, is_connect, read_schema
from pybackend.launchers.spark.shipping import ship_package
from pybackend.launchers.spark.slots import count_slots
from pybackend.net.rendezvous import new_token

# What a task reads: enough for its start not to count, little enough for all tasks to have some.
_LEAST_BYTES, _MOST_BYTES = 4 << 20, 128 << 20
_VECTOR = "VectorUDT"


def write_records(
    frame: Any, uri: str, compression: Compression, overwrite: bool, partitions: int | None = None
) -> Manifest:
    """Write a DataFrame, each partition into a file of its own.

    Parameters
    ----------
    partitions
        Repartition it into so many; None: as it is.

    Raises
    ------
    InputError
        Names the column that no record can hold; or the folder cannot be used, or a row cannot be
        written.
    ClusterError
        Spark's own failure.
    """
    session, token = frame.sparkSession, new_token()
    kind = read_schema(frame)
    fields = _fields_of(kind)
    frame = ask(session, "a plan", lambda: _store_as(frame, kind, partitions))
    ship_package(session)
    is_new = _call_at_tasks(session, begin, uri, token, overwrite)
    try:
        names = tuple(field["name"] for field in fields["fields"])
        task = WriteTask(uri, token, compression, names)
        parts = [Part(**report) for report in _reports(session, frame, task)]
        parts.sort(key=lambda part: part.name)  # by the partition's number
        manifest = Manifest(fields, compression, tuple(parts)).to_json()
        written = _call_at_tasks(session, finish, uri, token, manifest, overwrite)
    except BaseException:
        with suppress(Exception):  # what failed first is the cause
            _call_at_tasks(session, discard, uri, token, is_new)
        raise
    return Manifest.from_json(written)


def read_records(session: Any, uri: str, spec: Mapping[str, str] | None) -> Any:
    """A DataFrame of the records at a path or URI; only their places are looked up."""
    from pyspark.sql.types import StructType

    ship_package(session)
    spec = dict(spec) if spec is not None else None
    files = RecordFiles.from_json(_call_at_tasks(session, _find_files, uri, spec))
    share = sum(files.sizes) // (2 * count_slots(session))
    ranges = files.ranges(min(max(share, _LEAST_BYTES), _MOST_BYTES))
    kind = StructType.fromJson(to_spark_fields(files.schema))
    if not ranges:
        return ask(session, "a DataFrame", lambda: session.createDataFrame([], kind))

    def plan() -> Any:
        numbers = session.range(0, len(ranges), 1, len(ranges))
        return numbers.mapInArrow(ReadTask(files, tuple(ranges)), kind)

    with driver_python(session):
        return ask(session, "a plan", plan)


def _fields_of(kind: Any) -> dict[str, Any]:
    """Spark's JSON of the columns, in which ML vectors are arrays.

    Raises
    ------
    InputError
        Names the column that no record can hold.
    """
    fields: dict[str, Any] = json.loads(kind.json())
    for place in _vectors(kind):
        fields["fields"][place]["type"] = {
            "type": "array",
            "elementType": "float",
            "containsNull": False,
        }
    to_schema(fields)
    if not fields["fields"]:
        raise InputError("`df` has no columns: a record needs a feature at least")
    return fields


def _vectors(kind: Any) -> list[int]:
    return [i for i, f in enumerate(kind.fields) if type(f.dataType).__name__ == _VECTOR]


def _store_as(frame: Any, kind: Any, partitions: int | None) -> Any:
    """A DataFrame whose ML vectors have become arrays, in so many partitions.

    Its columns have names of its own, as Spark takes dots and backticks for more than a name.
    """
    frame = frame.toDF(*(f"column_{place}" for place in range(len(kind.fields))))
    for place in _vectors(kind):
        frame = _with_array(frame, f"column_{place}")
    return frame if partitions is None else frame.repartition(partitions)


def _find_files(uri: str, spec: Mapping[str, str] | None) -> dict[str, Any]:
    return RecordFiles.at(uri, spec, "path").to_json()


def _call_at_tasks(session: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function where the folder is: a client of Connect may be on another machine."""
    if not is_connect(session):
        return function(*arguments)
    (value,) = _reports(session, session.range(0, 1, 1, 1), CallTask(function, arguments))
    return value


def _reports(session: Any, frame: Any, task: Any) -> list[Any]:
    # No task need run while Spark prepares the rows: only its driver has to answer.
    def collect() -> list[Any] | Exception:
        try:
            return list(frame.mapInArrow(task, SCHEMA).collect())
        except Exception as error:
            return error

    with driver_python(session), quiet_log(session):
        rows = run_watched(session, collect, idle_seconds=math.inf)
        if isinstance(rows, Exception):
            raise read_refusal(str(rows)) or explain_spark_error(rows, session) from None
    return [json.loads(row["report"]) for row in rows]


def _with_array(frame: Any, column: str) -> Any:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql.functions import when

    # Spark's own function fails at a null.
    array = when(frame[column].isNotNull(), vector_to_array(frame[column], "float32"))
    return frame.withColumn(column, array)
