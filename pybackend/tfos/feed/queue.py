"""Queue of the rows for a worker's function, and of its results."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from pybackend.core.errors import InputError
from pybackend.tfos.feed.items import decode_items, encode_items, stack_columns, write_batch

# Limit for waiting rows, as Arrow data; feeders wait while it is exceeded.
_MOST_BYTES = 64 << 20
# Longest wait for results, which another thread of the function may provide.
_OWED_SECONDS = 10.0
_LOOK_SECONDS = 0.5


class PartitionFeed:
    """Rows of one partition from one task; used under its queue's lock.

    Attributes
    ----------
    taken, given
        Number of rows that the function has taken, and of results that it has returned for them.
    results
        Encoded results that have not been sent yet, with their numbers of rows.
    is_notified
        Whether all messages to the task have been sent.
    mark
        ``place`` and ``digest``, as in `RowsAhead`, of the last batch from which rows were taken.
    """

    def __init__(self, wants_results: bool) -> None:
        self.wants_results = wants_results
        self.batches: deque[Any] = deque()
        self.has_ended = False
        self.is_lost = False
        self.rows = 0
        self.taken = 0
        self.given = 0
        self.results: deque[tuple[int, Any]] = deque()
        self.is_notified = False
        self.mark = (0, "")

    @property
    def is_done(self) -> bool:
        """True if no rows are left to take, and no results are missing."""
        is_given = not self.wants_results or self.given == self.taken
        return self.is_lost or (self.has_ended and not self.batches and is_given)


class RowQueue:
    """Rows from several feeds, taken by one function; all methods are thread-safe.

    Attributes
    ----------
    changed
        Condition that is notified when any feed or this queue changes.
    failure
        Why the function failed; None if it did not.
    has_stopped
        Whether the function does not want any more rows.
    was_left
        Whether it returned without stopping the feeds, when more rows might have come.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self.changed = threading.Condition()
        self.failure: str | None = None
        self.has_stopped = self.was_left = False
        self.is_closed = False
        self._most_bytes = most_bytes
        self._bytes = 0
        self._feeds: list[PartitionFeed] = []
        self._current: PartitionFeed | None = None
        # Feeds of rows that were taken and have no result yet, with the numbers of rows.
        self._owed: deque[list[Any]] = deque()
        self._decoded: tuple[Any, list[Any]] | None = None

    @property
    def feeds(self) -> int:
        """Current number of feeds."""
        with self.changed:
            return len(self._feeds)

    def open(self, wants_results: bool, most: int) -> PartitionFeed | None:
        """Open a feed; None if more than ``most`` feeds are open."""
        feed = PartitionFeed(wants_results)
        with self.changed:
            if len(self._feeds) > most:
                return None
            self._feeds.append(feed)
        return feed

    def put(self, feed: PartitionFeed, batch: Any, mark: tuple[int, str] = (0, "")) -> bool:
        """Add rows as soon as there is space; return False if they are no longer wanted."""
        with self.changed:
            self.changed.wait_for(
                lambda: self._bytes < self._most_bytes or self.has_stopped or feed.is_lost
            )
            if self.has_stopped or feed.is_lost:
                return False
            feed.batches.append((batch, 0, mark))
            feed.rows += batch.num_rows
            self._bytes += batch.nbytes
            self.changed.notify_all()
            return True

    def end(self, feed: PartitionFeed) -> None:
        """Record that a feed has no more rows."""
        with self.changed:
            feed.has_ended = True
            self.changed.notify_all()

    def remove(self, feed: PartitionFeed) -> None:
        """Remove a feed, and those of its rows that were not taken."""
        with self.changed:
            feed.is_lost = True
            self._drop(feed)
            if feed in self._feeds:
                self._feeds.remove(feed)
            self.changed.notify_all()

    def close(self) -> None:
        """Record that no more feeds follow."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def stop(self) -> None:
        """Record that the function does not want any more rows, and drop waiting rows."""
        with self.changed:
            self.has_stopped = True
            for feed in self._feeds:
                self._drop(feed)
            self.changed.notify_all()

    def leave(self) -> None:
        """Record that the function returned."""
        with self.changed:
            self.was_left = not self.has_stopped and not self.is_closed
            self.stop()

    def fail(self, reason: str) -> None:
        """Record why the function failed."""
        with self.changed:
            self.failure = reason
        self.stop()

    def take(self, count: int, *, keeps_apart: bool = False) -> tuple[list[Any], bool]:
        """Return the next items, and whether they are the last.

        Parameters
        ----------
        count
            Number of items; fewer are returned at the end of all feeds.
        keeps_apart
            Whether to return items from one partition only.
        """
        items = self._items(self._take(count, keeps_apart))
        return items, self._has_ended and len(items) < count

    def take_columns(
        self, count: int, width: int, *, keeps_apart: bool = False
    ) -> tuple[list[Any], bool]:
        """Return the next items as columns, each a list, and whether they are the last.

        If a DataFrame was fed for arrays, its columns are arrays with one entry per item.

        Parameters
        ----------
        count, keeps_apart
            As in `take`.
        width
            Number of columns; items may have more.

        Raises
        ------
        InputError
            A column cannot be converted to an array.
        """
        parts = self._take(count, keeps_apart)
        slices = [batch.slice(start, stop - start) for (start, stop), batch in parts]
        taken = sum(map(len, slices))
        columns = stack_columns(slices, width) if slices else None
        if columns is None:
            items = self._items(parts)
            columns = [[item[n] for item in items] for n in range(width)]
        return columns, self._has_ended and taken < count

    def give(self, results: Sequence[Any]) -> None:
        """Add results, in row order, for the first taken rows that have none yet.

        Raises
        ------
        InputError
            More results than rows.
        SerializationError
            A result cannot be sent; the message names its type.
        """
        rest = list(results)
        while rest:
            with self.changed:
                if not self._owed:
                    raise InputError(
                        f"batch_results() received {len(rest)} more results than the number of "
                        "rows that next_batch() took: pass one result per row, and only for rows "
                        "that TFCluster.inference() feeds"
                    )
                feed, owed = self._owed[0]
            part, rest = rest[:owed], rest[owed:]
            content = write_batch(encode_items(part)) if feed.wants_results else None
            with self.changed:
                self._owed[0][1] -= len(part)
                if not self._owed[0][1]:
                    self._owed.popleft()
                feed.given += len(part)
                if content is not None:
                    feed.results.append((len(part), content))
                self.changed.notify_all()

    @property
    def _has_ended(self) -> bool:
        is_over = self.is_closed and not any(feed for feed in self._feeds if not _is_used(feed))
        return self.has_stopped or is_over

    def _take(self, count: int, keeps_apart: bool) -> list[tuple[tuple[int, int], Any]]:
        """Take parts of batches with this total number of rows."""
        parts: list[tuple[tuple[int, int], Any]] = []
        with self.changed:
            feed: PartitionFeed | None = None
            while count > 0:
                if feed is None or not keeps_apart:
                    feed = self._choose(feed, keeps_apart)
                    if feed is None:
                        break
                elif not self._wait_for(feed):
                    break
                part = self._take_from(feed, count)
                parts.append(part)
                count -= part[0][1] - part[0][0]
        return parts

    def _choose(self, last: PartitionFeed | None, needs_results: bool) -> PartitionFeed | None:
        """Return a feed with rows, preferably the last one used; None if no more rows will come.

        Raises
        ------
        InputError
            Results for the last rows of a feed are missing, and none have arrived for a while.
        """
        order = [last or self._current]

        def find() -> PartitionFeed | None:
            candidates = [*order, *self._feeds]
            return next((feed for feed in candidates if feed and feed.batches), None)

        given, since = -1, time.monotonic()
        while find() is None and not self._has_ended:
            owing = self._owing() if needs_results else None
            if owing is None:
                self.changed.wait()
                continue
            if given != owing.given:
                given, since = owing.given, time.monotonic()
            elif time.monotonic() > since + _OWED_SECONDS:
                raise InputError(
                    "next_batch() is waiting for rows that will never arrive: batch_results() "
                    f"received {owing.given} results for the {owing.taken} rows of a partition. "
                    "Pass one result per row"
                )
            self.changed.wait(_LOOK_SECONDS)
        self._current = find()
        return self._current

    def _owing(self) -> PartitionFeed | None:
        """Return a feed that is only waiting for results."""
        return next(
            (f for f in self._feeds if f.has_ended and not f.batches and not f.is_done), None
        )

    def _wait_for(self, feed: PartitionFeed) -> bool:
        """Wait until it is known whether a feed has more rows, and return that."""
        self.changed.wait_for(
            lambda: feed.batches or feed.has_ended or feed.is_lost or self.has_stopped
        )
        return bool(feed.batches)

    def _take_from(self, feed: PartitionFeed, count: int) -> tuple[tuple[int, int], Any]:
        batch, start, feed.mark = feed.batches[0]
        stop = min(batch.num_rows, start + count)
        if stop == batch.num_rows:
            feed.batches.popleft()
            self._bytes -= batch.nbytes
        else:
            feed.batches[0] = batch, stop, feed.mark
        feed.taken += stop - start
        if feed.wants_results:
            if self._owed and self._owed[-1][0] is feed:
                self._owed[-1][1] += stop - start
            else:
                self._owed.append([feed, stop - start])
        self.changed.notify_all()
        return (start, stop), batch

    def _drop(self, feed: PartitionFeed) -> None:
        self._bytes -= sum(batch.nbytes for batch, *_ in feed.batches)
        feed.batches.clear()

    def _items(self, parts: Sequence[tuple[tuple[int, int], Any]]) -> list[Any]:
        items: list[Any] = []
        for (start, stop), batch in parts:
            items += self._decode(batch)[start:stop]
        return items

    def _decode(self, batch: Any) -> list[Any]:
        """Return the items of a batch, which is decoded only once."""
        known = self._decoded  # another thread may take at the same time
        if known is None or known[0] is not batch:
            known = self._decoded = batch, decode_items(batch)
        return known[1]


def _is_used(feed: PartitionFeed) -> bool:
    return feed.is_lost or (feed.has_ended and not feed.batches)
