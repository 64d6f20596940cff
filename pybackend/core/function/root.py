"""Rank 0's side of the joint operations of a function's workers; all others connect to it."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import get_args

from pybackend.core.errors import ClusterError, PeerLostError
from pybackend.core.job.codec import decode, encode_line
from pybackend.core.job.messages import End, FromPeer, FromRoot, NotShared, Share, Shared
from pybackend.core.net.rendezvous import Acceptor, split_address
from pybackend.core.net.stream import Stream, wait_any

PURPOSE = "function"
# Largest message, in bytes.
LONGEST = 1 << 31
# Time for workers and evaluators to return after the leading ranks; servers never return.
GRACE_SECONDS = 3.0
# Time for the servers to confirm that they have ended.
_END_SECONDS = 10.0


class Root:
    """Collect the values that all ranks share, and stop the servers once the others have returned.

    Parameters
    ----------
    server
        Socket on which rank 0 listens for as long as its process lives.
    peers
        ``host:port`` by rank.
    token
        The job's secret, which every rank must prove it knows.
    timeout
        Seconds after which a machine that does not answer, or a rank that never connected, counts
        as lost.
    encrypt
        As in `greet_as_client`.
    """

    def __init__(
        self,
        server: socket.socket,
        peers: Sequence[str],
        token: str,
        timeout: float,
        encrypt: bool | None,
    ) -> None:
        self._hosts = [split_address(peer)[0] for peer in peers]
        self._timeout = timeout
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
        Acceptor(server, token, PURPOSE, self._welcome, encrypt=encrypt)

    def gather(self, call: str, text: str) -> list[str]:
        """Return the texts of all ranks, by rank.

        Raises
        ------
        PeerLostError, ClusterError
            A rank was lost, has returned, or is in a different call.
        """
        with self._turn:
            with self._changed:
                self._waiting[0] = Share(call, text)
                self._settle()
            while True:
                try:
                    return read_answer(self._answers.get(timeout=1.0), self._hosts)
                except queue.Empty:
                    self._find_absent()

    def finish(self, leading: Set[int], following: Set[int], patient: Set[int]) -> Set[int]:
        """Record that rank 0's function returned, and stop ``following`` ranks after the others.

        Returns the ranks that were stopped.

        Parameters
        ----------
        leading, following
            As in `pybackend.core.tf_config`.
        patient
            Following ranks that get `GRACE_SECONDS` to return on their own.
        """
        with self._changed:
            self._returned.add(0)
            self._settle()
            if not following:
                return self._ended
            self._wait(leading, None)
            if self._lost.keys() & leading:  # the launcher ends all ranks and reports why
                return self._ended
            # Ranks that start late get their time, too.
            self._changed.wait_for(
                lambda: following <= self._outboxes.keys() | self._lost.keys(), self._timeout
            )
            self._wait(patient, GRACE_SECONDS)
            self._ended = following - self._returned
            for rank in self._ended:
                self._send(rank, End())
            self._wait(following, _END_SECONDS)
            return self._ended

    def leave(self) -> None:
        """Notify all ranks, including later ones, that rank 0 shares no more values."""
        with self._changed:
            is_over = 0 in self._returned
            self._farewell = (
                NotShared("worker 0 has returned") if is_over else NotShared("has failed", lost=0)
            )
            for rank in self._outboxes:
                self._send(rank, self._farewell)
            outboxes = list(self._outboxes.values())
        deadline = time.monotonic() + _END_SECONDS
        for outbox in outboxes:
            # This process may exit after that; a busy worker still receives its answer.
            outbox.finish(None if is_over else max(0.0, deadline - time.monotonic()))

    def _wait(self, ranks: Set[int], seconds: float | None) -> None:
        """Wait until these ranks have returned or are lost."""
        self._changed.wait_for(lambda: ranks <= self._returned | self._lost.keys(), seconds)

    def _welcome(self, stream: Stream, rank: int) -> None:
        with self._changed:
            is_awaited = 0 < rank < len(self._hosts) and rank not in self._outboxes
            if is_awaited:
                self._outboxes[rank] = Outbox(stream, self._timeout, partial(self._lose, rank))
                self._changed.notify_all()
                if rank in self._ended:
                    self._send(rank, End())
                elif self._farewell:
                    self._send(rank, self._farewell)
        if not is_awaited:
            stream.close()
            return
        stream.probe(self._timeout)
        threading.Thread(target=self._listen, args=(rank, stream), daemon=True).start()

    def _listen(self, rank: int, stream: Stream) -> None:
        reason = "closed the connection"
        try:
            while line := stream.read_line(LONGEST):
                message: FromPeer = decode(line, *get_args(FromPeer))
                with self._changed:
                    if isinstance(message, Share):
                        self._waiting[rank] = message
                    else:
                        self._returned.add(rank)
                    self._settle()
        except TimeoutError:
            reason = f"has not answered for {self._timeout:g} s"
        except (OSError, ValueError) as error:
            reason = f"closed the connection ({error})"
        self._lose(rank, reason)

    def _lose(self, rank: int, reason: str) -> None:
        with self._changed:
            if rank not in self._returned:
                self._lost.setdefault(rank, reason)
            self._settle()

    def _find_absent(self) -> None:
        """Mark ranks that did not connect in time as lost."""
        if time.monotonic() - self._began > self._timeout:
            for rank in set(range(1, len(self._hosts))) - self._outboxes.keys():
                self._lose(rank, f"did not connect within {self._timeout:g} s")

    def _settle(self) -> None:
        """Answer the waiting ranks if all are waiting, or if one of the others never will."""
        self._changed.notify_all()
        everyone = set(range(len(self._hosts)))
        absent = everyone - self._waiting.keys()
        answer: Shared | NotShared | None = None
        if not absent:
            answer = self._compare([self._waiting[rank] for rank in sorted(everyone)])
        elif lost := sorted(absent & self._lost.keys()):
            answer = NotShared(self._lost[lost[0]], lost[0])
        elif returned := sorted(absent & self._returned):
            answer = NotShared(f"worker {returned[0]} has returned")
        if answer is not None:
            waiting, self._waiting = self._waiting, {}
            line = encode_line(answer) if waiting.keys() & self._outboxes.keys() else b""
            for rank in waiting:
                if outbox := self._outboxes.get(rank):
                    outbox.put(line)
                else:
                    self._answers.put(answer)

    def _compare(self, shares: Sequence[Share]) -> Shared | NotShared:
        for rank, share in enumerate(shares):
            if share.call != shares[0].call:
                first = f"worker 0 calls {shares[0].call}()"
                return NotShared(f"{first} while worker {rank} calls {share.call}()")
        return Shared(tuple(share.text for share in shares))

    def _send(self, rank: int, message: FromRoot) -> None:
        if outbox := self._outboxes.get(rank):
            outbox.put(encode_line(message))


def read_answer(answer: Shared | NotShared, hosts: Sequence[str]) -> list[str]:
    """Return the texts that all ranks shared.

    Raises
    ------
    PeerLostError, ClusterError
        A rank was lost, has returned, or is in a different call.
    """
    if isinstance(answer, Shared):
        return list(answer.texts)
    if answer.lost is not None:
        raise PeerLostError(answer.lost, hosts[answer.lost], answer.reason)
    raise ClusterError(
        f"the workers are not in the same call: {answer.reason}. All of them must call "
        "all_gather() and barrier() the same number of times, in the same order"
    )


class Outbox:
    """Thread that sends lines over a connection; a failed connection is closed.

    Parameters
    ----------
    stream
        The connection.
    timeout
        Seconds without any answer after which the other machine counts as lost. There is no limit
        for a process that merely does not read.
    on_loss
        Called from the thread with the reason for a loss, before the connection is closed.
    """

    def __init__(self, stream: Stream, timeout: float, on_loss: Callable[[str], object]) -> None:
        self._stream = stream
        self._timeout = timeout
        self._on_loss = on_loss
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queue a line."""
        self._lines.put(line)

    def finish(self, seconds: float | None = None) -> None:
        """Wait until all lines have been sent, or cannot be sent."""
        self._lines.put(None)
        self._thread.join(seconds)

    def _work(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                _send(self._stream, line, self._timeout)
        except TimeoutError:
            self._on_loss(f"has not answered for {self._timeout:g} s")
            self._stream.close()  # half a line may have gone out: nothing can follow it
        except OSError as error:
            self._on_loss(f"closed the connection ({error})")
            self._stream.close()


def _send(stream: Stream, line: bytes, timeout: float) -> None:
    rest = memoryview(line)
    while rest:
        sent = stream.send_some([rest])
        rest = rest[sent:]
        if not sent and not wait_any([], [stream], timeout) and stream.is_unanswered(timeout):
            raise TimeoutError
