"""A task's side of a feed: sends the rows of its partition to a worker, and takes results."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pybackend.errors import ClusterError
from pybackend.feed.items import decode_items, read_batch, write_batch
from pybackend.feed.protocol import (
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
)
from pybackend.job.codec import encode
from pybackend.net.greeting import RejectedError
from pybackend.net.rendezvous import connect, split_address
from pybackend.net.stream import Stream, wait_any

# Python objects made of more rows than that no longer fit into a processor's cache.
MOST_ROWS = 256
_CONNECT_SECONDS = 30.0
_RETRY_SECONDS = 0.2
# Of so many workers the one that the fewest tasks feed is chosen.
_CHOICES = 2
_ANSWER_SECONDS = 30.0


class FeedTimeoutError(ClusterError):
    """A worker has taken no row for too long."""


@dataclass(frozen=True)
class Feeder:
    """How tasks reach the workers that take rows.

    Attributes
    ----------
    addresses
        ``host:port`` of each worker that takes rows, by rank.
    token
        What a feeder proves.
    timeout
        Seconds that a worker may take no row, or give no result, before its feeder gives up.
    """

    addresses: dict[int, str]
    token: str = field(repr=False)
    timeout: float

    def feed(self, batches: Iterator[Any], name: str, partition: int, attempt: int) -> int:
        """Feed a partition; how many of its rows the function has taken, or did not want.

        Raises
        ------
        ClusterError
            No worker takes rows, the function has failed, or has taken none for too long.
        """
        first = next(batches, None)
        if first is None:
            return 0
        known = self._ask(name, partition, attempt)
        try:
            return self._feed(
                _chain(first, batches), Begins(name, partition, attempt, False, 0), known
            )
        except FeedTimeoutError as error:
            self.quit(name, str(error))
            raise

    def _feed(self, batches: Iterator[Any], begins: Begins, known: Sequence[Known]) -> int:
        skipped = sum(answer.rows for answer in known)
        marks = {answer.place: answer.digest for answer in known if answer.rows}
        conversation = self._begin(begins)
        with contextlib.closing(conversation):
            for rows, content, mark in _drop_rows(batches, skipped, marks):
                if not conversation.send(rows, content, mark):
                    return conversation.taken + skipped
            for _ in conversation.finish():
                pass
            return conversation.taken + skipped

    def infer(
        self, batches: Iterator[Any], name: str, partition: int, attempt: int
    ) -> Iterator[Any]:
        """Feed a partition, and pass on a result for each row, in their order.

        Raises
        ------
        ClusterError
            As in `feed`; also if the function has not given as many results as rows.
        """
        first = next(batches, None)
        if first is None:
            return
        # The function sees rows of an attempt before again; each has one result all the same.
        conversation = self._begin(Begins(name, partition, attempt, True, 0))
        with contextlib.closing(conversation):
            for batch in _chain(first, batches):
                conversation.send(batch.num_rows, write_batch(batch))
                yield from conversation.take_results()
            yield from conversation.finish()

    def close(self) -> bool:
        """Say that there will be no more feeds; whether all workers have heard it."""
        return self._tell_all(Closes())

    def quit(self, name: str, reason: str) -> None:
        """Say why a feed has failed: no task begins to feed for it any more."""
        self._tell_all(Quits(name, reason))

    def _tell_all(self, message: Any) -> bool:
        told = 0
        for rank in self.addresses:
            with (
                contextlib.suppress(OSError, ValueError),
                contextlib.closing(self._connect(rank)[0]) as stream,
            ):
                stream.send_all(_line(message), _ANSWER_SECONDS)
                read(stream, Done, seconds=_ANSWER_SECONDS)
                told += 1
        return told == len(self.addresses)

    def _ask(self, name: str, partition: int, attempt: int) -> list[Known]:
        """What the workers know of earlier attempts at this task, which they end."""
        known: list[Known] = []
        lost: list[str] = []
        for rank, address in self.addresses.items():
            try:
                stream = self._connect(rank)[0]
                with contextlib.closing(stream):
                    stream.send_all(_line(Asks(name, partition, attempt)), _ANSWER_SECONDS)
                    answer = read(stream, Known, Fails, seconds=_ANSWER_SECONDS)
            except (OSError, ValueError) as error:
                lost.append(f"worker {rank} at {address} ({error})")
                continue
            if isinstance(answer, Fails):
                raise ClusterError(answer.reason)
            known.append(answer)
        # Each attempt asks all workers that run, so whoever runs now would know of it.
        if lost and any(answer.was_asked for answer in known):
            raise ClusterError(
                f"Spark tries a task again, and {lost[0]} cannot be asked which of its rows it has "
                "taken: a row might be used twice. Its function has returned, or the network does "
                "not let this host reach it; have all functions take rows until the feeds end"
            )
        return known

    def _begin(self, begins: Begins) -> _Conversation:
        """Connect to a worker of this host, or else of any, which fewer tasks feed than another."""
        hosts = {rank: split_address(address)[0] for rank, address in self.addresses.items()}
        near = [rank for rank, host in hosts.items() if _is_here(host)]
        far = [rank for rank in self.addresses if rank not in near]
        found: dict[int, tuple[Stream, int]] = {}
        errors: list[str] = []
        for ranks in (near, far):
            turn = begins.partition % max(1, len(ranks))
            for rank in [*ranks[turn:], *ranks[:turn]]:
                if len(found) == _CHOICES:
                    break
                try:
                    found[rank] = self._connect(rank)
                except (OSError, ValueError) as error:
                    errors.append(f"worker {rank} at {self.addresses[rank]} ({error})")
            if found:
                break
        if not found:
            raise ClusterError(
                f"no worker takes rows any more: {', '.join(errors)}. Their functions have "
                "returned or failed, or the network does not let this host reach them; "
                "TFCluster.shutdown() tells"
            )
        rank = _agree(begins, found)
        for other, (stream, _) in found.items():
            if other != rank:
                stream.close()
        chosen = found[rank][0]
        chosen.keep_alive()
        worker = f"worker {rank} at {self.addresses[rank]}"
        return _Conversation(chosen, worker, self.timeout, begins.wants_results)

    def _connect(self, rank: int) -> tuple[Stream, int]:
        """Connect to a worker; tried again unless nobody listens there."""
        deadline = time.monotonic() + _CONNECT_SECONDS
        while True:
            try:
                return self._greet(rank, max(1.0, deadline - time.monotonic()))
            except (ConnectionRefusedError, RejectedError):
                raise
            except OSError:  # so many connect at once that it has no time, or no room, for all
                if time.monotonic() + _RETRY_SECONDS > deadline:
                    raise
            time.sleep(_RETRY_SECONDS)

    def _greet(self, rank: int, seconds: float) -> tuple[Stream, int]:
        stream = connect(self.addresses[rank], self.token, 0, PURPOSE, seconds)
        try:
            return stream, read(stream, Greets, seconds=seconds).feeds
        except BaseException:
            stream.close()
            raise


class _Conversation:
    """A feed under way: what was sent, and what the worker has said of it."""

    def __init__(self, stream: Stream, worker: str, timeout: float, wants_results: bool) -> None:
        self._stream = stream
        self._worker = worker
        self._timeout = timeout
        self._wants_results = wants_results
        self._moved = time.monotonic()
        self._sent = 0
        self._results: list[Any] = []
        self._received = 0
        self._has_ended = False
        self.taken = 0

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def send(self, rows: int, content: Any, mark: tuple[int, str] = (0, "")) -> bool:
        """Send so many rows, as `write_batch` gives them; False if the worker wants no more."""
        self._moved = time.monotonic()  # what the rows themselves take is not the worker's time
        self._sent += rows
        return self._send(_line(RowsAhead(rows, len(content), *mark))) and self._send(content)

    def take_results(self) -> list[Any]:
        """The results that have come so far, and were not taken yet."""
        while not self._has_ended and self._stream.wait_readable(0):
            self._hear()
        results, self._results = self._results, []
        return results

    def finish(self) -> Iterator[Any]:
        """Say that there are no more rows, and wait for what becomes of them; yields results."""
        self._moved = time.monotonic()
        self._send(_line(Ends()))
        while not self._has_ended:
            yield from self._results
            self._results = []
            if self._stream.wait_readable(self._remaining()):
                self._hear()
            else:
                self._give_up()
        yield from self._results
        self._results = []

    def _send(self, content: Any) -> bool:
        rest = memoryview(content)
        while rest and not self._has_ended:
            if self._stream.wait_readable(0):
                self._hear()
                continue
            try:
                sent = self._stream.send_some([rest])
            except OSError:  # the worker has closed it, and may have said why
                self._hear()
                continue
            rest = rest[sent:]
            if not sent and not wait_any([self._stream], [self._stream], self._remaining()):
                self._give_up()
        return not self._has_ended

    def _hear(self) -> None:
        try:
            message = read(
                self._stream, RowsAhead, Taken, Done, Skips, Fails, seconds=self._timeout
            )
            if isinstance(message, RowsAhead):
                found = decode_items(read_rows(self._stream, message, read_batch))
                self._received += len(found)
                self._results += found
        except (OSError, ValueError) as error:
            raise ClusterError(
                f"{self._worker} was lost while it was fed ({error}): its process, or its host, "
                "has ended; TFCluster.shutdown() tells"
            ) from error
        self._moved = time.monotonic()
        if isinstance(message, Taken):
            self.taken = message.rows
        elif isinstance(message, Fails):
            raise ClusterError(f"{self._worker} has failed: {message.reason}")
        elif isinstance(message, (Done, Skips)):
            self._has_ended = True

    def _remaining(self) -> float:
        return max(0.0, self._moved + self._timeout - time.monotonic())

    def _give_up(self) -> None:
        if self._wants_results and self.taken == self._sent:
            raise FeedTimeoutError(
                f"timeout while feeding: {self._worker} has given no result for "
                f"{self._timeout:g} s (feed_timeout), {self._received} for {self._sent} rows "
                "before. Its function computes, or has not given batch_results() one for each row"
            )
        raise FeedTimeoutError(
            f"timeout while feeding: {self._worker} has taken no row for {self._timeout:g} s "
            f"(feed_timeout), {self.taken} of {self._sent} before. Its function computes, waits "
            "for another worker that has no rows, or does not call next_batch(): raise "
            "feed_timeout, or look at the function"
        )


_OTHER_ROWS = (
    "Spark has tried a task again, and its rows are others, or in another order, than those that "
    "were taken before: rows might be lost or used twice. Cache, checkpoint or save the rows "
    "before they are fed, as those behind a shuffle or a random choice are never twice the same"
)


def _agree(begins: Begins, found: dict[int, tuple[Stream, int]]) -> int:
    """Begin with one of some workers, even if other tasks choose at the same time; its rank."""
    while True:
        rank = min(found, key=lambda known: found[known][1])
        stream, feeds = found[rank]
        stream.send_all(_line(replace(begins, feeds=feeds)), _ANSWER_SECONDS)
        answer = read(stream, Greets, Starts, Fails, seconds=_ANSWER_SECONDS)
        if isinstance(answer, Fails):
            raise ClusterError(answer.reason)
        if isinstance(answer, Starts):
            return rank
        found[rank] = stream, answer.feeds


def _line(message: Any) -> bytes:
    return encode(message).encode() + b"\n"


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _drop_rows(
    batches: Iterator[Any], count: int, marks: Mapping[int, str]
) -> Iterator[tuple[int, Any, tuple[int, str]]]:
    """The batches without their first rows: how many, their bytes, and the mark to send with them.

    Raises
    ------
    ClusterError
        The rows up to one of the marks given are not those that it was made of.
    """
    digest, place, rest = hashlib.blake2b(digest_size=16), 0, dict(marks)
    for batch in batches:
        content = write_batch(batch)
        digest.update(content)
        place += batch.num_rows
        mark = place, digest.hexdigest()
        if rest.pop(place, mark[1]) != mark[1] or (place >= count and rest):
            raise ClusterError(_OTHER_ROWS)
        dropped = min(count - (place - batch.num_rows), batch.num_rows)
        if 0 < dropped < batch.num_rows:
            batch = batch.slice(dropped)
            content, dropped = write_batch(batch), 0
        if dropped <= 0:
            yield batch.num_rows, content, mark
    if rest or place < count:
        raise ClusterError(_OTHER_ROWS)


def _is_here(host: str) -> bool:
    """Whether this is an address of this machine."""
    try:
        info = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
            probe.bind(info[4])
    except OSError:
        return False
    return True


def split_items(items: Iterator[Any], most_rows: int = MOST_ROWS) -> Iterator[Sequence[Any]]:
    """Lists of items, first short ones, so that the first rows need not wait for many."""
    size, part = 50, []
    for item in items:
        part.append(item)
        if len(part) >= size:
            yield part
            part, size = [], min(most_rows, 2 * size)
    if part:
        yield part
