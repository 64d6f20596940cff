"""The connection of any other rank to rank 0, for the joint operations of a function's workers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import get_args

from pybackend.core.errors import ClusterError, PeerLostError, TfdistError
from pybackend.core.function.root import LONGEST, PURPOSE, Outbox, read_answer
from pybackend.core.job.codec import decode, encode_line
from pybackend.core.job.messages import End, FromPeer, FromRoot, NotShared, Returned, Share, Shared
from pybackend.core.net.authentication import RejectedError, greet_as_client
from pybackend.core.net.rendezvous import dial, split_address
from pybackend.core.net.stream import Stream

_RETRY_SECONDS = 0.05


class Peer:
    """Connect in the background: a function that shares no values needs no connection.

    Parameters
    ----------
    peers, token, timeout, encrypt
        As in `Root`.
    rank
        This rank.
    on_end
        Called from a thread, if this rank's function has not returned: with None if it should end
        because all others have returned, or with the error if rank 0 was lost.
    """

    def __init__(
        self,
        peers: Sequence[str],
        rank: int,
        token: str,
        timeout: float,
        encrypt: bool | None,
        on_end: Callable[[Exception | None], object],
    ) -> None:
        self._peers = peers
        self._hosts = [split_address(peer)[0] for peer in peers]
        self._rank = rank
        self._token = token
        self._timeout = timeout
        self._encrypt = encrypt
        self._on_end = on_end
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._has_tried = threading.Event()
        self._has_returned = False
        self._is_closed = False
        self._stream: Stream | None = None
        self._outbox: Outbox | None = None
        self._error: TfdistError | None = None
        self._answers: queue.Queue[Shared | NotShared | TfdistError] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def wait(self) -> None:
        """Wait until this rank is connected.

        Raises
        ------
        PeerLostError, ClusterError
            This rank cannot connect.
        """
        self._has_tried.wait()
        if self._stream is None:
            assert self._error is not None
            raise self._error

    def gather(self, call: str, text: str) -> list[str]:
        """Return the texts of all ranks, by rank; errors as in `Root.gather`."""
        with self._turn:
            self.wait()
            self._send(Share(call, text))
            answer = self._answers.get()
            if isinstance(answer, TfdistError):
                self._answers.put(answer)  # every later call fails with it, too
                raise answer
            return read_answer(answer, self._hosts)

    def finish(self) -> None:
        """Notify rank 0 that this rank's function has returned."""
        with self._lock:
            self._has_returned = True
        if self._outbox is not None:
            self._send(Returned())
            self._outbox.finish()

    def close(self) -> None:
        """Close the connection; this rank counts as lost unless `finish` was called first."""
        with self._lock:
            self._has_returned = self._is_closed = True
        if self._stream is not None and self._outbox is not None:
            self._stream.close()
            self._outbox.finish(0)

    def _work(self) -> None:
        try:
            stream = self._connect()
        except TfdistError as error:
            self._fail(error)
            return
        with self._lock:
            self._stream, has_returned = stream, self._has_returned
            self._outbox = Outbox(stream, self._timeout, self._lose_root)
        if self._is_closed:
            stream.close()
        elif has_returned:
            self._send(Returned())
        self._has_tried.set()
        self._listen(stream)

    def _connect(self) -> Stream:
        """Connect, and retry while rank 0 has too many unauthenticated connections."""
        deadline = time.monotonic() + self._timeout
        while True:
            rest = max(0.01, deadline - time.monotonic())
            stream = dial(self._peers, self._rank, 0, rest)
            try:
                greet_as_client(stream, self._token, self._rank, PURPOSE, rest, self._encrypt)
            except OSError as error:
                stream.close()
                if isinstance(error, RejectedError) or time.monotonic() > deadline:
                    raise self._lose(f"rejected the connection of this worker ({error})") from error
                time.sleep(_RETRY_SECONDS)
            else:
                stream.probe(self._timeout)
                return stream

    def _listen(self, stream: Stream) -> None:
        reason = "closed the connection"
        try:
            while line := stream.read_line(LONGEST):
                message: FromRoot = decode(line, *get_args(FromRoot))
                if isinstance(message, End):
                    self._end(None)
                    self._send(Returned())
                else:
                    self._answers.put(message)
                    if isinstance(message, NotShared) and message.lost == 0:
                        self._end(self._lose(message.reason))
        except TimeoutError:
            reason = f"has not answered for {self._timeout:g} s"
        except (OSError, ValueError) as error:
            reason = f"closed the connection ({error})"
        self._fail(self._lose(reason))

    def _fail(self, error: TfdistError) -> None:
        self._error = error
        self._answers.put(error)
        self._has_tried.set()
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        with self._lock:
            is_over, self._has_returned = self._has_returned, True
        if not is_over:
            self._on_end(error)

    def _lose(self, reason: str) -> PeerLostError | ClusterError:
        return PeerLostError(0, self._hosts[0], reason)

    def _lose_root(self, reason: str) -> None:
        self._fail(self._lose(reason))

    def _send(self, message: FromPeer) -> None:
        assert self._outbox is not None
        self._outbox.put(encode_line(message))
