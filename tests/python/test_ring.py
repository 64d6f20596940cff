"""The ring: exact sums, the same bits on every rank, and a lost peer told by name."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from pybackend.collective import Alone, Collective, Ring, all_sum, join_ring
from pybackend.errors import PeerLostError
from pybackend.rendezvous import (
    Doorkeeper,
    address_of,
    greet_as_client,
    listen,
    new_token,
)

LONG = 120.0  # seconds that no test here waits for: an error that comes earlier came at once
SIZES = [0, 1, 7, 1009, 65_536]
DTYPES = ["float16", "float32", "float64", "int32", "int64"]


def together(members: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
    """Let all ranks work at the same time; what each returned or raised, by rank."""

    def attempt(member: Any) -> Any:
        try:
            return work(member)
        except PeerLostError as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(attempt, members))


def form(servers: Sequence[socket.socket], token: str, timeout: float) -> list[Ring]:
    peers = [address_of(server) for server in servers]
    ranks = range(len(servers))
    return together(ranks, lambda rank: join_ring(servers[rank], peers, rank, token, timeout))


@contextmanager
def ring(size: int, timeout: float = LONG) -> Iterator[list[Any]]:
    """All ranks of a ring; one rank needs none."""
    if size == 1:
        yield [Alone()]
        return
    with ExitStack() as stack:
        servers = [stack.enter_context(listen("127.0.0.1")) for _ in range(size)]
        yield [stack.enter_context(closing(m)) for m in form(servers, new_token(), timeout)]


@pytest.fixture(scope="module", params=range(1, 10), ids=lambda size: f"N={size}")
def members(request: Any) -> Iterator[list[Collective]]:
    with ring(request.param) as formed:
        yield formed


def test_every_rank_knows_its_place(members: list[Collective]) -> None:
    places = [(member.rank, member.world_size) for member in members]
    assert places == [(rank, len(members)) for rank in range(len(members))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_is_numpys_sum(members: list[Collective], size: int, dtype: str) -> None:
    rng = np.random.default_rng(size)
    # Whole numbers so small that every type holds their sums exactly, in whatever order.
    parts = rng.integers(-100, 100, (len(members), size)).astype(dtype)
    buffers = [part.copy() for part in parts]
    together(members, lambda member: member.all_reduce(buffers[member.rank]))
    for buffer in buffers:
        assert buffer.dtype == dtype
        np.testing.assert_array_equal(buffer, parts.sum(axis=0, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ranks_hold_the_same_bits(members: list[Collective], dtype: str) -> None:
    rng = np.random.default_rng(5)
    parts = (rng.normal(size=(len(members), 4099)) * 1000).astype(dtype)
    buffers = [part.copy() for part in parts]
    together(members, lambda member: member.all_reduce(buffers[member.rank]))
    assert {buffer.tobytes() for buffer in buffers} == {buffers[0].tobytes()}
    if np.dtype(dtype).kind == "f":
        wanted = parts.astype("float64").sum(axis=0)
        bound = np.finfo(dtype).eps * len(members) * np.abs(parts).astype("float64").sum(axis=0)
        assert (np.abs(buffers[0] - wanted) <= bound).all()


def test_the_sum_does_not_depend_on_earlier_calls(members: list[Collective]) -> None:
    for size in (1000, 10, 0, 5000, 3):
        results = together(
            members, lambda member, size=size: all_sum(member, np.full(size, member.rank + 1))
        )
        for result in results:
            assert result.tolist() == [sum(range(1, len(members) + 1))] * size


# The last is forwarded in several pieces, the last of them incomplete.
@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 0), ("float32", 1), ("int64", 1009), ("bool", 1009), ("float16", 600_000)],
)
def test_broadcast_from_every_root(members: list[Collective], dtype: str, size: int) -> None:
    rng = np.random.default_rng(size)
    parts = rng.integers(0, 2, (len(members), size)).astype(dtype)
    for root in range(len(members)):
        buffers = [part.copy() for part in parts]
        together(members, lambda member, b=buffers, r=root: member.broadcast(b[member.rank], r))
        for buffer in buffers:
            np.testing.assert_array_equal(buffer, parts[root])


def test_broadcast_keeps_the_shape(members: list[Collective]) -> None:
    buffers = [np.full((3, 4, 5), member.rank, "float64") for member in members]
    together(members, lambda member: member.broadcast(buffers[member.rank], len(members) - 1))
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, np.full((3, 4, 5), len(members) - 1))


def test_all_sum_keeps_the_shape_and_sums_in_double(members: list[Collective]) -> None:
    summed = together(members, lambda member: all_sum(member, [[2**40, 0.5], [member.rank, 1]]))
    size = len(members)
    for array in summed:
        assert array.dtype == "float64"
        assert array.tolist() == [[size * 2**40, size * 0.5], [size * (size - 1) / 2, size]]


@pytest.mark.parametrize("size", [2, 3])
def test_buffers_far_larger_than_what_the_sockets_hold(size: int) -> None:
    rng = np.random.default_rng(0)
    parts = rng.integers(-1000, 1000, (size, 5_000_011)).astype("float32")
    buffers = [part.copy() for part in parts]
    with ring(size) as members:
        together(members, lambda member: member.all_reduce(buffers[member.rank]))
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, parts.sum(axis=0))


@pytest.mark.parametrize("count", [1, 5_000_000], ids=["small", "20 MB"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_peer_that_closes_is_named_at_once(size: int, count: int) -> None:
    with ring(size) as members:
        members[1].close()

        def reduce(member: Ring) -> None:
            with closing(member):  # as a worker does when it fails
                member.all_reduce(np.ones(count, "float32"))

        others = [member for member in members if member.rank != 1]
        errors = together(others, reduce)
    assert {error.reason for error in errors} == {"closed the connection"}
    assert {error.host for error in errors} == {"127.0.0.1"}
    # Its neighbour waits for it; the others may notice the end of the one that noticed.
    lost = {member.rank: error.rank for member, error in zip(others, errors, strict=True)}
    assert lost[2 % size] == 1
    assert all(peer in ((rank - 1) % size, (rank + 1) % size) for rank, peer in lost.items())


def test_a_peer_process_that_is_killed_is_named_at_once() -> None:
    program = (
        "import socket, sys; from pybackend.collective import join_ring;"
        "server = socket.socket(fileno=int(sys.argv[1]));"
        "ring = join_ring(server, sys.argv[3:], 1, sys.argv[2], 120);"
        "print('joined', flush=True); sys.stdin.read()"
    )
    token = new_token()
    with listen("127.0.0.1") as mine, listen("127.0.0.1") as theirs:
        peers = [address_of(mine), address_of(theirs)]
        with subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno()), token, *peers],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as peer:
            theirs.close()
            with closing(join_ring(mine, peers, 0, token, LONG)) as member:
                assert peer.stdout is not None
                assert peer.stdout.readline() == b"joined\n"
                peer.send_signal(signal.SIGKILL)
                with pytest.raises(PeerLostError, match=r"worker 1 on 127\.0\.0\.1.* it closed"):
                    member.all_reduce(np.ones(10))


@pytest.mark.parametrize("count", [1, 5_000_000], ids=["small", "20 MB"])
def test_a_silent_peer_is_named_after_the_timeout(count: int) -> None:
    with ring(3, timeout=1.0) as members:
        errors = together(members[1:], lambda member: member.all_reduce(np.ones(count, "float32")))
    assert [(error.rank, error.reason) for error in errors] == [
        (0, "was silent for 1 s"),
        (1, "was silent for 1 s"),
    ]


def test_a_silent_root_is_named_after_the_timeout() -> None:
    with ring(2, timeout=1.0) as members, pytest.raises(PeerLostError, match=r"worker 0 .* silent"):
        members[1].broadcast(np.ones(3), root=0)


def test_a_peer_that_does_not_read_is_named_after_the_timeout() -> None:
    with ring(2, timeout=1.0) as members, pytest.raises(PeerLostError, match=r"worker 1 .* silent"):
        members[0].broadcast(np.ones(10_000_000), root=0)


def test_strangers_at_the_listeners_neither_enter_nor_delay() -> None:
    token = new_token()
    with ExitStack() as stack:
        servers = [stack.enter_context(listen("127.0.0.1")) for _ in range(3)]

        def stranger(server: socket.socket, says: bytes) -> socket.socket:
            connection = socket.create_connection(server.getsockname(), timeout=30)
            stack.enter_context(connection).sendall(says)
            return connection

        # They wait in each listener's queue before any of the ranks.
        turned_away = [stranger(server, bytes(68)) for server in servers]
        turned_away += [stranger(server, b"GET / HTTP/1.1\r\n" * 10) for server in servers]
        silent = [stranger(server, b"") for server in servers]
        for server in servers:
            stranger(server, b"x").close()
        # Less than the ten seconds for which a listener puts up with a silent stranger.
        members = [stack.enter_context(closing(m)) for m in form(servers, token, 5.0)]
        buffers = [np.full(1000, rank + 1.0) for rank in range(3)]
        together(members, lambda member: member.all_reduce(buffers[member.rank]))
        assert {buffer.tobytes() for buffer in buffers} == {np.full(1000, 6.0).tobytes()}
        for connection in turned_away:
            with suppress(ConnectionResetError):
                answer = connection.recv(1000)
                assert len(answer) == 32  # the challenge, and then the end
                assert connection.recv(1000) == b""
        for connection in silent:
            assert len(connection.recv(1000)) == 32


@pytest.mark.parametrize("right_token", [False, True], ids=["wrong token", "wrong rank"])
def test_who_is_not_the_predecessor_is_turned_away(right_token: bool) -> None:
    token = new_token()
    with ExitStack() as stack:
        servers = [stack.enter_context(listen("127.0.0.1")) for _ in range(3)]
        address = servers[0].getsockname()
        peers = [address_of(server) for server in servers]
        first = ThreadPoolExecutor(1)
        joining = first.submit(join_ring, servers[0], peers, 0, token, LONG)
        first.shutdown(wait=False)
        with socket.create_connection(address, timeout=30) as stranger:
            if right_token:
                greet_as_client(stranger, token, 1, "ring")
                assert stranger.recv(1) == b""
            else:
                with pytest.raises(OSError):
                    greet_as_client(stranger, new_token(), 2, "ring")
        others = together([1, 2], lambda rank: join_ring(servers[rank], peers, rank, token, LONG))
        members = [stack.enter_context(closing(m)) for m in (joining.result(), *others)]
        sums = together(members, lambda member: all_sum(member, [member.rank]))
        assert [array.tolist() for array in sums] == [[3.0]] * 3


def closed_address() -> str:
    """An address at which nobody listens any more."""
    with listen("127.0.0.1") as server:
        return address_of(server)


def test_a_peer_that_cannot_be_reached_is_named() -> None:
    with listen("127.0.0.1") as server:
        gone = closed_address()
        with pytest.raises(PeerLostError, match=f"worker 1 .* cannot be reached at {gone}"):
            join_ring(server, [address_of(server), gone], 0, new_token(), LONG)
        with pytest.raises(OSError):
            server.getsockname()  # closed, whatever happens


def test_a_peer_that_never_answers_is_named_after_the_timeout() -> None:
    with listen("127.0.0.1") as mine, listen("127.0.0.1") as silent:
        peers = [address_of(mine), address_of(silent)]
        with pytest.raises(PeerLostError, match=r"worker 1 .* did not answer within 0\.2 s"):
            join_ring(mine, peers, 0, new_token(), 0.2)


def test_a_peer_of_another_job_is_no_peer() -> None:
    with listen("127.0.0.1") as mine, listen("127.0.0.1") as foreign:
        peers = [address_of(mine), address_of(foreign)]
        keeper = Doorkeeper(foreign, new_token(), "ring", lambda connection, rank: None)
        with pytest.raises(PeerLostError, match=r"worker 1 .* closed the connection"):
            join_ring(mine, peers, 0, new_token(), LONG)
        keeper.close()


def test_a_predecessor_that_never_connects_is_named_after_the_timeout() -> None:
    token = new_token()
    kept = []
    with listen("127.0.0.1") as mine, listen("127.0.0.1") as theirs:
        peers = [address_of(mine), address_of(theirs)]
        keeper = Doorkeeper(theirs, token, "ring", lambda connection, rank: kept.append(connection))
        with pytest.raises(PeerLostError, match=r"worker 1 .* did not connect within 0\.5 s"):
            join_ring(mine, peers, 0, token, 0.5)
        keeper.close()
        kept[0].close()


def test_a_successor_that_dies_while_the_ring_forms_ends_the_wait_at_once() -> None:
    token = new_token()
    with listen("127.0.0.1") as mine, listen("127.0.0.1") as theirs:
        peers = [address_of(mine), address_of(theirs), closed_address()]
        keeper = Doorkeeper(theirs, token, "ring", lambda connection, rank: connection.close())
        with pytest.raises(PeerLostError, match=r"worker 1 .* it closed the connection"):
            join_ring(mine, peers, 0, token, LONG)
        keeper.close()
