"""All-reduce over a ring of TCP connections, on numpy buffers.

The reduce-scatter and all-gather of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations" (2009): every rank sends 2 (N - 1) / N of the buffer, whatever N.
Each segment is summed along one chain of ranks and then passed on, so all ranks hold the very
same bits.
"""

from __future__ import annotations

import queue
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.errors import ClusterError, PeerLostError
from pybackend.rendezvous import Doorkeeper, greet_as_client

Array = npt.NDArray[Any]

_PURPOSE = "ring"
_SOCKET_BUFFER = 4 << 20
_CHUNK = 1 << 20
# Before each exchange: its number, kind, element type and size in bytes.
_HEADER = struct.Struct(">Qc3sQ")


class Ring:
    """One rank's place in the ring. Not thread-safe: one collective at a time.

    Parameters
    ----------
    successor, predecessor
        Connected, authenticated sockets to rank + 1 and from rank - 1.
    rank, hosts
        This rank, and every rank's host (for messages).
    timeout
        Seconds of silence after which a peer counts as lost.
    """

    def __init__(
        self,
        successor: socket.socket,
        predecessor: socket.socket,
        rank: int,
        hosts: Sequence[str],
        timeout: float,
    ) -> None:
        self.rank = rank
        self.world_size = len(hosts)
        self._hosts = list(hosts)
        self._timeout = timeout
        self._next = successor
        self._previous = predecessor
        self._scratch = np.empty(0, np.uint8)
        self._count = 0
        for connection in (successor, predecessor):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
            connection.setblocking(False)

    def all_reduce(self, buffer: Array) -> None:
        """Replace a contiguous 1-D buffer by its sum over all ranks, bitwise equal on each.

        Raises
        ------
        PeerLostError
            At once where a neighbour closes its connection, after ``timeout`` where it is silent.
        """
        self._agree(b"+", buffer)
        size, rank, itemsize = self.world_size, self.rank, buffer.itemsize
        bounds = [len(buffer) * k // size for k in range(size + 1)]
        raw = _bytes_of(buffer)
        largest = max(bounds[k + 1] - bounds[k] for k in range(size))
        scratch = self._scratch_of(largest * itemsize)

        def part(k: int) -> memoryview:
            k %= size
            return raw[bounds[k] * itemsize : bounds[k + 1] * itemsize]

        for step in range(size - 1):
            k = (rank - step - 1) % size
            segment = buffer[bounds[k] : bounds[k + 1]]
            received = scratch[: segment.nbytes]
            self._exchange(part(rank - step), _bytes_of(received))
            np.add(segment, received.view(buffer.dtype), out=segment)
        for step in range(size - 1):
            self._exchange(part(rank + 1 - step), part(rank - step))

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Replace a contiguous buffer by that of rank ``root``; errors as in `all_reduce`."""
        self._agree(b"=", buffer)
        raw = _bytes_of(buffer)
        nothing = memoryview(bytearray())
        first = self.rank == root
        last = (self.rank + 1) % self.world_size == root
        # In chunks, so that every rank forwards one while it receives the next.
        for start in range(0, len(raw), _CHUNK):
            chunk = raw[start : start + _CHUNK]
            if not first:
                self._exchange(nothing, chunk)
            if not last:
                self._exchange(chunk, nothing)

    def close(self) -> None:
        """Close both connections."""
        self._next.close()
        self._previous.close()

    def _agree(self, kind: bytes, buffer: Array) -> None:
        """Make sure that the neighbour is at the same exchange: else sums would be garbage."""
        self._count += 1
        ours = _HEADER.pack(self._count, kind, buffer.dtype.str.encode()[-3:], buffer.nbytes)
        theirs = bytearray(_HEADER.size)
        self._exchange(memoryview(ours), memoryview(theirs))
        if bytes(theirs) != ours:
            before = (self.rank - 1) % self.world_size
            raise ClusterError(
                f"workers {before} and {self.rank} are at different exchanges "
                f"({_HEADER.unpack(theirs)} and {_HEADER.unpack(ours)}: number, kind, type, bytes):"
                " the model, a callback or a train_step does something else on one of them"
            )

    def _scratch_of(self, size: int) -> Array:
        if self._scratch.size < size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch[:size]

    def _exchange(self, outgoing: memoryview, incoming: memoryview) -> None:
        """Send to the successor while receiving from the predecessor."""
        sent, received = 0, 0
        deadline = None
        while sent < len(outgoing) or received < len(incoming):
            moved = 0
            if sent < len(outgoing):
                moved += (count := self._send(outgoing[sent : sent + _CHUNK]))
                sent += count
            if received < len(incoming):
                moved += (count := self._receive(incoming[received:]))
                received += count
            if moved:
                deadline = None
            else:
                deadline = deadline or time.monotonic() + self._timeout
                self._wait(received < len(incoming), sent < len(outgoing), deadline)

    def _send(self, data: memoryview) -> int:
        try:
            return self._next.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(self.rank + 1, "closed the connection") from error

    def _receive(self, into: memoryview) -> int:
        try:
            count = self._previous.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(self.rank - 1, "closed the connection") from error
        if count == 0:
            raise self._lost(self.rank - 1, "closed the connection")
        return count

    def _wait(self, reading: bool, writing: bool, deadline: float) -> None:
        # poll, not select: select cannot take descriptors above 1023.
        poller = select.poll()
        if reading:
            poller.register(self._previous, select.POLLIN)
        if writing:
            poller.register(self._next, select.POLLOUT)
        remaining = max(0.0, deadline - time.monotonic())
        if not poller.poll(remaining * 1000):
            peer = self.rank - 1 if reading else self.rank + 1
            raise self._lost(peer, f"was silent for {self._timeout:g} s")

    def _lost(self, peer: int, reason: str) -> PeerLostError:
        peer %= self.world_size
        return PeerLostError(peer, self._hosts[peer], reason)


def join_ring(
    server: socket.socket, peers: Sequence[str], rank: int, token: str, timeout: float
) -> Ring:
    """Connect to the next rank, be connected to by the previous one, and close ``server``.

    Parameters
    ----------
    server
        This rank's listening socket, whose address is ``peers[rank]``.
    peers
        ``host:port`` per rank; all are listening already.
    token
        The job's secret; strangers are turned away.
    timeout
        Seconds to wait for a peer.

    Raises
    ------
    PeerLostError
        Names the peer that refuses, closes, or is silent.
    """
    size = len(peers)
    hosts = [_split(peer)[0] for peer in peers]
    before, after = (rank - 1) % size, (rank + 1) % size
    arrived: queue.Queue[socket.socket] = queue.Queue()

    def welcome(connection: socket.socket, who: int) -> None:
        if who == before:
            arrived.put(connection)
        else:
            connection.close()

    door = Doorkeeper(server, token, _PURPOSE, welcome)
    try:
        successor = _connect(peers[after], after, rank, token, timeout)
        try:
            predecessor = _await(arrived, successor, hosts, before, after, timeout)
        except BaseException:
            successor.close()
            raise
    finally:
        door.close()
        while not arrived.empty():
            arrived.get().close()
    return Ring(successor, predecessor, rank, hosts, timeout)


def _connect(peer: str, number: int, rank: int, token: str, timeout: float) -> socket.socket:
    host, port = _split(peer)
    try:
        connection = socket.create_connection((host, port), timeout=timeout)
    except OSError as error:
        raise PeerLostError(number, host, f"cannot be reached at {peer} ({error})") from error
    try:
        greet_as_client(connection, token, rank, _PURPOSE, patience=timeout)
    except TimeoutError as error:
        connection.close()
        raise PeerLostError(number, host, f"did not answer within {timeout:g} s") from error
    except OSError as error:
        connection.close()
        raise PeerLostError(number, host, f"closed the connection ({error})") from error
    return connection


def _await(
    arrived: queue.Queue[socket.socket],
    successor: socket.socket,
    hosts: Sequence[str],
    before: int,
    after: int,
    timeout: float,
) -> socket.socket:
    """Wait for the previous rank; a successor that dies meanwhile ends the wait at once."""
    deadline = time.monotonic() + timeout
    successor.setblocking(False)
    while True:
        try:
            return arrived.get(timeout=0.1)
        except queue.Empty:
            pass
        try:
            closed = successor.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            closed = False
        except OSError:
            closed = True
        if closed:
            raise PeerLostError(after, hosts[after], "closed the connection")
        if time.monotonic() > deadline:
            raise PeerLostError(before, hosts[before], f"did not connect within {timeout:g} s")


def _bytes_of(array: Array) -> memoryview:
    """The memory of a contiguous array; an empty array has none that could be viewed."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def _split(peer: str) -> tuple[str, int]:
    host, _, port = peer.rpartition(":")
    return host.strip("[]"), int(port)
