"""Spark tasks that feed running workers. This file is imported on the executors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pybackend.errors import ClusterError, SerializationError
from pybackend.feed.client import MOST_ROWS, Feeder, split_items
from pybackend.feed.items import encode_items, frame_items

FED_SCHEMA = "rows long, failure string"


@dataclass(frozen=True)
class FeedItems:
    """Feed a partition of an RDD; yield the number of rows taken, and any failure.

    A failure is returned as text that starts with its class, not raised: otherwise Spark would
    retry the task.
    """

    feeder: Feeder
    name: str

    def __call__(self, items: Iterable[Any]) -> Iterator[tuple[int, str | None]]:
        """Feed these items."""
        yield _feed(self.feeder, self.name, map(encode_items, split_items(iter(items))))


@dataclass(frozen=True)
class FeedFrame:
    """Feed a partition of a DataFrame; yield rows of `FED_SCHEMA`, as `FeedItems` does.

    With ``gives_arrays``, the function receives columns as arrays when it requests columns.
    """

    feeder: Feeder
    name: str
    gives_arrays: bool

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Feed these Arrow batches."""
        import pyarrow as pa

        filled = (
            frame_items(batch.slice(start, MOST_ROWS), gives_arrays=self.gives_arrays)
            for batch in batches
            for start in range(0, batch.num_rows, MOST_ROWS)
        )
        rows, failure = _feed(self.feeder, self.name, filled)
        columns = [pa.array([rows], pa.int64()), pa.array([failure], pa.string())]
        yield pa.RecordBatch.from_arrays(columns, names=["rows", "failure"])


@dataclass(frozen=True)
class InferItems:
    """Feed a partition of an RDD; yield a result for each of its items."""

    feeder: Feeder
    name: str

    def __call__(self, items: Iterable[Any]) -> Iterator[Any]:
        """Feed these items."""
        partition, attempt = _place()
        batches = map(encode_items, split_items(iter(items)))
        return self.feeder.infer(batches, self.name, partition, attempt)


def _feed(feeder: Feeder, name: str, batches: Iterator[Any]) -> tuple[int, str | None]:
    try:
        return feeder.feed(batches, name, *_place()), None
    except (ClusterError, SerializationError) as error:
        return 0, f"{type(error).__name__}: {error}"


def _place() -> tuple[int, int]:
    """Return the numbers of the partition and of this attempt; later attempts have larger ones."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return (context.partitionId(), context.taskAttemptId()) if context else (0, 0)
