"""Protected connections: what an attacker on the way, or a stranger, can do to them."""

from __future__ import annotations

import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import wait_for
from relay import Relay, altered, relaying
from test_collective import mesh, together
from threads import Threads

from pybackend.core.collective import Compression, Mesh, join_mesh
from pybackend.core.errors import ClusterError, PeerLostError
from pybackend.core.job.messages import PrintedLine
from pybackend.core.net import authentication, tls
from pybackend.core.net.authentication import greet_as_client, greet_as_server, new_token
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.meeting_client import MeetingClient
from pybackend.core.net.rendezvous import address_of, listen
from pybackend.core.net.stream import AlteredError, Stream
from pybackend.core.net.tls import _GENERATOR, _ORDER, Tls, make_certificate, multiply

LONG = 30.0
GREETING = 32 + 4 + 1 + 32  # nonce, rank, request, proof
TOKEN = new_token()


@contextmanager
def relayed() -> Iterator[tuple[Relay, Stream, Stream]]:
    """Both ends of a connection over a relay, before the greeting; the connecting one first."""
    with (
        listen("127.0.0.1") as server,
        relaying(server.getsockname()) as relay,
        closing(Stream.connect(relay.place, LONG)) as client,
        closing(Stream.accept(server)) as accepted,
    ):
        yield relay, client, accepted


def greet(
    client: Stream, accepted: Stream, mine: bool | None = True, theirs: bool | None = None
) -> list[BaseException | None]:
    """Greet from both ends; return the error of each, the client's first."""

    def as_client() -> None:
        greet_as_client(client, TOKEN, 1, "test", encrypt=mine)

    def as_server() -> None:
        try:
            greet_as_server(accepted, TOKEN, "test", encrypt=theirs)
        except OSError:
            accepted.close()
            raise

    with Threads() as pool:
        futures = [pool.submit(end) for end in (as_client, as_server)]
        return [future.exception(LONG) for future in futures]


@pytest.mark.parametrize(
    ("mine", "theirs", "protected"),
    [(None, None, False), (False, False, False), (True, False, True), (None, True, True)],
)
def test_one_end_that_wants_it_is_enough(
    mine: bool | None, theirs: bool | None, protected: bool
) -> None:
    with relayed() as (relay, client, accepted):
        seen = bytearray()
        relay.to_client = lambda piece: (seen.extend(piece), piece)[1]
        assert greet(client, accepted, mine, theirs) == [None, None]
        accepted.send_all(b"something that all may read", LONG)
        assert client.read_exactly(27, LONG) == b"something that all may read"
        assert client.is_protected == accepted.is_protected == protected
        assert (b"all may read" in seen) != protected


def test_nobody_on_the_way_talks_the_ends_out_of_it() -> None:
    def unwish(place: int) -> Callable[[bytes], bytes]:
        return lambda piece: piece[:place] + b"\0" + piece[place + 1 :]

    for way, place in (("to_client", 32), ("to_server", 36)):
        with relayed() as (relay, client, accepted):
            setattr(relay, way, unwish(place))
            ours, theirs = greet(client, accepted, True, True)
            assert isinstance(ours, OSError)
            assert "does not know this job's token" in str(theirs)


def repeated(piece: bytes) -> bytes:
    return piece * 2


def reordered(piece: bytes) -> bytes:
    """Swap two records of the same length."""
    half = len(piece) // 2
    return piece[half:] + piece[:half]


