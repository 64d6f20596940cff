"""Registration of nodes with a server, over authenticated connections."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

from pybackend.core.errors import ClusterError, InputError, SerializationError
from pybackend.core.job.value_codec import decode_value, encode_value
from pybackend.core.net.authentication import new_token
from pybackend.core.net.rendezvous import Acceptor, connect, listen
from pybackend.core.net.stream import Stream
from pybackend.tfos import util
from pybackend.tfos.feed.dialog import connect_patiently

TFOS_SERVER_PORT = "TFOS_SERVER_PORT"
TFOS_SERVER_HOST = "TFOS_SERVER_HOST"
_PURPOSE = "reservation"
_LONGEST_LINE = 1 << 24
_SECONDS = 30.0
_LOOK_SECONDS = 0.1


class Address(tuple[str, int]):
    """Host and port of a server, and the token that its clients must know."""

    token: str

    @classmethod
    def of(cls, host: str, port: int, token: str) -> Address:
        made = cls((host, port))
        made.token = token
        return made


class Reservations:
    """Descriptions of the registered nodes, of which ``required`` are expected; thread-safe."""

    def __init__(self, required: int) -> None:
        self.required = required
        self.reservations: list[Any] = []

    def add(self, meta: Any) -> None:
        self.reservations.append(meta)

    def done(self) -> bool:
        return self.remaining() <= 0

    def get(self) -> list[Any]:
        return list(self.reservations)

    def remaining(self) -> int:
        """Return the number of missing nodes."""
        return self.required - len(self.reservations)


class Server:
    """Server with which ``count`` nodes register.

    ``done`` becomes True when a client, or `stop`, has requested that the server stop.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise InputError(f"`count` must be at least 1, not {count}")
        self.reservations = Reservations(count)
        self.done = False
        self._acceptor: Acceptor | None = None
        self._streams: list[Stream] = []

    def start(self) -> Address:
        """Listen in a thread; return the address for `Client`."""
        server = self.start_listening_socket()
        token = new_token()
        self._acceptor = Acceptor(server, token, _PURPOSE, self._welcome)
        return Address.of(self.get_server_ip(), server.getsockname()[1], token)

    def await_reservations(
        self, sc: Any = None, status: Mapping[str, Any] | None = None, timeout: float = 600
    ) -> list[Any]:
        """Wait for all nodes.

        ``status`` contains ``"error"`` as soon as it is known that the nodes cannot start. Raises
        `ClusterError` then, or if nodes are missing after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self.reservations.done():
            if "error" in (status or {}):
                raise ClusterError(f"the nodes failed to start: {(status or {})['error']}")
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{self.reservations.remaining()} of {self.reservations.required} nodes did "
                    f"not register within {timeout:g} s: see the logs of the executors"
                )
            time.sleep(_LOOK_SECONDS)
        return self.reservations.get()

    def get_server_ip(self) -> str:
        """Return the host in TFOS_SERVER_HOST, or else the address of this machine."""
        return os.environ.get(TFOS_SERVER_HOST) or util.get_ip_address()

    def get_server_ports(self) -> list[int]:
        """Return the ports in TFOS_SERVER_PORT: one, or a range like 9997-9999; 0 for any port."""
        text = os.environ.get(TFOS_SERVER_PORT, "0")
        first, _, last = text.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise InputError(f"{TFOS_SERVER_PORT} must be a port or a range, not {text!r}")
        return list(range(int(first), int(last or first) + 1))

    def start_listening_socket(self) -> socket.socket:
        """Return a socket on the first free port. Raises `ClusterError` if no port is free."""
        ports = self.get_server_ports()
        for port in ports:
            with suppress(ClusterError):
                return listen(self.get_server_ip(), port)
        raise ClusterError(
            f"cannot listen at {self.get_server_ip()} on any port of {ports[0]} to {ports[-1]}: "
            f"set {TFOS_SERVER_HOST} to an address of this machine, and {TFOS_SERVER_PORT} to free "
            "ports"
        )

    def stop(self) -> None:
        self.done = True
        if self._acceptor is not None:
            self._acceptor.close()
        for stream in self._streams:
            stream.close()

    def _welcome(self, stream: Stream, _: int) -> None:
        # The acceptor limits the number of handshakes, not of connections.
        threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: Stream) -> None:
        self._streams.append(stream)
        if self.done:
            stream.close()
            return
        with (
            suppress(OSError, ValueError, SerializationError),
            closing(stream),
        ):
            while (request := _receive(stream)) is not None:
                kind, data = request
                _send(stream, self._answer(kind, data))
                if kind == "STOP":
                    threading.Thread(target=self.stop, daemon=True).start()

    def _answer(self, kind: str, data: Any) -> Any:
        if kind == "REG":
            self.reservations.add(data)
        elif kind == "QUERY":
            return self.reservations.done()
        elif kind == "QINFO":
            return self.reservations.get()
        return "OK" if kind in ("REG", "STOP") else "ERR"


class Client:
    """A node's connection to a `Server`, at the address that `Server.start` returned.

    Raises `InputError` if the address has no token, and `OSError` if no server, or a different one,
    listens there.
    """

    def __init__(self, server_addr: Address) -> None:
        self.server_addr = server_addr
        host, port = server_addr
        token = getattr(server_addr, "token", None)
        if token is None:
            raise InputError(
                f"`server_addr` {tuple(server_addr)} has no token: pass the address that "
                "Server.start() returned. A host and a port alone are not enough to connect"
            )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._stream = connect_patiently(lambda left: connect(address, token, 0, _PURPOSE, left))

    def close(self) -> None:
        self._stream.close()

    def register(self, reservation: Any) -> Any:
        """Register a node as plain data, with types that `barrier_run` can return."""
        return self._request("REG", reservation)

    def get_reservations(self) -> Any:
        return self._request("QINFO")

    def await_reservations(self) -> Any:
        while not self._request("QUERY"):
            time.sleep(_LOOK_SECONDS)
        return self.get_reservations()

    def request_stop(self) -> Any:
        return self._request("STOP")

    def _request(self, kind: str, data: Any = None) -> Any:
        _send(self._stream, [kind, data])
        answer = _receive(self._stream, _SECONDS)
        if answer is None:
            raise ConnectionError("the server closed the connection")
        return answer


def _send(stream: Stream, value: Any) -> None:
    """Send a value as a line of JSON."""
    stream.send_all(encode_value(value).encode() + b"\n", _SECONDS)


def _receive(stream: Stream, seconds: float | None = None) -> Any:
    """Return the next value; None if the other end has closed the connection."""
    line = stream.read_line(_LONGEST_LINE, seconds)
    return decode_value(line.decode()) if line else None
