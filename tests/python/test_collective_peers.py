"""Peers that exit, are silent, unknown or out of step are named; no rank hangs."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from typing import Any

import numpy as np
import pytest
from namespaces import isolated, network, no_namespaces
from test_collective import LONG, form, mesh, together
from threads import Threads

from pybackend.core.collective import Compression, Patience, all_sum, join_mesh
from pybackend.core.errors import ClusterError, PeerLostError
from pybackend.core.net.authentication import greet_as_client, new_token
from pybackend.core.net.rendezvous import Acceptor, address_of, listen
from pybackend.core.net.stream import Stream

PROGRAM = (
    "import socket, sys; from pybackend.core.collective import join_mesh;"
    "server = socket.socket(fileno=int(sys.argv[1]));"
    "mesh = join_mesh(server, sys.argv[3:], 1, sys.argv[2], 120);"
    "print('joined', flush=True); sys.stdin.read()"
)


def closing_after(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Run a rank like a worker: when it fails, its connections close."""

    def attempt(member: Any) -> Any:
        with closing(member):
            return work(member)

    return attempt


@pytest.mark.parametrize("algorithm", ["ring", "doubling", "shared"])
@pytest.mark.parametrize("count", [1, 2_000_000], ids=["small", "8 MB"])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_a_peer_that_closes_is_named_at_once(size: int, count: int, algorithm: str) -> None:
    with mesh(size, algorithm=algorithm) as members:
        members[1].close()
        others = [member for member in members if member.rank != 1]
        errors = together(others, closing_after(lambda m: m.all_reduce(np.ones(count, "float32"))))
    assert {error.reason for error in errors} == {"closed the connection"}
    assert {error.host for error in errors} == {"127.0.0.1"}
    # A neighbour notices it first; others may notice that the neighbour has exited.
    assert 1 in {error.rank for error in errors}


@pytest.mark.parametrize("work", ["broadcast", "all_gather"])
def test_any_collective_names_a_peer_that_closes(work: str) -> None:
    with mesh(3) as members:
        members[1].close()
        errors = together(
            [members[0], members[2]], closing_after(lambda m: getattr(m, work)(np.ones(300_000)))
        )
    assert {type(error) for error in errors} == {PeerLostError}


def test_a_peer_process_that_is_killed_is_named_and_its_successor_stays_out() -> None:
    token = new_token()
    with listen("127.0.0.1") as mine, listen("127.0.0.1") as theirs:
        peers = [address_of(mine), address_of(theirs)]
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(theirs.fileno()), token, *peers],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as peer:
            theirs.close()
            with closing(join_mesh(mine, peers, 0, token, LONG)) as member:
                assert peer.stdout is not None
                assert peer.stdout.readline() == b"joined\n"
                peer.send_signal(signal.SIGKILL)
                with pytest.raises(PeerLostError, match=r"worker 1 on 127\.0\.0\.1.* it closed"):
                    member.all_reduce(np.ones(10))
                with listen("127.0.0.1") as again, pytest.raises(PeerLostError, match="worker 0"):
                    join_mesh(again, [peers[0], address_of(again)], 1, token, 0.3)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_rank_that_starts_again_cannot_enter_a_mesh(rank: int) -> None:
    token = new_token()
    with ExitStack() as stack:
        servers = [stack.enter_context(listen("127.0.0.1")) for _ in range(4)]
        peers = [address_of(server) for server in servers]
        members = [stack.enter_context(closing(member)) for member in form(servers, token, LONG)]
        members[rank].close()
        with listen("127.0.0.1") as again:
            peers[rank] = address_of(again)
            # Every rank connects to another one, and all listeners are closed.
            with pytest.raises(PeerLostError, match="cannot be reached"):
                join_mesh(again, peers, rank, token, LONG)
        others = [member for member in members if member.rank != rank]
        errors = together(others, closing_after(lambda member: member.all_reduce(np.ones(10))))
        assert {type(error) for error in errors} == {PeerLostError}


@pytest.mark.parametrize("algorithm", ["ring", "doubling", "shared"])
@pytest.mark.parametrize("count", [1, 5_000_000], ids=["small", "20 MB"])
def test_a_silent_peer_is_named_in_the_end(count: int, algorithm: str) -> None:
    with mesh(3, longest=1.0, algorithm=algorithm) as members:
        errors = together(members[1:], lambda member: member.all_reduce(np.ones(count, "float32")))
    assert {error.reason for error in errors} == {"was silent for 1 s"}
    assert 0 in {error.rank for error in errors}


