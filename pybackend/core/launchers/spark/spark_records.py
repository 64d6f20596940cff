"""TFRecord files written from, and read into, a DataFrame by Spark tasks.

This file is imported on the executors, too; the driver sends it there.
"""

from __future__ import annotations

import base64
import json
import math
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from pybackend.core.data.tfrecord import folder
from pybackend.core.data.tfrecord.encode import RecordFile, write_part
from pybackend.core.data.tfrecord.framing import Compression
from pybackend.core.data.tfrecord.protobuf import to_schema, to_spark_fields
from pybackend.core.data.tfrecord.record_files import RecordFiles
from pybackend.core.errors import InputError
from pybackend.core.launchers.spark import sessions
from pybackend.core.launchers.spark.explain import run_explained
from pybackend.core.launchers.spark.slots import count_slots
from pybackend.core.net.authentication import new_token
from pybackend.core.words import show

# Bytes that a task reads: enough to outweigh its start, few enough to give every task some.
_LEAST_BYTES, _MOST_BYTES = 4 << 20, 128 << 20
_VECTOR = "VectorUDT"


def write_records(
    frame: Any, uri: str, compression: Compression, overwrite: bool, partitions: int | None = None
) -> folder.RecordsManifest:
    """Write a DataFrame, each partition into its own file.

    ``partitions`` is the number of partitions; None: those of the DataFrame. `InputError` if a
    record cannot hold a column (the message names it), the folder cannot be used, or a row cannot
    be written.
    """
    session, token, kind = frame.sparkSession, new_token(), sessions.read_schema(frame)
    fields = _fields_of(kind)
    frame = sessions.ask(session, "a plan", lambda: _store_as(frame, kind, partitions))
    sessions.ship_package(session)
    is_new = _call_at_tasks(session, folder.begin, uri, token, overwrite)
    try:
        names = tuple(field["name"] for field in fields["fields"])
        task = WriteTask(uri, token, compression, names)
        # No task has to run while Spark prepares the rows: only its driver has to answer.
        values = _collect(session, frame, task, idle_seconds=math.inf)
        values.sort(key=lambda value: value["name"])  # by the partition's number
        parts = tuple(RecordFile(**value) for value in values)
        manifest = folder.RecordsManifest(fields, compression, parts).to_json()
        written = _call_at_tasks(session, folder.finish, uri, token, manifest, overwrite)
    except BaseException:
        with suppress(Exception):  # the first failure is the cause
            _call_at_tasks(session, folder.discard, uri, token, is_new)
        raise
    return folder.RecordsManifest.from_json(written)


def read_records(session: Any, uri: str, spec: Mapping[str, str] | None) -> Any:
    """Return a lazy DataFrame of the records at a path or URI; only their positions are read."""
    from pyspark.sql.types import StructType

    sessions.ship_package(session)
    spec = dict(spec) if spec is not None else None
    files = RecordFiles.from_json(_call_at_tasks(session, _find_files, uri, spec))
    share = sum(part.size for part in files.parts) // (2 * count_slots(session))
    ranges = files.ranges(min(max(share, _LEAST_BYTES), _MOST_BYTES))
    kind = StructType.fromJson(to_spark_fields(files.schema))
    if not ranges:
        return sessions.ask(session, "a DataFrame", lambda: session.createDataFrame([], kind))
    with sessions.driver_python(session):
        numbers = sessions.number_partitions(session, len(ranges))
        return sessions.map_in_arrow(numbers, ReadTask(files, tuple(ranges)), kind)


def _fields_of(kind: Any) -> dict[str, Any]:
    """Return Spark's JSON for the columns, with ML vectors as arrays.

    `InputError` names a column that a record cannot hold.
    """
    fields: dict[str, Any] = json.loads(kind.json())
    array = {"type": "array", "elementType": "float", "containsNull": False}
    for index in _vectors(kind):
        fields["fields"][index]["type"] = array
    to_schema(fields)
    if not fields["fields"]:
        raise InputError("`df` has no columns: a record needs at least one feature")
    return fields


def _vectors(kind: Any) -> list[int]:
    return [i for i, f in enumerate(kind.fields) if type(f.dataType).__name__ == _VECTOR]