def without_the_first_record(piece: bytes) -> bytes:
    return piece[len(piece) // 2 :]


@pytest.mark.parametrize(
    "change", [altered, repeated, reordered, without_the_first_record], ids=lambda f: f.__name__
)
def test_what_is_changed_on_the_way_is_noticed_and_both_ends_say_so(
    change: Callable[[bytes], bytes],
) -> None:
    with relayed() as (relay, client, accepted):
        assert greet(client, accepted) == [None, None]
        relay.to_server = change
        # Two records in one piece: the relay reads them together.
        assert client.send_some([memoryview(bytes(100)), memoryview(bytes(100))]) == 200
        with pytest.raises(AlteredError, match="the received data is not what the other end sent"):
            accepted.read_exactly(201, LONG)
        with pytest.raises(AlteredError, match="the other end received altered data"):
            client.read_exactly(1, LONG)


def test_a_recorded_connection_cannot_be_played_again() -> None:
    said: list[bytes] = []
    with relayed() as (relay, client, accepted):
        relay.to_server = lambda piece: (said.append(piece), piece)[1]
        assert greet(client, accepted) == [None, None]
        client.send_all(b"once", LONG)
        assert accepted.read_exactly(4, LONG) == b"once"
    with (
        listen("127.0.0.1") as server,
        closing(Stream.connect(server.getsockname(), LONG)) as stranger,
        closing(Stream.accept(server)) as accepted,
    ):
        stranger.send_all(b"".join(said), LONG)
        with pytest.raises(ConnectionError, match="does not know this job's token"):
            greet_as_server(accepted, TOKEN, "test", encrypt=True)


def test_two_connections_of_one_job_cannot_be_crossed() -> None:
    """Connect each client to the other's TLS server after the greetings."""
    with relayed() as (one, *first), relayed() as (other, *second):
        # The data after a client's proof go to the wrong server.
        crossed = threading.Barrier(2)
        held: dict[str, bytes] = {}

        def cross(own: str, foreign: str) -> Callable[[bytes], bytes]:
            def change(piece: bytes) -> bytes:
                if len(piece) <= GREETING:
                    return piece
                held[own] = piece[GREETING:]
                crossed.wait(LONG)
                return piece[:GREETING] + held[foreign]

            return change

        one.to_server, other.to_server = cross("one", "other"), cross("other", "one")
        with Threads() as pool:
            outcomes = [pool.submit(greet, *ends) for ends in (first, second)]
            errors = [error for outcome in outcomes for error in outcome.result(LONG)]
        assert all(isinstance(error, OSError) for error in errors)


def test_a_tls_handshake_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "GREETING_SECONDS", 0.3)
    with relayed() as (relay, client, accepted):
        relay.to_server = lambda piece: piece[:GREETING]  # no TLS
        assert all(isinstance(error, OSError) for error in greet(client, accepted))


def test_tls_alone_lets_in_nobody_with_another_token() -> None:
    with relayed() as (_, client, accepted), Threads() as pool:
        server = pool.submit(accepted.protect, Tls(TOKEN, is_server=True), LONG)
        with pytest.raises(OSError):
            client.protect(Tls(new_token(), is_server=False), LONG)
        with pytest.raises(ConnectionError, match=r"the TLS handshake failed"):
            server.result()


@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
@pytest.mark.parametrize("size", [2, 3])
def test_protected_collectives_give_the_same_bits(size: int, algorithm: str) -> None:
    parts = np.random.default_rng(0).normal(size=(size, 300_007)).astype("float32")

    def work(member: Mesh) -> list[Any]:
        plain, coded = parts[member.rank].copy(), parts[member.rank].copy()
        member.all_reduce(plain)
        member.all_reduce(coded, Compression("fp16"))
        return [plain, coded, *member.all_gather(parts[member.rank][: 1000 * member.rank])]

    found = []
    for encrypt in (True, False):
        with mesh(size, algorithm=algorithm, encrypt=encrypt) as members:
            assert {link.stream.is_protected for link in members[0].links.values()} == {encrypt}
            found.append(together(members, work))
    for protected, plain in zip(*found, strict=True):
        for one, other in zip(protected, plain, strict=True):
            np.testing.assert_array_equal(one, other)


def test_errors_of_protected_collectives_are_those_of_others() -> None:
    def differ(member: Mesh) -> None:
        with closing(member):
            member.all_reduce(np.ones(9 + member.rank % 2))

    with mesh(2, encrypt=True) as members:
        assert {type(error) for error in together(members, differ)} == {ClusterError}
    with mesh(3, longest=0.5, encrypt=True) as members:
        errors = together(members[1:], lambda member: member.all_reduce(np.ones(9)))
        assert {type(error) for error in errors} == {PeerLostError}


def test_a_protected_meeting_with_events_and_results() -> None:
    """Read and write at the same time, in two threads."""
    content, events = bytes(range(256)) * 10_000, [PrintedLine("x" * 100_000, rank=1)] * 20
    with relayed() as (_, client, accepted), MeetingServer(None, TOKEN, 1) as server:
        assert greet(client, accepted) == [None, None]
        server.adopt(accepted, 0)
        with MeetingClient(None, TOKEN, 0, LONG, stream=client) as member:
            sending = threading.Thread(target=lambda: [member(event) for event in events])
            sending.start()
            server.send({"model": content})
            assert member.receive(LONG) == {"model": content}
            sending.join(LONG)
            assert member.gather("a") == ["a"]
            received = [server.queue.get(timeout=LONG) for _ in events]
    assert received == [replace(event, rank=0) for event in events]


