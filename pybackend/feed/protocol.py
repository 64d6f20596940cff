"""What a task that feeds rows and the worker that takes them say to each other.

The worker speaks first (`Greets`). Each message is a line of JSON; behind `RowsAhead` follow as
many bytes of Arrow data as it says (`pybackend.feed.items`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pybackend.job.codec import decode, encode
from pybackend.net.stream import Stream

PURPOSE = "feed"
# By this name a worker tells the driver at which address it takes rows.
FEED = "feed"
LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class Greets:
    """Of a worker: how many tasks feed it; also when there are more than `Begins` expects."""

    feeds: int


@dataclass(frozen=True)
class Begins:
    """A task begins to feed a partition.

    Attributes
    ----------
    feed, partition
        Name of the feed, a call of `train` for instance, and number of the partition in it.
    attempt
        Number of the task, the greater the later: a later one ends those before.
    wants_results
        Whether each row has a result, which goes back to the task.
    feeds
        How many tasks feed the worker, as it has said last.
    """

    feed: str
    partition: int
    attempt: int
    wants_results: bool
    feeds: int


@dataclass(frozen=True)
class Starts:
    """Of a worker: the task may send rows."""


@dataclass(frozen=True)
class Asks:
    """A task asks what the worker knows of a partition, and ends earlier attempts at it."""

    feed: str
    partition: int
    attempt: int


@dataclass(frozen=True)
class RowsAhead:
    """So many rows, or results, in so many bytes, follow this line.

    Attributes
    ----------
    place, digest
        How many rows of the partition there are up to the last of these, and what they all are.
    """

    rows: int
    size: int
    place: int = 0
    digest: str = ""


@dataclass(frozen=True)
class Ends:
    """Of a task: the partition has no more rows."""


@dataclass(frozen=True)
class Closes:
    """Of the driver: there will be no more feeds."""


@dataclass(frozen=True)
class Taken:
    """Of a worker: rows of the partition that its function has taken so far."""

    rows: int


@dataclass(frozen=True)
class Known:
    """Of a worker: what it knows of a partition, for `Asks`.

    Attributes
    ----------
    rows
        How many its function has taken.
    was_asked
        Whether an earlier attempt has asked.
    place, digest
        Of the last `RowsAhead` of which some were taken.
    """

    rows: int
    was_asked: bool
    place: int
    digest: str


@dataclass(frozen=True)
class Quits:
    """A task says why a feed has failed: others need not try."""

    feed: str
    reason: str


@dataclass(frozen=True)
class Done:
    """Of a worker: the function has taken all rows, and all results were sent."""


@dataclass(frozen=True)
class Skips:
    """Of a worker: the function wants no more rows."""


@dataclass(frozen=True)
class Fails:
    """Of a worker: the function has failed, or has not given a result for every row."""

    reason: str


def write(stream: Stream, message: Any, content: Any = b"") -> None:
    """Send a message, and what follows it, however long the other end takes to read."""
    stream.send_all(encode(message).encode() + b"\n")
    if len(content):
        stream.send_all(content)


def read(stream: Stream, *kinds: type[Any], seconds: float | None = None) -> Any:
    """The next message, of one of these kinds.

    Raises
    ------
    OSError
        The other end is gone, or silent for so long.
    ValueError
        It makes no sense.
    """
    line = stream.read_line(LONGEST_LINE, seconds)
    if not line:
        raise ConnectionError("the other end has closed the connection")
    return decode(line, *kinds)


def read_rows(stream: Stream, rows: RowsAhead, read_batch: Callable[[bytes], Any]) -> Any:
    """The Arrow batch behind a message `RowsAhead`; `ValueError` if it has other rows."""
    batch = read_batch(stream.read_exactly(rows.size))
    if batch.num_rows != rows.rows:
        raise ValueError(f"{batch.num_rows} rows have come, not {rows.rows}")
    return batch