def _store_as(frame: Any, kind: Any, partitions: int | None) -> Any:
    # Renamed, because Spark interprets dots and backticks in names.
    frame = frame.toDF(*(f"column_{index}" for index in range(len(kind.fields))))
    for index in _vectors(kind):
        frame = _with_array(frame, f"column_{index}")
    return frame if partitions is None else frame.repartition(partitions)


def _find_files(uri: str, spec: Mapping[str, str] | None) -> dict[str, Any]:
    return RecordFiles.at(uri, spec, "path").to_json()


def _call_at_tasks(session: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function where the folder is visible: a Connect client may be on another machine."""
    if sessions.is_connect(session):
        return call_in_task(session, function, *arguments, idle_seconds=math.inf)
    return function(*arguments)


def call_in_task(session: Any, function: Callable[..., Any], *arguments: Any, **limits: Any) -> Any:
    """Return the value of a function that one task calls; ``limits`` are those of `run_watched`."""
    frame, task = session.range(0, 1, 1, 1), CallTask(function, arguments)
    (value,) = _collect(session, frame, task, **limits)
    return value


def _collect(session: Any, frame: Any, task: Any, **limits: Any) -> list[Any]:
    """Return the values that tasks report; raise their `InputError`, or Spark's own failure."""

    def collect() -> list[Any]:
        try:
            return list(frame.mapInArrow(task, SCHEMA).collect())
        except Exception as error:
            raise read_refusal(str(error)) or error from None

    with sessions.driver_python(session):
        rows = run_explained(session, collect, **limits)
    return [json.loads(row["value"]) for row in rows]


def _with_array(frame: Any, column: str) -> Any:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql.functions import when

    # Spark's function fails for null.
    array = when(frame[column].isNotNull(), vector_to_array(frame[column], "float32"))
    return frame.withColumn(column, array)


SCHEMA = "value string"
# Marks a task's InputError in the message of Spark's exception.
_MARK = "tfdist-refused:"


@dataclass(frozen=True)
class WriteTask:
    """Write a partition into its own file, and yield one row that describes the file."""

    uri: str
    token: str
    compression: Compression
    names: tuple[str, ...]

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        partition = context.partitionId() if context else 0
        with _refusals(f"partition {partition}"):
            if not folder.is_begun(self.uri, self.token):
                raise InputError(
                    f"`path`: {socket.gethostname()}, which runs tasks, cannot see "
                    f"{show(self.uri)}: use a file system that all machines share, or a URI"
                )
            # Spark may run a task twice, even at the same time: only one of the rows is used.
            attempt = f"{partition:05d}-{new_token()[:12]}"
            path = folder.choose_path(self.uri, self.token, attempt)
            part = write_part(map(self._named, batches), path, attempt, self.compression)
        if part is not None:
            yield _row(asdict(part))

    def _named(self, batch: Any) -> Any:
        import pyarrow as pa

        return pa.RecordBatch.from_arrays(batch.columns, list(self.names))


@dataclass(frozen=True)
class ReadTask:
    """Read the ranges of rows with the given numbers."""

    files: RecordFiles
    ranges: tuple[tuple[int, int], ...]

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                first, last = self.ranges[number]
                yield from self.files.batches(first, last, self.files.schema.names)


@dataclass(frozen=True)
class CallTask:
    """Call a function in a task, which sees the files of the tasks; yield its value in one row."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        for _ in batches:
            with _refusals():
                value = self.function(*self.arguments)
            yield _row(value)


def read_refusal(message: str) -> InputError | None:
    """Return a task's `InputError` from the message of Spark's exception; None if there is none."""
    found = re.search(f"{_MARK}([A-Za-z0-9+/=]+)", message)
    return InputError(base64.b64decode(found[1]).decode()) if found else None


@contextmanager
def _refusals(where: str = "") -> Iterator[None]:
    """Encode an `InputError` into the message that reaches the driver, with its line breaks."""
    try:
        yield
    except InputError as error:
        text = f"{error} ({where})" if where else str(error)
        encoded = base64.b64encode(text.encode()).decode()
        raise RuntimeError(f"{text}\n{_MARK}{encoded}") from None


def _row(value: Any) -> Any:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.array([json.dumps(value)], pa.string())], ["value"])
