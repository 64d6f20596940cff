"""The task's end of a feed: send the rows of a partition to a worker, and receive results."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from pybackend.core.errors import ClusterError, SerializationError
from pybackend.core.job.codec import encode_line
from pybackend.core.machine import own_address
from pybackend.core.net.rendezvous import connect, split_address
from pybackend.core.net.stream import Stream, wait_any
from pybackend.tfos.feed import dialog
from pybackend.tfos.feed.items import (
    decode_items,
    encode_items,
    frame_items,
    read_batch,
    write_batch,
)

# With more rows, their Python objects no longer fit into a processor's cache.
MOST_ROWS = 256
# Number of workers from which the one with the fewest feeding tasks is chosen.
_CHOICES = 2
_ANSWER_SECONDS = 30.0


class FeedTimeoutError(ClusterError):
    """A worker has not taken a row for too long."""


@dataclass(frozen=True)
class Feeder:
    """Client that tasks use to feed the workers that take rows.

    ``addresses`` has ``host:port`` of each worker that takes rows, by rank. ``token`` is the secret
    that a feeder must prove it knows. After ``timeout`` seconds without a taken row, or a result,
    it fails.
    """

    addresses: dict[int, str]
    token: str = field(repr=False)
    timeout: float

    def feed(self, batches: Iterator[Any], name: str, partition: int, attempt: int) -> int:
        """Feed a partition; return how many of its rows the function took or declined.

        Raises `ClusterError` if no worker takes rows, or the function failed or has not taken a row
        for too long.
        """
        first = next(batches, None)
        if first is None:
            return 0
        known = self._ask(name, partition, attempt)
        skipped = sum(answer.rows for answer in known)
        marks = {answer.position: answer.digest for answer in known if answer.rows}
        begins = dialog.Begins(name, partition, attempt, False, 0)
        try:
            with contextlib.closing(self._begin(begins)) as conversation:
                for rows, content, mark in _drop_rows(chain([first], batches), skipped, marks):
                    if not conversation.send(rows, content, mark):
                        break
                else:
                    for _ in conversation.finish():
                        pass
                return conversation.taken + skipped
        except FeedTimeoutError as error:  # so that no further task starts to feed
            self._tell_all(dialog.Quits(name, str(error)))
            raise

    def infer(
        self, batches: Iterator[Any], name: str, partition: int, attempt: int
    ) -> Iterator[Any]:
        """Feed a partition, and yield a result for each row, in row order.

        Raises `ClusterError` as `feed` does, and if the function did not return one result per row.
        """
        first = next(batches, None)
        if first is None:
            return
        # The function sees rows of an earlier attempt again; each still gets one result.
        conversation = self._begin(dialog.Begins(name, partition, attempt, True, 0))
        with contextlib.closing(conversation):
            for batch in chain([first], batches):
                conversation.send(batch.num_rows, write_batch(batch))
                yield from conversation.take_results()
            yield from conversation.finish()

    def close(self) -> bool:
        """Notify the workers that no more feeds follow; return whether all of them received it."""
        return self._tell_all(dialog.Closes())

    def _tell_all(self, message: Any) -> bool:
        count = 0
        for rank in self.addresses:
            with contextlib.suppress(OSError, ValueError):
                self._request(rank, message, dialog.Done)
                count += 1
        return count == len(self.addresses)

    def _request(self, rank: int, message: Any, *answers: type[Any]) -> Any:
        with contextlib.closing(self._connect(rank)[0]) as stream:
            return _exchange(stream, message, *answers)

    def _ask(self, name: str, partition: int, attempt: int) -> list[dialog.Known]:
        """Return what the workers know about earlier attempts of this task, and end those."""
        asks = dialog.Asks(name, partition, attempt)
        known: list[dialog.Known] = []
        lost: list[str] = []
        for rank in self.addresses:
            try:
                known.append(self._request(rank, asks, dialog.Known, dialog.Fails))
            except (OSError, ValueError) as error:
                lost.append(f"{self._name(rank)} ({error})")
        # Each attempt asks all running workers, so every worker that runs now would know of it.
        if lost and any(answer.was_asked for answer in known):
            raise ClusterError(
                f"Spark retried a task, but {lost[0]} cannot be asked which of its rows it took: "
                "a row might be used twice. Its function returned, or this host cannot reach it "
                "over the network; all functions must take rows until the feeds end"
            )
        return known

    def _name(self, rank: int) -> str:
        return f"worker {rank} at {self.addresses[rank]}"

    def _begin(self, begins: dialog.Begins) -> _Conversation:
        """Connect to a worker, preferring this host and, of two, the one that fewer tasks feed."""
        hosts = {rank: split_address(address)[0] for rank, address in self.addresses.items()}
        near = [rank for rank, host in hosts.items() if own_address(host) == host]
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
                    errors.append(f"{self._name(rank)} ({error})")
            if found:
                break
        if not found:
            raise ClusterError(
                f"no worker is taking rows anymore: {', '.join(errors)}. Their functions returned "
                "or failed, or this host cannot reach them over the network; TFCluster.shutdown() "
                "shows the reason"
            )
        rank = _agree(begins, found)
        for other, (stream, _) in found.items():
            if other != rank:
                stream.close()
        chosen = found[rank][0]
        chosen.keep_alive()
        return _Conversation(chosen, self._name(rank), self.timeout, begins.wants_results)

    def _connect(self, rank: int) -> tuple[Stream, int]:
        return dialog.connect_patiently(partial(self._greet, rank))

    def _greet(self, rank: int, seconds: float) -> tuple[Stream, int]:
        stream = connect(self.addresses[rank], self.token, 0, dialog.PURPOSE, seconds)
        try:
            return stream, dialog.read(stream, dialog.Greets, seconds=seconds).feeds
        except BaseException:
            stream.close()
            raise


class _Conversation:
    """A running feed: the rows that were sent, and the worker's answers."""

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
        self._stream.close()

    def send(self, rows: int, content: Any, mark: tuple[int, str] = (0, "")) -> bool:
        """Send rows, as `write_batch` encodes them; return False if the worker wants no more."""
        self._moved = time.monotonic()  # computing the rows is not the worker's time
        self._sent += rows
        head = encode_line(dialog.RowsAhead(rows, len(content), *mark))
        return self._send(head) and self._send(content)

    def take_results(self) -> list[Any]:
        while not self._has_ended and self._stream.wait_readable(0):
            self._hear()
        results, self._results = self._results, []
        return results

    def finish(self) -> Iterator[Any]:
        """Signal the end of the rows, wait until they have been processed, and yield results."""
        self._moved = time.monotonic()
        self._send(encode_line(dialog.Ends()))
        while True:
            yield from self.take_results()
            if self._has_ended:
                return
            if not self._stream.wait_readable(self._remaining()):
                self._give_up()

    def _send(self, content: Any) -> bool:
        rest = memoryview(content)
        while rest and not self._has_ended:
            if self._stream.wait_readable(0):
                self._hear()
                continue
            try:
                sent = self._stream.send_some([rest])
            except OSError:  # the worker closed it, and may have sent the reason
                self._hear()
                continue
            rest = rest[sent:]
            if not sent and not wait_any([self._stream], [self._stream], self._remaining()):
                self._give_up()
        return not self._has_ended

    def _hear(self) -> None:
        try:
            message = dialog.read(self._stream, *dialog.NEWS, seconds=self._timeout)
            if isinstance(message, dialog.RowsAhead):
                found = decode_items(dialog.read_rows(self._stream, message, read_batch))
                self._received += len(found)
                self._results += found
        except (OSError, ValueError) as error:
            raise ClusterError(
                f"{self._worker} was lost while it was fed ({error}): its process exited, or its "
                "host failed; TFCluster.shutdown() shows the reason"
            ) from error
        self._moved = time.monotonic()
        if isinstance(message, dialog.Taken):
            self.taken = message.rows
        elif isinstance(message, dialog.Fails):
            raise ClusterError(f"{self._worker} failed: {message.reason}")
        elif isinstance(message, dialog.Done):
            self._has_ended = True

    def _remaining(self) -> float:
        return max(0.0, self._moved + self._timeout - time.monotonic())

    def _give_up(self) -> None:
        if self._wants_results and self.taken == self._sent:
            raise FeedTimeoutError(
                f"timeout while feeding: {self._worker} returned no result for {self._timeout:g} "
                f"s (feed_timeout), after {self._received} results for {self._sent} rows. Its "
                "function is still computing, or did not pass batch_results() one result per row"
            )
        raise FeedTimeoutError(
            f"timeout while feeding: {self._worker} took no row for {self._timeout:g} s "
            f"(feed_timeout), after {self.taken} of {self._sent} rows. Its function is still "
            "computing, is waiting for another worker that has no rows, or does not call "
            "next_batch(): raise feed_timeout, or check the function"
        )


