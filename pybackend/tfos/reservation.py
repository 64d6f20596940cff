"""A list of nodes that register at a server, over authenticated connections."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pybackend.errors import ClusterError, InputError
from pybackend.job.codec import decode, encode
from pybackend.job.values import decode_value, encode_value
from pybackend.net.greeting import RejectedError
from pybackend.net.rendezvous import Acceptor, connect, listen, new_token
from pybackend.net.stream import Stream
from pybackend.tfos import util

TFOS_SERVER_PORT = "TFOS_SERVER_PORT"
TFOS_SERVER_HOST = "TFOS_SERVER_HOST"
_PURPOSE = "reservation"
_LONGEST_LINE = 1 << 24
_SECONDS = 30.0
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class ReservationRequest:
    """What a client wants; ``data`` is a value as `encode_value` writes it."""

    type: str
    data: str = ""


@dataclass(frozen=True)
class ReservationAnswer:
    """A value as `encode_value` writes it."""

    data: str


class Address(tuple[str, int]):
    """Host and port of a server, and the token that its clients prove."""

    token: str

    @classmethod
    def of(cls, host: str, port: int, token: str) -> Address:
        """The address of these."""
        made = cls((host, port))
        made.token = token
        return made


class Reservations:
    """What nodes have said of themselves; for any thread.

    Parameters
    ----------
    required
        How many nodes there will be.
    """

    def __init__(self, required: int) -> None:
        self.required = required
        self.lock = threading.RLock()
        self.reservations: list[Any] = []

    def add(self, meta: Any) -> None:
        """Add a node."""
        with self.lock:
            self.reservations.append(meta)

    def done(self) -> bool:
        """Whether all nodes are there."""
        return self.remaining() <= 0

    def get(self) -> list[Any]:
        """The nodes so far."""
        with self.lock:
            return list(self.reservations)

    def remaining(self) -> int:
        """How many nodes are missing."""
        with self.lock:
            return self.required - len(self.reservations)


class Server:
    """Takes in reservations.

    Parameters
    ----------
    count
        How many nodes there will be.

    Attributes
    ----------
    done
        Whether a client, or `stop`, has asked it to stop.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise InputError(f"`count` must be at least 1, not {count}")
        self.reservations = Reservations(count)
        self.done = False
        self._acceptor: Acceptor | None = None
        self._streams: list[Stream] = []

    def start(self) -> Address:
        """Listen, on a thread; returns the address for `Client`."""
        server = self.start_listening_socket()
        token = new_token()
        self._acceptor = Acceptor(server, token, _PURPOSE, self._welcome)
        return Address.of(self.get_server_ip(), server.getsockname()[1], token)

    def await_reservations(
        self, sc: Any = None, status: Mapping[str, Any] | None = None, timeout: float = 600
    ) -> list[Any]:
        """Wait for all nodes.

        Parameters
        ----------
        status
            Has an ``"error"`` as soon as there is no use in waiting.

        Raises
        ------
        ClusterError
            With that error, or if nodes are missing after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self.reservations.done():
            if "error" in (status or {}):
                raise ClusterError(f"the nodes do not start: {(status or {})['error']}")
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{self.reservations.remaining()} of {self.reservations.required} nodes did "
                    f"not register within {timeout:g} s: see the logs of the executors"
                )
            time.sleep(_LOOK_SECONDS)
        return self.reservations.get()

    def get_server_ip(self) -> str:
        """The host in TFOS_SERVER_HOST, or else the address of this machine."""
        return os.environ.get(TFOS_SERVER_HOST) or util.get_ip_address()

    def get_server_ports(self) -> list[int]:
        """The port in TFOS_SERVER_PORT, or all of a range such as 9997-9999; 0 is any."""
        text = os.environ.get(TFOS_SERVER_PORT, "0")
        first, _, last = text.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise InputError(f"{TFOS_SERVER_PORT} must be a port or a range, not {text!r}")
        return list(range(int(first), int(last or first) + 1))

    def start_listening_socket(self) -> socket.socket:
        """A socket on the first of the ports that is free.

        Raises
        ------
        ClusterError
            None is.
        """
        ports = self.get_server_ports()
        for port in ports:
            with contextlib.suppress(ClusterError):
                return listen(self.get_server_ip(), port)
        raise ClusterError(
            f"cannot listen at {self.get_server_ip()} on any port of {ports[0]} to {ports[-1]} "
            f"({TFOS_SERVER_HOST}, {TFOS_SERVER_PORT}): name an address of this machine, and ports "
            "that are free"
        )

    def stop(self) -> None:
        """Listen no more, and close all connections."""
        self.done = True
        if self._acceptor is not None:
            self._acceptor.close()
        for stream in self._streams:
            stream.close()

    def _welcome(self, stream: Stream, _: int) -> None:
        # Greetings are limited in number, conversations are not.
        threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: Stream) -> None:
        self._streams.append(stream)
        if self.done:
            stream.close()
            return
        with contextlib.suppress(OSError, ValueError), contextlib.closing(stream):
            while line := stream.read_line(_LONGEST_LINE):
                request = decode(line, ReservationRequest)
                answer = ReservationAnswer(encode_value(self._answer(request)))
                stream.send_all(encode(answer).encode() + b"\n", _SECONDS)
                if request.type == "STOP":
                    threading.Thread(target=self.stop, daemon=True).start()

    def _answer(self, request: ReservationRequest) -> Any:
        if request.type == "REG":
            self.reservations.add(decode_value(request.data))
            return "OK"
        if request.type == "QUERY":
            return self.reservations.done()
        if request.type == "QINFO":
            return self.reservations.get()
        return "OK" if request.type == "STOP" else "ERR"


class Client:
    """A node's connection to a `Server`.

    Parameters
    ----------
    server_addr
        What `Server.start` has returned: it has the token of the server, too.

    Raises
    ------
    InputError
        It is just a host and a port.
    OSError
        No server is there, or not that one.
    """

    def __init__(self, server_addr: Address) -> None:
        self.server_addr = server_addr
        host, port = server_addr
        token = getattr(server_addr, "token", None)
        if token is None:
            raise InputError(
                f"`server_addr` {tuple(server_addr)} has no token: pass what Server.start() has "
                "returned. Scripts of other processes cannot connect by host and port"
            )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._stream = _connect(address, token)

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def register(self, reservation: Any) -> Any:
        """Register a node: plain data, as `barrier_run` returns them."""
        return self._request("REG", reservation)

    def get_reservations(self) -> Any:
        """The nodes so far."""
        return self._request("QINFO")

    def await_reservations(self) -> Any:
        """All nodes, as soon as they are there."""
        while not self._request("QUERY"):
            time.sleep(_LOOK_SECONDS)
        return self.get_reservations()

    def request_stop(self) -> Any:
        """Ask the server to stop."""
        return self._request("STOP")

    def _request(self, kind: str, data: Any = None) -> Any:
        request = ReservationRequest(kind, encode_value(data))
        self._stream.send_all(encode(request).encode() + b"\n", _SECONDS)
        line = self._stream.read_line(_LONGEST_LINE, _SECONDS)
        if not line:
            raise ConnectionError("the server has closed the connection")
        return decode_value(decode(line, ReservationAnswer).data)


def _connect(address: str, token: str) -> Stream:
    """Connect; tried again while the server has no room for so many at once."""
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            return connect(address, token, 0, _PURPOSE, _SECONDS)
        except (ConnectionRefusedError, RejectedError):
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_SECONDS)
