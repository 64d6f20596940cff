"""The greeting: both ends prove the token, and nothing is read before the proof."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pybackend.errors import ClusterError
from pybackend.net.rendezvous import (
    Acceptor,
    address_of,
    greet_as_client,
    greet_as_server,
    listen,
    new_token,
    own_address,
)
from pybackend.net.stream import Stream

TOKEN = new_token()
LONG = 30.0
NONCE = 32
GREETING = 32 + 4 + 32  # nonce, rank, proof


@contextmanager
def connected() -> Iterator[tuple[Stream, Stream]]:
    """Both ends of a TCP connection, the connecting one first."""
    with (
        listen("127.0.0.1") as server,
        closing(Stream.connect(server.getsockname(), 30)) as client,
        closing(Stream.accept(server)) as accepted,
    ):
        yield client, accepted


def beside(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Run a function on a thread."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work, *arguments)
    pool.shutdown(wait=False)
    return future


def wait_until_closed(stream: Stream) -> None:
    """Read what the other end still sends; `TimeoutError` if it does not close."""
    with suppress(ConnectionError):
        while True:
            stream.read_exactly(1, LONG)


Welcomed = queue.Queue[tuple[int, Stream]]


@contextmanager
def accepting(most_greetings: int = 64) -> Iterator[tuple[tuple[str, int], Acceptor, Welcomed]]:
    """An acceptor with the token: its address, itself, and whom it lets in."""
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
            accepted.send_all(bytes(NONCE))
            accepted.read_exactly(GREETING, LONG)
            accepted.send_all(bytes(32))

        pretender = beside(pretend)
        with pytest.raises(ConnectionError, match="listening end does not know"):
            greet_as_client(client, TOKEN, 0, "test")
        pretender.result()


def test_a_server_that_echoes_the_clients_own_proof_is_refused() -> None:
    with connected() as (client, accepted):

        def pretend() -> None:
            accepted.send_all(bytes(NONCE))
            accepted.send_all(accepted.read_exactly(GREETING, LONG)[-32:])

        pretender = beside(pretend)
        with pytest.raises(ConnectionError, match="listening end does not know"):
            greet_as_client(client, TOKEN, 0, "test")
        pretender.result()


def record(rank: int) -> tuple[bytes, bytes, bytes]:
    """A real greeting as an eavesdropper sees it: challenge, client's answer, server's answer."""
    with connected() as (client, near), connected() as (far, accepted):
        server = beside(greet_as_server, accepted, TOKEN, "test")
        greeter = beside(greet_as_client, client, TOKEN, rank, "test")
        challenge = far.read_exactly(NONCE, LONG)
        near.send_all(challenge)
        answer = near.read_exactly(GREETING, LONG)
        far.send_all(answer)
        proof = far.read_exactly(32, LONG)
        near.send_all(proof)
        greeter.result()
        assert server.result() == rank
    return challenge, answer, proof


def test_a_recorded_greeting_is_of_no_use() -> None:
    _, answer, _ = record(3)
    with connected() as (client, accepted):
        server = beside(greet_as_server, accepted, TOKEN, "test")
        client.read_exactly(NONCE, LONG)
        client.send_all(answer)
        with pytest.raises(ConnectionError, match="does not know this job's token"):
            server.result()


def test_a_recorded_server_convinces_no_client() -> None:
    challenge, _, proof = record(3)
    with connected() as (client, accepted):
        accepted.send_all(challenge)
        accepted.send_all(proof)
        with pytest.raises(ConnectionError, match="listening end does not know"):
            greet_as_client(client, TOKEN, 3, "test")


def test_a_greeting_with_another_rank_is_refused() -> None:
    with connected() as (client, near), connected() as (far, accepted):
        server = beside(greet_as_server, accepted, TOKEN, "test")
        greeter = beside(greet_as_client, client, TOKEN, 1, "test")
        near.send_all(far.read_exactly(NONCE, LONG))
        answer = near.read_exactly(GREETING, LONG)
        far.send_all(answer[:NONCE] + struct.pack(">i", 2) + answer[-32:])
        with pytest.raises(ConnectionError, match="does not know this job's token"):
            server.result()
        near.close()
        with pytest.raises(OSError):
            greeter.result()


@settings(deadline=None)
@given(st.binary(min_size=GREETING + 1, max_size=GREETING + 100))
def test_no_bytes_are_a_proof_and_none_beyond_the_greeting_are_read(sent: bytes) -> None:
    with connected() as (theirs, ours):
        theirs.send_all(sent)
        with pytest.raises(ConnectionError, match="was rejected"):
            greet_as_server(ours, TOKEN, "test")
        assert ours.socket.recv(200) == sent[GREETING:]


def test_a_greeting_that_arrives_byte_by_byte_is_understood() -> None:
    with connected() as (client, near), connected() as (far, accepted):
        server = beside(greet_as_server, accepted, TOKEN, "test")
        greeter = beside(greet_as_client, client, TOKEN, 5, "test")
        near.send_all(far.read_exactly(NONCE, LONG))
        for byte in near.read_exactly(GREETING, LONG):
            far.send_all(bytes([byte]))
        near.send_all(far.read_exactly(32, LONG))
        greeter.result()
        assert server.result() == 5


def test_a_silent_server_is_given_up_after_the_patience() -> None:
    with connected() as (client, _), pytest.raises(TimeoutError):
        greet_as_client(client, TOKEN, 0, "test", patience=0.05)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n"])
def test_a_client_that_closes_midway_is_reported(sent: bytes) -> None:
    with connected() as (client, accepted):
        client.send_all(sent)
        client.socket.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="closed the connection"):
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


def test_the_acceptor_lets_in_who_knows_the_token() -> None:
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
            connect()  # and says nothing
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


def test_strangers_beyond_the_limit_are_closed_at_once() -> None:
    with accepting(most_greetings=2) as (address, _, _), ExitStack() as stack:
        first = [stack.enter_context(closing(Stream.connect(address, 30))) for _ in range(2)]
        for stream in first:
            assert len(stream.read_exactly(NONCE, LONG)) == NONCE
        third = stack.enter_context(closing(Stream.connect(address, 30)))
        assert third.peek(1, LONG) == b""


def test_a_closed_acceptor_listens_no_more_and_keeps_who_is_in() -> None:
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
