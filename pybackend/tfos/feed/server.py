"""The worker's end of its feeds: a queue of the rows for its function, and its connections."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from pybackend.core.errors import InputError
from pybackend.core.net.rendezvous import Acceptor, address_of, listen
from pybackend.core.net.stream import Stream
from pybackend.tfos.feed import dialog
from pybackend.tfos.feed.items import (
    decode_items,
    encode_items,
    read_batch,
    stack_columns,
    write_batch,
)

# Limit for waiting rows, as Arrow data; feeders wait while it is exceeded.
_MOST_BYTES = 64 << 20
# Longest wait for results, which another thread of the function may provide.
_OWED_SECONDS = 10.0
_LOOK_SECONDS = 0.5
# Items or columns, and whether they are the last.
Taken = tuple[list[Any], bool]


@dataclass(eq=False)
class PartitionFeed:
    """Rows of one partition from one task; used under its queue's lock.

    ``taken`` and ``given`` are the numbers of rows that the function has taken, and of results that
    it has returned for them. ``results`` are encoded and have not been sent yet; each has its
    number of rows. ``is_notified`` is True when all messages to the task have been sent. ``mark``
    is ``position`` and ``digest``, as in `RowsAhead`, of the last batch from which rows were taken.
    """

    wants_results: bool
    batches: deque[Any] = field(default_factory=deque)
    results: deque[tuple[int, Any]] = field(default_factory=deque)
    rows: int = 0
    taken: int = 0
    given: int = 0
    has_ended: bool = False
    is_lost: bool = False
    is_notified: bool = False
    mark: tuple[int, str] = (0, "")

    @property
    def is_done(self) -> bool:
        """True if no rows are left to take, and no results are missing."""
        is_given = not self.wants_results or self.given == self.taken
        return self.is_lost or (self.has_ended and not self.batches and is_given)


class RowQueue:
    """Rows from several feeds, taken by one function; all methods are thread-safe.

    It also has the methods of a `queue.Queue`.

    ``changed`` is notified when any feed or this queue changes. ``failure`` is why the function
    failed. ``has_stopped`` is True when the function does not want any more rows, and ``was_left``
    if it returned without stopping the feeds, when more rows might have come.
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

    def add(self, feed: PartitionFeed, batch: Any, mark: tuple[int, str] = (0, "")) -> bool:
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
        with self.changed:
            feed.has_ended = True
            self.changed.notify_all()

    def remove(self, feed: PartitionFeed) -> None:
        """Remove a feed, and those of its rows that were not taken."""
        with self.changed:
            feed.has_ended = feed.is_lost = True
            self._drop(feed)
            if feed in self._feeds:
                self._feeds.remove(feed)
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.has_stopped = True
            for feed in self._feeds:
                self._drop(feed)
            self.changed.notify_all()

    def leave(self) -> None:
        with self.changed:
            self.was_left = not self.has_stopped and not self.is_closed
            self.stop()

    def fail(self, reason: str) -> None:
        with self.changed:
            self.failure = reason
        self.stop()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next item; None at the end."""
        items, _ = self.take(1)
        return items[0] if items else None

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add one result."""
        self.give([item])

    def task_done(self) -> None:
        """Do nothing: an item counts as done when it is taken."""

    def take(self, count: int, *, keeps_apart: bool = False) -> Taken:
        """Return the next items, and whether they are the last.

        It waits for ``count`` items; with ``keeps_apart``, it returns fewer at the end of a
        partition.
        """
        items = self._items(self._take(count, keeps_apart))
        return items, self._has_ended and len(items) < count

    def take_columns(self, count: int, width: int, *, keeps_apart: bool = False) -> Taken:
        """Return what `take` does, but the items as columns, each a list.

        If a DataFrame was fed for arrays, its columns are arrays with one entry per item. Items may
        have more than ``width`` columns. Raises `InputError` if a column cannot be converted to an
        array.
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

        Raises `InputError` if there are more results than rows, and `SerializationError`, which
        names the type of the result.
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
        are_used = all(f.has_ended and not f.batches for f in self._feeds)
        return self.has_stopped or (self.is_closed and are_used)

    def _take(self, count: int, keeps_apart: bool) -> list[tuple[tuple[int, int], Any]]:
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

        Raises `InputError` if results for the last rows of a feed are missing, and none arrive for
        a while.
        """
        order = [last or self._current]

        def find() -> PartitionFeed | None:
            candidates = [*order, *self._feeds]
            return next((feed for feed in candidates if feed and feed.batches), None)

        given, since = -1, time.monotonic()
        while find() is None and not self._has_ended:
            # A feed that is only waiting for results.
            waiting = (f for f in self._feeds if f.has_ended and not f.batches and not f.is_done)
            owing = next(waiting, None)
            if owing is None or not needs_results:
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

    def _wait_for(self, feed: PartitionFeed) -> bool:
        """Wait until it is known whether a feed has more rows, and return that."""
        self.changed.wait_for(lambda: feed.batches or feed.has_ended or self.has_stopped)
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
        taken = (self._decode(batch)[start:stop] for (start, stop), batch in parts)
        return list(chain.from_iterable(taken))

    def _decode(self, batch: Any) -> list[Any]:
        known = self._decoded  # another thread may take at the same time
        if known is None or known[0] is not batch:
            known = self._decoded = batch, decode_items(batch)
        return known[1]


