"""Secrets, and the greeting: both ends prove the token, and nothing is read before the proof."""

from __future__ import annotations

import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import Threads

from pybackend import cli
from pybackend.core.errors import InputError
from pybackend.core.net.authentication import (
    derive_token,
    find_secret,
    greet_as_client,
    greet_as_server,
    make_secret,
    new_token,
)
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


SECRET = "0123456789abcdef"


def test_a_variable_goes_before_a_file_and_that_before_the_users_own(tmp_path: Path) -> None:
    own = tmp_path / "tfdist" / "secret"
    make_secret(own)
    named = tmp_path / "named"
    make_secret(named)
    everything = {
        "TFDIST_SECRET": SECRET,
        "TFDIST_SECRET_FILE": str(named),
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    assert find_secret(False, everything) == SECRET
    del everything["TFDIST_SECRET"]
    assert find_secret(False, everything) == named.read_text().strip()
    del everything["TFDIST_SECRET_FILE"]
    assert find_secret(False, everything) == own.read_text().strip()


def test_on_one_machine_the_users_own_is_made(tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    with pytest.raises(InputError, match="need a shared secret"):
        find_secret(False, environment)
    made = find_secret(True, environment)
    path = tmp_path / "tfdist" / "secret"
    assert (stat.S_IMODE(path.stat().st_mode), len(made)) == (0o600, 64)
    assert list(path.parent.iterdir()) == [path]


def test_of_many_that_make_it_at_once_all_read_the_same(tmp_path: Path) -> None:
    found: list[str] = []

    def find() -> None:
        found.append(find_secret(True, {"XDG_CONFIG_HOME": str(tmp_path)}))

    threads = [threading.Thread(target=find) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(set(found))) == (16, 1)


def test_what_others_can_read_and_what_can_be_guessed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    make_secret(path)
    path.chmod(0o640)
    with pytest.raises(InputError, match=f"chmod 600 {path}"):
        find_secret(False, {"TFDIST_SECRET_FILE": str(path)})
    with pytest.raises(InputError, match="has 5 characters"):
        find_secret(False, {"TFDIST_SECRET": "short"})
    with pytest.raises(InputError, match="which does not exist"):
        find_secret(True, {"TFDIST_SECRET_FILE": str(tmp_path / "none")})


def test_tokens_differ_by_what_they_are_for() -> None:
    assert len({derive_token(SECRET, *parts) for parts in [(), ("a",), ("b",), ("a", "b")]}) == 4
    assert derive_token(SECRET, "a") == derive_token(SECRET, "a")


def test_the_command_keeps_a_secret_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "secret"
    assert cli.main(["secret", str(path)]) == 0
    made = path.read_text()
    assert cli.main(["secret", str(path)]) == 0
    assert path.read_text() == made
    shown = capsys.readouterr().out
    assert "a new secret" in shown
    assert "a secret already exists; left unchanged" in shown
    assert made.strip() not in shown
