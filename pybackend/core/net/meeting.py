"""The workers' rendezvous at the driver, over authenticated connections: the driver's side.

Each worker holds one connection (`meeting_client`). Over this connection, the worker
sends its message to all others and its events as lines of JSON, and its results in parts: a line,
and the bytes that it announces. It receives orders, and one answer: either the messages of all
workers, or the notice that all must meet elsewhere, because one of them has not reached the driver.
The answer is decided once, so that all workers get the same one:

- the messages of all workers, as soon as all have joined;
- meet elsewhere, if a worker is still missing some seconds after the first one connected, or lost
  its connection before it joined. A worker that has joined goes elsewhere only after this answer.
  The others get the same answer, because the worker that cannot join is missing for them, too.
"""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, get_args

from pybackend.core.job.codec import decode, encode_line
from pybackend.core.job.messages import Event, FromLauncher
from pybackend.core.net.liveness import Beat, SilentError, read_lines, start_beating
from pybackend.core.net.rendezvous import Acceptor, address_of, listen
from pybackend.core.net.stream import LineStream

PURPOSE = "meeting"
_LONGEST_LINE = 1 << 24
# Time limit for sending to a worker that does not read.
_SEND_SECONDS = 30.0
_AT_ONCE = 32
# Events of the same worker wait for a part.
_PART = 1 << 20
# Bytes that must arrive without a pause as long as a silence.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Join:
    """Message from a worker to all others."""

    message: str


@dataclass(frozen=True)
class ResultPart:
    """Part of a result, whose bytes follow this line."""

    name: str
    size: int


@dataclass(frozen=True)
class Everyone:
    """Messages from all workers, by rank."""

    messages: tuple[str, ...]


@dataclass(frozen=True)
class MeetElsewhere:
    """Answer that a worker is missing: the others must not wait here."""


@dataclass(frozen=True)
class Refused:
    """Reason why the workers cannot work together."""

    reason: str


@dataclass(frozen=True)
class Finished:
    """End of the parts that the server sends to its workers."""


Decision = Everyone | MeetElsewhere | Refused
FromServer = Decision | ResultPart | Finished | Beat


