"""Values that the workers of a function share: all other ranks connect to rank 0.

Rank 0 (`ListeningRank`) answers a call once all ranks have made it, and stops the servers once the
others have returned. The other ranks (`ConnectingRank`) connect in the background: a function that
shares no values needs no connection.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

from pybackend.core.errors import ClusterError, PeerLostError, TfdistError
from pybackend.core.job import messages
from pybackend.core.job.codec import decode, encode_line
from pybackend.core.job.messages import NotShared, Share, Shared
from pybackend.core.net.authentication import RejectedError, greet_as_client
from pybackend.core.net.rendezvous import Acceptor, dial, split_address
from pybackend.core.net.stream import Stream, wait_any

_PURPOSE = "function"
# Largest message, in bytes.
_LONGEST = 1 << 31
# Time for workers and evaluators to return after the leading ranks; servers never return.
GRACE_SECONDS = 3.0
# Time for the servers to confirm that they have ended.
_END_SECONDS = 10.0
_RETRY_SECONDS = 0.05
_CLOSED = "closed the connection"


@dataclass(eq=False)
class ListeningRank:
    """Rank 0: collects the values that all ranks share.

    ``server`` listens for as long as the process lives, because ranks may start late; ``peers`` is
    ``host:port`` by rank. Every rank must prove that it knows the job's secret, ``token``. A
    machine that does not answer for ``timeout`` seconds, or a rank that never connected, counts as
    lost. ``encrypt`` is as in `greet_as_client`.
    """

    server: socket.socket
    peers: Sequence[str]
    token: str = field(repr=False)
    timeout: float
    encrypt: bool | None

    def __post_init__(self) -> None:
        self._hosts = [split_address(peer)[0] for peer in self.peers]
        self._began = time.monotonic()
        self._changed = threading.Condition()
        self._outboxes: dict[int, Outbox] = {}
        self._waiting: dict[int, Share] = {}
        self._returned: set[int] = set()
        self._lost: dict[int, str] = {}
        self._ended: Set[int] = frozenset()
        self._farewell: NotShared | None = None
        self._turn = threading.Lock()
        self._answers: queue.Queue[Shared | NotShared] = queue.Queue()
        Acceptor(self.server, self.token, _PURPOSE, self._welcome, encrypt=self.encrypt)

    def gather(self, call: str, text: str) -> list[str]:
        """Return the texts of all ranks, by rank.

        Raises `PeerLostError` or `ClusterError` if a rank was lost, has returned, or is in a
        different call.
        """
        with self._turn:
            with self._changed:
                self._waiting[0] = Share(call, text)
                self._settle()
            while True:
                try:
                    return _read_answer(self._answers.get(timeout=1.0), self._hosts)
                except queue.Empty:
                    self._find_absent()

    def finish(self, leading: Set[int], following: Set[int], patient: Set[int]) -> Set[int]:
        """Record that rank 0's function returned, and stop ``following`` ranks after the others.

        The ranks are as in `pybackend.core.tf_config`; those in ``patient`` get `GRACE_SECONDS` to
        return on their own. Returns the ranks that were stopped.
        """
        with self._changed:
            self._returned.add(0)
            self._settle()
            if not following:
                return self._ended
            self._wait(leading)
            if self._lost.keys() & leading:  # the launcher ends all ranks and reports why
                return self._ended
            # Ranks that start late get their time, too.
            self._changed.wait_for(
                lambda: following <= self._outboxes.keys() | self._lost.keys(), self.timeout
            )
            self._wait(patient, GRACE_SECONDS)
            self._ended = following - self._returned
            for rank in self._ended:
                self._send(rank, messages.End())
            self._wait(following, _END_SECONDS)
            return self._ended

    def leave(self) -> None:
        """Notify all ranks, including later ones, that rank 0 shares no more values."""
        with self._changed:
            is_over = 0 in self._returned
            # A server, which never returns, ends itself once it knows that rank 0 has failed.
            reason, lost = ("worker 0 has returned", None) if is_over else ("has failed", 0)
            self._farewell = NotShared(reason, lost)
            for rank in self._outboxes:
                self._send(rank, self._farewell)
            outboxes = list(self._outboxes.values())
        deadline = time.monotonic() + _END_SECONDS
        for outbox in outboxes:
            # This process may exit after that; a busy worker still receives its answer.
            outbox.finish(None if is_over else max(0.0, deadline - time.monotonic()))

    def _wait(self, ranks: Set[int], seconds: float | None = None) -> None:
        self._changed.wait_for(lambda: ranks <= self._returned | self._lost.keys(), seconds)

    def _welcome(self, stream: Stream, rank: int) -> None:
        with self._changed:
            if not 0 < rank < len(self._hosts) or rank in self._outboxes:
                stream.close()
                return
            self._outboxes[rank] = Outbox(stream, self.timeout, partial(self._lose, rank))
            self._changed.notify_all()
            if rank in self._ended:
                self._send(rank, messages.End())
            elif self._farewell:
                self._send(rank, self._farewell)
        stream.probe(self.timeout)
        threading.Thread(target=self._listen, args=(rank, stream), daemon=True).start()

    def _listen(self, rank: int, stream: Stream) -> None:
        def use(message: messages.FromPeer) -> None:
            with self._changed:
                if isinstance(message, Share):
                    self._waiting[rank] = message
                else:
                    self._returned.add(rank)
                self._settle()

        self._lose(rank, _read(stream, self.timeout, use, *get_args(messages.FromPeer)))

    def _lose(self, rank: int, reason: str) -> None:
        with self._changed:
            if rank not in self._returned:
                self._lost.setdefault(rank, reason)
            self._settle()

    def _find_absent(self) -> None:
        if time.monotonic() - self._began > self.timeout:
            for rank in set(range(1, len(self._hosts))) - self._outboxes.keys():
                self._lose(rank, f"did not connect within {self.timeout:g} s")

    def _settle(self) -> None:
        """Answer the waiting ranks if all are waiting, or if one of the others never will."""
        self._changed.notify_all()
        everyone = set(range(len(self._hosts)))
        absent = everyone - self._waiting.keys()
        answer: Shared | NotShared | None = None
        if not absent:
            answer = _compare([self._waiting[rank] for rank in sorted(everyone)])
        elif lost := sorted(absent & self._lost.keys()):
            answer = NotShared(self._lost[lost[0]], lost[0])
        elif returned := sorted(absent & self._returned):
            answer = NotShared(f"worker {returned[0]} has returned")
        if answer is not None:
            waiting, self._waiting = self._waiting, {}
            others = self._outboxes.keys() & waiting.keys()
            # Encoded once for all ranks: it may be large.
            line = encode_line(answer) if others else b""
            for rank in others:
                self._outboxes[rank].put(line)
            if 0 in waiting:
                self._answers.put(answer)

    def _send(self, rank: int, message: messages.FromRoot) -> None:
        if outbox := self._outboxes.get(rank):
            outbox.put(encode_line(message))


@dataclass(eq=False)
class ConnectingRank:
    """Any other rank; the arguments are those of `ListeningRank`, and ``rank``.

    ``on_end`` is called from a thread, if this rank's function has not returned: with None if it
    should end because all others have returned, or with the error if rank 0 was lost.
    """

    peers: Sequence[str]
    rank: int
    token: str = field(repr=False)
    timeout: float
    encrypt: bool | None
    on_end: Callable[[Exception | None], object]

    def __post_init__(self) -> None:
        self._hosts = [split_address(peer)[0] for peer in self.peers]
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._has_tried = threading.Event()
        self._has_returned = self._is_closed = False
        self._outbox: Outbox | None = None
        self._error: TfdistError | None = None
        self._answers: queue.Queue[Shared | NotShared | TfdistError] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def wait(self) -> None:
        """Wait until this rank is connected; raise its error if it cannot connect."""
        self._has_tried.wait()
        if self._outbox is None:
            assert self._error is not None
            raise self._error

    def gather(self, call: str, text: str) -> list[str]:
        """Return the texts of all ranks, by rank; errors as in `ListeningRank.gather`."""
        with self._turn:
            self.wait()
            self._send(Share(call, text))
            answer = self._answers.get()
            if isinstance(answer, TfdistError):
                self._answers.put(answer)  # every later call fails with it, too
                raise answer
            return _read_answer(answer, self._hosts)

    def finish(self) -> None:
        """Notify rank 0 that this rank's function has returned."""
        with self._lock:
            self._has_returned = True
        if self._outbox is not None:
            self._send(messages.Returned())
            self._outbox.finish()

    def close(self) -> None:
        """Close the connection; this rank counts as lost unless `finish` was called first."""
        with self._lock:
            self._has_returned = self._is_closed = True
        if self._outbox is not None:
            self._outbox.stream.close()
            self._outbox.finish(0)

    def _work(self) -> None:
        try:
            stream = self._connect()
        except TfdistError as error:
            self._fail(error)
            return
        with self._lock:
            self._outbox = Outbox(stream, self.timeout, self._lose)
            has_returned = self._has_returned
        if self._is_closed:
            stream.close()
        elif has_returned:  # `finish` found no connection
            self._send(messages.Returned())
        self._has_tried.set()
        self._lose(_read(stream, self.timeout, self._use, *get_args(messages.FromRoot)))

    def _connect(self) -> Stream:
        """Connect, and retry while rank 0 has too many unauthenticated connections."""
        deadline = time.monotonic() + self.timeout
        while True:
            rest = max(0.01, deadline - time.monotonic())
            stream = dial(self.peers, self.rank, 0, rest)
            try:
                greet_as_client(stream, self.token, self.rank, _PURPOSE, rest, self.encrypt)
                stream.probe(self.timeout)
                return stream
            except OSError as error:
                stream.close()
                if isinstance(error, RejectedError) or time.monotonic() > deadline:
                    raise self._lost(f"rejected the connection of this worker ({error})") from error
            time.sleep(_RETRY_SECONDS)

    def _use(self, message: messages.FromRoot) -> None:
        if isinstance(message, messages.End):
            self._end(None)
            self._send(messages.Returned())
            return
        self._answers.put(message)
        if isinstance(message, NotShared) and message.lost == 0:
            self._end(self._lost(message.reason))

    def _lose(self, reason: str) -> None:
        self._fail(self._lost(reason))

    def _fail(self, error: TfdistError) -> None:
        self._error = error
        self._answers.put(error)
        self._has_tried.set()
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        with self._lock:
            is_over, self._has_returned = self._has_returned, True
        if not is_over:
            self.on_end(error)

    def _lost(self, reason: str) -> PeerLostError:
        return PeerLostError(0, self._hosts[0], reason)

    def _send(self, message: messages.FromPeer) -> None:
        assert self._outbox is not None
        self._outbox.put(encode_line(message))


