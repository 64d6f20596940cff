"""Protocol between a task that feeds rows and the worker that takes them.

The worker sends the first message (`Greets`). Each message is a line of JSON. `RowsAhead` is
followed by the number of bytes of Arrow data that it specifies (`pybackend.tfos.feed.items`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pybackend.core.job.codec import decode, encode_line
from pybackend.core.net.authentication import RejectedError
from pybackend.core.net.stream import Stream

_Found = TypeVar("_Found")

PURPOSE = "feed"
# Name of the event with which a worker reports the address at which it takes rows.
FEED = "feed"
# File of a job with the secret that feeders prove.
FEED_TOKEN = "feed.token"  # noqa: S105
LONGEST_LINE = 1 << 20
_CONNECT_SECONDS = 30.0
_RETRY_SECONDS = 0.2


@dataclass(frozen=True)
class Greets:
    """Worker: number of tasks that feed it; also sent if there are more than `Begins` expects."""

    feeds: int


@dataclass(frozen=True)
class Begins:
    """Task: start of the feed of a partition.

    Attributes
    ----------
    feed, partition
        Name of the feed, e.g. for a call of `train`, and the number of the partition in it.
    attempt
        Number of the attempt: later attempts have larger numbers and end earlier ones.
    wants_results
        Whether the worker returns a result for each row.
    feeds
        Number of tasks that feed the worker, according to its last message.
    """

    feed: str
    partition: int
    attempt: int
    wants_results: bool
    feeds: int


@dataclass(frozen=True)
class Starts:
    """Worker: the task may send rows."""


@dataclass(frozen=True)
class Asks:
    """Task: request for what the worker knows about a partition; ends earlier attempts."""

    feed: str
    partition: int
    attempt: int


@dataclass(frozen=True)
class RowsAhead:
    """Header of rows or results, whose bytes follow this line.

    Attributes
    ----------
    rows, size
        Number of rows and bytes that follow.
    position, digest
        Number of rows in the partition up to and including the last of these rows, and a digest of
        those rows.
    """

    rows: int
    size: int
    position: int = 0
    digest: str = ""


@dataclass(frozen=True)
class Ends:
    """Task: the partition has no more rows."""


@dataclass(frozen=True)
class Closes:
    """Driver: no more feeds follow."""


@dataclass(frozen=True)
class Taken:
    """Worker: number of rows of the partition that its function has taken so far."""

    rows: int


@dataclass(frozen=True)
class Known:
    """Worker: answer to `Asks`, with what it knows about a partition.

    Attributes
    ----------
    rows
        Number of rows that its function has taken.
    was_asked
        Whether an earlier attempt asked.
    position, digest
        Values from the last `RowsAhead` from which rows were taken.
    """

    rows: int
    was_asked: bool
    position: int
    digest: str


@dataclass(frozen=True)
class Quits:
    """Task: reason why a feed failed, so that other tasks do not try."""

    feed: str
    reason: str


@dataclass(frozen=True)
class Done:
    """Worker: the function has taken all rows, and all results were sent; or wants no more rows."""


@dataclass(frozen=True)
class Fails:
    """Worker: the function failed, or did not return a result for every row."""

    reason: str


# What a worker may send while it is fed.
NEWS = (RowsAhead, Taken, Done, Fails)


def connect_patiently(attempt: Callable[[float], _Found]) -> _Found:
    """Call ``attempt`` with the seconds left, and retry unless no process listens there.

    The other end may be overloaded by many connections at once.
    """
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            return attempt(max(1.0, deadline - time.monotonic()))
        except (ConnectionRefusedError, RejectedError):
            raise
        except OSError:
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise
        time.sleep(_RETRY_SECONDS)


def write(stream: Stream, message: Any, content: Any = b"") -> None:
    """Send a message and its content, without a time limit for the other end."""
    stream.send_all(encode_line(message))
    if len(content):
        stream.send_all(content)


def read(stream: Stream, *kinds: type[Any], seconds: float | None = None) -> Any:
    """Return the next message, which must be of one of these kinds.

    Raises `OSError` if the other end closed the connection, or was silent for too long, and
    `ValueError` if the message is invalid.
    """
    line = stream.read_line(LONGEST_LINE, seconds)
    if not line:
        raise ConnectionError("the other end closed the connection")
    return decode(line, *kinds)


def read_rows(stream: Stream, rows: RowsAhead, read_batch: Callable[[bytes], Any]) -> Any:
    """Return the Arrow batch after `RowsAhead`; `ValueError` if its number of rows differs."""
    batch = read_batch(stream.read_exactly(rows.size))
    if batch.num_rows != rows.rows:
        raise ValueError(f"expected {rows.rows} rows, got {batch.num_rows}")
    return batch
