"""The worker's end of its feeds: receive rows from Spark tasks, and send results back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pybackend.core.net.rendezvous import Acceptor, address_of, listen
from pybackend.core.net.stream import Stream
from pybackend.tfos.feed.items import read_batch
from pybackend.tfos.feed.protocol import (
    FEED,
    PURPOSE,
    Asks,
    Begins,
    Closes,
    Done,
    Ends,
    Fails,
    Greets,
    Known,
    Quits,
    RowsAhead,
    Skips,
    Starts,
    Taken,
    read,
    read_rows,
    write,
)
from pybackend.tfos.feed.queue import PartitionFeed, RowQueue


class FeedServer:
    """Server that accepts feeds and adds their rows to `queue`.

    Parameters
    ----------
    host
        Address of this machine on which it listens.
    token
        Secret that feeders must prove they know.
    """

    def __init__(self, host: str, token: str) -> None:
        self.queue = RowQueue()
        self._lock = threading.Lock()
        # By feed and partition: what was taken from earlier attempts, and the current attempt.
        self._known: dict[tuple[str, int], Known] = {}
        self._latest: dict[tuple[str, int], int] = {}
        self._open: dict[tuple[str, int], tuple[Stream, PartitionFeed]] = {}
        # Reasons of failed feeds, by name.
        self._failed: dict[str, str] = {}
        server = listen(host)
        self.address = address_of(server)
        """``host:port`` for feeders."""
        self._acceptor = Acceptor(server, token, PURPOSE, self._welcome)

    def finish(self) -> None:
        """Notify all feeders that the function returned, and wait for them.

        Feeders that are still connected receive all their results, however slowly they read.
        """
        self.queue.leave()
        with self.queue.changed:
            self.queue.changed.wait_for(lambda: all(f.is_notified for _, f in self._feeds_now()))
            self.queue.changed.wait_for(lambda: not self._feeds_now(), timeout=_FINISH_SECONDS)
        self._acceptor.close()

    def fail(self, reason: str) -> None:
        """Notify current and later feeders that the function failed."""
        self.queue.fail(reason)

    def _welcome(self, stream: Stream, _: int) -> None:
        stream.keep_alive()
        threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: Stream) -> None:
        # The other end is a task, which Spark may end at any time.
        with contextlib.suppress(OSError, ValueError), contextlib.closing(stream):
            write(stream, Greets(self.queue.feeds))
            message = read(stream, Begins, Asks, Quits, Closes)
            while isinstance(message, Begins):
                if message.attempt < self._latest.get((message.feed, message.partition), 0):
                    write(stream, Fails(_LATER))
                    return
                feed = self.queue.open(message.wants_results, message.feeds)
                if feed is not None:
                    self._take_in(stream, message, feed)
                    return
                write(stream, Greets(self.queue.feeds))
                message = read(stream, Begins)
            if isinstance(message, Closes):
                self.queue.close()
                write(stream, Done())
            elif isinstance(message, Quits):
                self._failed.setdefault(message.feed, message.reason)
                write(stream, Done())
            elif message.feed in self._failed:
                write(stream, Fails(self._failed[message.feed]))
            else:
                write(stream, self._end_earlier(message))

    def _end_earlier(self, asks: Asks) -> Known | Fails:
        """End the feed of this partition, and return what is known about it."""
        key = asks.feed, asks.partition
        with self._lock:
            was_asked = key in self._latest
            if asks.attempt < self._latest.get(key, 0):
                return Fails(_LATER)
            self._latest[key] = asks.attempt
            found = self._open.get(key)
        if found is not None:
            self._retire(key, *found)
            found[0].close()
        with self._lock:
            return replace(self._known.get(key, _NOTHING), was_asked=was_asked)

    def _retire(self, key: tuple[str, int], stream: Stream, feed: PartitionFeed) -> None:
        """Remove a feed, and count the rows taken from it; do nothing if it was already removed."""
        self.queue.remove(feed)  # from here on, its rows are not taken any more
        with self._lock:
            if self._open.get(key) != (stream, feed):
                return
            del self._open[key]
            if feed.taken and not feed.wants_results:
                known = self._known.get(key, _NOTHING)
                self._known[key] = Known(known.rows + feed.taken, True, *feed.mark)
        with self.queue.changed:
            self.queue.changed.notify_all()

    def _feeds_now(self) -> list[tuple[Stream, PartitionFeed]]:
        with self._lock:
            return list(self._open.values())

    def _take_in(self, stream: Stream, begins: Begins, feed: PartitionFeed) -> None:
        key = begins.feed, begins.partition
        with self._lock:
            earlier = self._open.get(key)
        if earlier is not None:
            self._retire(key, *earlier)
            earlier[0].close()
        with self._lock:
            self._open[key] = stream, feed
        sender = threading.Thread(target=self._send, args=(stream, feed), daemon=True)
        try:
            write(stream, Starts())
            sender.start()
            self._receive(stream, feed)
            sender.join()
        finally:
            self._retire(key, stream, feed)
            if sender.ident is not None:
                sender.join()

    def _receive(self, stream: Stream, feed: PartitionFeed) -> None:
        while isinstance(message := read(stream, RowsAhead, Ends), RowsAhead):
            batch = read_rows(stream, message, read_batch)
            if not self.queue.put(feed, batch, (message.place, message.digest)):
                return
        self.queue.end(feed)

    def _send(self, stream: Stream, feed: PartitionFeed) -> None:
        """Keep the feeder informed about the state of its rows, up to the final message."""
        try:
            self._send_news(stream, feed)
        except OSError:  # the task ended and does not read any more
            self.queue.remove(feed)
        finally:
            with self.queue.changed:
                feed.is_notified = True
                self.queue.changed.notify_all()

    def _send_news(self, stream: Stream, feed: PartitionFeed) -> None:
        said = 0
        while True:
            with self.queue.changed:
                while not self._has_news(feed, said):
                    self.queue.changed.wait()
                results = list(feed.results)
                feed.results.clear()
                taken, last = feed.taken, self._last_word(feed)
            for rows, content in results:
                write(stream, RowsAhead(rows, len(content)), content)
            if taken > said:
                write(stream, Taken(taken))
                said = taken
            if last is not None and not feed.results:
                if not feed.is_lost:
                    write(stream, last)
                return

    def _has_news(self, feed: PartitionFeed, said: int) -> bool:
        return bool(feed.results) or feed.taken > said or self._last_word(feed) is not None

    def _last_word(self, feed: PartitionFeed) -> Any:
        """Return the final message in the conversation; None if it is not over yet."""
        queue = self.queue
        if queue.failure is not None:
            return Fails(queue.failure)
        if feed.is_done and not feed.results:
            return Done()
        if queue.has_stopped and feed.wants_results:
            return Fails(
                f"the function ended the feed after {feed.given} results for at least {feed.rows} "
                "rows of a partition: inference needs one result per row"
            )
        return Skips() if queue.has_stopped else None


@contextlib.contextmanager
def open_feed(host: str, token: str, announce: Callable[[str, str], object]) -> Iterator[RowQueue]:
    """Receive rows while a function runs. Notify the feeders of its end, and if it failed."""
    server = FeedServer(host, token)
    announce(FEED, server.address)
    try:
        yield server.queue
    except BaseException as error:
        # sys.exit(0) is success, as in a script.
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            server.fail(f"{type(error).__name__}: {error}")
            raise
    server.finish()


_FINISH_SECONDS = 10.0
_LATER = "a later attempt of this task has started"
_NOTHING = Known(0, False, 0, "")