def _read(
    stream: Stream, timeout: float, use: Callable[[Any], object], *kinds: type[object]
) -> str:
    """Call ``use`` with each message until the connection ends; return why it ended."""
    try:
        while line := stream.read_line(_LONGEST):
            use(decode(line, *kinds))
    except (OSError, ValueError) as error:
        return _explain(error, timeout)
    return _CLOSED


def _explain(error: Exception, timeout: float) -> str:
    is_silent = isinstance(error, TimeoutError)
    return f"has not answered for {timeout:g} s" if is_silent else f"{_CLOSED} ({error})"


def _compare(shares: Sequence[Share]) -> Shared | NotShared:
    for rank, share in enumerate(shares):
        if share.call != shares[0].call:
            first = f"worker 0 calls {shares[0].call}()"
            return NotShared(f"{first} while worker {rank} calls {share.call}()")
    return Shared(tuple(share.text for share in shares))


def _read_answer(answer: Shared | NotShared, hosts: Sequence[str]) -> list[str]:
    if isinstance(answer, Shared):
        return list(answer.texts)
    if answer.lost is not None:
        raise PeerLostError(answer.lost, hosts[answer.lost], answer.reason)
    rule = "All of them must call all_gather() and barrier() the same number of times, in the same "
    raise ClusterError(f"the workers are not in the same call: {answer.reason}. {rule}order")


@dataclass(eq=False)
class Outbox:
    """Thread that sends lines over a connection; a failed connection is closed.

    A machine that does not answer at all for ``timeout`` seconds counts as lost. There is no limit
    for a process that merely does not read. ``on_loss`` is called from the thread with the reason
    for a loss, before the connection is closed.
    """

    stream: Stream
    timeout: float
    on_loss: Callable[[str], object]

    def __post_init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        self._lines.put(line)

    def finish(self, seconds: float | None = None) -> None:
        """Wait until all lines have been sent, or cannot be sent."""
        self._lines.put(None)
        self._thread.join(seconds)

    def _work(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                self._send(memoryview(line))
        except OSError as error:
            self.on_loss(_explain(error, self.timeout))
            self.stream.close()  # half a line may have gone out: nothing can follow it

    def _send(self, rest: memoryview) -> None:
        stream, seconds = self.stream, self.timeout
        while rest:
            sent = stream.send_some([rest])
            rest = rest[sent:]
            if not sent and not wait_any([], [stream], seconds) and stream.is_unanswered(seconds):
                raise TimeoutError
