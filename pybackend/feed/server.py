"""A worker's side of its feeds: takes rows in from Spark's tasks, and sends results back."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from pybackend.feed.items import read_batch
from pybackend.feed.protocol import (
    PURPOSE,
    Asks,
    Begins,
    Closes,
    Done,
    Ends,
    Fails,
    Greets,
    Rows,
    Skips,
    Starts,
    Taken,
    read,
    read_rows,
    write,
)
from pybackend.feed.queue import Feed, RowQueue
from pybackend.net.rendezvous import Acceptor, address_of, listen
from pybackend.net.stream import Stream


class FeedServer:
    """Listens for feeds; `queue` has their rows.

    Parameters
    ----------
    host
        The address of this machine on which it listens.
    token
        What feeders prove.
    """

    def __init__(self, host: str, token: str) -> None:
        self.queue = RowQueue()
        self._lock = threading.Lock()
        # By feed and partition: how many rows earlier attempts have had taken, and the present one.
        self._taken: dict[tuple[str, int], int] = {}
        self._open: dict[tuple[str, int], Stream] = {}
        server = listen(host)
        self.address = address_of(server)
        """``host:port`` for feeders."""
        self._acceptor = Acceptor(server, token, PURPOSE, self._welcome)

    def finish(self) -> None:
        """Say that the function has returned, and wait until all feeders know."""
        self.queue.stop()
        with self.queue.changed:
            self.queue.changed.wait_for(lambda: not self._open, timeout=_FINISH_SECONDS)
        self._acceptor.close()

    def fail(self, reason: str) -> None:
        """Say that the function has failed, to those that feed and to those that come."""
        self.queue.fail(reason)

    def _welcome(self, stream: Stream, _: int) -> None:
        stream.keep_alive()
        threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: Stream) -> None:
        # Whoever is at the other end is a task that Spark may end at any time.
        with contextlib.suppress(OSError, ValueError), contextlib.closing(stream):
            write(stream, Greets(self.queue.feeds))
            message = read(stream, Begins, Asks, Closes)
            while isinstance(message, Begins):
                feed = self.queue.open(message.wants_results, message.feeds)
                if feed is not None:
                    self._take_in(stream, message, feed)
                    return
                write(stream, Greets(self.queue.feeds))
                message = read(stream, Begins)
            if isinstance(message, Closes):
                self.queue.close()
                write(stream, Done())
            else:
                write(stream, Taken(self._end_earlier(message.feed, message.partition)))

    def _end_earlier(self, name: str, partition: int) -> int:
        """End what feeds this partition; how many of its rows were taken."""
        key = name, partition
        with self._lock:
            found = self._open.get(key)
        if found is not None:
            found.close()
            with self.queue.changed:
                self.queue.changed.wait_for(lambda: key not in self._open, _FINISH_SECONDS)
        with self._lock:
            return self._taken.get(key, 0)

    def _take_in(self, stream: Stream, begins: Begins, feed: Feed) -> None:
        key = begins.feed, begins.partition
        with self._lock:
            self._open[key] = stream
        sender = threading.Thread(target=self._send, args=(stream, feed), daemon=True)
        try:
            write(stream, Starts())
            sender.start()
            self._receive(stream, feed)
            sender.join()
        finally:
            self.queue.remove(feed)
            if sender.ident is not None:
                sender.join()
            with self._lock:
                if not begins.wants_results:
                    self._taken[key] = self._taken.get(key, 0) + feed.taken
                self._open.pop(key, None)
            with self.queue.changed:
                self.queue.changed.notify_all()

    def _receive(self, stream: Stream, feed: Feed) -> None:
        while isinstance(message := read(stream, Rows, Ends), Rows):
            if not self.queue.put(feed, read_rows(stream, message, read_batch)):
                return
        self.queue.end(feed)

    def _send(self, stream: Stream, feed: Feed) -> None:
        """Tell the feeder what becomes of its rows, until nothing more will."""
        said = 0
        with contextlib.suppress(OSError):
            while True:
                with self.queue.changed:
                    while not self._has_news(feed, said):
                        self.queue.changed.wait()
                    results = list(feed.results)
                    feed.results.clear()
                    taken, last = feed.taken, self._last_word(feed)
                for rows, content in results:
                    write(stream, Rows(rows, len(content)), content)
                if taken > said:
                    write(stream, Taken(taken))
                    said = taken
                if last is not None and not feed.results:
                    if not feed.is_lost:
                        write(stream, last)
                    return

    def _has_news(self, feed: Feed, said: int) -> bool:
        return bool(feed.results) or feed.taken > said or self._last_word(feed) is not None

    def _last_word(self, feed: Feed) -> Any:
        """What ends the conversation, if anything does by now."""
        queue = self.queue
        if queue.failure is not None:
            return Fails(queue.failure)
        if feed.is_done and not feed.results:
            return Done()
        if queue.has_stopped and feed.wants_results:
            return Fails(
                f"the function has ended the feed when it had given {feed.given} results for "
                f"{feed.rows} rows or more of a partition: inference needs one for each row"
            )
        return Skips() if queue.has_stopped else None


_FINISH_SECONDS = 10.0