_OTHER_ROWS = (
    "Spark retried a task, but its rows differ from those taken before, or are in a different "
    "order: rows might be lost or used twice. Cache, checkpoint or save the rows before you feed "
    "them, because a shuffle or random sample can return different rows each time"
)


def _exchange(stream: Stream, message: Any, *answers: type[Any]) -> Any:
    """Send a message, and return the answer; `ClusterError` if that is a failure."""
    stream.send_all(encode_line(message), _ANSWER_SECONDS)
    answer = dialog.read(stream, *answers, seconds=_ANSWER_SECONDS)
    if isinstance(answer, dialog.Fails):
        raise ClusterError(answer.reason)
    return answer


def _agree(begins: dialog.Begins, found: dict[int, tuple[Stream, int]]) -> int:
    """Start with one of several workers, while other tasks may do the same; return its rank."""
    while True:
        rank = min(found, key=lambda known: found[known][1])
        stream, feeds = found[rank]
        begins = replace(begins, feeds=feeds)
        answer = _exchange(stream, begins, dialog.Greets, dialog.Starts, dialog.Fails)
        if isinstance(answer, dialog.Starts):
            return rank
        found[rank] = stream, answer.feeds


def _drop_rows(
    batches: Iterator[Any], count: int, marks: Mapping[int, str]
) -> Iterator[tuple[int, Any, tuple[int, str]]]:
    """Yield batches without the rows already taken: number of rows, bytes, and the mark to send.

    Raises `ClusterError` if the rows up to a mark differ from those that the mark describes.
    """
    digest, position, rest = hashlib.blake2b(digest_size=16), 0, dict(marks)
    for batch in batches:
        content = write_batch(batch)
        digest.update(content)
        position += batch.num_rows
        mark = position, digest.hexdigest()
        if rest.pop(position, mark[1]) != mark[1] or (position >= count and rest):
            raise ClusterError(_OTHER_ROWS)
        dropped = min(count - (position - batch.num_rows), batch.num_rows)
        if 0 < dropped < batch.num_rows:
            batch = batch.slice(dropped)
            content, dropped = write_batch(batch), 0
        if dropped <= 0:
            yield batch.num_rows, content, mark
    if rest or position < count:
        raise ClusterError(_OTHER_ROWS)


