"""Sums through the memory of each host, and over connections between hosts; nothing is left."""

from __future__ import annotations

import functools
import gc
import itertools
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import full
from namespaces import network, no_namespaces
from test_collective import LONG, form, mesh, numbers, together
from test_collective_peers import closing_after

from pybackend.core.collective import Compression, Mesh, host_memory
from pybackend.core.collective import mesh as mesh_module
from pybackend.core.collective.algorithms import find_neighbours
from pybackend.core.collective.host_memory import find_layout
from pybackend.core.collective.joining import connects_to
from pybackend.core.errors import ClusterError, PeerLostError
from pybackend.core.net.authentication import new_token
from pybackend.core.net.rendezvous import address_of, listen


def add_up(members: list[Any], count: int = 100_003) -> None:
    """Check a sum of all ranks."""
    parts = numbers(count, "float32", len(members))
    buffers = [part.copy() for part in parts]
    together(members, lambda member: member.all_reduce(buffers[member.rank]))
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, parts.sum(axis=0))


@pytest.mark.parametrize("lengths", [[1000, 1, 0], [7, 7, 7], [0, 0, 0], [5000], [1, 4999]])
def test_parts_share_a_slot_in_as_few_turns_as_possible(lengths: list[int]) -> None:
    ends = np.cumsum(lengths)
    parts = [slice(int(end) - length, int(end)) for end, length in zip(ends, lengths, strict=True)]
    steps = host_memory._cut_slot(parts, 100)
    assert sum(steps) <= 100
    turns = list(host_memory._advance(parts, steps))
    assert len(turns) <= max(1, -(-sum(lengths) // 100) + 1)
    for number, part in enumerate(parts):
        taken = [n for turn in turns for n in range(turn[number].start, turn[number].stop)]
        assert taken == list(range(part.start, part.stop))


def list_open() -> list[str]:
    """Return the files of this process that are shared memory, open or mapped."""
    gc.collect()  # tracebacks of earlier tests may refer to their memory
    found = Path("/proc/self/maps").read_text().splitlines()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the folder itself
            found.append(str(link.readlink()))
    return [name for name in found if "memfd:tfdist" in name]


def test_ranks_of_one_host_share_memory_and_leave_nothing() -> None:
    with mesh(2) as members:
        add_up(members, 1000)
        assert list_open() == []  # a small buffer fits one message
        assert members[0].route == "sockets"
        add_up(members)
        assert members[0].route == "shared memory"
        assert all(member.shared for member in members)
        assert list_open()
    assert list_open() == []


ENDLESS = """
import socket, sys
import numpy as np
from pybackend.core.collective import join_mesh
_, rank, descriptor, token, *peers = sys.argv
mesh = join_mesh(socket.socket(fileno=int(descriptor)), peers, int(rank), token, 60)
for count in (300_000, 10, 2_000_003, 100_000):
    buffer = np.arange(count, dtype="float64") * (int(rank) + 1)
    mesh.all_reduce(buffer)
    assert (buffer == np.arange(count) * sum(range(1, len(peers) + 1))).all()
assert mesh.shared
print("summed", flush=True)
while True:
    mesh.all_reduce(buffer)
"""


@pytest.mark.parametrize("size", [2, 3])
def test_processes_share_it_and_if_one_is_killed_the_others_name_it(size: int) -> None:
    token = new_token()
    with ExitStack() as stack:
        servers = [stack.enter_context(listen("127.0.0.1")) for _ in range(size)]
        peers = [address_of(server) for server in servers]
        processes = []
        for rank, server in enumerate(servers):
            order = [str(rank), str(server.fileno()), token, *peers]
            process = subprocess.Popen(
                [sys.executable, "-c", ENDLESS, *order],
                pass_fds=[server.fileno()],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
            server.close()
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "summed\n"
        processes[1].kill()
        errors = [process.communicate(timeout=60)[1] for process in processes]
    assert all("PeerLostError: lost worker" in error for error in errors[::2])


def test_a_compressed_sum_uses_sockets() -> None:
    with mesh(2) as members:
        ones = [np.ones(200_000, "float32") for _ in members]
        together(members, lambda m: m.all_reduce(ones[m.rank], Compression("bf16")))
        assert not any(member.shared for member in members)
        assert (ones[0] == 2).all()


def test_a_group_that_must_not_share_uses_sockets() -> None:
    with mesh(2, shares_memory=False) as members:
        add_up(members)
        assert list_open() == []


def test_encrypted_ranks_share_nothing() -> None:
    with mesh(2, encrypt=True) as members:
        add_up(members)
        assert not any(member.shared for member in members)
        assert members[0].route == "encrypted sockets"


def fail(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["memfd_create", "posix_fallocate"])
def test_a_system_without_memory_for_it_uses_sockets(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(os, name, fail)
    with mesh(3) as members:
        add_up(members)
        assert not any(member.shared for member in members)
    assert list_open() == []


def test_if_one_rank_cannot_open_it_all_use_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def open_once(offer: bytes, world_size: int) -> mmap.mmap | None:
        seen.append(world_size)
        return host_memory.open_memory(offer, world_size) if len(seen) == 1 else None

    monkeypatch.setattr(mesh_module, "open_memory", open_once)
    with mesh(3) as members:
        add_up(members)
        add_up(members)
        assert len(seen) == 2  # each tried once
        assert not any(member.shared for member in members)


def offer(change: Callable[[tuple[int, int, bytes]], tuple[int, int, bytes]]) -> Any:
    """Return what opens from an offer that was changed."""
    with ExitStack() as until:
        offered, memory = host_memory.offer_memory(2, until)
        assert memory is not None
        return host_memory.open_memory(
            host_memory._OFFER.pack(*change(host_memory._OFFER.unpack(offered))), 2
        )


def test_only_the_memory_that_was_offered_is_opened(tmp_path: Path) -> None:
    assert offer(lambda o: o) is not None
    assert offer(lambda o: (*o[:2], bytes(32))) is None
    assert offer(lambda o: (2**22 + 1, *o[1:])) is None
    with (tmp_path / "other").open("w+b") as other:
        other.truncate(1 << 24)
        assert offer(lambda o: (o[0], other.fileno(), o[2])) is None
    short = os.memfd_create("tfdist")
    try:
        assert offer(lambda o: (o[0], short, o[2])) is None
    finally:
        os.close(short)
    assert host_memory.open_memory(host_memory.NO_OFFER, 2) is None


def test_many_ranks_get_smaller_slots_or_none() -> None:
    for size in (100, 500):
        assert 32 << 20 < host_memory._size_of(size) < 65 << 20
    with ExitStack() as until:
        assert host_memory.offer_memory(501, until) == (host_memory.NO_OFFER, None)


SHAPES = ["aabb", "abbab", "aabbcc", *map(full, ["abab", "aaabbb", "aaaabbbb", "aabbaacc"])]
COUNTS = [70_001, 300_007, 2_500_003]


@contextmanager
def hosts(shape: str, **options: Any) -> Iterator[list[Mesh]]:
    """Return the ranks of a mesh on pretended hosts, one letter per rank: loopback addresses."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(listen(f"127.0.0.{2 + ord(letter) - ord('a')}")) for letter in shape
        ]
        formed = form(servers, new_token(), LONG, **options)
        yield [stack.enter_context(closing(member)) for member in formed]


def sum_in_order(parts: Any, shape: str) -> Any:
    """Sum like the ranks: those of a host in their order, then the hosts along a ring."""
    groups = [[r for r, h in enumerate(shape) if h == host] for host in sorted(set(shape))]
    sums = [add(parts[group]) for group in groups]
    result = np.zeros_like(sums[0])
    for part in cut(slice(0, result.size), min(map(len, groups))):
        # Each segment begins with another host.
        for start, segment in enumerate(cut(part, len(groups))):
            result[segment] = add([total[segment] for total in sums[start:] + sums[:start]])
    return result


def add(terms: Any) -> Any:
    """Add from left to right."""
    return functools.reduce(np.add, terms)


def cut(span: slice, count: int) -> list[slice]:
    """Cut a span into equal parts."""
    size = span.stop - span.start
    ends = [span.start + size * k // count for k in range(count + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_is_numpys_in_the_documented_order(shape: str) -> None:
    rng = np.random.default_rng(3)
    with hosts(shape) as members:
        for count in COUNTS:
            parts = (rng.normal(size=(len(shape), count)) * 1000).astype("float32")
            for _ in range(2):
                buffers = [part.copy() for part in parts]
                together(members, lambda m, b=buffers: m.all_reduce(b[m.rank]))
                assert members[0].route == "shared memory and sockets"
                wanted = sum_in_order(parts, shape).tobytes()
                assert all(buffer.tobytes() == wanted for buffer in buffers)
    assert list_open() == []


@pytest.mark.parametrize("shape", ["aabb", "abbab", "aabbcc"])
def test_any_size_and_type(shape: str) -> None:
    with hosts(shape, algorithm="shared") as members:
        for dtype in ("float16", "float32", "float64", "int32", "uint8"):
            for count in (0, 1, 7, 65_536, 300_007):
                parts = abs(numbers(count, "int64", len(shape)) // 20).astype(dtype)
                buffers = [part.copy() for part in parts]
                together(members, lambda m, b=buffers: m.all_reduce(b[m.rank]))
                for buffer in buffers:
                    np.testing.assert_array_equal(buffer, parts.sum(axis=0, dtype=dtype))


def test_nans_have_the_same_bits() -> None:
    with hosts("aabbcc") as members:
        nans = np.uint32(0x7FC00000) + np.arange(6, dtype="uint32")
        buffers = [np.full(200_000, nan).view("float32") for nan in nans]
        together(members, lambda m: m.all_reduce(buffers[m.rank]))
        assert len({buffer.tobytes() for buffer in buffers}) == 1
        assert np.isnan(buffers[0]).all()


def sums(members: list[Any]) -> None:
    """Check a sum of all ranks."""
    parts = numbers(100_003, "float32", len(members))
    buffers = [part.copy() for part in parts]
    together(members, lambda member: member.all_reduce(buffers[member.rank]))
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, parts.sum(axis=0))


@pytest.mark.parametrize("shape", ["ab", "aab", "aaaaabb", "aabbc"])
def test_hosts_with_too_few_ranks_use_only_sockets(shape: str) -> None:
    with hosts(shape) as members:
        sums(members)
        assert members[0].route == "sockets"
        for member in members:
            assert sorted(member.links) == find_neighbours(member.rank, len(shape))


@pytest.mark.parametrize("options", [{"encrypt": True}, {"shares_memory": False}], ids=str)
def test_hosts_whose_ranks_may_not_share_use_only_sockets(options: dict[str, Any]) -> None:
    with hosts("aabb", **options) as members:
        sums(members)
        assert not any(member.shared for member in members)


def test_if_one_host_has_no_memory_for_it_all_use_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def offer_once(count: int, until: ExitStack) -> Any:
        seen.append(count)
        return mesh_module.NO_OFFER, None

    offer = mesh_module.offer_memory
    monkeypatch.setattr(
        mesh_module, "offer_memory", lambda *a: offer_once(*a) if not seen else offer(*a)
    )
    with hosts("aabb") as members:
        sums(members)
        sums(members)
        assert seen
        assert not any(member.shared for member in members)
        assert list_open() == []


def test_a_small_sum_uses_sockets() -> None:
    with hosts("aabb") as members:
        buffers = [np.ones(100) for _ in members]
        together(members, lambda m: m.all_reduce(buffers[m.rank]))
        assert not any(member.shared for member in members)
        assert all((buffer == 4).all() for buffer in buffers)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", ["aabb", "abbab", full("aabbcc")])
def test_compression_rounds_only_between_hosts_and_the_rest_is_in_the_residuals(
    shape: str, kind: Any
) -> None:
    rng = np.random.default_rng(4)
    parts = rng.normal(size=(len(shape), 150_001)).astype("float32")
    owed = np.zeros(150_001)
    with hosts(shape) as members:
        codecs = [Compression(kind) for _ in members]
        for _ in range(3):
            buffers = [part.copy() for part in parts]
            together(members, lambda m, b=buffers: m.all_reduce(b[m.rank], codecs[m.rank]))
            assert all(member.shared for member in members)
            assert len({buffer.tobytes() for buffer in buffers}) == 1
            due = owed + parts.sum(axis=0, dtype="float64")
            owed = sum(codec.residual(150_001).astype("float64") for codec in codecs)
            assert abs(owed).max() > 1e-4
            np.testing.assert_allclose(buffers[0] + owed, due, atol=1e-4)


@pytest.mark.parametrize("shape", ["aabb", "abbab", "abcabc", "abcdeabcde", "aaaaabbbbb"])
def test_the_connections_of_all_ranks_match(shape: str) -> None:
    wanted = []
    for rank in range(len(shape)):
        layout = find_layout(shape, rank)
        assert layout
        wanted.append(layout.find_neighbours(rank))
    for rank, mine in enumerate(wanted):
        assert rank not in mine
        for other in mine:
            assert rank in wanted[other]
            pair = (rank, other, len(shape))
            assert connects_to(*pair) != connects_to(other, rank, len(shape))


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("shape", ["aabb", "abab"])
def test_a_peer_that_closes_is_named(shape: str, rank: int) -> None:
    with hosts(shape) as members:
        sums(members)
        members[rank].close()
        others = [member for member in members if member.rank != rank]
        errors = together(others, closing_after(lambda m: m.all_reduce(np.ones(1_000_000))))
    assert {type(error) for error in errors} == {PeerLostError}
    assert rank in {error.rank for error in errors}


def test_terms_of_several_hosts_are_written_where_they_are_summed() -> None:
    parts = numbers(1_300_003, "float32", 4)
    wanted, found = [part.copy() for part in parts], [np.full_like(part, 7) for part in parts]

    def work(member: Mesh) -> None:
        def write(start: int, out: Any) -> None:
            out[:] = parts[member.rank][start : start + len(out)]

        member.all_reduce(wanted[member.rank])
        member.all_reduce(found[member.rank], terms=write)
        assert member.route == "shared memory and sockets"

    with hosts("aabb") as members:
        assert together(members, work) == [None] * 4
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_silent_peer_is_named_in_the_end() -> None:
    with hosts("aabb", longest=1.0) as members:
        sums(members)
        errors = together(members[1:], lambda m: m.all_reduce(np.ones(1_000_000)))
    assert {error.reason for error in errors} == {"was silent for 1 s"}
    assert 0 in {error.rank for error in errors}


OTHER_CALLS = {
    "size": lambda m: m.all_reduce(np.ones(200_000)),
    "type": lambda m: m.all_reduce(np.ones(200_000, "int64")),
    "kind": lambda m: m.broadcast(np.ones(100_000)),
    "small": lambda m: m.all_reduce(np.ones(10)),
}


@pytest.mark.parametrize("case", OTHER_CALLS)
@pytest.mark.parametrize("others", [{0}, {3}, {0, 1}, {1, 2}, full({0, 2, 3})])
def test_ranks_out_of_step_fail(case: str, others: set[int]) -> None:
    with hosts("aabb") as members:
        sums(members)

        def work(member: Any) -> Any:
            if member.rank in others:
                return OTHER_CALLS[case](member)
            return member.all_reduce(np.ones(100_000))

        errors = together(members, closing_after(work))
    assert any(type(error) is ClusterError for error in errors), errors


TOKEN = new_token()
PROGRAM = """
import socket, sys
import numpy as np
from pybackend.core.collective import join_mesh
from pybackend.core.net.rendezvous import split_address
_, rank, descriptor, token, *peers = sys.argv
if descriptor == "none":
    server = socket.create_server(split_address(peers[int(rank)]))
else:
    server = socket.socket(fileno=int(descriptor))
print("listens", flush=True)
sys.stdin.readline()
mesh = join_mesh(server, peers, int(rank), token, 60)
for count in (300_000, 10, 2_000_003, 100_000):
    buffer = np.arange(count, dtype="float64") * (int(rank) + 1)
    mesh.all_reduce(buffer)
    assert (buffer == np.arange(count) * sum(range(1, len(peers) + 1))).all()
print(mesh.route, flush=True)
sys.stdin.readline()
while True:
    mesh.all_reduce(buffer)
"""


def start(
    stack: ExitStack, rank: int, peers: Sequence[str], enter: Sequence[str] = (), server: Any = None
) -> Any:
    """Start the process of a rank, on a host or with a listening socket."""
    descriptor = server.fileno() if server else "none"
    process = subprocess.Popen(
        [*enter, sys.executable, "-c", PROGRAM, str(rank), str(descriptor), TOKEN, *peers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[server.fileno()] if server else [],
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


def read(processes: Sequence[Any]) -> list[str]:
    """Read a line of each process."""
    return [process.stdout.readline().strip() for process in processes]


def order(processes: Sequence[Any]) -> None:
    """Let processes continue."""
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()


@pytest.mark.parametrize("lost", [0, 3])
def test_if_a_process_is_killed_the_others_name_it_and_leave_nothing(lost: int) -> None:
    with ExitStack() as stack:
        servers = [listen(f"127.0.0.{2 + rank // 2}") for rank in range(4)]
        peers = [address_of(server) for server in servers]
        processes = []
        for rank, server in enumerate(servers):
            with server:
                processes.append(start(stack, rank, peers, server=server))
        assert read(processes) == ["listens"] * 4
        order(processes)
        assert read(processes) == ["shared memory and sockets"] * 4
        order(processes)
        processes[lost].kill()
        errors = [process.communicate(timeout=LONG)[1] for process in processes]
    others = [error for rank, error in enumerate(errors) if rank != lost]
    assert all("PeerLostError: lost worker" in error for error in others), others
    assert any(f"lost worker {lost} on 127.0.0.{2 + lost // 2}" in error for error in others)


def test_between_machines_it_is_encrypted() -> None:
    if problem := no_namespaces():
        pytest.skip(f"no network namespaces: {problem}")
    with ExitStack() as stack, network(["a", "b"]) as made:
        places = [host for host in made.hosts for _ in range(2)]
        peers = [f"{host.address}:{2222 + rank}" for rank, host in enumerate(places)]
        processes = [start(stack, rank, peers, h.enter) for rank, h in enumerate(places)]
        assert read(processes) == ["listens"] * 4
        order(processes)
        assert read(processes) == ["shared memory and encrypted sockets"] * 4
