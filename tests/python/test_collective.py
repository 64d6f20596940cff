"""Collectives: exact results with the same bits on every rank, for any number of ranks."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import full
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import Threads

from pybackend.core.collective import (
    Alone,
    Collective,
    Compression,
    CostModel,
    Mesh,
    Patience,
    all_gather_values,
    all_sum,
    broadcast_value,
    gather_values,
    join_mesh,
)
from pybackend.core.collective import mesh as mesh_module
from pybackend.core.collective.algorithms import count_pairs, find_neighbours, find_partners
from pybackend.core.collective.joining import connects_to
from pybackend.core.errors import ClusterError, InputError, PeerLostError
from pybackend.core.net.authentication import new_token
from pybackend.core.net.rendezvous import address_of, listen

LONG = 120.0  # seconds; an error that comes earlier came at once
SIZES = [0, 1, 7, 1009, 65_536, 300_007]
DTYPES = ["float16", "float32", "float64", "int32", "int64"]


def together(members: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
    """Run all ranks at the same time; return each rank's result or error."""

    def attempt(member: Any) -> Any:
        try:
            return work(member)
        except (PeerLostError, ClusterError) as error:
            return error

    with Threads() as pool:
        return list(pool.map(attempt, members))


def form(
    servers: Sequence[socket.socket],
    token: str,
    timeout: float,
    algorithm: Any = "auto",
    longest: float = LONG,
    encrypt: bool | None = None,
    shares_memory: bool = True,
) -> list[Mesh]:
    peers = [address_of(server) for server in servers]

    def join(rank: int) -> Mesh:
        patience = Patience(longest=longest)
        return join_mesh(
            servers[rank],
            peers,
            rank,
            token,
            timeout,
            algorithm=algorithm,
            patience=patience,
            encrypt=encrypt,
            shares_memory=shares_memory,
        )

    return together(range(len(servers)), join)


@contextmanager
def mesh(
    size: int,
    longest: float = LONG,
    algorithm: Any = "auto",
    host: str = "127.0.0.1",
    **options: Any,
) -> Iterator[list[Any]]:
    """Return all ranks of a mesh; one rank needs no mesh."""
    if size == 1:
        yield [Alone()]
        return
    with ExitStack() as stack:
        servers = [stack.enter_context(listen(host)) for _ in range(size)]
        formed = form(servers, new_token(), LONG, algorithm, longest, **options)
        yield [stack.enter_context(closing(member)) for member in formed]


@pytest.fixture(
    scope="module",
    params=[
        (1, "auto"),
        *((n, a) for n in (2, 3, 4, 5, 8) for a in ("ring", "doubling")),
        *(full((n, a)) for n in (6, 7, 9, 16) for a in ("ring", "doubling")),
        (2, "auto"),
        (3, "auto"),
        *((n, "shared") for n in (2, 3, 5)),
        *(full((n, "shared")) for n in (4, 8)),
    ],
    ids=lambda param: f"N={param[0]}-{param[1]}",
)
def members(request: Any) -> Iterator[list[Collective]]:
    size, algorithm = request.param
    with mesh(size, algorithm=algorithm) as formed:
        yield formed


def numbers(size: int, dtype: Any, ranks: int) -> Any:
    """Return whole numbers whose sums every type represents exactly, in any order."""
    return np.random.default_rng(size).integers(-100, 100, (ranks, size)).astype(dtype)


def test_every_rank_knows_its_number(members: list[Collective]) -> None:
    known = [(member.rank, member.world_size) for member in members]
    assert known == [(rank, len(members)) for rank in range(len(members))]