class FeedServer:
    """Server that accepts feeds and adds their rows to `queue`; feeders must prove the token."""

    def __init__(self, host: str, token: str) -> None:
        self.queue = RowQueue()
        # The first three are used under the queue's lock.
        # By feed and partition: what was taken from earlier attempts, and the current attempt.
        self._known: dict[tuple[str, int], dialog.Known] = {}
        self._latest: dict[tuple[str, int], int] = {}
        self._open: dict[tuple[str, int], tuple[Stream, PartitionFeed]] = {}
        # Reasons of failed feeds, by name.
        self._failed: dict[str, str] = {}
        server = listen(host)
        self.address = address_of(server)
        """``host:port`` for feeders."""
        self._acceptor = Acceptor(server, token, dialog.PURPOSE, self._welcome)

    def finish(self) -> None:
        """Notify all feeders that the function returned, and wait for them.

        Feeders that are still connected receive all their results, however slowly they read.
        """
        self.queue.leave()
        with self.queue.changed:
            self.queue.changed.wait_for(lambda: all(f.is_notified for _, f in self._open.values()))
            self.queue.changed.wait_for(lambda: not self._open, timeout=_FINISH_SECONDS)
        self._acceptor.close()

    def _welcome(self, stream: Stream, _: int) -> None:
        stream.keep_alive()
        threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: Stream) -> None:
        # The other end is a task, which Spark may end at any time.
        with contextlib.suppress(OSError, ValueError), contextlib.closing(stream):
            dialog.write(stream, dialog.Greets(self.queue.feeds))
            message = dialog.read(stream, dialog.Begins, dialog.Asks, dialog.Quits, dialog.Closes)
            while isinstance(message, dialog.Begins):
                if message.attempt < self._latest.get((message.feed, message.partition), 0):
                    dialog.write(stream, dialog.Fails(_LATER))
                    return
                feed = self.queue.open(message.wants_results, message.feeds)
                if feed is not None:
                    self._take_in(stream, message, feed)
                    return
                dialog.write(stream, dialog.Greets(self.queue.feeds))
                message = dialog.read(stream, dialog.Begins)
            if isinstance(message, dialog.Closes):
                self.queue.close()
                dialog.write(stream, dialog.Done())
            elif isinstance(message, dialog.Quits):
                self._failed.setdefault(message.feed, message.reason)
                dialog.write(stream, dialog.Done())
            elif message.feed in self._failed:
                dialog.write(stream, dialog.Fails(self._failed[message.feed]))
            else:
                dialog.write(stream, self._end_earlier(message))

    def _end_earlier(self, asks: dialog.Asks) -> dialog.Known | dialog.Fails:
        """End the feed of this partition, and return what is known about it."""
        key = asks.feed, asks.partition
        with self.queue.changed:
            was_asked = key in self._latest
            if asks.attempt < self._latest.get(key, 0):
                return dialog.Fails(_LATER)
            self._latest[key] = asks.attempt
            self._end_open(key)
            return replace(self._known.get(key, _NOTHING), was_asked=was_asked)

    def _end_open(self, key: tuple[str, int]) -> None:
        if key in self._open:
            stream, feed = self._open[key]
            self._retire(key, stream, feed)
            stream.close()

    def _retire(self, key: tuple[str, int], stream: Stream, feed: PartitionFeed) -> None:
        """Remove a feed, and count the rows taken from it; do nothing if it was already removed."""
        with self.queue.changed:
            self.queue.remove(feed)  # from here on, its rows are not taken any more
            if self._open.get(key) == (stream, feed):
                del self._open[key]
                if feed.taken and not feed.wants_results:
                    known = self._known.get(key, _NOTHING)
                    self._known[key] = dialog.Known(known.rows + feed.taken, True, *feed.mark)

    def _take_in(self, stream: Stream, begins: dialog.Begins, feed: PartitionFeed) -> None:
        key = begins.feed, begins.partition
        with self.queue.changed:
            self._end_open(key)
            self._open[key] = stream, feed
        sender = threading.Thread(target=self._send, args=(stream, feed), daemon=True)
        try:
            dialog.write(stream, dialog.Starts())
            sender.start()
            self._receive(stream, feed)
            sender.join()
        finally:
            self._retire(key, stream, feed)
            if sender.ident is not None:
                sender.join()

    def _receive(self, stream: Stream, feed: PartitionFeed) -> None:
        while (message := dialog.read(stream, dialog.RowsAhead, dialog.Ends)) != dialog.Ends():
            batch = dialog.read_rows(stream, message, read_batch)
            if not self.queue.add(feed, batch, (message.position, message.digest)):
                return
        self.queue.end(feed)

    def _send(self, stream: Stream, feed: PartitionFeed) -> None:
        """Keep the feeder informed about the state of its rows, up to the final message."""
        changed, said, last = self.queue.changed, 0, None
        try:
            while last is None or feed.results:
                with changed:
                    while not (feed.results or feed.taken > said or self._last_word(feed)):
                        changed.wait()
                    results = list(feed.results)
                    feed.results.clear()
                    taken, last = feed.taken, self._last_word(feed)
                for rows, content in results:
                    dialog.write(stream, dialog.RowsAhead(rows, len(content)), content)
                if taken > said:
                    dialog.write(stream, dialog.Taken(taken))
                    said = taken
            if not feed.is_lost:
                dialog.write(stream, last)
        except OSError:  # the task ended and does not read any more
            self.queue.remove(feed)
        finally:
            with changed:
                feed.is_notified = True
                changed.notify_all()

    def _last_word(self, feed: PartitionFeed) -> Any:
        """Return the final message in the conversation; None if it is not over yet."""
        queue = self.queue
        if queue.failure is not None:
            return dialog.Fails(queue.failure)
        if feed.is_done and not feed.results:
            return dialog.Done()
        if queue.has_stopped and feed.wants_results:
            return dialog.Fails(
                f"the function ended the feed after {feed.given} results for at least {feed.rows} "
                "rows of a partition: inference needs one result per row"
            )
        return dialog.Done() if queue.has_stopped else None


@contextlib.contextmanager
def open_feed(host: str, token: str, announce: Callable[[str, str], object]) -> Iterator[RowQueue]:
    """Receive rows while a function runs. Notify the feeders of its end, and if it failed."""
    server = FeedServer(host, token)
    announce(dialog.FEED, server.address)
    try:
        yield server.queue
    except BaseException as error:
        # sys.exit(0) is success, as in a script.
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            server.queue.fail(f"{type(error).__name__}: {error}")
            raise
    server.finish()


_FINISH_SECONDS = 10.0
_LATER = "a later attempt of this task has started"
_NOTHING = dialog.Known(0, False, 0, "")
