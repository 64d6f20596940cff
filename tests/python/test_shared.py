"""Memory that the ranks of a host share: when it is used, and that nothing of it is left."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_collective import mesh, numbers, together

from pybackend.core.collective import Compression, shared
from pybackend.core.collective import mesh as mesh_module
from pybackend.core.net.authentication import new_token
from pybackend.core.net.rendezvous import address_of, listen


def sums(members: list[Any], count: int = 100_003) -> None:
    """Check a sum of all ranks."""
    parts = numbers(count, "float32", len(members))
    buffers = [part.copy() for part in parts]
    together(members, lambda member: member.all_reduce(buffers[member.rank]))
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, parts.sum(axis=0))


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
        sums(members, 1000)
        assert list_open() == []  # a small buffer fits one message
        assert members[0].route == "sockets"
        sums(members)
        assert members[0].route == "shared memory"
        assert all(member.shared for member in members)
        assert list_open()
    assert list_open() == []


PROGRAM = """
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
                [sys.executable, "-c", PROGRAM, *order],
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
        sums(members)
        assert list_open() == []


def test_encrypted_ranks_share_nothing() -> None:
    with mesh(2, encrypt=True) as members:
        sums(members)
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
        sums(members)
        assert not any(member.shared for member in members)
    assert list_open() == []


def test_if_one_rank_cannot_open_it_all_use_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def open_once(offer: bytes, world_size: int) -> mmap.mmap | None:
        seen.append(world_size)
        return shared.open_memory(offer, world_size) if len(seen) == 1 else None

    monkeypatch.setattr(mesh_module, "open_memory", open_once)
    with mesh(3) as members:
        sums(members)
        sums(members)
        assert len(seen) == 2  # each tried once
        assert not any(member.shared for member in members)


def offer(change: Callable[[tuple[int, int, bytes]], tuple[int, int, bytes]]) -> Any:
    """Return what opens from an offer that was changed."""
    with ExitStack() as until:
        offered, memory = shared.offer_memory(2, until)
        assert memory is not None
        return shared.open_memory(shared._OFFER.pack(*change(shared._OFFER.unpack(offered))), 2)


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
    assert shared.open_memory(shared.NO_OFFER, 2) is None


def test_many_ranks_get_smaller_slots_or_none() -> None:
    assert 32 << 20 < shared._size_of(100) < shared._size_of(4096) < 65 << 20
    with ExitStack() as until:
        assert shared.offer_memory(1 << 20, until) == (shared.NO_OFFER, None)