def test_a_silent_root_is_named_in_the_end() -> None:
    with mesh(2, longest=0.5) as members, pytest.raises(PeerLostError, match=r"worker 0 .* silent"):
        members[1].broadcast(np.ones(3), root=0)


def test_a_peer_that_does_not_read_is_named_in_the_end() -> None:
    with mesh(2, 0.5, "ring") as members, pytest.raises(PeerLostError, match=r"worker 1 .* silent"):
        members[0].broadcast(np.ones(10_000_000), root=0)


@pytest.mark.parametrize("algorithm", ["ring", "doubling", "shared"])
def test_a_slow_peer_is_waited_for(algorithm: str) -> None:
    with mesh(4, longest=3.0, algorithm=algorithm) as members:
        buffers = [np.full(300_000, member.rank, "float64") for member in members]

        def reduce(member: Any) -> None:
            if member.rank == 2:
                time.sleep(0.4)  # the peer's own work: the test is that others wait
            member.all_reduce(buffers[member.rank])

        assert together(members, reduce) == [None] * 4
    for buffer in buffers:
        assert (buffer == 6).all()


DIFFERENT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "kind": (lambda m: m.all_reduce(np.ones(9)), lambda m: m.broadcast(np.ones(9))),
    "kind of large": (
        lambda m: m.all_reduce(np.ones(2_000_000)),
        lambda m: m.broadcast(np.ones(2_000_000)),
    ),
    "size": (lambda m: m.all_reduce(np.ones(9)), lambda m: m.all_reduce(np.ones(10))),
    "small and large": (
        lambda m: m.all_reduce(np.ones(9)),
        lambda m: m.all_reduce(np.ones(2_000_000)),
    ),
    "both large": (
        lambda m: m.all_reduce(np.ones(1_000_000)),
        lambda m: m.all_reduce(np.ones(2_000_000)),
    ),
    "type": (
        lambda m: m.all_reduce(np.ones(9, "int32")),
        lambda m: m.all_reduce(np.ones(9, "float32")),
    ),
    "root": (lambda m: m.broadcast(np.ones(9), 0), lambda m: m.broadcast(np.ones(9), 1)),
    "codec": (
        lambda m: m.all_reduce(np.ones(9, "float32")),
        lambda m: m.all_reduce(np.ones(9, "float32"), Compression("fp16")),
    ),
    "rows": (lambda m: m.all_gather(np.ones((3, 2))), lambda m: m.all_gather(np.ones((3, 4)))),
    "shape of rows": (
        lambda m: m.all_gather(np.ones((1, 2, 3))),
        lambda m: m.all_gather(np.ones((1, 3, 2))),
    ),
    "gather": (lambda m: m.all_gather(np.ones(3)), lambda m: m.all_reduce(np.ones(3))),
    "number": (
        lambda m: (m.all_reduce(np.ones(9)), m.all_reduce(np.ones(10))),
        lambda m: (m.all_reduce(np.ones(9)), m.broadcast(np.ones(9)), m.all_reduce(np.ones(10))),
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.parametrize("order", [1, -1])
def test_of_two_ranks_out_of_step_both_fail_and_say_why(case: str, order: int) -> None:
    works = DIFFERENT[case][::order]
    with mesh(2) as members:
        errors = together(members, closing_after(lambda member: works[member.rank](member)))
    for error in errors:
        assert isinstance(error, ClusterError)
        assert "are at different exchanges" in str(error)


# Among them groups in which each rank waits for one that is not out of step with it.
@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.parametrize("others", [{0}, {2}, {0, 1}, {1, 2}, {2, 3}, {0, 2, 3}])
def test_among_four_ranks_none_hangs_and_one_at_least_knows_why(
    case: str, others: set[int]
) -> None:
    one, other = DIFFERENT[case]
    with mesh(4) as members:
        errors = together(
            members, closing_after(lambda m: other(m) if m.rank in others else one(m))
        )
    kinds = {type(error) for error in errors if error is not None}
    assert ClusterError in kinds
    assert kinds <= {ClusterError, PeerLostError}


def test_strangers_at_the_listeners_neither_enter_nor_delay() -> None:
    token = new_token()
    with ExitStack() as stack:
        servers = [stack.enter_context(listen("127.0.0.1")) for _ in range(3)]

        def stranger(server: socket.socket, says: bytes) -> socket.socket:
            connection = socket.create_connection(server.getsockname(), timeout=30)
            stack.enter_context(connection).sendall(says)
            return connection

        # They are in each listener's queue before all ranks.
        rejected = [stranger(server, bytes(69)) for server in servers]
        rejected += [stranger(server, b"GET / HTTP/1.1\r\n" * 10) for server in servers]
        silent = [stranger(server, b"") for server in servers]
        for server in servers:
            stranger(server, b"x").close()
        # Less than the ten seconds for which a listener waits for a silent stranger.
        members = [stack.enter_context(closing(m)) for m in form(servers, token, 8.0)]
        sums = together(members, lambda member: all_sum(member, [member.rank]))
        assert [array.tolist() for array in sums] == [[3.0]] * 3
        for connection in rejected:
            with suppress(ConnectionResetError):
                answer = connection.recv(1000)
                assert len(answer) == 33  # the challenge, and then the end
                assert connection.recv(1000) == b""
        for connection in silent:
            assert len(connection.recv(1000)) == 33


def test_ranks_wait_until_a_crowd_of_strangers_has_gone() -> None:
    token = new_token()
    with ExitStack() as stack:
        mine, theirs = (stack.enter_context(listen("127.0.0.1")) for _ in range(2))
        peers = [address_of(mine), address_of(theirs)]
        pool = stack.enter_context(Threads())
        late = pool.submit(join_mesh, theirs, peers, 1, token, LONG)
        crowd = []
        for _ in range(64):
            stranger = socket.create_connection(theirs.getsockname(), timeout=30)
            crowd.append(stack.enter_context(stranger))
            assert stranger.recv(1) != b""  # its greeting has started
        rejected = socket.create_connection(theirs.getsockname(), timeout=30)
        assert stack.enter_context(rejected).recv(1) == b""
        first = pool.submit(join_mesh, mine, peers, 0, token, LONG)
        threading.Timer(0.3, lambda: [stranger.close() for stranger in crowd]).start()
        for joined in (first, late):
            stack.enter_context(closing(joined.result()))


@pytest.mark.parametrize("right_token", [False, True], ids=["wrong token", "wrong rank"])
def test_an_unexpected_client_is_rejected(right_token: bool) -> None:
    token = new_token()
    with ExitStack() as stack:
        servers = [stack.enter_context(listen("127.0.0.1")) for _ in range(3)]
        address = servers[0].getsockname()
        peers = [address_of(server) for server in servers]
        joining = Threads().submit(join_mesh, servers[0], peers, 0, token, LONG)
        with closing(Stream.connect(address, 30)) as stranger:
            if right_token:
                greet_as_client(stranger, token, 1, "mesh")  # rank 0 connects to rank 1
                assert stranger.peek(1, 30) == b""
            else:
                with pytest.raises(OSError):
                    greet_as_client(stranger, new_token(), 2, "mesh")
        others = together([1, 2], lambda rank: join_mesh(servers[rank], peers, rank, token, LONG))
        members = [stack.enter_context(closing(m)) for m in (joining.result(), *others)]
        sums = together(members, lambda member: all_sum(member, [member.rank]))
        assert [array.tolist() for array in sums] == [[3.0]] * 3


def closed_address() -> str:
    """Return an address at which no process listens any more."""
    with listen("127.0.0.1") as server:
        return address_of(server)


def test_a_peer_that_cannot_be_reached_is_named() -> None:
    with listen("127.0.0.1") as server:
        gone = closed_address()
        with pytest.raises(PeerLostError, match=f"worker 1 .* cannot be reached at {gone}"):
            join_mesh(server, [address_of(server), gone], 0, new_token(), LONG)
        with pytest.raises(OSError):
            server.getsockname()  # always closed


def test_a_peer_that_never_answers_is_named_after_the_timeout() -> None:
    with listen("127.0.0.1") as mine, listen("127.0.0.1") as silent:
        peers = [address_of(mine), address_of(silent)]
        with pytest.raises(PeerLostError, match=r"worker 1 .* did not answer within 0\.2 s"):
            join_mesh(mine, peers, 0, new_token(), 0.2)


def test_a_peer_of_another_job_is_rejected() -> None:
    with listen("127.0.0.1") as mine, listen("127.0.0.1") as foreign:
        peers = [address_of(mine), address_of(foreign)]
        acceptor = Acceptor(foreign, new_token(), "mesh", lambda connection, rank: None)
        with pytest.raises(PeerLostError, match=r"worker 1 .* closed the connection"):
            join_mesh(mine, peers, 0, new_token(), LONG)
        acceptor.close()


def test_a_peer_that_never_connects_is_named_after_the_timeout() -> None:
    with listen("127.0.0.1") as mine, listen("127.0.0.1") as theirs:
        peers = [address_of(theirs), address_of(mine)]
        with pytest.raises(PeerLostError, match=r"worker 0 .* did not connect within 0\.5 s"):
            join_mesh(mine, peers, 1, new_token(), 0.5)


def test_a_peer_that_dies_while_the_mesh_forms_ends_the_wait_at_once() -> None:
    token = new_token()
    with listen("127.0.0.1") as mine, listen("127.0.0.1") as theirs:
        peers = [address_of(mine), address_of(theirs), closed_address()]
        acceptor = Acceptor(theirs, token, "mesh", lambda connection, rank: connection.close())
        with pytest.raises(PeerLostError, match=r"worker 1 .* it closed the connection"):
            join_mesh(mine, peers, 0, token, LONG)
        acceptor.close()


def test_a_peer_that_is_silent_while_costs_are_measured_is_named() -> None:
    token = new_token()
    with ExitStack() as stack, listen("127.0.0.1") as mine, listen("127.0.0.1") as theirs:
        peers = [address_of(mine), address_of(theirs)]
        acceptor = Acceptor(
            theirs, token, "mesh", lambda connection, rank: stack.callback(connection.close)
        )
        with pytest.raises(PeerLostError, match=r"worker 1 .* it was silent for 0\.5 s"):
            join_mesh(mine, peers, 0, token, LONG, patience=Patience(longest=0.5))
        acceptor.close()


REDUCE = (
    "import socket, sys; import numpy as np; from pybackend.core.collective import join_mesh;"
    "from pybackend.core.net.rendezvous import listen;"
    "rank, peers = int(sys.argv[1]), sys.argv[3:]; host, _, port = peers[rank].rpartition(':');"
    "server = socket.create_server((host, int(port)));"
    "print('listens', flush=True); sys.stdin.readline();"
    "mesh = join_mesh(server, peers, rank, sys.argv[2], 2.0, connect_timeout=60.0);"
    "print('joined', *(link.stream.is_protected for link in mesh.links.values()), flush=True);"
    "one = np.ones(1);"
    "any(mesh.all_reduce(one) for _ in iter(int, 1))"
)


def test_a_network_that_fails_is_noticed_on_both_sides() -> None:
    if problem := no_namespaces():
        pytest.skip(f"no network namespaces: {problem}")
    token = new_token()
    with ExitStack() as stack, network(["a", "b"]) as made:
        peers = [f"{host.address}:2222" for host in made.hosts]
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [*host.enter, sys.executable, "-c", REDUCE, str(rank), token, *peers],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank, host in enumerate(made.hosts)
        ]
        for process in ranks:
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "listens\n"
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "joined True\n"  # between hosts, without an option
        with isolated(made.hosts):
            for rank, process in enumerate(ranks):
                shown = process.communicate(timeout=LONG)[1]
                assert f"worker {1 - rank} on {made.hosts[1 - rank].address}" in shown
                assert "has not answered for 2 s" in shown


def test_what_never_happens_in_memory_is_not_waited_for_forever() -> None:
    with mesh(3, longest=1.0) as members:
        call, links = members[0]._call(b"+", np.dtype("float32"), 0), members[0].links
        # The named one is missing, whether this rank is connected to it or not.
        with pytest.raises(PeerLostError, match="was silent for 1 s") as caught:
            call.wait_for(lambda: [2], [links[1]])
        assert caught.value.rank == 2
        call.wait_for(list, [])
        members[1].close()
        # It may have finished on another host, but not on this one.
        with pytest.raises(PeerLostError, match="was silent for 1 s"):
            call.wait_for(lambda: [2], [links[2]])
        with pytest.raises(PeerLostError, match=r"worker 1 .* closed the connection"):
            call.wait_for(lambda: [2], [links[1], links[2]])
