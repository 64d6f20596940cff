"""From listening sockets to a mesh: every rank connects to some, is connected to by others."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Sequence
from typing import Literal

from pybackend.collective.cost import Algorithm
from pybackend.collective.links import Link
from pybackend.collective.mesh import Mesh, neighbours
from pybackend.errors import PeerLostError, TfdistError
from pybackend.net.dialing import dial
from pybackend.net.rendezvous import Acceptor, greet_as_client, split_address
from pybackend.net.stream import Stream

PURPOSE = "mesh"
_RETRY_SECONDS = 0.05
_LOOK_SECONDS = 0.1


def join_mesh(
    server: socket.socket,
    peers: Sequence[str],
    rank: int,
    token: str,
    timeout: float,
    *,
    algorithm: Literal["auto"] | Algorithm = "auto",
    patience: float | None = None,
) -> Mesh:
    """Connect to some ranks, be connected to by others, measure, and close ``server``.

    Parameters
    ----------
    server
        This rank's listening socket, whose address is ``peers[rank]``.
    peers
        ``host:port`` per rank, two at least; all are listening already.
    token
        The job's secret; strangers are turned away.
    timeout
        Seconds to wait for a peer, now and in every collective.
    algorithm
        See `Mesh`.
    patience
        Seconds to wait for a peer now, where that is not ``timeout``: peers may have data to read
        before. One that has died is noticed all the same.

    Raises
    ------
    PeerLostError
        Names the peer that refuses, closes, or is silent.
    ClusterError
        Within seconds, where the network does not let this rank reach a peer.
    """
    wiring = _Wiring(server, peers, rank, token, patience or timeout)
    try:
        connections = wiring.wait()
    finally:
        wiring.close()
    hosts = [split_address(peer)[0] for peer in peers]
    links = {other: Link(made, other, hosts[other]) for other, made in connections.items()}
    mesh = Mesh(links, rank, len(peers), timeout, algorithm)
    try:
        mesh.calibrate()
    except BaseException:
        mesh.close()
        raise
    return mesh


def dials(rank: int, other: int, world_size: int) -> bool:
    """Whether ``rank`` connects to ``other``, not the other way round.

    Every rank connects to the next, so that each notices at once when that one has died; of
    other pairs, and of two ranks in all, the lower one connects.
    """
    if world_size > 2 and (rank - other) % world_size in (1, world_size - 1):
        return (rank + 1) % world_size == other
    return rank < other


class _Wiring:
    """The streams of one rank while they are being made."""

    def __init__(
        self, server: socket.socket, peers: Sequence[str], rank: int, token: str, timeout: float
    ) -> None:
        self._peers = peers
        self._rank = rank
        self._token = token
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._closed = False
        self._lock = threading.Lock()
        self._unfinished: set[Stream] = set()
        self._results: queue.Queue[tuple[int, Stream | TfdistError]] = queue.Queue()
        self._made: dict[int, Stream] = {}
        self._wanted = set(neighbours(rank, len(peers)))
        self._dialled = {other for other in self._wanted if dials(rank, other, len(peers))}
        self._acceptor = Acceptor(server, token, PURPOSE, self._welcome)
        for other in sorted(self._dialled):
            threading.Thread(target=self._dial, args=(other,), daemon=True).start()

    def wait(self) -> dict[int, Stream]:
        """All streams, by rank."""
        while self._made.keys() != self._wanted:
            try:
                other, result = self._results.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                self._look()
                continue
            if isinstance(result, TfdistError):
                raise result
            if other in self._made:
                result.close()
            else:
                self._made[other] = result
        made, self._made = self._made, {}
        return made

    def close(self) -> None:
        """Stop listening, and close what was not given away by `wait`."""
        self._acceptor.close()
        with self._lock:
            self._closed = True
            rest = [*self._unfinished, *self._made.values()]
            while not self._results.empty():
                result = self._results.get()[1]
                rest += [] if isinstance(result, TfdistError) else [result]
        for stream in rest:
            stream.close()  # wakes a thread that waits for a greeting

    def _look(self) -> None:
        """A peer that died meanwhile ends the wait at once; one that never came, in time."""
        for other, stream in self._made.items():
            if _has_ended(stream):
                raise self._lost(other, "closed the connection")
        late = self._wanted - self._made.keys()
        # Who was dialled has a more exact message, if a moment later.
        grace = _LOOK_SECONDS * 10 if late & self._dialled else 0.0
        if time.monotonic() > self._deadline + grace:
            raise self._lost(min(late), f"did not connect within {self._timeout:g} s")

    def _welcome(self, stream: Stream, who: int) -> None:
        with self._lock:
            if not self._closed and who in self._wanted - self._dialled:
                self._results.put((who, stream))
                return
        stream.close()

    def _dial(self, other: int) -> None:
        try:
            stream = self._connect(other)
        except TfdistError as error:
            self._results.put((other, error))
            return
        with self._lock:
            self._unfinished.discard(stream)
            if not self._closed:
                self._results.put((other, stream))
                return
        stream.close()

    def _connect(self, other: int) -> Stream:
        """Connect, again where the other end had too many strangers to listen to."""
        silent = f"did not answer within {self._timeout:g} s"
        while True:
            stream = self._reach(other)
            try:
                if not self._unheard(stream):
                    greet_as_client(stream, self._token, self._rank, PURPOSE)
                    return stream
                stream.close()
            except TimeoutError as error:
                stream.close()
                raise self._lost(other, silent) from error
            except OSError as error:
                stream.close()
                raise self._lost(other, f"closed the connection ({error})") from error
            finally:
                with self._lock:
                    self._unfinished.discard(stream)
            if self._closed or self._remaining() <= _RETRY_SECONDS:
                raise self._lost(other, silent)
            time.sleep(_RETRY_SECONDS)

    def _reach(self, other: int) -> Stream:
        stream = dial(self._peers, self._rank, other, self._remaining())
        with self._lock:
            if not self._closed:
                self._unfinished.add(stream)
                return stream
        stream.close()
        raise self._lost(other, "is not waited for any more")

    def _unheard(self, stream: Stream) -> bool:
        """Wait until the other end begins; whether it closed the connection instead.

        It may still be importing TensorFlow: its socket accepts streams before it does.
        """
        first = stream.peek(1, self._remaining())
        if first is None:
            raise TimeoutError
        return first == b""

    def _remaining(self) -> float:
        return max(0.01, self._deadline - time.monotonic())

    def _lost(self, other: int, reason: str) -> PeerLostError:
        return PeerLostError(other, split_address(self._peers[other])[0], reason)


def _has_ended(stream: Stream) -> bool:
    try:
        return stream.peek(1) == b""
    except OSError:
        return True