@pytest.mark.parametrize("dtype", [*DTYPES, "uint8"])
def test_all_reduce_is_numpys_sum(members: list[Collective], dtype: str) -> None:
    for size in SIZES:
        parts = abs(numbers(size, "int64", len(members)) // 10).astype(dtype)
        if np.dtype(dtype).kind != "u":
            parts = numbers(size, dtype, len(members))
        buffers = [part.copy() for part in parts]
        together(members, lambda member, b=buffers: member.all_reduce(b[member.rank]))
        for buffer in buffers:
            assert buffer.dtype == dtype
            np.testing.assert_array_equal(buffer, parts.sum(axis=0, dtype=dtype))


@pytest.mark.parametrize("dtype", [*DTYPES, ml_dtypes.bfloat16])
def test_all_ranks_get_the_same_bits(members: list[Collective], dtype: Any) -> None:
    rng = np.random.default_rng(5)
    parts = (rng.normal(size=(len(members), 4099)) * 1000).astype(dtype)
    buffers = [part.copy() for part in parts]
    together(members, lambda member: member.all_reduce(buffers[member.rank]))
    assert {buffer.tobytes() for buffer in buffers} == {buffers[0].tobytes()}
    wide = parts.astype("float64")
    eps = 0.0 if np.dtype(dtype).kind == "i" else float(ml_dtypes.finfo(dtype).eps)
    error = np.abs(buffers[0].astype("float64") - wide.sum(axis=0))
    assert (error <= eps * len(members) * np.abs(wide).sum(axis=0)).all()


def test_all_reduce_takes_any_shape(members: list[Collective]) -> None:
    buffers = [np.full((2, 3, 4), member.rank + 1.0) for member in members]
    together(members, lambda member: member.all_reduce(buffers[member.rank]))
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, np.full((2, 3, 4), sum(range(len(members) + 1))))


def test_infinities_and_nans_have_the_same_bits_too(members: list[Collective]) -> None:
    buffers = [np.zeros(4099, "float32") for _ in members]
    for rank, buffer in enumerate(buffers):
        buffer[:2000] = np.uint32(0x7FC00000 + rank).view("float32")
        buffer[2000:3000] = np.inf if rank % 2 else -np.inf
        buffer[3000:] = 3e38
    together(members, lambda member: member.all_reduce(buffers[member.rank]))
    assert {buffer.tobytes() for buffer in buffers} == {buffers[0].tobytes()}
    assert np.isnan(buffers[0][:2000]).all()
    assert not np.isfinite(buffers[0][2000:3000]).any()


def test_the_sum_does_not_depend_on_earlier_calls(members: list[Collective]) -> None:
    for size in (1000, 10, 0, 5000, 3):
        results = together(
            members, lambda member, size=size: all_sum(member, np.full(size, member.rank + 1))
        )
        for result in results:
            assert result.tolist() == [sum(range(1, len(members) + 1))] * size


