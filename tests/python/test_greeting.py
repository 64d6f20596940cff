"""The greeting: both ends prove the token, and nothing is read before the proof."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import Threads

from pybackend.core.net.authentication import greet_as_client, greet_as_server, new_token
from pybackend.core.net.rendezvous import listen
from pybackend.core.net.stream import Stream

TOKEN = new_token()
LONG = 30.0
NONCE = 32 + 1  # and request
GREETING = 32 + 4 + 1 + 32  # nonce, rank, request, proof


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
    return Threads().submit(work, *arguments)


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
    """A real greeting in an eavesdropper's view: challenge, client's answer, server's answer."""
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
        far.send_all(answer[:32] + struct.pack(">i", 2) + answer[-33:])
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