def test_a_meeting_that_is_altered_is_named() -> None:
    with relayed() as (relay, client, accepted), MeetingServer(None, TOKEN, 2) as server:
        assert greet(client, accepted) == [None, None]
        server.adopt(accepted, 0)
        relay.to_client = altered
        with MeetingClient(None, TOKEN, 0, LONG, stream=client) as member:
            with Threads() as pool:
                gathering = pool.submit(member.gather, "a")
                wait_for(lambda: server.missing()[0] == [1])
                server.refuse("no")
            with pytest.raises(ClusterError, match=r"lost the driver .* changes the data"):
                gathering.result(LONG)


@pytest.mark.parametrize("count", [2, 300_007], ids=["small", "large"])
def test_a_number_that_is_altered_between_two_ranks_is_named_on_both(count: int) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(listen("127.0.0.1")) for _ in range(2)]
        relay = stack.enter_context(relaying(servers[1].getsockname()))
        peers = [address_of(servers[0]), relay.address]

        def join(rank: int) -> Mesh:
            return join_mesh(servers[rank], peers, rank, TOKEN, LONG, encrypt=True)

        members = [stack.enter_context(closing(m)) for m in together(range(2), join)]

        def work(member: Mesh) -> None:
            buffer = np.ones(count, "float32")
            with closing(member):
                for _ in range(1000):
                    member.all_reduce(buffer)
                    assert set(buffer) == {2}
                    buffer[:] = 1
                    if member.rank == 0:
                        relay.to_server = altered

        errors = together(members, work)
    assert [type(error) for error in errors] == [ClusterError, ClusterError]
    assert "worker 0 on 127.0.0.1 delivered different bytes than were sent" in str(errors[1])
    assert "worker 1 on 127.0.0.1 delivered different bytes than were sent" in str(errors[0])


# Published test vectors of P-256: a factor, and the abscissa of that multiple of the generator.
POINTS = {
    1: 0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    2: 0x7CF27B188D034F7E8A52380304B51AC3C08969E277F21B35A60B48FC47669978,
    3: 0x5ECBE4D1A6330A44C8F7EF951D4BF165E6C6B721EFADA985FB41661BC6E7FD6C,
    112233445566778899: 0x339150844EC15234807FE862A86BE77977DBFB3AE3D96F4C22795513AEAAB82F,
    _ORDER - 1: 0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
}


@pytest.mark.parametrize("factor", POINTS)
def test_points_are_the_published_ones(factor: int) -> None:
    assert multiply(factor, _GENERATOR)[0] == POINTS[factor]


def test_the_certificate_is_the_same_without_the_package_cryptography(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token, calls = new_token(), []
    pytest.importorskip("cryptography")
    made = make_certificate(token)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    monkeypatch.setattr(tls, "multiply", lambda *given: calls.append(1) or multiply(*given))
    assert make_certificate(token) == made
    assert calls == [1]


def test_the_lines_that_run_do_not_depend_on_the_secret() -> None:
    runs = []
    for factor in (1, 2**255, _ORDER - 1):
        lines: list[int] = []

        def note(frame: Any, event: str, _: Any, lines: list[int] = lines) -> Any:
            lines.append(frame.f_lineno)
            return note

        before = sys.gettrace()
        sys.settrace(note)
        try:
            multiply(factor, _GENERATOR)
        finally:
            sys.settrace(before)
        runs.append(lines)
    assert len(runs[0]) > 256
    assert runs[0] == runs[1] == runs[2]


def test_a_token_gives_one_certificate_and_another_token_another() -> None:
    token = new_token()
    assert make_certificate(token) == make_certificate(token)
    assert not set(make_certificate(token)) & set(make_certificate(new_token()))


def test_openssl_reads_it_and_nothing_of_the_token_is_in_it() -> None:
    token = new_token()
    certificate, key = make_certificate(token)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=certificate)
    (found,) = context.get_ca_certs()
    assert found["notAfter"] == "Dec 31 23:59:59 9999 GMT"
    for text in (certificate, key):
        content = ssl.PEM_cert_to_DER_cert(text) if text == certificate else text.encode()
        assert token.encode() not in content
        assert bytes.fromhex(token) not in content