def split_items(items: Iterator[Any], most_rows: int = MOST_ROWS) -> Iterator[Sequence[Any]]:
    """Yield lists of items, short lists first, so that the first rows are sent immediately."""
    size, part = 50, []
    for item in items:
        part.append(item)
        if len(part) >= size:
            yield part
            part, size = [], min(most_rows, 2 * size)
    if part:
        yield part


FED_SCHEMA = "rows long, failure string"


def feed_items(feeder: Feeder, name: str, items: Iterable[Any]) -> Iterator[tuple[int, str | None]]:
    """Feed a partition of an RDD; yield the number of rows taken, and any failure.

    A failure is returned as text that starts with its class, not raised: otherwise Spark would
    retry the task.
    """
    yield _feed(feeder, name, map(encode_items, split_items(iter(items))))


def feed_frame(feeder: Feeder, name: str, arrays: bool, batches: Iterable[Any]) -> Iterator[Any]:
    """Feed a partition of a DataFrame; yield rows of `FED_SCHEMA`, as `feed_items` does.

    With ``arrays``, the function receives columns as arrays when it requests columns.
    """
    import pyarrow as pa

    filled = (
        frame_items(batch.slice(start, MOST_ROWS), gives_arrays=arrays)
        for batch in batches
        for start in range(0, batch.num_rows, MOST_ROWS)
    )
    rows, failure = _feed(feeder, name, filled)
    columns = [pa.array([rows], pa.int64()), pa.array([failure], pa.string())]
    yield pa.RecordBatch.from_arrays(columns, names=["rows", "failure"])


def infer_items(feeder: Feeder, name: str, items: Iterable[Any]) -> Iterator[Any]:
    """Feed a partition of an RDD; yield a result for each of its items."""
    batches = map(encode_items, split_items(iter(items)))
    return feeder.infer(batches, name, *_partition_and_attempt())


def _feed(feeder: Feeder, name: str, batches: Iterator[Any]) -> tuple[int, str | None]:
    try:
        return feeder.feed(batches, name, *_partition_and_attempt()), None
    except (ClusterError, SerializationError) as error:
        return 0, f"{type(error).__name__}: {error}"


def _partition_and_attempt() -> tuple[int, int]:
    """Return the numbers of the partition and of this attempt; later attempts have larger ones."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return (context.partitionId(), context.taskAttemptId()) if context else (0, 0)
