"""Construction of a mesh: each rank connects to some ranks, and the others connect to it."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Sequence
from typing import Literal

from pybackend.core.collective.algorithms import Algorithm, find_neighbours
from pybackend.core.collective.host_memory import find_layout
from pybackend.core.collective.links import Link, Patience
from pybackend.core.collective.mesh import Mesh
from pybackend.core.errors import PeerLostError, TfdistError
from pybackend.core.net.authentication import greet_as_client
from pybackend.core.net.rendezvous import Acceptor, dial, split_address
from pybackend.core.net.stream import Stream

PURPOSE = "mesh"
_RETRY_SECONDS = 0.05
_CHECK_SECONDS = 0.1


def join_mesh(
    server: socket.socket,
    peers: Sequence[str],
    rank: int,
    token: str,
    timeout: float,
    *,
    algorithm: Literal["auto"] | Algorithm = "auto",
    connect_timeout: float | None = None,
    patience: Patience | None = None,
    encrypt: bool | None = None,
    shares_memory: bool = True,
) -> Mesh:
    """Connect to some ranks, accept connections from others, measure, and close ``server``.

    ``server`` is this rank's listening socket, whose address is ``peers[rank]``. ``peers`` has
    ``host:port`` per rank, at least two; all are listening already. Connections without the job's
    secret, ``token``, are rejected. ``timeout`` is in seconds: to wait for a peer now, and for its
    machine to answer in each collective. Peers may have to read data first, so ``connect_timeout``
    may be longer; a peer that has died is detected regardless. ``algorithm`` and ``patience`` are
    as in `Mesh`. ``encrypt``: True for all connections, False for none, None for those between
    machines. If ``shares_memory`` is false (the same on all), sockets are used even between ranks
    of one host.

    Raises `PeerLostError`, which names the peer that rejects or closes the connection, or does not
    answer; and `ClusterError`, within seconds, if the network does not let this rank reach a peer.
    """
    hosts = [split_address(peer)[0] for peer in peers]
    layout = find_layout(hosts, rank) if shares_memory else None
    wanted = set(find_neighbours(rank, len(peers)))
    if layout:
        wanted |= layout.find_neighbours(rank)
    joining = _Joining(server, peers, rank, token, connect_timeout or timeout, encrypt, wanted)
    try:
        connections = joining.wait()
    finally:
        joining.close()
    links = {other: Link(made, other, hosts[other], timeout) for other, made in connections.items()}
    mesh = Mesh(links, rank, len(peers), algorithm, patience, layout)
    try:
        mesh.calibrate()
    except BaseException:
        mesh.close()
        raise
    return mesh


def connects_to(rank: int, other: int, world_size: int) -> bool:
    """Return whether ``rank`` connects to ``other`` rather than the other way round.

    Every rank connects to the next one, so that it notices immediately if that one has died; in
    other pairs, and if there are only two ranks, the lower one connects.
    """
    if world_size > 2 and (rank - other) % world_size in (1, world_size - 1):
        return (rank + 1) % world_size == other
    return rank < other


class _Joining:
    def __init__(
        self,
        server: socket.socket,
        peers: Sequence[str],
        rank: int,
        token: str,
        timeout: float,
        encrypt: bool | None,
        wanted: set[int],
    ) -> None:
        self._peers, self._rank, self._token, self._encrypt = peers, rank, token, encrypt
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._closed = False
        self._lock = threading.Lock()
        self._unfinished: set[Stream] = set()
        self._results: queue.Queue[tuple[int, Stream | TfdistError]] = queue.Queue()
        self._made: dict[int, Stream] = {}
        self._wanted = wanted
        self._dialled = {other for other in wanted if connects_to(rank, other, len(peers))}
        self._acceptor = Acceptor(server, token, PURPOSE, self._welcome, encrypt=encrypt)
        for other in sorted(self._dialled):
            threading.Thread(target=self._dial, args=(other,), daemon=True).start()

    def wait(self) -> dict[int, Stream]:
        while self._made.keys() != self._wanted:
            try:
                other, result = self._results.get(timeout=_CHECK_SECONDS)
            except queue.Empty:
                self._check_peers()
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
        """Stop listening, and close connections that `wait` has not returned."""
        self._acceptor.close()
        with self._lock:
            self._closed = True
            rest = [*self._unfinished, *self._made.values()]
            while not self._results.empty():
                result = self._results.get()[1]
                rest += [] if isinstance(result, TfdistError) else [result]
        for stream in rest:
            stream.close()  # wakes a thread that waits for a greeting

    def _check_peers(self) -> None:
        """Raise an error immediately for a dead peer, and after the timeout for a missing one."""
        for other, stream in self._made.items():
            if _has_ended(stream):
                raise self._make_error(other, "closed the connection")
        late = self._wanted - self._made.keys()
        # The attempt to connect to a peer ends with a better message, but a moment later.
        grace = _CHECK_SECONDS * 10 if late & self._dialled else 0.0
        if time.monotonic() > self._deadline + grace:
            raise self._make_error(min(late), f"did not connect within {self._timeout:g} s")

    def _welcome(self, stream: Stream, other: int, is_dialled: bool = False) -> None:
        expected = self._dialled if is_dialled else self._wanted - self._dialled
        with self._lock:
            if not self._closed and other in expected:
                self._results.put((other, stream))
                return
        stream.close()

    def _dial(self, other: int) -> None:
        try:
            self._welcome(self._connect(other), other, is_dialled=True)
        except TfdistError as error:
            self._results.put((other, error))

    def _connect(self, other: int) -> Stream:
        """Connect, and retry while the other end has too many unauthenticated connections."""
        silent = f"did not answer within {self._timeout:g} s"
        while True:
            stream = self._reach(other)
            try:
                if not self._is_rejected(stream):
                    greet_as_client(stream, self._token, self._rank, PURPOSE, encrypt=self._encrypt)
                    return stream
                stream.close()
            except TimeoutError as error:
                stream.close()
                raise self._make_error(other, silent) from error
            except OSError as error:
                stream.close()
                raise self._make_error(other, f"closed the connection ({error})") from error
            finally:
                with self._lock:
                    self._unfinished.discard(stream)
            if self._closed or self._remaining() <= _RETRY_SECONDS:
                raise self._make_error(other, silent)
            time.sleep(_RETRY_SECONDS)

    def _reach(self, other: int) -> Stream:
        stream = dial(self._peers, self._rank, other, self._remaining())
        with self._lock:
            if not self._closed:
                self._unfinished.add(stream)
                return stream
        stream.close()
        raise self._make_error(other, "connected too late")

    def _is_rejected(self, stream: Stream) -> bool:
        """Wait until the other end begins; return whether it closed the connection instead.

        It may still be importing TensorFlow: its socket already accepts connections.
        """
        if (first := stream.peek(1, self._remaining())) is None:
            raise TimeoutError
        return first == b""

    def _remaining(self) -> float:
        return max(0.01, self._deadline - time.monotonic())

    def _make_error(self, other: int, reason: str) -> PeerLostError:
        return PeerLostError(other, split_address(self._peers[other])[0], reason)


def _has_ended(stream: Stream) -> bool:
    try:
        return stream.peek(1) == b""
    except OSError:
        return True