class MeetingServer(contextlib.AbstractContextManager["MeetingServer"]):
    """The workers' rendezvous at the driver; a context manager.

    It listens on ``host``, an address of the driver (None: workers are added only by `adopt`),
    which workers reach as ``announced``. It may use a listening socket ``server`` instead, which it
    releases for other processes as soon as all have joined. The last worker must connect within
    ``patience`` seconds after the first one; otherwise all are sent elsewhere. This is infinite if
    they cannot meet anywhere else. A worker counts as lost after ``silence`` seconds without a sign
    of life; infinite if its connection reports the loss. If ``queue`` has ``most`` events, workers
    have to wait; 0: it may have any number.
    """

    def __init__(
        self,
        host: str | None,
        token: str,
        workers: int,
        announced: str | None = None,
        patience: float = math.inf,
        server: socket.socket | None = None,
        silence: float = math.inf,
        most: int = 0,
    ) -> None:
        self.silence = silence
        self.queue: queue.Queue[Event] = queue.Queue(most)
        """Events from the workers, in order of arrival."""
        self._workers = workers
        self._patience = patience
        self._lock = threading.Lock()
        self._streams: dict[int, LineStream] = {}
        self._joined: dict[int, str] = {}
        self._answer: bytes | None = None
        self._parts: dict[tuple[int, str], bytearray] = {}
        self._readers: list[threading.Thread] = []
        self._first = math.inf
        self._closed = threading.Event()
        self._left, self._silent = set[int](), set[int]()
        self._sending = threading.Lock()
        self._decided: queue.Queue[Decision] = queue.Queue()
        self._is_shared = server is not None
        if server is None and host is not None:
            server = listen(host)
        self.address = address_of(server, announced) if server else ""
        """``host:port`` for the workers; empty if there is none."""
        self._acceptor = Acceptor(server, token, PURPOSE, self.adopt) if server else None

    def has_come(self, rank: int) -> bool:
        """Return whether a worker has ever connected, even if it has not joined yet."""
        return rank in self._streams

    @property
    def messages(self) -> Mapping[int, str]:
        """Messages from the workers that have joined so far, by rank."""
        with self._lock:
            return dict(self._joined)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        with self._lock:
            self._closed.set()
            streams = list(self._streams.values())
        for stream in streams:
            stream.close()

    def drain(self, timeout: float) -> None:
        """Wait until all data from workers that have ended has been read."""
        deadline = time.monotonic() + timeout
        for reader in list(self._readers):
            reader.join(max(0.0, deadline - time.monotonic()))

    def result(self, rank: int, name: str) -> bytes | None:
        """Return the result that a worker sent under a name, or None."""
        with self._lock:
            parts = self._parts.get((rank, name))
            return None if parts is None else bytes(parts)

    def missing(self) -> tuple[list[int], float]:
        """Return the ranks that have not joined yet, and the seconds since the first joined."""
        with self._lock:
            absent = [rank for rank in range(self._workers) if rank not in self._joined]
            return absent, max(0.0, time.monotonic() - self._first)

    def rejected(self) -> int:
        """Return the number of connections that did not prove that they know the token."""
        return self._acceptor.rejected if self._acceptor else 0

    def has_left(self, rank: int) -> bool:
        """Return whether a worker's connection has ended, and all of its data has been read."""
        return rank in self._left

    def silent(self) -> list[int]:
        """Return the ranks that were silent for too long, because their processes were stopped."""
        return sorted(self._silent)

    def start_beating(self, silence: float) -> None:
        """Send signs of life to all workers, several times per ``silence`` seconds."""
        line = encode_line(Beat())

        start_beating(lambda: self._send_line(line), silence, self._closed)

    def join(self, rank: int, message: str) -> None:
        """Join as a worker in this process."""
        with self._lock:
            self._first = min(self._first, time.monotonic())
            self._joined[rank] = message
            if len(self._joined) < self._workers:
                return
            everyone = tuple(self._joined[peer] for peer in range(self._workers))
        # Before the workers connect to the process that uses the socket from now on: this one would
        # accept some of their connections.
        if self._is_shared and self._acceptor:
            self._acceptor.release()
        self._decide(Everyone(everyone))

    def wait_for_all(self, seconds: float) -> tuple[str, ...] | None:
        """Return the messages from all workers, by rank, when all have joined; None if too late."""
        with contextlib.suppress(queue.Empty):
            decided = self._decided.get(timeout=seconds)
            return decided.messages if isinstance(decided, Everyone) else None
        return None

    def refuse(self, reason: str) -> None:
        """Send all workers, including later ones, the reason why they cannot work together."""
        self._decide(Refused(reason))

    def send(self, contents: Mapping[str, bytes]) -> None:
        """Send all workers some contents by name, for `MeetingClient.receive`."""
        parts = [part for name, content in contents.items() for part in split(name, content)]
        for line in [*parts, encode_line(Finished())]:
            self._send_line(line)

    def order(self, order: FromLauncher, rank: int | None = None) -> None:
        """Send an order to one worker or to all, for `MeetingClient.poll_order`."""
        self._send_line(encode_line(order), rank)

    def _send_line(self, line: bytes, rank: int | None = None) -> None:
        with self._lock:
            connected = self._streams.keys() - self._left
            streams = [self._streams[one] for one in connected if rank in (None, one)]
        self._send_to_all(streams, line)

    def _send_to_all(self, streams: Sequence[LineStream], line: bytes) -> None:
        if streams:
            with self._sending, ThreadPoolExecutor(min(_AT_ONCE, len(streams))) as pool:
                list(pool.map(lambda stream: _send(stream, line), streams))

    def adopt(self, stream: LineStream, rank: int) -> None:
        """Add a worker whose connection is already authenticated, e.g. by ssh."""
        with self._lock:
            is_known = 0 <= rank < self._workers and rank not in self._streams
            # A greeting may end after the server has been closed.
            is_expected = is_known and not self._closed.is_set()
            if is_expected:
                self._streams[rank] = stream
            is_first = is_expected and len(self._streams) == 1
            answer = self._answer
        if not is_expected:  # Spark tries a task again; the others do not wait for it
            stream.close()
            return
        stream.keep_alive()
        reader = threading.Thread(target=self._read, args=(stream, rank), daemon=True)
        self._readers.append(reader)
        reader.start()
        if answer is not None:
            self._send_to_all([stream], answer)
        if is_first and math.isfinite(self._patience):
            threading.Thread(target=self._wait_for_all, daemon=True).start()

    def _wait_for_all(self) -> None:
        self._closed.wait(self._patience)
        if len(self._streams) < self._workers:
            self._decide(MeetElsewhere())

    def _read(self, stream: LineStream, rank: int) -> None:
        try:
            for line in read_lines(stream, _LONGEST_LINE, self.silence):
                self._take(rank, line, stream)
        except SilentError:
            self._silent.add(rank)
        except (OSError, ValueError):  # the worker was lost, or sent an invalid message
            pass
        finally:
            stream.close()
            self._left.add(rank)
            if rank not in self._joined and math.isfinite(self._patience):
                self._decide(MeetElsewhere())

    def _take(self, rank: int, line: bytes, stream: LineStream) -> None:
        message: Any = decode(line, Join, ResultPart, Beat, *get_args(Event))
        if isinstance(message, ResultPart):
            part = read_part(stream, message, self.silence)
            with self._lock:
                self._parts.setdefault((rank, message.name), bytearray()).extend(part)
        elif isinstance(message, Join):
            self.join(rank, message.message)
        elif not isinstance(message, Beat):
            # Workers leave their rank out of events: the connection has it.
            self.queue.put(replace(message, rank=rank))

    def _decide(self, answer: Decision) -> None:
        """Send every worker the same answer: the first one that was decided."""
        with self._lock:
            if self._answer is not None or self._closed.is_set():
                return
            line = self._answer = encode_line(answer)
            streams = list(self._streams.values())
        self._send_to_all(streams, line)
        self._decided.put(answer)


def split(name: str, content: bytes) -> Iterator[bytes]:
    """Yield content in parts, each with its line."""
    for start in range(0, max(1, len(content)), _PART):
        part = content[start : start + _PART]
        yield encode_line(ResultPart(name, len(part))) + part


def read_part(stream: LineStream, part: ResultPart, silence: float) -> bytes:
    """Read the bytes of a part.

    Raises `SilentError` if nothing was received for ``silence`` seconds, `OSError` if the
    connection failed, and `ValueError` if the part is larger than `split` makes them.
    """
    if not 0 <= part.size <= _PART:
        raise ValueError(f"a part of {part.size} bytes was announced")
    seconds = None if math.isinf(silence) else silence
    sizes = [min(_BLOCK, part.size - start) for start in range(0, part.size, _BLOCK)]
    try:
        return b"".join([stream.read_exactly(size, seconds) for size in sizes])
    except TimeoutError as error:
        if error.errno is not None:  # the system has closed the connection
            raise
        raise SilentError.after(silence) from None


def _send(stream: LineStream, answer: bytes) -> None:
    try:
        stream.send_all(answer, _SEND_SECONDS)
    except OSError:  # without its answer a worker must not continue
        with contextlib.suppress(OSError):
            stream.close()
