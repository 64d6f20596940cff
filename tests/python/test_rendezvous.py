"""Listening sockets, and the acceptor that accepts only clients with the token."""

from __future__ import annotations

import errno
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any
from unittest import mock

import pytest

from pybackend.core.errors import ClusterError
from pybackend.core.machine import own_address
from pybackend.core.net import authentication, rendezvous
from pybackend.core.net.authentication import greet_as_client, new_token
from pybackend.core.net.rendezvous import Acceptor, address_of, listen, reserve
from pybackend.core.net.stream import Stream

TOKEN = new_token()
LONG = 30.0
NONCE = 32 + 1  # and request
GREETING = 32 + 4 + 1 + 32  # nonce, rank, request, proof


def wait_until_closed(stream: Stream) -> None:
    """Read what the other end still sends; `TimeoutError` if it does not close."""
    with suppress(ConnectionError):
        while True:
            stream.read_exactly(1, LONG)


Welcomed = queue.Queue[tuple[int, Stream]]


@contextmanager
def accepting(most_greetings: int = 64) -> Iterator[tuple[tuple[str, int], Acceptor, Welcomed]]:
    """Start an acceptor with the token; yield its address, itself, and the accepted clients."""
    welcomed: Welcomed = queue.Queue()
    server = listen("127.0.0.1")
    address = server.getsockname()
    acceptor = Acceptor(
        server, TOKEN, "test", lambda stream, rank: welcomed.put((rank, stream)), most_greetings
    )
    try:
        yield address, acceptor, welcomed
    finally:
        acceptor.close()
        while not welcomed.empty():
            welcomed.get()[1].close()


def test_tokens_are_long_and_new_each_time() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert {len(bytes.fromhex(token)) for token in tokens} == {32}


def loopbacks() -> list[str]:
    """Return the names of this machine for itself; it may lack IPv6."""
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return ["127.0.0.1", "localhost", "::1"]
    return ["127.0.0.1", "localhost"]


@pytest.mark.parametrize("host", loopbacks())
def test_each_listener_binds_another_port_on_that_address(host: str) -> None:
    with listen(host) as one, listen(host) as other:
        assert address_of(one) != address_of(other)
        name, _, port = address_of(one).rpartition(":")
        assert (name.startswith("[")) == (one.family == socket.AF_INET6)
        with socket.create_connection((name.strip("[]"), int(port)), timeout=30):
            pass


def test_listening_on_a_foreign_address_is_a_cluster_error() -> None:
    with pytest.raises(ClusterError, match=r"on '192\.0\.2\.1'.* an address of this machine"):
        listen("192.0.2.1")  # an unused address (RFC 5737)


@pytest.mark.parametrize("opens", [listen, reserve])
def test_too_many_open_files_say_nothing_about_the_host(
    opens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.EMFILE, "too many open files")
    monkeypatch.setattr(socket, "socket", mock.Mock(side_effect=full))
    with pytest.raises(OSError, match="too many open files") as caught:
        opens("127.0.0.1")
    assert caught.value.__cause__ is None  # it once was its own cause: programs followed it forever


def test_a_socket_that_cannot_listen_is_closed() -> None:
    with reserve("127.0.0.1") as other:
        other.listen()
        with pytest.raises(ClusterError, match="another process uses it"):
            listen("127.0.0.1", other.getsockname()[1])
    made = []
    own = socket.socket

    def fails(*args: Any) -> Any:
        made.append(own(*args))
        wrapped = mock.Mock(wraps=made[0])
        wrapped.listen = mock.Mock(side_effect=OSError(errno.EADDRINUSE, "in use"))
        return wrapped

    with mock.patch.object(socket, "socket", fails), pytest.raises(ClusterError):
        listen("127.0.0.1")
    assert made[0].fileno() == -1


def test_the_acceptor_lets_in_clients_that_know_the_token() -> None:
    with accepting() as (address, _, welcomed):
        clients = [Stream.connect(address, 30) for _ in range(5)]
        for rank, client in enumerate(clients):
            greet_as_client(client, TOKEN, rank, "test")
        for rank, client in enumerate(clients):
            client.send_all(bytes([rank]))
            client.close()
        said = {}
        for _ in clients:
            rank, stream = welcomed.get(timeout=30)
            with closing(stream):
                said[rank] = stream.read_exactly(1, LONG)
                assert stream.peek(1, LONG) == b""
    assert said == {rank: bytes([rank]) for rank in range(5)}


