"""Spark tasks that write a partition into a TFRecord file, or read a range of rows."""

from __future__ import annotations

import base64
import json
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from pybackend.data.tfrecord.compression import Compression
from pybackend.data.tfrecord.files import RecordFiles
from pybackend.data.tfrecord.folder import choose_path, is_begun
from pybackend.data.tfrecord.part import write_part
from pybackend.errors import InputError
from pybackend.net.rendezvous import new_token
from pybackend.words import show

SCHEMA = "report string"
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
            if not is_begun(self.uri, self.token):
                raise InputError(
                    f"`path`: {socket.gethostname()}, which runs tasks, cannot see "
                    f"{show(self.uri)}: use a file system that all machines share, or a URI"
                )
            # Spark may run a task twice, even at the same time: only one of the rows is used.
            attempt = f"{partition:05d}-{new_token()[:12]}"
            place = choose_path(self.uri, self.token, attempt)
            part = write_part(map(self._named, batches), place, attempt, self.compression)
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
def _refusals(place: str = "") -> Iterator[None]:
    """Encode an `InputError` into the message that reaches the driver, with its line breaks."""
    try:
        yield
    except InputError as error:
        text = f"{error} ({place})" if place else str(error)
        encoded = base64.b64encode(text.encode()).decode()
        raise RuntimeError(f"{text}\n{_MARK}{encoded}") from None


def _row(value: Any) -> Any:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.array([json.dumps(value)], pa.string())], ["report"])
