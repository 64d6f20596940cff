"""The greeting: both ends prove the token, and nothing is read before the proof."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pybackend.errors import ClusterError
from pybackend.net.rendezvous import (
    Doorkeeper,
    address_of,
    greet_as_client,
    greet_as_server,
    listen,
    new_token,
)

TOKEN = new_token()
NONCE = 32
GREETING = 32 + 4 + 32  # nonce, rank, proof


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection, the connecting one first."""
    with (
        listen("127.0.0.1") as server,
        socket.create_connection(server.getsockname(), timeout=30) as client,
    ):
        accepted, _ = server.accept()
        with accepted:
            yield client, accepted


def beside(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Run a function on a thread."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work, *arguments)
    pool.shutdown(wait=False)
    return future


def read(connection: socket.socket, size: int) -> bytes:
    """Exactly ``size`` bytes, fewer only where the other end closes."""
    received = b""
    while len(received) < size and (part := connection.recv(size - len(received))):
        received += part
    return received


def wait_until_closed(connection: socket.socket) -> None:
    """Read what the other end still sends; `TimeoutError` where it does not close."""
    with suppress(ConnectionResetError):
        while connection.recv(4096):
            pass


Welcomed = queue.Queue[tuple[int, socket.socket]]


@contextmanager
def door(crowd: int = 64) -> Iterator[tuple[tuple[str, int], Doorkeeper, Welcomed]]:
    """A doorkeeper with the token: its address, itself, and whom it lets in."""
    welcomed: Welcomed = queue.Queue()
    server = listen("127.0.0.1")
    address = server.getsockname()
    keeper = Doorkeeper(
        server, TOKEN, "test", lambda connection, rank: welcomed.put((rank, connection)), crowd
    )
    try:
        yield address, keeper, welcomed
    finally:
        keeper.close()
        while not welcomed.empty():
            welcomed.get()[1].close()


def test_tokens_are_long_and_new_each_time() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert {len(bytes.fromhex(token)) for token in tokens} == {32}


@pytest.mark.parametrize("rank", [0, 1, 4095])
def test_both_ends_that_know_the_token_agree_on_the_rank(rank: int) -> None:
    with connected() as (client, accepted):
        server = beside(greet_as_server, accepted, TOKEN, "test")
        greet_as_client(client, TOKEN, rank, "test")
        assert server.result() == rank


@pytest.mark.parametrize(
    ("token", "purpose"),
    [(new_token(), "test"), ("", "test"), (TOKEN[:-1], "test"), (TOKEN, "other")],
    ids=["another token", "no token", "a part of the token", "another purpose"],
)
def test_a_client_without_the_token_is_refused_and_learns_nothing(token: str, purpose: str) -> None:
    with connected() as (client, accepted):
        server = beside(greet_as_server, accepted, TOKEN, "test")
        stranger = beside(greet_as_client, client, token, 0, purpose)
        with pytest.raises(ConnectionError, match="does not know this job's token"):
            server.result()
        accepted.close()
        with pytest.raises(OSError):
            stranger.result()


def test_a_server_without_the_token_is_refused_by_the_client() -> None:
    with connected() as (client, accepted):

        def pretend() -> None:
            accepted.sendall(bytes(NONCE))
            read(accepted, GREETING)
            accepted.sendall(bytes(32))

        pretender = beside(pretend)
        with pytest.raises(ConnectionError, match="listening end does not know"):
            greet_as_client(client, TOKEN, 0, "test")
        pretender.result()


def test_a_server_that_echoes_the_clients_own_proof_is_refused() -> None:
    with connected() as (client, accepted):

        def pretend() -> None:
            accepted.sendall(bytes(NONCE))
            accepted.sendall(read(accepted, GREETING)[-32:])

        pretender = beside(pretend)
        with pytest.raises(ConnectionError, match="listening end does not know"):
            greet_as_client(client, TOKEN, 0, "test")
        pretender.result()


def record(rank: int) -> tuple[bytes, bytes, bytes]:
    """A real greeting as an eavesdropper sees it: challenge, client's answer, server's answer."""
    with connected() as (client, near), connected() as (far, accepted):
        server = beside(greet_as_server, accepted, TOKEN, "test")
        greeter = beside(greet_as_client, client, TOKEN, rank, "test")
        challenge = read(far, NONCE)
        near.sendall(challenge)
        answer = read(near, GREETING)
        far.sendall(answer)
        proof = read(far, 32)
        near.sendall(proof)
        greeter.result()
        assert server.result() == rank
    return challenge, answer, proof


def test_a_recorded_greeting_opens_no_door() -> None:
    _, answer, _ = record(3)
    with connected() as (client, accepted):
        server = beside(greet_as_server, accepted, TOKEN, "test")
        read(client, NONCE)
        client.sendall(answer)
        with pytest.raises(ConnectionError, match="does not know this job's token"):
            server.result()


def test_a_recorded_server_convinces_no_client() -> None:
    challenge, _, proof = record(3)
    with connected() as (client, accepted):
        accepted.sendall(challenge)
        accepted.sendall(proof)
        with pytest.raises(ConnectionError, match="listening end does not know"):
            greet_as_client(client, TOKEN, 3, "test")


def test_a_greeting_with_another_rank_is_refused() -> None:
    with connected() as (client, near), connected() as (far, accepted):
        server = beside(greet_as_server, accepted, TOKEN, "test")
        greeter = beside(greet_as_client, client, TOKEN, 1, "test")
        near.sendall(read(far, NONCE))
        answer = read(near, GREETING)
        far.sendall(answer[:NONCE] + struct.pack(">i", 2) + answer[-32:])
        with pytest.raises(ConnectionError, match="does not know this job's token"):
            server.result()
        near.close()
        with pytest.raises(OSError):
            greeter.result()


@settings(deadline=None)
@given(st.binary(min_size=GREETING + 1, max_size=GREETING + 100))
def test_no_bytes_are_a_proof_and_none_beyond_the_greeting_are_read(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        with pytest.raises(ConnectionError, match="turned away"):
            greet_as_server(ours, TOKEN, "test")
        assert ours.recv(200) == sent[GREETING:]


def test_a_greeting_that_arrives_byte_by_byte_is_understood() -> None:
    with connected() as (client, near), connected() as (far, accepted):
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = beside(greet_as_server, accepted, TOKEN, "test")
        greeter = beside(greet_as_client, client, TOKEN, 5, "test")
        near.sendall(read(far, NONCE))
        for byte in read(near, GREETING):
            far.sendall(bytes([byte]))
        near.sendall(read(far, 32))
        greeter.result()
        assert server.result() == 5


def test_a_silent_server_is_given_up_after_the_patience() -> None:
    with connected() as (client, _):
        client.settimeout(None)
        with pytest.raises(TimeoutError):
            greet_as_client(client, TOKEN, 0, "test", patience=0.05)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n"])
def test_a_client_that_closes_midway_is_told_so(sent: bytes) -> None:
    with connected() as (client, accepted):
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="closed the connection during the greeting"):
            greet_as_server(accepted, TOKEN, "test")


def loopbacks() -> list[str]:
    """Names of this machine for itself; it need not have IPv6."""
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return ["127.0.0.1", "localhost", "::1"]
    return ["127.0.0.1", "localhost"]


@pytest.mark.parametrize("host", loopbacks())
def test_listening_binds_a_port_of_its_own_on_that_address(host: str) -> None:
    with listen(host) as one, listen(host) as other:
        assert address_of(one) != address_of(other)
        where, _, port = address_of(one).rpartition(":")
        assert (where.startswith("[")) == (one.family == socket.AF_INET6)
        with socket.create_connection((where.strip("[]"), int(port)), timeout=30):
            pass


def test_listening_on_a_foreign_address_is_a_cluster_error() -> None:
    with pytest.raises(ClusterError, match=r"on '192\.0\.2\.1'.* an address of this machine"):
        listen("192.0.2.1")  # an address that belongs to nobody (RFC 5737)


def test_the_door_lets_in_who_knows_the_token() -> None:
    with door() as (address, _, welcomed):
        clients = [socket.create_connection(address, timeout=30) for _ in range(5)]
        for rank, client in enumerate(clients):
            greet_as_client(client, TOKEN, rank, "test")
        for rank, client in enumerate(clients):
            client.sendall(bytes([rank]))
            client.close()
        said = {}
        for _ in clients:
            rank, connection = welcomed.get(timeout=30)
            with connection:
                said[rank] = read(connection, 2)
    assert said == {rank: bytes([rank]) for rank in range(5)}


def test_strangers_are_turned_away_and_delay_nobody() -> None:
    with door() as (address, _, welcomed):
        silent = [socket.create_connection(address, timeout=30) for _ in range(10)]
        rude = socket.create_connection(address, timeout=30)
        rude.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(GREETING))
        wrong = socket.create_connection(address, timeout=30)
        with pytest.raises(OSError):
            greet_as_client(wrong, new_token(), 0, "test")
        wait_until_closed(rude)
        with socket.create_connection(address, timeout=30) as friend:
            greet_as_client(friend, TOKEN, 7, "test")
            rank, connection = welcomed.get(timeout=30)
            connection.close()
        assert rank == 7
        assert welcomed.empty()
        for connection in [*silent, rude, wrong]:
            connection.close()


def test_a_crowd_of_strangers_beyond_the_limit_is_not_even_heard() -> None:
    with door(crowd=2) as (address, _, _):
        first = [socket.create_connection(address, timeout=30) for _ in range(2)]
        challenges = [read(connection, NONCE) for connection in first]
        with socket.create_connection(address, timeout=30) as third:
            assert read(third, 1) == b""
        assert [len(c) for c in challenges] == [NONCE, NONCE]
        for connection in first:
            connection.close()


def test_a_closed_door_listens_no_more_and_keeps_who_is_in() -> None:
    with (
        door() as (address, keeper, welcomed),
        socket.create_connection(address, timeout=30) as friend,
    ):
        greet_as_client(friend, TOKEN, 1, "test")
        _, connection = welcomed.get(timeout=30)
        keeper.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=30)
        friend.sendall(b"still here")
        with connection:
            assert read(connection, 10) == b"still here"


def test_the_thread_of_a_closed_door_ends() -> None:
    before = set(threading.enumerate())
    with door() as (_, keeper, _):
        threads = set(threading.enumerate()) - before
        assert [thread.name for thread in threads] == ["tfdist-door"]
        keeper.close()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
