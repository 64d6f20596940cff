"""Memory that the ranks of a host share: when it is used, and that nothing of it is left."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_collective import mesh, numbers, together

from pybackend.collective import mesh as mesh_module
from pybackend.collective import shared


def sums(members: list[Any], count: int = 100_003) -> None:
    """Check a sum of all ranks."""
    parts = numbers(count, "float32", len(members))
    buffers = [part.copy() for part in parts]
    together(members, lambda member: member.all_reduce(buffers[member.rank]))
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, parts.sum(axis=0))


def list_open() -> list[str]:
    """Return the files of this process that are shared memory, open or mapped."""
    found = Path("/proc/self/maps").read_text().splitlines()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the folder itself
            found.append(str(link.readlink()))
    return [name for name in found if "memfd:tfdist" in name]


def test_ranks_of_one_host_share_memory_and_leave_nothing() -> None:
    with mesh(2) as members:
        assert all(member.shared for member in members)
        sums(members)
        # Large sums are faster in memory than over sockets; one number is as fast.
        assert members[0]._choose_sum(1 << 26, 1 << 26, False) == "shared"
        assert members[0]._choose_sum(8, 8, False) == "doubling"
    assert list_open() == []


def test_encrypted_ranks_share_nothing() -> None:
    with mesh(2, encrypt=True) as members:
        assert not any(member.shared for member in members)
        sums(members)


def fail(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["memfd_create", "posix_fallocate"])
def test_a_system_without_memory_for_it_uses_sockets(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(os, name, fail)
    with mesh(3) as members:
        assert not any(member.shared for member in members)
        sums(members)
    assert list_open() == []


def test_if_one_rank_cannot_open_it_all_use_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def open_once(offer: bytes, world_size: int) -> mmap.mmap | None:
        seen.append(world_size)
        return shared.open_memory(offer, world_size) if len(seen) == 1 else None

    monkeypatch.setattr(mesh_module, "open_memory", open_once)
    with mesh(3) as members:
        assert len(seen) == 2
        assert not any(member.shared for member in members)
        sums(members)


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


def test_many_ranks_get_smaller_slots() -> None:
    assert shared._size_of(4096) < 65 << 20