def test_strangers_are_rejected_and_delay_nobody() -> None:
    with accepting() as (address, _, welcomed), ExitStack() as stack:

        def connect() -> Stream:
            return stack.enter_context(closing(Stream.connect(address, 30)))

        for _ in range(10):
            connect()  # and sends nothing
        rude = connect()
        rude.send_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(GREETING))
        with pytest.raises(OSError):
            greet_as_client(connect(), new_token(), 0, "test")
        wait_until_closed(rude)
        greet_as_client(connect(), TOKEN, 7, "test")
        rank, stream = welcomed.get(timeout=30)
        stream.close()
        assert rank == 7
        assert welcomed.empty()


@pytest.mark.parametrize("said", [b"", bytes(GREETING - 1)], ids=["silent", "half a greeting"])
def test_a_greeting_that_does_not_end_is_given_up(said: bytes, monkeypatch: Any) -> None:
    monkeypatch.setattr(authentication, "GREETING_SECONDS", 0.2)
    with (
        accepting() as (address, acceptor, welcomed),
        closing(Stream.connect(address, LONG)) as stranger,
    ):
        stranger.send_all(said)
        wait_until_closed(stranger)
        assert acceptor.rejected == 1
        assert welcomed.empty()


def test_strangers_beyond_the_limit_are_closed_at_once() -> None:
    with accepting(most_greetings=2) as (address, _, _), ExitStack() as stack:
        first = [stack.enter_context(closing(Stream.connect(address, 30))) for _ in range(2)]
        for stream in first:
            assert len(stream.read_exactly(NONCE, LONG)) == NONCE
        third = stack.enter_context(closing(Stream.connect(address, 30)))
        assert third.peek(1, LONG) == b""


def test_a_closed_acceptor_stops_listening_and_keeps_connections_open() -> None:
    with (
        accepting() as (address, acceptor, welcomed),
        closing(Stream.connect(address, 30)) as friend,
    ):
        greet_as_client(friend, TOKEN, 1, "test")
        _, stream = welcomed.get(timeout=30)
        acceptor.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=30)
        friend.send_all(b"still here")
        with closing(stream):
            assert stream.read_exactly(10, LONG) == b"still here"


def test_the_thread_of_a_closed_acceptor_ends() -> None:
    before = set(threading.enumerate())
    with accepting() as (_, acceptor, _):
        threads = set(threading.enumerate()) - before
        assert [thread.name for thread in threads] == ["tfdist-accept"]
        acceptor.close()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_own_address_is_on_the_way_to_the_peer(host: str) -> None:
    assert own_address(host) in ("127.0.0.1", "::1")


def test_a_name_without_an_address_cannot_be_reached() -> None:
    assert own_address("nowhere.invalid") is None


def test_a_connection_that_fails_at_once_stops_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [ConnectionAbortedError()]

    class Failing(Stream):
        @classmethod
        def accept(cls, server: socket.socket) -> Stream:
            stream = Stream.accept(server)
            if failures:
                stream.close()
                raise failures.pop()
            return stream

    monkeypatch.setattr(rendezvous, "Stream", Failing)
    with accepting() as (address, _, welcomed), ExitStack() as stack:
        stack.enter_context(closing(Stream.connect(address, LONG)))
        friend = stack.enter_context(closing(Stream.connect(address, LONG)))
        greet_as_client(friend, TOKEN, 3, "test")
        rank, stream = welcomed.get(timeout=LONG)
        stream.close()
        assert rank == 3


def test_a_held_port_is_given_to_nobody_but_a_server_that_asks_for_it() -> None:
    with reserve("127.0.0.1") as held, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(held.getsockname())
        server.listen()
        socket.create_connection(held.getsockname(), 5).close()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(held.getsockname())


def test_no_port_is_held_on_an_address_of_another_machine() -> None:
    with pytest.raises(ClusterError, match="must name an address of this machine"):
        reserve("192.0.2.1")