# The last segment is forwarded in several pieces, the last of them incomplete.
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float32", 0),
        ("float32", 1),
        ("int64", 1009),
        ("bool", 1009),
        (ml_dtypes.bfloat16, 1009),
        ("float16", 200_003),
    ],
)
def test_broadcast_from_every_root(members: list[Collective], dtype: Any, size: int) -> None:
    rng = np.random.default_rng(size)
    parts = rng.integers(0, 2, (len(members), size)).astype(dtype)
    for root in {0, 1 % len(members), len(members) // 2, len(members) - 1}:
        buffers = [part.copy() for part in parts]
        together(members, lambda member, b=buffers, r=root: member.broadcast(b[member.rank], r))
        for buffer in buffers:
            np.testing.assert_array_equal(buffer, parts[root])


def test_broadcast_keeps_the_shape_and_every_bit(members: list[Collective]) -> None:
    buffers = [np.full((3, 4, 5), -0.0 if member.rank else np.nan) for member in members]
    wanted = buffers[-1].copy()
    together(members, lambda member: member.broadcast(buffers[member.rank], len(members) - 1))
    for buffer in buffers:
        assert (buffer.shape, buffer.tobytes()) == (wanted.shape, wanted.tobytes())


def cut(size: int, ranks: int) -> list[int]:
    """Return the ends of very unequal parts; some are empty."""
    ends = sorted(size * k * k // (ranks * ranks) for k in range(1, ranks + 1))
    return [0 if size < 100 and rank < ranks - 1 else end for rank, end in enumerate(ends)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", SIZES)
def test_a_scattered_sum_and_a_gather_are_an_all_reduce(
    members: list[Collective], dtype: str, size: int
) -> None:
    ranks = len(members)
    parts, ends = numbers(size, dtype, ranks), cut(size, ranks)
    buffers = [part.copy() for part in parts]
    together(members, lambda m: m.reduce_scatter(buffers[m.rank], ends))
    expected = parts.sum(axis=0)
    for rank, buffer in enumerate(buffers):
        own = slice(ends[rank - 1] if rank else 0, ends[rank])
        np.testing.assert_array_equal(buffer[own], expected[own])
    together(members, lambda m: m.gather_parts(buffers[m.rank], ends))
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, expected)


@pytest.mark.parametrize("algorithm", ["doubling", "shared"])
def test_a_scattered_sum_adds_in_the_order_of_an_all_reduce(algorithm: str) -> None:
    with mesh(3, algorithm=algorithm) as members:
        rng = np.random.default_rng(0)
        parts = [rng.normal(size=70_001).astype("float32") for _ in members]
        whole, scattered = [[part.copy() for part in parts] for _ in range(2)]
        ends = cut(70_001, 3)
        together(members, lambda m: m.all_reduce(whole[m.rank]))
        together(members, lambda m: m.reduce_scatter(scattered[m.rank], ends))
        together(members, lambda m: m.gather_parts(scattered[m.rank], ends))
        assert all(found.tobytes() == whole[0].tobytes() for found in scattered)


def test_ranks_that_cut_a_buffer_differently_fail() -> None:
    with mesh(2) as members:
        ends = [[3, 10], [4, 10]]
        errors = together(members, lambda m: m.reduce_scatter(np.zeros(10), ends[m.rank]))
        assert all(isinstance(error, ClusterError) for error in errors)


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", ml_dtypes.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 40, 5000], ids=lambda rows: f"rows={rows}")
def test_all_gather_of_unequal_parts(members: list[Collective], dtype: Any, rows: int) -> None:
    rng = np.random.default_rng(rows)
    # Rank 1 has no elements.
    counts = [rows * (rank + 2) * (rank != 1) // 2 for rank in range(len(members))]
    parts = [rng.integers(0, 2, (count, 3, 2)).astype(dtype) for count in counts]
    results = together(members, lambda member: member.all_gather(parts[member.rank]))
    for gathered in results:
        assert [array.shape for array in gathered] == [part.shape for part in parts]
        for array, part in zip(gathered, parts, strict=True):
            assert array.dtype == part.dtype
            np.testing.assert_array_equal(array, part)


@pytest.mark.parametrize("length", [1, 30_011])
def test_gather_brings_every_rank_s_part_to_one_alone(
    members: list[Collective], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_module, "_BLOCK", 65_536)
    counts = [length * (rank + 1) * (rank != 1) for rank in range(len(members))]
    parts = [numbers(count, "int32", 1)[0] for count in counts]
    for member in members:
        if isinstance(member, Mesh):
            member.scratch = np.empty(0, np.uint8)
    for root in {0, len(members) - 1}:
        results = together(members, lambda m, r=root: m.gather(parts[m.rank], r))
        assert [len(found) for found in results] == [
            len(members) * (rank == root) for rank in range(len(members))
        ]
        for found, part in zip(results[root], parts, strict=True):
            np.testing.assert_array_equal(found, part)
    for member in members:  # the others buffered at most one block
        assert not isinstance(member, Mesh) or member.scratch.nbytes <= 65_536


def test_all_gather_of_rows_without_content(members: list[Collective]) -> None:
    results = together(members, lambda member: member.all_gather(np.empty((member.rank, 0))))
    for gathered in results:
        assert [array.shape for array in gathered] == [(rank, 0) for rank in range(len(members))]


def test_values_are_shared_as_they_are(members: list[Collective]) -> None:
    values = [{"rank": (rank, "x" * rank), "none": None} for rank in range(len(members))]
    root = len(members) - 1
    found = together(members, lambda member: all_gather_values(member, values[member.rank]))
    assert found == [values] * len(members)
    found = together(members, lambda member: gather_values(member, values[member.rank]))
    assert found == [values, *[[]] * root]
    found = together(members, lambda member: broadcast_value(member, values[member.rank], root))
    assert found == [values[root]] * len(members)


def test_all_sum_keeps_the_shape_and_sums_in_double(members: list[Collective]) -> None:
    summed = together(members, lambda member: all_sum(member, [[2**40, 0.5], [member.rank, 1]]))
    size = len(members)
    for array in summed:
        assert array.dtype == "float64"
        assert array.tolist() == [[size * 2**40, size * 0.5], [size * (size - 1) / 2, size]]


@pytest.mark.parametrize("algorithm", ["auto", "ring", "doubling", "shared"])
@pytest.mark.parametrize("size", [2, 3])
def test_buffers_far_larger_than_what_the_sockets_hold(size: int, algorithm: str) -> None:
    parts = numbers(5_000_011, "float32", size)
    buffers = [part.copy() for part in parts]
    with mesh(size, algorithm=algorithm) as members:
        together(members, lambda member: member.all_reduce(buffers[member.rank]))
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, parts.sum(axis=0))


@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
def test_sockets_that_hold_little_split_every_message(algorithm: str) -> None:
    parts = numbers(40_003, "float64", 3)
    buffers = [part.copy() for part in parts]
    with mesh(3, algorithm=algorithm) as members:
        for member in members:
            for link in member.links.values():
                # The system's minimum; with a receive buffer as small, the loopback itself stalls,
                # because its packets are larger.
                link.stream.set_buffers(sending=1, receiving=4 << 20)
        together(members, lambda member: member.all_reduce(buffers[member.rank]))
        gathered = together(members, lambda member: member.all_gather(parts[member.rank]))
    for buffer, arrays in zip(buffers, gathered, strict=True):
        np.testing.assert_array_equal(buffer, parts.sum(axis=0))
        np.testing.assert_array_equal(np.stack(arrays), parts)


@pytest.fixture(scope="module")
def any_mesh() -> Iterator[dict[int, list[Any]]]:
    with ExitStack() as stack:
        yield {size: stack.enter_context(mesh(size)) for size in (2, 3, 5, 6)}


@settings(max_examples=60)
@given(
    ranks=st.sampled_from([2, 3, 5, 6]),
    size=st.integers(0, 70_000),
    dtype=st.sampled_from([*DTYPES, "uint8", "bool"]),
    algorithm=st.sampled_from(["auto", "ring", "doubling", "shared"]),
)
def test_any_size_type_and_algorithm(
    any_mesh: dict[int, list[Any]], ranks: int, size: int, dtype: str, algorithm: str
) -> None:
    members = any_mesh[ranks]
    parts = abs(numbers(size, "int64", ranks) // 10).astype(dtype)
    buffers, others = [part.copy() for part in parts], [part.copy() for part in parts]

    def work(member: Any) -> Any:
        member.algorithm = algorithm
        member.all_reduce(buffers[member.rank])
        member.broadcast(others[member.rank], ranks - 1)
        return member.all_gather(parts[member.rank][: size * member.rank // ranks])

    gathered = together(members, work)
    for rank in range(ranks):
        np.testing.assert_array_equal(buffers[rank], parts.sum(axis=0, dtype=dtype))
        np.testing.assert_array_equal(others[rank], parts[-1])
        for other, array in enumerate(gathered[rank]):
            np.testing.assert_array_equal(array, parts[other][: size * other // ranks])


def test_the_cost_model_is_the_same_on_all_ranks() -> None:
    with mesh(3) as members:
        assert len({member.cost_model for member in members}) == 1
        model = members[0].cost_model
    assert 0 < model.latency_seconds < 0.1
    assert 0 < model.seconds_per_byte < 1e-6
    assert 0 < model.add_seconds_per_byte < 1e-7


def test_memory_is_used_again() -> None:
    with mesh(2) as members:
        for algorithm in ("ring", "doubling"):
            buffers = [np.ones(100_000) for _ in members]

            def reduce(member: Any, algorithm: Any = algorithm, buffers: Any = buffers) -> int:
                member.algorithm = algorithm
                member.all_reduce(buffers[member.rank])
                return id(member.scratch)

            first = together(members, reduce)
            assert together(members, reduce) == first


def test_a_buffer_that_is_not_contiguous_is_refused() -> None:
    with mesh(2) as members:
        for work in (
            lambda: members[0].all_reduce(np.zeros(10)[::2]),
            lambda: members[0].broadcast(np.zeros((4, 4)).T),
            lambda: members[0].all_gather(np.float64(1.0)),
        ):
            with pytest.raises(InputError, match="needs a contiguous array"):
                work()


def test_a_root_that_is_not_a_rank_is_refused() -> None:
    with mesh(2) as members, pytest.raises(InputError, match="root must be a rank below 2, not 2"):
        members[0].broadcast(np.zeros(3), 2)


def test_compression_is_for_float32() -> None:
    with mesh(2) as members, pytest.raises(InputError, match=r"needs a float32 buffer.*float64"):
        members[0].all_reduce(np.zeros(10), Compression("fp16"))


@pytest.mark.parametrize("size", range(2, 40))
def test_the_connections_of_all_ranks_match(size: int) -> None:
    for rank in range(size):
        mine = find_neighbours(rank, size)
        assert rank not in mine
        assert {(rank + 1) % size, (rank - 1) % size} <= set(mine)
        assert len(mine) <= 2 + size.bit_length()
        for other in mine:
            assert rank in find_neighbours(other, size)
            assert connects_to(rank, other, size) != connects_to(other, rank, size)
        if size > 2:
            assert connects_to(rank, (rank + 1) % size, size)


@pytest.mark.parametrize("size", range(2, 40))
def test_doubling_brings_every_ranks_part_to_all(size: int) -> None:
    has = [{rank} for rank in range(size)]
    for rank in range(2 * count_pairs(size)):
        has[rank - rank % 2] |= {rank}
    active = [rank for rank in range(size) if find_partners(rank, size)]
    for turn in range(size.bit_length() - 1):
        before = [set(found) for found in has]
        for rank in active:
            partner = find_partners(rank, size)[turn]
            assert find_partners(partner, size)[turn] == rank
            assert not before[rank] & before[partner]
            has[rank] = before[rank] | before[partner]
    assert all(has[rank] == set(range(size)) for rank in active)
    assert len(active) & (len(active) - 1) == 0


def test_importing_it_does_not_import_tensorflow() -> None:
    program = (
        "import sys, pybackend.core.collective;"
        "print(sorted({'tensorflow', 'ml_dtypes'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert shown.stdout == b"[]\n"


def test_ipv6() -> None:
    try:
        listen("::1").close()
    except ClusterError:
        pytest.skip("this machine has no IPv6")
    with mesh(3, host="::1") as members:
        sums = together(members, lambda member: all_sum(member, [member.rank]))
    assert [array.tolist() for array in sums] == [[3.0]] * 3


@pytest.mark.parametrize(("gbit", "megabytes"), [(0.01, 1), (1, 2.5), (10, 25), (1000, 64)])
def test_a_bucket_of_two_hosts_takes_about_20_ms(gbit: float, megabytes: float) -> None:
    with mesh(2, shares_memory=False) as members:
        for member in members:
            member.cost_model = CostModel(25e-6, 8e-9 / gbit, 1e-10)
        found = together(members, lambda m: m.choose_bucket_bytes(has_idle=False))
    assert found == pytest.approx([1e6 * megabytes] * 2)


@pytest.mark.parametrize("idle", [0, 1])
@pytest.mark.parametrize("is_one_host", [True, False])
def test_a_bucket_of_more_ranks_depends_on_no_measurement(is_one_host: bool, idle: int) -> None:
    with mesh(3, shares_memory=is_one_host) as members:
        found = together(members, lambda m: m.choose_bucket_bytes(has_idle=m.rank < idle))
    # Ranks of one host without an idle core send at the end.
    assert found == [math.inf if is_one_host and not idle else 25e6] * 3


@pytest.mark.parametrize("kind", [None, "bf16"])
@pytest.mark.parametrize("algorithm", ["auto", "ring", "doubling"])
def test_terms_that_are_written_where_they_are_summed(algorithm: Any, kind: Any) -> None:
    """Also of more than one slot, and with a buffer that has other values."""
    for count in (10, 70_001, 1_300_003):
        parts = numbers(count, "float32", 3)
        wanted, found = [part.copy() for part in parts], [np.full_like(p, 7) for p in parts]
        codecs = [[Compression(kind) if kind else None for _ in parts] for _ in range(2)]

        def write(start: int, out: Any, rank: int) -> None:
            out[:] = parts[rank][start : start + len(out)]  # noqa: B023

        with mesh(3, algorithm=algorithm) as members:
            together(members, lambda m: m.all_reduce(wanted[m.rank], codecs[0][m.rank]))  # noqa: B023
            together(
                members,
                lambda m: m.all_reduce(
                    found[m.rank],  # noqa: B023
                    codecs[1][m.rank],  # noqa: B023
                    lambda start, out: write(start, out, m.rank),
                ),
            )
        for one, other in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(one, other)
    alone = np.zeros(3)
    Alone().all_reduce(alone, terms=lambda start, out: out.fill(start + 1))
    assert alone.tolist() == [1, 1, 1]
